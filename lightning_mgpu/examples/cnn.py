"""A small convolutional classifier of 28 x 28 grey images, written with functional calls between its layers."""

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override


class CNN(L.LightningModule):
    """Two convolutions and two linear layers over images of shape ``(batch, 1, 28, 28)``.

    The activations, poolings and the flattening are calls in ``forward`` and no modules of their own, so the forward
    cannot be read off the list of layers.

    Args:
        lr: The learning rate of SGD.
        momentum: The momentum of SGD.
    """

    def __init__(self, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.momentum = momentum
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)
        self.train_accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Classifies images.

        Args:
            x: Images, ``(batch, 1, 28, 28)``.

        Returns:
            Logits, ``(batch, 10)``.
        """
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        return self.fc2(x)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_accuracy(logits, labels)
        self.log("test_loss", F.cross_entropy(logits, labels))
        self.log("test_acc", self.test_accuracy)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, _ = batch
        return self(images).argmax(dim=-1)

    @override
    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
