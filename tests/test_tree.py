"""Trees: what is taken apart is put together as it was."""

import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_mgpu import tree


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Batch:
    tokens: Tensor
    name: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Slotted:
    image: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Frozen:
    image: Tensor
    inside: Slotted


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.note = "kept"


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (Batch(_tensor(1), "train", {"mask": _tensor(2)}), [_tensor(1), "train", _tensor(2)]),
        (Slotted(_tensor(1), 0.5), [_tensor(1), 0.5]),
        (Frozen(_tensor(1), Slotted(_tensor(2), 3.0)), [_tensor(1), _tensor(2), 3.0]),
        (Pair(_tensor(1), None), [_tensor(1), None]),
        ({"b": _tensor(1), "a": (_tensor(2), [_tensor(3), 4])}, [_tensor(1), _tensor(2), _tensor(3), 4]),
        (OrderedDict(b=_tensor(1), a="x"), [_tensor(1), "x"]),
        (Plain([Plain(_tensor(1)), 2]), [_tensor(1), "kept", 2, "kept"]),
        (SequenceClassifierOutput(logits=_tensor(1), hidden_states=(_tensor(2),)), [_tensor(1), _tensor(2)]),
        (_tensor(1), [_tensor(1)]),
        ([], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip(value, leaves):
    found, spec = tree.flatten(value)
    again = tree.unflatten(found, spec)

    assert spec.num_leaves == len(found)
    _check_leaves(found, leaves)
    assert type(again) is type(value)
    _check_leaves(tree.flatten(again)[0], leaves)
    assert tree.flatten(again)[1] == spec


def _check_leaves(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


def test_objects_are_copied_and_never_changed():
    original = Plain(Batch(_tensor(1), "train"))
    doubled = tree.map_tensors(lambda t: 2 * t, original)

    assert torch.equal(doubled.value.tokens, _tensor(2))
    assert doubled.value.name == "train"
    assert doubled.note == "kept"
    assert torch.equal(original.value.tokens, _tensor(1))
    assert doubled is not original


def test_packed_sequences_hold_anything_in_the_place_of_their_tensors():
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    leaves, spec = tree.flatten({"x": packed})
    names = tree.unflatten(["data", "sizes", None, None], pickle.loads(pickle.dumps(spec)))["x"]
    again = tree.unflatten(leaves, spec)["x"]

    assert type(names) is type(again) is PackedSequence
    assert names == ("data", "sizes", None, None)
    assert torch.equal(again.data, packed.data)
    assert again.batch_sizes is packed.batch_sizes


def test_cache_objects_are_taken_apart():
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    again = tree.map_tensors(lambda t: t + 1, cache)

    assert isinstance(again, DynamicCache)
    assert again.get_seq_length() == 3
    assert [float(t.mean()) for t in tree.tensors_in(again)] == [2.0, 1.0]
    assert [float(t.mean()) for t in tree.tensors_in(cache)] == [1.0, 0.0]


def test_model_output_keeps_its_two_ways_of_access():
    again = tree.map_tensors(torch.neg, SequenceClassifierOutput(loss=_tensor(1), logits=_tensor(2)))

    assert torch.equal(again.logits, _tensor(-2))
    assert again["logits"] is again.logits
    assert again.to_tuple()[0] is again.loss


@pytest.mark.parametrize("value", [Plain("no tensor"), nn.Linear(1, 1), torch.relu, torch.Generator(), Plain])
def test_what_holds_no_tensor_of_its_own_is_one_leaf(value):
    leaves, spec = tree.flatten(value)

    assert leaves[0] is value
    assert spec.num_leaves == 1
    assert tree.unflatten(leaves, spec) is value


def test_an_object_that_holds_itself_ends():
    looped = Plain(_tensor(1))
    looped.me = looped
    leaves, _ = tree.flatten(looped)

    assert len([leaf for leaf in leaves if isinstance(leaf, Tensor)]) == 1


def test_specs_are_equal_by_structure():
    def spec(value):
        return tree.flatten(value)[1]

    assert spec(Batch(_tensor(1), "a")) == spec(Batch(_tensor(2, 3), "b"))
    assert spec({"x": _tensor(1)}) == spec({"x": 7})
    assert spec({"x": _tensor(1)}) != spec({"y": _tensor(1)})
    assert spec(Slotted(_tensor(1))) != spec(Pair(_tensor(1), 1.0))
    assert spec(Plain(_tensor(1))) != spec(Plain(Plain(_tensor(1))))
    assert spec((_tensor(1),)) != spec([_tensor(1)])


def test_tensors_in_lists_them_in_order():
    a, b, c = _tensor(1), _tensor(2), _tensor(3)

    assert [id(t) for t in tree.tensors_in([Pair(a, "x"), {"k": Slotted(b)}, None, c, a])] == [id(t) for t in (a, b, c, a)]
