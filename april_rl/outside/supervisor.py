"""Supervises processes that reply to questions about subjects, each of which lives in one process.

Invariants, and the tests in tests/environments that hold them:

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
- an end: the run ends when subjects of more than MAX_ORIGINS origins have each ended a new process
  as they began, with no reply in between (test_processes_that_end_as_episodes_begin_end_the_run);
  a subject that has begun never ends it (test_turns_that_end_their_processes_do_not_end_the_run,
  test_processes_that_end_after_a_turn_do_not_end_the_run);
- replacement: a process with MAX_HUNG hung calls (test_a_process_with_many_hung_calls_is_replaced),
  or in which MAX_FAILED consecutive questions failed
  (test_a_process_that_a_turn_has_spoilt_is_replaced), gets no new subjects;
- order: replies are taken in the order of the questions
  (test_replies_are_taken_in_the_order_of_the_requests).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from april_rl.outside.process import Process

MAX_ATTEMPTS = 2
MAX_ORIGINS = 3  # origins of subjects that end new processes, without a reply in between
MAX_HUNG = 64  # calls of a process that hang, each of which occupies a thread
MAX_FAILED = 8  # consecutive questions that fail in a process


class Forget(NamedTuple):
    """A request to forget a subject."""

    key: Hashable


@dataclass(slots=True, kw_only=True)
class ProcessReply:
    """The part of a reply that concerns its process."""

    number: int  # number of the question
    num_hung: int = 0  # calls in the process that took too long and have not returned yet


@dataclass(slots=True, kw_only=True, eq=False)
class Question:
    """A question about a subject."""

    number: int  # counts questions in the order of asking
    key: Hashable  # names the subject
    subject: Any
    attempt: int = 1
    asked_s: float = 0.0
    # Time limit of the process as a whole; a single call has a limit of its own.
    limit_s: float = 0.0


class Supervisor(ABC):
    """The processes of one kind, a `mailbox.Party`; subclasses know questions and replies."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._num_asked = 0
        self._processes: list[Process] = []
        self._process_of: dict[Hashable, Process] = {}  # by subject
        self._open: dict[int, tuple[Question, Process]] = {}  # by number
        self._waiting: deque[Question] = deque()  # questions for quarantine
        self._quarantine: Process | None = None
        self._alone: Question | None = None  # the open question in quarantine
        # Origins of subjects that ended a new process as they began, since the last reply.
        self._fatal_origins: set[Hashable] = set()
        self._known: dict[int, Any] = {}  # by number
        self._counts: Counter[str] = Counter()  # deaths, retries, and the counts of the subclass

    @property
    def is_waiting(self) -> bool:
        return bool(self._open or self._waiting)

    @property
    def has_known(self) -> bool:
        return bool(self._known)

    def take(self) -> list[Any]:
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

    @abstractmethod
    def _start(self) -> Process:
        """Start a process, which calls `_on_reply` and `_on_end`."""

    @abstractmethod
    def _origin(self, subject: Any) -> Hashable | None:  # noqa: ANN401
        """Return what a new subject was made from, such as its row; None if it has begun."""

    @abstractmethod
    def _request(self, question: Question, *, is_begun: bool) -> object:
        """Return the request about a subject, begun or not; set `limit_s` of the question."""

    @abstractmethod
    def _can_begin_again(self, subject: Any) -> bool:  # noqa: ANN401
        """Return whether a subject may begin in another process."""

    @abstractmethod
    def _take_reply(self, question: Question, reply: Any) -> str:  # noqa: ANN401
        """Record a reply; return why the question failed, or nothing."""

    @abstractmethod
    def _give_up(self, question: Question, message: str) -> None:
        """Make it known that a question gets no reply."""

    @abstractmethod
    def _final_error(self, reason: str) -> Exception:
        """Return the error that ends the run."""

    def _ask(self, key: Hashable, subject: object) -> None:
        self._place(Question(number=self._num_asked, key=key, subject=subject))
        self._num_asked += 1

    def _forget(self, key: Hashable) -> None:
        """Forget a subject, here and in the process where it lives."""
        process = self._process_of.pop(key, None)
        if process is not None:
            process.keys.discard(key)
            process.send(Forget(key))

    def _place(self, question: Question) -> None:
        process = self._process_of.get(question.key)
        if process is not None and not process.is_leaving:
            self._send(question, process, is_begun=True)
        elif self._can_begin_again(question.subject):
            self._send(question, self._emptiest())
        else:
            self._give_up(question, "its process has ended, and it cannot be built again")

    def _send(self, question: Question, process: Process, *, is_begun: bool = False) -> None:
        if not is_begun:
            self._process_of[question.key] = process
            process.keys.add(question.key)
        request = self._request(question, is_begun=is_begun)
        question.asked_s = time.monotonic()
        self._open[question.number] = question, process
        process.send(request)

    def _emptiest(self) -> Process:
        processes = [p for p in self._processes if p is not self._quarantine and not p.is_leaving]
        if len(processes) < self._num_processes:
            return self._new()
        return min(processes, key=lambda process: len(process.keys))

    def _new(self) -> Process:
        self._processes.append(self._start())
        return self._processes[-1]

    def _on_reply(self, process: Process, reply: object) -> None:
        if process not in self._processes:
            return  # it was killed
        found = self._open.get(reply.number) if isinstance(reply, ProcessReply) else None
        if not isinstance(reply, ProcessReply) or found is None or found[1] is not process:
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
            self._forget(question.key)
            self._fail(question, message, was_alone=was_alone)
        if process.is_leaving and all(at is not process for _, at in self._open.values()):
            self._remove(process)
        self._ask_in_quarantine()

    def _on_end(self, process: Process, reason: str) -> None:
        """Ask the open questions of an ended process again; other subjects begin again later."""
        if process not in self._processes:
            return  # it was killed
        self._remove(process)
        lost = [question for question, at in self._open.values() if at is process]
        for question in lost:
            del self._open[question.number]
            was_alone = self._leave_quarantine(question)
            if len(lost) == 1 or was_alone:
                if not process.replied_s:
                    self._note_origin(question.subject, reason)
                self._fail(question, f"its process {reason}", was_alone=was_alone)
            elif self._can_begin_again(question.subject):
                self._waiting.append(question)
            else:
                self._give_up(question, f"its process {reason}")
        self._ask_in_quarantine()

    def _note_origin(self, subject: Any, reason: str) -> None:  # noqa: ANN401
        """Note that a subject ended a new process; raise the final error for too many origins."""
        if (origin := self._origin(subject)) is not None:
            self._fatal_origins.add(origin)
        if len(self._fatal_origins) > MAX_ORIGINS:
            raise self._final_error(f"its processes keep ending, the last one {reason}")

    def _remove(self, process: Process) -> None:
        self._processes.remove(process)
        self._counts["deaths"] += 1
        process.kill()
        for key in process.keys:
            if self._process_of.get(key) is process:
                del self._process_of[key]
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
        if is_last or not self._can_begin_again(question.subject):
            self._give_up(question, message)
            return
        question.attempt += 1
        if was_alone:
            self._waiting.appendleft(question)
            return
        self._counts["retries"] += 1
        self._place(question)
