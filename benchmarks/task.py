"""The GPT as an ordinary LightningModule that knows nothing of stages, and what its Trainers are given."""

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from benchmarks.gpt import GPT, Case, language_loss, make_optimizer

NUM_DEVICES = 2
TRAINER_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


class Task(lightning.LightningModule):
    """Trains the GPT on whole batches."""

    def __init__(self, case: Case) -> None:
        """Builds the model."""
        super().__init__()
        self.model = GPT(case)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Returns the loss of tokens and targets, each ``(batch, sequence)``."""
        tokens, targets = batch
        loss = language_loss(self.model(tokens), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer that every variant uses."""
        return make_optimizer(self)


def make_strategy(name: str, case: Case, **options: Any) -> Strategy | str:
    """Returns what a user would pass as ``strategy``.

    Args:
        name: ``mgpu_pipeline``, or one of Lightning's own.
        case: Its number of microbatches is the pipeline's.
        **options: Further options of the pipeline.
    """
    if name != "mgpu_pipeline":
        return name
    from lightning_mgpu import PipelineStrategy  # noqa: PLC0415  (the others are measured without it)

    strategy: Strategy = PipelineStrategy(num_microbatches=case.num_microbatches, **options)
    return strategy
