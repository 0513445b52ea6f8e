"""Lowered graphs cut into stages: a pipeline whose stages are each run by all ranks, in one process."""

import copy

import pytest
import torch
from torch import nn

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.assemble import make_stages
from lightning_mgpu.partition.batch import batch_dims, split_tail
from lightning_mgpu.partition.body import Body
from lightning_mgpu.partition.cost import weights_of
from lightning_mgpu.partition.cut import CutRequest, cut, place
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.placement import Placement
from lightning_mgpu.partition.plan import ModuleStore
from lightning_mgpu.partition.stage import StageRun
from lightning_mgpu.partition.tensor.collectives import joined
from lightning_mgpu.partition.tensor.local import LocalStore, local_tensors
from lightning_mgpu.partition.tensor.lower import lower
from tests.partition.tensor.lowered import Lowered, Outcome, copied
from tests.partition.tensor.models import Bottleneck, TiedGpt
from tests.partition.tensor.ranks import Ranks

ROWS = 2


class Staged(Lowered):
    """Cuts the lowered graph of a forward that takes one tensor and returns one."""

    def cut(self, x, num_stages, cuts=None):
        whole = lower(self.record(x), self.names, self.plan, 0)
        micro = lower(self.recorder.record(self.module, (x[:ROWS],), {}), self.names, self.plan, 0)
        dims = batch_dims(whole.graph, micro.graph, len(x), ROWS)
        batching = split_tail(whole.graph, dims)
        self.body = Body(whole.graph, batching, self.names)
        placement = Placement(num_stages)
        layout = cut(whole.graph, batching, self.names, placement, CutRequest(cuts), "")
        place(whole.graph, batching, layout, self.names, placement, "")
        self.placement = placement
        return make_stages(
            micro,
            batching,
            layout,
            store=ModuleStore(self.names),
            names_of=lambda index: weights_of(whole.graph, index, self.names),
            simple_values=lambda path: micro.attributes.simple_values(self.names.module_at[path]),
            owners_of=lambda name: placement.owners.get(name, frozenset({placement.lead})),
        )

    def run_stages(self, x, stages, gradient):
        def on_rank(group):
            own = [copy.copy(stage) for stage in stages]
            for stage in own:
                stage.program = joined(copied(stage.program), group)
            store = LocalStore(self.names, local_tensors(self.names, self.plan, group.rank))
            parts = x.split(ROWS)
            runs = [StageRun(store, range(len(parts)), grad=True, inference=False, seed=7) for _ in own]
            results = []
            for i, part in enumerate(parts):
                flowing = []
                for stage, run in zip(own, runs, strict=True):
                    flowing = run.forward(stage, i, flowing, [part] * len(stage.inputs))
                results.append(flowing[0])
            for i, given in enumerate(gradient.split(ROWS)):
                arriving = {own[-1].sends[0].register: given}
                for run in reversed(runs):
                    arriving = run.backward(i, arriving, retain=False, accumulate=True)
            return Outcome(torch.cat(results), store, [], torch.get_rng_state())

        return Ranks(self.num_ranks).run(on_rank)


@pytest.mark.parametrize(
    ("model", "num_ranks", "num_stages"), [(TiedGpt, 2, 2), (TiedGpt, 2, 4), (TiedGpt, 4, 2), (Bottleneck, 2, 2)]
)
def test_stages_of_parts_are_the_module(model, num_ranks, num_stages, double):
    module = model()
    x = torch.randint(24, (6, 5)) if model is TiedGpt else torch.randn(6, 3, 8, 8)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()  # in training it would normalise each microbatch by itself
    staged = Staged(module, num_ranks, x, gather_min=256)
    stages = staged.cut(x, num_stages)

    whole = copy.deepcopy(module)
    expected = whole(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    outcomes = staged.run_stages(x, stages, gradient)

    for outcome in outcomes:
        torch.testing.assert_close(outcome.result, expected.detach(), rtol=1e-9, atol=1e-9)
    staged.compare_tensors(whole, outcomes, 1e-9, ())
    assert all(stage.program.steps for stage in stages)


def test_no_cut_lies_at_a_value_that_is_split():
    x = torch.randn(4, 6)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    staged = Staged(module, 2, x)
    first, second = staged.cut(x, 2)
    names = [staged.body.graph.nodes[i].name for i in staged.body.nodes]
    reasons = dict(zip(names, staged.body.illegal(), strict=False))

    assert all(crossing.register not in staged.body.graph.sharded for crossing in second.receives)
    assert reasons["1"].endswith("makes a value that is split over ranks there")
    assert reasons["Reduce in 2"].endswith("makes a value that is split over ranks there")
    assert reasons["3"] == ""
    assert first.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    with pytest.raises(PartitionError, match=r"cannot cut at '5': .* makes a value that is split over ranks there"):
        staged.cut(x, 2, ("5",))


def test_what_needs_the_whole_batch_is_not_split():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.proj = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            return self.proj(self.fc(x - x.mean(0)).relu())

    x = torch.randn(4, 6)
    with pytest.raises(PartitionError, match=r"fc .* needs the whole batch, and is split over tensor-parallel ranks"):
        Staged(Loss(), 2, x).cut(x, 2)


def test_a_cut_by_name_lies_before_all_that_belongs_to_the_layer():
    words = torch.randint(24, (4, 5))
    staged = Staged(TiedGpt(), 2, words)
    _, second = staged.cut(words, 2, ("blocks.1",))
    labels = [step.label for step in second.program.steps]

    assert labels[0].startswith("blocks.1.norm1 ")
    assert Names(staged.module).is_shared("words.weight")
    assert staged.placement.owners["words.weight"] == {0, 1}
