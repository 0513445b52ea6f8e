"""Random numbers in parts: every rank draws its own for its part, and all draw the same for what is whole."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.partition.tensor.lowered import Lowered, roles
from tests.partition.tensor.models import TiedGpt


class Dropped(nn.Module):
    """Drops features of a split value, then of a whole one."""

    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(6, 64), nn.Linear(64, 6)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        parts = self.inner(torch.ones_like(self.fc(x)))
        return self.outer(self.proj(parts)), parts


def _runs(module, x, num_ranks, seed=3):
    return Lowered(module, num_ranks, x, steering={"fc": "column"}).run(x, seed=seed)


def test_parts_are_dropped_independently_and_wholes_alike(double):
    module, x = Dropped(), torch.randn(4, 6)
    a, b = _runs(module, x, 2)
    whole, parts = a.result

    assert torch.equal(whole, b.result[0])
    assert torch.equal(parts, b.result[1])  # put together
    assert set(parts.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(parts[:, :32], parts[:, 32:])
    assert 0.3 < float((parts == 0).double().mean()) < 0.7
    assert torch.equal(a.state, b.state)


def test_draws_repeat_for_a_seed(double):
    module, x = Dropped(), torch.randn(4, 6)
    first, again, other = (_runs(module, x, 2, seed)[0].result for seed in (3, 3, 4))

    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_a_gpt_with_dropout_trains_alike_on_all_ranks(double):
    words = torch.randint(24, (4, 8))
    lowered = Lowered(TiedGpt(dropout=0.3), 4, words, gather_min=256)
    outcomes = lowered.run(words)

    assert all(torch.equal(o.result, outcomes[0].result) for o in outcomes)
    assert all(torch.equal(o.state, outcomes[0].state) for o in outcomes)
    for name in lowered.names.tensors:
        if name not in lowered.plan.layouts and lowered.names.kinds[name] == "parameter":
            assert all(torch.equal(o.store.tensor(name).grad, outcomes[0].store.tensor(name).grad) for o in outcomes), name


def test_dropout_in_attention_differs_by_head(double):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            h = self.fc(x).view(2, 16, 4, 2).transpose(1, 2)
            ones = torch.ones_like(h)
            return F.scaled_dot_product_attention(ones * 0, ones, ones, dropout_p=0.5)

    x = torch.randn(2, 16, 8)
    result = _runs(Attention(), x, 2)[0].result

    assert float(result.var()) > 0.03
    assert not torch.equal(result[:, :2], result[:, 2:])


def test_in_evaluation_nothing_is_dropped(double):
    module, x = Dropped().eval(), torch.randn(4, 6)
    Lowered(module, 2, x).compare(x, tolerance=1e-9)


def test_nobody_draws_before_what_one_device_draws(double):
    """A forward without random numbers in parts leaves the stream where one device does."""
    module, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Dropout(0.5)), torch.randn(4, 6)
    outcomes = Lowered(module, 2, x).run(x, seed=5)
    torch.manual_seed(5)
    expected = module(x)

    torch.testing.assert_close(outcomes[0].result, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(outcomes[0].state, torch.get_rng_state())


def test_weights_that_all_ranks_have_are_dropped_alike(double):
    """Where only values are in parts, all ranks attend alike, and draw what one device draws."""

    class OddHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.proj = (nn.Linear(12, 12) for _ in range(4))

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return self.proj(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).transpose(1, 2).flatten(2))

    module, x = OddHeads(), torch.randn(2, 5, 12)
    lowered = Lowered(module, 2, x)
    outcomes = lowered.run(x, seed=5)
    torch.manual_seed(5)

    assert roles(lowered.plan) == {"q": "whole", "k": "whole", "v": "column", "proj": "row"}
    torch.testing.assert_close(outcomes[1].result, module(x), rtol=1e-9, atol=1e-9)
