"""Placeholders: what the user's module holds for a parameter or buffer whose value lives on another stage.

The tensor object stays the same, so identities, optimizer references and counts stay right; its memory is one element, and
whatever would read it raises one sentence that says where the value is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_mgpu.errors import PlacementError

__all__ = [
    "HiddenBuffer",
    "HiddenParameter",
    "cover",
    "hidden_name",
    "hide",
    "is_hidden",
    "kept_by_detach",
    "restore",
    "uncover",
]

_ANSWERED_CALLS = frozenset(
    "size dim numel nelement element_size is_floating_point is_complex is_signed get_device __len__ requires_grad_ ndimension "
    "__hash__ new_zeros new_ones new_empty new_full new_tensor new_empty_strided zeros_like ones_like empty_like full_like "
    "rand_like randn_like randint_like".split()
)
_ANSWERED_TO_OTHERS = frozenset({"to", "type_as"})  # they take the dtype and device of a second tensor
_ANSWERED_PROPERTIES = frozenset(
    "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu is_sparse is_quantized is_meta is_nested is_mps "
    "is_xpu is_mkldnn names itemsize nbytes grad_fn output_nr _backward_hooks is_sparse_csr".split()
)


class _Hidden:
    """Answers what is known of a tensor without its value, and raises for the rest."""

    where: ClassVar[dict[int, tuple[str, int]]] = {}
    hooks: ClassVar[dict[int, Any]] = {}
    kept: ClassVar[bool] = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        known = name in _ANSWERED_CALLS or (name in _ANSWERED_TO_OTHERS and not isinstance(args[0], _Hidden))
        if name in ("__get__", "__set__"):
            prop = func.__self__.__name__
            known = prop in _ANSWERED_PROPERTIES and (name == "__get__" or prop == "requires_grad")
        if known:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "detach" and _Hidden.kept:
            return args[0]
        if name == "equal" and len(args) == 2 and (args[0] is args[1] or args[0].shape != args[1].shape):
            return args[0] is args[1]
        hidden = next((a for a in _flat(args, kwargs) if isinstance(a, _Hidden)), None)
        raise PlacementError(_text(hidden, func))

    def __repr__(self) -> str:
        name, stage = _Hidden.where.get(id(self), ("?", -1))
        with torch._C.DisableTorchFunctionSubclass():
            return f"<{name} of shape {tuple(self.shape)} on stage {stage}>"  # type: ignore[attr-defined]


class HiddenParameter(_Hidden, nn.Parameter):  # type: ignore[misc]
    """Is a parameter whose value lives on another stage."""


class HiddenBuffer(_Hidden, Tensor):  # type: ignore[misc]
    """Is a buffer whose value lives on another stage."""


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Any]:
    flat: list[Any] = []
    for arg in (*args, *(kwargs or {}).values()):
        flat.extend(arg if isinstance(arg, (list, tuple)) else (arg,))
    return flat


def _text(hidden: Any, func: Any) -> str:
    name, stage = _Hidden.where.get(id(hidden), ("a tensor", -1))
    owner = getattr(func, "__self__", None)
    of_gradient = getattr(func, "__name__", "") in ("__get__", "__set__") and getattr(owner, "__name__", "") == "grad"
    kind = "parameter" if isinstance(hidden, nn.Parameter) else "buffer"
    what = f"the gradient of {kind} {name!r}" if of_gradient else f"{kind} {name!r}"
    if stage < 0:
        return (
            f"{what} has no value yet, since it was built on the meta device; it gets one when the module that holds it is "
            "called, from a checkpoint (ckpt_path) or the module's reset_parameters"
        )
    text = f"{what} lives on stage {stage}; read it inside strategy.summon_parameters()"
    if not of_gradient:
        return text
    return (
        f"{text}, clip by self.clip_gradients(optimizer, ...) or torch.nn.utils.clip_grad_norm_(...), called by its full name, "
        "or take the norm from strategy.gradient_norm()"
    )


def is_hidden(tensor: Tensor) -> bool:
    """Says whether a tensor's value lives elsewhere."""
    return isinstance(tensor, _Hidden)


def hidden_name(tensor: Tensor) -> str:
    """Returns the name under which a hidden tensor's owner has it."""
    return _Hidden.where[id(tensor)][0]


@contextmanager
def kept_by_detach() -> Iterator[None]:
    """Lets ``detach`` return a hidden tensor itself for a block, so that a ``state_dict`` can be made of placeholders."""
    before, _Hidden.kept = _Hidden.kept, True
    try:
        yield
    finally:
        _Hidden.kept = before


def _empty_like(tensor: Tensor) -> Tensor:
    """Makes a tensor of the same shape that holds one number, or none where it is sparse."""
    if tensor.layout != torch.strided:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device=tensor.device)
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def hide(tensor: Tensor, name: str, stage: int) -> None:
    """Frees the memory of a tensor and makes reads of it raise.

    Args:
        tensor: a parameter or buffer of the user's module; stays the same object.
        name: what it is called.
        stage: where its value lives.
    """
    if is_hidden(tensor) and _Hidden.where[id(tensor)][1] >= 0:
        return
    if not is_hidden(tensor):
        with torch.inference_mode(False), torch.no_grad():
            tensor.grad = None
            tensor.data = _empty_like(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            _Hidden.hooks[id(tensor)] = tensor.register_post_accumulate_grad_hook(_refuse_gradient)
    cover(tensor, name, stage, HiddenParameter if isinstance(tensor, nn.Parameter) else HiddenBuffer)


def _refuse_gradient(tensor: Tensor) -> None:
    """Raises where a graph made of the value that was here sends its gradient here, where it would be lost.

    Raises:
        PlacementError: with the name of the parameter, its stage and the remedy.
    """
    with torch._C.DisableTorchFunctionSubclass():
        tensor.grad = None
    name, stage = _Hidden.where.get(id(tensor), ("?", -1))
    raise PlacementError(
        f"parameter {name!r} lives on stage {stage}, but the loss also depends on the value it had on the lead, inside "
        "strategy.summon_parameters() or before the pipelined module was first called; that part of its gradient would be "
        "lost. Make such a term part of the pipelined module's forward, or call the pipelined module first"
    )


def cover(tensor: Tensor, name: str, stage: int, kind: type[Any]) -> None:
    """Makes reads of a tensor raise.

    Args:
        tensor: the tensor, whose value is not needed any more.
        name: what it is called.
        stage: where its value lives; -1 where it has none.
        kind: the class of the placeholder.
    """
    _Hidden.where[id(tensor)] = (name, stage)
    tensor.__class__ = kind


def uncover(tensor: Tensor) -> None:
    """Makes an ordinary tensor of a placeholder, whatever it holds."""
    hook = _Hidden.hooks.pop(id(tensor), None)
    if hook is not None:
        hook.remove()
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
    _Hidden.where.pop(id(tensor), None)


def restore(tensor: Tensor, value: Tensor, gradient: Tensor | None = None) -> None:
    """Gives a hidden tensor its value back, and its class.

    Args:
        tensor: the hidden tensor.
        value: its value.
        gradient: its gradient, if any.
    """
    uncover(tensor)
    with torch.inference_mode(False), torch.no_grad():
        tensor.data = value.to(tensor.device)
        tensor.grad = None if gradient is None else gradient.to(tensor.device)
