"""Views: which dimension is dealt out after dimensions were merged and split."""

import pytest

from lightning_mgpu.partition.tensor.regroup import groups, place


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((8, 6, 32), (48, 32), [((0, 2), (0, 1)), ((2, 3), (1, 2))]),
        ((8, 6, 32), (8, 6, 4, 8), [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2, 4))]),
        ((2, 3, 4), (24,), [((0, 3), (0, 1))]),
        ((2, 6), (3, 4), [((0, 2), (0, 2))]),
        ((6, 32), (1, 6, 1, 32), [((0, 1), (0, 2)), ((1, 2), (2, 4))]),
        ((6, 1), (6,), [((0, 1), (0, 1)), ((1, 2), (1, 1))]),
    ],
)
def test_dimensions_that_belong_together(old, new, expected):
    assert groups(old, new) == expected


@pytest.mark.parametrize(
    ("segments", "dims", "num_ranks", "expected"),
    [
        ((96,), (4, 24), 2, (0, (4,))),  # heads
        ((96,), (3, 32), 2, None),  # three of them
        ((32, 32, 32), (3, 2, 16), 2, (1, (2,))),  # query, key and value
        ((32, 32, 32), (6, 16), 2, (0, (2, 2, 2))),  # the same, merged
        ((64, 16, 16), (6, 16), 1, (0, (4, 1, 1))),
        ((64, 16, 16), (6, 16), 2, None),  # one head of keys
        ((8, 8), (2, 8), 2, (1, (8,))),
        ((8,), (1, 8), 2, (1, (8,))),
        ((3, 3), (2, 3), 2, None),
    ],
)
def test_the_dimension_that_is_dealt_out(segments, dims, num_ranks, expected):
    assert place(segments, dims, num_ranks) == expected
