"""Lowered graphs: which collectives they make, on which values, and that shapes are checked."""

import collections

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.tensor.call import Rewrite
from lightning_mgpu.partition.tensor.collectives import Collective
from lightning_mgpu.partition.tensor.rules import RULES
from tests.partition.tensor.lowered import Lowered
from tests.partition.tensor.models import GptBlock, TiedGpt


def _collectives(graph):
    return collections.Counter(node.target.__name__ for node in graph.nodes if isinstance(node.target, Collective))


class SeparateHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).view(2, 3, 4, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + x


def test_a_value_enters_once_however_many_layers_read_it():
    x = torch.randn(2, 3, 8).requires_grad_()
    (lowered, _) = Lowered(SeparateHeads(), 2, x).lowered(x)

    assert _collectives(lowered.graph) == {"Copy": 1, "Reduce": 1}


def test_without_gradient_nothing_is_copied():
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        (lowered, _) = Lowered(SeparateHeads(), 2, x).lowered(x)

    assert _collectives(lowered.graph) == {"Reduce": 1}


def test_four_sums_a_block_and_step():
    """Two in the forward, and by their conjugates two in the backward."""
    x = torch.randn(2, 6, 16).requires_grad_()
    (lowered, _) = Lowered(GptBlock(16, 4, 0.0), 2, x).lowered(x)

    assert _collectives(lowered.graph) == {"Copy": 2, "Reduce": 2}


def test_a_tied_head_is_gathered_once():
    words = torch.randint(24, (2, 6))
    (lowered, _) = Lowered(TiedGpt(), 2, words, gather_min=256).lowered(words)

    assert _collectives(lowered.graph) == {"VocabularyEmbedding": 1, "Copy": 5, "Reduce": 5, "Gather": 1}


def test_values_of_the_graph_are_parts():
    x = torch.randn(3, 6)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    lowered = Lowered(module, 4, x)
    graph = lowered.lowered(x)[1].graph
    shapes = [[graph.values[r].shape for r in node.outputs] for node in graph.nodes]

    assert [node.name for node in graph.nodes] == ["0", "1", "linear in 2", "Reduce in 2", "add_bias in 2"]
    assert shapes == [[(3, 2)], [(3, 2)], [(3, 4)], [(3, 4)], [(3, 4)]]
    assert [graph.values[r].shape for r, source in graph.sources.items() if source.name == "0.weight"] == [(2, 6)]
    assert graph.nodes[0].outputs[0] in graph.sharded
    assert graph.output_registers[0] not in graph.sharded
    assert lowered.recording.graph.values[lowered.recording.graph.nodes[0].outputs[0]].shape == (3, 8)


def test_work_is_counted_per_rank():
    x = torch.randn(3, 6)
    lowered = Lowered(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), 2, x)
    whole, part = lowered.recording.graph, lowered.lowered(x)[0].graph

    assert sum(node.flops for node in part.nodes) == sum(node.flops for node in whole.nodes) / 2


def test_a_part_of_another_shape_than_expected_is_refused(monkeypatch):
    x = torch.randn(3, 6)
    module = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 4))
    monkeypatch.setitem(RULES, "softmax", lambda call: Rewrite(call.all_outputs(None), enter=False))
    lowered = Lowered(module, 2, x)
    with pytest.raises(PartitionError, match=r"1 \(.*\) makes \(\(3, 4\), torch.float32\) of a rank's parts where \(\(3, 8\)"):
        lowered.lowered(x)


def test_a_call_that_fails_on_parts_is_named(monkeypatch):
    x = torch.randn(3, 6)
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    monkeypatch.setitem(RULES, "layer_norm", lambda call: Rewrite(call.all_outputs(call.state(call.args[0]))))
    lowered = Lowered(module, 2, x)
    with pytest.raises(PartitionError, match=r"layer_norm in 1 \(.*\) can't be called on a rank's parts: RuntimeError"):
        lowered.lowered(x)


def test_every_rank_of_an_even_plan_has_the_same_graph():
    words = torch.randint(24, (2, 6))
    lowered = Lowered(TiedGpt(), 4, words, gather_min=256)
    from lightning_mgpu.partition.tensor.lower import lower

    graphs = [lower(lowered.recording, lowered.names, lowered.plan, rank).graph for rank in range(4)]
    described = [
        [(node.target, str(node.args), node.outputs, node.reads) for node in g.nodes] + [v.shape for v in g.values]
        for g in graphs
    ]
    assert all(other == described[0] for other in described)
