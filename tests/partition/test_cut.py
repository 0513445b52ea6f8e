"""Cuts: where stages begin, who owns which parameter, and what may not be cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.errors import PartitionError, PlacementError
from lightning_mgpu.partition.cut import CutRequest, check_cut_names
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.plan import Planner


class Forward(nn.Module):
    """Runs a function over three layers as its forward."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in "abc")
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.inner(self.embed(tokens)))


def _layers(count):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def _planner(model, num_stages=2, num_microbatches=2, **request):
    return Planner(model, num_stages, num_microbatches, CutRequest(**request))


def _check_owned(model, planner):
    """Checks that every parameter has one primary owner, and that their elements add up to the model's."""
    placement, tensors = planner.placement, dict(model.named_parameters())
    counts = [
        sum(tensors[n].numel() for n in placement.held_by(j) if placement.primary(n) == j) for j in range(placement.num_stages)
    ]
    assert placement.owners.keys() == tensors.keys()
    assert sum(counts) == sum(p.numel() for p in model.parameters())
    assert min(counts) > 0


@pytest.mark.parametrize(("num_stages", "begins"), [(1, ("0",)), (2, ("0", "2")), (4, ("0", "1", "2", "3"))])
def test_balanced_cuts(num_stages, begins):
    model = _layers(4)
    planner = _planner(model, num_stages)
    plan, _, new = planner.find("", (torch.randn(6, 4),), {})

    assert new
    assert plan.stage_names() == begins
    assert plan.sizes == (3, 3)
    _check_owned(model, planner)


@pytest.mark.parametrize("cuts", [("1",), ("3",), ("1", "4"), ("1", "2", "3", "4")])
def test_named_cuts(cuts):
    model = _layers(5)
    planner = _planner(model, len(cuts) + 1, cuts=cuts)
    plan, _, _ = planner.find("", (torch.randn(4, 4),), {})

    assert plan.stage_names() == ("0", *cuts)
    _check_owned(model, planner)
    for j, stage in enumerate(plan.stages[2]):
        assert set(stage.names) == set(planner.placement.held_by(j))


def test_a_tied_parameter_is_owned_where_it_is_used():
    model = Tied()
    planner = _planner(model, cuts=("out",))
    planner.find("", (torch.randint(7, (4, 3)),), {})

    assert planner.placement.owners["embed.weight"] == {0, 1}
    assert planner.placement.primary("embed.weight") == 1
    assert planner.placement.shared().keys() == {"embed.weight"}
    assert planner.placement.held_by(0) == ["embed.weight", "inner.weight", "inner.bias"]


def _views(m, x):
    h = m.a(x)
    view = h[:, :2]
    y = m.b(x)
    view.mul_(2)
    return m.c(h + y)


def test_no_cut_where_two_values_share_memory_that_is_changed_later():
    planner = _planner(Forward(_views), cuts=("b",))
    with pytest.raises(
        PartitionError, match=r"cannot cut at 'b': mul_ \(.*\) changes memory that two values share there; name"
    ):
        planner.find("", (torch.randn(4, 4),), {})

    assert _planner(Forward(_views), cuts=("c",)).find("", (torch.randn(4, 4),), {})[0].stage_names() == ("a", "c")
    assert _planner(Forward(_views)).find("", (torch.randn(4, 4),), {})[0].stage_names() == ("a", "c")


def _chain(m, x):
    return m.b(m.a(x))


@pytest.mark.parametrize(
    ("num_stages", "cuts", "text"),
    [
        (2, ("a",), "cut 'a' begins the forward, so no stage would lie before it; name a later module"),
        (2, ("c",), "cut 'c' names a module that the forward does not call; name one that it calls"),
        (3, None, r"cannot cut 2 layers of Forward into 3 stages; use at most 2 stages \(devices=2\)"),
    ],
)
def test_cuts_a_forward_does_not_allow(num_stages, cuts, text):
    with pytest.raises(PartitionError, match=f"^{text}$"):
        _planner(Forward(_chain), num_stages, cuts=cuts).find("", (torch.randn(4, 4),), {})


def test_cuts_out_of_order():
    text = r"^cuts=\['2', '1'\] are out of order; the forward calls them as cuts=\['1', '2'\]$"
    with pytest.raises(PartitionError, match=text):
        _planner(_layers(3), 3, cuts=("2", "1")).find("", (torch.randn(4, 4),), {})


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        (("b",), "1 cut would make 2 stages of 3 devices; name 2 cuts or use devices=2"),
        (("b", "b"), "cut 'b' is named 2 times; name each cut once"),
        (("b", "encoder"), "cut 'encoder' names no module; the nearest names are 'a', 'b', 'c'"),
    ],
)
def test_names_that_cannot_be_cuts_are_known_beforehand(cuts, text):
    with pytest.raises(PartitionError, match=f"^{text}$"):
        check_cut_names(cuts, Names(Forward(_chain)), 3)


def test_later_plans_keep_parameters_where_they_are():
    model = _layers(4)
    planner = _planner(model, cuts=("1",))  # no balance would choose it
    first, _, _ = planner.find("", (torch.randn(6, 4),), {})
    owners = dict(planner.placement.owners)
    again, _, new = planner.find("", (torch.randn(6, 4),), {})
    assert again is first
    assert not new

    planner.request = CutRequest()
    model.eval()
    for rows in (3, 6):
        plan, _, new = planner.find("", (torch.randn(rows, 4),), {})
        assert new
        assert plan.stage_names() == ("0", "1")
        assert planner.placement.owners == owners


def test_a_later_call_against_the_order_of_the_stages_is_refused():
    model = Forward(lambda m, x: m.a(m.b(x)) if m.backwards else m.b(m.a(x)))
    model.backwards = False
    planner = _planner(model)
    planner.find("", (torch.randn(4, 4),), {})
    model.backwards = True

    with pytest.raises(
        PlacementError, match=r"^a \(.*\) uses weights of stage 0 after b \(.*\) used those of stage 1, against"
    ):
        planner.find("", (torch.randn(4, 4),), {})


def test_a_loss_inside_the_model_is_its_tail():
    model = Forward(lambda m, x, labels: F.cross_entropy(m.c(m.b(m.a(x))), labels))
    plan, _, _ = _planner(model, cuts=("b",)).find("", (torch.randn(4, 4), torch.randint(4, (4,))), {})
    x, labels = plan.graph.inputs
    stages = plan.stages[2]

    assert [plan.graph.nodes[i].name for i in plan.batching.tail] == ["cross_entropy"]
    assert [plan.graph.nodes[i].name for i in plan.batching.body] == ["a", "b", "c"]
    assert [c.register for c in stages[0].inputs] == [x]
    crossing = {c.register for stage in stages for c in (*stage.receives, *stage.sends, *stage.inputs)}
    assert labels not in crossing
    assert stages[1].sends[0].register == plan.graph.nodes[2].outputs[0]


def test_a_look_across_the_batch_in_the_middle_is_refused():
    model = Forward(lambda m, x: m.c(m.b(m.a(x).mean(0, keepdim=True) + x)))
    # of the layers' work, forward and both gradients, b and c do 6 parts of 8: the first needs no gradient of its input
    with pytest.raises(PartitionError, match=r"^mean \(.*\) looks across the whole batch in the middle of Forward: 7\d% of"):
        _planner(model).find("", (torch.randn(4, 4),), {})

    assert _planner(model, num_microbatches=1).find("", (torch.randn(4, 4),), {})[0].sizes == (4,)
