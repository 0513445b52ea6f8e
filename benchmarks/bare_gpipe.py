"""The variant on bare `torch.distributed.pipelining`: two hand-cut stages, no framework around them."""

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.commands import CommandedBatches, add_control, connect
from benchmarks.gpt import GPT, Case, language_loss, make_optimizer

NUM_STAGES = 2


class FirstStage(nn.Module):
    """The embeddings and the first half of the blocks."""

    def __init__(self, gpt: GPT) -> None:
        """Takes the layers from a whole model."""
        super().__init__()
        self.tokens = gpt.tokens
        self.positions = gpt.positions
        self.blocks = gpt.blocks[: len(gpt.blocks) // NUM_STAGES]

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``(batch, sequence)`` to ``(batch, sequence, width)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class LastStage(nn.Module):
    """The other blocks and the head."""

    def __init__(self, gpt: GPT) -> None:
        """Takes the layers from a whole model."""
        super().__init__()
        self.blocks = gpt.blocks[len(gpt.blocks) // NUM_STAGES :]
        self.norm = gpt.norm
        self.head = gpt.head

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``(batch, sequence, width)`` to logits ``(batch, sequence, vocabulary)``."""
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def make_stage(case: Case, module: nn.Module, rank: int) -> PipelineStage:
    """Returns a stage that is told its shapes, so that torch runs nothing to infer them."""
    rows = (case.microbatch_size, case.sequence_length)
    tokens = torch.zeros(rows, dtype=torch.long)
    hidden = torch.zeros(*rows, case.width, requires_grad=True)
    logits = torch.zeros(*rows, case.vocabulary_size, requires_grad=True)
    received, sent = (tokens, hidden) if rank == 0 else (hidden, logits)
    return PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"), input_args=received, output_args=sent)


def main() -> None:
    """Trains this process's stage on command until the driver hangs up."""
    parser = argparse.ArgumentParser()
    add_control(parser)
    arguments = parser.parse_args()
    connection, case = connect(arguments.control_fd)
    distributed.init_process_group("gloo")
    is_last = arguments.rank == NUM_STAGES - 1

    gpt = GPT(case)
    module = LastStage(gpt) if is_last else FirstStage(gpt)
    optimizer = make_optimizer(module)
    stage = make_stage(case, module, arguments.rank)
    schedule = ScheduleGPipe(stage, case.num_microbatches, loss_fn=language_loss, scale_grads=True)

    batches = CommandedBatches(connection, case)
    for tokens, targets in batches:
        optimizer.zero_grad()
        if is_last:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses, return_outputs=False)
            batches.losses.append(torch.stack(losses).mean().item())
        else:
            schedule.step(tokens, return_outputs=False)
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
