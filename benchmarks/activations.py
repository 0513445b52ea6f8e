"""Measures the peak memory of each process against the number of microbatches, for schedules that keep all and few.

Each fit runs in a fresh process and takes a few steps; microbatches have the same size throughout, so more of them make a
larger batch::

    python -m benchmarks.activations
"""

import argparse
import json
import os

import torch

from benchmarks.process import child_environment, report_of

SCHEDULES = ("gpipe", "gpipe+checkpointing", "1f1b", "1f1b+checkpointing", "interleaved_1f1b")
FIT_TIMEOUT_S = 300.0
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed tensors leave the process


def peaks_mib(schedule: str, num_microbatches: int) -> list[float]:
    """Fits a few steps in fresh processes and returns the growth of each one's resident memory at its peak.

    Args:
        schedule: Its name; with ``+checkpointing``, activations are recomputed.
        num_microbatches: Microbatches of a batch, of 8 rows each.

    Returns:
        For the worker and the lead, the peak in the last steps less what was resident before the first batch, in MiB.

    Raises:
        RuntimeError: If the process fails or takes too long.
    """
    command = ("benchmarks.peak_memory", f"--schedule={schedule}", f"--num-microbatches={num_microbatches}")
    environment = child_environment(1, RETURN_MEMORY)
    report = report_of(command, environment, what=f"a fit with schedule {schedule}", timeout_s=FIT_TIMEOUT_S)
    peaks: list[float] = json.loads(report)
    return peaks


def main() -> None:
    """Runs every schedule with every number of microbatches and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--num-microbatches", nargs="+", type=int, default=[4, 8, 16, 32])
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; MiB above the first batch, worker / lead", flush=True)
    print("| schedule | " + " | ".join(f"m = {m}" for m in arguments.num_microbatches) + " |")
    print("| --- |" + " --- |" * len(arguments.num_microbatches))
    for schedule in arguments.schedules:
        cells = []
        for m in arguments.num_microbatches:
            worker, lead = peaks_mib(schedule, m)
            cells.append(f"{worker:.0f} / {lead:.0f}")
        print(f"| {schedule} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
