"""Layouts: dealing a tensor out and putting it together again."""

import pytest
import torch

from lightning_mgpu.partition.tensor.layout import Layout, local_shape, shard, unshard


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "layout", [None, Layout(0, (12,)), Layout(1, (24,)), Layout(1, (8, 8, 8)), Layout(1, (16, 4, 4)), Layout(0, (11, 1))]
)
def test_parts_make_the_whole_again(layout, num_ranks):
    whole = torch.arange(12 * 24.0).view(12, 24)
    parts = [shard(whole, layout, rank, num_ranks) for rank in range(num_ranks)]

    assert torch.equal(unshard(parts, layout), whole)
    assert [tuple(part.shape) for part in parts] == [
        local_shape(whole.shape, layout, rank, num_ranks) for rank in range(num_ranks)
    ]


def test_each_segment_is_dealt_by_itself():
    fused = torch.tensor([1, 2, 3, 4, 10, 20, 30, 40, 100, 200])

    assert shard(fused, Layout(0, (4, 4, 2)), 0, 2).tolist() == [1, 2, 10, 20, 100]
    assert shard(fused, Layout(0, (4, 4, 2)), 1, 2).tolist() == [3, 4, 30, 40, 200]


def test_what_does_not_divide_is_dealt_as_torch_splits_it():
    row = torch.arange(2001)
    parts = [shard(row, Layout(0, (2001,)), rank, 4) for rank in range(4)]

    assert all(torch.equal(a, b) for a, b in zip(parts, row.tensor_split(4), strict=True))
    assert not Layout(0, (2001,)).is_even(4)
    assert Layout(0, (2000, 4)).is_even(4)


def test_one_piece_shares_memory():
    whole = torch.zeros(4, 6)
    shard(whole, Layout(1, (6,)), 1, 2).fill_(1)

    assert whole.sum() == 12


def test_a_tensor_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 6\) has no dimension 1 of 8 elements to deal out"):
        shard(torch.zeros(4, 6), Layout(1, (8,)), 0, 2)
