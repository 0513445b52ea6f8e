"""Lightning's own objects that look at modules and parameters themselves, and what they need for that in a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_mgpu.runtime.lead import Lead
from lightning_mgpu.runtime.patches import Patches

__all__ = ["attend_callbacks", "attend_profiler", "put_uncompiled_steps", "warn_of_compiled"]

_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


# -- callbacks ---------------------------------------------------------------------------------------------------------


def attend_callbacks(trainer: pl.Trainer, lead: Lead) -> None:
    """Gives callbacks that read or change parameters what they need, for the length of the Trainer call."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            lead.patches.put(callback, "finetune_function", _while_readable(lead))
        elif isinstance(callback, ModelPruning):
            for name in ("apply_pruning", "apply_lottery_ticket_hypothesis", "make_pruning_permanent"):
                lead.patches.put(callback, name, _at_home(lead))


def _while_readable(lead: Lead) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs a method while values are readable, as long as anything is frozen: it compares what it thaws by value."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            frozen = any(not parameter.requires_grad for parameter in lead.root.parameters())
            with lead.summoned() if frozen else nullcontext():
                return plain(*args, **kwargs)

        return method

    return make


def _at_home(lead: Lead) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs a method while everything is on the lead; the next step finds the module changed."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            lead.come_home()
            return plain(*args, **kwargs)

        return method

    return make


# -- the profiler ------------------------------------------------------------------------------------------------------


def attend_profiler(trainer: pl.Trainer, num_processes: int) -> Callable[[], None]:
    """Keeps the PyTorch profiler from hooking layers, which run in other processes, and says what it sees.

    Args:
        trainer: the Trainer.
        num_processes: the number of processes that hold stages.

    Returns:
        What undoes that.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    if not isinstance(profiler, PyTorchProfiler) or num_processes < 2:
        return lambda: None
    before, profiler._record_module_names = profiler._record_module_names, False  # noqa: SLF001 - it has no public switch
    if profiler._register is not None:  # noqa: SLF001 - it hooks layers again when a Trainer call has ended
        profiler._register.__exit__(None, None, None)  # noqa: SLF001 - likewise
        profiler._register = None  # noqa: SLF001 - likewise
    warnings.warn(
        f"PyTorchProfiler sees only what runs in this process, one of {num_processes}, and not by module; "
        "PipelineStrategy(timeline=True) shows all stages",
        stacklevel=2,
    )

    def undo() -> None:
        profiler._record_module_names = before  # noqa: SLF001 - likewise

    return undo


# -- compiled modules --------------------------------------------------------------------------------------------------


def warn_of_compiled(root: pl.LightningModule) -> None:
    """Says which parts of a module torch.compile has wrapped in vain."""
    found = [
        path
        for path, module in root.named_modules()
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None  # noqa: SLF001 - torch's own
    ]
    if root._compiler_ctx is not None:  # noqa: SLF001 - Lightning's own mark of a compiled module
        found.insert(0, type(root).__name__)
    if found:
        warnings.warn(
            f"{', '.join(found)}: what torch.compile has made is not used where the forward is cut into stages; they run as "
            "written, with the same numbers. Pass the module as it is to silence this",
            stacklevel=2,
        )


def put_uncompiled_steps(root: pl.LightningModule, patches: Patches) -> None:
    """Puts the methods of a module that was handed to torch.compile back as they were written."""
    compiled = root._compiler_ctx  # noqa: SLF001 - it has no public name
    if compiled is not None:
        for name in _STEPS:
            patches.replace(root, name, compiled[f"original_{name}"])
