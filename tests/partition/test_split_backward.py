"""A backward in two parts gives the gradients of a whole one, to the rounding of a product of four terms.

The same product can differ in its last bit with the alignment of its operands in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mgpu.partition.split_backward import SplitBackward

ROUNDING = {"rtol": 1e-6, "atol": 1e-6}

Forward = Callable[[nn.ParameterList, Tensor, Tensor], list[Tensor]]


def linear_chain(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    return [functional.linear(torch.tanh(functional.linear(x, w[0], w[2])), w[1]) + y]


def saved_output(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    """Sends what its own backward needs."""
    return [torch.exp(x @ w[0]) * 1.0, torch.sigmoid(y @ w[1])]


def view_output(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    return [(x @ w[0] + y).reshape(-1)[2:]]


def weight_used_twice(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.relu(x @ w[0]) @ w[0] @ w[1] + y]


def weight_beside_the_way(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    """The second weight's way meets the received tensor's only in its end, through more than one node."""
    return [x * torch.softmax(w[1].sum(0) * w[2], 0) + torch.tanh(w[0]).sum() + y]


def weight_off_the_way(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    """What the second result needs of the weights, no received tensor reaches."""
    return [x @ w[0] + y, torch.tanh(w[1]) * w[2]]


def skip_around_a_weight(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    return [x + (x @ w[0]) * torch.sigmoid(y @ w[1] + w[2])]


def unused_weight(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    return [x @ w[0], y * 2]


def received_tensor_sent_on(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    return [x @ w[0], y]


def several_results_of_one_call(w: nn.ParameterList, x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = (x @ w[0] + y).split(2, dim=1)
    return [a * 2, b @ w[1][:2]]


FORWARDS: list[Forward] = [
    linear_chain,
    saved_output,
    view_output,
    weight_beside_the_way,
    weight_off_the_way,
    skip_around_a_weight,
    unused_weight,
    received_tensor_sent_on,
    several_results_of_one_call,
    weight_used_twice,
]


def made(forward: Forward) -> tuple[list[Tensor], list[Tensor], list[Tensor], dict[int, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shapes = [(4, 4), (4, 4), (4,)]
    weights = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes])
    leaves = {7: torch.randn(3, 4, generator=draw).requires_grad_(), 9: torch.randn(3, 4, generator=draw).requires_grad_()}
    roots = forward(weights, *leaves.values())
    seeds = [torch.randn(root.shape, generator=draw) for root in roots]
    return roots, seeds, list(weights), leaves


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_equals_a_whole_backward(forward: Forward) -> None:
    roots, seeds, expected, received = made(forward)
    torch.autograd.backward(roots, seeds)
    roots, seeds, weights, leaves = made(forward)
    split = SplitBackward(roots, seeds, leaves, weights)
    gradients = split.inputs()
    assert all(weight.grad is None for weight in weights)
    split.weights()
    for register, leaf in received.items():
        assert (leaf.grad is None) == (register not in gradients)
        if leaf.grad is not None:
            torch.testing.assert_close(gradients[register], leaf.grad, **ROUNDING)
    for weight, other in zip(weights, expected, strict=True):
        assert (weight.grad is None) == (other.grad is None)
        if other.grad is not None:
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, other.grad, **ROUNDING)


def test_adds_to_gradients_that_are_there() -> None:
    roots, seeds, weights, leaves = made(linear_chain)
    split = SplitBackward(roots, seeds, leaves, weights)
    split.inputs()
    split.weights()
    alone = [weight.grad.clone() for weight in weights if weight.grad is not None]
    again, seeds, _, _ = made(linear_chain)
    roots, seeds, weights, leaves = made(linear_chain)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    split = SplitBackward(roots, seeds, leaves, weights)
    split.inputs()
    split.weights()
    assert len(again) == 1
    for weight, gradient in zip(weights, alone, strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 1 + gradient, **ROUNDING)


def test_without_received_tensors_all_is_done_with_the_weights() -> None:
    roots, seeds, weights, _ = made(linear_chain)
    split = SplitBackward(roots, seeds, {}, weights)
    assert split.inputs() == {}
    assert all(weight.grad is None for weight in weights)
    split.weights()
    assert all(weight.grad is not None for weight in weights)
