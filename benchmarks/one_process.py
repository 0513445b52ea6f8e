"""The variants on one process in plain torch: microbatches accumulated, or the whole batch at once."""

import argparse

from torch import Tensor

from benchmarks.commands import CommandedBatches, add_control, connect
from benchmarks.gpt import GPT, language_loss, make_optimizer


def main() -> None:
    """Trains on command until the driver hangs up."""
    parser = argparse.ArgumentParser()
    add_control(parser)
    parser.add_argument("--whole-batch", action="store_true")
    arguments = parser.parse_args()
    connection, case = connect(arguments.control_fd)
    num_parts = 1 if arguments.whole_batch else case.num_microbatches

    model = GPT(case)
    optimizer = make_optimizer(model)

    def accumulate(tokens: Tensor, targets: Tensor) -> float:
        total = 0.0
        for part, target in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True):
            loss = language_loss(model(part), target) / num_parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    batches = CommandedBatches(connection, case)
    for tokens, targets in batches:
        optimizer.zero_grad()
        batches.losses.append(accumulate(tokens, targets))
        optimizer.step()


if __name__ == "__main__":
    main()
