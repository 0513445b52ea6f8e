"""Which values carry the batch, and what has to wait for all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.partition.batch import Batching, batch_dims, split_tail
from lightning_mgpu.partition.graph import Graph
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.record import Recorder
from lightning_mgpu.partition.recording import StructureError


class Forward(nn.Module):
    """Runs a function over two layers and a buffer as its forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.tensor(0.0))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def record(function: Any, *args: Tensor, rows: int = 2) -> tuple[Graph, list[Any]]:
    """Records a forward on 4 rows, and finds what carries them by recording it on fewer."""
    model = Forward(function)
    recorder = Recorder(Names(model))
    whole = recorder.record(model, args, {})
    part = tuple(t[:rows] if len(t) == 4 else t for t in args)
    micro = recorder.record(model, part, {}, answers=whole.graph.guards)
    return whole.graph, batch_dims(whole.graph, micro.graph, 4, rows)


def divide(function: Any, *args: Tensor, **options: Any) -> tuple[Graph, Batching, list[str], list[str]]:
    """Divides a forward, and names the calls of its body and of its tail."""
    graph, dims = record(function, *args)
    batching = split_tail(graph, dims, **options)
    body, tail = ([graph.nodes[i].name for i in part] for part in (batching.body, batching.tail))
    return graph, batching, body, tail


@pytest.mark.parametrize(
    ("function", "dim"),
    [
        (lambda m, x: m.a(x), 0),
        (lambda m, x: m.a(x).T, 1),
        (lambda m, x: m.a(x)[None].movedim(1, 2), 2),
        (lambda m, x: m.a(x).flatten(), 0),  # three values for each row
        (lambda m, x: m.a(x).view(-1, 2, 3), 0),  # one for each two rows
        (lambda m, x: m.a(x).mean(), None),
        (lambda m, x: m.a(x).mean(0), None),
        (lambda m, x: m.a.weight, None),
        (lambda m, x: m.a(x) @ m.a(x).T, "irregular"),
        (lambda m, x: torch.zeros(len(x) + 1), "irregular"),
    ],
)
def test_the_dimension_that_scales_with_the_batch(function, dim):
    graph, dims = record(function, torch.randn(4, 3))

    assert dims[graph.output_registers[0]] == dim


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda m, x: m.a(x) if len(x) > 2 else m.b(x), r"whole batch calls a \(.*\), a microbatch of 2 rows calls b \("),
        (
            lambda m, x: torch.stack([m.a(row) for row in x]),
            r"whole batch calls unbind \(.*\), a microbatch of 2 rows",
        ),
        (lambda m, x: m.a(x).relu() if len(x) > 2 else m.a(x), "whole batch makes 2 calls, a microbatch 1"),
        (lambda m, x: m.a(x) + torch.from_numpy(np.ones(len(x))).mean(), "made anew in each forward by a call"),
    ],
)
def test_other_calls_for_fewer_rows(function, text):
    with pytest.raises(StructureError, match=text):
        record(function, torch.randn(4, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x) + torch.from_numpy(np.ones(3)),
        lambda m, x: m.a(x) + torch.from_numpy(x.numpy()).mean(),  # answered with the numbers of the whole batch
    ],
)
def test_the_same_numbers_made_anew_are_a_constant(function):
    graph, _ = record(function, torch.randn(4, 3))

    assert len(graph.constants) == 1


def test_whether_memory_is_contiguous_may_depend_on_the_rows():
    graph, dims = record(lambda m, x: m.a(x.T.contiguous().T), torch.randn(4, 3), rows=1)

    assert dims[graph.output_registers[0]] == 0


def test_without_a_look_across_the_batch_there_is_no_tail():
    _, batching, body, tail = divide(lambda m, x: m.b(torch.relu(m.norm(m.a(x)))), torch.randn(4, 3))

    assert (body, tail) == (["a", "norm", "relu", "b"], [])
    assert batching.first_gathering is None


def test_a_loss_and_all_that_follows_is_the_tail():
    def forward(m, x, labels):
        logits = m.b(m.a(x))
        loss = F.cross_entropy(logits, labels.clamp(min=0))
        return loss * 2, logits

    graph, batching, body, tail = divide(forward, torch.randn(4, 3), torch.tensor([0, 1, 2, -1]))

    assert body == ["a", "b"]
    assert tail == ["clamp", "cross_entropy", "mul"]  # the labels never travel: the lead clamps them itself
    assert graph.nodes[batching.first_gathering].name == "cross_entropy"
    assert batching.wanted == (graph.nodes[1].outputs[0],)


def test_a_look_across_the_batch_is_what_depends_on_its_rows_in_any_way():
    def forward(m, x, mask):
        h = m.a(x)
        return h[mask], h.max(), h.softmax(0), h.T @ h

    _, _, body, tail = divide(forward, torch.randn(4, 3), torch.tensor([True, False, True, True]))

    assert body == ["a", "softmax", "get_attribute"]  # a softmax keeps its shape: only the self-check can tell
    assert tail == ["__getitem__", "max", "matmul"]


def test_what_nobody_asks_for_is_left_out_and_random_draws_are_not():
    _, _, body, tail = divide(lambda m, x: (m.b(x), torch.rand(3), m.a(x))[2], torch.randn(4, 3))

    assert body == ["rand", "a"]
    assert tail == []


def test_one_microbatch_has_no_tail():
    graph, _ = record(lambda m, x: m.a(x).mean(), torch.randn(4, 3))
    batching = split_tail(graph, None)

    assert [graph.nodes[i].name for i in batching.body] == ["a", "mean"]
    assert batching.tail == ()
    assert batching.wanted == tuple(graph.output_registers)


def _counts(m, x):
    m.count.add_(1.0)
    return m.a(x).mean() * m.count


def test_a_buffer_that_the_body_changes_comes_to_the_tail_as_a_value():
    graph, batching, body, tail = divide(_counts, torch.randn(4, 3))
    (count,) = (r for r, source in graph.sources.items() if source.name == "count")

    assert (body, tail) == (["add_", "a"], ["mean", "mul"])
    assert count in batching.wanted


@pytest.mark.parametrize("away", [set(), {"count"}])
def test_a_buffer_that_the_lead_lacks_comes_to_the_tail_as_a_value(away):
    graph, batching, *_ = divide(lambda m, x: (m.a(x).mean() * m.count, m.count), torch.randn(4, 3), away=away)
    (count,) = (r for r, source in graph.sources.items() if source.name == "count")

    assert (count in batching.wanted) == bool(away)
