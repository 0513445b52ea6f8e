"""Packing: a pickle without tensors, the tensors beside it, and names for what the receiver has."""

import threading

import pytest
import torch
from torch import nn

from lightning_mgpu.errors import ShippingError
from lightning_mgpu.runtime.pack import pack, unpack


def _find_nothing(kind, key):
    raise KeyError(f"{kind} {key}")


def test_tensors_travel_beside_the_pickle():
    big = torch.arange(1000.0)
    packed = pack({"x": big, "y": (3, "text")})
    again = unpack(packed, _find_nothing)

    assert packed.tensors == [big]
    assert len(packed.payload) < 1000 < big.nbytes
    assert packed.headers[0].shape == (1000,)
    assert packed.headers[0].dtype is torch.float32
    assert packed.headers[0].on_host
    assert packed.header().tensors == []
    assert again["x"] is big
    assert again["y"] == (3, "text")


def test_one_tensor_in_two_places_travels_once_and_stays_one():
    shared = torch.ones(2)
    packed = pack([shared, {"again": shared}])
    first, second = unpack(packed, _find_nothing)

    assert len(packed.tensors) == 1
    assert first is second["again"]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_stay_parameters(requires_grad):
    parameter = nn.Parameter(torch.ones(2), requires_grad)
    again = unpack(pack([parameter, torch.zeros(1)]), _find_nothing)

    assert isinstance(again[0], nn.Parameter)
    assert again[0].requires_grad == requires_grad
    assert torch.equal(again[0], parameter)
    assert type(again[1]) is torch.Tensor


def test_a_parameter_in_two_places_stays_one():
    layer = nn.Linear(2, 2)
    again = unpack(pack([layer, layer.weight]), _find_nothing)

    assert again[0].weight is again[1]


def test_what_the_receiver_has_goes_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    there = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    packed = pack({"weight": model[0].weight, "layer": model[1]}, names=names, modules={id(model[1]): "1"})
    asked = []

    def find(kind, key):
        asked.append((kind, key))
        return there.get_parameter(key) if kind == "name" else there.get_submodule(key)

    again = unpack(packed, find)

    assert packed.tensors == []
    assert asked == [("name", "0.weight"), ("module", "1")]
    assert again["weight"] is there[0].weight
    assert again["layer"] is there[1]


def test_functions_and_classes_made_on_the_spot_are_sent():
    factor = 3

    class Local:
        def times(self, x):
            return factor * x

    again = unpack(pack([lambda x: x + factor, Local()]), _find_nothing)

    assert again[0](1) == 4
    assert again[1].times(2) == 6


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (Locked(), "attribute 'lock' of Locked"),
        ({"model": Locked()}, "attribute 'lock' of Locked in 'model'"),
        ([1, {"key": threading.Lock()}], "'key' in item 1"),
    ],
)
def test_what_cannot_be_sent_is_named(value, way):
    with pytest.raises(ShippingError) as error:
        pack(value, what="the layer 'encoder'")

    assert str(error.value).startswith(
        f"cannot send the layer 'encoder' to its stage, since {way} can't be pickled: TypeError:"
    )
    assert 'leave it out in __getstate__, or keep the module on the lead with module="..."' in str(error.value)
    assert isinstance(error.value.__cause__, TypeError)


def test_the_fault_in_a_module_below_is_named_with_the_way_to_it():
    model = nn.Sequential(nn.Linear(2, 2), Locked())

    with pytest.raises(ShippingError, match=r"attribute 'lock' of Locked in '1' in attribute '_modules' of Sequential"):
        pack(model)
