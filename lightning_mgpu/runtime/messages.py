"""What the lead tells its workers, and what they answer: one class per message, checked by class on arrival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_mgpu.mesh import Mesh
from lightning_mgpu.runtime.modes import Modes
from lightning_mgpu.runtime.pack import Packed
from lightning_mgpu.runtime.settings import Changes

__all__ = [
    "AddPlan",
    "Answer",
    "Backward",
    "Clip",
    "Collect",
    "Done",
    "Failure",
    "Forward",
    "Free",
    "GivenGradients",
    "HandOver",
    "Hello",
    "Load",
    "Optimizers",
    "Reset",
    "SaveShard",
    "SetFlags",
    "ShardPlan",
    "ShardWritten",
    "Ship",
    "State",
    "Step",
    "Surrender",
    "Sync",
    "Train",
    "WriteShard",
    "ZeroGrad",
]


@dataclass
class Hello:
    """Worker: is ready."""

    process: int
    pid: int


@dataclass
class Reset:
    """Lead: forget what there is of an earlier module, and stand in this mesh from now on."""

    mesh: Mesh


@dataclass
class Load:
    """Lead: own these tensors; the packed object is (tensors, gradients) by name, ``kinds`` says what each is."""

    packed: Packed
    kinds: Mapping[str, str]


@dataclass
class Ship:
    """Lead: have these leaf modules; the packed object is a dict of them by path."""

    packed: Packed


@dataclass
class AddPlan:
    """Lead: know this plan; the packed object is (stages by rows and index, uses of shared parameters by name)."""

    number: int
    packed: Packed


@dataclass
class SetFlags:
    """Lead: set ``training`` of modules (and those below them) by path, and ``requires_grad`` of parameters by name."""

    training: Mapping[str, Modes]
    requires_grad: Mapping[str, bool]


@dataclass
class Forward:
    """Lead: run the forward of one call; sizes are rows of each microbatch, over all replicas."""

    call: int
    schedule: str
    plan: int
    sizes: tuple[int, ...]
    grad: bool
    inference: bool
    seed: int
    timed: bool
    recomputed: frozenset[int] = frozenset()


@dataclass
class Backward:
    """Lead: run the backward of one call; ``given`` says for each microbatch which wanted tensors have gradients."""

    call: int
    given: tuple[frozenset[int], ...]
    retain: bool
    accumulate: bool


@dataclass
class Train:
    """Lead: run forwards and backwards of one step, in the schedule's own order.

    Attributes:
        call: number of the call.
        schedule: name of the schedule.
        microbatches: plan and rows of each, over all replicas.
        seed: seed of its random numbers.
        timed: whether to note what is done when.
        recomputed: the stages that are run again before their backwards.
    """

    call: int
    schedule: str
    microbatches: tuple[tuple[int, int], ...]
    seed: int
    timed: bool
    recomputed: frozenset[int] = frozenset()


@dataclass
class GivenGradients:
    """Lead, during `Train`: the wanted tensors of this microbatch that have a gradient."""

    call: int
    microbatch: int
    given: frozenset[int]


@dataclass
class HandOver:
    """Lead: add the gradients of the last `Train`, times ``factor``, to those of the parameters."""

    factor: float


@dataclass
class Free:
    """Lead: forget what these calls keep for a backward, and these plans."""

    calls: tuple[int, ...]
    plans: tuple[int, ...] = ()


@dataclass
class Optimizers:
    """Lead: have these optimizers; the packed object is a list of them, each with this owner's parameters only.

    ``owners`` holds, for each optimizer, the owners of the shared parameters it steps.
    """

    packed: Packed
    owners: tuple[Mapping[str, frozenset[int]], ...]


@dataclass
class Step:
    """Lead: step one optimizer, changed like this since it was last stepped; ``kwargs`` are those of the user's call."""

    optimizer: int
    changes: Changes
    kwargs: Mapping[str, Any]


@dataclass
class ZeroGrad:
    """Lead: forget gradients of these parameters."""

    names: tuple[str, ...]
    set_to_none: bool


@dataclass
class Clip:
    """Lead: multiply the gradients of these parameters by ``factor``, or clamp them to ``±bound``."""

    names: tuple[str, ...]
    factor: float | None
    bound: float | None


@dataclass
class Collect:
    """Lead: answer with ``what``: "values", "gradients" or "norms" (of gradients) of ``names``, "optimizers", or "events".

    "optimizer" asks for one of them, by its index and the ``names`` of the parameters whose state is wanted.
    """

    what: str
    names: tuple[Any, ...] = ()


@dataclass
class Answer:
    """Worker: answers `Collect`."""

    what: str
    packed: Packed


@dataclass
class SaveShard:
    """Lead: plan the writing of this process's part of a sharded checkpoint, and answer with `ShardPlan`.

    Attributes:
        folder: where each process writes its file.
        tensors: names of parameters and buffers to write, by their keys in the module's ``state_dict``.
        states: for each optimizer the names of the parameters whose state to write.
        background: whether what is written is to be what is there now, while other messages are carried out.
    """

    folder: str
    tensors: Mapping[str, str]
    states: tuple[tuple[str, ...], ...]
    background: bool


@dataclass
class ShardPlan:
    """Worker: would write this, a plan of ``torch.distributed.checkpoint`` without tensors, or says why it can't."""

    plan: Any
    error: str | None = None


@dataclass
class WriteShard:
    """Lead: write what was planned, numbered like this, and answer with `ShardWritten`."""

    plan: Any


@dataclass
class ShardWritten:
    """Worker: has written its part, or could not; may come at any time, also between other answers."""

    results: Any
    error: str | None = None


@dataclass
class Sync:
    """Lead: answer with `Done` when all that was said before is done."""


@dataclass
class Done:
    """Worker: answers `Sync`."""


@dataclass
class Surrender:
    """Lead: something broke; answer with `State` over the control connection and end."""


@dataclass
class State:
    """Worker: everything it owns, in one pickle, since the data plane may be broken."""

    pickled: bytes


@dataclass
class Failure:
    """Worker: broke.

    Attributes:
        stage, microbatch, doing: where; ``None`` for the stage outside a stage's work.
        raised_at_s: when, on the monotonic clock, which all processes of a host share.
        is_communication: whether it is only the victim of another process's end.
        exception: the pickled exception, or ``None`` where it can't be pickled.
        summary: class and message of the exception.
        traceback: its traceback as text.
    """

    stage: int | None
    microbatch: int | None
    doing: str
    raised_at_s: float
    is_communication: bool
    exception: bytes | None
    summary: str
    traceback: str
    state: bytes | None = field(default=None, repr=False)
