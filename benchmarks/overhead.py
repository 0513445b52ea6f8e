"""Compares the time of a training step: our pipeline, bare torch pipelining, one process, data parallelism.

All variants train the same GPT from the same weights on the same batches, on CPUs, with one thread a process. They take
turns within one run, so that whatever else the machine does falls on all of them::

    python -m benchmarks.overhead
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace

import torch

from benchmarks.contender import Contender, Steps, Variant, start
from benchmarks.gpt import Case

ACCUMULATION = "accumulation"
BARE_GPIPE = "bare-gpipe"
TORCH_NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def _bare(schedule: str) -> Variant:
    command = ("benchmarks.bare_pipeline", f"--schedule={TORCH_NAMES[schedule]}")
    return Variant(f"bare-{schedule}", command, num_started=2, num_processes=2)


def _ours(schedule: str) -> Variant:
    command = ("benchmarks.lightning_fit", "--strategy=mgpu_pipeline", f"--schedule={schedule}")
    return Variant(f"mgpu-{schedule}", command, num_processes=2)


VARIANTS = (
    Variant(ACCUMULATION, ("benchmarks.one_process",)),
    _bare("gpipe"),
    _ours("gpipe"),
    Variant("whole-batch", ("benchmarks.one_process", "--whole-batch")),
    Variant("whole-batch-2-threads", ("benchmarks.one_process", "--whole-batch"), num_threads=2),
    Variant("lightning-ddp", ("benchmarks.lightning_fit", "--strategy=ddp"), num_started=2, num_processes=2),
)
SCHEDULE_VARIANTS = tuple(make(schedule) for schedule in TORCH_NAMES if schedule != "gpipe" for make in (_bare, _ours))
DEEPSPEED = Variant("deepspeed-1f1b", ("benchmarks.deepspeed_pipeline",), num_started=2, num_processes=2)
FEATURES = tuple(
    replace(_ours(schedule), name=f"mgpu-{schedule}+features", command=(*_ours(schedule).command, "--with-features"))
    for schedule in TORCH_NAMES
)
OTHERS = (*SCHEDULE_VARIANTS, DEEPSPEED, *FEATURES)
NUM_CHECKED_STEPS = 3


def check_losses(steps: Mapping[str, Steps]) -> None:
    """Compares every variant's losses with the first one's.

    Args:
        steps: The first steps of each variant, by name.

    Raises:
        AssertionError: If a variant trains something else.
    """
    reference, *others = steps
    expected = torch.tensor(steps[reference].losses)
    for name in others:
        losses = torch.tensor(steps[name].losses)
        message = f"{name} has losses {losses.tolist()}, {reference} has {expected.tolist()}: not the same training"
        torch.testing.assert_close(losses, expected, msg=message)


def measure(contenders: Sequence[Contender], num_rounds: int, num_steps: int) -> dict[str, list[Steps]]:
    """Lets the contenders take turns and returns each one's rounds, by name.

    Args:
        contenders: Warm ones.
        num_rounds: Turns of each.
        num_steps: Timed steps of a turn; one more, before them, is not timed.
    """
    rounds: dict[str, list[Steps]] = {contender.variant.name: [] for contender in contenders}
    for index in range(num_rounds):
        for contender in contenders:
            rounds[contender.variant.name].append(contender.run(1 + num_steps))
        texts = (f"{name} {_median_ms(done[-1]):.0f}" for name, done in rounds.items())
        print(f"round {index + 1} of {num_rounds}, ms a step:", ", ".join(texts), flush=True)
    return rounds


def table(variants: Sequence[Variant], rounds: Mapping[str, Sequence[Steps]]) -> str:
    """Returns the figures in Markdown, a row for each variant.

    A ratio is taken within each round, between neighbours in time; the table shows the median over the rounds with the
    least and the largest.

    Args:
        variants: The rows.
        rounds: What `measure` returned.
    """
    bases: dict[str, Callable[[str], str]] = {
        ACCUMULATION: lambda _: ACCUMULATION,
        "bare script": _bare_script_of,
    }
    head = [f"throughput / {base}" for base in bases]
    lines = [["variant", "processes x threads", "ms a step, median (range)", *head]]
    lines.append(["---"] * len(lines[0]))
    for variant in variants:
        own = [_median_ms(steps) for steps in rounds[variant.name]]
        cells = [variant.name, f"{variant.num_processes} x {variant.num_threads}", _spread(own, 0)]
        for base_of in bases.values():
            others = [_median_ms(steps) for steps in rounds.get(base_of(variant.name), ())]
            if not others:
                cells.append("")
                continue
            cells.append(_spread([b / o for b, o in zip(others, own, strict=True)], 3))
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _bare_script_of(name: str) -> str:
    """Names the bare script with the same schedule, or that of gpipe where there is none."""
    schedule = name.partition("-")[2].partition("+")[0]
    return f"bare-{schedule}" if schedule in TORCH_NAMES else BARE_GPIPE


def _median_ms(steps: Steps) -> float:
    return 1000 * statistics.median(steps.durations_s)


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _drift(rounds: Mapping[str, Sequence[Steps]]) -> float:
    """Returns the largest difference between two variants' losses at any step."""
    runs = [[loss for steps in done for loss in steps.losses] for done in rounds.values()]
    return max((max(losses) - min(losses) for losses in zip(*runs, strict=True)), default=0.0)


def _parse() -> tuple[argparse.Namespace, Case]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [variant.name for variant in (*VARIANTS, *OTHERS)]
    parser.add_argument("--variants", nargs="+", choices=names, default=[variant.name for variant in VARIANTS])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a round")
    for field in fields(Case):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    arguments = parser.parse_args()
    case = Case(**{field.name: getattr(arguments, field.name) for field in fields(Case)})
    if case.batch_size % case.num_microbatches or case.batch_size % 2 or case.num_layers % 2:
        parser.error(
            f"cannot split {case.batch_size} rows into {case.num_microbatches} microbatches and 2 processes, and "
            f"{case.num_layers} layers into 2 stages, equally; choose multiples"
        )
    return arguments, case


def main() -> None:
    """Starts the variants, checks that they agree, times them in turns and prints the table."""
    arguments, case = _parse()
    variants = [variant for variant in (*VARIANTS, *OTHERS) if variant.name in arguments.variants]
    load, _, _ = os.getloadavg()
    print(f"{case}; torch {torch.__version__}, {os.cpu_count()} cores, load before {load:.2f}", flush=True)
    with ExitStack() as stack:
        contenders = [stack.enter_context(start(variant, case)) for variant in variants]
        first = {contender.variant.name: contender.run(NUM_CHECKED_STEPS) for contender in contenders}
        check_losses(first)
        print(f"losses agree over {NUM_CHECKED_STEPS} steps: {first[variants[0].name].losses}", flush=True)
        rounds = measure(contenders, arguments.rounds, arguments.steps)
    print(table(variants, rounds))
    print(f"largest difference between losses at one step: {_drift(rounds):.1e}")


if __name__ == "__main__":
    main()
