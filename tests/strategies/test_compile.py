"""Stages that torch.compile has compiled give the numbers that one device gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.cut import CutRequest
from lightning_mgpu.partition.fused import Fused, fuse
from lightning_mgpu.partition.plan import Planner
from tests.harness import assert_same, run_on_one_device
from tests.strategies.test_schedules import CASES, numbers, reference
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.recipe import Regression
from tests.zoo.steps import DropoutMlp

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own compiler uses it

OPTIONS = [{"schedule": "1f1b"}, {"data_parallel_size": 2}, {"activation_checkpointing": True}]
WHOLE = {"backend": "aot_eager", "fullgraph": True}  # as written, and an error where the compiler would have to give up


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    """Forgets what was compiled, so that no test uses up another's limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["CNN", "ResidualNet", "EncoderDecoder", "Gpt2", "TiedHead", "FrozenTeacher", "Gan", "UNet"])
def test_equals_one_device(name: str, warm_workers: WarmWorkers) -> None:
    case = CASES[name]
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers, compile=WHOLE))


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, {"data_parallel_size": 2}, {"activation_checkpointing": True}], ids=str
)
def test_with_other_options(options: dict[str, Any], warm_workers: WarmWorkers) -> None:
    found = numbers(run_on_stages(CASES["CNN"], 2, warm_workers, compile=WHOLE, **options))
    assert_same(numbers(reference(CASES["CNN"])), found)


def test_the_compilers_own_kernels(warm_workers: WarmWorkers) -> None:
    case = CASES["Mlp"] if "Mlp" in CASES else CASES["CNN"]
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers, compile=True))


def test_dropout_draws_the_masks_of_uncompiled_stages(warm_workers: WarmWorkers) -> None:
    case = Case(DropoutMlp, data.vectors)
    assert_same(run_on_stages(case, 2, warm_workers), run_on_stages(case, 2, warm_workers, compile=True))


class Mixed(Regression):
    """Computes, changes a tensor in place, computes, normalises, computes, and calls a layer with a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc3 = nn.Linear(8, 8)
        self.fc4 = nn.Linear(8, 4)
        self.fc4.register_forward_hook(lambda module, args, result: None)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        x = self.fc2(x) * 2
        x.add_(1)
        low, high = torch.tanh(x).chunk(2, dim=1)
        x = self.norm(torch.cat([high, low], dim=1))
        x = F.gelu(self.fc3(x))
        return self.fc4(x)  # type: ignore[no-any-return]


def test_what_is_compiled_together() -> None:
    planner = Planner(Mixed(), 1, 1, CutRequest())
    plan, _, _ = planner.find("", (torch.zeros(4, 8),), {})
    [[stage]] = plan.stages.values()
    units = fuse(stage.program.steps, planner.store, WHOLE)
    assert [len(unit.steps) if isinstance(unit, Fused) else str(unit.target) for unit in units] == [
        4,  # fc1, tanh, fc2, mul
        str(stage.program.steps[4].target),  # add_
        3,  # tanh, chunk, cat
        "norm",
        2,  # fc3, gelu
        "fc4",
    ]


def test_a_mixture(warm_workers: WarmWorkers) -> None:
    case = Case(Mixed, data.vectors, num_microbatches=1)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers, compile=WHOLE))


def test_a_backward_can_be_run_twice(warm_workers: WarmWorkers) -> None:
    class Twice(Mixed):
        @override
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            self.zero_grad()
            return loss

    case = dataclasses.replace(Case(Mixed, data.vectors, num_microbatches=1), module=Twice)
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers, compile=True))


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipe_v"])
def test_schedules_that_split_backwards_refuse_it(schedule: str) -> None:
    with pytest.raises(PartitionError, match=f"compile is not possible with schedule='{schedule}', .* one backward for both"):
        PipelineStrategy(schedule=schedule, compile=True)


def test_bad_values() -> None:
    with pytest.raises(PartitionError, match="compile='inductor' is not possible; use True, False or a dict"):
        PipelineStrategy(compile="inductor")  # type: ignore[arg-type]
