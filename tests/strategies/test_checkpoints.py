"""Checkpoints are Lightning's own, whole and with one device's names: either layout resumes the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.examples import CNN, DigitsDataModule
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers

NUM_STEPS = 8


class AdamWCNN(CNN):
    """Trains the documents' CNN with AdamW, whose state has several tensors a parameter."""

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-3)


class Losses(Callback):
    """Keeps the loss of each step by its number."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.by_step[trainer.global_step] = outputs["loss"].item()


class SaveAt(Callback):
    """Saves a checkpoint after one step, in the middle of an epoch."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(
    module: LightningModule, num_stages: int, warm_workers: WarmWorkers, *callbacks: Callback, ckpt_path: Path | None = None
) -> tuple[dict[int, float], Trainer]:
    """Trains on so many stages, 0 for one device without the pipeline; returns the losses and the Trainer."""
    losses = Losses()

    def train(strategy: Any) -> Trainer:
        trainer = Trainer(
            accelerator="cpu",
            devices=max(num_stages, 1),
            strategy=strategy,
            max_steps=NUM_STEPS,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[losses, *callbacks],
        )
        trainer.fit(module, DigitsDataModule(), ckpt_path=ckpt_path, weights_only=True)
        return trainer

    with repeatable():
        if num_stages == 0:
            return losses.by_step, train("auto")
        with warm_workers.lend(num_stages) as workers:
            return losses.by_step, train(PipelineStrategy(num_microbatches=4, workers=workers))


def built(module: type[LightningModule]) -> LightningModule:
    """Builds a module with the same initial weights each time."""
    with repeatable():
        return module()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("module", [CNN, AdamWCNN])
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(0, 2), (2, 0), (2, 3), (3, 2)])
def test_the_loss_goes_on_as_on_one_device(
    module: type[CNN], saved_on: int, resumed_on: int, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    def saved_and_resumed(saved_on: int, resumed_on: int) -> dict[int, float]:
        path = tmp_path / f"{saved_on}.ckpt"
        fit(built(module), saved_on, warm_workers, SaveAt(3, path))
        losses, trainer = fit(built(module), resumed_on, warm_workers, ckpt_path=path)
        assert trainer.global_step == NUM_STEPS
        return losses

    expected = saved_and_resumed(0, 0)
    assert list(expected) == [4, 5, 6, 7, 8]
    assert saved_and_resumed(saved_on, resumed_on) == pytest.approx(expected, rel=1e-4)


def test_has_the_names_and_values_of_one_device(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    for num_stages in (0, 3):
        fit(built(AdamWCNN), num_stages, warm_workers, SaveAt(3, tmp_path / f"{num_stages}.ckpt"))
    one, cut = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (0, 3))
    assert one.keys() == cut.keys()
    assert list(one["state_dict"]) == list(cut["state_dict"])
    torch.testing.assert_close(dict(cut["state_dict"]), dict(one["state_dict"]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cut["optimizer_states"], one["optimizer_states"], rtol=1e-4, atol=1e-6)


def test_a_plain_script_loads_it(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "end.ckpt"
    module = built(CNN)
    _, trainer = fit(module, 2, warm_workers)
    trainer.save_checkpoint(path)  # after fit has returned
    loaded = CNN.load_from_checkpoint(path, weights_only=True)
    for (name, expected), (_, got) in zip(module.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(expected, got), name


def test_the_state_dict_is_whole_in_a_callback_and_nothing_moves(warm_workers: WarmWorkers) -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, torch.Tensor]] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.seen.append({k: v.clone() for k, v in pl_module.state_dict().items()})

    looks = [Look(), Look()]
    fit(built(CNN), 0, warm_workers, looks[0])
    module = built(CNN)
    fit(module, 3, warm_workers, looks[1])
    for one, cut in zip(looks[0].seen, looks[1].seen, strict=True):
        torch.testing.assert_close(cut, one, rtol=1e-4, atol=1e-6)
    assert all(type(p) is nn.Parameter for p in module.parameters())
