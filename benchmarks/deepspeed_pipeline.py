"""The variant on DeepSpeed's PipelineModule, which takes the model as a list of layers and trains it by 1F1B.

DeepSpeed is not among the project's own requirements. On CPUs::

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed
    pip install --no-deps hjson py-cpuinfo einops msgpack
"""

import argparse
import itertools
import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.commands import CommandedBatches, add_control, connect
from benchmarks.gpt import GPT, Case, language_loss, make_optimizer

NUM_PROCESSES = 2


class Embeddings(nn.Module):
    """Is the first layer of the list."""

    def __init__(self, gpt: GPT) -> None:
        """Takes the embeddings of a whole model."""
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``(batch, sequence)`` to hidden values."""
        hidden: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return hidden


def layers_of(gpt: GPT) -> list[nn.Module]:
    """Lists what DeepSpeed runs one after the other."""
    return [Embeddings(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.head)]


def settings_of(case: Case) -> dict[str, object]:
    """Returns DeepSpeed's configuration."""
    return {
        "train_batch_size": case.batch_size,
        "train_micro_batch_size_per_gpu": case.microbatch_size,
        "gradient_accumulation_steps": case.num_microbatches,
        "steps_per_print": 2**31,
    }


def microbatches(tokens: Tensor, targets: Tensor, case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the parts of a batch."""
    return zip(tokens.split(case.microbatch_size), targets.split(case.microbatch_size), strict=True)


def main() -> None:
    """Trains this process's layers on command until the driver hangs up."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: PLC0415  (not every variant needs it)
    from deepspeed.pipe import PipelineModule  # noqa: PLC0415

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # collectives in shared memory, compiled at first use: a pipeline with one process a stage has none
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    parser = argparse.ArgumentParser()
    add_control(parser)
    arguments = parser.parse_args()
    connection, case = connect(arguments.control_fd)
    os.environ.setdefault("LOCAL_RANK", str(arguments.rank))
    deepspeed.init_distributed("gloo")
    model = PipelineModule(layers_of(GPT(case)), num_stages=NUM_PROCESSES, loss_fn=language_loss, partition_method="type:Block")
    optimizer = make_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings_of(case))
    batches = CommandedBatches(connection, case)
    for tokens, targets in batches:
        loss = engine.train_batch(itertools.cycle(microbatches(tokens, targets, case)))
        if arguments.rank == 0:
            batches.losses.append(float(loss))


if __name__ == "__main__":
    main()
