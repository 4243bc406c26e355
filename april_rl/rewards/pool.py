"""Rewards in processes of their own: scored while generation goes on, with time and memory limits.

A timeout, a crash and a wrong answer are three different things. A job whose process had to be
killed or died, or whose function raised, is tried once more; what a function returns wrongly (NaN,
the wrong length) ends the run.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from pebble import ProcessExpired, ProcessPool

from april_rl.config.task import RewardConfig
from april_rl.metrics import Metrics, Sum
from april_rl.rewards.processes import START_S, RewardError, fault, new_process_pool, stop
from april_rl.rewards.worker import Decode, Job, Verdict, score
from april_rl.types import Sample, SampleId, Score, ScoreOutcome

MAX_ATTEMPTS = 2
MAX_RESTARTS = 3  # of all processes, without one score between them


@dataclass(slots=True, kw_only=True)
class Pending:
    """A submitted sample without a score."""

    sample_id: SampleId
    job: Job
    attempt: int
    future: Future[Verdict] | None = None  # of this attempt; None between two pools


class Failure(NamedTuple):
    """Why an attempt gave no score."""

    outcome: Literal["timeout", "crash"]
    message: str


class RewardPool:
    """A `rollout.ports.Scorer`. Not for several threads."""

    def __init__(
        self,
        reward: RewardConfig,
        *,
        decode: Decode,
        start_s: float = START_S,
    ) -> None:
        """Start nothing yet: processes start with the first sample. `decode` turns response ids
        into text; it is pickled and called in the processes.

        When nothing ends for `reward.hard_timeout_s` + `start_s` although something was submitted,
        all processes are replaced.
        """
        self._reward, self._function = reward, reward.function
        self._hard_timeout_s = reward.hard_timeout_s
        self._stalled_after_s = reward.hard_timeout_s + start_s
        self._decoder = pickle.dumps(decode)  # once: a vocabulary is megabytes
        self._num_submitted = 0
        self._pending: dict[int, Pending] = {}  # by place in the order of submission
        self._known: dict[int, Score] = {}
        self._ended: SimpleQueue[tuple[int, Future[Verdict]]] = SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._restarts = 0
        self._last_sign_s = time.monotonic()
        self.last_failure = ""  # one line about the last timeout or crash, for messages
        self._pool = self._new_pool()

    def submit(self, sample: Sample) -> None:
        """Score a finished sample; returns at once."""
        if not self._pending:
            self._last_sign_s = time.monotonic()
        job = Job(
            prompt=sample.prompt.text,
            token_ids=sample.token_ids,
            answer=sample.prompt.answer,
        )
        place = self._num_submitted
        self._num_submitted += 1
        self._pending[place] = Pending(sample_id=sample.id, job=job, attempt=1)
        self._schedule(place)

    def collect(self, timeout_s: float | None) -> list[Score]:
        """The scores that have become known, in the order of submission.

        A late one holds no other back. `timeout_s` 0: what is there now; positive: wait so long for
        at least one; None: wait for all submitted. Raises RewardError when the function is at
        fault.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._take_ended(wait_s=0.0)
        while self._pending and (timeout_s is None or not self._known):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            self._take_ended(wait_s=min(left_s, 1.0))
        known, self._known = self._known, {}
        return [known[place] for place in sorted(known)]

    def metrics(self) -> Metrics:
        """Samples without a score, with a soft timeout and tried again, since the last call."""
        counts, self._counts = self._counts, Counter()
        return Metrics(
            {
                "reward/errors": Sum(counts["timeout"] + counts["crash"]),
                "reward/timeouts": Sum(counts["timeout"]),
                "reward/crashes": Sum(counts["crash"]),
                "reward/soft_timeouts": Sum(counts["soft_timeout"]),
                "reward/retries": Sum(counts["retry"]),
            }
        )

    def close(self) -> None:
        """End every process; what was not collected is lost."""
        self._pending.clear()
        stop(self._pool)

    def _new_pool(self) -> ProcessPool:
        """A pool whose processes start when the first job comes."""
        return new_process_pool(self._reward, decoder=self._decoder)

    def _schedule(self, place: int) -> None:
        """Hand a pending job to the pool, to a new one if it is broken."""
        pending = self._pending[place]
        try:
            future = self._pool.schedule(score, args=(pending.job,), timeout=self._hard_timeout_s)
        except RuntimeError:  # how pebble says that its processes are gone
            self._restart("all reward processes ended")
            return
        pending.future = future
        future.add_done_callback(lambda ended: self._ended.put((place, ended)))

    def _restart(self, reason: str) -> None:
        """Replace every process and schedule again whatever is pending."""
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise RewardError(
                f"reward.function={self._function}: its processes do not stay alive ({reason}; "
                f"restarted {MAX_RESTARTS} times without a score). {self.last_failure}"
            )
        stop(self._pool)
        self._pool = self._new_pool()
        self._last_sign_s = time.monotonic()
        for pending in self._pending.values():
            pending.future = None
        for place in sorted(self._pending):
            if place in self._pending and self._pending[place].future is None:
                self._schedule(place)

    def _take_ended(self, *, wait_s: float) -> None:
        """Settle what has ended, after at most `wait_s` for the first; restart a stalled pool."""
        try:
            self._settle(*self._ended.get(timeout=wait_s) if wait_s else self._ended.get_nowait())
            while True:
                self._settle(*self._ended.get_nowait())
        except Empty:
            pass
        if self._pending and time.monotonic() - self._last_sign_s > self._stalled_after_s:
            self._restart(f"nothing ended for {self._stalled_after_s:.0f} s")

    def _settle(self, place: int, future: Future[Verdict]) -> None:
        """What an ended attempt means: a score, another attempt, or the end of the run."""
        pending = self._pending.get(place)
        if pending is None or pending.future is not future:
            return  # of a pool that was replaced
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            self._restart("all reward processes ended")
            return
        self._last_sign_s = time.monotonic()
        if error is not None:
            self._settle_failure(place, self._failure(error))
            return
        self._restarts = 0
        self._settle_verdict(place, future.result())

    def _settle_verdict(self, place: int, verdict: Verdict) -> None:
        """A score, another attempt, or RewardError."""
        if verdict.outcome == "refused" or verdict.outcome == "undecoded":
            raise fault(self._function, verdict)
        if verdict.outcome == "raised":
            self._settle_failure(place, Failure("crash", f"it raised {verdict.message}"))
            return
        self._finish(place, value=verdict.value, outcome=verdict.outcome)

    def _settle_failure(self, place: int, failure: Failure) -> None:
        """Try the sample again, or say that it has no value."""
        pending = self._pending[place]
        self.last_failure = f"{pending.sample_id}: {failure.message}"
        if pending.attempt < MAX_ATTEMPTS:
            pending.attempt += 1
            self._counts["retry"] += 1
            self._schedule(place)
            return
        self._finish(place, value=math.nan, outcome=failure.outcome, message=failure.message)

    def _finish(
        self, place: int, *, value: float, outcome: ScoreOutcome, message: str = ""
    ) -> None:
        """The sample's score is known."""
        self._counts[outcome] += 1
        sample_id = self._pending.pop(place).sample_id
        self._known[place] = Score(
            sample_id=sample_id, value=value, outcome=outcome, message=message
        )

    def _failure(self, error: BaseException) -> Failure:
        """What the pool's error says of an attempt."""
        if isinstance(error, TimeoutError):
            return Failure("timeout", f"no reward within {self._hard_timeout_s} s, process killed")
        if isinstance(error, ProcessExpired):
            return Failure("crash", f"the reward process died with exit code {error.exitcode}")
        return Failure("crash", f"{type(error).__name__}: {error}")
