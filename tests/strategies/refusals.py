"""What the pipeline says of each module that it can't train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_mgpu.errors import PartitionError, PlacementError, RecordingError, SelfCheckError
from tests.strategies import hooked, refused


@dataclass(frozen=True)
class Refusal:
    """Is one module, how it is cut, and what its refusal says.

    Attributes:
        module: Builds the module; its class names the refusal.
        error: The class of the error.
        says: Parts of its text, in order.
        line: A part of the line of the forward that the text names.
        strategy: Arguments of the pipeline.
        num_stages: The number of stages.
        variant: Added to the name.
    """

    module: Callable[[], LightningModule]
    error: type[Exception]
    says: tuple[str, ...]
    line: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    num_stages: int = 2
    variant: str = ""

    @property
    def name(self) -> str:
        kind = getattr(self.module, "func", self.module)
        return " ".join(filter(None, [kind.__name__, self.variant]))


REMEDY_OF_BATCH = 'Use num_microbatches=1 if it looks across the batch, or pipeline another module with module="..."'
FOUR = {"num_microbatches": 4}
REFUSALS = [
    Refusal(
        refused.Plain,
        PartitionError,
        ("cuts=['fc3', 'fc2'] are out of order; the forward calls them as cuts=['fc2', 'fc3']",),
        strategy={"cuts": ["fc3", "fc2"]},
        num_stages=3,
        variant="cuts out of order",
    ),
    Refusal(
        refused.Plain,
        PartitionError,
        ("cut 'fc1' begins the forward, so no stage would lie before it; name a later module",),
        strategy={"cuts": ["fc1"]},
        variant="cut before everything",
    ),
    Refusal(
        refused.BackToTheEncoder,
        PartitionError,
        ("cuts 'decoder' and 'decoder.0' lie at the same place, so a stage would be empty; drop one",),
        strategy={"cuts": ["decoder", "decoder.0"]},
        num_stages=3,
        variant="two cuts at one place",
    ),
    Refusal(
        refused.WithSpareLayers,
        PartitionError,
        ("cut 'spare' names a module that the forward does not call; name one that it calls",),
        strategy={"cuts": ["spare"]},
        variant="cut there",
    ),
    Refusal(
        refused.GuardOnWeights,
        RecordingError,
        (
            "cannot record the forward of GuardOnWeights: it takes a Python value (__bool__) from a tensor that depends on",
            ", and no module of yours stands around this line that could run as one piece; move these lines into a submodule's",
        ),
        line="if h.sum() > 0",
    ),
    Refusal(
        refused.EarlyMean,
        PartitionError,
        ("mean (", ") looks across the whole batch in the middle of EarlyMean: 89% of the work follows", "num_microbatches=1"),
        line="h.mean(0)",
        strategy=FOUR,
    ),
    Refusal(
        refused.SoftmaxOverRows,
        SelfCheckError,
        ("the stages don't compute what the module computes: softmax (", ") #1 is the first to differ", REMEDY_OF_BATCH),
        line="softmax(dim=0)",
        strategy=FOUR,
    ),
    Refusal(
        refused.FlippedRows,
        SelfCheckError,
        ("the stages don't compute what the module computes: flip (", ") #1 is the first to differ", REMEDY_OF_BATCH),
        line="flip(0)",
        strategy=FOUR,
    ),
    Refusal(
        refused.SumOverEarlierRows,
        SelfCheckError,
        ("the stages don't compute what the module computes: cumsum (", ") #1 is the first to differ", REMEDY_OF_BATCH),
        line="cumsum(0)",
        strategy=FOUR,
    ),
    Refusal(
        refused.ThroughNumpy,
        RecordingError,
        ("takes a Python value (numpy) from a tensor that depends on weights", "could run as one piece"),
        line="h.detach().numpy()",
    ),
    *[
        Refusal(
            module,
            RecordingError,
            (
                f"cannot record the forward of {module.__name__} (",
                "): it draws from Python's or NumPy's random numbers, which a recording can't repeat; use torch.rand",
            ),
            line="@override",
        )
        for module in (refused.PythonsRandom, refused.NumpysRandom)
    ],
    *[
        Refusal(
            module,
            RecordingError,
            (
                f"cannot record the forward of {module.__name__} (",
                f"): it changes the attribute {name!r}, which a replayed forward would not do again; change it in",
            ),
            line="@override",
        )
        for module, name in ((refused.CountsItsCalls, "num_calls"), (refused.ListsItsShapes, "shapes"))
    ],
    Refusal(
        refused.HooksAValue,
        RecordingError,
        ("it calls register_hook, which can't be carried out on another stage at ",),
        line="register_hook",
    ),
    *[
        Refusal(
            module,
            PlacementError,
            (
                "parameter 'fc1.weight' has a hook on its gradient, which can't run on another stage",
                "change the gradient in on_after_backward, inside self.trainer.strategy.summon_parameters()",
            ),
        )
        for module in (hooked.HookedParameter, hooked.HookAfterAccumulation)
    ],
    Refusal(
        refused.ChangesItsArgument,
        RecordingError,
        ("the forward of ChangesItsArgument changes an argument in place (mul_ (", "work on a copy, as in x = x.clone()"),
        line="mul_",
    ),
    Refusal(
        refused.NoTensorInTheCall,
        RecordingError,
        ("the call of NoTensorInTheCall got no tensor, so there is no batch to split; pass the batch's tensors as arguments",),
    ),
    Refusal(
        refused.BackToTheEncoder,
        PlacementError,
        (
            "encoder.0 (",
            ") uses weights of stage 0 after decoder.2 (",
            ") used those of stage 1, against the order of the stages; call the parts of a placed module in the order of its",
        ),
    ),
    Refusal(
        refused.OnlySingleLayers,
        PartitionError,
        ("training_step called no module with at least 2 layers, so there was nothing to cut into 2 stages; call self(x) or",),
    ),
    Refusal(
        refused.WithSpareLayers,
        PartitionError,
        ("training_step never called 'spare', the module to pipeline; name one it calls",),
        strategy={"module": "spare"},
        variant="and nothing else",
    ),
    Refusal(
        refused.GradientPenalty,
        PlacementError,
        (
            "second derivatives through a pipelined module are not possible (create_graph=True); compute the inner gradient in",
            'or use devices=1 with strategy="auto"',
        ),
    ),
    Refusal(
        partial(refused.TwoBackwards, retain=False),
        PlacementError,
        ("a second backward through one call of a pipelined module; use backward(retain_graph=True) in the first",),
    ),
    Refusal(
        refused.WithLbfgs,
        PlacementError,
        ("LBFGS needs all parameters and gradients in one process, but a pipeline of 2 stages keeps them with their stages",),
    ),
]
