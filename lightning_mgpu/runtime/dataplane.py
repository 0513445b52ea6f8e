"""The data plane: tensors between the stages of one pipeline, over gloo on CPUs and NCCL on GPUs.

Ranks are stage indices. The group is a process group of its own and never torch's WORLD, so that to the user's code, to
Lightning and to torchmetrics the pipeline stays what it is for them: one process. This file is the only one that knows torch's
process group classes.

On NCCL the operations of one group between one pair of ranks run in the order they are posted, a receive that waits holding
up the send behind it. Schedules send both ways at a time, so each direction has a group of its own there.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_mgpu.runtime.pack import Packed, TensorHeader
from lightning_mgpu.runtime.waiter import Waiter

__all__ = ["CommunicationError", "DataPlane", "Receipt"]

_AT_THE_END = sys.maxsize
_TIMEOUT = datetime.timedelta(days=1)  # a stage may wait for the user's code as long as that takes; death is noticed at once


class CommunicationError(RuntimeError):
    """Says that a tensor could not be sent or received, most often because the other process ended."""


class Receipt:
    """Is a tensor that is being received."""

    def __init__(
        self, work: Any, tensor: Tensor, result: Tensor, device: torch.device, wait: Callable[[Sequence[Any]], None]
    ) -> None:
        self._wait = wait
        self._work = work
        self._tensor = tensor
        self._result = result
        self._device = device

    def wait(self) -> Tensor:
        """Waits until the tensor is here, and returns it."""
        if self._work is not None:
            self._wait([self._work])
            self._work = None
        return self._result.to(self._device) if self._result.device != self._device else self._result


class DataPlane:
    """Sends and receives tensors between ranks.

    Args:
        path: a file that all ranks can reach, by which they find each other.
        rank: the stage index of this process.
        size: number of stages.
        device: device of this process.
        hostname: address of the network interface to use.
        interruptible: whether Ctrl-C ends a wait at once, as it has to in the user's own process.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        device: torch.device,
        *,
        hostname: str = "127.0.0.1",
        interruptible: bool = False,
    ) -> None:
        self.rank = rank
        self.device = device
        # on GPUs a wait only orders streams
        self._waiter = Waiter() if interruptible and device.type != "cuda" else None
        self._on_gpu = device.type == "cuda"
        self._sending: list[tuple[Any, Tensor, int, int]] = []  # what, to whom, and when that is received at the latest
        dist: Any = distributed
        store = dist.FileStore(path, size)
        self._up: Any  # to higher ranks
        self._down: Any  # to lower ones
        if self._on_gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._up, self._down = (
                dist.ProcessGroupNCCL(dist.PrefixStore(f"lightning_mgpu/{way}", store), rank, size, options)
                for way in ("up", "down")
            )
        else:
            gloo = dist.ProcessGroupGloo
            gloo_options = gloo._Options()
            gloo_options._devices = [gloo.create_device(hostname=hostname)]
            gloo_options._timeout = _TIMEOUT
            gloo_options._threads = 2
            self._up = self._down = gloo(dist.PrefixStore("lightning_mgpu", store), rank, size, gloo_options)

    def send(self, tensor: Tensor, to: int, *, needed_at: int = _AT_THE_END) -> None:
        """Starts sending; `flush` waits until it is done.

        Args:
            tensor: the tensor, which is kept until it is known to be sent.
            to: the receiver.
            needed_at: the receiver's action that waits for it, counted in its list; see `release`.
        """
        if tensor.numel() == 0:
            return
        wire = _as_bytes(tensor.detach().to(self.device).contiguous())
        try:
            work = (self._up if to > self.rank else self._down).send([wire], to, 0)
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error
        self._sending.append((work, wire, to, needed_at))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, device: torch.device | None = None) -> Receipt:
        """Starts receiving a tensor of known shape and dtype."""
        result = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if result.numel() == 0:
            return Receipt(None, result, result, device or self.device, self._wait)
        wire = _as_bytes(result)
        try:
            work = (self._up if source < self.rank else self._down).recv([wire], source, 0)
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error
        return Receipt(work, wire, result, device or self.device, self._wait)

    def flush(self) -> None:
        """Waits until everything is sent."""
        sending, self._sending = self._sending, []
        if sending:
            self._wait([work for work, *_ in sending])

    def release(self, to: int, before: int) -> None:
        """Lets go of what a receiver has had, as one knows that has seen what it made of it.

        Args:
            to: the receiver.
            before: an action that the receiver has carried out, counted in its list.
        """
        done = [entry for entry in self._sending if entry[2] == to and entry[3] < before]
        if done:
            self._sending = [entry for entry in self._sending if not (entry[2] == to and entry[3] < before)]
            self._wait([work for work, *_ in done])

    def _wait(self, works: Sequence[Any]) -> None:
        try:
            if self._waiter is None:
                for work in works:
                    work.wait()
            else:
                self._waiter.wait(works)
        except RuntimeError as error:
            raise CommunicationError(str(error)) from error

    def send_packed(self, packed: Packed, to: int) -> None:
        """Starts sending the tensors of a packed object."""
        for tensor in packed.tensors:
            self.send(tensor, to)

    def receive_packed(self, packed: Packed, source: int) -> Packed:
        """Receives the tensors of a packed object, ordinary ones also in inference mode."""
        with torch.inference_mode(False):
            receipts = [self.receive(h.shape, h.dtype, source, self._home_of(h)) for h in packed.headers]
            tensors = [r.wait().requires_grad_(h.requires_grad) for r, h in zip(receipts, packed.headers, strict=True)]
        return Packed(packed.payload, packed.headers, tensors)

    def _home_of(self, header: TensorHeader) -> torch.device:
        return torch.device("cpu") if header.on_host else self.device

    def abort(self) -> None:
        """Ends waits of other threads where the backend can; on gloo only the death of a peer does."""
        if self._on_gpu:
            self._up.abort()
            self._down.abort()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Shows a contiguous tensor as bytes, which every backend can send."""
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # a single element may have any stride
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)
