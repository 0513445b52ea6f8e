"""A worker's part of a sharded checkpoint: planned when the lead asks, written when it has heard of everybody's plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_mgpu import tree
from lightning_mgpu.runtime import messages as m

if TYPE_CHECKING:
    from lightning_mgpu.runtime.shards import Shard

__all__ = ["OwnShard", "optimizer_key"]


def optimizer_key(index: int) -> str:
    """Returns the key of an optimizer's state in a sharded checkpoint."""
    return f"optimizer_{index}"


class OwnShard:
    """Answers the lead's wishes about one checkpoint after the other.

    Args:
        say: tells the lead; may be called from another thread.
    """

    def __init__(self, say: Callable[[Any], None]) -> None:
        self._say = say
        self._shard: Shard | None = None
        self._background = False

    def plan(self, message: m.SaveShard, tensor_of: Callable[[str], Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Says what this process will write, or why it can't.

        Args:
            message: the lead's wish.
            tensor_of: finds a parameter or buffer by name.
            optimizers: this process's parts of the optimizers.
        """
        # costs half a second that only sharded checkpoints need
        from lightning_mgpu.runtime.shards import Shard, check_keys  # noqa: PLC0415

        state: dict[str, Any] = {"state_dict": {key: tensor_of(name).detach() for key, name in message.tensors.items()}}
        for index, names in enumerate(message.states):
            made = optimizers[index].state if names else {}
            state[optimizer_key(index)] = {"state": _states(names, tensor_of, made)}
        try:
            check_keys(state)
            if message.background:
                state = tree.map_tensors(lambda t: t.detach().to("cpu", copy=True), state)
            self._shard, self._background = Shard(Path(message.folder), state), message.background
            answer = m.ShardPlan(self._shard.plan())
        except Exception as error:  # the lead raises it
            answer = m.ShardPlan(None, f"{type(error).__name__}: {error}")
        self._say(answer)

    def write(self, message: m.WriteShard) -> None:
        """Writes what was planned, in a thread of its own where training is to go on."""
        shard, self._shard = self._shard, None
        assert shard is not None
        if self._background:
            threading.Thread(target=self._write, args=(shard, message.plan), daemon=True, name="checkpoint").start()
        else:
            self._write(shard, message.plan)

    def _write(self, shard: Shard, plan: Any) -> None:
        try:
            answer = m.ShardWritten(shard.write(plan))
        except Exception as error:  # the lead raises it
            answer = m.ShardWritten(None, f"{type(error).__name__}: {error}")
        self._say(answer)


def _states(names: Sequence[str], tensor_of: Callable[[str], Tensor], made: Mapping[Any, Any]) -> dict[str, Any]:
    named = ((name, tensor_of(name)) for name in names)
    return {name: made[tensor] for name, tensor in named if tensor in made}
