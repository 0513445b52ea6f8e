"""Layers over several devices of one process: the numbers of one device, and nothing where it should not be."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mgpu import LayerwiseStrategy, PipelineStrategy
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.examples import CNN, DigitsDataModule, Linear, RandomLinearDataModule, TwoLayerLinear
from lightning_mgpu.runtime.lead import Lead
from tests.harness import RunRecord, assert_same, run_fit, run_on_one_device
from tests.strategies.pretended import HOME, pretended_devices
from tests.strategies.test_schedules import CASES
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.cases import GENERAL
from tests.zoo.recipe import Regression

TWO_LAYERS = Case(TwoLayerLinear, partial(RandomLinearDataModule, num_targets=1), validate=True, predict=True)
DRAWS = {"DropoutMlp"}


def run(case: Case, num_devices: int = 2, **options: Any) -> RunRecord:
    strategy = LayerwiseStrategy(**{k: v for k, v in case.strategy.items() if k != "schedule"} | options)
    return run_fit(
        case.module, case.data, strategy=strategy, devices=num_devices, validate=case.validate, predict=case.predict,
        **case.trainer(),
    )  # fmt: skip


@pytest.mark.parametrize("case", [*GENERAL, TWO_LAYERS], ids=lambda c: c.name)
def test_equals_one_device(case: Case) -> None:
    """The batch stays whole, so even what looks across it is that of one device."""
    assert_same(run_on_one_device(case), run(case))


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_the_documents_network(num_devices: int) -> None:
    case = Case(CNN, DigitsDataModule, validate=True, predict=True)
    one = run_on_one_device(case)
    assert_same(one, run(case, num_devices))
    assert_same(one, run(case, num_devices, num_microbatches=4))


@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"compile": {"backend": "aot_eager"}}], ids=str)
def test_options_of_the_pipeline(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    assert_same(run_on_one_device(CASES["CNN"]), run(CASES["CNN"], **options))


# -- where things are --------------------------------------------------------------------------------------------------


class Tied(Regression):
    """Uses one weight in its first layer and its last, has a mask, a buffer, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 8)
        self.fc3 = nn.Linear(8, 8)
        self.fc3.weight = self.fc1.weight
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((8,), 0.5))

    @override
    def forward(self, x: Tensor) -> Tensor:
        mask = x.abs().sum(1, keepdim=True) > 1
        h = self.norm(F.relu(self.fc1(x))) * self.scale
        h = torch.where(mask, self.fc2(h), h)
        y: Tensor = self.head(torch.tanh(self.fc3(h)) + x)
        return y


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 4}, {"activation_checkpointing": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.* has batch norms")
def test_no_call_mixes_devices(num_devices: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Tied, data.vectors)
    plain = run(case, num_devices, cuts=["fc2", "fc3"][: num_devices - 1], **options)
    with pretended_devices(monkeypatch, num_devices) as pretended:
        found = run(case, num_devices, cuts=["fc2", "fc3"][: num_devices - 1], self_check=False, **options)
    assert_same(plain, found)  # to rounding: bits of small products change with where memory lies
    forwards = [(j, j + 1) for j in range(1, num_devices - 1)] + [(num_devices - 1, HOME)]
    assert all(pretended.moves[there] for there in forwards)
    assert all(pretended.moves[there[::-1]] for there in forwards)
    assert pretended.moves[HOME, 1]


@pytest.mark.parametrize("name", ["CNN", "ResidualNet", "UNet", "EncoderDecoder", "Gpt2", "TiedHead", "Gan", "TwoChildren"])
def test_no_call_of_other_modules_mixes_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(CASES[name])
    with pretended_devices(monkeypatch, 2) as pretended:
        found = run(CASES[name], self_check=False)
    assert_same(plain, found)  # to rounding: bits of small products change with where memory lies
    assert pretended.moves[HOME, 1]
    assert pretended.moves[1, HOME]


def test_a_call_that_mixes_devices_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_devices(monkeypatch, 2):
        made = Lead.__init__

        def without_moves(self: Lead, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            assert self.devices is not None
            move = self.devices.move
            self.devices.move = lambda tensor, device: move(tensor, device) if tensor.is_leaf and tensor.ndim == 1 else tensor

        monkeypatch.setattr(Lead, "__init__", without_moves)
        with pytest.raises(Exception, match="mixes devices"):
            run(Case(Tied, data.vectors), 2, cuts=["fc2"], self_check=False)


# -- bad input ---------------------------------------------------------------------------------------------------------


def fit(strategy: Any, module: pl.LightningModule | None = None, **trainer: Any) -> None:
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False, **trainer}
    pl.Trainer(strategy=strategy, **options).fit(module or CNN(), DigitsDataModule())


@pytest.mark.parametrize(
    ("make", "devices", "text"),
    [
        (lambda: "mgpu_model_parallel", 5, r"cannot cut 4 layers of CNN into 5 stages; use at most 4 stages"),
        (
            lambda: LayerwiseStrategy(["cpu"] * 3),
            2,
            r"are 3 devices, and the Trainer has devices=2; use devices=3",
        ),
        (lambda: LayerwiseStrategy(["cpu", "cuda:7"]), 2, r"name cuda:7, and there are \d+ GPUs? here"),
    ],
)
def test_bad_devices(make: Any, devices: int, text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        fit(make(), devices=devices)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"devices": "cuda"}, r"devices='cuda' is no list of devices"),
        ({"devices": []}, r"devices=\[\] is no list of devices"),
        ({"devices": ["cpu", "gpu9"]}, r"names 'gpu9', which is no device"),
        ({"schedule": "1f1b"}, r"schedule is not possible without other processes; use PipelineStrategy"),
        ({"data_parallel_size": 2}, r"data_parallel_size is not possible without other processes"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PartitionError, match=text):
        LayerwiseStrategy(**arguments)


def test_one_layer_is_not_enough() -> None:
    with pytest.raises(PartitionError, match=r"cannot cut 1 layer of Linear into 2 stages"):
        pl.Trainer(strategy="mgpu_model_parallel", accelerator="cpu", devices=2, max_epochs=1, logger=False).fit(
            Linear(), RandomLinearDataModule()
        )


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_no_process_is_started_and_the_module_is_plain_afterwards() -> None:
    strategy, module = LayerwiseStrategy(), CNN()
    fit(strategy, module, devices=2)
    assert strategy.workers.pids == []
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert isinstance(strategy, PipelineStrategy)
    fit(LayerwiseStrategy(), module, devices=2)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=str)
def test_a_gpu_and_the_cpu(devices: list[str]) -> None:
    case = Case(CNN, DigitsDataModule, validate=True, predict=True)
    accelerator = "gpu" if devices[0].startswith("cuda") else "cpu"
    found = run_fit(
        case.module,
        case.data,
        strategy=LayerwiseStrategy(devices),
        devices=1,
        accelerator=accelerator,
        validate=True,
        predict=True,
    )
    assert_same(run_on_one_device(case), found)
