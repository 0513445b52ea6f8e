"""One run of a forward under observation: torch functions, leaf modules and values taken from tensors become a graph."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_mgpu import tree
from lightning_mgpu.errors import RecordingError
from lightning_mgpu.partition.ambient import Ambient
from lightning_mgpu.partition.attributes import AttributeGuards, watched
from lightning_mgpu.partition.batchnorm import by_any_momentum
from lightning_mgpu.partition.changes import ModuleChanges, draws, preserved_rng, unrepeatable_text
from lightning_mgpu.partition.fakes import Swap, fake_weights
from lightning_mgpu.partition.graph import (
    ApplyFunction,
    Graph,
    Guard,
    Line,
    Node,
    Ref,
    Source,
    Value,
    get_attribute,
    set_attribute,
)
from lightning_mgpu.partition.hooks import HookContainers
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.patching import patched_calls, unvalidated_distributions
from lightning_mgpu.partition.recording import Recording, StructureError, Unrecordable, is_leaf_type, version_of
from lightning_mgpu.partition.standins import on_stand_ins, run_for_real
from lightning_mgpu.partition.watch import OperatorWatch

__all__ = ["Opened", "RecordingRun"]

Opened = Callable[[nn.Module], Callable[..., Any] | None]
"""Returns another forward to record in the place of a module's own, if there is one."""

_VALUE_CALLS = frozenset(
    "__bool__ item __int__ __float__ __complex__ __index__ tolist numpy __array__ equal allclose is_nonzero __contains__ "
    "__format__ __repr__ __str__ __dlpack__".split()
)
_SIZE_CALLS = frozenset(
    "view reshape expand repeat zeros ones full empty arange narrow split chunk new_zeros new_ones new_full new_empty "
    "linspace tile unflatten roll triu tril eye randn rand select".split()
)
_METADATA_CALLS = frozenset("new_zeros new_ones new_full new_empty new_tensor".split())
_CHECKING_CALLS = frozenset("ctc_loss gaussian_nll_loss".split())
_REFUSED_CALLS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad backward share_memory_".split())
_FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_PACKAGE = Path(__file__).parent.parent
_OWN_FILES = (torch.__path__[0], str(_PACKAGE / "partition"), str(_PACKAGE / "runtime"))


class RecordingRun(TorchFunctionMode):
    """Is one run of a forward under observation."""

    def __init__(
        self,
        names: Names,
        promoted: dict[str, str],
        module: nn.Module,
        answers: Sequence[Guard] | None,
        *,
        real: bool,
        opened: Opened = lambda _: None,
    ) -> None:
        super().__init__()
        self.names = names
        self.promoted = promoted
        self.module = module
        self.answers = answers
        self.real = real
        self.opened = opened
        self.attributes = AttributeGuards()
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.tensors: list[Tensor] = []
        self.register_of: dict[int, int] = {}
        self.sources: dict[int, Source] = {}
        self.guards: list[Guard] = []
        self.constants: dict[int, Tensor] = {}
        self.private: set[int] = set()  # storages that depend on weights or random numbers
        self.owned: dict[int, str] = {}  # names of parameters and buffers by storage
        self.scopes = [self.names.path_of[id(module)]]
        self.leaves: dict[str, None] = {}
        self.paused = False
        self.known: dict[int, dict[str, Any]] = {}  # attributes of the modules when the run began
        self.swap: Swap

    # -- the run ---------------------------------------------------------------------------------------------------

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        ambient = Ambient.current().without_inference()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(ambient.applied())
            leaves, spec = tree.flatten((args, kwargs))
            copies: dict[int, Tensor] = {}
            copied = [self._copy_input(leaf, copies) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree.unflatten(copied, spec)
            stack.enter_context(preserved_rng())
            changes = stack.enter_context(ModuleChanges(self.names.root))
            hooked = stack.enter_context(HookContainers(self.names.root))
            self.known = changes.known
            if self.real:
                stack.enter_context(self.names.scratch_buffers())
            self.swap = stack.enter_context(fake_weights(self.names.root, enabled=not self.real, device=self.names.device))
            self._add_weights()
            inputs = [self._add_input(t, i) for i, t in enumerate(leaf for leaf in copied if isinstance(leaf, Tensor))]
            before = draws()
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            stack.enter_context(patched_calls(self))
            stack.enter_context(watched(self._note_attribute))
            stack.enter_context(unvalidated_distributions())
            with self:
                result = (self.opened(self.module) or self.module.forward)(*args, **kwargs)
            hooked.refuse_changes()
            if before != (draws()):
                reason = "draws from Python's or NumPy's random numbers, which a recording can't repeat; use torch.rand"
                raise RecordingError(unrepeatable_text(self.module, reason))
            return self._finish(result, changes, inputs)

    def _finish(self, result: Any, changes: ModuleChanges, inputs: list[int]) -> Recording:
        written = self._buffer_writes()
        stored = changes.stored_tensors(self.names, tuple(self.leaves))
        leaves, spec = tree.flatten((result, stored))
        outputs = [Ref(self._register(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._refuse_changes(inputs)
        for value, tensor in zip(self.values, self.tensors, strict=True):
            value.requires_grad = tensor.requires_grad  # a call in place may have changed it
        graph = Graph(
            self.nodes, self.values, self.sources, inputs, outputs, spec, self.guards, written, self.constants,
            tuple(self.leaves),
        )  # fmt: skip
        buffers = {}
        if self.real:
            kinds = self.names.kinds
            buffers = {name: self.names.current(name).detach().clone() for name, kind in kinds.items() if kind == "buffer"}
        versions = {r: version_of(t) for r, t in self.constants.items()}
        return Recording(graph, self.attributes, self.tensors, dict(self.promoted), buffers, versions)

    def _copy_input(self, tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
        if id(tensor) not in copies:
            copy = tensor.detach().clone()
            if tensor.requires_grad:
                copy = copy.requires_grad_().clone()  # no leaf, as the user's may be none
            copies[id(tensor)] = copy
        return copies[id(tensor)]

    def _refuse_changes(self, inputs: list[int]) -> None:
        given = {self.values[r].storage for r in inputs}
        constant = {self.values[r].storage for r in self.constants}
        for node in self.nodes:
            for register in node.mutates:
                if self.values[register].storage in constant:
                    reason = f"changes in place a tensor that is no buffer of it ({node}); register it as a buffer"
                    raise RecordingError(unrepeatable_text(self.module, reason))
                if self.values[register].storage in given:
                    raise RecordingError(
                        f"the forward of {type(self.module).__name__} changes an argument in place ({node}); the caller "
                        "keeps the argument and would not see the change: work on a copy, as in x = x.clone()"
                    )

    # -- registers -------------------------------------------------------------------------------------------------

    def _add(self, tensor: Tensor, source: Source | None = None, *, private: bool = False) -> int:
        register = len(self.values)
        storage = _storage_of(tensor)
        if private:
            self.private.add(storage)
        self.values.append(Value(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, storage, private))
        self.tensors.append(tensor)  # keeps ids unique while the recording runs
        self.register_of[id(tensor)] = register
        if source is not None:
            self.sources[register] = source
        return register

    def _add_weights(self) -> None:
        for name, tensor in self.names.tensors.items():
            if nn.parameter.is_lazy(tensor):
                continue
            current = self.names.current(name)  # another one by now, where a forward or the user has rebound a buffer
            present = current if self.real else self.swap.fake_of.get(id(current), current)
            kind: Literal["parameter", "buffer"] = "parameter" if self.names.kinds[name] == "parameter" else "buffer"
            self._add(present, Source(kind, name), private=True)
            self.owned.setdefault(self.values[-1].storage, name)

    def _add_input(self, tensor: Tensor, position: int) -> int:
        known = self.register_of.get(id(tensor))
        return known if known is not None else self._add(tensor, Source("input", str(position)))

    def _register(self, tensor: Tensor) -> int:
        known = self.register_of.get(id(tensor))
        if known is not None:
            return known
        if isinstance(tensor, FakeTensor) or tensor.requires_grad:
            self._refuse(
                f"uses a tensor of shape {tuple(tensor.shape)} that is no argument, parameter or buffer of it and was made "
                "by no call that can be recorded; pass it as an argument, or register it as a parameter or buffer"
            )
        register = self._add(tensor, Source("constant", str(len(self.constants))))
        self.constants[register] = tensor
        return register

    def _line(self) -> Line:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
            frame = frame.f_back
        return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def _refuse(self, reason: str) -> Any:
        stop = Unrecordable(reason, self._line())
        stop.path = self.scopes[-1]
        raise stop

    # -- calls -----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.paused or func is torch._C._set_grad_enabled:
            return func(*args, **kwargs)
        if name == "__get__":
            value = func(*args, **kwargs)
            if not isinstance(value, Tensor):
                return value
            return self.call(get_attribute, get_attribute, (args[0], func.__self__.__name__), {})
        if name == "__set__":
            prop = func.__self__.__name__
            return self.call(set_attribute, set_attribute, (args[0], prop, *args[1:]), {}, keep=True)
        if name in _REFUSED_CALLS:
            self._refuse(f"calls {name}, which can't be carried out on another stage")
        if name in _SIZE_CALLS or name in ("__getitem__", "__setitem__"):
            args, kwargs = self._indices_as_ints(name, args, kwargs)
        if name in _VALUE_CALLS:
            return self._value(func, args, kwargs)
        return self.call(func, func, args, kwargs, keep=name == "requires_grad_")

    def call(
        self, target: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = False
    ) -> Any:
        """Runs one call and notes it; what it calls itself is not noted.

        Args:
            target: what the node names, a path or a function.
            function: what computes the result now.
            args: positional arguments.
            kwargs: keyword arguments.
            keep: whether the call matters even if nobody reads its result, as one that draws random numbers always does.
        """
        with self._pause():
            return self._call(target, function, args, kwargs, keep=keep)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def _call(
        self, target: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool
    ) -> Any:
        tensors = tree.tensors_in((args, kwargs))
        reads = tuple(self._register(t) for t in tensors)
        versions = [version_of(t) for t in tensors]
        ambient = Ambient.current()
        with OperatorWatch() as watch:
            result = self._run(function, args, kwargs)
        watch.dynamic = watch.dynamic and not _has_fixed_shape(function, args, kwargs)
        mutates = tuple(r for r, t, v in zip(reads, tensors, versions, strict=True) if version_of(t) != v)
        if target is set_attribute and args[1] == "data":
            mutates = reads[:1]
        leaves = tree.flatten(result)[0]
        if not mutates and not keep and not any(isinstance(leaf, Tensor) for leaf in leaves):
            if watch.dynamic and reads:
                return self._note_value(target, args, kwargs, reads, result)
            return result
        changed = {self.values[r].storage for r in mutates} & self.owned.keys()
        keep = keep or watch.random or bool(changed)
        private = watch.random or any(self._is_private(t) for t in tensors) or isinstance(target, str)
        if private:
            self.private.update(_storage_of(self.tensors[r]) for r in mutates)
        outputs = tuple(self._output(leaf, private=private) if isinstance(leaf, Tensor) else None for leaf in leaves)
        line = self._line()
        self.nodes.append(
            Node(
                target, self._encode(args), self._encode(kwargs), outputs, reads, mutates, ambient, self.scopes[-1], line,
                watch.flops, watch.num_bytes, watch.random, watch.dynamic, keep,
                getattr(function, "__name__", "") in _METADATA_CALLS,
            )
        )  # fmt: skip
        self.nodes[-1].changes = tuple(sorted(self.owned[storage] for storage in changed))
        if watch.dynamic and not private and self.answers is None:
            for register in outputs:
                if register is not None:
                    self.guards.append(
                        Guard(register, _shape_of, (Ref(register),), {}, self.values[register].shape, len(self.nodes), line)
                    )
        return result

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = function(*args, **kwargs)
        except _FAKE_ERRORS as error:
            known = self._by_known_mask(function, args)
            if known is not None:
                return known
            if _has_fixed_shape(function, args, kwargs):
                return on_stand_ins(self.swap, function, args, kwargs, torch.rand)
            self._refuse(f"takes a shape or value from numbers that depend on weights ({type(error).__name__})")
        if args and result is args[0] and getattr(function, "__name__", "") == "contiguous":
            return result.view_as(result)  # whether it copies may depend on the number of rows; a register must not
        return result

    def _by_known_mask(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Rewrites ``fake[mask]`` with a mask known from the batch into an index whose shape is known."""
        name = getattr(function, "__name__", "")
        if name not in ("__getitem__", "masked_select") or len(args) < 2:
            return None
        tensor, mask = torch.broadcast_tensors(args[0], args[1]) if name == "masked_select" else args
        parts = mask if isinstance(mask, tuple) else (mask,)
        index: list[Any] = []
        for part in parts:
            if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
                if self._is_private(part) or isinstance(part, FakeTensor):
                    return None
                index.extend(part.nonzero(as_tuple=True))
            else:
                index.append(part)
        return tensor[tuple(index)]

    def _output(self, tensor: Tensor, *, private: bool) -> int:
        known = self.register_of.get(id(tensor))
        if known is not None:
            value = self.values[known]
            value.private |= private
            value.requires_grad = tensor.requires_grad
            return known
        return self._add(tensor, private=private or _storage_of(tensor) in self.private)

    def _is_private(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or _storage_of(tensor) in self.private

    def _encode(self, part: Any) -> Any:
        return tree.map_tensors(lambda t: Ref(self._register(t)), part)

    # -- values taken from tensors ---------------------------------------------------------------------------------

    def _value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tree.tensors_in((args, kwargs))
        reads = tuple(self._register(t) for t in tensors)
        name = getattr(func, "__name__", str(func))
        if any(self._is_private(t) for t in tensors):
            if name in ("__format__", "__repr__", "__str__"):
                return "<tensor>"
            self._refuse(f"takes a Python value ({name}) from a tensor that depends on weights or on random numbers")
        result = func(*args, **kwargs) if self.answers is None else None
        return self._note_value(func, args, kwargs, reads, result)

    def _note_value(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: tuple[int, ...], result: Any
    ) -> Any:
        position = sum(guard.target is not _shape_of for guard in self.guards)
        if self.answers is not None:
            asked = [guard for guard in self.answers if guard.target is not _shape_of]
            if position >= len(asked) or asked[position].target != target:
                raise StructureError(f"the forward asks for other values at {self._line()}")
            result = asked[position].value
        elif any(self._is_private(self.tensors[r]) for r in reads):
            self._refuse("takes a Python value from a tensor that depends on weights or on random numbers")
        register = reads[0] if reads else -1
        self.guards.append(
            Guard(register, target, self._encode(args), self._encode(kwargs), result, len(self.nodes), self._line())
        )
        return result

    def _indices_as_ints(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Takes integers that are tensors, where torch would turn them into numbers unseen, as guarded values."""

        def as_int(item: Any) -> Any:
            if isinstance(item, Tensor) and item.ndim == 0 and not item.is_floating_point() and item.dtype != torch.bool:
                return self._value(torch.Tensor.__index__, (item,), {})
            if isinstance(item, slice):
                return slice(as_int(item.start), as_int(item.stop), as_int(item.step))
            if type(item) in (tuple, list, torch.Size):
                return type(item)([as_int(i) for i in item])
            return item

        def slices(item: Any) -> Any:
            if isinstance(item, slice):
                return as_int(item)
            return tuple(slices(i) for i in item) if type(item) is tuple else item

        if name in ("__getitem__", "__setitem__"):
            return (args[0], slices(args[1]), *args[2:]), kwargs
        first = args[:1] if args and isinstance(args[0], Tensor) and args[0].ndim > 0 else ()
        rest = tuple(as_int(a) for a in args[len(first) :])
        return first + rest, {k: as_int(v) if k in ("size", "end", "start", "length") else v for k, v in kwargs.items()}

    # -- modules ---------------------------------------------------------------------------------------------------

    def module_call(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers ``module(*args, **kwargs)``: a leaf as one node, another module by going inside."""
        path = self.names.path_of.get(id(module))
        if path is None or self.paused:
            return plain(module, *args, **kwargs)
        if path not in self.promoted and isinstance(module, torch.jit.ScriptModule):
            self.promoted[path] = "is scripted"
        hooks = module._backward_hooks or module._backward_pre_hooks  # noqa: SLF001 - no public call lists them
        if hooks and not is_leaf_type(module):
            self.promoted.setdefault(path, "has backward hooks, which take it as one piece")
        leaf = is_leaf_type(module) and module is not self.module and self._has_own_weights(module)
        inside = (
            None
            if path in self.promoted or hooks or module._forward_hooks or module._forward_pre_hooks
            else self.opened(module)
        )
        if path in self.promoted or (leaf and inside is None):
            return self._leaf(module, plain, path, args, kwargs)
        self.scopes.append(path)
        try:
            return plain(module, *args, **kwargs) if inside is None else inside(*args, **kwargs)
        except Unrecordable as stop:
            if not stop.path or isinstance(module, _CONTAINERS):
                stop.path = self.scopes[-2] if isinstance(module, _CONTAINERS) else path
            raise
        finally:
            self.scopes.pop()

    def _has_own_weights(self, module: nn.Module) -> bool:
        """Says whether a leaf holds what is registered as its weights, rather than values that stand in for a call."""
        held = (t for registry in (module._parameters, module._buffers) for t in registry.values() if t is not None)
        return all(self.register_of.get(id(t)) in self.sources for t in held)

    def _leaf(
        self, module: nn.Module, plain: Callable[..., Any], path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.leaves[path] = None
        self.scopes.append(path)
        buffers = [(b, b._version) for b in module.buffers()]
        names = [self.sources[self.register_of[id(b)]].name for b, _ in buffers]
        real = path in self.promoted and not self.real
        moved: list[bool] = []

        def inside(*args: Any, **kwargs: Any) -> Any:
            if not real:
                with by_any_momentum(module):
                    return plain(module, *args, **kwargs)
            result, moved[:] = run_for_real(self.swap, module, plain, args, kwargs)
            return result

        num_nodes = len(self.nodes)
        try:
            result = self.call(path, inside, args, kwargs)
        finally:
            self.scopes.pop()
        moved = moved if real else [b._version != v for b, v in buffers]
        changed = tuple(name for name, m in zip(names, moved, strict=True) if m)
        if len(self.nodes) > num_nodes and (real or changed):
            self.nodes[-1].keep = True
            self.nodes[-1].changes = changed
        return result

    def function_apply(self, function: type[torch.autograd.Function], plain: Any, args: Any, kwargs: Any) -> Any:
        """Answers ``Function.apply``: as one node, except torch's own reentrant checkpoint, which is looked through."""
        if self.paused:
            return plain(*args, **kwargs)
        if function is CheckpointFunction:
            return args[0](*args[2:], **kwargs)

        return self.call(ApplyFunction(function), plain, args, kwargs)

    def _note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        known = self.known.get(id(module))
        if known is None:
            return
        own = object.__getattribute__(module, "__dict__")  # unwatched
        if name in own and own[name] is not known.get(name, ModuleChanges):
            return  # what the forward has set itself is nothing it depends on
        self.attributes.note(module, name, value)

    def _buffer_writes(self) -> dict[str, int]:
        written: dict[str, int] = {}
        for path, module in self.names.module_at.items():
            for name, tensor in module._buffers.items():
                full = f"{path}.{name}" if path else name
                if tensor is None:
                    continue
                register = self.register_of.get(id(tensor))
                source = self.sources.get(register) if register is not None else None
                if source is None or source.kind != "buffer":
                    written[full] = self._register(tensor)
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in self.register_of:
                    full = f"{path}.{name}" if path else name
                    raise RecordingError(f"the forward rebinds the parameter {full!r}; change its values in place instead")
        return written


def _has_fixed_shape(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a call only checks the numbers it looks at, as ``one_hot`` does when the number of classes is given."""
    name = getattr(function, "__name__", "")
    num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return name in _CHECKING_CALLS or (name == "one_hot" and isinstance(num_classes, int) and num_classes > 0)


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor whose shape follows from numbers in the batch."""
    return tuple(tensor.shape)


def _storage_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
