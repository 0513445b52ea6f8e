"""Modules that are changed while the Trainer runs: layers, parameters, hooks, buffers, options of layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import prune
from typing_extensions import override

from lightning_mgpu.errors import PartitionError, PlacementError
from tests.harness import whole_parameters
from tests.parity.layouts import Layouts, MakeTrainer
from tests.parity.measured import Losses, Measured, left, loader

Change = Callable[[Trainer, Any], None]
WHOLE: dict[str, Any] = {"num_microbatches": 1}  # batch norm normalises each microbatch by itself


class Changing(Measured):
    """Has buffers, dropout and batch norm in its first stage, and a place for one more layer.

    Attributes:
        extra: A layer behind the last one, if there is one.
    """

    scale: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("mask", torch.ones(16))
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.0)
        self.extra: nn.Module | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.fc1(x) * self.scale * self.mask))
        y: Tensor = self.fc3(torch.tanh(self.fc2(self.drop(h))))
        return y if self.extra is None else self.extra(y)


class At(Callback):
    """Changes the module when an epoch begins."""

    def __init__(self, change: Change) -> None:
        self.change = change

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.change(trainer, pl_module)


def train(change: Change, module: type[Measured] = Changing, **kwargs: Any) -> Callable[[MakeTrainer], Any]:
    """Returns what trains for three epochs, with a change when each begins."""

    def observe(make: MakeTrainer) -> Any:
        made, losses = module(), Losses()
        trainer = make(**{"max_epochs": 3, "callbacks": [At(change), losses], **kwargs})
        trainer.fit(made, loader(), loader(20))
        return losses.kept, left(made, trainer), dict(made.state_dict())

    return observe


def _handed_over(trainer: Trainer, *parameters: nn.Parameter) -> None:
    trainer.optimizers[0].add_param_group({"params": list(parameters)})


# -- layers, parameters, hooks -----------------------------------------------------------------------------------------


def add_a_layer(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.extra = nn.Linear(4, 4)
        _handed_over(trainer, *module.extra.parameters())


def replace_a_layer(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.fc2 = nn.Linear(16, 16)
        _handed_over(trainer, *module.fc2.parameters())


def drop_a_layer(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.drop = nn.Identity()


def replace_a_parameter(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.fc1.weight = nn.Parameter(torch.full((16, 8), 0.1))
        _handed_over(trainer, module.fc1.weight)


def share_a_parameter(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.fc2.bias = module.norm.bias


def hook_and_unhook(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.handle = module.fc1.register_forward_hook(lambda _, args, result: result * 2)
    if trainer.current_epoch == 2:
        module.handle.remove()


def prune_by_hand(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        with whole_parameters(trainer.strategy):
            prune.l1_unstructured(module.fc1, "weight", amount=0.5)
            prune.l1_unstructured(module.fc3, "weight", amount=0.5)


def start_anew(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.fc2.reset_parameters()


STRUCTURE = [
    add_a_layer, replace_a_layer, drop_a_layer, replace_a_parameter, share_a_parameter, hook_and_unhook, prune_by_hand,
]  # fmt: skip


@pytest.mark.parametrize("change", STRUCTURE)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_it_is_made_of(change: Change, num_stages: int, layouts: Layouts) -> None:
    layouts.same(train(change), num_stages, **WHOLE)


@pytest.mark.parametrize("change", [add_a_layer, replace_a_parameter])
@pytest.mark.parametrize("schedule", ["looped_bfs", "1f1b"])
def test_under_other_schedules(change: Change, schedule: str, layouts: Layouts) -> None:
    layouts.same(train(change), schedule=schedule, **WHOLE)


def test_a_checkpoint_right_after_a_change(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))

        class AtTheEnd(Callback):
            @override
            def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
                replace_a_layer(trainer, pl_module)
                replace_a_parameter(trainer, pl_module)

        module = Changing()
        saving = ModelCheckpoint(folder, save_top_k=-1)
        trainer = make(max_epochs=3, callbacks=[AtTheEnd(), saving], enable_checkpointing=True)
        trainer.fit(module, loader())
        saved = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.iterdir())}
        return {name: (dict(each["state_dict"]), each["optimizer_states"]) for name, each in saved.items()}

    assert len(layouts.same(observe, **WHOLE)) == 3


class ChangesInItsStep(Changing):
    """Grows by a layer in the middle of an epoch, in its own step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.global_step == 4:
            self.extra = nn.Linear(4, 4)
            _handed_over(self.trainer, *self.extra.parameters())
        return super().training_step(batch, batch_idx)


def test_in_a_step(layouts: Layouts) -> None:
    layouts.same(train(lambda *_: None, ChangesInItsStep), **WHOLE)


@pytest.mark.filterwarnings("ignore:.* has batch norms")
def test_in_a_step_by_microbatches(layouts: Layouts) -> None:
    with layouts.lent(schedule="1f1b") as make, pytest.raises(PartitionError) as caught:
        train(lambda *_: None, ChangesInItsStep)(make)
    assert str(caught.value) == (
        "training_step changes the layers, parameters or hooks of ChangesInItsStep, but schedule='1f1b' runs it once per "
        'microbatch; change them in on_train_batch_start, or use schedule="gpipe"'
    )


# -- buffers, options of layers, modes ---------------------------------------------------------------------------------


def rebind_a_buffer(trainer: Trainer, module: Any) -> None:
    module.scale = torch.tensor(1.0 + trainer.current_epoch)


def rebind_a_buffer_of_another_shape(trainer: Trainer, module: Any) -> None:
    module.mask = torch.ones(1 if trainer.current_epoch == 1 else 16) * (1 + trainer.current_epoch)


def fill_a_buffer(trainer: Trainer, module: Any) -> None:
    with whole_parameters(trainer.strategy):
        module.scale.fill_(1.0 + trainer.current_epoch)


def change_options(trainer: Trainer, module: Any) -> None:
    module.norm.momentum = 0.1 * (1 + trainer.current_epoch)
    module.norm.eps = 0.001 * (1 + trainer.current_epoch)


def freeze_statistics(trainer: Trainer, module: Any) -> None:
    module.norm.train(mode=trainer.current_epoch != 1)


def freeze_a_parameter(trainer: Trainer, module: Any) -> None:
    module.fc1.weight.requires_grad = trainer.current_epoch != 1


def load_a_part(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        module.fc1.load_state_dict({name: value * 0.5 for name, value in module.fc1.state_dict().items()})


def initialise_anew(trainer: Trainer, module: Any) -> None:
    if trainer.current_epoch == 1:
        with whole_parameters(trainer.strategy):
            module.apply(lambda child: nn.init.constant_(child.weight, 0.1) if isinstance(child, nn.Linear) else None)


VALUES = [
    rebind_a_buffer, rebind_a_buffer_of_another_shape, fill_a_buffer, change_options, freeze_statistics, freeze_a_parameter,
    load_a_part, initialise_anew,
]  # fmt: skip


@pytest.mark.parametrize("change", VALUES)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_it_holds(change: Change, num_stages: int, layouts: Layouts) -> None:
    layouts.same(train(change), num_stages, **WHOLE)


class Counts(Changing):
    """Puts another tensor in a buffer's place at every call, in the first and the last stage."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.tensor(1.0))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale + 0.1
        y = super().forward(x)
        self.last = self.last + 0.1
        return y * self.last


def test_buffers_that_a_forward_rebinds_while_shapes_change(layouts: Layouts) -> None:
    layouts.same(train(lambda *_: None, Counts), **WHOLE)


# -- what needs the values ---------------------------------------------------------------------------------------------

WITHOUT_ASKING: dict[str, Change] = {
    "a buffer in place": lambda _, module: module.scale.fill_(2.0),
    "an initialisation": lambda _, module: module.apply(
        lambda c: nn.init.ones_(c.weight) if isinstance(c, nn.Linear) else None
    ),
    "another dtype": lambda _, module: module.double(),
    "another device": lambda _, module: module.to("cpu"),
    "shared memory": lambda _, module: module.share_memory(),
    "data": lambda _, module: setattr(module.fc1.weight, "data", torch.ones(16, 8)),
    "a gradient": lambda _, module: setattr(module.fc1.weight, "grad", torch.ones(16, 8)),
    "type_as": lambda _, module: module.fc1.weight.type_as(torch.ones(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", WITHOUT_ASKING.values(), ids=WITHOUT_ASKING)
def test_a_change_of_values_elsewhere_has_to_ask_for_them(change: Change, layouts: Layouts) -> None:
    def later(trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            change(trainer, module)

    with layouts.lent(**WHOLE) as make, pytest.raises(PlacementError) as caught:
        train(later)(make)
    assert re.match(
        r"(the gradient of )?(buffer 'scale'|parameter 'fc1.weight') lives on stage 0; "
        r"read it inside strategy.summon_parameters\(\)",
        str(caught.value),
    )
