"""Copies: parameters and buffers of the lead that other processes hold as well, where two stages or replicas use them.

The user sees the lead's own and may change it in place, as any tensor on one device. What was changed is found before the next
call and the next step, and sent to the other holders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["Copies"]

_touched: set[int] = set()


class _CopiedParameter(nn.Parameter):
    """Is a parameter that notes who takes its ``data``: a change made through that leaves no other trace."""

    @property
    def data(self) -> Tensor:
        _touched.add(id(self))
        value: Tensor = nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        copy: nn.Parameter = memo[id(self)]
        return copy


class Copies:
    """Finds what the user changed of the tensors that the lead shares with other processes."""

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self._seen: dict[str, tuple[int, int, int]] = {}

    def watch(self) -> None:
        """Begins to watch those that are new, which the other holders have just been sent."""
        placement, names = self.lead.planner.placement, self.lead.planner.names
        for name, holders in placement.shared().items():
            if self.lead.index in holders and name not in self._seen:
                self._seen[name] = _state(names.current(name))
                tensor = names.tensors[name]
                if type(tensor) is nn.Parameter:
                    tensor.__class__ = _CopiedParameter

    def release(self) -> None:
        """Watches nothing any more."""
        for name in self._seen:
            tensor = self.lead.planner.names.tensors[name]
            if type(tensor) is _CopiedParameter:
                tensor.__class__ = nn.Parameter  # type: ignore[assignment]
                _touched.discard(id(tensor))
        self._seen = {}

    def note(self) -> None:
        """Takes what there is now for what the other holders have."""
        current = self.lead.planner.names.current
        for name in self._seen:
            tensor = current(name)
            self._seen[name] = _state(tensor)
            _touched.discard(id(tensor))

    def changed(self) -> list[str]:
        """Names what may be other than what the other holders have."""
        current = self.lead.planner.names.current
        return [name for name, seen in self._seen.items() if _state(t := current(name)) != seen or id(t) in _touched]


def _state(tensor: Tensor) -> tuple[int, int, int]:
    """Returns what changes with a tensor's value, as far as torch keeps count."""
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return id(tensor), address, -1 if tensor.is_inference() else tensor._version
