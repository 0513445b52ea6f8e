"""What happens when a stage fails: the first cause is found, all comes home, workers end, one exception is raised."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_mgpu.errors import MgpuError, PlacementError, StageError
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.dataplane import CommunicationError
from lightning_mgpu.runtime.steps import PartState
from lightning_mgpu.runtime.workers import WorkerGone

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["Failures", "RemoteTraceback"]

_REPORT_WAIT_S = 1.0
_SURRENDER_WAIT_S = 60.0
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "out of memory. Tried")


class RemoteTraceback(Exception):  # noqa: N818 - it is no error of its own
    """Carries the traceback of another process as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Failures:
    """Turns whatever goes wrong during an exchange with the workers into one exception, with the module whole again."""

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self._inside = False

    @contextmanager
    def guarded(self, doing: str) -> Iterator[None]:
        """Runs an exchange with the workers.

        Args:
            doing: what is being done, for the message.

        Raises:
            StageError: where a stage failed, the remote exception as its cause.
        """
        if self.lead.is_users_turn:
            raise PlacementError(
                f"training_step can't ask other stages for anything ({doing}) under schedule={self.lead.schedule.name!r}: "
                'they are in the middle of it; ask in a hook, such as on_before_optimizer_step, or use schedule="gpipe"'
            )
        if self._inside:
            yield
            return
        self._inside = True
        try:
            self.lead.workers.check_alive()
            yield
        except BaseException as error:
            self._fail(error, doing)
        finally:
            self._inside = False

    def _fail(self, error: BaseException, doing: str) -> None:
        lead = self.lead
        engine = lead.running_engine
        last = lead.num_stages - 1
        where: tuple[int, int | None, str] = (last, None, doing)
        if engine is not None:
            where = (last if engine.stage is None else engine.stage, engine.microbatch, engine.doing)
        reports: Mapping[int, m.Failure | None] = {}
        ends: dict[int, str] = {}
        broken = isinstance(error, (CommunicationError, WorkerGone))
        if broken:
            reports = lead.workers.autopsy(_REPORT_WAIT_S)
            ends = {stage: lead.workers.how_it_ended(stage) for stage, report in reports.items() if report is None}
        with _undisturbed():
            lost = self._bring_home()
        note = ""
        if _in_a_step(reports) or (doing == "optimizer step" and not broken):
            note = (
                "; other stages may have made the step, so the weights of the stages may be one step apart: load a checkpoint "
                "before going on"
            )
        if lost:
            note = (
                f"; the values of {len(lost)} tensors ({', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}) went with it "
                "and are NaN now: load a checkpoint before going on"
            )
        if not broken:
            if note and not lost:
                error.add_note(note.removeprefix("; "))
            if not isinstance(error, Exception) or isinstance(error, MgpuError) or where[1] is None:
                raise error
            text = self._text(lead.index, *where, f"{type(error).__name__}: {error}{note}")
            raise StageError(text, stage=where[0], microbatch=where[1]) from error
        raise self._of_reports(reports, ends, error, doing, note)

    def _text(self, process: int, stage: int, microbatch: int | None, doing: str, summary: str) -> str:
        lead = self.lead
        place = f"stage {stage} of {lead.num_stages} ({lead.workers.devices[process]})"
        if lead.mesh.data > 1:
            place += f" of replica {lead.mesh.replica(process)} of {lead.mesh.data}"
        when = f" in microbatch {microbatch}" if microbatch is not None else ""
        return f"{place} failed{when} ({doing}): {summary}{_remedy(summary)}"

    def _of_reports(
        self, reports: Mapping[int, m.Failure | None], ends: Mapping[int, str], error: BaseException, doing: str, note: str
    ) -> StageError:
        """Chooses the first cause: the earliest report that is no communication error, or a process that left none."""
        causes = [(p, r) for p, r in reports.items() if r is not None and not r.is_communication]
        if causes:
            process, first = min(causes, key=lambda pair: pair[1].raised_at_s)
            stage = self._stage_of(process) if first.stage is None else first.stage
            failure = StageError(
                self._text(process, stage, first.microbatch, first.doing, f"{first.summary}{note}"),
                stage=stage,
                microbatch=first.microbatch,
            )
            failure.__cause__ = _cause_of(first)
            return failure
        if ends:
            process, how = next(iter(ends.items()))
            stage = self._stage_of(process)
            failure = StageError(self._text(process, stage, None, doing, f"its process {how}{note}"), stage=stage)
            failure.__suppress_context__ = True  # that its peers lost touch with it says nothing more
            return failure
        failure = StageError(f"the stages lost touch during {doing}: {error}{note}", stage=self.lead.num_stages - 1)
        failure.__cause__ = error
        return failure

    def _stage_of(self, process: int) -> int:
        """Returns the first stage of a process."""
        return self.lead.planner.placement.homes.index(self.lead.mesh.position(process))

    def _bring_home(self) -> list[str]:
        """Takes everything home that can still be had and ends the workers."""
        lead = self.lead
        states: list[list[PartState]] = []
        was_away = lead.home.away
        surrendered = lead.workers.surrender(_SURRENDER_WAIT_S)
        for process in sorted(surrendered, reverse=True):  # the lead's own replica has the whole gradients
            pickled = surrendered[process]
            if pickled is None:
                continue
            with contextlib.suppress(Exception):
                tensors, gradients, optimizers = pickle.loads(pickled)
                lead.home.put(tensors, gradients if process in lead.owners else {})
                states.insert(0, optimizers)
        lost = lead.home.give_up()
        if was_away:
            lead.optimizers.take(states)
        lead.start_over()
        return lost


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets another Ctrl-C pass while everything comes home, since what is on its way would be lost."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _remedy(summary: str) -> str:
    """Says what to do where memory has run out."""
    if not any(sign in summary for sign in _OUT_OF_MEMORY):
        return ""
    return (
        '; to need less memory use activation_checkpointing=True, schedule="1f1b" (which keeps the activations of fewer '
        "microbatches), a larger num_microbatches, smaller batches, or more devices"
    )


def _in_a_step(reports: Mapping[int, m.Failure | None]) -> bool:
    return any(report is not None and report.doing == "optimizer step" for report in reports.values())


def _cause_of(report: m.Failure) -> BaseException:
    remote = RemoteTraceback(report.traceback)
    cause: BaseException = RuntimeError(report.summary)
    if report.exception is not None:
        with contextlib.suppress(Exception):
            cause = pickle.loads(report.exception)
    cause.__cause__ = remote
    return cause
