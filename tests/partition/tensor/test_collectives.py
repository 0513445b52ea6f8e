"""The calls that talk to other ranks: their values, gradients, and gradients of gradients."""

import pickle

import pytest
import torch

from lightning_mgpu.partition.tensor.collectives import (
    Copy,
    Forked,
    Gather,
    GroupedAttention,
    Reduce,
    Slice,
    VocabularyEmbedding,
    add_bias,
)
from lightning_mgpu.partition.tensor.layout import Layout, shard
from tests.partition.tensor.ranks import Ranks

LAYOUTS = [Layout(1, (8,)), Layout(1, (4, 4)), Layout(0, (7,)), Layout(1, (3, 5))]


def _gradient(value, wanted):
    return torch.autograd.grad(value, wanted, create_graph=True)[0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_copies_add_their_gradients_up(num_ranks, double):
    x = torch.randn(3)

    def run(group):
        own = x.clone().requires_grad_()
        value = (Copy(group)(own) ** 3 * (group.rank + 1)).sum()
        first = _gradient(value, own)
        return first, _gradient(first.sum(), own)

    total = sum(range(1, num_ranks + 1))
    for first, second in Ranks(num_ranks).run(run):
        torch.testing.assert_close(first, 3 * x**2 * total)
        torch.testing.assert_close(second, 6 * x * total)


def test_a_sum_hands_its_gradient_to_every_share(double):
    x = torch.randn(3)

    def run(group):
        own = (x * (group.rank + 1)).requires_grad_()
        whole = Reduce(group)(own)
        return whole, _gradient((whole * 2).sum(), own)

    for whole, gradient in Ranks(2).run(run):
        torch.testing.assert_close(whole, 3 * x)
        torch.testing.assert_close(gradient, torch.full((3,), 2.0))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_are_taken_and_put_together(layout, num_ranks, double):
    x, weights = torch.randn(7, 8), torch.randn(7, 8)

    def run(group):
        own = x.clone().requires_grad_()
        part = Slice(group, layout)(own)
        whole = Gather(group, layout)(part * 2)
        gradient = _gradient((whole**2 * weights).sum(), own)
        return part, whole, gradient, _gradient(gradient.sum(), own)

    for rank, (part, whole, gradient, second) in enumerate(Ranks(num_ranks).run(run)):
        assert torch.equal(part, shard(x, layout, rank, num_ranks))
        assert torch.equal(whole, x * 2)
        torch.testing.assert_close(gradient, 8 * x * weights)
        torch.testing.assert_close(second, 8 * weights)


@pytest.mark.parametrize("padding", [None, 0, 5, -1])
def test_words_are_looked_up_where_they_are(padding, double):
    weight, words = torch.randn(8, 3), torch.tensor([[0, 5], [7, 5]])
    own = weight.clone().requires_grad_()
    expected = torch.nn.functional.embedding(words, own, padding)
    expected.square().sum().backward()

    def run(group):
        part = shard(weight, Layout(0, (8,)), group.rank, 2).clone().requires_grad_()
        found = Reduce(group)(VocabularyEmbedding(group, 8, padding)(words, part))
        found.square().sum().backward()
        return found, part.grad

    (found, first), (_, second) = Ranks(2).run(run)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.cat([first, second]), own.grad)


def test_forks_leave_the_shared_stream_where_it_was_for_all(double):
    def run(group):
        own = Forked(group, torch.rand)(1000)
        return own, torch.rand(3)

    torch.manual_seed(0)
    (a, after_a), (b, after_b) = Ranks(2).run(run)
    assert not torch.equal(a, b)
    assert torch.equal(after_a, after_b)


def test_heads_draw_for_themselves_in_grouped_attention(double):
    k = torch.randn(1, 1, 4, 2)

    def run(group):
        query = torch.zeros(1, 2, 4, 2)
        return Forked(None, GroupedAttention(None, 1, 4, 1)).of(group)(query, k, torch.ones_like(k), dropout_p=0.5)

    a, b = Ranks(2).run(run)
    assert a.shape == (1, 2, 4, 2)
    assert len({str(head.tolist()) for head in (*a[0], *b[0])}) == 4


def test_a_bias_is_added_in_the_dtype_of_the_value():
    value = torch.ones(2, 3, 4, dtype=torch.bfloat16)

    assert add_bias(value, torch.arange(3.0), -2).dtype is torch.bfloat16
    assert add_bias(value, torch.arange(3.0), -2)[0, :, 0].tolist() == [1, 2, 3]
    assert add_bias(value, torch.arange(4.0), -1)[0, 0].tolist() == [1, 2, 3, 4]


def test_calls_without_a_group_can_be_sent_but_not_made():
    calls = [Copy(), Reduce(), Slice(None, LAYOUTS[0]), Gather(None, LAYOUTS[1]), VocabularyEmbedding(None, 8, 1), Forked()]

    assert pickle.loads(pickle.dumps(calls)) == calls
    with pytest.raises(RuntimeError, match=r"Copy has no group to talk to; put one in with joined\(program, group\)"):
        Copy()(torch.zeros(1))
