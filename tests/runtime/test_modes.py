"""Modes of a module and all below it, for its copy on a worker."""

import copy

import pytest
from torch import nn

from lightning_mgpu.runtime.modes import modes_of, set_modes


def test_every_module_below_follows():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    shipped = copy.deepcopy(module)
    module.eval()
    module[1][1].train()
    set_modes(shipped, modes_of(module))

    assert modes_of(shipped) == (False, False, False, False, True)
    assert shipped[1][1].training
    assert not shipped[0].training


def test_modes_of_another_module_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        set_modes(nn.Sequential(nn.Dropout()), (True,))
