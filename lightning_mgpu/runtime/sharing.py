"""Parameters with several holders: their gradients become one, on the primary holder, and all holders step alike.

A parameter has several holders where two stages use it, and where there are replicas. After each backward the other holders
hand their part to the primary, so that its gradient is always the whole one. Before a step the primary lends it to them, so
that all make the same step and their copies stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.mesh import Mesh
from lightning_mgpu.runtime.dataplane import DataPlane

__all__ = ["Share", "Use", "add_up", "lend", "shares_in", "take_back"]

Owners = Mapping[str, frozenset[int]]

_PIECE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Use:
    """Says where one trainable parameter is used that several processes hold: by position in the pipeline.

    Attributes:
        primary: the position of its primary holder, in the lead's replica.
        users: the positions of the stages of a plan that use it.
    """

    primary: int
    users: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """Says who takes part in adding one parameter's gradient up after a call: the users send, the primary receives."""

    primary: int
    senders: tuple[int, ...]


def shares_in(mesh: Mesh, uses: Mapping[str, Use], num_microbatches: int) -> dict[str, Share]:
    """Finds who takes part in adding gradients up after a call.

    Args:
        mesh: how the processes are arranged.
        uses: where parameters are used, by name.
        num_microbatches: microbatches of the batch; a replica that gets none has nothing to send.
    """
    working = [replica for replica, share in enumerate(mesh.deal(num_microbatches)) if share]
    found = {}
    for name, use in uses.items():
        primary = mesh.process(use.primary)
        senders = {mesh.process(position, replica) for position in use.users for replica in working} - {primary}
        if senders:
            found[name] = Share(primary, tuple(sorted(senders)))
    return found


def add_up(plane: DataPlane, process: int, shares: Mapping[str, Share], parameter_of: Callable[[str], Tensor]) -> None:
    """Adds the parts of this call's gradients up on the primary holders.

    Args:
        plane: the data plane.
        process: this process.
        shares: who takes part, by name of the parameter; equal in all processes.
        parameter_of: finds a parameter of this process.

    Raises:
        PlacementError: for a sparse gradient.
    """
    ways = _ways((sender, share.primary, name) for name, share in shares.items() for sender in share.senders)
    for (sender, primary), names in ways.items():
        if process == sender:
            parameters = [parameter_of(name) for name in names]
            _send(plane, names, parameters, primary)
            for parameter in parameters:
                parameter.grad = None
    for (sender, primary), names in ways.items():
        if process == primary:
            for parameter, part in _received(plane, [parameter_of(name) for name in names], sender):
                if part is not None:
                    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
    plane.flush()


def lend(plane: DataPlane, process: int, owners: Owners, parameter_of: Callable[[str], Tensor]) -> None:
    """Gives the other holders the whole gradient of the parameters they share, for one step.

    Args:
        plane: the data plane.
        process: this process.
        owners: the holders of each shared parameter the step concerns, by name.
        parameter_of: finds a parameter of this process.
    """
    ways = _ways((max(holders), other, name) for name, holders in owners.items() for other in holders - {max(holders)})
    for (primary, other), names in ways.items():
        if process == primary:
            _send(plane, names, [parameter_of(name) for name in names], other)
    for (primary, other), names in ways.items():
        if process == other:
            for parameter, whole in _received(plane, [parameter_of(name) for name in names], primary):
                parameter.grad = whole
    plane.flush()


def take_back(process: int, owners: Owners, parameter_of: Callable[[str], Tensor]) -> None:
    """Forgets lent gradients, which stay on the primary holder."""
    for name, holders in owners.items():
        if process in holders and process != max(holders):
            parameter_of(name).grad = None


def _ways(wanted: Iterator[tuple[int, int, str]]) -> dict[tuple[int, int], list[str]]:
    """Sorts what is to be sent by (sender, receiver), in an order that is the same in all processes."""
    ways: dict[tuple[int, int], list[str]] = {}
    for sender, receiver, name in sorted(wanted):
        ways.setdefault((sender, receiver), []).append(name)
    return ways


def _send(plane: DataPlane, names: Sequence[str], parameters: Sequence[Tensor], to: int) -> None:
    """Sends which of the parameters have a gradient, and the gradients."""
    grads = [parameter.grad for parameter in parameters]
    for name, grad in zip(names, grads, strict=True):
        if grad is not None and grad.layout != torch.strided:
            raise PlacementError(
                f"the gradient of {name!r} is sparse, and several processes hold that parameter, which need it whole; use "
                "sparse=False"
            )
    plane.send(torch.tensor([grad is not None for grad in grads], dtype=torch.uint8), to)
    for grad in grads:
        if grad is not None:
            plane.send(grad, to)


def _received(plane: DataPlane, parameters: Sequence[Tensor], source: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields each parameter with the gradient that `_send` sends of it; some megabytes are on their way at a time."""
    present = plane.receive((len(parameters),), torch.uint8, source).wait().tolist()
    yield from ((p, None) for p, there in zip(parameters, present, strict=True) if not there)
    for piece in _pieces([p for p, there in zip(parameters, present, strict=True) if there]):
        receipts = [plane.receive(parameter.shape, parameter.dtype, source) for parameter in piece]
        for parameter, receipt in zip(piece, receipts, strict=True):
            yield parameter, receipt.wait()


def _pieces(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    size_bytes = 0
    for parameter in parameters:
        piece.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
        if size_bytes >= _PIECE_BYTES:
            yield piece
            piece, size_bytes = [], 0
    if piece:
        yield piece
