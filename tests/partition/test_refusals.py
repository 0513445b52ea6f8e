"""Forwards that can't run over stages: each is refused before anything is placed, with the reason and what to do."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.errors import MgpuError, PartitionError, RecordingError, SelfCheckError, ShippingError
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.record import Recorder
from tests.partition.forwards.control import Three
from tests.partition.in_process import InProcess


class PlainCounter(Three):
    def __init__(self) -> None:
        super().__init__()
        self.hits = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.hits.add_(1)
        return self.fc3(self.fc2(self.fc1(x)) + self.hits)


class ChangedArgument(Three):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return self.fc3(self.fc2(self.fc1(x)))


class PythonCounter(Three):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc3(self.fc2(self.fc1(x)))


class GrowingList(Three):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        self.seen.append(h.detach())
        return self.fc3(self.fc2(h))


class HiddenToNumpy(Three):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc3(self.fc2(h)) * float(h.detach().numpy().max())


class EarlyExit(Three):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc3(h) if h.abs().max() > 100 else self.fc3(self.fc2(h))


class HookOnHidden(Three):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h.register_hook(lambda gradient: gradient * 2)
        return self.fc3(self.fc2(h))


class LayersInAList(Three):
    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.more[0](self.fc2(self.fc1(x))))


class OtherMode(Three):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.fc3(self.fc2(self.norm(self.fc1(x))))


class LazyLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.LazyLinear(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class Vectorised(Three):
    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc3(self.fc2(torch.vmap(lambda w: h @ w)(self.ws).sum(0)))


class SeedsItself(Three):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.fc3(self.fc2(self.fc1(x) + torch.randn(8)))


class OwnGenerator(Three):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.fc1(x) + torch.randn(8, generator=self.generator)))


class ClampedEverywhere(Three):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.5, 0.5)
        return self.fc3(self.fc2(self.fc1(x)))


WEIGHTS = r"takes a Python value \({}\) from a tensor that depends on weights .* at .*test_refusals.py:\d+ in forward"
MADE = r"uses a tensor of shape \({}\) that is no argument, parameter or buffer .* register it as a parameter or buffer"


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (PlainCounter, RecordingError, r"changes in place a tensor that is no buffer of it \(add_ .*register it as a buffer"),
        (
            ChangedArgument,
            RecordingError,
            r"changes an argument in place \(__setitem__ .*work on a copy, as in x = x.clone\(\)",
        ),
        (PythonCounter, RecordingError, r"changes the attribute 'calls', .* or keep it as a buffer"),
        (GrowingList, RecordingError, r"changes the attribute 'seen', .* change it in training_step"),
        (HiddenToNumpy, RecordingError, WEIGHTS.format("numpy")),
        (EarlyExit, RecordingError, WEIGHTS.format("__bool__")),
        (HookOnHidden, RecordingError, r"calls register_hook, which can't be carried out on another stage at"),
        (LayersInAList, RecordingError, MADE.format("8, 8")),
        (OtherMode, RecordingError, r"forward of OtherMode .*puts 'norm' in another mode, .* override train\(\)"),
        (
            LazyLayers,
            RecordingError,
            r"'fc1.weight' has no shape yet, so LazyLayers can't be cut; call the module once on a batch",
        ),
        (Vectorised, RecordingError, MADE.format("3, 8, 8")),
        (SeedsItself, SelfCheckError, r"don't compute what the module computes: .*does something a recording can't see"),
        (OwnGenerator, SelfCheckError, r"don't compute what the module computes: .*does something a recording can't see"),
        (ClampedEverywhere, PartitionError, r"cannot cut .* into 2 stages, .* \(parameter 'fc1.weight' is changed there\)"),
    ],
)
def test_refused_with_the_reason(
    module: type[nn.Module], error: type[MgpuError], text: str, num_microbatches: int, seed: int
) -> None:
    pipeline = InProcess(module(), 2, num_microbatches)
    with pytest.raises(error, match=text):
        pipeline(torch.randn(8, 6))

    assert pipeline.planner.placement.owners == {} or error is SelfCheckError


class BatchedNearTheEnd(nn.Module):
    """Looks across the batch when most of its work is done."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 4)
        self.fc3 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.fc1(x))
        y: Tensor = self.fc3(x - x.mean(0))
        return y


def test_layers_behind_a_look_across_the_batch_are_named_where_they_are_missed() -> None:
    text = (
        r"cannot cut 2 layers of BatchedNearTheEnd into 3 stages; use at most 2 stages \(devices=2\), or num_microbatches=1: "
        r"mean \(.*\) looks across the whole batch, so what follows it, with 1 layer, runs on the lead"
    )
    with pytest.raises(PartitionError, match=text):
        InProcess(BatchedNearTheEnd(), 3, 4)(torch.zeros(8, 64))
    assert InProcess(BatchedNearTheEnd(), 3, 1)(torch.zeros(8, 64)).shape == (8, 4)


def test_compiled_code_stays_with_the_lead(seed: int) -> None:
    def scripted() -> nn.Module:
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), scripted())
        first = nn.Sequential(nn.Linear(6, 8), scripted(), nn.Linear(8, 8))
        x = torch.randn(8, 6)
        expected = last(x)
        torch.testing.assert_close(InProcess(last, 2, 2, cuts=("2",))(x), expected)
        with pytest.raises(ShippingError, match=r"attribute '_c' of RecursiveScriptModule .* keep the module on the lead"):
            InProcess(first, 2, 2, cuts=("2",))(x)


def test_a_refused_forward_leaves_the_module_as_it_was(seed: int) -> None:
    module: Any = ClampedEverywhere()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(PartitionError):
        InProcess(module, 2, 2)(torch.randn(8, 6) * 100)

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class WrongWidth(nn.Module):
    """Has a second layer that does not take what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(12, 8)
        self.fc2 = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return y


def test_a_mistake_in_shapes_ends_at_the_users_line() -> None:
    """What torch's fake tensors do below it is some twenty frames that are nobody's business."""
    module = WrongWidth()
    with pytest.raises(RuntimeError, match=r"8.*10") as caught:
        Recorder(Names(module)).record(module, (torch.zeros(4, 12),), {})
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.name == "forward"
    assert last.line == "y: Tensor = self.fc2(torch.relu(self.fc1(x)))"
