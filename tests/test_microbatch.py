"""Microbatches: how many there are, how large they are, and which rows each gets."""

import pytest
import torch

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.microbatch import batch_sizes_of, check_num_microbatches, deal, num_microbatches_for, sizes_of


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "sizes"),
    [(10, 4, (3, 3, 2, 2)), (8, 4, (2, 2, 2, 2)), (7, 1, (7,)), (3, 3, (1, 1, 1)), (5, 3, (2, 2, 1))],
)
def test_rows_are_dealt_out_evenly_larger_first(batch_size, num_microbatches, sizes):
    assert sizes_of(batch_size, num_microbatches) == sizes


@pytest.mark.parametrize(
    ("asked", "num_stages", "batch_size", "num_microbatches"),
    [
        (4, 2, 10, 4),
        (4, 2, 3, 3),  # never more than rows
        (1, 4, 100, 1),
        (4, 2, 0, 1),  # an empty batch is one call all the same
        ("auto", 2, 100, 8),  # four per stage
        ("auto", 3, 100, 12),
        ("auto", 4, 5, 5),
    ],
)
def test_number_of_microbatches(asked, num_stages, batch_size, num_microbatches):
    assert num_microbatches_for(asked, num_stages, batch_size) == num_microbatches


@pytest.mark.parametrize("value", [1, 7, "auto"])
def test_possible_numbers_are_returned(value):
    assert check_num_microbatches(value) == value


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4", "Auto"])
def test_impossible_numbers_are_refused(value):
    with pytest.raises(PartitionError) as error:
        check_num_microbatches(value)

    assert str(error.value) == f'num_microbatches={value!r} is not possible; use a whole number of at least 1, or "auto"'
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ([(4, 5), (4,), (5, 5)], [4]),  # a mask of positions does not count the rows
        ([(5, 5), (4, 5), (4,)], [4, 5]),  # the mask comes first, so its size stays a second guess
        ([(5, 5), (4, 5)], [5]),  # a tie goes to the earliest
        ([(), (3, 2)], [3]),
        ([()], []),
        ([], []),
    ],
)
def test_rows_of_a_batch(shapes, sizes):
    assert batch_sizes_of([torch.zeros(shape) for shape in shapes]) == sizes


def test_deal_splits_the_first_dimension_into_views():
    whole = torch.arange(20.0).view(10, 2)
    parts = deal(whole, (3, 3, 2, 2), 0)

    assert [tuple(part.shape) for part in parts] == [(3, 2), (3, 2), (2, 2), (2, 2)]
    assert torch.equal(torch.cat(parts), whole)
    assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize(
    ("shape", "dim", "lengths"),
    [
        ((20, 3), 0, [6, 6, 4, 4]),  # two rows for each of the batch's, as folded heads or patches have
        ((3, 30), 1, [9, 9, 6, 6]),  # a multiple along another dimension
        ((2, 10, 4), 1, [3, 3, 2, 2]),
    ],
)
def test_deal_splits_multiples_along_any_dimension(shape, dim, lengths):
    whole = torch.randn(shape)
    parts = deal(whole, (3, 3, 2, 2), dim)

    assert [part.shape[dim] for part in parts] == lengths
    assert torch.equal(torch.cat(parts, dim), whole)


def test_deal_splits_parts_of_the_rows():
    whole = torch.randn(4, 3)  # one for each two rows

    assert [len(part) for part in deal(whole, (2, 2, 2, 2), 0)] == [1, 1, 1, 1]
    assert [len(part) for part in deal(whole, (4, 4), 0)] == [2, 2]


def test_deal_gives_what_has_no_rows_to_every_microbatch():
    whole = torch.randn(5, 5)

    assert [part is whole for part in deal(whole, (2, 2), None)] == [True, True]
