"""Every config composes, and builds what its name says."""

from pathlib import Path

import lightning as L
import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from omegaconf import OmegaConf

from lightning_mgpu import LayerwiseStrategy, PipelineStrategy
from lightning_mgpu.app.config_dir import find_config_dir
from lightning_mgpu.app.single import single_device
from lightning_mgpu.examples import CNN, DigitsDataModule, Linear, RandomLinearDataModule, TwoLayerLinear
from lightning_mgpu.mesh import Mesh
from lightning_mgpu.schedule.catalog import SCHEDULES
from tests.app.composition import choices, compose_train

MODELS = {"cnn": CNN, "linear": Linear, "two_layer_linear": TwoLayerLinear}
DATA = {"digits": DigitsDataModule, "random": RandomLinearDataModule}
PIPELINES = {  # by choice: schedule, and the mesh of four devices
    "pipeline": ("gpipe", Mesh(4, 1)),
    **{f"pipeline_{name}": (name, Mesh(4, 1)) for name in SCHEDULES if name != "gpipe"},
    "hybrid": ("gpipe", Mesh(2, 2)),
    "data_parallel": ("gpipe", Mesh(1, 4)),
}
SEVERAL_DEVICES = {"_pipeline": PipelineStrategy, "_data_parallel": PipelineStrategy, "_model_parallel": LayerwiseStrategy}
STRATEGIES = {
    "single": str,
    "ddp": DDPStrategy,
    "model_parallel": LayerwiseStrategy,
    **dict.fromkeys(PIPELINES, PipelineStrategy),
}


def test_the_groups_hold_what_is_tested_here() -> None:
    assert set(choices("model")) == {*MODELS, "custom"}
    assert set(choices("data")) == {*DATA, "mnist", "custom"}
    assert set(choices("strategy")) == {*STRATEGIES}
    assert set(choices("trainer")) == {"cpu", "gpu"}


@pytest.mark.parametrize("group", ["model", "data", "strategy", "trainer", "experiment"])
def test_every_choice_composes_and_resolves(group: str, tmp_path: Path) -> None:
    for choice in choices(group):
        own = [f"{group}._target_=some.Class"] if choice == "custom" else []
        cfg = compose_train(tmp_path, f"{group}={choice}", *own)
        assert not OmegaConf.missing_keys(cfg)
        assert OmegaConf.to_container(cfg, resolve=True)["output_dir"] == str(tmp_path)


@pytest.mark.parametrize(("choice", "kind"), MODELS.items())
def test_model(choice: str, kind: type, tmp_path: Path) -> None:
    assert type(instantiate(compose_train(tmp_path, f"model={choice}").model)) is kind


@pytest.mark.parametrize(("choice", "kind"), DATA.items())
def test_data(choice: str, kind: type, tmp_path: Path) -> None:
    assert type(instantiate(compose_train(tmp_path, f"data={choice}").data)) is kind


def test_mnist(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="MNIST comes through torchvision, an optional dependency")
    assert instantiate(compose_train(tmp_path, "data=mnist").data).data_dir == "data"


@pytest.mark.parametrize(("choice", "kind"), STRATEGIES.items())
def test_strategy(choice: str, kind: type, tmp_path: Path) -> None:
    assert type(instantiate(compose_train(tmp_path, f"strategy={choice}").strategy, _convert_="all")) is kind


@pytest.mark.parametrize(("choice", "wanted"), PIPELINES.items())
def test_a_strategy_is_what_its_name_says(choice: str, wanted: tuple[str, Mesh], tmp_path: Path) -> None:
    strategy = instantiate(compose_train(tmp_path, f"strategy={choice}").strategy, _convert_="all")
    strategy.parallel_devices = [torch.device("cpu")] * 4
    assert (strategy.schedule.name, strategy.mesh) == wanted


@pytest.mark.parametrize("choice", choices("experiment"))
def test_experiment(choice: str, tmp_path: Path) -> None:
    cfg = compose_train(tmp_path, f"experiment={choice}")
    strategy = instantiate(cfg.strategy, _convert_="all")
    trainer = instantiate(cfg.trainer, _convert_="all", _partial_=True)(strategy=strategy)
    kind = next((k for ending, k in SEVERAL_DEVICES.items() if choice.endswith(ending)), SingleDeviceStrategy)
    assert type(trainer.strategy) is kind
    assert isinstance(instantiate(cfg.model), L.LightningModule)
    assert isinstance(instantiate(cfg.data), L.LightningDataModule)


@pytest.mark.parametrize("choice", choices("experiment"))
def test_an_experiment_begins_with_the_command_that_runs_it(choice: str) -> None:
    header, command, *_ = (find_config_dir() / "experiment" / f"{choice}.yaml").read_text().splitlines()
    assert header == "# @package _global_"
    assert command == f"# mgpu-train experiment={choice}"


def test_an_experiment_on_several_devices_differs_from_its_original_only_in_the_strategy(tmp_path: Path) -> None:
    for choice in choices("experiment"):
        for ending in SEVERAL_DEVICES:
            if choice.endswith(ending):
                cfg, original = (compose_train(tmp_path, f"experiment={n}") for n in (choice, choice.removesuffix(ending)))
                for settings in (cfg, original):
                    settings.strategy = settings.trainer.devices = None
                assert cfg == original


@pytest.mark.gpu
def test_gpu_trainer(tmp_path: Path) -> None:
    cfg = compose_train(tmp_path, "trainer=gpu")
    assert instantiate(cfg.trainer).strategy.root_device.type == "cuda"


@pytest.mark.parametrize("devices", [1, "1", [0], "0,"])
def test_single_takes_one_device(devices: int | str | list[int]) -> None:
    assert single_device(devices) == "auto"


@pytest.mark.parametrize("devices", [2, "2", [0, 1], "0,1", "auto", -1])
def test_single_refuses_several_devices(devices: int | str | list[int]) -> None:
    with pytest.raises(ValueError, match=r"strategy=single trains on one device, but trainer\.devices is .*pipeline"):
        single_device(devices)


def test_single_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    cfg = compose_train(tmp_path, "trainer.devices=2")
    with pytest.raises(InstantiationException, match=r"trainer\.devices is 2"):
        instantiate(cfg.strategy)
