"""Batch norm under microbatches: running statistics end as after one call on the whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.partition.batchnorm import DeferredStatistics, is_deferred_module

SIZES = (3, 3, 2, 2)


def _run(module, batch, sizes=SIZES):
    deferred = DeferredStatistics()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    parts = [deferred.run("norm", module, (part,), {}) for part in batch.split(sizes)]
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])  # nothing moves before the last microbatch is through
    deferred.commit()
    return parts


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, (4,)), (nn.BatchNorm1d, (4, 5)), (nn.BatchNorm2d, (4, 5, 3))])
def test_running_statistics_are_the_whole_batchs(kind, shape, momentum, seed):
    whole = kind(4, momentum=momentum)
    dealt = copy.deepcopy(whole)
    for step in range(3):
        batch = torch.randn(10, *shape) * (step + 1) + step
        whole(batch)
        _run(dealt, batch)

    torch.testing.assert_close(dealt.running_mean, whole.running_mean)
    torch.testing.assert_close(dealt.running_var, whole.running_var)
    assert dealt.num_batches_tracked == whole.num_batches_tracked == 3
    assert dealt.momentum == momentum


def test_each_microbatch_is_normalised_by_itself(seed):
    norm, batch = nn.BatchNorm1d(4), torch.randn(10, 4)
    expected = [nn.BatchNorm1d(4)(part) for part in batch.split(SIZES)]

    for part, by_itself in zip(_run(norm, batch), expected, strict=True):
        assert torch.equal(part, by_itself)


def test_one_microbatch_is_plain_batch_norm(seed):
    whole, batch = nn.BatchNorm2d(3), torch.randn(6, 3, 2, 2)
    dealt = copy.deepcopy(whole)
    (result,) = _run(dealt, batch, (6,))

    assert torch.equal(result, whole(batch))
    torch.testing.assert_close(dealt.state_dict(), whole.state_dict())


def test_the_function_likewise(seed):
    batch = torch.randn(10, 4, 3) + 2
    whole = torch.zeros(4), torch.ones(4)
    dealt = torch.zeros(4), torch.ones(4)
    F.batch_norm(batch, *whole, training=True, momentum=0.3)
    deferred = DeferredStatistics()
    for part in batch.split(SIZES):
        deferred.run("norm", F.batch_norm, (part, *dealt), {"training": True, "momentum": 0.3})
    assert torch.equal(dealt[0], torch.zeros(4))
    deferred.commit()

    torch.testing.assert_close(dealt, whole)


def test_a_module_called_twice_counts_twice(seed):
    whole, first, second = nn.BatchNorm1d(4), torch.randn(10, 4), torch.randn(10, 4) + 3
    dealt = copy.deepcopy(whole)
    whole(first), whole(second)
    deferred = DeferredStatistics()
    for a, b in zip(first.split(SIZES), second.split(SIZES), strict=True):
        deferred.run("first", dealt, (a,), {})
        deferred.run("second", dealt, (b,), {})
    deferred.commit()

    torch.testing.assert_close(dealt.state_dict(), whole.state_dict())


def test_a_commit_is_forgotten_by_the_next(seed):
    norm, deferred = nn.BatchNorm1d(4), DeferredStatistics()
    deferred.run("norm", norm, (torch.randn(4, 4),), {})
    deferred.commit()
    once = copy.deepcopy(norm.state_dict())
    deferred.commit()

    torch.testing.assert_close(norm.state_dict(), once, rtol=0, atol=0)


def test_evaluation_leaves_the_statistics_and_uses_them(seed):
    norm, batch = nn.BatchNorm1d(4).eval(), torch.randn(10, 4)
    before = copy.deepcopy(norm.state_dict())

    torch.testing.assert_close(torch.cat(_run(norm, batch)), norm(batch))
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


def test_what_is_deferred():
    assert is_deferred_module(nn.BatchNorm1d(4))
    assert not is_deferred_module(nn.BatchNorm1d(4, track_running_stats=False))
    assert not is_deferred_module(nn.LayerNorm(4))
