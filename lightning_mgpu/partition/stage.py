"""Stages: one program per process, run for each microbatch of a call, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mgpu.errors import RecordingError
from lightning_mgpu.partition.batchnorm import DeferredStatistics
from lightning_mgpu.partition.devices import StageDevices
from lightning_mgpu.partition.program import Environment, Program, Store
from lightning_mgpu.partition.split_backward import SplitBackward

__all__ = ["Crossing", "Stage", "StageRun"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Is a tensor on its way between stages, or between a stage and the caller.

    Attributes:
        register: its register.
        shape, dtype: what the recording saw.
        requires_grad: whether a gradient comes back for it.
        reached_by: positions among the wanted tensors whose gradient reaches it; it gets one when any of them does.
    """

    register: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    reached_by: frozenset[int]

    def has_gradient(self, given: frozenset[int]) -> bool:
        """Says whether a gradient comes back when the wanted tensors in ``given`` have one."""
        return self.requires_grad and not self.reached_by.isdisjoint(given)


@dataclass
class Stage:
    """Is what one process runs for one microbatch.

    Attributes:
        program: the steps.
        receives: registers that come from the stage before, in order, with their description.
        sends: registers that go to the stage after, in order, with their description; the last stage's go to the caller.
        inputs: registers of arguments the stage takes from the caller directly: all it needs on the first and on the
            last stage, none on the others.
        names: parameters and buffers it uses.
        is_repeatable: whether running it again after the call gives the same, since it uses no buffer that the call changes.
    """

    index: int
    program: Program
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    inputs: tuple[Crossing, ...]
    names: tuple[str, ...]
    is_repeatable: bool = True


@dataclass(frozen=True)
class _Kept:
    """Is what the backward of one microbatch needs: what a stage was given, and what it sent, unless that is recomputed."""

    stage: Stage
    given: Environment
    sent: Environment | None = None


class StageRun:
    """Runs one stage for the microbatches of one call, and their backwards.

    Keeps for each microbatch what its backward needs: the received tensors, whose gradients go back, and the sent ones.

    Args:
        store: where modules and tensors are found.
        microbatches: the microbatches of the batch that this replica runs; they are counted from 0 here all the same.
        grad: whether a backward may follow.
        inference: whether grad-free steps run under inference mode.
        seed: seed of the call's random numbers.
        alone: whether each microbatch was recorded by itself, as a batch of its own.
        recompute: whether to keep only what was received, and to run the stage again before its backward (activation
            checkpointing, Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
        replicated: whether other replicas run the stage too, for other microbatches of the batch: then running statistics of
            batch norms wait for theirs.
        devices: where the stages of this process are, if on several devices.
    """

    def __init__(  # noqa: PLR0913 - what a run is made of
        self,
        store: Store,
        microbatches: range,
        *,
        grad: bool,
        inference: bool,
        seed: int,
        alone: bool = False,
        recompute: bool = False,
        replicated: bool = False,
        devices: StageDevices | None = None,
    ) -> None:
        self.store = store
        self.replicated = replicated
        self.devices = devices
        self.first, self.num_microbatches = microbatches.start, len(microbatches)
        self.alone = alone
        self.recompute = recompute
        self.grad = grad
        self.inference = inference
        self.seed = seed
        self.statistics = DeferredStatistics() if len(microbatches) > 1 or replicated else None
        self._kept: dict[int, _Kept] = {}
        self._split: dict[int, SplitBackward] = {}

    def forward(self, stage: Stage, microbatch: int, received: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the stage on one microbatch.

        Args:
            stage: the stage, for this microbatch's size.
            microbatch: index of the microbatch.
            received: tensors of ``stage.receives``.
            inputs: tensors of ``stage.inputs``.

        Returns:
            The tensors of ``stage.sends``, without gradient history.

        Raises:
            RecordingError: where a tensor is not what the recording saw.
        """
        environment: Environment = {}
        given = [*zip(stage.receives, received, strict=True), *zip(stage.inputs, inputs, strict=True)]
        for crossing, tensor in given:
            leaf = self._here(tensor.detach(), stage)
            environment[crossing.register] = leaf.requires_grad_() if self.grad and crossing.requires_grad else leaf
        again = self.grad and self.recompute and stage.is_repeatable
        kept = _Kept(stage, dict(environment))
        sent = self._run(stage, microbatch, environment, self.statistics, grad=not again)
        for crossing in stage.sends:
            _check_meta(sent[crossing.register], crossing, stage, grad=self.grad)
        if self.grad:
            self._kept[microbatch] = kept if again else dataclasses.replace(kept, sent=sent)
        if microbatch == self.num_microbatches - 1 and self.statistics is not None and not self.replicated:
            self.statistics.commit()
        return [value.detach() for value in sent.values()]

    def _run(
        self, stage: Stage, microbatch: int, environment: Environment, statistics: DeferredStatistics | None, *, grad: bool
    ) -> Environment:
        """Runs the stage's program, and returns what it sends by register."""
        with self._at_work(stage, grad=grad and self.grad), _seeded(self.seed, stage.index, self.first + microbatch):
            environment = stage.program.run(
                environment, self.store, microbatch=0 if self.alone else microbatch,
                num_microbatches=1 if self.alone else self.num_microbatches, statistics=statistics,
                inference=self.inference, grad=grad,
            )  # fmt: skip
        return {crossing.register: environment[crossing.register] for crossing in stage.sends}

    def _here(self, tensor: Tensor, stage: Stage) -> Tensor:
        return tensor if self.devices is None else self.devices.move(tensor, self.devices.of(stage.index))

    def _at_work(self, stage: Stage, *, grad: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.devices is None else self.devices.at_work(stage.index, stage.names, grad=grad)

    def _returned(self, found: Mapping[int, Tensor | None], stage: Stage) -> dict[int, Tensor]:
        """Leaves out what has no gradient, and returns those of arguments where the arguments are."""
        made = {register: gradient for register, gradient in found.items() if gradient is not None}
        if self.devices is not None:
            arguments = {crossing.register for crossing in stage.inputs}
            made = {r: self.devices.move(g, self.devices.home) if r in arguments else g for r, g in made.items()}
        return made

    def _take(self, microbatch: int, *, retain: bool) -> tuple[Stage, Environment, dict[int, Tensor]]:
        """Returns the stage of one microbatch, what it sent with its history, and the tensors whose gradients go back."""
        kept = self._kept.pop(microbatch)
        if kept.sent is None:  # batch norms have noted their statistics already
            sent = self._run(kept.stage, microbatch, dict(kept.given), DeferredStatistics(), grad=True)
            kept = dataclasses.replace(kept, sent=sent)
        if retain:
            self._kept[microbatch] = kept
        assert kept.sent is not None
        return kept.stage, kept.sent, {r: t for r, t in kept.given.items() if t.requires_grad}

    def backward(
        self, microbatch: int, gradients: Mapping[int, Tensor], *, retain: bool, accumulate: bool
    ) -> dict[int, Tensor]:
        """Runs the backward of one microbatch.

        Args:
            microbatch: index of the microbatch.
            gradients: the gradients of sent tensors, by register; what is missing has none.
            retain: whether another backward of the same call may follow.
            accumulate: whether parameters' gradients are added up, as ``loss.backward()`` does and
                ``torch.autograd.grad`` does not.

        Returns:
            The gradients of received tensors and inputs, by register; what has none is missing.
        """
        stage, sent, leaves = self._take(microbatch, retain=retain)
        roots, seeds = _roots(sent, {r: self._here(gradient, stage) for r, gradient in gradients.items()})
        if not roots:
            return {}
        if accumulate:
            for leaf in leaves.values():
                leaf.grad = None
            torch.autograd.backward(roots, seeds, retain_graph=retain)
            found = {register: leaf.grad for register, leaf in leaves.items()}
            for leaf in leaves.values():
                leaf.grad = None
        elif leaves:
            grads = torch.autograd.grad(roots, list(leaves.values()), seeds, retain_graph=retain, allow_unused=True)
            found = dict(zip(leaves, grads, strict=True))
        else:
            found = {}
        return self._returned(found, stage)

    def backward_of_inputs(self, microbatch: int, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Runs the part of one microbatch's backward that the stage before waits for.

        Args:
            microbatch: index of the microbatch.
            gradients: the gradients of sent tensors, by register; what is missing has none.

        Returns:
            The gradients of received tensors and inputs, by register; what has none is missing.
        """
        stage, sent, leaves = self._take(microbatch, retain=False)
        weights = [self.store.tensor(name) for name in stage.names]
        split = SplitBackward(*_roots(sent, gradients), leaves, [w for w in weights if w.is_leaf and w.requires_grad])
        self._split[microbatch] = split
        return split.inputs()

    def backward_of_weights(self, microbatch: int) -> None:
        """Runs the rest of one microbatch's backward, which adds up the gradients of the stage's parameters."""
        self._split.pop(microbatch).weights()


def _roots(sent: Environment, gradients: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Pairs what was sent with its gradient, as far as autograd can start there."""
    pairs = [(sent[r], gradient) for r, gradient in gradients.items() if sent[r].requires_grad]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


def _check_meta(value: Tensor, meta: Crossing, stage: Stage, *, grad: bool) -> None:
    if tuple(value.shape) != meta.shape or value.dtype != meta.dtype:
        raise RecordingError(
            f"stage {stage.index} made a tensor of shape {tuple(value.shape)} and {value.dtype} where the recording saw "
            f"{meta.shape} and {meta.dtype}: its shape follows from numbers in the batch or from weights; put the calls "
            "that make it and use it into one submodule"
        )
    if grad and value.requires_grad and not meta.requires_grad:
        raise RecordingError(
            f"stage {stage.index} made a tensor of shape {meta.shape} that needs a gradient where the recording saw none"
        )


class _seeded:  # noqa: N801 - used as a context manager
    """Gives one stage and microbatch random numbers of their own, and puts the generators back at the end.

    The lead's generators are never advanced by a stage, so the user's own draws are those of one device.
    """

    def __init__(self, seed: int, stage: int, microbatch: int) -> None:
        self.seed = (seed * 1_000_003 + stage * 10_007 + microbatch) % (2**63)

    def __enter__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        torch.default_generator.manual_seed(self.seed)
        if self.cuda is not None:
            torch.cuda.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
