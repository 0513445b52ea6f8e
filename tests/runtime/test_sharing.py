"""Parameters with several owners: their gradients become one, where there is any."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.runtime.sharing import Share, add_up, lend, take_back


class Receipt:
    """Is a tensor that has arrived."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> Tensor:
        return self.tensor


class Plane:
    """Passes tensors between stages of one process, which take their turns."""

    def __init__(self, stage: int, wires: dict[tuple[int, int], deque[Tensor]]) -> None:
        self.stage = stage
        self.wires = wires

    def send(self, tensor: Tensor, to: int) -> None:
        self.wires[self.stage, to].append(tensor.detach().clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Receipt:
        tensor = self.wires[source, self.stage].popleft()
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
        return Receipt(tensor)

    def flush(self) -> None:
        pass


class Stages:
    """Holds a copy of one parameter on each of three stages, with gradients."""

    def __init__(self, *gradients: float | None) -> None:
        self.wires: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.copies = [nn.Parameter(torch.ones(2)) for _ in gradients]
        for copy, gradient in zip(self.copies, gradients, strict=True):
            copy.grad = None if gradient is None else torch.full((2,), gradient)

    def each(self, function, order, *args):
        for stage in order:
            function(Plane(stage, self.wires), stage, *args, lambda _, stage=stage: self.copies[stage])
        assert not any(self.wires.values())

    def gradients(self):
        return [None if copy.grad is None else copy.grad[0].item() for copy in self.copies]


@pytest.mark.parametrize(
    ("parts", "whole"),
    [((1.0, 2.0, 4.0), 7.0), ((1.0, None, None), 1.0), ((None, 2.0, 4.0), 6.0), ((None, None, None), None)],
)
def test_the_primary_gets_the_sum_and_nothing_where_nobody_has_a_gradient(parts, whole):
    stages = Stages(*parts)
    stages.each(add_up, (0, 1, 2), {"w": Share(primary=2, senders=(0, 1))})

    assert stages.gradients() == [None, None, whole]


@pytest.mark.parametrize("whole", [3.0, None])
def test_the_primary_lends_it_for_a_step(whole):
    stages, owners = Stages(None, None, whole), {"w": frozenset({0, 2})}
    stages.each(lend, (2, 0, 1), owners)
    assert stages.gradients() == [whole, None, whole]

    for stage in range(3):
        take_back(stage, owners, lambda _, stage=stage: stages.copies[stage])
    assert stages.gradients() == [None, None, whole]
