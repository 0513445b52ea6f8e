"""A program that trains one module on one device and in two stages, and prints what came of it as one line of JSON.

The tests of launching run this text in many ways; it imports nothing of theirs, as a user's program would not.
"""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu import PipelineStrategy

warnings.filterwarnings("ignore")  # so that what is printed on standard error comes from faults


class Gate(nn.Module):
    """A layer that looks at its numbers, so that it is sent to its stage as a whole; it tells of the process it runs in."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, h):
        if h.isnan().any():
            raise ValueError("the gate got no number")
        facts = torch.tensor([torch.get_num_threads(), "lightning" in sys.modules, os.getpid()])
        return torch.tanh(self.fc(h)), facts.repeat(len(h), 1)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.gate = Gate()
        self.fc2 = nn.Linear(16, 4)
        self.threads = []

    def forward(self, x):
        h, facts = self.gate(torch.relu(self.fc1(x)))
        return self.fc2(h), facts

    def training_step(self, batch, batch_idx):
        x, y = batch
        output, facts = self(x)
        self.facts = facts[0].tolist()
        self.threads.append(torch.get_num_threads())
        assert not dist.is_initialized()
        loss = nn.functional.mse_loss(output, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(*, spoiled=False, **options):
    """Trains for two steps, with no numbers in the second batch if it is spoiled."""
    seed_everything(0, verbose=False)
    model = Net()
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    if spoiled:
        x[8:] = torch.nan
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=8))
    return trainer.callback_metrics["loss"].item(), model


def train_in_stages(**options):
    return train(strategy=PipelineStrategy(cuts=["fc2"]), devices=2, **options)


def main():
    one_device, _ = train()
    threads_before = torch.get_num_threads()
    two_stages, model = train_in_stages()
    worker_threads, worker_has_lightning, worker = model.facts
    said = {
        "one_device": one_device,
        "two_stages": two_stages,
        "worker_threads": worker_threads,
        "worker_has_lightning": bool(worker_has_lightning),
        "elsewhere": worker != os.getpid(),
        "lead_threads": [threads_before, model.threads[-1], torch.get_num_threads()],
    }
    print(json.dumps(said), flush=True)


main()
