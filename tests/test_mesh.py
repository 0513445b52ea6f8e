"""How processes are arranged in replicas of a pipeline."""

from __future__ import annotations

import itertools

import pytest

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.mesh import Mesh, check_size, mesh_of


def test_processes_are_numbered_replica_by_replica_and_the_last_one_leads():
    mesh = Mesh(pipeline=3, data=2)
    assert [list(mesh.row(replica)) for replica in mesh.replicas] == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.across(position) for position in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert mesh.lead == 5
    assert mesh.row(-1) == mesh.row(1)
    for process in range(6):
        assert mesh.process(mesh.position(process), mesh.replica(process)) == process


@pytest.mark.parametrize(
    ("m", "shares"),
    [(8, [0, 2, 4, 6, 8]), (7, [0, 1, 3, 5, 7]), (2, [0, 0, 0, 1, 2]), (1, [0, 0, 0, 0, 1])],
)
def test_microbatches_are_dealt_out_in_runs_and_the_leads_replica_is_never_without(m, shares):
    dealt = Mesh(pipeline=2, data=4).deal(m)
    assert [(share.start, share.stop) for share in dealt] == list(itertools.pairwise(shares))


@pytest.mark.parametrize(
    ("pipeline", "data", "mesh"),
    [
        ("auto", 1, Mesh(4, 1)),
        ("auto", 2, Mesh(2, 2)),
        (1, "auto", Mesh(1, 4)),
        (2, "auto", Mesh(2, 2)),
        (4, 1, Mesh(4, 1)),
        ("auto", "auto", Mesh(4, 1)),
    ],
)
def test_what_is_left_open_is_what_the_other_size_leaves(pipeline, data, mesh):
    assert mesh_of(4, pipeline=pipeline, data=data) == mesh


@pytest.mark.parametrize(("pipeline", "data"), [(3, 1), ("auto", 4), (4, "auto"), (2, 2), (1, 7)])
def test_sizes_that_do_not_multiply_are_refused_with_those_that_do(pipeline, data):
    with pytest.raises(PartitionError, match=r"do not multiply to 6 devices; .*: 1 x 6, 2 x 3, 3 x 2, 6 x 1"):
        mesh_of(6, pipeline=pipeline, data=data)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "two"])
def test_a_size_is_a_whole_number_or_auto(size):
    with pytest.raises(PartitionError, match=r"data_parallel_size=.* is not possible; use a whole number of at least 1, or"):
        check_size("data_parallel_size", size)
