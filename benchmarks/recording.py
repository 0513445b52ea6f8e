"""Measures the milliseconds that recording the GPT's forward takes.

Whole batch, one thread, in this process::

    python -m benchmarks.recording
"""

import statistics
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT, Case, make_batch

NUM_WARM_UP = 3
NUM_TIMED = 20


def record_once(module: nn.Module, tokens: Tensor) -> None:
    """Records one forward of the module.

    Args:
        module: A model in train mode.
        tokens: Its input, ``(batch, sequence)``.
    """
    # TO FILL IN: the call of lightning_mgpu.partition.record, once its signature is settled.
    raise NotImplementedError


def main() -> None:
    """Prints the median and the range."""
    torch.set_num_threads(1)
    case = Case()
    model = GPT(case)
    tokens, _ = make_batch(case, 0)
    durations_ms = []
    for _ in range(NUM_WARM_UP + NUM_TIMED):
        start_s = perf_counter()
        record_once(model, tokens)
        durations_ms.append(1000 * (perf_counter() - start_s))
    timed = durations_ms[NUM_WARM_UP:]
    print(f"ms a recording, median (range): {statistics.median(timed):.1f} ({min(timed):.1f}-{max(timed):.1f})")


if __name__ == "__main__":
    main()
