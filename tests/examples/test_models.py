"""The example models: the layers they promise, and what a plain Trainer makes of them."""

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mgpu.examples import CNN, DigitsDataModule, Linear, RandomLinearDataModule, TwoLayerLinear


def plain_trainer(tmp_path: Path, max_epochs: int = 1) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (
            CNN,
            {
                "conv1.weight": (10, 1, 5, 5),
                "conv1.bias": (10,),
                "conv2.weight": (20, 10, 5, 5),
                "conv2.bias": (20,),
                "fc1.weight": (50, 320),
                "fc1.bias": (50,),
                "fc2.weight": (10, 50),
                "fc2.bias": (10,),
            },
        ),
        (Linear, {"fc.weight": (2, 10), "fc.bias": (2,)}),
        (
            TwoLayerLinear,
            {"fc1.weight": (2, 10), "fc1.bias": (2,), "fc2.weight": (1, 2), "fc2.bias": (1,)},
        ),
    ],
)
def test_parameters(model: type[L.LightningModule], shapes: dict[str, tuple[int, ...]]) -> None:
    assert {name: tuple(parameter.shape) for name, parameter in model().named_parameters()} == shapes


def test_cnn_forward(seed: int) -> None:
    model, images = CNN(), torch.randn(3, 1, 28, 28)
    x = F.conv2d(images, model.conv1.weight, model.conv1.bias)
    x = F.max_pool2d(x, 2).clamp_min(0)
    x = F.conv2d(x, model.conv2.weight, model.conv2.bias)
    x = F.max_pool2d(x, 2).clamp_min(0).flatten(1)
    x = (x @ model.fc1.weight.T + model.fc1.bias).clamp_min(0)
    torch.testing.assert_close(model(images), x @ model.fc2.weight.T + model.fc2.bias)


def test_two_layer_linear_is_the_product_of_its_layers(seed: int) -> None:
    model, inputs = TwoLayerLinear(), torch.randn(5, 10)
    weight = model.fc2.weight @ model.fc1.weight
    bias = model.fc2.weight @ model.fc1.bias + model.fc2.bias
    torch.testing.assert_close(model(inputs), inputs @ weight.T + bias)


def test_hyperparameters_reach_the_optimizer() -> None:
    model = CNN(lr=0.3, momentum=0.7)
    [group] = model.configure_optimizers().param_groups
    assert (group["lr"], group["momentum"]) == (0.3, 0.7)
    assert dict(model.hparams) == {"lr": 0.3, "momentum": 0.7}
    [group] = TwoLayerLinear(lr=0.2).configure_optimizers().param_groups
    assert group["lr"] == 0.2


def test_cnn_learns_digits_and_logs_what_it_measures(seed: int, tmp_path: Path) -> None:
    model, digits, trainer = CNN(), DigitsDataModule(), plain_trainer(tmp_path, max_epochs=3)
    trainer.fit(model, datamodule=digits)
    assert trainer.callback_metrics.keys() == {"train_loss", "train_acc", "val_loss", "val_acc"}

    [metrics] = trainer.test(model, datamodule=digits, verbose=False)
    assert metrics.keys() == {"test_loss", "test_acc"}
    predicted = torch.cat(trainer.predict(model, datamodule=digits))
    labels = torch.cat([labels for _, labels in digits.test_dataloader()])
    assert metrics["test_acc"] == pytest.approx((predicted == labels).float().mean().item())
    assert metrics["test_acc"] > 0.5  # a guess is right once in ten


@pytest.mark.parametrize(("model", "num_targets"), [(Linear, 2), (TwoLayerLinear, 1)])
def test_linear_models_fit_random_targets(model: type[L.LightningModule], num_targets: int, seed: int, tmp_path: Path) -> None:
    data, trainer = RandomLinearDataModule(num_targets), plain_trainer(tmp_path)
    trained = model(lr=0.1)
    data.setup("fit")
    inputs, targets = map(torch.stack, zip(*data.train_dataloader().dataset, strict=True))

    def loss() -> Tensor:
        return F.mse_loss(trained(inputs), targets)

    before = loss()
    trainer.fit(trained, datamodule=data)
    assert loss() < before
    [metrics] = trainer.test(trained, datamodule=data, verbose=False)
    assert metrics.keys() == {"test_loss"}
