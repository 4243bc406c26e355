"""The one place where the controller waits for workers, and for none that is dead, stopped or
stuck.

The first failure of any worker is the failure of all of them: the others wait for that one sooner
or later, most of them in a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import ray
from ray.exceptions import RayError

from april_rl.errors import RunError
from april_rl.runtime.supervision.cluster_monitor import Sentries
from april_rl.runtime.supervision.diagnosis import Scene, died, failed, head_lost, silent, stopped
from april_rl.runtime.supervision.failures import Failure, WorkerStalledError, failure_of
from april_rl.runtime.supervision.progress import Silence
from april_rl.runtime.supervision.ray_head import Head
from april_rl.runtime.supervision.stall_report import report_text

T = TypeVar("T")
_LOOK_S = 1.0  # between two looks at every worker
_HEAD_LOOK_S = 0.9  # a little less, for a wait may end a moment before its time
_STOPPED_S = 4.0  # a process that a signal has stopped for so long will not go on
_SETTLE_S = 1.0  # after a failed call, until the process that caused it is seen to be dead
_STACKS_S = 2.0


class _Limit(NamedTuple):
    """How long a worker may be silent."""

    key: str
    timeout_s: float


_NEVER = _Limit("", math.inf)


class Watchdog:
    """Results of calls to workers, or one error that says which worker is at fault."""

    def __init__(self, *, report: Path, stall_timeout_s: float, call_timeout_s: float) -> None:
        """`report`: the file that is written when workers fail.

        A worker that shows no progress for `stall_timeout_s` is stuck; in calls that show none by
        their nature, after `call_timeout_s`.
        """
        self._report = report
        self._steady = _Limit("runtime.stall_timeout_s", stall_timeout_s)
        self._other = _Limit("runtime.call_timeout_s", call_timeout_s)
        self._actors: list[Any] = []
        self._ranks: dict[object, int] = {}  # by Ray's actor id
        self._oldest_request: Callable[[], str] = str
        self._looked = self._looked_at_head = time.monotonic()
        self._met([])
        self.head = Head()
        self.has_failed = False  # some worker did

    @property
    def longest_s(self) -> float:
        """For how long a worker may be silent in the calls that may be so for longest."""
        return self._other.timeout_s

    def meet(self, actors: Sequence[Any]) -> None:
        """Learn where the workers are, by rank. Before this a dead one is only noticed by a call to
        it, and the limit for calls without progress holds for each call as a whole.
        """
        self._actors = list(actors)
        self._ranks = {actor._actor_id: rank for rank, actor in enumerate(actors)}
        self._met(self.results([actor.member.remote() for actor in actors]))

    def report_also(self, oldest_request: Callable[[], str]) -> None:
        """Let the report say what `oldest_request` says in a line."""
        self._oldest_request = oldest_request

    def results(self, calls: Sequence[ray.ObjectRef[T]], *, is_steady: bool = False) -> list[T]:
        """The results, in order; `is_steady`: of calls that show progress while they run.

        Raises the RunError of a worker as it is; for everything else WorkerDiedError,
        WorkerMemoryError or WorkerStalledError, with the worker and the report in the message, or
        HeadLostError.
        """
        found: dict[ray.ObjectRef[T], T] = {}
        while len(found) < len(calls):
            left = [call for call in calls if call not in found]
            found |= self.wait(left, is_steady=is_steady)
        return [found[call] for call in calls]

    def wait(
        self, calls: Sequence[ray.ObjectRef[T]], *, is_steady: bool = False
    ) -> dict[ray.ObjectRef[T], T]:
        """The results of the calls that have ended, at least one; raises as `results` does."""
        limit, started = self._steady if is_steady else self._other, time.monotonic()
        while True:
            found, failures = self._ended(calls, _LOOK_S)
            if failures:
                self._conclude(calls, failures)
            self._look(calls, limit)
            self._look_at_head()
            if found:
                return found
            if not self._sentries.members and time.monotonic() - started >= limit.timeout_s:
                self._fail_silent(limit)

    def within(self, calls: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any] | None:
        """The results, in order; None when one is missing after `timeout_s`. Raises as `results`
        does, but for silence; once it has, never: None then when one of these calls failed.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[ray.ObjectRef[Any], Any] = {}
        while len(found) < len(calls):
            left = [call for call in calls if call not in found]
            left_s = max(0.0, deadline - time.monotonic())
            ended, failures = self._ended(left, min(left_s, _LOOK_S))
            found |= ended
            if failures and not self.has_failed:
                self._conclude(left, failures)
            if failures or not (ended or left_s):
                return None
            if not self.has_failed:
                self._look(left, _NEVER)
        return [found[call] for call in calls]

    def stalled(self, what: str) -> NoReturn:
        """Raise WorkerStalledError for `what` the caller has seen, after a report."""
        self._fail(WorkerStalledError(what), self._scene())

    def report(self, what: str) -> None:
        """Write the report for `what` the caller has seen."""
        self._write(WorkerStalledError(what), self._scene())

    def end(self) -> None:
        """End every worker's process and its children, whatever they are doing."""
        self._sentries.mark()
        try:
            for actor in self._actors if ray.is_initialized() else ():  # Ray would start for it
                ray.kill(actor, no_restart=True)
        finally:  # whatever Ray says to that, or a person who waits
            self._sentries.end()

    def _met(self, members: Sequence[Any]) -> None:
        self._sentries = Sentries(members)
        self._silence = Silence(len(members))

    def _ended(
        self, calls: Sequence[ray.ObjectRef[T]], timeout_s: float
    ) -> tuple[dict[ray.ObjectRef[T], T], dict[int | None, Failure]]:
        """Of those of `calls` that have ended, waiting at most `timeout_s` for the first: results,
        and failures by rank. A RunError of a worker is raised.
        """
        ended, waiting = ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        if ended and waiting:
            ended += ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        found: dict[ray.ObjectRef[T], T] = {}
        failures: dict[int | None, Failure] = {}
        for call in ended:
            try:
                found[call] = ray.get(call)
            except RayError as error:
                failures[self._rank(call)] = failure_of(error)
        return found, failures

    def _rank(self, call: ray.ObjectRef[Any]) -> int | None:
        """Who was called; None before the workers were met."""
        return self._ranks.get(call.task_id().actor_id())

    def _look(self, calls: Sequence[ray.ObjectRef[Any]], limit: _Limit) -> None:
        """Once in a while: raise when a worker is dead, stopped, or silent in one of `calls`."""
        passed_s = time.monotonic() - self._looked
        if passed_s < _LOOK_S:
            return
        self._looked += passed_s
        ranks = {self._rank(call) for call in calls}
        vitals = self._sentries.look()
        self._silence.observe(vitals, passed_s=passed_s, waited_for=ranks)
        for rank, of_rank in enumerate(vitals):
            if of_rank.is_dead:
                self._conclude(calls, {})
            if self._silence.stopped_s(rank) >= _STOPPED_S:
                scene = self._scene()
                self._fail(stopped(scene, rank), scene)
        if any(self._silence.silent_s(rank) >= limit.timeout_s for rank in range(len(vitals))):
            self._fail_silent(limit)

    def _look_at_head(self) -> None:
        """Once in a while: raise when Ray's head process has ended. Not in `within`: what the
        workers still have to give comes without it.
        """
        if time.monotonic() - self._looked_at_head < _HEAD_LOOK_S:
            return
        self._looked_at_head = time.monotonic()
        self.head.look()
        if self.head.is_lost:
            scene = self._scene()
            self._fail(head_lost(scene, self.head.address), scene)

    def _fail_silent(self, limit: _Limit) -> NoReturn:
        """Raise who is silent: of all that are, the one that the others wait for."""
        scene = self._scene()
        quiet = [
            rank
            for rank in range(len(scene.members))
            if self._silence.silent_s(rank) >= limit.timeout_s
        ]
        behind = set(quiet) & set(scene.at_fault())
        rank = min(behind or quiet, default=None)
        self._fail(silent(scene, rank, key=limit.key, limit_s=limit.timeout_s), scene)

    def _conclude(
        self, calls: Sequence[ray.ObjectRef[Any]], failures: dict[int | None, Failure]
    ) -> NoReturn:
        """Raise who is at fault: a dead worker before one whose call only failed for that."""
        deadline = time.monotonic() + _SETTLE_S
        scene = self._scene()
        while not (scene.dead() and failures.keys() & set(scene.dead())):
            if time.monotonic() > deadline:
                break
            time.sleep(_SETTLE_S / 10)
            failures = failures | self._ended(calls, 0)[1]
            scene = self._scene()
        rank = next(iter([*scene.dead(), *failures]))
        failure = failures.get(rank)
        is_plain_death = rank in scene.dead() and not (failure and failure.is_memory)
        if is_plain_death or failure is None:
            assert rank is not None
            self._fail(died(scene, rank), scene)
        self._fail(failed(scene, rank, failure), scene)

    def _scene(self) -> Scene:
        """Everything as it is now."""
        members = self._sentries.members
        return Scene(
            members=members,
            vitals=self._sentries.look(),
            machines=self._sentries.machines(),
            most_rss_bytes=[self._silence.most_rss_bytes(rank) for rank in range(len(members))],
        )

    def _fail(self, error: RunError, scene: Scene) -> NoReturn:
        """Write the report and raise `error`, which says where it is."""
        raise type(error)(f"{error}\n{self._write(error, scene)}") from None

    def _write(self, error: RunError, scene: Scene) -> str:
        """A line about the report, which a full disk must not put in the place of `error`."""
        self.has_failed = True
        findings = self._sentries.findings(_STACKS_S)
        text = report_text(error, scene, findings=findings, oldest_request=self._oldest_request())
        try:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            self._report.write_text(text, encoding="utf-8")
        except OSError as why:
            return f"The report could not be written ({why}):\n{text}"
        return f"Who waited for whom, and where: {self._report}"
