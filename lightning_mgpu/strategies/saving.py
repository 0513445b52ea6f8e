"""Checkpoints of a strategy whose parameters live in several processes: one file, or a folder with a part of each process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.errors import CheckpointError
from lightning_mgpu.partition.names import Names
from lightning_mgpu.runtime.background import Background, Snapshot
from lightning_mgpu.strategies.checkpoint_io import (
    PipelineCheckpointIO,
    check_is_checkpoint,
    check_no_foreign_folder,
    local_path,
    with_default,
)
from lightning_mgpu.strategies.fitting import check_module_state, check_optimizer_states
from lightning_mgpu.strategies.meta_device import MetaDeviceStrategy

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["SavingStrategy"]


class SavingStrategy(MetaDeviceStrategy):
    """Saves and loads Lightning's checkpoints where a `Lead` may hold the parameters; to be subclassed.

    Attributes:
        save_distributed_checkpoint: whether a checkpoint is a folder to which each process writes what it owns.
        async_save: whether checkpoints are written while training goes on.
    """

    save_distributed_checkpoint = False
    async_save = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._background = Background()
        self._is_dumping = False
        self._to_check: Mapping[str, Any] | None = None

    @property
    def running_lead(self) -> Lead | None:
        """The lead of the running Trainer call, if there is one."""
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that reads and writes files: the user's own, or the pipeline's."""
        self._checkpoint_io = with_default(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # -- saving ----------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state: whole, but for a sharded checkpoint with placeholders for what others will write."""
        lead, plain = self.running_lead, super().lightning_module_state_dict
        if lead is None or not lead.placed:
            return plain()
        state: dict[str, Any] = lead.owned_state.of_module(plain, whole=not self._in_shards)
        return state

    @property
    def _in_shards(self) -> bool:
        """Whether a checkpoint is being made to which each process will write its own part."""
        return self.save_distributed_checkpoint and self._is_dumping

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state: whole, but for a sharded checkpoint without what other processes will write."""
        lead = self.running_lead
        if lead is None or not lead.placed:
            return super().optimizer_state(optimizer)
        plain = super().optimizer_state
        return lead.owned_state.of_optimizer(lambda: plain(optimizer), whole=not self._in_shards)

    def dumping(self, plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Notes when Lightning makes a checkpoint, in which states may be left to their owners."""

        def dump_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            self._is_dumping = True
            try:
                return plain(*args, **kwargs)
            finally:
                self._is_dumping = False

        return dump_checkpoint

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint, in a thread where `async_save` says so and a Trainer call runs."""
        self._background.check()
        lead = self.running_lead
        background = self._background if self.async_save and lead is not None else None
        if self.save_distributed_checkpoint:
            self._save_folder(checkpoint, filepath, storage_options, lead, background)
        elif background is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            assert lead is not None
            snapshot, io = Snapshot(checkpoint, lead.owned_state.take_fresh()), self.checkpoint_io
            background.start(lambda: io.save_checkpoint(snapshot.open(), filepath, storage_options=storage_options))

    def _save_folder(
        self, checkpoint: dict[str, Any], filepath: str | Path, options: Any, lead: Lead | None, background: Background | None
    ) -> None:
        # costs half a second that only sharded checkpoints need
        from lightning_mgpu.runtime.sharded import save_sharded  # noqa: PLC0415

        target = local_path(filepath)
        if target is None:
            raise CheckpointError(
                f"save_distributed_checkpoint=True writes folders on a local disk, and {str(filepath)!r} is elsewhere; use a "
                "local path, or save_distributed_checkpoint=False"
            )
        if options is not None:
            raise TypeError(f"storage_options={options!r} is not possible with save_distributed_checkpoint=True; leave it out")
        check_no_foreign_folder(target)
        root = self.lightning_module
        assert root is not None
        names = Names(root) if lead is None else lead.planner.names
        placed = lead if lead is not None and lead.placed else None
        save_sharded(checkpoint, target, names=names, optimizers=self.optimizers, lead=placed, background=background)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, once all that was saved after it is on the disk."""
        remove = super().remove_checkpoint
        if self._background.is_busy:
            self._background.start(lambda: remove(filepath), if_all_went_well=True)
        else:
            remove(filepath)

    # -- loading ---------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a file or a folder.

        Raises:
            CheckpointError: where it is no checkpoint, or not all of one.
        """
        self._background.wait()
        local = local_path(checkpoint_path)
        checkpoint: dict[str, Any]
        root, io = self.lightning_module, self.checkpoint_io
        if self.save_distributed_checkpoint and local is not None and local.is_dir():
            checkpoint = PipelineCheckpointIO().load_checkpoint(local, weights_only=weights_only)
        elif root is not None and self.origins.concern(root) and isinstance(io, PipelineCheckpointIO):
            checkpoint = io.load_mapped(checkpoint_path, weights_only=weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        check_is_checkpoint(checkpoint, checkpoint_path)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights, if all of them fit."""
        root, lead = self.lightning_module, self.running_lead
        assert root is not None
        if lead is not None:
            lead.come_home()
        check_module_state(root, checkpoint["state_dict"], strict=strict)
        self._to_check = checkpoint
        if lead is None and self.origins.concern(root):
            with self.origins.noting_sources(root):
                super().load_model_state_dict(checkpoint, strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def check_restored_optimizers(self) -> None:
        """Refuses optimizers that the checkpoint whose weights were loaded does not fit, as soon as they are there."""
        checkpoint, self._to_check = self._to_check, None
        root = self.lightning_module
        assert root is not None
        if checkpoint is not None and "optimizer_states" in checkpoint and root.trainer.state.fn == TrainerFn.FITTING:
            self._check_optimizers(checkpoint)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads optimizer states, if all of them fit."""
        self._check_optimizers(checkpoint)
        super().load_optimizer_state_dict(checkpoint)

    def _check_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        root = self.lightning_module
        assert root is not None
        check_optimizer_states(root, self.optimizers, checkpoint["optimizer_states"])

    @override
    def teardown(self) -> None:
        """Waits for what is being written; after another error, which the user has to see, one of that is only warned of."""
        self._to_check = None
        root = self.lightning_module
        try:
            self._background.wait()
        except Exception as error:
            if root is None or not root.trainer.interrupted:
                raise
            warnings.warn(f"a checkpoint was not written: {type(error).__name__}: {error}", stacklevel=2)
        finally:
            super().teardown()
