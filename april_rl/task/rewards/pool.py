"""Scores responses in separate processes while generation continues, with time and memory limits.

Before that it names the data columns of the functions and tries them on responses given as text.

A timeout, a crash and an invalid result are three outcomes. A sample is tried once more when its
process was killed or died, or when the function raised, had no score or returned NaN. A function
that returns something else than a number for each response ends the run.

A response may end all processes at once, because they share the pipes of their pool. Each unit that
may have run then is scored alone, so that only the guilty one uses up its attempts.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from april_rl.config.runtime import UserCodeConfig
from april_rl.config.task import RewardConfig
from april_rl.metrics import Metrics, Sum
from april_rl.task.processes.child_process import lifeline
from april_rl.task.processes.mailbox import Mailbox
from april_rl.task.rewards.functions import MATH_VERIFY, builder_of, reward_functions
from april_rl.task.rewards.jobs import DecodedJob, Result, RewardError
from april_rl.task.rewards.scorebook import Scorebook, Unit
from april_rl.task.rewards.worker import Decode, about_rewards, prepare_process, score, try_on
from april_rl.types import Prompt, Sample, Score, ScoreOutcome

_MAX_ATTEMPTS = 2  # of a job that fails
_PAUSE_S = 0.5
_MAX_RESTARTS = 3  # of processes that hang or cannot start, without an answer in between

_Reply = TypeVar("_Reply")


class RewardPool:
    """A `rollout.ports.Outside` without environments, over a pool of processes, for one thread."""

    def __init__(
        self,
        reward: RewardConfig,
        limits: UserCodeConfig,
        *,
        decode: Decode,
        folder: Path | None = None,
        states: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet: processes start with the first question or sample.

        `decode` turns response ids into text; it is pickled and called in the processes.
        `folder` is the run directory; rewards with a state continue from `states`, which `save`
        returned. All processes are replaced if no submitted job ends within
        `reward.hard_timeout_s` per response plus `limits.start_timeout_s`.
        """
        self.functions = reward_functions(reward)
        self._reward, self._limits = reward, limits
        self._folder = folder
        self._decoder = pickle.dumps(decode)  # pickled once, because a vocabulary has megabytes
        self._book = Scorebook(self.functions)
        self._states = dict(states or {})  # JSON by function, after the last score that came back
        # JSON by function, after the last score that was collected.
        self._saved = dict(self._states)
        self._num_units = 0
        self._pending: dict[int, Unit] = {}  # by number, in the order of scheduling
        # Numbers of the units that may have ended all processes: the first one is scored alone.
        self._suspects: list[int] = []
        self.mailbox = Mailbox()
        self._counts: Counter[str] = Counter()
        self._restarts = 0
        self._last_ended_s = time.monotonic()
        self.last_failure = ""  # one line about the last failed attempt, for messages
        self._pool = self._new_pool()

    def columns_of(self, dataset: str) -> tuple[str, ...]:
        """Return the data columns that the functions for a data set take; raise RewardError."""
        about = self._wait_for(self._ask(about_rewards))
        asked = (about[f.name].columns for f in self.functions if f.scores(dataset))
        return tuple(dict.fromkeys(chain.from_iterable(asked)))

    def notes(self) -> Iterator[str]:
        """Return notes on the functions for the user. Raise the errors of `columns_of`."""
        about = self._wait_for(self._ask(about_rewards))
        return (f"{f}: {about[f.name].note}" for f in self.functions if about[f.name].note)

    def try_on(self, prompt: Prompt, responses: Sequence[str]) -> list[list[Score]]:
        """Return the score by each function of each response; the responses form a group [n]. Raise
        RewardError when a function is at fault, or its process dies or hangs.
        """
        return next(self.try_on_each([prompt], responses))

    def try_on_each(
        self, prompts: Iterable[Prompt], responses: Sequence[str], *, function: str | None = None
    ) -> Iterator[list[list[Score]]]:
        """Yield what `try_on` returns for each prompt, in order; `function` chooses a kind."""
        limit_s = self._reward.hard_timeout_s * len(responses)
        asked: deque[Future[list[list[Score]]]] = deque()
        for job in (DecodedJob.of(prompt, responses) for prompt in prompts):
            asked.append(self._ask(try_on, job, function, limit_s=limit_s))
            if len(asked) == self._reward.num_processes:
                yield self._wait_for(asked.popleft(), limit_s=limit_s)
        while asked:
            yield self._wait_for(asked.popleft(), limit_s=limit_s)

    def submit(self, sample: Sample, *, group_size: int) -> None:
        """Score a finished sample of a group of `group_size`; return at once."""
        for unit in self._book.submit(sample, group_size=group_size):
            if not self._pending:
                self._last_ended_s = time.monotonic()
            number, self._num_units = self._num_units, self._num_units + 1
            self._pending[number] = unit
            if not self._suspects:
                self._schedule(number)

    def on_evaluation_end(self) -> None:
        """Do nothing: rewards keep nothing of an evaluation."""

    def act(self, sample: Sample) -> None:
        raise AssertionError(f"prompt {sample.prompt.id} has an environment, and there is none")

    def collect(
        self, timeout_s: float | None, look: Callable[[], None] = lambda: None
    ) -> list[Score]:
        """Return the scores known by now, as `Outside.collect`, in the order of submission. Raise
        RewardError when a function is at fault.
        """
        return self.mailbox.collect((self,), timeout_s, look)

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending)

    @property
    def has_known(self) -> bool:
        return self._book.has_known

    def take(self) -> list[Score]:
        """Return the scores known by now, in the order of submission."""
        if not self._book.has_incomplete:
            self._saved = dict(self._states)
        return self._book.take()

    def metrics(self) -> Metrics:
        """Return the failures since the last call by kind, the soft timeouts and the retries."""
        counts, self._counts = self._counts, Counter()
        return Metrics(
            {
                "reward/errors": Sum(counts["timeout"] + counts["crash"] + counts["no_score"]),
                "reward/timeouts": Sum(counts["timeout"]),
                "reward/crashes": Sum(counts["crash"]),
                "reward/no_scores": Sum(counts["no_score"]),
                "reward/soft_timeouts": Sum(counts["soft_timeout"]),
                "reward/retries": Sum(counts["retry"]),
            }
        )

    def save(self) -> dict[str, str]:
        """Return the states of the rewards that have one, after the scores collected so far; if the
        scores of a group are not complete, return the states from before that group, which will be
        scored again.
        """
        return dict(self._saved)

    def close(self) -> None:
        """End every process; scores that were not collected are lost."""
        self._pending.clear()
        self._suspects.clear()
        self._book.clear()
        self._stop()

    def _ask(
        self, question: Callable[..., _Reply], *args: object, limit_s: float = 0.0
    ) -> Future[_Reply]:
        limit_s += self._limits.start_timeout_s
        try:
            asked: Future[_Reply] = self._pool.schedule(question, args=args, timeout=limit_s)
        except RuntimeError as error:  # pebble raises this when its processes are gone
            asked = Future()
            asked.set_exception(error)
        return asked

    def _wait_for(self, asked: Future[_Reply], *, limit_s: float = 0.0) -> _Reply:
        start_s = self._limits.start_timeout_s
        limit_s += start_s
        try:
            return asked.result(timeout=limit_s)
        except RewardError:
            raise
        except (TimeoutError, ProcessExpired, RuntimeError) as error:
            happened = f"died ({error})"
            if isinstance(error, TimeoutError):
                happened = (
                    f"did not answer within {limit_s:g} s, including "
                    f"user_code.start_timeout_s={start_s:g} for its start"
                )
            raise RewardError(
                f"{' and '.join(map(str, self.functions))}: called once as a test, the process "
                f"{happened}"
            ) from error

    def _new_pool(self) -> ProcessPool:
        """Return processes that start with the first job, and continue from the current states.

        They come from a fork server: that is safe in a program with threads, and a replacement has
        math-verify loaded already. The server is shared by the whole program and ends with it.
        """
        context = multiprocessing.get_context("forkserver")
        if any(function.function == MATH_VERIFY for function in self.functions):
            context.set_forkserver_preload([builder_of(MATH_VERIFY).partition(":")[0]])
        prepare = partial(
            prepare_process,
            self._reward,
            self._limits,
            decoder=self._decoder,
            folder=self._folder,
            states=self._states,
            lifeline=lifeline(),
        )
        workers = self._reward.num_processes
        return ProcessPool(max_workers=workers, initializer=prepare, context=context)

    def _stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _limit_s(self, unit: Unit) -> float:
        return self._reward.hard_timeout_s * len(unit.positions)

    def _schedule(self, number: int) -> None:
        unit = self._pending[number] = self._pending.pop(number)
        unit.future = None
        try:
            future = self._pool.schedule(score, args=(unit.job,), timeout=self._limit_s(unit))
        except RuntimeError as error:  # pebble raises this when its processes are gone
            self.mailbox.put(partial(self._on_broken, self._pool, str(error)))
            return
        unit.future = future
        future.add_done_callback(
            lambda ended: self.mailbox.put(partial(self._on_ended, number, ended))
        )

    def _schedule_all(self) -> None:
        """Schedule the units that no process has: the first suspect alone, or all."""
        for number in self._suspects[:1] or [*self._pending]:
            if self._pending[number].future is None:
                self._schedule(number)

    def _restart(self) -> None:
        self._stop()
        self._pool = self._new_pool()
        self._last_ended_s = time.monotonic()
        for unit in self._pending.values():
            unit.future = None

    def _count_restart(self, reason: str) -> None:
        """Count a restart that no unit is to blame for; raise RewardError after too many."""
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise RewardError(
                f"{' and '.join(map(str, self.functions))}: the reward processes keep failing "
                f"({reason}; restarted {_MAX_RESTARTS} times without an answer). "
                f"{self.last_failure}"
            )

    def _on_broken(self, pool: ProcessPool, reason: str) -> None:
        """Replace the processes of a broken pool, and find the unit that ended them."""
        if pool is not self._pool:
            return  # it was replaced
        taken = [number for number, unit in self._pending.items() if unit.future is not None]
        # Processes take units in the order of scheduling, and each has one at a time.
        taken = taken[: self._reward.num_processes]
        if not taken:
            self._count_restart(f"they cannot start: {reason}")
            # The server that forks them may be ending, too, which takes seconds on a busy machine.
            time.sleep(_PAUSE_S * 2**self._restarts)
        self._restart()
        self._suspects = self._suspects or taken
        if len(taken) == 1:
            message = f"all reward processes ended while it was scored ({reason})"
            scores = _failure_scores(self._pending[taken[0]], "crash", message)
            self._record_scores(taken[0], scores)
        self._schedule_all()

    def check(self) -> None:
        """Restart a pool that is hung, or whose threads have ended without a word."""
        start_s = self._limits.start_timeout_s
        if any(unit.future for unit in self._pending.values()) and not self._pool.active:
            self._on_broken(self._pool, "a response has written into their pipes")
        if not self._pending or time.monotonic() - self._last_ended_s < start_s:
            return
        stalled_s = start_s + max(self._limit_s(unit) for unit in self._pending.values())
        if time.monotonic() - self._last_ended_s > stalled_s:
            self._count_restart(
                f"no response was scored for {stalled_s:g} s, including "
                f"user_code.start_timeout_s={start_s:g} for the start of a process"
            )
            self._restart()
            self._schedule_all()

    def _on_ended(self, number: int, future: Future[Result]) -> None:
        unit = self._pending.get(number)
        if unit is None or unit.future is not future:
            return  # the reply belongs to a pool that was replaced
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            self._on_broken(self._pool, str(error))
            return
        if isinstance(error, RewardError):
            raise error
        self._last_ended_s = time.monotonic()
        self._restarts = 0
        if error is not None:
            self._record_scores(number, self._scores_of(unit, error))
            return
        result = future.result()
        self._states.update(result.states)
        self._record_scores(number, result.scores)

    def _record_scores(self, number: int, scores: list[list[Score]]) -> None:
        unit = self._pending[number]
        failed = next((score for score in chain.from_iterable(scores) if score.value is None), None)
        if failed is not None:
            self.last_failure = f"{unit.names}: {failed.message}"
            if unit.attempt < _MAX_ATTEMPTS:
                unit.attempt += 1
                self._counts["retry"] += 1
                self._schedule(number)
                return
        del self._pending[number]
        self._counts.update(score.outcome for score in self._book.record(unit, scores))
        if number in self._suspects:
            self._suspects.remove(number)
            self._schedule_all()

    def _scores_of(self, unit: Unit, error: BaseException) -> list[list[Score]]:
        if isinstance(error, TimeoutError):
            message = f"no reward within {self._limit_s(unit):g} s; its process was killed"
            return _failure_scores(unit, "timeout", message)
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, ProcessExpired):
            message = f"the reward process died with exit code {error.exitcode}"
        return _failure_scores(unit, "crash", message)


def _failure_scores(unit: Unit, outcome: ScoreOutcome, message: str) -> list[list[Score]]:
    return [[Score(sample_id, None, outcome, message)] for sample_id in unit.job.sample_ids]
