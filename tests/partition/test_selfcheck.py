"""The self-check: it finds what differs, names the first call that does, and leaves everything as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.errors import SelfCheckError
from lightning_mgpu.partition.cut import CutRequest
from lightning_mgpu.partition.plan import Planner
from lightning_mgpu.partition.selfcheck import check_plan
from tests.partition.forwards.control import Three
from tests.partition.forwards.kept import ClampedWeights

pytestmark = pytest.mark.filterwarnings("ignore:.* has batch norms")


class Forward(Three):
    """Runs a function over its layers as its forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(8)
        self.register_buffer("count", torch.tensor(0.0))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def check(module: nn.Module, x: Tensor, num_microbatches: int = 4) -> Planner:
    """Plans a call and checks the plan."""
    planner = Planner(module, 2, num_microbatches, CutRequest())
    plan, tensors, _ = planner.find("", (x,), {})
    check_plan(planner, plan, (x,), {}, tensors)
    return planner


def counts(m: Forward, x: Tensor) -> Tensor:
    m.count += 1
    return m.fc3(m.drop(m.norm(m.fc2(m.fc1(x))))) * m.count


@pytest.mark.parametrize("module", [lambda: Forward(counts), ClampedWeights])
def test_everything_is_as_before(module, seed):
    model, x = module(), torch.randn(8, 6, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    modes = [child.training for child in model.modules()]
    attributes, generators = dict(vars(model)), (torch.get_rng_state(), random.getstate())
    check(model, x)

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == pointers
    assert [child.training for child in model.modules()] == modes
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda m, x: m.fc3(m.fc2(m.fc1(x).softmax(0))), "softmax"),
        (lambda m, x: m.fc3(m.fc2(m.drop(m.fc1(x)).roll(1, 0))), "roll"),
        (lambda m, x: m.fc3(m.fc2(m.norm(m.fc1(x)).flip(0))), "flip"),
        (lambda m, x: m.fc3(m.fc2(m.fc1(x)[torch.randperm(len(x))])), "__getitem__"),
    ],
)
def test_the_first_call_that_looks_across_the_rows_is_named(function, name, seed):
    text = rf"computes: {name} \(.*test_selfcheck.py:\d+ in <lambda>\).* is the first to differ \(largest difference .*\); it"
    with pytest.raises(SelfCheckError, match=text):
        check(Forward(function), torch.randn(8, 6))

    check(Forward(function), torch.randn(8, 6), num_microbatches=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc3(nn.functional.rrelu(m.drop(m.fc2(m.fc1(x))), training=True)),  # draws for negative numbers alone
        lambda m, x: m.fc3(m.fc2(m.fc1(x).sort(0).values.detach() * 0 + m.drop(m.fc1(x)))),  # looks, and forgets it
        lambda m, x: m.fc3(m.fc2(m.norm(m.fc1(x)))),
    ],
)
def test_rows_that_do_not_mix_pass(function, seed):
    check(Forward(function), torch.randn(8, 6))


def test_evaluation_is_planned_to_compare_the_whole_batch(seed):
    planner = check(Forward(lambda m, x: m.fc3(m.drop(m.fc2(m.fc1(x))))), torch.randn(8, 6))
    recorded = planner.num_recordings
    planner.names.root.eval()
    with torch.no_grad():
        plan, _, new = planner.find("", (torch.randn(8, 6),), {})

    assert not new
    assert plan.num_microbatches == 4
    assert planner.num_recordings == recorded
