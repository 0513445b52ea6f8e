"""Precision: the numbers of one device in every format Lightning offers on this device, and one loss scale for all stages."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_mgpu.errors import StageError
from tests.harness import RunRecord, assert_same, flatten, run_fit, run_on_one_device
from tests.parity.trained import Optimized, check, on_parameters, optimized
from tests.strategies.test_equality import in_turn
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.case import Case
from tests.zoo.steps import Mlp

ADAM = on_parameters(torch.optim.Adam, lr=0.01)
SGD = on_parameters(torch.optim.SGD, lr=0.1, momentum=0.9)


class Shifted(Mlp):
    """Makes numbers of its own in its forward, in the format that is the default then."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x)) + torch.linspace(0, 1, 16) + torch.full((16,), 0.1) * torch.arange(0, 1, 1 / 16)
        y: Tensor = self.fc3(torch.tanh(self.fc2(h))) + torch.tensor([0.1, 0.2, 0.3, 0.4])
        return y


PRECISIONS = ["bf16-mixed", "bf16-true", "16-true", "64-true", "32-true"]


def optimizer_for(precision: str) -> Any:
    """Chooses an optimizer whose own constants do not vanish in the format."""
    return SGD if precision == "16-true" else ADAM


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_microbatch_gives_the_same_bits(precision: str, num_stages: int, warm_workers: WarmWorkers) -> None:
    trainer = {"precision": precision, "gradient_clip_val": 0.1}
    case = optimized(optimizer_for(precision), exact=True, num_microbatches=1, trainer=lambda: trainer)
    record = check(case, warm_workers, num_stages)
    wanted = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(precision, torch.float32)
    assert record.weights["fc1.weight"].dtype == wanted


@pytest.mark.parametrize("precision", PRECISIONS)
def test_microbatches_give_the_same_bits_as_in_one_process(precision: str, warm_workers: WarmWorkers) -> None:
    case = optimized(optimizer_for(precision), trainer=lambda: {"precision": precision})
    one_process = run_fit(in_turn(case.module, case.num_microbatches), case.data, **case.trainer())
    assert_same(one_process, run_on_stages(case, 2, warm_workers), exact=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_made_in_the_forward_have_the_format_of_one_device(precision: str, warm_workers: WarmWorkers) -> None:
    case = Case(Shifted, data.vectors, exact=True, num_microbatches=1, trainer=lambda: {"precision": precision})
    check(case, warm_workers)


def test_double_precision_is_equal_to_many_digits(warm_workers: WarmWorkers) -> None:
    case = optimized(ADAM, trainer=lambda: {"precision": "64-true", "gradient_clip_val": 0.1})
    ours = dict(flatten(run_on_stages(case, 3, warm_workers)))
    for name, value in flatten(run_on_one_device(case)):
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_half_precision_becomes_bfloat16_on_a_cpu(warm_workers: WarmWorkers) -> None:
    case = optimized(ADAM, exact=True, num_microbatches=1, trainer=lambda: {"precision": "16-mixed"})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*AMP with fp16 is not supported on CPU")
        check(case, warm_workers)


# -- one loss scale ----------------------------------------------------------------------------------------------------


class OverflowAt(torch.autograd.Function):
    """Makes the gradient infinite for rows that are marked."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        [marked] = ctx.saved_tensors
        return torch.where(marked[:, None], torch.inf, gradient), None


class Overflows(Mlp):
    """Has infinite gradients in its first layer alone, at the second of its batches.

    Args:
        make: Makes the optimizer of the module.
        first: Whether the first layer overflows, rather than the last.
    """

    def __init__(self, make: Callable[[LightningModule], Any], *, first: bool = True) -> None:
        super().__init__()
        self.make = [make]
        self.first = first

    @override
    def forward(self, x: Tensor, marked: Tensor) -> Tensor:  # type: ignore[override]
        h = self.fc1(x)
        if self.first:
            h = OverflowAt.apply(h, marked)  # type: ignore[no-untyped-call]
        y: Tensor = self.fc3(torch.tanh(self.fc2(torch.tanh(h))))
        return y if self.first else OverflowAt.apply(y, marked)  # type: ignore[no-untyped-call]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        marked = torch.zeros(len(x), dtype=torch.bool)
        marked[-1] = batch_idx == 1
        loss = F.mse_loss(self(x, marked).float(), y)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return {"loss": loss, "scale": torch.tensor(scale), "weight": self.fc3.weight.detach().clone()}

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        made: OptimizerLRScheduler = self.make[0](self)
        return made


def scaled(**options: Any) -> Callable[[], dict[str, Any]]:
    """Says how to train with a loss scale of 1024, which doubles after two good steps."""

    def trainer() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "max_steps": 9, **options}

    return trainer


SCALED = {
    "Adam": on_parameters(torch.optim.Adam, lr=0.01),
    "Adam-fused": on_parameters(torch.optim.Adam, lr=0.01, fused=True),
    "AdamW-fused": on_parameters(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": on_parameters(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD-fused": on_parameters(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_an_overflow_on_one_stage_skips_the_step_of_all(name: str, num_stages: int, warm_workers: WarmWorkers) -> None:
    case = Case(lambda: Overflows(SCALED[name]), data.vectors, exact=True, num_microbatches=1, trainer=scaled())
    record = check(case, warm_workers, num_stages)
    scales = [float(step["scale"]) for step in record.steps]
    assert scales == [1024, 1024, 512, 512, 1024, 512, 512, 1024, 512], scales
    weights = [step["weight"] for step in record.steps]
    assert torch.equal(weights[1], weights[2])  # the second step was left out, on the stage that had no overflow too
    assert not torch.equal(weights[2], weights[3])


def test_an_overflow_on_the_last_stage_skips_the_step_of_all(warm_workers: WarmWorkers) -> None:
    case = Case(lambda: Overflows(SCALED["Adam"], first=False), data.vectors, exact=True, num_microbatches=1, trainer=scaled())
    one_device, ours = run_on_one_device(case), run_on_stages(case, 2, warm_workers)
    assert [float(step["scale"]) for step in one_device.steps][:3] == [1024, 1024, 512]
    assert_same(without_gradients(one_device), without_gradients(ours), exact=True)


def without_gradients(record: RunRecord) -> RunRecord:
    """Leaves the gradients out, some of which are no numbers, so that nothing is equal to them."""
    return dataclasses.replace(record, gradients=[])


def test_scaled_and_clipped_over_microbatches(warm_workers: WarmWorkers) -> None:
    case = Case(lambda: Overflows(SCALED["Adam"]), data.vectors, trainer=scaled(gradient_clip_val=0.01))
    one_process = run_fit(in_two_arguments(case.module), case.data, **case.trainer())
    assert_same(one_process, run_on_stages(case, 2, warm_workers))


def in_two_arguments(make: Callable[[], LightningModule]) -> Callable[[], LightningModule]:
    """Runs the forward in four microbatches on one device, whose half precision rounds their gradients alike."""

    def chunked() -> LightningModule:
        module = make()
        plain = module.forward

        def forward(x: Tensor, marked: Tensor) -> Tensor:
            return torch.cat([plain(a, b) for a, b in zip(x.chunk(4), marked.chunk(4), strict=True)])

        module.forward = forward  # type: ignore[method-assign]
        return module

    return chunked


class ScalesByHand(Overflows):
    """Scales its loss by a scaler of its own."""

    def __init__(self) -> None:
        super().__init__(SCALED["Adam"])
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        with torch.autocast("cpu", dtype=torch.float16):
            returned = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.scaler.scale(returned["loss"]).backward()
        self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.scaler.step(optimizer)
        self.scaler.update()
        return {**returned, "loss": returned["loss"].detach(), "scale": torch.tensor(self.scaler.get_scale()), "norm": norm}


def test_a_scaler_of_the_users_own(warm_workers: WarmWorkers) -> None:
    case = Case(ScalesByHand, data.vectors, exact=True, num_microbatches=1, trainer=lambda: {"max_steps": 5})
    record = check(case, warm_workers)
    assert [float(step["scale"]) for step in record.steps][:3] == [64, 32, 32]


class Half(Optimized):
    """Holds its weights in half precision."""

    def __init__(self) -> None:
        super().__init__(SCALED["Adam"])
        self.half()


def half_vectors() -> data.Loader:
    """Serves one batch in half precision."""
    return data.rows(torch.randn(8, 8).half(), torch.randn(8, 4).half())


def test_gradients_of_half_precision_are_not_unscaled(warm_workers: WarmWorkers) -> None:
    case = Case(Half, half_vectors, trainer=scaled())
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        run_on_one_device(case)
    with pytest.raises((ValueError, StageError), match="Attempting to unscale FP16 gradients"):
        run_on_stages(case, 2, warm_workers)
