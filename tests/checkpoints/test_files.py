"""What is in a file, who can read it, and the ways in which Lightning finds one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_mgpu.examples import CNN, DigitsDataModule
from tests.checkpoints.runs import (
    Normalised,
    ResumableLoader,
    SaveAt,
    Tied,
    assert_equal_runs,
    built,
    lent,
    make_trainer,
    other_rows,
    run,
)
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers

PLAIN_SCRIPT = """
import sys
import torch
from torch import nn
from lightning.pytorch import LightningModule

class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.fc1, self.frozen, self.fc2, self.fc3 = (nn.Linear(8, 8) for _ in range(4))
        self.fc3.weight = self.fc1.weight
        self.head = nn.Linear(8, 4)

module = Plain.load_from_checkpoint(sys.argv[1], weights_only=True)
print(sum(p.double().sum().item() for p in module.parameters()))
assert not any(name.startswith("lightning_mgpu") for name in sys.modules)
"""


def test_a_plain_script_reads_it_without_this_package(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path, module = tmp_path / "x.ckpt", built(Tied)
    run(module, 2, warm_workers, SaveAt({10: path}))
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_SCRIPT)
    done = subprocess.run(
        [sys.executable, script, path],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(p.double().sum().item() for p in module.parameters())


def test_load_from_checkpoint_after_fit_has_returned(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path, module = tmp_path / "end.ckpt", built(CNN)
    with repeatable(), warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers, max_epochs=-1, max_steps=2, limit_val_batches=0)
        trainer.fit(module, DigitsDataModule())
        trainer.save_checkpoint(path)
    loaded = CNN.load_from_checkpoint(path, weights_only=True)
    for (name, expected), (_, got) in zip(module.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(expected, got), name
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer_states"][0]["state"].keys() == set(range(8))
    assert saved["global_step"] == 2


def test_weights_alone(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    class SaveWeights(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "light.ckpt", weights_only=True)

    module = built(Tied)
    run(module, 3, warm_workers, SaveWeights())
    light = torch.load(tmp_path / "light.ckpt", weights_only=True)
    assert light.keys() == {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops"}
    for name, value in module.state_dict().items():
        assert torch.equal(light["state_dict"][name], value), name


def test_the_state_dict_is_whole_in_a_callback_and_nothing_moves(warm_workers: WarmWorkers) -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, Tensor]] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.seen.append({k: v.clone() for k, v in pl_module.state_dict().items()})

    looks = [Look(), Look()]
    run(built(Tied), 0, warm_workers, looks[0])
    module = built(Tied)
    run(module, 3, warm_workers, looks[1])
    for one, cut in zip(looks[0].seen, looks[1].seen, strict=True):
        torch.testing.assert_close(cut, one, rtol=1e-4, atol=1e-6)
    assert all(type(p) is nn.Parameter for p in module.parameters())


class OnlyTrained(Tied):
    """Leaves out of its checkpoints what is frozen, and notes in them how long its weights are."""

    strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if "frozen" not in k}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lengths"] = {name: value.norm().item() for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.lengths = checkpoint["lengths"]


class InHalf(Tied):
    """Saves its weights in half precision, and so reads them in ``state_dict``."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v.half() for k, v in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k: v.float() for k, v in state_dict.items()}, *args, **kwargs)


@pytest.mark.parametrize("module", [OnlyTrained, InHalf])
def test_state_dicts_and_hooks_of_the_users_own(module: type[Tied], warm_workers: WarmWorkers, tmp_path: Path) -> None:
    paths = {stages: tmp_path / f"{stages}.ckpt" for stages in (0, 3)}
    for stages, path in paths.items():
        run(built(module), stages, warm_workers, SaveAt({3: path}))
    one, cut = (torch.load(path, weights_only=True) for path in paths.values())
    assert list(one["state_dict"]) == list(cut["state_dict"])
    torch.testing.assert_close(dict(cut["state_dict"]), dict(one["state_dict"]), rtol=1e-3, atol=1e-6)
    assert cut.get("lengths", {}) == pytest.approx(one.get("lengths", {}), rel=1e-4)
    expected = run(built(module), 0, warm_workers, ckpt_path=paths[0])
    assert_equal_runs(expected, run(built(module), 3, warm_workers, ckpt_path=paths[3]))


# -- the ways in which Lightning finds one -----------------------------------------------------------------------------


def fitted(num_stages: int, workers: Any, folder: Path, **kwargs: Any) -> tuple[LightningModule, Trainer]:
    """Trains for two epochs and keeps the best two of them and the last."""
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    module = built(Normalised)
    trainer = make_trainer(
        num_stages,
        workers,
        callback,
        strategy={"num_microbatches": 1},
        default_root_dir=folder,
        enable_checkpointing=True,
        **kwargs,
    )
    trainer.fit(module, ResumableLoader(), other_rows())
    return module, trainer


@pytest.mark.parametrize("path", ["best", "last"])
def test_best_and_last(path: str, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    found = []
    for stages in (0, 2):
        with repeatable(), lent(warm_workers, stages) as workers:
            module, trainer = fitted(stages, workers, tmp_path / str(stages))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            [tested] = trainer.test(module, other_rows(), ckpt_path=path, weights_only=True, verbose=False)
            [validated] = trainer.validate(dataloaders=other_rows(), ckpt_path=path, weights_only=True, verbose=False)
            found.append({**tested, **validated})
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0]["test_loss"] == pytest.approx(found[0]["val_loss"])


def test_hpc(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    whole = run(built(Tied), 2, warm_workers, SaveAt({3: tmp_path / "hpc_ckpt_1.ckpt", 6: tmp_path / "hpc_ckpt_2.ckpt"}))
    resumed = run(built(Tied), 3, warm_workers, ckpt_path="hpc", default_root_dir=tmp_path)
    assert list(resumed.losses) == [7, 8, 9, 10]
    resumed.metrics = {}
    assert_equal_runs(whole.since(6), resumed)


@pytest.mark.parametrize("path", ["registry", "registry:some-model", "best", "hpc"])
def test_what_is_not_there_is_said_as_on_one_device(path: str, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    said = []
    for stages in (0, 2):
        with lent(warm_workers, stages) as workers, pytest.raises(Exception, match=r".") as caught:
            make_trainer(stages, workers, default_root_dir=tmp_path).fit(
                built(Tied), ResumableLoader(), other_rows(), ckpt_path=path
            )
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


def test_a_second_fit_goes_back_to_a_checkpoint(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path, module = tmp_path / "x.ckpt", built(Normalised)
    strategy = {"num_microbatches": 1}
    whole = run(module, 2, warm_workers, SaveAt({3: path}), strategy=strategy)
    again = run(module, 2, warm_workers, ckpt_path=path, strategy=strategy)
    again.metrics = {}
    assert_equal_runs(whole.since(3), again, exact=True)


def test_the_same_trainer_goes_on_from_its_own_checkpoint(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    found = []
    for stages in (0, 2):
        with repeatable(), lent(warm_workers, stages) as workers:
            module, trainer = built(Tied), make_trainer(stages, workers, max_epochs=1)
            trainer.fit(module, ResumableLoader(), other_rows())
            trainer.save_checkpoint(tmp_path / f"{stages}.ckpt")
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, ResumableLoader(), other_rows(), ckpt_path=tmp_path / f"{stages}.ckpt")
            found.append((trainer.global_step, {k: v.clone() for k, v in module.state_dict().items()}))
    assert found[0][0] == found[1][0] == 10
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)
