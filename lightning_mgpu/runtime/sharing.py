"""Parameters with several owners: their gradients become one, on the primary owner, and all owners step alike.

After each backward the other owners hand their part to the primary, so that its gradient is always the whole one. Before a
step the primary lends it to them, so that all make the same step and their copies stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mgpu.runtime.dataplane import DataPlane

__all__ = ["Share", "add_up", "lend", "take_back"]

Owners = Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class Share:
    """Says who takes part in adding one parameter's gradient up after a call: the users send, the primary receives."""

    primary: int
    senders: tuple[int, ...]


def add_up(plane: DataPlane, stage: int, shares: Mapping[str, Share], parameter_of: Callable[[str], Tensor]) -> None:
    """Adds the parts of this call's gradients up on the primary owners.

    Args:
        plane: the data plane.
        stage: this process's stage.
        shares: who takes part, by name of the parameter; equal in all processes.
        parameter_of: finds a parameter of this owner.
    """
    for name, share in shares.items():
        if stage in share.senders:
            parameter = parameter_of(name)
            plane.send(torch.tensor([parameter.grad is not None], dtype=torch.uint8), share.primary)
            if parameter.grad is not None:
                plane.send(parameter.grad, share.primary)
            parameter.grad = None
        elif stage == share.primary:
            parameter = parameter_of(name)
            for sender in share.senders:
                if not bool(plane.receive((1,), torch.uint8, sender).wait().item()):
                    continue
                part = plane.receive(parameter.shape, parameter.dtype, sender).wait()
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
    plane.flush()


def lend(plane: DataPlane, stage: int, owners: Owners, parameter_of: Callable[[str], Tensor]) -> None:
    """Gives the other owners the whole gradient of the parameters they share, for one step.

    Args:
        plane: the data plane.
        stage: this process's stage.
        owners: the owners of each shared parameter the step concerns, by name.
        parameter_of: finds a parameter of this owner.
    """
    for name in sorted(owners):
        primary = max(owners[name])
        if stage == primary:
            parameter = parameter_of(name)
            has = torch.tensor([parameter.grad is not None], dtype=torch.uint8)
            for other in sorted(owners[name] - {primary}):
                plane.send(has, other)
                if parameter.grad is not None:
                    plane.send(parameter.grad, other)
        elif stage in owners[name]:
            parameter = parameter_of(name)
            has = plane.receive((1,), torch.uint8, primary).wait()
            if bool(has.item()):
                parameter.grad = plane.receive(parameter.shape, parameter.dtype, primary).wait()
            else:
                parameter.grad = None
    plane.flush()


def take_back(stage: int, owners: Owners, parameter_of: Callable[[str], Tensor]) -> None:
    """Forgets lent gradients, which stay on the primary owner."""
    for name, stages in owners.items():
        if stage in stages and stage != max(stages):
            parameter_of(name).grad = None
