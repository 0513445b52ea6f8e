"""Parameters and buffers without a value: built on the meta device, and made where the stages need them.

A model that is built on the meta device takes no memory. Once it is attached, placeholders stand for its tensors, as for those
that live on other stages. Their values are made one module at a time when they are sent to their owners: read from a
checkpoint that is mapped into memory, or drawn by the ``reset_parameters`` of the module they belong to.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.partition.names import Names
from lightning_mgpu.runtime.placeholder import HiddenBuffer, HiddenParameter, cover, is_hidden, restore, uncover

__all__ = ["Origins", "is_unmade", "relink"]

_PIECE_BYTES = 64 * 2**20


class _Unmade:
    """Takes note of what would be copied into it, which is how a ``load_state_dict`` finds the right places."""

    sources: ClassVar[dict[int, Tensor]] = {}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "copy_" and isinstance(args[0], _Unmade):
            _Unmade.sources[id(args[0])] = args[1]
            return args[0]
        if name == "__get__" and func.__self__ is Tensor.grad:
            return None
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]


class UnmadeParameter(_Unmade, HiddenParameter):  # type: ignore[misc]
    """Is a parameter that has no value yet."""


class UnmadeBuffer(_Unmade, HiddenBuffer):  # type: ignore[misc]
    """Is a buffer that has no value yet."""


def is_unmade(tensor: Any) -> bool:
    """Says whether a tensor has no value yet."""
    return isinstance(tensor, _Unmade)


class Origins:
    """Knows where the values come from of a module that was built on the meta device.

    Attributes:
        sources: tensors of a checkpoint, by the name of the parameter or buffer they are for.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Tensor] = {}
        self._seed = 0
        self._names: Names | None = None
        self._on_meta: dict[int, tuple[Tensor, Tensor]] = {}
        self._drawn: dict[str, Tensor] = {}

    @staticmethod
    def concern(module: nn.Module) -> bool:
        """Says whether a module has tensors without a value."""
        return any(t.is_meta or is_unmade(t) for t in (*module.parameters(), *module.buffers()))

    # -- placeholders ----------------------------------------------------------------------------------------------

    def adopt(self, root: nn.Module, device: torch.device) -> None:
        """Puts placeholders in the place of tensors on the meta device; they stay the same objects.

        Args:
            root: the user's module.
            device: where it is to seem to be.
        """
        self._names, self._seed = Names(root), torch.initial_seed()
        for name, tensor in self._names.tensors.items():
            if tensor.is_meta:
                empty = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                is_parameter = isinstance(tensor, nn.Parameter)
                other = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                _swap(self._names, tensor, other)
                self._on_meta[id(tensor)] = (tensor, other)
                cover(tensor, name, -1, UnmadeParameter if is_parameter else UnmadeBuffer)

    def give_up(self) -> None:
        """Puts what still has no value back on the meta device."""
        for tensor, other in self._on_meta.values():
            if is_unmade(tensor):
                uncover(tensor)
                _swap(self._current(), tensor, other)
        self._on_meta.clear()
        self._drawn.clear()
        self._names = None

    @contextmanager
    def noting_sources(self, root: nn.Module) -> Iterator[None]:
        """Takes note of what a block loads into tensors on the meta device, instead of losing it."""
        self.adopt(root, torch.device("cpu"))
        _Unmade.sources.clear()
        try:
            yield
            for name, tensor in self._current().tensors.items():
                if id(tensor) in _Unmade.sources:
                    self.sources[name] = _Unmade.sources[id(tensor)]
        finally:
            _Unmade.sources.clear()
            self.give_up()

    def forget(self) -> None:
        """Forgets everything, at the end of a Trainer call."""
        self.give_up()
        self.sources = {}

    def _current(self) -> Names:
        assert self._names is not None
        return self._names

    # -- values ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuses what could not be given a value.

        Raises:
            PlacementError: with the name of the tensor, and the remedy.
        """
        for name in self._unmade():
            if name not in self.sources:
                _resetter(*self._module_of(name), name)

    def _unmade(self) -> list[str]:
        return [] if self._names is None else [n for n, t in self._names.tensors.items() if is_unmade(t)]

    def value(self, name: str) -> Tensor:
        """Makes the value of a tensor that has none, on the CPU; again the same each time.

        Args:
            name: its name.
        """
        tensor = self._current().tensors[name]
        if name in self.sources:
            return self.sources[name].detach().to(dtype=tensor.dtype)
        if name not in self._drawn:
            self._drawn = self._draw(*self._module_of(name), name)
        return self._drawn.pop(name)

    def make_here(self, names: Iterable[str]) -> None:
        """Gives those of some tensors that have no value one, in the memory of this process."""
        for name in names if self._on_meta else ():
            tensor = self._current().tensors[name]
            if is_unmade(tensor):
                restore(tensor, self.value(name).clone())  # a mapped file may be written over

    def make_own(self, module: nn.Module) -> None:
        """Gives what a module reads itself a value here, since the module runs here.

        Those below it are asked for when they run, except the ones that torch's own layers read without calling them.
        """
        if self._on_meta:
            read = module.modules() if type(module).__module__.startswith("torch.nn.") else [module]
            tensors = [t for each in read for t in (*each._parameters.values(), *each._buffers.values()) if is_unmade(t)]
            self.make_here(self._current().name_of[id(t)] for t in tensors)

    def pieces(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Yields names, some 64 MB together where values have to be made, all of them otherwise."""
        piece: list[str] = []
        size_bytes = 0
        for name in names:
            tensor = self._current().tensors[name] if self._on_meta else None
            piece.append(name)
            size_bytes += tensor.numel() * tensor.element_size() if tensor is not None and is_unmade(tensor) else 0
            if size_bytes >= _PIECE_BYTES:
                yield piece
                piece, size_bytes = [], 0
        if piece:
            yield piece

    def _module_of(self, name: str) -> tuple[str, nn.Module]:
        """Finds the module that sets a tensor: the one it belongs to, or attention, which sets its output layer as well."""
        names, path = self._current(), name.rpartition(".")[0]
        above = path.rpartition(".")[0]
        if path and isinstance(names.module_at[above], nn.MultiheadAttention):
            path = above
        return path, names.module_at[path]

    def _draw(self, path: str, module: nn.Module, name: str) -> dict[str, Tensor]:
        """Lets a module set its own tensors, alone, with random numbers that depend on its path and the seed."""
        resets = _resetter(path, module, name)
        with _with_memory(module) as replaced, torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._seed + zlib.crc32(path.encode())) % 2**63)
            for reset in resets:
                reset()
            made = {self._current().name_of[id(real)]: owner[key] for owner, key, real in replaced if is_unmade(real)}
        drawn = {n: value.detach() for n, value in made.items() if self._module_of(n)[0] == path}
        unset = [n for n, value in drawn.items() if value.is_floating_point() and bool(value.isnan().any())]
        if unset:
            raise PlacementError(
                f"{_named(path, module)}.reset_parameters does not set {unset[0].rpartition('.')[2]!r}, so it has no value: it "
                "was built on the meta device; set it there, load it with ckpt_path=..., or build the module elsewhere"
            )
        return drawn


def _swap(names: Names, tensor: Tensor, other: Tensor) -> None:
    """Swaps what two tensors hold, which torch refuses while somebody refers to one weakly."""
    holder = names.module_at[names.name_of[id(tensor)].rpartition(".")[0]]
    if isinstance(holder, nn.RNNBase):
        holder._flat_weight_refs = []  # noqa: SLF001 - see relink
    torch.utils.swap_tensors(tensor, other)
    relink(holder)


def relink(module: nn.Module) -> None:
    """Lets a recurrent layer list the weights that it has now, as it does itself but without reading them."""
    if isinstance(module, nn.RNNBase):
        weights = [getattr(module, name, None) for name in module._flat_weights_names]  # noqa: SLF001 - no public way
        module._flat_weights = weights  # noqa: SLF001
        module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]  # noqa: SLF001


def _named(path: str, module: nn.Module) -> str:
    return f"{type(module).__name__} ({path})" if path else type(module).__name__


def _resetter(path: str, module: nn.Module, name: str) -> list[Callable[[], Any]]:
    """Finds what sets the tensors of a module."""
    if isinstance(module, nn.MultiheadAttention):
        return [module.out_proj.reset_parameters, module._reset_parameters]  # noqa: SLF001 - it has no other name
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise PlacementError(
            f"{name!r} was built on the meta device, and {_named(path, module)} has no reset_parameters to give it a value; "
            "add one that sets the module's own parameters and buffers, load them with ckpt_path=..., or build it elsewhere"
        )
    return [reset]


@contextmanager
def _with_memory(module: nn.Module) -> Iterator[list[tuple[dict[str, Any], str, Tensor]]]:
    """Gives a module and those below it other memory for a block, so that none that has a value loses it."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    memory: dict[int, Tensor] = {}
    try:
        for child in module.modules():
            registries: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for registry, key, real in [(each, *item) for each in registries for item in each.items()]:
                if real is not None:
                    replaced.append((registry, key, real))
                    registry[key] = memory.setdefault(id(real), _stand_in(real))
        yield replaced
    finally:
        for registry, key, real in replaced:
            registry[key] = real


def _stand_in(real: Tensor) -> Tensor:
    """Makes a copy, or what is no number where there is no value to copy."""
    filler = float("nan") if real.is_floating_point() or real.is_complex() else 0
    value = torch.full(real.shape, filler, dtype=real.dtype) if is_hidden(real) else real.detach().clone()
    return nn.Parameter(value, requires_grad=real.requires_grad) if isinstance(real, nn.Parameter) else value
