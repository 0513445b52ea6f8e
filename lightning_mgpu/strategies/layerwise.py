"""`LayerwiseStrategy`: an unmodified LightningModule over several devices of its own process, without workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_mgpu.errors import PartitionError, counted
from lightning_mgpu.mesh import Mesh
from lightning_mgpu.runtime.workers import Workers
from lightning_mgpu.schedule.catalog import SCHEDULES
from lightning_mgpu.strategies.pipeline import PipelineStrategy

__all__ = ["LayerwiseStrategy"]

_NOT_HERE = ("schedule", "pipeline_parallel_size", "data_parallel_size", "workers", "start_timeout_s")


class LayerwiseStrategy(PipelineStrategy):
    """Spreads the layers of a module over devices of this process (model parallelism by layer).

    There are no other processes: stages run one after the other, each on its device, and what they pass on is moved there. One
    device works at a time unless ``num_microbatches`` is above 1, which lets GPUs overlap: work is only handed to them, and the
    next microbatch's first stage runs beside this one's second. What `PipelineStrategy` promises holds here as well.

    Args:
        devices: the devices of the stages, as in ``["cuda:0", "cuda:1", "cpu"]``; the Trainer's own by default. The last stage
            is on the first one, where batches and losses are, stage 0 on the second, and so on.
        num_microbatches: parts a batch is split into; 1 keeps it whole, so that batch norm sees all of it.
        **options: as of `PipelineStrategy`: ``cuts``, ``balance``, ``module``, ``self_check``, ``activation_checkpointing``,
            ``compile``, ``timeline``, ``save_distributed_checkpoint``, ``async_save``, and Lightning's own.

    Raises:
        PartitionError: for arguments that are not possible.

    Example:
        >>> trainer = pl.Trainer(strategy="mgpu_model_parallel", accelerator="gpu", devices=2)  # doctest: +SKIP
        >>> trainer = pl.Trainer(strategy=LayerwiseStrategy(["cuda:0", "cpu"]), devices=1)  # doctest: +SKIP
    """

    strategy_name = "mgpu_model_parallel"

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        num_microbatches: int | Literal["auto"] = 1,
        **options: Any,
    ) -> None:
        given = [name for name in _NOT_HERE if name in options]
        if given:
            raise PartitionError(
                f"{', '.join(given)} is not possible without other processes; use PipelineStrategy, or leave it out"
            )
        super().__init__(num_microbatches=num_microbatches, **options)
        self._listed = None if devices is None else _checked(devices)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage, the last stage's first."""
        return self._stage_devices if self._listed is None else self._listed

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        """The device of each stage, in the order of stages."""
        return (*self.devices[1:], *self.devices[:1])

    @property
    @override
    def parallel_devices(self) -> list[torch.device]:
        return self._stage_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._stage_devices = list(devices)
        if self.devices:
            self._root_device = self.devices[0]
            self.schedule = replace(SCHEDULES["gpipe"], stages_per_process=len(self.devices))

    @property
    @override
    def num_devices(self) -> int:
        return 1 if self._stage_devices else 0

    @property
    @override
    def mesh(self) -> Mesh:
        return Mesh(1)

    @property
    @override
    def workers(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(self.devices[:1])
        return self._workers

    @override
    def _check_before_start(self) -> None:
        listed, chosen = self._listed, self._stage_devices
        if listed is not None and len(chosen) not in (1, len(listed)):
            raise PartitionError(
                f"devices={[str(d) for d in listed]} are {counted(len(listed), 'device')}, and the Trainer has "
                f"devices={len(chosen)}; use devices={len(listed)} or devices=1 in the Trainer"
            )
        if listed is not None and listed[0].type != chosen[0].type:
            raise PartitionError(
                f"devices={[str(d) for d in listed]} begin with {listed[0]}, and the Trainer runs on {chosen[0].type}; list a "
                f'{chosen[0].type} device first, or use accelerator="{listed[0].type}"'
            )
        missing = [d for d in self.devices if d.type == "cuda" and (d.index or 0) >= torch.cuda.device_count()]
        if missing:
            raise PartitionError(
                f"devices={[str(d) for d in self.devices]} name {missing[0]}, and there are "
                f"{counted(torch.cuda.device_count(), 'GPU')} here"
            )
        super()._check_before_start()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="layers over several devices of this process")


def _checked(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """Returns devices by what they are called.

    Raises:
        PartitionError: for no list of devices, with one that is.
    """
    if isinstance(devices, (str, int)) or not devices:
        raise PartitionError(f'devices={devices!r} is no list of devices; use one as in devices=["cuda:0", "cuda:1"]')
    found = []
    for device in devices:
        try:
            found.append(torch.device(device))
        except RuntimeError:
            text = f'devices={devices!r} names {device!r}, which is no device; use names as "cuda:0" or "cpu"'
            raise PartitionError(text) from None
    return found


if LayerwiseStrategy.strategy_name not in StrategyRegistry.available_strategies():
    LayerwiseStrategy.register_strategies(StrategyRegistry)
