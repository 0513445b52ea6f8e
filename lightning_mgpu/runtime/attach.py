"""Attaches the pipeline to a user's module: its calls are answered by remote calls, until it is detached.

Which module is pipelined follows from what the user's step calls: the root's own forward, or the children it calls. A module
with fewer layers than there are stages runs on the lead beside it, unless its parameters are placed already.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch

from lightning_mgpu.errors import PartitionError, RecordingError
from lightning_mgpu.runtime.faces import put_faces
from lightning_mgpu.runtime.lead import Lead
from lightning_mgpu.runtime.structure import Structure

__all__ = ["Attachment", "count_layers"]


def count_layers(module: nn.Module) -> int:
    """Counts the modules below (and with) a module that hold parameters of their own."""
    return sum(any(p is not None for p in child._parameters.values()) for child in module.modules())


class Attachment:
    """Holds what was attached to one root.

    Attributes:
        num_remote_calls: calls that were answered remotely.
    """

    def __init__(
        self,
        lead: Lead,
        *,
        module: str | None,
        leave: Callable[[nn.Module], bool] = lambda _: False,
        in_step: Callable[[], bool] = lambda: True,
        renew: Callable[[], None] | None = None,
    ) -> None:
        self.lead = lead
        self.module = module
        self.num_remote_calls = 0
        self._in_step = in_step
        self._renew = renew
        self._warned = False
        self._busy = False
        self._remote: set[str] = set()
        lead.attending, lead.resting = self._at_work, self._resting
        names = lead.planner.names
        for path, child in names.modules_below(""):
            if not leave(child) and next(child.parameters(), None) is not None:
                lead.patches.put(child, "forward", self._forward(path, child))
                lead.patches.put(child, "zero_grad", self._zero_grad(child))
                lead.patches.put(child, "state_dict", self._shown())
                lead.patches.put(child, "load_state_dict", self._at_home())
        for name in ("log", "log_dict"):
            if hasattr(lead.root, name):
                lead.patches.put(lead.root, name, self._not_in_forward(name))
        put_faces(lead.optimizers.faces, lead, lead.patches)
        self._structure = Structure(lead.root)

    def holds(self) -> bool:
        """Says whether the module is still made of what it was made of when it was attached."""
        return self._renew is None or self._structure.holds()

    def _is_remote(self, path: str, module: nn.Module) -> bool:
        if path in self._remote:
            return True
        wanted = path == self.module if self.module is not None else count_layers(module) >= self.lead.num_stages
        if wanted or self.lead.is_placed(module):
            self._remote.add(path)
        return path in self._remote

    def _is_aside(self, module: nn.Module) -> bool:
        """Says whether a call outside of steps finds a module whole, so that it can run as it is, in this process."""
        return not (self.lead.is_spread or self._in_step() or self.lead.origins.concern(module))

    def _forward(self, path: str, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if self._busy or self._is_aside(module) or not self._is_remote(path, module):
                    if not self._busy:
                        self.lead.origins.make_own(module)
                    return plain(*args, **kwargs)
                if not self.holds():
                    self._start_over()
                    return module.forward(*args, **kwargs)
                self._warn_of_modes()
                self.num_remote_calls += 1
                if self.lead.step.running:
                    return self.lead.step.call(path, args, kwargs)
                with self._at_work(), self.lead.resumed():
                    return self.lead.call(path, args, kwargs)

            return _unseen_by_compiler(forward)

        return make

    def _start_over(self) -> None:
        """Has the pipeline attached anew to a module that was changed.

        Raises:
            PartitionError: in the middle of a step by microbatches.
        """
        if self.lead.step.running:
            raise PartitionError(
                f"training_step changes the layers, parameters or hooks of {type(self.lead.root).__name__}, but "
                f"schedule={self.lead.schedule.name!r} runs it once per microbatch; change them in on_train_batch_start, or "
                'use schedule="gpipe"'
            )
        assert self._renew is not None
        self._renew()

    def _warn_of_modes(self) -> None:
        """Warns of a mode that counts or notes operators, since it sees those of this process alone."""
        modes = () if self._warned else dispatch._get_current_dispatch_mode_stack()  # noqa: SLF001 - no public call lists them
        if modes and self.lead.num_processes > 1:
            self._warned = True
            warnings.warn(
                f"{type(modes[-1]).__name__} sees only what runs in this process, one of {self.lead.num_processes}; use it "
                "while the module is whole, as in on_fit_start",
                stacklevel=4,
            )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._working(), _uncompiled():
            yield

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Lets the user's code run in the middle of the pipeline's work."""
        self._busy = False
        try:
            yield
        finally:
            self._busy = True

    def _not_in_forward(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Refuses what a forward may do on one device, but a replayed one would not do again."""

        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                if self._busy:
                    raise RecordingError(
                        f"the forward calls self.{name}, which a replayed forward would not do again; return the value and "
                        "log it in the step"
                    )
                return plain(*args, **kwargs)

            return method

        return make

    def _zero_grad(self, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(set_to_none: bool = True) -> None:
                if self.lead.placed:
                    with self.lead.resumed():
                        self.lead.optimizers.gradients.zero(module.parameters(), set_to_none=set_to_none)
                else:
                    plain(set_to_none)

            return zero_grad

        return make

    def _shown(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                if self._busy:
                    return plain(*args, **kwargs)
                with self._working(), self.lead.shown():
                    return plain(*args, **kwargs)

            return method

        return make

    def _at_home(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                self.lead.come_home()
                return plain(*args, **kwargs)

            return method

        return make

    def check_used(self, what: str) -> None:
        """Raises unless a call was answered remotely, so that no run leaves the workers idle in silence.

        Raises:
            PartitionError: with the numbers and the remedy.
        """
        if self.num_remote_calls or self.lead.num_processes == 1:
            return
        if self.module is not None:
            raise PartitionError(f"{what} never called {self.module!r}, the module to pipeline; name one it calls")
        raise PartitionError(
            f"{what} called no module with at least {self.lead.num_stages} layers, so there was nothing to cut into "
            f"{self.lead.num_stages} stages; call self(x) or a submodule that holds the layers, or use fewer devices"
        )

    def detach(self) -> None:
        """Makes the module whole and takes everything off it."""
        try:
            self.lead.close()
        finally:
            self.lead.patches.take_off()


def _uncompiled() -> AbstractContextManager[Any]:
    """Runs what torch.compile has wrapped as it was written, for a block, so that it can be recorded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _unseen_by_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch.compile from looking into a function that compiled code calls."""
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
