"""`PipelineStrategy`: an unmodified LightningModule over several devices, one device to Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_mgpu import tree
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.mesh import Mesh, check_size, mesh_of
from lightning_mgpu.microbatch import check_num_microbatches, num_microbatches_for
from lightning_mgpu.partition.cost import Balance, check_balance
from lightning_mgpu.partition.cut import CutRequest
from lightning_mgpu.plots import save_gantt
from lightning_mgpu.runtime.attach import Attachment
from lightning_mgpu.runtime.lead import Lead
from lightning_mgpu.runtime.separable import check_optimizer
from lightning_mgpu.runtime.workers import Workers, threads_per_process
from lightning_mgpu.schedule.catalog import SCHEDULES, schedule_named
from lightning_mgpu.strategies.attended import attend_callbacks, attend_profiler, put_uncompiled_steps, warn_of_compiled
from lightning_mgpu.strategies.averaging import cover_averaging
from lightning_mgpu.strategies.by_microbatch import LoggedValues, deal_batch, join_outputs
from lightning_mgpu.strategies.checks import check_compile, check_module, check_schedule, check_workers
from lightning_mgpu.strategies.optimizing import cover_gradients, cover_wrappers, gradient_norm, replace_optimizers
from lightning_mgpu.strategies.saving import SavingStrategy
from lightning_mgpu.timeline import Timeline

__all__ = ["PipelineStrategy"]

_LOG_ARGUMENTS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]


class PipelineStrategy(SavingStrategy):
    """Trains, validates and predicts with a module cut into stages, one on each device (GPipe, Huang et al. 2019).

    The user's process is the *lead*: it runs the Trainer and holds the last stage; ``devices - 1`` worker processes hold the
    others. To Lightning all of them are one device: ``world_size`` is 1, no sampler is injected, no script is run again.

    Args:
        num_microbatches: parts a batch is split into along its first dimension; ``"auto"`` is four per stage. Never more
            than the batch has rows.
        schedule: order of forwards and backwards. ``"gpipe"`` and ``"looped_bfs"`` (two stages a device) run all forwards, then
            all backwards, and ``training_step`` once. ``"1f1b"``, ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"``,
            ``"zbv"`` and ``"dualpipe_v"`` (the last four with two stages a device) begin backward earlier, which keeps fewer
            activations; they run ``training_step`` once per microbatch, as gradient accumulation does.
        cuts: names of the modules that begin stages 1, 2, ..., as in ``["fc1"]``; by default the stages are balanced.
        balance: what balancing makes even: ``"flops"`` of forward and backward, or ``"parameters"``.
        module: name of the module to pipeline, as in ``"model"``; by default what the step calls first: the LightningModule
            itself, or its children. Other modules run on the lead.
        self_check: whether the stages are compared with the module's own forward at the first call, before anything is sent;
            ``"auto"`` does where the whole model fits on the lead's device.
        activation_checkpointing: whether stages keep only what they receive of each microbatch, and run its forward again
            before its backward: less memory for a third more work. ``"all but last"`` spares the last stage, whose backwards
            come first. A stage with buffers that a forward changes, batch norm's aside, keeps its activations all the same.
        compile: whether each process compiles its stages with ``torch.compile``, or the arguments for that, as in
            ``{"mode": "reduce-overhead"}``. What runs as one piece, changes buffers or has hooks stays as it is. Random numbers
            are those of uncompiled code, unless the dict has ``"mode"`` or ``"options"``.
        timeline: whether to record what each stage does when; read ``strategy.timeline`` afterwards. A path saves a picture
            (``.png``) or a trace (``.json``) there at the end of the run.
        pipeline_parallel_size: devices that share one copy of the model; ``"auto"`` is what ``data_parallel_size`` leaves.
        data_parallel_size: copies of the model (replicas), each on devices of its own. They share the microbatches of every
            batch, so that ``num_microbatches`` is the number of each; the batch, its loss and its metrics stay those of one
            device.
        workers: worker processes to use, which are left running; by default the strategy starts its own and ends them with
            the Trainer.
        start_timeout_s: seconds to wait for worker processes to start.
        save_distributed_checkpoint: whether a checkpoint is a folder of ``torch.distributed.checkpoint`` to which each process
            writes what it owns, instead of one file that the lead writes.
        async_save: whether checkpoints are written by a thread while training goes on, from a copy made at once.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's strategies.

    Raises:
        PartitionError: for arguments that are not possible.

    Example:
        >>> trainer = pl.Trainer(strategy="mgpu_pipeline", accelerator="cpu", devices=2)  # doctest: +SKIP
        >>> trainer.fit(model, datamodule)  # doctest: +SKIP
    """

    strategy_name = "mgpu_pipeline"

    def __init__(  # noqa: PLR0913, PLR0917 - options of one word each, as Lightning's strategies have them
        self,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "gpipe",
        cuts: Sequence[str] | None = None,
        balance: Balance = "flops",
        module: str | None = None,
        self_check: bool | Literal["auto"] = "auto",
        activation_checkpointing: bool | Literal["all but last"] = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 - as users know it
        timeline: bool | str | Path = False,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = 1,
        workers: Workers | None = None,
        start_timeout_s: float = 300.0,
        save_distributed_checkpoint: bool = False,
        async_save: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.num_microbatches = check_num_microbatches(num_microbatches)
        if not isinstance(activation_checkpointing, bool) and activation_checkpointing != "all but last":
            raise PartitionError(
                f'activation_checkpointing={activation_checkpointing!r} is not possible; use True, False or "all but last"'
            )
        self.activation_checkpointing: bool | Literal["all but last"] = activation_checkpointing
        self.schedule = schedule_named(schedule)
        if isinstance(cuts, str):
            raise PartitionError(f"cuts={cuts!r} is one string; use a list of names, as in cuts=[{cuts!r}]")
        if any(not isinstance(cut, str) for cut in cuts or ()):
            raise PartitionError(f'cuts={cuts!r} holds more than names; use names of modules, as in cuts=["fc1"]')
        check_balance(balance)
        if not isinstance(self_check, bool) and self_check != "auto":
            raise PartitionError(f'self_check={self_check!r} is not possible; use True, False or "auto"')
        self.pipeline_parallel_size = check_size("pipeline_parallel_size", pipeline_parallel_size)
        self.data_parallel_size = check_size("data_parallel_size", data_parallel_size)
        self.request = CutRequest(None if cuts is None else tuple(cuts), balance)
        self.module = module
        self.self_check: bool | Literal["auto"] = self_check
        self.compile = check_compile(compile, self.schedule)
        self.start_timeout_s = start_timeout_s
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.async_save = async_save
        if isinstance(timeline, (str, Path)) and Path(timeline).suffix not in (".png", ".json"):
            raise PartitionError(
                f"timeline={str(timeline)!r} is neither a picture (.png) nor a trace (.json); name one of these"
            )
        self._timeline_option = timeline
        self._timeline: Timeline | None = None
        self._workers = workers
        self._owns_workers = workers is None
        self._attachment: Attachment | None = None
        self._stage_devices: list[torch.device] = []
        self._num_threads: int | None = None
        self.num_nodes = 1  # the Trainer sets this and the next, since they are here
        self._layer_sync: LayerSync | None = None
        self._num_steps_under_way = 0
        self._profiled: Callable[[], None] = lambda: None
        self._logged: LoggedValues | None = None

    # -- devices ---------------------------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device of each stage, the lead's first, as the Trainer chose them."""
        return self._stage_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._stage_devices = list(devices)
        if devices:
            self._root_device = devices[0]

    @property
    def mesh(self) -> Mesh:
        """How the devices are arranged.

        Raises:
            PartitionError: where the sizes do not multiply to the number of devices.
        """
        return mesh_of(self.num_devices, pipeline=self.pipeline_parallel_size, data=self.data_parallel_size)

    @property
    def num_stages(self) -> int:
        """Number of stages of each replica: one per device, or two, as the schedule has it."""
        return len(self.schedule.homes(self.mesh.pipeline)) if self._stage_devices else 0

    @property
    def local_devices(self) -> tuple[torch.device, ...]:
        """The devices of the stages, where all are in this process; nothing where each has a process of its own."""
        return ()

    @property
    def num_devices(self) -> int:
        """Number of devices, each with a process of its own."""
        return len(self._stage_devices)

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should shard data over processes: never, the pipeline is one device to it."""
        return False

    # -- setup -----------------------------------------------------------------------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._attached_names_checked = False

    @override
    def setup_environment(self) -> None:
        """Checks the devices and starts the workers, so that they start while data is prepared."""
        super().setup_environment()
        self._check_before_start()
        assert self.lightning_module is not None
        self._profiled = attend_profiler(self.lightning_module.trainer, len(self._stage_devices))
        self.workers.start()

    @property
    def workers(self) -> Workers:
        """The processes of the other stages."""
        if self._workers is None:
            self._workers = Workers(self._stage_devices, start_timeout_s=self.start_timeout_s)
        return self._workers

    def _check_before_start(self) -> None:
        """Raises for whatever can be known before processes start."""
        root = self.lightning_module
        assert root is not None
        if self._workers is not None and not self._owns_workers:
            check_workers(self._workers, self._stage_devices)
        if self.num_nodes > 1:
            raise PartitionError(f"num_nodes={self.num_nodes} is not possible: a pipeline runs on one host; use num_nodes=1")
        if self._layer_sync is not None:
            raise PartitionError(
                "sync_batchnorm=True is not possible: batch norm normalises each microbatch by itself, and its running "
                "statistics are those of the whole batch anyway; use sync_batchnorm=False, and num_microbatches=1 where the "
                "whole batch has to be normalised at once"
            )
        check_schedule(self.schedule, self.num_microbatches, self.mesh.pipeline, root)
        check_module(root, self.module, self.request, self.schedule, self.num_stages)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Moves the module to the lead's device, makes optimizers, and attaches the pipeline to the module."""
        self._share_threads()
        super().setup(trainer)
        root = self.lightning_module
        assert root is not None
        self._check_before_start()
        self.check_restored_optimizers()
        warn_of_compiled(root)
        self._attach()

    def _attach(self) -> None:
        """Attaches the pipeline to the module as it is now."""
        root = self.lightning_module
        assert root is not None
        trainer = root.trainer
        for optimizer in self.optimizers:
            check_optimizer(optimizer, self.num_devices)
        lead = Lead(
            root,
            self.workers,
            mesh=self.mesh,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            request=self.request,
            self_check=self.self_check,
            activation_checkpointing=self.activation_checkpointing,
            local_devices=self.local_devices,
        )
        lead.optimizers.faces = list(self.optimizers)
        lead.origins = self.origins
        lead.expects_training = trainer.state.fn == TrainerFn.FITTING
        lead.compiled = self.compile
        lead.timed = bool(self._timeline_option)
        put_uncompiled_steps(root, lead.patches)
        self._attachment = Attachment(
            lead,
            module=self.module,
            leave=lambda m: isinstance(m, Metric),
            in_step=lambda: self._num_steps_under_way > 0,
            renew=self._renew,
        )
        self._patch_lightning(lead)
        attend_callbacks(trainer, lead)

    def _renew(self) -> None:
        """Starts over with a module whose layers, parameters or hooks were changed while the Trainer runs."""
        attachment, self._attachment = self._attachment, None
        assert attachment is not None
        attachment.detach()
        self._attach()
        self.lead.events, attachment.lead.successor = attachment.lead.events, self.lead

    def _share_threads(self) -> None:
        """Leaves the workers their share of the cores while a Trainer call runs, unless the user asked for less or decided."""
        share = threads_per_process(self.num_devices)
        if share is not None and share < torch.get_num_threads():
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(share)

    def _patch_lightning(self, lead: Lead) -> None:
        """Answers what Lightning's own objects would do with parameters and gradients of other stages."""
        root = self.lightning_module
        assert root is not None
        cover_wrappers(lead, self._lightning_optimizers, self.optimizers)
        cover_gradients(lead, root, self.precision_plugin)
        connector = root.trainer._checkpoint_connector  # noqa: SLF001 - nobody else knows when a checkpoint is made
        lead.patches.put(connector, "dump_checkpoint", self.dumping)
        cover_averaging(lead, root, root.trainer.callbacks)  # type: ignore[attr-defined]
        if self.schedule.scope == "microbatch":
            lead.patches.put(root, "log", self._log)

    @property
    @override
    def running_lead(self) -> Lead | None:
        return None if self._attachment is None else self._attachment.lead

    @property
    def lead(self) -> Lead:
        """The lead of the running Trainer call.

        Raises:
            PartitionError: outside a Trainer call.
        """
        if self._attachment is None:
            raise PartitionError("the pipeline is set up for the length of a Trainer call; there is none now")
        return self._attachment.lead

    # -- steps -----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        plain = super().training_step
        with self._step():
            output = plain(*args, **kwargs) if self.schedule.scope == "batch" else self._by_microbatch(plain, *args, **kwargs)
        self._check_used("training_step", output)
        return output

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Lets the calls of a block place parameters. The module may have been changed since the last one."""
        if self._attachment is not None and not self._attachment.holds():
            self._renew()
        self._num_steps_under_way += 1
        try:
            yield
        finally:
            self._num_steps_under_way -= 1

    def _by_microbatch(self, plain: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Runs the step once per microbatch, in the schedule's order."""
        lead, root = self.lead, self.lightning_module
        assert root is not None
        parts, sizes = deal_batch(batch, self._count)
        self._logged = logged = LoggedValues(sizes)

        def step(i: int) -> Any:
            with logged.of(i):
                return plain(parts[i], *args, **kwargs)

        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = (1.0 if scaler is None else scaler.get_scale()) / root.trainer.accumulate_grad_batches
        weights = [rows / sum(sizes) for rows in sizes]
        outputs, loss = lead.step.run([partial(step, i) for i in range(len(parts))], weights, _loss_of, scale)
        self._logged = None
        logged.log(root.log)
        joined: STEP_OUTPUT = join_outputs(outputs, sizes, loss)
        return joined

    def _count(self, batch_size: int) -> int:
        mesh = self.mesh
        wanted = num_microbatches_for(self.num_microbatches, mesh.pipeline, max(1, batch_size // mesh.data))
        return min(self.schedule.num_microbatches(wanted, mesh.pipeline) * mesh.data, batch_size)

    def _log(self, plain: Callable[..., None]) -> Callable[..., None]:
        """Keeps what microbatches log until the batch is done."""

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            named = dict(zip(_LOG_ARGUMENTS, args, strict=False)) | kwargs
            if self._logged is None or not self._logged.take(name, value, named):
                plain(name, value, **named)

        return log

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._step():
            output = super().validation_step(*args, **kwargs)
        self._check_used("validation_step", output)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._step():
            output = super().test_step(*args, **kwargs)
        self._check_used("test_step", output)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            output = super().predict_step(*args, **kwargs)
        self._check_used("predict_step", output)
        return output

    def _check_used(self, what: str, output: Any) -> None:
        if self._attachment is not None and output is not None:  # nothing comes of a step that is skipped, or that only logs
            self._attachment.check_used(what)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._check_evaluated("validation_step")

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._check_evaluated("test_step")

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._check_evaluated("predict_step")

    def _check_evaluated(self, what: str) -> None:
        root = self.lightning_module
        if self._attachment is not None and root is not None and root.trainer.state.fn != TrainerFn.FITTING:
            self._attachment.check_used(what)

    # -- parameters and state --------------------------------------------------------------------------------------

    @contextmanager
    def summon_parameters(self) -> Iterator[None]:
        """Makes all parameters, buffers and gradients whole and readable on the lead for a block.

        What the block changes in place is sent back to the owners at its end. Outside a Trainer call the module is whole
        anyway.
        """
        if self._attachment is None:
            yield
            return
        with self._attachment.lead.summoned():
            yield

    def full_state_dict(self) -> dict[str, Any]:
        """Returns a copy of the whole module's state dict, with the values and names it has on one device."""
        root = self.lightning_module
        assert root is not None
        return tree.map_tensors(lambda t: t.detach().clone(), dict(root.state_dict()))  # type: ignore[no-any-return]

    def gradient_norm(
        self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the norm of gradients over all stages, as one vector; a shared parameter counts once.

        Args:
            parameters: whose gradients; by default those of the whole module.
            norm_type: which norm; ``float("inf")`` for the largest absolute value.

        Returns:
            The norm, of no dimensions; zero where there is no gradient.
        """
        root = self.lightning_module
        assert root is not None
        chosen = root.parameters() if parameters is None else parameters
        listed = [chosen] if isinstance(chosen, torch.Tensor) else chosen
        return gradient_norm(self.running_lead, listed, float(norm_type))

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        lead = self.running_lead
        SavingStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if lead is not None:
            replace_optimizers(lead, self._lightning_optimizers, optimizers)

    # -- the timeline ----------------------------------------------------------------------------------------------

    @property
    def timeline(self) -> Timeline:
        """What the stages did when, in the last calls of the running or the last Trainer call.

        Raises:
            PartitionError: where none was recorded.
        """
        if self._attachment is not None and self._timeline_option:
            return self._attachment.lead.timeline()
        if self._timeline is None:
            raise PartitionError("no timeline was recorded; use PipelineStrategy(timeline=True) and run the Trainer")
        return self._timeline

    def _keep_timeline(self, lead: Lead) -> None:
        if not self._timeline_option or not lead.events:
            return
        self._timeline = lead.timeline()
        if isinstance(self._timeline_option, (str, Path)):
            path = Path(self._timeline_option)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json":
                self._timeline.save_trace(path)
            else:
                save_gantt(self._timeline, path)

    # -- end -------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Makes the module whole again; workers stay for the next Trainer call."""
        attachment, self._attachment = self._attachment, None
        try:
            if attachment is not None:
                try:
                    self._keep_timeline(attachment.lead)
                finally:
                    attachment.detach()
        finally:
            self._profiled()
            num_threads, self._num_threads = self._num_threads, None
            if num_threads is not None:
                torch.set_num_threads(num_threads)
            super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="GPipe-style pipeline over the devices of one host")
        strategy_registry.register(
            "mgpu_hybrid", cls, description="two replicas of a pipeline, each on half of the devices", data_parallel_size=2
        )
        strategy_registry.register(
            "mgpu_data_parallel",
            cls,
            description="a replica of the model on each device",
            pipeline_parallel_size=1,
            data_parallel_size="auto",
        )
        for name in SCHEDULES:
            if name != "gpipe":
                described = f"pipeline over the devices of one host, schedule {name}"
                strategy_registry.register(f"{cls.strategy_name}_{name}", cls, description=described, schedule=name)


def _loss_of(output: Any) -> torch.Tensor | None:
    loss: torch.Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    return loss


if PipelineStrategy.strategy_name not in StrategyRegistry.available_strategies():
    PipelineStrategy.register_strategies(StrategyRegistry)
