"""Other calls of a module whose plan is fixed: what they need whole is put together where they need it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.errors import PartitionError
from tests.partition.tensor.lowered import Lowered, roles
from tests.partition.tensor.models import TiedGpt


class Modes(nn.Module):
    """Goes another way for each word."""

    def __init__(self, width=8):
        super().__init__()
        self.fc, self.proj = nn.Linear(6, width), nn.Linear(width, 6)
        self.conv, self.norm, self.mix = nn.Conv1d(6, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 6, 1)
        self.words = nn.Embedding(8, 6)
        self.slope = nn.PReLU(8)
        self.square = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, way="usual"):
        return getattr(self, way)(x)

    def usual(self, x):
        h = self.proj(F.relu(self.fc(x)))
        c = self.mix(self.slope(self.norm(self.conv(h.transpose(1, 2)))))
        return c.transpose(1, 2) + self.words(torch.tensor([[1, 2, 3]]))

    def sorted_features(self, x):
        return self.proj(self.fc(x).sort(-1)[0])

    def several_gathered(self, x):
        h = self.fc(x)
        return torch.cdist(h, h * 2) + h.softmax(-1).sum(), h.argmax(-1)

    def column_alone(self, x):
        return self.fc(x)

    def row_alone(self, x):
        return self.proj(torch.cat([x, x], -1)[..., :8])

    def weights_as_values(self, x):
        return self.fc.weight.square().sum() + x @ self.proj.weight[:, :6] + self.words.weight.norm()

    def norm_alone(self, x):
        return self.norm(torch.cat([x, x], -1)[..., :8].transpose(1, 2))

    def slope_alone(self, x):
        return self.slope(torch.cat([x, x], -1)[..., :8].transpose(1, 2))

    def weights_swapped(self, x):
        return F.linear(F.linear(x, self.proj.weight.t()), self.fc.weight.t())

    def words_as_head(self, x):
        return F.linear(x, self.words.weight)

    def bias_of_another(self, x):
        return F.linear(F.relu(self.fc(x)), self.square, self.fc.bias)

    def returned(self, x):
        return self.proj(F.relu(self.fc(x))), self.proj.weight, self.norm.running_mean * 1.0

    def without_gradient(self, x):
        with torch.no_grad():
            teacher = self.fc(x)
        return (self.fc(x) - teacher).square().mean(-1) + self.proj(F.relu(self.fc(x))).sum(-1)

    def changed_in_place(self, x):
        h = self.fc(x)
        h[:, 0] = 0
        return self.proj(h)


WAYS = [name for name in vars(Modes) if name not in ("forward", "changed_in_place") and name[0] != "_"]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_another_call_under_the_plan(way, num_ranks, double):
    x = torch.randn(2, 3, 6).requires_grad_()
    lowered = Lowered(Modes(), num_ranks, x, gather_min=16)

    assert set(lowered.plan.layouts) >= {"fc.weight", "proj.weight", "conv.weight", "norm.running_mean", "slope.weight"}
    assert roles(lowered.plan)["words"] == "vocabulary"
    lowered.compare(x, way, tolerance=1e-9)


def test_other_shapes_and_modes_under_the_plan(double):
    lowered = Lowered(TiedGpt(), 2, torch.randint(24, (3, 6)), gather_min=256)
    for training, rows, length in ((False, 1, 6), (True, 5, 1), (False, 2, 8)):
        lowered.module.train(training)
        lowered.compare(torch.randint(24, (rows, length)), tolerance=1e-9)


def test_a_change_in_place_of_what_has_to_be_whole_is_refused(double):
    x = torch.randn(2, 3, 6)
    lowered = Lowered(Modes(), 2, x)
    with pytest.raises(PartitionError, match=r"__setitem__ .* can't be carried out under the tensor-parallel plan of 2 ranks"):
        lowered.compare(x, "changed_in_place")


def test_the_module_is_as_it_was(double):
    module = Modes()
    before = {name: (id(t), t.clone()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    attributes = {name: set(vars(child)) for name, child in module.named_modules()}
    x = torch.randn(2, 3, 6)
    Lowered(module, 2, x, gather_min=16).run(x)

    after = dict((*module.named_parameters(), *module.named_buffers()))
    assert after.keys() == before.keys()
    assert all(id(t) == before[name][0] and torch.equal(t, before[name][1]) and t.grad is None for name, t in after.items())
    assert {name: set(vars(child)) for name, child in module.named_modules()} == attributes
