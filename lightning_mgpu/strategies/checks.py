"""Checks of a pipeline's options against the devices and the module, made before processes start."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_mgpu.errors import PartitionError, counted
from lightning_mgpu.partition.cut import CutRequest, check_cut_names
from lightning_mgpu.partition.names import Names
from lightning_mgpu.runtime.attach import count_layers
from lightning_mgpu.runtime.workers import Workers
from lightning_mgpu.schedule.catalog import Schedule

__all__ = ["check_compile", "check_module", "check_schedule", "check_workers"]


def check_workers(workers: Workers, devices: Sequence[torch.device]) -> None:
    """Refuses worker processes that are not those of the Trainer's devices.

    Raises:
        PartitionError: with both, and the workers to use.
    """
    if workers.num_processes != len(devices):
        raise PartitionError(
            f"workers={workers.num_processes} devices do not fit a Trainer with devices={len(devices)}; "
            f"use Workers(devices={len(devices)})"
        )
    if workers.devices != (*devices[1:], devices[0]):
        raise PartitionError(
            f"workers on {', '.join(map(str, workers.devices))} do not fit a Trainer whose devices are "
            f"{', '.join(map(str, devices))}; use Workers(devices={list(map(str, devices))})"
        )


def check_schedule(
    schedule: Schedule, num_microbatches: int | Literal["auto"], num_devices: int, root: pl.LightningModule
) -> None:
    """Refuses numbers of microbatches that a schedule has no order for, and modules that it can't train.

    Args:
        schedule: the schedule.
        num_microbatches: what the user asked for.
        num_devices: devices of one replica.
        root: the user's module.

    Raises:
        PartitionError: with the numbers that fit, or with the schedule that does.
    """
    if num_microbatches != "auto" and (why := schedule.why_not(num_microbatches, num_devices)):
        fitting = [m for m in range(1, 4 * num_microbatches + 9) if not schedule.why_not(m, num_devices)]
        near = sorted(sorted(fitting, key=lambda m: abs(m - num_microbatches))[:3])
        raise PartitionError(
            f"num_microbatches={num_microbatches} is not possible with schedule={schedule.name!r} on "
            f'{counted(num_devices, "device")}: {why} Use {", ".join(map(str, near))} or "auto"'
        )
    if schedule.scope == "microbatch" and not root.automatic_optimization:
        raise PartitionError(
            f"schedule={schedule.name!r} runs backwards in the middle of training_step, and "
            f'{type(root).__name__} runs them itself (automatic_optimization=False); use schedule="gpipe"'
        )


def check_compile(compile_: bool | dict[str, Any], schedule: Schedule) -> dict[str, Any] | None:
    """Returns the arguments of ``torch.compile`` that an option stands for, ``None`` for no compiler.

    Raises:
        PartitionError: for anything that is neither a truth value nor arguments, and for schedules that split backwards.
    """
    if not isinstance(compile_, (bool, dict)):
        raise PartitionError(
            f"compile={compile_!r} is not possible; use True, False or a dict of arguments of torch.compile, as in "
            'compile={"backend": "inductor"}'
        )
    if compile_ is False:
        return None
    if schedule.splits_backward:
        raise PartitionError(
            f"compile is not possible with schedule={schedule.name!r}, which computes gradients of weights later than those of "
            'inputs: compiled code has one backward for both; use schedule="1f1b" or "interleaved_1f1b"'
        )
    options = {} if compile_ is True else dict(compile_)
    if options.get("backend", "inductor") == "inductor" and not {"options", "mode"} & options.keys():
        options["options"] = {"fallback_random": True}
    return options


def check_module(
    root: pl.LightningModule, module: str | None, request: CutRequest, schedule: Schedule, num_stages: int
) -> None:
    """Refuses names that the module does not have, and more stages than it has layers.

    Args:
        root: the user's module.
        module: the child to pipeline, if the user named one.
        request: the cuts.
        schedule: the schedule.
        num_stages: stages to cut into.

    Raises:
        PartitionError: with the nearest names, or the most stages.
    """
    names = Names(root)
    if module is not None and module not in names.module_at:
        known = [path for path in names.module_at if path]
        near = difflib.get_close_matches(module, known, n=3, cutoff=0.3) or known[:3]
        raise PartitionError(f"module={module!r} names no module; the nearest names are {', '.join(map(repr, near))}")
    if request.cuts is not None:
        check_cut_names(request.cuts, names, num_stages)
    pipelined = root if module is None else names.module_at[module]
    num_layers = count_layers(pipelined)
    lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in pipelined.parameters())
    if 0 < num_layers < num_stages and not lazy:
        raise PartitionError(
            f"cannot cut {counted(num_layers, 'layer')} of {type(pipelined).__name__} into {num_stages} stages; "
            f"use at most {counted(num_layers, 'stage')} (devices={num_layers // schedule.stages_per_process})"
        )
