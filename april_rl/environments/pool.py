"""Runs the environments of samples in processes of their own, while generation goes on.

An episode stays in the process where it began. When that process dies, or the run was resumed, it
is built again somewhere else by calling its methods with the same arguments; what they say must be
what the sample has already.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from april_rl.config.choices import OnRestart
from april_rl.config.environment import EnvironmentConfig
from april_rl.environments.environment_metrics import environment_metrics
from april_rl.environments.home import Home
from april_rl.environments.jobs import Answer, Ask, EnvironmentFailedError
from april_rl.environments.notes import Notes
from april_rl.environments.process import ProcessSettings
from april_rl.environments.protocol import StepResult
from april_rl.environments.replies import failed, observation_of
from april_rl.environments.turns import (
    EpisodeRules,
    episode_seed,
    is_last_turn,
    row_of,
    turns_of,
)
from april_rl.errors import RunError
from april_rl.metrics import Metrics
from april_rl.rewards.mailbox import Mailbox
from april_rl.types import Reply, Sample, SampleId

MAX_ATTEMPTS = 2
MAX_RESTARTS = 3  # of processes, for each of them, without an answer in between
MAX_HUNG = 64  # calls of a process that do not come back, each of which keeps a thread


@dataclass(slots=True, kw_only=True)
class _Question:
    """A question under way."""

    sample: Sample
    home: Home
    limit_s: float  # of the process as a whole; a single call has a limit of its own
    asked_s: float = field(default_factory=time.monotonic)
    attempt: int

    def is_late(self, now_s: float) -> bool:
        return now_s > max(self.asked_s, self.home.answered_s) + self.limit_s


class EnvironmentPool:
    """The environments of a run, for one thread."""

    def __init__(
        self,
        config: EnvironmentConfig,
        rules: Mapping[str, EpisodeRules],
        *,
        seed: int,
        mailbox: Mailbox,
        folder: Path,
        num_saves: int = 1,
    ) -> None:
        """Start nothing yet: processes start with the first question. `rules` are by data set;
        events go to `mailbox`; `folder` is for the calls of samples, which are removed `num_saves`
        saves after the sample has ended.
        """
        self.setting, self.rules, self.mailbox = config.setting, rules, mailbox
        self.folder = folder
        self._config, self._seed = config, seed
        self._may_replay = config.on_restart is OnRestart.replay
        self._settings = ProcessSettings(config=config, folder=folder)
        self.notes = Notes(folder, num_saves=num_saves)
        self._homes: list[Home] = []
        self._home_of: dict[SampleId, Home] = {}
        self._num_episodes: Counter[Home] = Counter()  # in each of them
        self._questions: dict[int, _Question] = {}  # under way, by number
        self._suspects: deque[_Question] = deque()  # died together, to be asked one by one
        self._suspect = -1  # the number of the one that is
        self._ward: Home | None = None  # where suspects are asked
        self._num_asked = 0
        self._known: dict[int, Reply] = {}  # by number
        self._num_deaths = 0  # since the last answer
        self._counts: Counter[str] = Counter()
        self._answered_s = 0.0

    def act(self, sample: Sample) -> None:
        """Let the environment of a sample answer its last turn, or begin; return at once."""
        self._ask(sample, attempt=1)

    def let_go(self, sample_id: SampleId) -> None:
        """Forget an episode if there is one; its process does, too."""
        self.notes.end(sample_id)
        home = self._home_of.pop(sample_id, None)
        if home is not None:
            self._num_episodes[home] -= 1
            home.let_go(sample_id)

    @property
    def is_waiting(self) -> bool:
        """Return whether a reply is under way."""
        return bool(self._questions or self._suspects)

    @property
    def has_known(self) -> bool:
        """Return whether there is a reply that has not been taken."""
        return bool(self._known)

    def take(self) -> list[Reply]:
        """Return the replies known by now, in the order of the questions."""
        known, self._known = self._known, {}
        return [known[number] for number in sorted(known)]

    def check(self) -> None:
        """Kill processes whose answers are overdue: a call holds up all others there."""
        now_s = time.monotonic()
        late = {q.home for q in self._questions.values() if q.is_late(now_s)}
        for home in late:
            home.kill()
            self._died(home, "did not answer in time and was killed")

    def metrics(self) -> Metrics:
        """Return the calls, their time and their failures since the last call."""
        metrics = environment_metrics(self._counts, answered_s=self._answered_s)
        self._counts, self._answered_s = Counter(), 0.0
        return metrics

    def close(self) -> None:
        """End every process; replies that were not taken are lost."""
        self._questions.clear()
        self._suspects.clear()
        self._home_of.clear()
        self._num_episodes.clear()
        for home in self._homes:
            home.kill()
        self._homes.clear()

    def _ask(self, sample: Sample, *, attempt: int) -> None:
        home = self._home_of.get(sample.id)
        if home is not None and home.is_leaving:
            del self._home_of[sample.id]
            home = None
        is_begun = home is not None
        if home is None and not self._may_be_asked_again(sample):
            number, self._num_asked = self._num_asked, self._num_asked + 1
            self._give_up(number, sample, "its process has ended, and it cannot be built again")
            return
        if home is None:
            home = self._emptiest()
            self._move_in(sample.id, home)
            self._counts["replay"] += bool(sample.completions)
        self._send(sample, home=home, is_begun=is_begun, attempt=attempt)

    def _move_in(self, sample_id: SampleId, home: Home) -> None:
        """Note the process of an episode that has none."""
        assert sample_id not in self._home_of, sample_id
        self._home_of[sample_id] = home
        self._num_episodes[home] += 1

    def _send(self, sample: Sample, *, home: Home, is_begun: bool, attempt: int) -> None:
        """Put a question to an episode that lives in its home, or is to begin there."""
        self.notes.keep(sample.id)
        rules = self.rules[sample.prompt.dataset]
        turns = turns_of(sample, rules, self._config.max_turns, last_alone=is_begun)
        number, self._num_asked = self._num_asked, self._num_asked + 1
        num_calls = 1 if is_begun else 2 + len(turns)
        limit_s = self._config.start_timeout_s + num_calls * self._config.step_timeout_s
        self._questions[number] = _Question(
            sample=sample, home=home, limit_s=limit_s, attempt=attempt
        )
        home.ask(
            Ask(
                number=number,
                sample_id=sample.id,
                row=None if is_begun else row_of(sample.prompt),
                seed=episode_seed(self._seed, sample.prompt.id),
                turns=turns,
                anew=not (self._may_replay or sample.spans or attempt > 1),
            )
        )

    def _started(self) -> Home:
        home = Home(self._settings, mailbox=self.mailbox, arrived=self._arrived)
        self._homes.append(home)
        return home

    def _emptiest(self) -> Home:
        """Return the process with the fewest episodes; start one while there are fewer than
        `environment.num_processes`.
        """
        homes = [home for home in self._homes if home is not self._ward and not home.is_leaving]
        if len(homes) < self._config.num_processes:
            return self._started()
        return min(homes, key=lambda home: self._num_episodes[home])

    def _arrived(self, home: Home, answer: Answer | str) -> None:
        """Take in an answer, or the reason why a process has ended."""
        if home not in self._homes:
            return  # it was killed
        if isinstance(answer, str):
            self._died(home, answer)
            return
        question = self._questions.pop(answer.number)
        self._num_deaths = 0
        home.answered_s = time.monotonic()
        self._counts["call"] += answer.num_calls
        self._counts["repeated call"] += answer.num_repeated
        home.is_leaving |= answer.num_hung >= MAX_HUNG
        if answer.outcome == "answered":
            self._counts["answered"] += 1
            self._answered_s += answer.elapsed_s
            self._answer(answer.number, question.sample, answer.results)
        else:
            self._counts["timeout"] += answer.outcome == "timeout"
            self.let_go(question.sample.id)
            self._fail(answer.number, question, answer.message)
        if home.is_leaving and all(q.home is not home for q in self._questions.values()):
            self._remove(home)
        self._ask_next_suspect()

    def _died(self, home: Home, reason: str) -> None:
        """Ask again what a process has not answered; its other episodes are built again later."""
        self._remove(home)
        self._num_deaths += 1
        if self._num_deaths > MAX_RESTARTS * self._config.num_processes:
            raise EnvironmentFailedError(
                f"{self.setting}: its processes keep ending, the last one {reason}"
            )
        lost = {number: q for number, q in self._questions.items() if q.home is home}
        for number, question in lost.items():
            del self._questions[number]
            if len(lost) == 1 or number == self._suspect:
                self._fail(number, question, f"its process {reason}")
            elif self._may_be_asked_again(question.sample):
                self._suspects.append(question)
            else:
                self._give_up(number, question.sample, f"its process {reason}")
        self._ask_next_suspect()

    def _remove(self, home: Home) -> None:
        """End a process, with the programs that it has started, and forget its episodes."""
        self._homes.remove(home)
        self._counts["death"] += 1
        home.kill()
        self._home_of = {key: at for key, at in self._home_of.items() if at is not home}
        del self._num_episodes[home]
        if home is self._ward:
            self._ward = None

    def _ask_next_suspect(self) -> None:
        """Ask one of the questions that died together, in a process where no other new one is: the
        one that ends processes must not take the others along.
        """
        if self._suspect in self._questions or not self._suspects:
            return
        if self._ward is None or self._ward.is_leaving:
            self._ward = self._started()
        question = self._suspects.popleft()
        self._move_in(question.sample.id, self._ward)
        self._suspect = self._num_asked
        self._counts["retry"] += 1
        self._send(question.sample, home=self._ward, is_begun=False, attempt=question.attempt)

    def _may_be_asked_again(self, sample: Sample) -> bool:
        return self._may_replay or not sample.completions

    def _fail(self, number: int, question: _Question, message: str) -> None:
        """Ask once more, or give up on the sample."""
        if question.attempt >= MAX_ATTEMPTS or not self._may_be_asked_again(question.sample):
            self._give_up(number, question.sample, message)
            return
        again = replace(question, attempt=question.attempt + 1)
        if number == self._suspect:
            self._suspects.appendleft(again)
            return
        self._counts["retry"] += 1
        self._ask(again.sample, attempt=again.attempt)

    def _answer(self, number: int, sample: Sample, results: Sequence[StepResult]) -> None:
        """Note what an environment said, or that it cannot be read."""
        try:
            observation = observation_of(
                results, sample, self.rules[sample.prompt.dataset], config=self._config
            )
        except RunError:
            raise
        except Exception as error:  # templates and tokenizers raise anything: it ends one sample
            observation = failed(f"{type(error).__name__}: {error}")
        self._counts["failed"] += bool(observation.failure)
        self._counts["out of room"] += (
            observation.is_final
            and not results[-1].is_final
            and (
                not is_last_turn(sample, self.rules[sample.prompt.dataset], self._config.max_turns)
            )
        )
        if observation.is_final:
            self.let_go(sample.id)
        self._known[number] = Reply(sample.id, sample.end, observation)

    def _give_up(self, number: int, sample: Sample, message: str) -> None:
        self._counts["failed"] += 1
        self._num_deaths = 0
        self._known[number] = Reply(sample.id, sample.end, failed(message))
