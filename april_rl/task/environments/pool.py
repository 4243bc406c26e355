"""The environments of a run, in processes of their own, while generation continues.

An episode stays in the process where it began. When that process dies, or the run was resumed,
it is built again in another one by calling its methods with the same arguments; they must return
the same messages as before.

Invariants, and the tests in tests/task/environments that hold them:

- nothing lost: every question gets a reply or is given up, even if a process ends, hangs or does
  not read (test_an_episode_that_ends_its_process_does_not_fail_others,
  test_a_process_that_does_not_read_does_not_delay_others);
- nothing twice: replies of a process that was killed do not count, and a question that fails is
  asked MAX_ATTEMPTS times (test_an_episode_that_fails_twice_is_given_up_with_the_reason);
- one limit a question: it begins when the question is asked, and again with each reply of its
  process (test_a_hung_process_is_killed_and_its_other_episodes_continue_elsewhere);
- quarantine: questions that were open in a process that died are asked one at a time, in a process
  where no other one begins, so that the one that ends processes takes no other along
  (test_an_episode_that_ends_its_process_does_not_fail_others);
- no belief: a process that sends anything but the reply to an open question of its own is ended
  (test_a_process_that_answers_questions_it_was_not_asked_is_ended);
- an end: the run ends when episodes of more than MAX_ORIGINS origins have each ended a new process
  as they began, with no reply in between (test_processes_that_end_as_episodes_begin_end_the_run);
  an episode that has begun never does (test_turns_that_end_their_processes_do_not_end_the_run,
  test_processes_that_end_after_a_turn_do_not_end_the_run);
- replacement: a process with MAX_HUNG hung calls (test_a_process_with_many_hung_calls_is_replaced),
  or in which MAX_FAILED consecutive questions failed
  (test_a_process_that_a_turn_has_spoilt_is_replaced), gets no new episodes;
- order: replies are taken in the order of the questions
  (test_replies_are_taken_in_the_order_of_the_requests).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from april_rl.config.choices import OnRestart
from april_rl.config.environment import EnvironmentConfig
from april_rl.config.runtime import UserCodeConfig
from april_rl.errors import RunError
from april_rl.metrics import Mean, Metric, Metrics, Sum
from april_rl.task.data.tokenizer import TokenizerError
from april_rl.task.environments.calls import Notes
from april_rl.task.environments.child import Process
from april_rl.task.environments.episode import EpisodeReply, EpisodeRequest, Forget
from april_rl.task.environments.process import serve
from april_rl.task.environments.protocol import EnvironmentFailedError, StepResult
from april_rl.task.environments.turns import (
    EpisodeRules,
    episode_seed,
    failure,
    is_last_turn,
    observation_of,
    row_of,
    turns_of,
)
from april_rl.task.processes.mailbox import Mailbox
from april_rl.types import Observation, Reply, Sample, SampleId

MAX_ATTEMPTS = 2
MAX_ORIGINS = 3  # rows whose episodes end new processes, without a reply in between
MAX_HUNG = 64  # calls of a process that hang, each of which occupies a thread
MAX_FAILED = 8  # consecutive questions that fail in a process

# The counts that are logged as metrics.
_COUNTS = (
    *("calls", "repeated_calls", "errors", "timeouts", "deaths", "retries", "replays"),
    "out_of_room",
)


@dataclass(slots=True, kw_only=True, eq=False)
class Question:
    """A question to the episode of a sample: begin, or take a turn."""

    number: int  # counts questions in the order of asking
    sample: Sample
    attempt: int = 1
    asked_s: float = 0.0
    # Time limit of the process as a whole; a single call has a limit of its own.
    limit_s: float = 0.0


class EnvironmentPool:
    """The environments of a run, a `mailbox.Party`; for one thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        limits: UserCodeConfig,
        rules: Mapping[str, EpisodeRules],
        *,
        seed: int,
        mailbox: Mailbox,
        folder: Path,
        num_saves: int = 1,
    ) -> None:
        """Start no process yet: processes start with the first question. `rules` are by data
        set; events go to `mailbox`; `folder` holds the calls of each sample, which are removed
        `num_saves` saves after the sample has ended.
        """
        self.setting, self.rules, self.mailbox = config.setting, rules, mailbox
        self.folder = folder
        self.notes = Notes(folder, num_saves=num_saves)
        self._config, self._limits, self._seed = config, limits, seed
        self._may_replay = config.on_restart is OnRestart.replay
        self._replied_s = 0.0  # total duration of the calls that returned
        self._num_asked = 0
        self._processes: list[Process] = []
        self._process_of: dict[SampleId, Process] = {}
        self._open: dict[int, tuple[Question, Process]] = {}  # by number
        self._waiting: deque[Question] = deque()  # questions for quarantine
        self._quarantine: Process | None = None
        self._alone: Question | None = None  # the open question in quarantine
        # Data sets and prompts whose episodes ended a new process as they began, since a reply.
        self._fatal_origins: set[tuple[str, int]] = set()
        self._known: dict[int, Reply] = {}  # by number
        self._counts: Counter[str] = Counter()

    def act(self, sample: Sample) -> None:
        """Ask the episode of a sample to begin, or to reply to the last turn."""
        self._place(Question(number=self._num_asked, sample=sample))
        self._num_asked += 1

    def forget(self, sample_id: SampleId) -> None:
        """Forget an episode, here and in its process, if there is one."""
        self.notes.end(sample_id)
        self._forget(sample_id)

    @property
    def is_waiting(self) -> bool:
        return bool(self._open or self._waiting)

    @property
    def has_known(self) -> bool:
        return bool(self._known)

    def take(self) -> list[Reply]:
        """Return the replies known by now, in the order of the questions."""
        known = [self._known[number] for number in sorted(self._known)]
        self._known.clear()
        return known

    def check(self) -> None:
        """Kill processes whose replies are overdue: such a call holds up all the others."""
        now_s = time.monotonic()
        for process in {
            process
            for question, process in self._open.values()
            if now_s > max(question.asked_s, process.replied_s) + question.limit_s
        }:
            process.kill()
            self._on_end(process, "did not answer in time and was killed")

    def close(self) -> None:
        """End every process; replies that were not taken are lost."""
        self._open.clear()
        self._waiting.clear()
        self._process_of.clear()
        while self._processes:
            self._processes.pop().kill()

    def metrics(self) -> Metrics:
        """Return the calls, their time and their failures since the last call of this method."""
        counts, self._counts = self._counts, Counter()
        values: dict[str, Metric] = {f"environment/{each}": Sum(counts[each]) for each in _COUNTS}
        if counts["steps"]:
            values["environment/step_s"] = Mean(self._replied_s, counts["steps"])
        self._replied_s = 0.0
        return Metrics(values)

    def _forget(self, sample_id: SampleId) -> None:
        process = self._process_of.pop(sample_id, None)
        if process is not None:
            process.sample_ids.discard(sample_id)
            process.send(Forget(sample_id))

    def _place(self, question: Question) -> None:
        process = self._process_of.get(question.sample.id)
        if process is not None and not process.is_leaving:
            self._send(question, process, is_begun=True)
        elif self._can_begin_again(question.sample):
            self._send(question, self._emptiest())
        else:
            self._give_up(question, "its process has ended, and it cannot be built again")

    def _send(self, question: Question, process: Process, *, is_begun: bool = False) -> None:
        if not is_begun:
            self._process_of[question.sample.id] = process
            process.sample_ids.add(question.sample.id)
        request = self._request(question, is_begun=is_begun)
        question.asked_s = time.monotonic()
        self._open[question.number] = question, process
        process.send(request)

    def _emptiest(self) -> Process:
        processes = [p for p in self._processes if p is not self._quarantine and not p.is_leaving]
        if len(processes) < self._config.num_processes:
            return self._new()
        return min(processes, key=lambda process: len(process.sample_ids))

    def _new(self) -> Process:
        process = Process(
            partial(serve, self._config, self.folder),
            self._limits,
            mailbox=self.mailbox,
            received=self._on_reply,
            ended=self._on_end,
        )
        self._processes.append(process)
        return process

    def _on_reply(self, process: Process, reply: object) -> None:
        if process not in self._processes:
            return  # it was killed
        found = self._open.get(reply.number) if isinstance(reply, EpisodeReply) else None
        if not isinstance(reply, EpisodeReply) or found is None or found[1] is not process:
            # User code has forked the process, or written into its pipe.
            self._on_end(process, "sent a message that answers none of its questions")
            return
        question, _ = self._open.pop(reply.number)
        self._fatal_origins.clear()
        process.replied_s = time.monotonic()
        was_alone = self._leave_quarantine(question)
        message = self._take_reply(question, reply)
        process.num_failed = process.num_failed + 1 if message else 0
        process.is_leaving |= reply.num_hung >= MAX_HUNG or process.num_failed >= MAX_FAILED
        if message:
            self._forget(question.sample.id)
            self._fail(question, message, was_alone=was_alone)
        if process.is_leaving and all(at is not process for _, at in self._open.values()):
            self._remove(process)
        self._ask_in_quarantine()

    def _on_end(self, process: Process, reason: str) -> None:
        """Ask the open questions of an ended process again; other episodes begin again later."""
        if process not in self._processes:
            return  # it was killed
        self._remove(process)
        lost = [question for question, at in self._open.values() if at is process]
        for question in lost:
            del self._open[question.number]
            was_alone = self._leave_quarantine(question)
            if len(lost) == 1 or was_alone:
                if not process.replied_s:
                    self._note_origin(question.sample, reason)
                self._fail(question, f"its process {reason}", was_alone=was_alone)
            elif self._can_begin_again(question.sample):
                self._waiting.append(question)
            else:
                self._give_up(question, f"its process {reason}")
        self._ask_in_quarantine()

    def _note_origin(self, sample: Sample, reason: str) -> None:
        """Note that an episode ended a new process as it began; raise after too many rows."""
        if not sample.spans:
            self._fatal_origins.add((sample.prompt.dataset, sample.prompt.id))
        if len(self._fatal_origins) > MAX_ORIGINS:
            raise EnvironmentFailedError(
                f"{self.setting}: its processes keep ending, the last one {reason}"
            )

    def _remove(self, process: Process) -> None:
        self._processes.remove(process)
        self._counts["deaths"] += 1
        process.kill()
        for sample_id in process.sample_ids:
            if self._process_of.get(sample_id) is process:
                del self._process_of[sample_id]
        if process is self._quarantine:
            self._quarantine = None

    def _ask_in_quarantine(self) -> None:
        if self._alone is not None or not self._waiting:
            return
        if self._quarantine is None or self._quarantine.is_leaving:
            self._quarantine = self._new()
        self._alone = self._waiting.popleft()
        self._counts["retries"] += 1
        self._send(self._alone, self._quarantine)

    def _leave_quarantine(self, question: Question) -> bool:
        """Return whether the question was asked alone in quarantine, and end that."""
        was_alone = question is self._alone
        self._alone = None if was_alone else self._alone
        return was_alone

    def _fail(self, question: Question, message: str, *, was_alone: bool) -> None:
        """Ask a failed question again, or give up."""
        is_last = question.attempt >= MAX_ATTEMPTS
        if is_last or not self._can_begin_again(question.sample):
            self._give_up(question, message)
            return
        question.attempt += 1
        if was_alone:
            self._waiting.appendleft(question)
            return
        self._counts["retries"] += 1
        self._place(question)

    def _can_begin_again(self, sample: Sample) -> bool:
        return self._may_replay or not sample.completions

    def _request(self, question: Question, *, is_begun: bool) -> EpisodeRequest:
        sample, config = question.sample, self._config
        self.notes.keep(sample.id)
        self._counts["replays"] += bool(sample.completions) and not is_begun
        rules = self.rules[sample.prompt.dataset]
        turns = turns_of(sample, rules, last_alone=is_begun)
        num_calls = 1 if is_begun else 2 + len(turns)
        question.limit_s = self._limits.start_timeout_s + num_calls * config.step_timeout_s
        return EpisodeRequest(
            number=question.number,
            sample_id=sample.id,
            row=None if is_begun else row_of(sample.prompt),
            seed=episode_seed(self._seed, sample.prompt.id),
            turns=turns,
            calls_again=not (self._may_replay or sample.spans or question.attempt > 1),
        )

    def _take_reply(self, question: Question, reply: EpisodeReply) -> str:
        self._counts["calls"] += reply.num_calls
        self._counts["repeated_calls"] += reply.num_repeated
        if reply.outcome != "returned":
            self._counts["timeouts"] += reply.outcome == "timeout"
            return reply.message
        self._counts["steps"] += 1
        self._replied_s += reply.elapsed_s
        self._note(question, self._observation(question.sample, reply.results))
        return ""

    def _give_up(self, question: Question, message: str) -> None:
        self._note(question, failure(message))

    def _note(self, question: Question, observation: Observation) -> None:
        sample = question.sample
        self._counts["errors"] += bool(observation.failure)
        if observation.is_final:
            self.forget(sample.id)
        self._known[question.number] = Reply(sample.id, sample.end, observation)

    def _observation(self, sample: Sample, results: Sequence[StepResult]) -> Observation:
        rules = self.rules[sample.prompt.dataset]
        try:
            observation = observation_of(results, sample, rules)
        except TokenizerError as error:
            observation = failure(str(error))
        except RunError:
            raise
        except Exception as error:  # a template may raise anything; it ends one sample
            observation = failure(f"{type(error).__name__}: {error}")
        is_expected = results[-1].is_final or is_last_turn(sample, rules)
        self._counts["out_of_room"] += observation.is_final and not is_expected
        return observation
