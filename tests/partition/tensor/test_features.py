"""Inputs split by feature: every rank is given its columns of a wide input, and the part of the layer that reads them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.tensor.layout import Layout
from tests.partition.tensor.lowered import Lowered, roles


class Wide(nn.Module):
    """Normalises, drops and scales the features of a wide input before its first layer."""

    def __init__(self, width, forward=lambda m, x: x):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.gain = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))
        self.fc1, self.fc2, self.fc3 = nn.Linear(width, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.before = forward

    def forward(self, x, times=None):
        h = F.relu(self.fc1(self.before(self, x)))
        h = h if times is None else h * times
        return self.fc3(F.relu(self.fc2(h)))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("width", [64, 2001])
def test_each_rank_needs_only_its_columns(width, num_ranks, double):
    x = torch.randn(4, width)
    lowered = Lowered(Wide(width), num_ranks, x, split_inputs=True)

    assert lowered.plan.inputs == {0: Layout(1, (width,))}
    assert roles(lowered.plan) == {"": "whole", "norm": "whole", "fc1": "row", "fc2": "column", "fc3": "row"}
    lowered.compare(x, tolerance=1e-9)


BEFORE = {
    "batch norm": lambda m, x: m.norm(x),
    "scaled by a parameter": lambda m, x: x * m.gain + m.shift,
    "clamped": lambda m, x: torch.clamp(x, -1, 1).tanh(),
    "sum over all": lambda m, x: x * x.sum(0, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
def test_features_are_prepared_in_parts(name, double):
    x = torch.randn(4, 2001).requires_grad_()
    Lowered(Wide(2001, BEFORE[name]), 4, x, split_inputs=True).compare(x, tolerance=1e-9)


def test_flattened_images_are_split_in_segments(double):
    x = torch.randn(2, 4, 4, 4)
    lowered = Lowered(Wide(64, lambda m, x: x.flatten(1)), 2, x, split_inputs=True)

    assert lowered.plan.layouts["fc1.weight"].segments == (4,) * 16
    lowered.compare(x, tolerance=1e-9)


def test_narrow_inputs_stay_whole(double):
    x, times = torch.randn(4, 64), torch.rand(4, 1)
    lowered = Lowered(Wide(64), 2, x, times, split_inputs=True)

    assert list(lowered.plan.inputs) == [0]
    lowered.compare(x, times, tolerance=1e-9)


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda m, x: F.layer_norm(x, (65,)), "layer_norm normalises over the 65 elements that are split over the ranks"),
        (lambda m, x: x.sort(-1)[0], "sort works along the 65 elements that are split over the ranks"),
        (lambda m, x: x.view(4, 5, 13).flatten(1), "view shows 65 elements as 5 x 13, and 5 does not divide by 2"),
    ],
)
def test_a_forward_that_needs_all_columns_is_refused(before, reason):
    with pytest.raises(PartitionError, match=f"cannot split an input by features: {reason}; leave out split_input="):
        Lowered(Wide(65, before), 2, torch.randn(4, 65), split_inputs=True)


def test_an_input_without_features_is_refused():
    with pytest.raises(PartitionError, match="by features: it takes none with features along a last dimension"):
        Lowered(nn.Embedding(4, 4), 2, torch.tensor([1, 2]), split_inputs=True)
