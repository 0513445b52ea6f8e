"""Measures the peak memory of each process against the number of stages, for a model that is mostly parameters.

The model is built on the meta device, so that each process makes its own part only. Each fit runs in a fresh process and takes
two steps of plain SGD on eight rows; the same with layers of width 64 shows what processes need without a model::

    python -m benchmarks.parameters
"""

import argparse
import json
import os

import torch

from benchmarks.peak_parameters import parameter_bytes
from benchmarks.process import child_environment, report_of

FIT_TIMEOUT_S = 600.0
MIB = 2**20


def peaks_mib(num_devices: int, num_layers: int, width: int) -> list[float]:
    """Fits two steps in fresh processes and returns the peak of each one's resident memory.

    Args:
        num_devices: Stages, one a process.
        num_layers: Layers of the model.
        width: Their width.

    Returns:
        In MiB, for the workers and the lead.

    Raises:
        RuntimeError: If the process fails or takes too long.
    """
    arguments = (f"--num-devices={num_devices}", f"--num-layers={num_layers}", f"--width={width}")
    command = ("benchmarks.peak_parameters", *arguments)
    report = report_of(command, child_environment(1, {}), what=f"a fit on {num_devices} devices", timeout_s=FIT_TIMEOUT_S)
    peaks: list[float] = json.loads(report)
    return peaks


def main() -> None:
    """Fits on each number of devices, with the model and almost without, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-devices", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=4096)
    arguments = parser.parse_args()
    total_mib = parameter_bytes(arguments.num_layers, arguments.width) / MIB
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; parameters {total_mib:.0f} MiB, gradients as much", flush=True)
    print("| processes | peak of the workers and the lead, MiB | the same with a small model | the difference |")
    print("| --- | --- | --- | --- |")
    for num_devices in arguments.num_devices:
        peaks = peaks_mib(num_devices, arguments.num_layers, arguments.width)
        small = peaks_mib(num_devices, arguments.num_layers, 64)
        rows = [peaks, small, [a - b for a, b in zip(peaks, small, strict=True)]]
        cells = " | ".join(", ".join(f"{value:.0f}" for value in row) for row in rows)
        print(f"| {num_devices} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
