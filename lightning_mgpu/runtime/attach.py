"""Attaches the pipeline to a user's module: its calls are answered by remote calls, until it is detached.

Which module is pipelined follows from what the user's step calls: the root's own forward, or the children it calls. A module
with fewer layers than there are stages runs on the lead beside it, unless its parameters are placed already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_mgpu.errors import PartitionError, RecordingError
from lightning_mgpu.runtime.faces import put_faces
from lightning_mgpu.runtime.lead import Lead

__all__ = ["Attachment", "count_layers"]


def count_layers(module: nn.Module) -> int:
    """Counts the modules below (and with) a module that hold parameters of their own."""
    return sum(any(p is not None for p in child._parameters.values()) for child in module.modules())


class Attachment:
    """Holds what was attached to one root.

    Attributes:
        num_remote_calls: calls that were answered remotely.
    """

    def __init__(self, lead: Lead, *, module: str | None, leave: Callable[[nn.Module], bool] = lambda _: False) -> None:
        self.lead = lead
        self.module = module
        self.num_remote_calls = 0
        self._busy = False
        self._remote: set[str] = set()
        lead.attending, lead.resting = self._working, self._resting
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

    def _is_remote(self, path: str, module: nn.Module) -> bool:
        if path in self._remote:
            return True
        wanted = path == self.module if self.module is not None else count_layers(module) >= self.lead.num_stages
        if wanted or self.lead.is_placed(module):
            self._remote.add(path)
        return path in self._remote

    def _forward(self, path: str, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if self._busy or not self._is_remote(path, module):
                    if not self._busy:
                        self.lead.origins.make_own(module)
                    return plain(*args, **kwargs)
                self.num_remote_calls += 1
                if self.lead.step.running:
                    return self.lead.step.call(path, args, kwargs)
                with self._working(), self.lead.resumed():
                    return self.lead.call(path, args, kwargs)

            return forward

        return make

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
        if self.num_remote_calls or self.lead.num_stages == 1:
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
