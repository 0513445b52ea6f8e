"""What changes on an optimizer is told once, and neither side undoes the other's changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from lightning_mgpu.runtime.settings import Settings, apply, own_attributes
from lightning_mgpu.runtime.steps import owned_part


def make(**attributes: Any) -> SGD:
    """Makes an optimizer of two groups with attributes of its own."""
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(3))], "lr": 0.5}]
    optimizer = SGD(groups, lr=0.1)
    vars(optimizer).update(attributes)
    return optimizer


def test_only_what_changed_is_told_and_only_once() -> None:
    optimizer = make(rate=1, table={"a": [1]}, old=0)
    settings = Settings(optimizer)
    optimizer.param_groups[1]["lr"] = 0.25
    optimizer.table["a"].append(2)  # type: ignore[attr-defined]
    del optimizer.old  # type: ignore[attr-defined]
    changes = settings.take_changes(optimizer)
    assert changes.groups == ({}, {"lr": 0.25})
    assert changes.attributes == {"table": {"a": [1, 2]}}
    assert changes.gone == ("old",)
    again = settings.take_changes(optimizer)
    assert (again.groups, again.attributes, again.gone) == (({}, {}), {}, ())


def test_changes_are_applied_to_a_part() -> None:
    optimizer = make(rate=1, old=0)
    part = owned_part(optimizer, lambda _: True)
    settings = Settings(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.rate = 2  # type: ignore[attr-defined]
    del optimizer.old  # type: ignore[attr-defined]
    apply(part, settings.take_changes(optimizer))
    assert part.param_groups[0]["momentum"] == 0.9
    assert own_attributes(part) == {"rate": 2}


def test_a_tensor_is_changed_in_place() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))
    part = owned_part(optimizer, lambda _: True)
    part.param_groups[0]["lr"] = mine = torch.tensor(0.1)
    settings = Settings(optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.5)  # as schedulers do
    apply(part, settings.take_changes(optimizer))
    assert part.param_groups[0]["lr"] is mine
    assert float(mine) == 0.5


def test_what_a_step_made_does_not_undo_what_the_user_changed() -> None:
    optimizer = make(rate=1)
    settings = Settings(optimizer)
    optimizer.param_groups[0]["lr"] = 0.01
    settings.take_group(optimizer, 0, {"lr": 0.1, "count": 3})
    settings.take_attributes(optimizer, {"rate": 5})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["count"]) == (0.01, 3)
    assert optimizer.rate == 5  # type: ignore[attr-defined]
    changes = settings.take_changes(optimizer)
    assert changes.groups == ({"lr": 0.01}, {})
    assert changes.attributes == {}
