"""What a user of the app might bring along: a module and its data, in a file of their own."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class OwnModule(L.LightningModule):
    def __init__(self, width: int, names: list[str]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, width)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("own_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        raise AssertionError("the data has no test")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
