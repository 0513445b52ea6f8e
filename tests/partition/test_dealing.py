"""The ways to deal a batch out, likeliest first."""

from __future__ import annotations

import pytest
import torch

from lightning_mgpu.partition.dealing import doubtful, ways_to_deal


def _ways(shapes, wanted, replicated=frozenset(), dtype=torch.float32):
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    return list(ways_to_deal(tensors, lambda rows: min(rows, wanted), set(replicated)))


def test_all_tensors_with_the_batchs_rows_are_split():
    assert _ways([(8, 3), (8, 2), (5, 5), ()], 4) == [(8, 4, {0, 1}), (8, 2, {0, 1})]


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_microbatch_leaves_nothing_to_deal(wanted):
    assert _ways([(8, 3)], wanted) == []


def test_there_is_nothing_to_deal_without_rows():
    assert _ways([(), ()], 4) == []


def test_tensors_that_fit_by_chance_are_split_first_and_replicated_next():
    assert _ways([(8, 8)], 2) == [(8, 2, {0})]  # there is nothing else to split
    assert _ways([(8, 8, 3), (8, 8)], 2) == [(8, 2, {0, 1}), (8, 2, {0}), (8, 2, {1})]
    assert _ways([(8, 3), (8, 8)], 2) == [(8, 2, {0, 1}), (8, 2, {0})]
    assert _ways([(8, 3), (8,)], 2) == [(8, 2, {0, 1}), (8, 2, {0})]
    assert _ways([(8, 3), (8, 8), (8,)], 2) == [(8, 2, {0, 1, 2}), (8, 2, {0, 1}), (8, 2, {0, 2}), (8, 2, {0})]


def test_labels_do_not_fit_by_chance():
    assert _ways([(8, 3), (8,)], 2, dtype=torch.int64) == [(8, 2, {0, 1})]
    assert doubtful([torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64), torch.zeros(8, 8), torch.zeros(8)], 8) == {2, 3}


def test_the_first_tensor_counts_the_rows_where_most_do_not():
    assert _ways([(8, 3), (5, 5), (5, 2)], 2) == [(5, 2, {1, 2}), (5, 2, {2}), (8, 2, {0})]


def test_what_is_known_is_not_tried_again():
    assert _ways([(8, 3), (5, 5), (5, 2)], 2, replicated={1, 2}) == [(8, 2, {0})]
