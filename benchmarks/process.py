"""Child processes that never outlive the block which started them."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

GRACE_S = 15.0


def child_environment(num_threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with gloo on loopback and a fixed number of threads.

    Args:
        num_threads: Threads within one torch operation, also in the child's own children.
        extra: Variables to add.
    """
    fixed = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_NUM_THREADS": str(num_threads),
    }
    return {**os.environ, **fixed, **extra}


@contextmanager
def child_process(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts ``python -m`` with the arguments; at the end waits a moment, then kills it and its children.

    Args:
        arguments: A module and its arguments.
        log: Receives both output streams.
        environment: All variables of the child.
        pass_fds: File descriptors that the child inherits.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=dict(environment),
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that its children can be killed with it
        )
    try:
        yield process
    finally:
        _end(process)


def report_of(arguments: Sequence[str], environment: Mapping[str, str], *, what: str, timeout_s: float) -> str:
    """Runs ``python -m`` with the arguments to its end and returns the report it wrote.

    Args:
        arguments: A module and its arguments; ``--report`` is added.
        environment: All variables of the child.
        what: Names it in an error.
        timeout_s: Seconds it may take.

    Raises:
        RuntimeError: If it fails or takes too long, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder) / "log", Path(folder) / "report"
        with child_process((*arguments, f"--report={report}"), log, environment) as process:
            try:
                status: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
        if status != 0:
            how = f"ran longer than {timeout_s:.0f} s" if status is None else f"exited with {status}"
            message = f"{what} {how}; it wrote:\n{tail(log)}"
            raise RuntimeError(message)
        return report.read_text(encoding="utf-8")


def tail(log: Path, num_lines: int = 30) -> str:
    """Returns the last lines that a process wrote."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        if process.returncode is None:
            # Not reaped yet, so the number still names this group and no other.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
