"""Measures the milliseconds that recording the GPT's forward takes.

Whole batch, one thread, in this process::

    python -m benchmarks.recording
"""

import statistics
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT, Case, make_batch
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.record import Recorder

NUM_WARM_UP = 3
NUM_TIMED = 20


def record_once(recorder: Recorder, module: nn.Module, tokens: Tensor) -> int:
    """Records one forward of the module.

    Args:
        recorder: A recorder of modules below ``module``.
        module: A model in train mode.
        tokens: Its input, ``(batch, sequence)``.

    Returns:
        The number of calls recorded.
    """
    return len(recorder.record(module, (tokens,), {}).graph.nodes)


def main() -> None:
    """Prints the median and the range."""
    torch.set_num_threads(1)
    case = Case()
    model = GPT(case)
    tokens, _ = make_batch(case, 0)
    recorder = Recorder(Names(model))
    durations_ms = []
    num_nodes = 0
    for _ in range(NUM_WARM_UP + NUM_TIMED):
        start_s = perf_counter()
        num_nodes = record_once(recorder, model, tokens)
        durations_ms.append(1000 * (perf_counter() - start_s))
    timed = durations_ms[NUM_WARM_UP:]
    spread = f"{statistics.median(timed):.1f} ({min(timed):.1f}-{max(timed):.1f})"
    print(f"{num_nodes} calls; ms a recording, median (range): {spread}")


if __name__ == "__main__":
    main()
