"""Hooks: Lightning calls the same ones in the same order, and in each of them the module can be read as on one device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.errors import PlacementError
from tests.harness import whole_parameters
from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.watched_hooks import Everything, Note, Sets, copied, hooks_of, watched
from tests.zoo.data import vectors
from tests.zoo.steps import Mlp

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")  # it has, and the last one is named
KINDS = (LightningModule, Callback, Sets)


def run_everything(make: MakeTrainer, folder: Path, note: Note, **kwargs: Any) -> None:
    """Fits, validates, tests, predicts, and resumes from a checkpoint, with every hook watched."""

    @watched(note)
    class Model(Everything):
        pass

    @watched(note)
    class Data(Sets):
        pass

    @watched(note)
    class Watcher(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": 1}

    def trainer(name: str, **more: Any) -> Trainer:
        saving = ModelCheckpoint(dirpath=folder / name, save_last=True, every_n_train_steps=2)
        arguments = {"max_epochs": 2, "callbacks": [Watcher(), saving], "enable_checkpointing": True, "gradient_clip_val": 1.0}
        return make(**{**arguments, **kwargs, **more})

    model, data = Model(), Data()
    first = trainer("first")
    first.fit(model, data)
    first.validate(model, data, verbose=False)
    first.test(model, data, verbose=False)
    first.predict(model, data)
    trainer("second", max_epochs=3).fit(Model(), data, ckpt_path=folder / "first" / "last.ckpt", weights_only=True)


def order_of_hooks(make: MakeTrainer, tmp_path: Path, options: dict[str, Any]) -> list[tuple[str, str]]:
    """Lists the hooks in the order in which they are called."""
    calls: list[tuple[str, str]] = []
    folder = tmp_path / str(len(list(tmp_path.iterdir())))

    def note(owner: Any, name: str) -> None:
        calls.append((next(kind.__name__ for kind in KINDS if isinstance(owner, kind)), name))

    run_everything(make, folder, note, **options)
    return calls


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"accumulate_grad_batches": 2}, id="accumulated"),
        pytest.param({"num_sanity_val_steps": 0, "val_check_interval": 1}, id="validated often"),
    ],
)
@pytest.mark.parametrize(("num_stages", "schedule"), [(2, "gpipe"), (3, "gpipe"), (2, "looped_bfs")])
def test_the_order_of_all_hooks(
    options: dict[str, Any], num_stages: int, schedule: str, layouts: Layouts, tmp_path: Path
) -> None:
    calls = layouts.same(lambda make: order_of_hooks(make, tmp_path, options), num_stages, schedule=schedule)
    for kind in KINDS:
        uncalled = set(hooks_of(kind)) - {name for owner, name in calls if owner == kind.__name__}
        sanity = {"on_sanity_check_start", "on_sanity_check_end"} if "num_sanity_val_steps" in options else set()
        assert uncalled - sanity <= {"on_exception"}, kind


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_order_of_all_hooks_where_steps_run_by_microbatch(schedule: str, layouts: Layouts, tmp_path: Path) -> None:
    whole = layouts.one_device(lambda make: order_of_hooks(make, tmp_path, {}))
    ours = layouts.stages(lambda make: order_of_hooks(make, tmp_path, {}), schedule=schedule)
    step = ("LightningModule", "training_step")
    assert ours.count(step) == 4 * whole.count(step)
    assert [call for call, after in pairwise([*ours, None]) if not call == after == step] == whole


@pytest.mark.parametrize("num_stages", [2, 3])
def test_parameters_and_gradients_in_every_hook(num_stages: int, layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> list[Any]:
        seen: list[Any] = []
        folder = tmp_path / str(len(list(tmp_path.iterdir())))

        def note(owner: Any, name: str) -> None:
            module = owner if isinstance(owner, LightningModule) else getattr(owner, "module", None)
            if module is None or module._trainer is None:
                return
            with whole_parameters(module.trainer.strategy):
                seen.append((name, copied(module)))

        run_everything(make, folder, note)
        return seen

    seen = layouts.same(observe, num_stages)
    with_gradients = {name for name, values in seen if values["fc1.weight.grad"] is not None}
    assert {"on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "optimizer_zero_grad"} <= with_gradients


class Snoops(Callback):
    """Reads every parameter and gradient in every hook without asking for them first."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []


def snoop(owner: Any, name: str, *args: Any) -> None:
    """Writes down each value as it is, or the error it gives."""
    module = next((arg for arg in args if isinstance(arg, LightningModule)), None)
    if module is None:
        return
    for parameter_name, parameter in module.named_parameters():
        for what in (parameter_name, f"{parameter_name}.grad"):
            try:
                value = parameter.grad if what.endswith(".grad") else parameter.detach()
                owner.seen.append((name, what, None if value is None else value.clone()))
            except PlacementError as error:
                owner.seen.append((name, what, str(error)))


def snooping(name: str) -> Any:
    def hook(self: Snoops, *args: Any, **kwargs: Any) -> None:
        snoop(self, name, *args)

    return hook


for _name in [each for each in vars(Callback) if each.startswith("on_") or each in ("setup", "teardown")]:
    setattr(Snoops, _name, snooping(_name))


def test_a_read_without_asking_is_right_or_refused_and_never_partial(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> list[tuple[str, str, Any]]:
        snoops = Snoops()
        make(max_epochs=2, callbacks=[snoops]).fit(Everything(), Sets())
        return snoops.seen

    whole, ours = layouts.one_device(observe), layouts.stages(observe, cuts=["fc3"])
    assert [entry[:2] for entry in ours] == [entry[:2] for entry in whole]
    hidden = set()
    for (hook, what, expected), (_, _, found) in zip(whole, ours, strict=True):
        if isinstance(found, str):
            of_gradient, name = what.endswith(".grad"), what.removesuffix(".grad")
            text = f"parameter {name!r} lives on stage 0; read it inside strategy.summon_parameters()"
            assert found.startswith(f"the gradient of {text}" if of_gradient else text)
            hidden.add((hook, name))
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text, at=(hook, what): f"{at}: {text}")
    assert {name for _, name in hidden} == {
        f"{layer}.{name}" for layer in ("fc1", "fc2", "more") for name in ("weight", "bias")
    }
    assert not {"setup", "on_fit_start", "on_sanity_check_start", "on_fit_end", "teardown"} & {hook for hook, _ in hidden}


class ReadsNorms(Everything):
    """Logs the norms of its gradients, as the documentation shows it, inside the block that makes them readable."""

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with whole_parameters(self.trainer.strategy):
            self.log_dict(grad_norm(self, norm_type=2))


class ReadsNormsAtOnce(Everything):
    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def test_gradient_norms(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> dict[str, Tensor]:
        trainer = make(max_steps=2)
        trainer.fit(ReadsNorms(), Sets())
        return dict(trainer.logged_metrics)

    assert "grad_2.0_norm_total" in layouts.same(observe)
    with (
        layouts.lent() as make,
        pytest.raises(PlacementError, match=r"the gradient of parameter 'fc1.weight' lives on stage 0"),
    ):
        make(max_steps=2).fit(ReadsNormsAtOnce(), Sets())


class ReadsModel(Callback):
    """Reads what needs no value of a parameter, by ``trainer.model``."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        model = trainer.model
        assert isinstance(model, nn.Module)
        assert model is trainer.lightning_module is trainer.strategy.model
        for name, parameter in model.named_parameters():
            self.seen.append((name, parameter.shape, parameter.dtype, parameter.device, parameter.numel(), parameter.is_leaf))
            self.seen.append((torch.zeros_like(parameter), torch.randn_like(parameter), torch.empty_like(parameter).stride()))
            self.seen.append((parameter.new_ones(2), parameter.new_full((3, 1), 0.5), torch.ones(2).double().to(parameter)))
        self.seen.append(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
        self.seen.append([len(group["params"]) for group in trainer.optimizers[0].param_groups])


def test_what_is_known_of_parameters_without_their_values(layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> list[Any]:
        reads = ReadsModel()
        make(max_steps=2, callbacks=[reads]).fit(Mlp(), vectors())
        return reads.seen

    layouts.same(observe, 3)
