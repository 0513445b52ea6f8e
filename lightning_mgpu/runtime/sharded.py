"""Saves a sharded checkpoint: every process writes what it owns, the lead what it has and what is nobody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mgpu import tree
from lightning_mgpu.errors import CheckpointError
from lightning_mgpu.partition.names import Names
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.background import Background, Snapshot
from lightning_mgpu.runtime.own_shard import optimizer_key
from lightning_mgpu.runtime.placeholder import hidden_name, is_hidden
from lightning_mgpu.runtime.replacing import replacing
from lightning_mgpu.runtime.sharded_folder import LAYOUT, META, by_name
from lightning_mgpu.runtime.shards import Shard, agree, check_keys
from lightning_mgpu.runtime.workers import WorkerGone

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["save_sharded"]


def save_sharded(
    checkpoint: Mapping[str, Any],
    target: Path,
    *,
    names: Names,
    optimizers: Sequence[Optimizer],
    lead: Lead | None = None,
    background: Background | None = None,
) -> None:
    """Writes a folder in the place of ``target``, all or nothing.

    Args:
        checkpoint: Lightning's, with placeholders in ``state_dict`` for what lives elsewhere.
        target: the folder.
        names: names of the module's parameters.
        optimizers: the optimizers whose states the checkpoint holds.
        lead: the lead, where parameters live with their stages now.
        background: where to write while training goes on; what is written is what there is now.

    Raises:
        CheckpointError: where a process could not write its part, or the checkpoint has what no folder keeps.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(replacing(target))
        folder.mkdir()
        own, meta, wishes = _dealt(checkpoint, folder, names, optimizers, lead)
        check_keys(own)
        if background is not None:
            own, meta = Snapshot((own, meta)).open()
            wishes = [replace(wish, background=True) for wish in wishes]
        shard = Shard(folder, own)
        plans, metadata = agree([*_plans(lead, wishes), shard.plan()], folder)
        waits = _told_to_write(lead, plans[:-1])
        rest = stack.pop_all()

    def write() -> None:
        with rest:
            try:
                mine = shard.write(plans[-1])
            finally:
                others = _answers(waits, lead if background is None else None)
            shard.finish(metadata, [*_checked(others), mine])
            torch.save(meta, folder / META)

    if background is None:
        write()
    else:
        background.start(write)


# -- who writes what ---------------------------------------------------------------------------------------------------


def _dealt(
    checkpoint: Mapping[str, Any], folder: Path, names: Names, optimizers: Sequence[Optimizer], lead: Lead | None
) -> tuple[dict[str, Any], dict[str, Any], list[m.SaveShard]]:
    """Deals a checkpoint out: what the lead writes, what goes beside the shards, and what each worker writes."""
    state = checkpoint["state_dict"]
    states = checkpoint.get("optimizer_states", [])
    if len(states) != len(optimizers) and states:
        raise CheckpointError(
            f"optimizer_states has {len(states)} entries for {len(optimizers)} optimizers, so a hook has changed it; use "
            "save_distributed_checkpoint=False"
        )
    meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    meta[LAYOUT] = {
        "keys": list(state),
        "versions": getattr(state, "_metadata", None),
        "has_optimizers": "optimizer_states" in checkpoint,
    }
    own: dict[str, Any] = {"state_dict": {k: _filled(v, lead) for k, v in state.items() if not _is_away(v)}}
    for index, (saved, optimizer) in enumerate(zip(states, optimizers, strict=False)):
        own[optimizer_key(index)] = by_name(saved, _names_in(optimizer, names))
    if lead is None:
        return own, meta, []
    primary = lead.planner.placement.primary
    wishes = []
    for process in lead.owners:
        away = {k: hidden_name(v) for k, v in state.items() if _is_away(v) and primary(hidden_name(v)) == process}
        held = [[names.name_of[id(p)] for p in _parameters(optimizer) if is_hidden(p)] for optimizer in optimizers if states]
        held = [[name for name in of_one if primary(name) == process] for of_one in held]
        wishes.append(m.SaveShard(str(folder), away, tuple(map(tuple, held)), background=False))
    return own, meta, wishes


def _is_away(value: Any) -> bool:
    return isinstance(value, Tensor) and is_hidden(value)


def _filled(value: Any, lead: Lead | None) -> Any:
    """Fills placeholders inside something that is more than a tensor, which the lead has to write whole."""
    if lead is None or isinstance(value, Tensor) or not any(is_hidden(t) for t in tree.tensors_in(value)):
        return value
    return lead.owned_state.filled(value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_in(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """Names the parameters of each group; one that the module does not have goes by its number."""
    number_of = {id(p): number for number, p in enumerate(_parameters(optimizer))}
    return [
        [names.name_of.get(id(p), f"parameter_{number_of[id(p)]}") for p in group["params"]] for group in optimizer.param_groups
    ]


# -- what is said to workers -------------------------------------------------------------------------------------------


def _plans(lead: Lead | None, wishes: Sequence[m.SaveShard]) -> list[Any]:
    if lead is None or not wishes:
        return []
    with lead.failures.guarded("saving a checkpoint"):
        for process, wish in zip(lead.owners, wishes, strict=True):
            lead.workers.tell(process, wish)
        answers = [lead.workers.expect(process, m.ShardPlan) for process in lead.owners]
    errors = [f"process {process}: {answer.error}" for process, answer in enumerate(answers) if answer.error is not None]
    if errors:
        raise CheckpointError(f"the checkpoint can't be written in shards: {'; '.join(errors)}")
    return [answer.plan for answer in answers]


def _told_to_write(lead: Lead | None, plans: Sequence[Any]) -> list[Callable[[], m.ShardWritten]]:
    if lead is None or not plans:
        return []
    with lead.failures.guarded("saving a checkpoint"):
        waits = [lead.workers.writing(process) for process in lead.owners]
        for process, plan in zip(lead.owners, plans, strict=True):
            lead.workers.tell(process, m.WriteShard(plan))
    return waits


def _answers(waits: Sequence[Callable[[], m.ShardWritten]], lead: Lead | None) -> list[m.ShardWritten]:
    """Waits for all processes, also where one of them failed, since they write into the same folder.

    Args:
        waits: what waits for each.
        lead: the lead, where its own thread asks, so that the end of a worker is the end of the call.
    """
    if lead is not None and waits:
        with lead.failures.guarded("saving a checkpoint"):
            return [wait() for wait in waits]
    found = []
    for wait in waits:
        try:
            found.append(wait())
        except WorkerGone:
            found.append(m.ShardWritten(None, "it ended meanwhile"))
    return found


def _checked(answers: Sequence[m.ShardWritten]) -> list[Any]:
    errors = [f"process {process}: {answer.error}" for process, answer in enumerate(answers) if answer.error is not None]
    if errors:
        raise CheckpointError(
            f"the sharded checkpoint was not written: {'; '.join(errors)}; what was there before is still there"
        )
    return [answer.results for answer in answers]
