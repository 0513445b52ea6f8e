"""Gradients of a step that nobody has asked for yet, kept apart from those that are there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """Holds the gradients that a step made on the parameters of one process, until they are handed over."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._made: list[tuple[Tensor, Tensor]] = []

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Puts the gradients that are there aside."""
        self._before = [(p, p.grad) for p in parameters]
        for parameter, _ in self._before:
            parameter.grad = None

    def end(self) -> None:
        """Keeps what was made since, and puts the others back."""
        self._made = [(p, p.grad) for p, _ in self._before if p.grad is not None]
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

    def hand_over(self, factor: float) -> None:
        """Adds what was made, times ``factor``, to the gradients that are there."""
        with torch.no_grad():
            for parameter, made in self._made:
                if factor != 1.0:
                    made.mul_(factor)
                parameter.grad = made if parameter.grad is None else parameter.grad.add_(made)
        self._made = []
