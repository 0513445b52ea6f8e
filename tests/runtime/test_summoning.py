"""Parameters of other stages during training: a read raises, and inside ``summon_parameters`` all is as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

from lightning_mgpu.errors import PlacementError
from tests.harness import ATOL, RTOL, repeatable, whole_parameters
from tests.runtime.faulty_leads import loader
from tests.runtime.observing import assert_whole, make_trainer, on_stages, weights_of
from tests.runtime.spare_workers import SpareWorkers
from tests.zoo.steps import AdamWMlp

Act = Callable[[Trainer, LightningModule], None]
TEXT = "parameter 'fc1.weight' lives on stage 0; read it inside strategy.summon_parameters()"
GRADIENT_TEXT = (
    f"the gradient of {TEXT}, clip by self.clip_gradients(optimizer, ...) or torch.nn.utils.clip_grad_norm_(...), called by "
    "its full name, or take the norm from strategy.gradient_norm()"
)
STEP = 2


class At(Callback):
    """Does something before one optimizer step, when gradients are there."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.done = False

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == STEP:
            self.done = True
            self.act(trainer, pl_module)


def fit(act: Act, make: Callable[..., Trainer]) -> LightningModule:
    """Trains on four batches, and does something before the third step."""
    with repeatable():
        module, callback = AdamWMlp(), At(act)
        make(callbacks=[callback]).fit(module, loader())
        assert callback.done
    return module


def check_equal(act: Act, spare_workers: SpareWorkers, num_stages: int = 3) -> None:
    """Checks that what is done has the same effect as on one device."""
    expected = weights_of(fit(act, make_trainer))
    undisturbed = weights_of(fit(lambda *_: None, make_trainer))
    workers = spare_workers.running(num_stages)
    module = fit(act, lambda **kwargs: on_stages(workers, **kwargs))
    module.requires_grad_()
    assert_whole(module, expected)
    assert any(not torch.allclose(expected[name], undisturbed[name], rtol=RTOL) for name in expected)


READS: dict[str, Callable[[Any, LightningModule, Trainer], Any]] = {
    "addition": lambda p, *_: p + 1,
    "norm": lambda p, *_: p.norm(),
    "clone": lambda p, *_: p.clone(),
    "data": lambda p, *_: p.data,
    "detach": lambda p, *_: p.detach(),
    "grad": lambda p, *_: p.grad,
    "deepcopy": lambda p, *_: copy.deepcopy(p),
    "deepcopy of a list": lambda p, *_: copy.deepcopy([p]),
    "writing": lambda p, *_: nn.init.zeros_(p),
    "clip_grad_norm_ by a name of its own": lambda _, module, __: clip_grad_norm_(module.parameters(), 1.0),
    "an optimizer of the user's own": lambda p, *_: torch.optim.SGD([p], lr=0.1).step(),
    "averaging": lambda _, module, __: nn.utils.parameters_to_vector(module.parameters()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_during_training_says_where_the_value_is(
    read: Callable[[Any, LightningModule, Trainer], Any], spare_workers: SpareWorkers
) -> None:
    def act(trainer: Trainer, module: LightningModule) -> None:
        with pytest.raises(PlacementError) as caught:
            read(module.fc1.weight, module, trainer)
        assert str(caught.value) in (TEXT, GRADIENT_TEXT)

    workers = spare_workers.running(2)
    module = fit(act, lambda **kwargs: on_stages(workers, **kwargs))
    assert_whole(module, weights_of(fit(lambda *_: None, make_trainer)))


def test_an_error_that_nobody_catches_ends_the_run_with_the_module_whole(spare_workers: SpareWorkers) -> None:
    workers = spare_workers.running(2)
    with repeatable():
        module = AdamWMlp()
        trainer = on_stages(workers, callbacks=[At(lambda _, module: module.fc1.weight.norm())])
        with pytest.raises(PlacementError) as caught:
            trainer.fit(module, loader())
    assert str(caught.value) == TEXT
    with repeatable():
        whole = AdamWMlp()
        make_trainer(max_steps=STEP).fit(whole, loader())
    assert_whole(module, weights_of(whole))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_values_and_gradients_are_read_right(num_stages: int, spare_workers: SpareWorkers) -> None:
    def look_into(seen: list[dict[str, Any]]) -> Act:
        def act(trainer: Trainer, module: LightningModule) -> None:
            with whole_parameters(trainer.strategy):
                assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
                seen.append(
                    {
                        "norm": nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]),
                        "vector": nn.utils.parameters_to_vector(module.parameters()).detach(),
                        "gradients": {name: copy.deepcopy(p.grad) for name, p in module.named_parameters()},
                        "copy": copy.deepcopy(dict(module.state_dict())),
                    }
                )

        return act

    seen: list[dict[str, Any]] = []
    fit(look_into(seen), make_trainer)
    workers = spare_workers.running(num_stages)
    fit(look_into(seen), lambda **kwargs: on_stages(workers, **kwargs))
    torch.testing.assert_close(seen[1], seen[0], rtol=RTOL, atol=ATOL)


@torch.no_grad()
def halve_weights(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        for parameter in module.parameters():
            parameter.mul_(0.5)


@torch.no_grad()
def assign_data(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        module.fc1.weight.data = torch.full_like(module.fc1.weight, 0.1)


@torch.no_grad()
def swap_two_stages(trainer: Trainer, module: LightningModule) -> None:
    """Exchanges values between biases that live on different stages."""
    with whole_parameters(trainer.strategy):
        first, second = module.fc1.bias.clone(), module.fc2.bias.clone()
        module.fc1.bias.copy_(second)
        module.fc2.bias.copy_(first)


def halve_gradients(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad[0] = 0.0


def drop_a_gradient(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        module.fc1.weight.grad = None


def replace_a_gradient(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        module.fc1.weight.grad = torch.ones_like(module.fc1.weight)


def clip_by_hand(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)


def load_other_weights(trainer: Trainer, module: LightningModule) -> None:
    state: dict[str, Tensor] = {name: value * 0.5 for name, value in module.state_dict().items()}
    module.load_state_dict(state)


def raise_inside(trainer: Trainer, module: LightningModule) -> None:
    """Changes a value and leaves the block by an exception."""

    def change_and_fail() -> None:
        with whole_parameters(trainer.strategy), torch.no_grad():
            module.fc1.weight.mul_(0.5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_and_fail()


def write_through_data(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        for parameter in module.parameters():
            parameter.data.mul_(0.5)


def write_through_numpy(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        module.fc1.weight.detach().numpy()[:] *= 0.5


def clip_with_torch(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def freeze(trainer: Trainer, module: LightningModule) -> None:
    with whole_parameters(trainer.strategy):
        module.fc1.weight.requires_grad_(requires_grad=False)
        module.fc1.weight.grad = None


def step_inside(trainer: Trainer, module: LightningModule) -> None:
    """Steps in the block after a change, and changes what the step made."""
    with whole_parameters(trainer.strategy), torch.no_grad():
        module.fc1.weight.mul_(0.5)
        trainer.optimizers[0].step()
        module.fc1.weight.mul_(2.0)


def train_inside(trainer: Trainer, module: LightningModule) -> None:
    """Runs a step of the user's own in the block."""
    with whole_parameters(trainer.strategy):
        module.zero_grad()
        module(torch.ones(4, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


CHANGES = [
    halve_weights, assign_data, swap_two_stages, halve_gradients, drop_a_gradient, replace_a_gradient, clip_by_hand,
    load_other_weights, raise_inside, write_through_data, write_through_numpy, clip_with_torch, freeze, step_inside,
    train_inside,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_reach_the_owners(change: Act, spare_workers: SpareWorkers) -> None:
    check_equal(change, spare_workers)


def test_nested_blocks(spare_workers: SpareWorkers) -> None:
    def act(trainer: Trainer, module: LightningModule) -> None:
        with whole_parameters(trainer.strategy):
            halve_weights(trainer, module)
            with torch.no_grad():
                module.fc1.weight.add_(0.1)

    check_equal(act, spare_workers)


def test_a_forward_inside_the_block(spare_workers: SpareWorkers) -> None:
    """Runs the network in the block, as a callback that plots predictions would, and trains on afterwards."""
    outputs: list[Tensor] = []

    def act(trainer: Trainer, module: LightningModule) -> None:
        with whole_parameters(trainer.strategy), torch.no_grad():
            module.fc1.weight.mul_(0.5)
            outputs.append(module(torch.ones(4, 8)))

    check_equal(act, spare_workers, num_stages=2)
    torch.testing.assert_close(outputs[-1], outputs[0], rtol=RTOL, atol=ATOL)


class ReadsBetween(AdamWMlp):
    """Reads all weights between its forward and its backward."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        with whole_parameters(self.trainer.strategy):
            size = sum(parameter.detach().abs().sum() for parameter in self.parameters())
        return loss * (1.0 + 0.01 * size)


def test_a_read_between_forward_and_backward(spare_workers: SpareWorkers) -> None:
    weights = []
    workers = spare_workers.running(3)
    for trainer in (make_trainer(), on_stages(workers)):
        with repeatable():
            module = ReadsBetween()
            trainer.fit(module, loader())
        weights.append(weights_of(module))
    torch.testing.assert_close(weights[1], weights[0], rtol=RTOL, atol=ATOL)
