"""Measures the seconds from the call of ``trainer.fit`` to the end of its first step.

Each fit runs in a fresh process, and the strategies take turns. The first process has imported everything before the
clock starts; the processes that a strategy starts have yet to, within the time measured::

    python -m benchmarks.startup
"""

import argparse
import os
import statistics

import torch

from benchmarks.process import child_environment, report_of

STRATEGIES = {
    "auto": "Lightning on one device",
    "ddp": "Lightning's ddp, 2 devices",
    "mgpu_pipeline": "mgpu_pipeline, 2 devices",
}
FIT_TIMEOUT_S = 180.0


def seconds_to_first_step(strategy: str) -> float:
    """Fits one step in a fresh process and returns the seconds it took.

    Args:
        strategy: Its name.

    Raises:
        RuntimeError: If the process fails or takes too long.
    """
    command = ("benchmarks.first_step", f"--strategy={strategy}")
    return float(report_of(command, child_environment(1, {}), what=f"a fit with {strategy}", timeout_s=FIT_TIMEOUT_S))


def main() -> None:
    """Lets the strategies take turns and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    load, _, _ = os.getloadavg()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load before {load:.2f}", flush=True)
    times_s: dict[str, list[float]] = {strategy: [] for strategy in arguments.strategies}
    for _ in range(arguments.rounds):
        for strategy, done in times_s.items():
            done.append(seconds_to_first_step(strategy))
            print(f"{strategy}: {done[-1]:.2f} s", flush=True)
    print("| strategy | s to the end of the first step, median (range) |")
    print("| --- | --- |")
    for strategy, done in times_s.items():
        print(f"| {STRATEGIES[strategy]} | {statistics.median(done):.2f} ({min(done):.2f}-{max(done):.2f}) |")


if __name__ == "__main__":
    main()
