"""What the lead shows of a parameter that lives on another stage: all but its value, and where that is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.runtime.placeholder import hide, is_hidden, restore

TEXT = r"^parameter 'conv1\.weight' lives on stage 0; read it inside strategy\.summon_parameters\(\)$"
GRADIENT_TEXT = (
    r", clip by self\.clip_gradients\(optimizer, \.\.\.\) or torch\.nn\.utils\.clip_grad_norm_\(\.\.\.\), called by its full "
    r"name, or take the norm from strategy\.gradient_norm\(\)$"
)


@pytest.fixture
def hidden() -> Iterator[nn.Parameter]:
    parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    value = parameter.detach().clone()
    hide(parameter, "conv1.weight", 0)
    yield parameter
    restore(parameter, value)


READS: list[tuple[str, Callable[[Any], Any]]] = [
    ("addition", lambda p: p + 1),
    ("norm", lambda p: p.norm()),
    ("clone", lambda p: p.clone()),
    ("data", lambda p: p.data),
    ("deepcopy", copy.deepcopy),
    ("linear", lambda p: nn.functional.linear(torch.ones(1, 3), p)),
    ("stack", lambda p: torch.stack([p, p])),
    ("item", lambda p: p[0, 0].item()),
    ("numpy", lambda p: p.detach().numpy()),
    ("writing", lambda p: p.copy_(torch.zeros(2, 3))),
    ("equality with another", lambda p: torch.equal(p, torch.zeros(2, 3))),
]


@pytest.mark.parametrize("read", [pytest.param(read, id=name) for name, read in READS])
def test_a_read_says_where_the_value_is(hidden: nn.Parameter, read: Callable[[Any], Any]) -> None:
    with pytest.raises(PlacementError, match=TEXT):
        read(hidden)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda p: p.grad, id="grad"),
        pytest.param(lambda p: nn.utils.clip_grad_norm_([p], 1.0), id="clip_grad_norm_"),
        pytest.param(lambda p: torch.optim.SGD([p], lr=0.1).step(), id="step"),
        pytest.param(lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(), id="zero_grad"),
    ],
)
def test_a_read_of_the_gradient_says_so(hidden: nn.Parameter, read: Callable[[Any], Any]) -> None:
    with pytest.raises(PlacementError, match="^the gradient of " + TEXT[1:-1] + GRADIENT_TEXT):
        read(hidden)


def test_what_is_known_without_the_value_is_answered(hidden: nn.Parameter) -> None:
    assert is_hidden(hidden)
    assert isinstance(hidden, nn.Parameter)
    assert hidden.shape == (2, 3)
    assert hidden.numel() == 6
    assert hidden.dtype == torch.float32
    assert hidden.device == torch.device("cpu")
    assert hidden.requires_grad
    assert len({hidden, hidden}) == 1
    assert repr(hidden) == "<conv1.weight of shape (2, 3) on stage 0>"


def test_requires_grad_can_be_set(hidden: nn.Parameter) -> None:
    hidden.requires_grad = False
    assert not hidden.requires_grad
    hidden.requires_grad_(True)
    assert hidden.requires_grad


def test_holds_one_element_in_memory(hidden: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        assert hidden.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(3)), lambda: torch.ones(3)])
def test_is_the_same_object_with_its_own_class_afterwards(make: Callable[[], Tensor]) -> None:
    tensor = make()
    kind = type(tensor)
    hide(tensor, "x", 1)
    assert is_hidden(tensor)
    restore(tensor, torch.full((3,), 2.0), torch.full((3,), 4.0) if kind is nn.Parameter else None)
    assert type(tensor) is kind
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    if kind is nn.Parameter:
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [4.0, 4.0, 4.0]
