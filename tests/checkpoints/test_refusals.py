"""What does not fit is refused with its keys or numbers, before any state changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD, Adam

from lightning_mgpu.errors import CheckpointError
from lightning_mgpu.strategies.fitting import check_module_state
from tests.checkpoints.runs import ResumableLoader, SaveAt, Tied, assert_equal_runs, built, make_trainer, other_rows, run
from tests.strategies.warm_workers import WarmWorkers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, warm_workers: WarmWorkers) -> Path:
    """Saves a checkpoint of two stages."""
    path = tmp_path_factory.mktemp("refusals") / "x.ckpt"
    run(built(Tied), 2, warm_workers, SaveAt({3: path}), max_steps=3, max_epochs=-1)
    return path


def refusal(module: LightningModule, path: Path, warm_workers: WarmWorkers, error: type[Exception] = CheckpointError) -> str:
    """Tries to resume, checks that nothing of the module changed, and returns what was said."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers)
        with pytest.raises(error) as caught:
            trainer.fit(module, ResumableLoader(), other_rows(), ckpt_path=path)
        assert trainer.global_step == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    return str(caught.value)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_short(saved: Path, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    content = saved.read_bytes()
    path = tmp_path / "x.ckpt"
    for length in (len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        assert refusal(built(Tied), path, warm_workers) == (
            f"'{path}' ({length:,} bytes) was cut short: the end of the file is missing; use another checkpoint"
        )


def test_a_file_whose_middle_is_lost(saved: Path, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    content = saved.read_bytes()
    path = tmp_path / "x.ckpt"
    path.write_bytes(content[:64] + bytes(len(content) // 4) + content[64 + len(content) // 4 :])
    said = refusal(built(Tied), path, warm_workers)
    assert said == f"'{path}' ({len(content):,} bytes) is damaged, so it can't be read; use another checkpoint"


def test_an_empty_file(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.touch()
    assert refusal(built(Tied), path, warm_workers) == f"'{path}' is empty, so it is no checkpoint; use another one"


def test_a_file_of_another_kind(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_text("lr: 0.1\n" * 10)
    said = refusal(built(Tied), path, warm_workers)
    assert said == f"'{path}' (80 bytes) is no file of torch.save, so it can't be read; use another checkpoint"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"fc1.weight": torch.zeros(1)}, "it lacks 'state_dict' and 'pytorch-lightning_version' and has 1 keys: 'fc1.weight'"),
        (
            {"state_dict": {}, "epoch": 1, "model": 1, "args": 1, "best": 1, "lr": 1},
            "it lacks 'pytorch-lightning_version' and has 6 keys: 'state_dict', 'epoch', 'model', 'args', 'best', ...",
        ),
        ([torch.zeros(1)], "it holds an object of type list"),
    ],
)
def test_a_file_of_somebody_else(content: Any, what: str, warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(content, path)
    assert refusal(built(Tied), path, warm_workers) == (
        f"'{path}' is no Lightning checkpoint: {what}; load weights alone with module.load_state_dict(torch.load(path))"
    )


def test_a_file_that_is_not_there(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    said = refusal(built(Tied), tmp_path / "x.ckpt", warm_workers, FileNotFoundError)
    assert said == f"Checkpoint file not found: {tmp_path / 'x.ckpt'}"


def test_a_folder_that_is_no_checkpoint(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    remedy = "name a checkpoint file, or a folder that was saved with save_distributed_checkpoint=True"
    said = refusal(built(Tied), tmp_path, warm_workers)
    assert said == (
        f"'{tmp_path}' is a folder, but no sharded checkpoint: it lacks meta.pt and .metadata and holds nothing; {remedy}"
    )
    for name in "abcde":
        (tmp_path / name).touch()
    assert f"holds a, b, c, d, ...; {remedy}" in refusal(built(Tied), tmp_path, warm_workers)


def test_objects_that_weights_only_does_not_read_are_torchs_to_explain(
    saved: Path, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({**torch.load(saved, weights_only=True), "mine": Path("x")}, path)
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            trainer.fit(built(Tied), ResumableLoader(), other_rows(), ckpt_path=path, weights_only=True)
    resumed = run(built(Tied), 2, warm_workers, ckpt_path=path, weights_only=False)
    assert_equal_runs(resumed, run(built(Tied), 2, warm_workers, ckpt_path=saved), exact=True)


def test_saving_over_a_folder_of_somebody_else(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").touch()
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers, max_steps=1)
        trainer.fit(built(Tied), ResumableLoader(), other_rows())
        for is_folder in (False, True):
            trainer.strategy.save_distributed_checkpoint = is_folder
            with pytest.raises(IsADirectoryError, match=f"'{tmp_path / 'x'}' is a folder, and no sharded checkpoint"):
                trainer.save_checkpoint(tmp_path / "x")
    assert (tmp_path / "x" / "thesis.tex").exists()


# -- weights -----------------------------------------------------------------------------------------------------------


class WithMore(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 3)


class WithLess(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4, bias=False)


class Wider(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)
        self.fc2 = nn.Linear(8, 8, bias=False)


BUILD = "build the module as it was when it was saved"
LOOSEN = ", or set module.strict_loading = False to load what fits"

WIDER = (
    "'head.weight' ((4, 8) in the checkpoint, (5, 8) in the module), 'head.bias' ((4,) in the checkpoint, (5,) in the module)"
)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (WithMore, f"2 missing keys: 'extra.weight', 'extra.bias'; {BUILD}{LOOSEN}"),
        (WithLess, f"1 unexpected key: 'head.bias'; {BUILD}{LOOSEN}"),
        (Wider, f"1 unexpected key: 'fc2.bias'; 2 other shapes: {WIDER}; {BUILD}"),
    ],
)
def test_weights_that_do_not_fit(module: type[Tied], says: str, saved: Path, warm_workers: WarmWorkers) -> None:
    said = refusal(built(module), saved, warm_workers)
    assert said == f"the checkpoint does not fit {module.__name__}, and nothing of it was loaded: {says}"


def test_without_strictness_what_fits_by_name_is_loaded(saved: Path, warm_workers: WarmWorkers) -> None:
    expected = torch.load(saved, weights_only=True)["state_dict"]
    with warm_workers.lend(2) as workers:
        for kind in (WithMore, WithLess):
            module = built(kind)
            module.strict_loading = False
            make_trainer(2, workers).validate(module, other_rows(), ckpt_path=saved, verbose=False)
            for name, value in module.state_dict().items():
                assert name.startswith("extra") or torch.equal(value, expected[name]), name
        wider = built(Wider)
        wider.strict_loading = False
        with pytest.raises(CheckpointError, match=r"nothing of it was loaded: 2 other shapes: 'head.weight' \(\(4, 8\) in"):
            make_trainer(2, workers).validate(wider, other_rows(), ckpt_path=saved, verbose=False)


class Renamed(nn.Module):
    """Reads state dicts of its past, in which its layer had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_load_state_dict_pre_hook(self.rename)

    def rename(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key in [key for key in state if key.startswith("linear.")]:
            state[key.replace("linear.", "layer.")] = state.pop(key)


def test_a_module_that_repairs_what_it_loads_may_do_so() -> None:
    module = Renamed()
    before = module.layer.weight.clone()
    old = {"linear.weight": torch.ones(3, 2), "linear.bias": torch.ones(3)}
    check_module_state(module, old, strict=True)
    assert old.keys() == {"linear.weight", "linear.bias"}
    assert torch.equal(module.layer.weight, before)
    with pytest.raises(CheckpointError, match=r"2 missing keys: 'layer.weight', 'layer.bias'; 1 unexpected key: 'linear.wei"):
        check_module_state(module, {"linear.weight": torch.ones(3, 2)}, strict=True)
    assert torch.equal(module.layer.weight, before)


def test_lazy_modules_take_their_shapes_from_the_checkpoint() -> None:
    check_module_state(nn.LazyLinear(3), {"weight": torch.ones(3, 2), "bias": torch.ones(3)}, strict=True)


# -- optimizers --------------------------------------------------------------------------------------------------------


def configured(configure: Callable[[Tied], Any]) -> Tied:
    """Builds a module with other optimizers."""
    module = built(Tied)
    module.configure_optimizers = lambda: configure(module)
    return module


def two_groups(module: Tied) -> Any:
    first, *others = module.parameters()
    return SGD([{"params": [first]}, {"params": others}], lr=0.1, momentum=0.9)


def fewer_parameters(module: Tied) -> Any:
    return SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def another_order(module: Tied) -> Any:
    return SGD([*module.parameters()][::-1], lr=0.1, momentum=0.9)


def two_optimizers(module: Tied) -> Any:
    module.automatic_optimization = False
    return [SGD(module.fc1.parameters(), lr=0.1), Adam(module.head.parameters())]


@pytest.mark.parametrize(
    ("configure", "says"),
    [
        (two_groups, "1 parameter group in the checkpoint, 2 in the optimizer (optimizer 0, SGD)"),
        (fewer_parameters, "9 parameters in group 0 in the checkpoint, 7 in the optimizer (optimizer 0, SGD)"),
        (
            another_order,
            "momentum_buffer of 'head.bias' is (8, 8) in the checkpoint, and the parameter is (4,) (optimizer 0, SGD)",
        ),
        (two_optimizers, "it holds the state of 1 optimizer, and there are 2"),
    ],
)
def test_optimizers_that_do_not_fit(
    configure: Callable[[Tied], Any], says: str, saved: Path, warm_workers: WarmWorkers
) -> None:
    module = configured(configure)
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers)
        with pytest.raises(CheckpointError) as caught:
            trainer.fit(module, ResumableLoader(), other_rows(), ckpt_path=saved)
        assert trainer.global_step == 0
        assert all(not optimizer.state for optimizer in trainer.optimizers)
    assert str(caught.value) == (
        f"the checkpoint does not fit the optimizers: {says}; configure the optimizers as they were when it was saved, or load "
        "the weights alone with module.load_state_dict(...) before trainer.fit(...)"
    )


def test_to_test_a_module_its_optimizers_need_not_fit(saved: Path, warm_workers: WarmWorkers) -> None:
    with warm_workers.lend(2) as workers:
        trainer = make_trainer(2, workers)
        assert trainer.validate(configured(two_optimizers), other_rows(), ckpt_path=saved, verbose=False)
