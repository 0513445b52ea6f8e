"""Patches: what covers a method, uncovers it, and stays behind when the object is copied."""

import copy
import pickle

import pytest
from torch import nn

from lightning_mgpu.runtime.patches import Cover, Patches


class Model(nn.Module):
    def __init__(self, base=1):
        super().__init__()
        self.base = base

    def step(self, x):
        """Adds the base."""
        return self.base + x


def _negated(plain):
    return lambda x: -plain(x)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def patches(model):
    patches = Patches()
    patches.put(model, "step", _negated)
    return patches


def test_a_cover_stands_before_the_method_of_one_object(model, patches):
    assert model.step(2) == -3
    assert Model().step(2) == 3
    assert isinstance(model.step, Cover)
    assert (model.step.__name__, model.step.__doc__) == ("step", "Adds the base.")


def test_it_is_taken_off(model, patches):
    patches.take_off()

    assert model.step(2) == 3
    assert "step" not in vars(model)
    patches.take_off()  # once more is nothing
    assert model.step(2) == 3


def test_covers_on_covers_come_off_in_turn(model, patches):
    patches.put(model, "step", lambda plain: lambda x: 10 * plain(x))
    assert model.step(2) == -30

    patches.take_off()
    assert model.step(2) == 3
    assert "step" not in vars(model)


def test_an_attribute_of_the_users_own_comes_back():
    model, patches = Model(), Patches()
    model.step = own = lambda x: x  # the user replaced the method by hand
    patches.put(model, "step", _negated)
    assert model.step(2) == -2

    patches.take_off()
    assert model.step is own


def test_lifted_for_a_block(model, patches):
    patches.put(model, "step", lambda plain: lambda x: 10 * plain(x))
    with patches.lifted():
        assert "step" not in vars(model)
        assert model.step(2) == 3
    assert model.step(2) == -30


def test_back_after_a_block_that_raised(model, patches):
    with pytest.raises(ZeroDivisionError), patches.lifted():
        _ = 1 / 0
    assert model.step(2) == -3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj))], ids=["deepcopy", "pickle"])
def test_a_copy_gets_its_own_plain_method(model, patches, copied):
    again = copied(model)
    again.base = 100

    assert again.step(2) == 102
    assert not isinstance(again.step, Cover)
    assert again.step.__self__ is again
    assert model.step(2) == -3


def test_a_copy_of_what_holds_the_object_likewise(model, patches):
    again = copy.deepcopy(nn.ModuleList([model]))[0]

    assert again is not model
    assert again.step(2) == 3
    assert again.step.__self__ is again
