"""Plans: what is split, what stays whole and why, and what the user may ask for."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.examples.cnn import CNN
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.record import Recorder
from lightning_mgpu.partition.tensor.attention import opened_attention
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.plan import plan, remark_small_share
from lightning_mgpu.partition.tensor.table import table
from tests.partition.tensor.lowered import roles
from tests.partition.tensor.models import TiedGpt


class Forward(nn.Module):
    """Runs a function over its layers."""

    def __init__(self, function, **layers):
        super().__init__()
        for name, child in layers.items():
            self.add_module(name, child)
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


def _plan(module, *args, num_ranks=2, **options):
    names = Names(module)
    return plan(Recorder(names, opened_attention).record(module, args, {}).graph, names, num_ranks, **options)


def _mlp():
    layers = {"fc": nn.Linear(6, 8), "proj": nn.Linear(8, 6), "head": nn.Linear(6, 4)}
    return Forward(lambda m, x: m.head(F.relu(m.proj(F.relu(m.fc(x))))), **layers)


def _reason(made, path):
    return next(layer.reason for layer in made.layers if layer.path == path)


# -- tables ---------------------------------------------------------------------------------------------------------------


def test_the_table_of_a_gpt():
    made = _plan(TiedGpt(), torch.randint(24, (2, 6)), gather_min=256)

    assert table(made) == (
        "layer               kind       role        split                elements  per rank  why\n"
        "(the module)        TiedGpt    whole                                 128       128  works on whole values\n"
        "words               Embedding  vocabulary  dim 0                     384       192\n"
        "blocks.*.norm1 (2)  LayerNorm  whole                                  64        64  works on whole values\n"
        "blocks.*.norm2 (2)  LayerNorm  whole                                  64        64  works on whole values\n"
        "blocks.*.qkv (2)    Linear     column      dim 0 in 3 segments     1,632       816\n"
        "blocks.*.proj (2)   Linear     row         dim 1                     544       288\n"
        "blocks.*.fc (2)     Linear     column      dim 0                   2,176     1,088\n"
        "blocks.*.out (2)    Linear     row         dim 1                   2,080     1,056\n"
        "norm                LayerNorm  whole                                  32        32  works on whole values\n"
        "each of 2 ranks holds 3,728 of 7,104 elements; 95% are split"
    )


def test_the_table_of_a_cnn_over_four_ranks():
    assert table(_plan(CNN(), torch.randn(2, 1, 28, 28), num_ranks=4)) == (
        "layer  kind    role    split  elements  per rank  why\n"
        "conv1  Conv2d  whole               260       260  its 10 outputs do not divide by 4\n"
        "conv2  Conv2d  column  dim 0     5,020     1,255\n"
        "fc1    Linear  row     dim 1    16,050     4,050\n"
        "fc2    Linear  whole               510       510  its 10 outputs do not divide by 4\n"
        "each of 4 ranks holds 6,075 of 21,840 elements; 96% are split"
    )


# -- reasons --------------------------------------------------------------------------------------------------------------

WHOLE = {
    "normalised": (lambda m, x: m.norm(m.a(x)), "norm normalises over the 6 elements that are split over the ranks"),
    "odd heads": (
        lambda m, x: m.b(_attend(m.a(x), 3)),
        "scaled_dot_product_attention attends with 3 heads, which do not divide by 2",
    ),
    "odd": (lambda m, x: m.odd(x) + m.norm(m.a(x)).sum(), "its 7 outputs do not divide by 2"),
    "the end": (lambda m, x: m.a(x), "its result is the forward's, and it has fewer than 65,536 elements"),
    "not used": (lambda m, x: m.b(x), "the recorded forward does not use it"),
    "used as a value": (lambda m, x: m.b(m.a(x)) + m.a.weight.sum(), "it is used in 2 ways, by a and sum"),
    "called twice": (lambda m, x: m.a(F.relu(m.a(F.relu(m.a(x))))), "it is used in 2 ways, by a"),
    "no rule": (lambda m, x: torch.cdist(m.a(x), x), "cdist has no rule for values that are split over the ranks"),
    "taken apart": (lambda m, x: m.b(m.a(x))[:, :1] * m.a(x)[:, 1:2], "__getitem__ takes apart"),
    "hooked": (lambda m, x: m.b(m.hooked(x)), "has hooks, which are to see whole values"),
    "lstm": (lambda m, x: m.lstm(x)[0], "LSTM has no rule for values that are split over the ranks"),
    "grouped": (lambda m, x: m.grouped(x[..., None]), "its channels are convolved in 2 groups"),
}  # fmt: skip


def _attend(h, num_heads):
    h = h.view(len(h), 1, num_heads, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(h, h, h).transpose(1, 2).reshape(len(h), -1)


@pytest.mark.parametrize("name", WHOLE)
def test_a_layer_that_is_whole_has_a_reason(name):
    function, reason = WHOLE[name]
    layers = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "odd": nn.Linear(6, 7)}
    model = Forward(function, **layers, hooked=nn.Linear(6, 6), grouped=nn.Conv1d(6, 6, 1, groups=2), lstm=nn.LSTM(6, 6))
    model.hooked.register_forward_hook(lambda *_: None)
    made = _plan(model, torch.randn(3, 6))
    path = name if name in ("odd", "hooked", "grouped", "lstm") else "a"

    assert roles(made)[path] == "whole"
    assert _reason(made, path).startswith(reason)


def test_large_layers_are_split_and_put_together():
    model = Forward(lambda m, x: m.norm(m.a(x)), a=nn.Linear(6, 8), norm=nn.LayerNorm(8))
    made = _plan(model, torch.randn(3, 6), gather_min=48)

    assert made.gathered == {"a.weight"}
    assert made.layouts == {"a.weight": Layout(0, (8,)), "a.bias": Layout(0, (8,))}
    assert _reason(made, "a") == "put together, since norm normalises over the 8 elements that are split over the ranks"


def test_small_embeddings_stay_whole():
    model = Forward(lambda m, x: m.words(x), words=nn.Embedding(8, 4))

    assert _reason(_plan(model, torch.tensor([1])), "words") == "fewer than 65,536 elements"
    assert roles(_plan(model, torch.tensor([1]), gather_min=32)) == {"words": "vocabulary"}
    assert _reason(_plan(model, torch.tensor([1]), num_ranks=3, gather_min=32), "words") == "its 8 rows do not divide by 3"


# -- steering -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steering", "expected"),
    [
        ({}, {"fc": "column", "proj": "row", "head": "whole"}),
        ({"fc": "whole"}, {"fc": "whole", "proj": "column", "head": "row"}),
        ({"*": "whole", "fc": "column", "proj": "row"}, {"fc": "column", "proj": "row", "head": "whole"}),
        ({"*": "whole"}, {"fc": "whole", "proj": "whole", "head": "whole"}),
        ({"fc": "column", "proj": "column"}, {"fc": "column", "proj": "column", "head": "row"}),
        ({"proj": "row", "fc": "whole"}, {"fc": "whole", "proj": "row", "head": "whole"}),
        ({"head": "column"}, {"fc": "column", "proj": "row", "head": "column"}),
        ({"?ead.weight": "column"}, {"fc": "column", "proj": "row", "head": "column"}),
    ],
)
def test_layers_are_what_was_asked(steering, expected):
    assert roles(_plan(_mlp(), torch.randn(3, 6), steering=steering)) == expected


REFUSED = {
    "no such layer": ({"fcc": "column"}, "'fcc' matches no layer of the recorded forward that can be split; the nearest are"),
    "no such role": ({"fc": "colwise"}, "'fc' asks for 'colwise'; ask for one of 'column', 'row', 'vocabulary', 'whole'"),
    "odd outputs": (
        {"head": "column"},
        (
            "'head' asks for 'column' of 'head.weight', but its 4 outputs do not divide by 3; use a multiple of 3, or tensor_"
            "parallel_size 2 or 4, or ask for 'whole'"
        ),
    ),
    "odd inputs": (
        {"proj": "row", "fc": "whole"},
        (
            "'proj' asks for 'row' of 'proj.weight', but its 8 inputs do not divide by 3; use a multiple of 3, or tensor_"
            "parallel_size 2 or 4 or 8, or ask for 'whole'"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_is_refused(name):
    steering, text = REFUSED[name]
    with pytest.raises(PartitionError, match=re.escape(text)):
        _plan(_mlp(), torch.randn(3, 6), num_ranks=3, steering=steering)


def test_a_layer_that_is_used_as_a_value_can_not_be_asked_for():
    model = Forward(lambda m, x: m.a(x) * m.a.weight.sum(), a=nn.Linear(6, 6))
    with pytest.raises(PartitionError, match=r"'a' asks for 'column' of 'a\.weight', but it is used in 2 ways, by a and sum"):
        _plan(model, torch.randn(3, 6), steering={"a": "column"})


def test_embeddings_are_asked_for_by_their_vocabulary():
    model = Forward(lambda m, x: m.words(x), words=nn.Embedding(8, 4, max_norm=1.0))
    with pytest.raises(PartitionError, match="but its option max_norm needs all rows; ask for 'whole'"):
        _plan(model, torch.tensor([1]), steering={"words": "vocabulary"})
    model.words.max_norm = None
    with pytest.raises(PartitionError, match='but it is an embedding; ask for "vocabulary" or "whole"'):
        _plan(model, torch.tensor([1]), steering={"words": "column"})
    assert roles(_plan(model, torch.tensor([1]), steering={"words": "vocabulary"})) == {"words": "vocabulary"}


def test_a_shared_weight_goes_by_any_of_its_names():
    made = _plan(TiedGpt(), torch.randint(24, (2, 6)), steering={"head": "column"})

    assert made.layouts["words.weight"] == Layout(0, (24,))
    assert roles(made)["words"] == "vocabulary"


# -- plans as values ------------------------------------------------------------------------------------------------------


def test_the_plan_is_the_same_for_other_batches_and_modes():
    model = TiedGpt(dropout=0.1)
    plans = []
    for training in (True, False):
        for rows, length in ((2, 6), (1, 6), (3, 1), (5, 8)):
            plans.append(_plan(model.train(training), torch.randint(24, (rows, length)), gather_min=256))

    assert len({(repr(sorted(p.layouts.items())), p.gathered, repr(p.layers)) for p in plans}) == 1


def test_plans_of_two_modules_join():
    model = Forward(lambda m, x: m.a(x), a=_mlp(), b=_mlp())
    names = Names(model)
    first, second = (
        plan(Recorder(names).record(child, (torch.randn(3, 6),), {}).graph, names, 2, path=path)
        for path, child in (("a", model.a), ("b", model.b))
    )
    both = first.joined(second)

    assert set(both.layouts) == set(first.layouts) | set(second.layouts)
    assert [layer.path for layer in both.layers] == ["a.fc", "a.proj", "a.head", "b.fc", "b.proj", "b.head"]


def test_shares_count_elements_once():
    made = _plan(_mlp(), torch.randn(3, 6))
    split = 6 * 8 + 8 + 8 * 6  # a row layer's bias stays whole

    assert made.share == pytest.approx(split / (6 * 8 + 8 + 8 * 6 + 6 + 6 * 4 + 4))
    assert made.local_shape("fc.weight", 1) == (4, 6)


def test_little_that_is_split_is_remarked():
    model = Forward(lambda m, x: m.b(m.a(x)), a=nn.Linear(6, 4), b=nn.LSTM(4, 16))
    made = _plan(model, torch.randn(3, 6))
    with pytest.warns(
        UserWarning, match=r"over 2 ranks splits 0% of the parameters, so that a rank holds 1,436 of 1,436; the largest"
    ):
        remark_small_share(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remark_small_share(_plan(_mlp(), torch.randn(3, 6)))
