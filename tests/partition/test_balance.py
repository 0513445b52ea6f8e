"""The balance is compared with trying every partition, on small cases of every kind."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection, Sequence

import pytest

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.balance import partition

Allowed = Sequence[Collection[int] | None]


def brute_force(
    costs: Sequence[float],
    num_stages: int,
    *,
    crossing: Sequence[float],
    legal: Sequence[bool],
    allowed: Allowed | None = None,
    counts: Sequence[bool],
) -> tuple[int, ...] | None:
    k = len(costs)
    found = []
    for cuts in itertools.combinations_with_replacement(range(k + 1), num_stages - 1):
        edges = (0, *cuts, k)
        stages = [range(edges[j], edges[j + 1]) for j in range(num_stages)]
        if not all(p in (0, k) or legal[p] for p in cuts):
            continue
        if allowed is None:
            if num_stages > 1 and not all(any(counts[p] for p in stage) for stage in stages):
                continue
        elif any(j not in nodes for j, stage in enumerate(stages) for p in stage if (nodes := allowed[p]) is not None):
            continue
        largest = max(sum(costs[p] for p in stage) for stage in stages)
        found.append((largest, sum(crossing[p] for p in cuts), cuts))
    return min(found)[2] if found else None


def random_case(seed: int) -> tuple[list[int], int, dict[str, list[float]], dict[str, list[bool]], list[bool]]:
    """Draws whole numbers from small ranges, so that ties are common and sums are exact."""
    draw = random.Random(seed)
    k = draw.randint(1, 9)
    costs = [draw.randint(0, draw.choice([1, 3, 100])) for _ in range(k)]
    crossing = [float(draw.randint(0, draw.choice([1, 3, 1000]))) for _ in range(k + 1)]
    legal = [draw.random() < draw.choice([0.5, 0.8, 1.0]) for _ in range(k + 1)]
    counts = [draw.random() < draw.choice([0.4, 0.8, 1.0]) for _ in range(k)]
    return costs, draw.randint(1, 5), {"crossing": crossing}, {"legal": legal}, counts


@pytest.mark.parametrize("block", range(8))
def test_equals_brute_force(block: int) -> None:
    solved = refused = 0
    for seed in range(block * 50, block * 50 + 50):
        costs, n, crossing, legal, counts = random_case(seed)
        expected = brute_force(costs, n, **crossing, **legal, counts=counts)
        if expected is None:
            with pytest.raises(PartitionError, match=r"cannot cut \d+ layers? into \d+ stages.*; use at most \d+ stage"):
                partition(costs, n, **crossing, **legal, counts=counts)
            refused += 1
        else:
            assert partition(costs, n, **crossing, **legal, counts=counts) == expected, seed
            solved += 1
    assert min(solved, refused) >= 3


@pytest.mark.parametrize("block", range(8))
def test_equals_brute_force_with_allowed_stages(block: int) -> None:
    solved = refused = 0
    for seed in range(block * 50, block * 50 + 50):
        costs, n, crossing, legal, counts = random_case(seed)
        draw = random.Random(-seed - 1)
        owner = sorted(draw.randrange(n) for _ in costs)
        allowed: list[Collection[int] | None] = [
            draw.choice([None, {stage}, range(stage + 1), {stage, draw.randrange(n)}]) for stage in owner
        ]
        if draw.random() < 0.3:
            draw.shuffle(allowed)
        expected = brute_force(costs, n, **crossing, **legal, allowed=allowed, counts=counts)
        if expected is None:
            with pytest.raises(PartitionError):
                partition(costs, n, **crossing, **legal, allowed=allowed, counts=counts)
            refused += 1
        else:
            assert partition(costs, n, **crossing, **legal, allowed=allowed, counts=counts) == expected, seed
            solved += 1
    assert min(solved, refused) >= 3


@pytest.mark.parametrize("seed", range(40))
def test_largest_stage_is_least_for_real_costs(seed: int) -> None:
    draw = random.Random(seed)
    k, n = draw.randint(4, 12), draw.randint(2, 4)
    costs = [draw.random() * 10 ** draw.randint(-3, 3) for _ in range(k)]
    crossing = [draw.random() for _ in range(k)]
    given = {"crossing": [*crossing, 0.0], "legal": [True] * (k + 1), "counts": [True] * k}
    expected = brute_force(costs, n, **given)  # type: ignore[arg-type]
    assert expected is not None
    assert partition(costs, n, crossing=crossing, legal=[True] * k, counts=[True] * k) == expected


def test_largest_stage_comes_before_bytes() -> None:
    given = {"legal": [True] * 4, "counts": [True] * 4}
    assert partition([1, 1, 1, 1], 2, crossing=[0, 0, 999, 0], **given) == (2,)
    assert partition([1, 1, 1, 3], 2, crossing=[0, 0, 0, 999], **given) == (3,)


def test_bytes_decide_between_equal_stages() -> None:
    """A layer of no cost, such as a pooling, goes to the side that leaves less to send."""
    given = {"legal": [True] * 3, "counts": [True, False, True]}
    assert partition([2, 0, 2], 2, crossing=[0, 400, 100], **given) == (2,)
    assert partition([2, 0, 2], 2, crossing=[0, 100, 400], **given) == (1,)


def test_earliest_cuts_decide_between_equal_bytes() -> None:
    cuts = partition([1] * 5, 3, crossing=[7] * 5, legal=[True] * 5, counts=[True] * 5)
    assert cuts == (1, 3)


def test_rounding_is_no_difference_between_stages() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit; the bytes must decide, not the rounding."""
    costs = [0.1, 0.2, 0.0, 0.3]
    assert sum(costs[:2]) != costs[3]
    given = {"legal": [True] * 4, "counts": [True] * 4}
    assert partition(costs, 2, crossing=[0, 0, 5, 9], **given) == (2,)
    assert partition(costs, 2, crossing=[0, 0, 9, 5], **given) == (3,)


def test_costs_of_nothing() -> None:
    assert partition([0, 0, 0], 3, crossing=[1, 1, 1], legal=[True] * 3, counts=[True] * 3) == (1, 2)


def test_one_stage_holds_what_there_is() -> None:
    assert partition([1, 2], 1, crossing=[0, 0], legal=[True, True], counts=[False, False]) == ()
    assert partition([], 1, crossing=[], legal=[], counts=[]) == ()


def test_stages_may_be_empty_where_owners_are_fixed() -> None:
    """A second forward that uses only the middle stage leaves the others without a node."""
    cuts = partition([1, 1], 3, crossing=[5, 1], legal=[True, True], allowed=[{1}, {1}], counts=[True, True])
    assert cuts == (0, 2)


def test_empty_stages_pass_bytes_on() -> None:
    """Equal largest stages: the single costly node stays where the value is smallest when it passes through."""
    given = {"legal": [True] * 2, "allowed": [None], "counts": [True]}
    assert partition([4], 3, crossing=[10, 1], **given) == (1, 1)
    assert partition([4], 3, crossing=[1, 10], **given) == (0, 0)


def test_fewer_layers_than_stages() -> None:
    given = {"crossing": [0] * 5, "legal": [True] * 5, "counts": [True, False, True, False, True]}
    with pytest.raises(PartitionError, match=r"^cannot cut 3 layers into 4 stages; use at most 3 stages$"):
        partition([1] * 5, 4, **given)
    with pytest.raises(PartitionError, match=r"^cannot cut 1 layer into 2 stages; use at most 1 stage$"):
        partition([1], 2, crossing=[0], legal=[True], counts=[True])
    with pytest.raises(PartitionError, match=r"^cannot cut 0 layers into 2 stages; use at most 1 stage$"):
        partition([1], 2, crossing=[0], legal=[True], counts=[False])


def test_layers_that_cannot_be_cut_apart() -> None:
    legal = [True, False, True, False]
    with pytest.raises(
        PartitionError,
        match=r"^cannot cut 4 layers into 3 stages, as not every place between them can be cut; use at most 2 stages$",
    ):
        partition([1] * 4, 3, crossing=[0] * 4, legal=legal, counts=[True] * 4)
    assert partition([1] * 4, 2, crossing=[0] * 4, legal=legal, counts=[True] * 4) == (2,)


def test_owners_against_stage_order() -> None:
    given = {"crossing": [0] * 3, "legal": [True] * 3, "counts": [True] * 3}
    with pytest.raises(
        PartitionError,
        match=r"node 2 is allowed up to stage 0, but node 0 before it from stage 1 on; use cuts that keep their order",
    ):
        partition([1] * 3, 3, allowed=[{1}, None, {0}], **given)
    with pytest.raises(PartitionError, match=r"node 1 is allowed on none of 2 stages; allow at least one"):
        partition([1] * 3, 2, allowed=[None, {2}, None], **given)
    with pytest.raises(PartitionError, match=r"into 2 stages where cuts are legal and keep every node on a stage"):
        partition([1] * 2, 2, crossing=[0] * 2, legal=[True, False], allowed=[{0}, {1}], counts=[True] * 2)


def test_wrong_arguments() -> None:
    given = {"crossing": [0] * 2, "legal": [True] * 2, "counts": [True] * 2}
    with pytest.raises(ValueError, match=r"counts has 1 entries for 2 nodes; give one for each"):
        partition([1, 1], 2, **(given | {"counts": [True]}))
    with pytest.raises(ValueError, match=r"crossing has 4 entries for 2 nodes"):
        partition([1, 1], 2, **(given | {"crossing": [0] * 4}))
    with pytest.raises(ValueError, match=r"cannot cut into 0 stages; use at least 1"):
        partition([1, 1], 0, **given)
    for costs in ([1, -1], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(ValueError, match=r"must be finite and at least 0"):
            partition(costs, 2, **given)


def test_large_graphs_take_no_time() -> None:
    draw = random.Random(0)
    k, n = 5000, 16
    costs = [draw.random() * 1e12 for _ in range(k)]
    crossing = [draw.randrange(10**9) for _ in range(k)]
    began_s = time.process_time()
    cuts = partition(costs, n, crossing=crossing, legal=[True] * k, counts=[True] * k)
    took_s = time.process_time() - began_s
    edges = (0, *cuts, k)
    stages = [sum(costs[edges[j] : edges[j + 1]]) for j in range(n)]
    assert sorted(set(cuts)) == list(cuts)
    assert max(stages) < sum(costs) / n + max(costs)
    assert took_s < 2
