"""The variants on bare `torch.distributed.pipelining`: hand-cut stages, no framework around them."""

import argparse
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from benchmarks.commands import CommandedBatches, add_control, connect
from benchmarks.gpt import GPT, Case, language_loss, make_optimizer

NUM_PROCESSES = 2
V_SCHEDULES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
ONE_STAGE_SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")
_LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")


class Part(nn.Module):
    """A run of the GPT's blocks; the first part has the embeddings, the last the head."""

    def __init__(self, gpt: GPT, index: int, num_stages: int) -> None:
        """Takes the layers from a whole model."""
        super().__init__()
        size = len(gpt.blocks) // num_stages
        self.first, self.last = index == 0, index == num_stages - 1
        if self.first:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        self.blocks = gpt.blocks[index * size : (index + 1) * size]
        if self.last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens ``(batch, sequence)`` or hidden values on to hidden values, in the end to logits."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def make_stage(case: Case, module: nn.Module, index: int, num_stages: int) -> PipelineStage:
    """Returns a stage that is told its shapes, so that torch runs nothing to infer them."""
    rows = (case.microbatch_size, case.sequence_length)
    tokens = torch.zeros(rows, dtype=torch.long)
    hidden = torch.zeros(*rows, case.width, requires_grad=True)
    logits = torch.zeros(*rows, case.vocabulary_size, requires_grad=True)
    received, sent = tokens if index == 0 else hidden, logits if index == num_stages - 1 else hidden
    return PipelineStage(module, index, num_stages, torch.device("cpu"), input_args=received, output_args=sent)


def stages_of(rank: int, schedule: str) -> tuple[list[int], int]:
    """Lists the stages of one rank, and says how many there are in all."""
    if schedule in ONE_STAGE_SCHEDULES:
        return [rank], NUM_PROCESSES
    last = 2 * NUM_PROCESSES - 1
    return [rank, last - rank if schedule in V_SCHEDULES else rank + NUM_PROCESSES], last + 1


def main() -> None:
    """Trains this process's stages on command until the driver hangs up."""
    parser = argparse.ArgumentParser()
    add_control(parser)
    parser.add_argument("--schedule", choices=(*ONE_STAGE_SCHEDULES, *V_SCHEDULES, *_LOOPED), default="ScheduleGPipe")
    arguments = parser.parse_args()
    connection, case = connect(arguments.control_fd)
    distributed.init_process_group("gloo")
    indices, num_stages = stages_of(arguments.rank, arguments.schedule)
    has_first, has_last = 0 in indices, num_stages - 1 in indices

    gpt = GPT(case)
    modules = [Part(gpt, index, num_stages) for index in indices]
    optimizer = make_optimizer(nn.ModuleList(modules))
    stages: Any = [make_stage(case, module, index, num_stages) for module, index in zip(modules, indices, strict=True)]
    given = stages[0] if arguments.schedule in ONE_STAGE_SCHEDULES else stages
    make = getattr(pipelining, arguments.schedule)
    schedule = make(given, case.num_microbatches, loss_fn=language_loss, scale_grads=True)

    batches = CommandedBatches(connection, case)
    for tokens, targets in batches:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        arguments_of_last: dict[str, Any] = {"target": targets, "losses": losses} if has_last else {}
        schedule.step(*([tokens] if has_first else []), **arguments_of_last, return_outputs=False)
        if has_last:
            batches.losses.append(torch.stack(losses).mean().item())
        optimizer.step()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
