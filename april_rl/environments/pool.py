"""Runs the environments of samples in processes of their own, while generation goes on.

An episode stays in the process where it began. When that process dies, or the run was resumed, it
is built again somewhere else by calling its methods with the same arguments; what they say must be
what the sample has already.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from april_rl.config.choices import OnRestart
from april_rl.config.environment import EnvironmentConfig
from april_rl.data.tokenizer import TokenizerError
from april_rl.environments.calls import path_of
from april_rl.environments.dialogue import Dialogue
from april_rl.environments.home import Home
from april_rl.environments.jobs import Answer, Ask, EnvironmentFailedError
from april_rl.environments.process import ProcessSettings
from april_rl.environments.protocol import StepResult
from april_rl.environments.turns import (
    EpisodeRules,
    episode_seed,
    is_last_turn,
    row_of,
    turns_of,
)
from april_rl.metrics import Mean, Metrics, Sum
from april_rl.rewards.mailbox import Mailbox
from april_rl.rewards.plugins import GIB
from april_rl.types import Observation, Reply, Sample, SampleId

MAX_ATTEMPTS = 2
MAX_RESTARTS = 3  # of processes, for each of them, without an answer in between


@dataclass(slots=True, kw_only=True)
class _Question:
    """A question under way."""

    sample: Sample
    home: Home
    deadline_s: float  # of the process as a whole; a single call has a limit of its own
    attempt: int


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
        self.function, self.rules, self.mailbox = config.function, rules, mailbox
        self._config, self._seed = config, seed
        self._may_replay = config.on_restart is OnRestart.replay
        self._settings = ProcessSettings(
            function=config.function,
            args=config.args,
            step_timeout_s=config.step_timeout_s,
            memory_bytes=int(config.memory_gib * GIB),
            folder=folder,
        )
        # Samples that ended since each of the last saves, the latest first.
        self._ended: deque[set[SampleId]] = deque([set()], maxlen=num_saves + 1)
        self._homes: list[Home] = []
        self._home_of: dict[SampleId, Home] = {}
        self._questions: dict[int, _Question] = {}  # under way, by number
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
        self._ended[0].add(sample_id)
        home = self._home_of.pop(sample_id, None)
        if home is not None:
            home.let_go(sample_id)

    def saved(self) -> None:
        """Note that the run is saved; remove the calls of samples that no checkpoint needs."""
        if len(self._ended) == self._ended.maxlen:
            for sample_id in self._ended[-1]:
                path_of(self._settings.folder, sample_id).unlink(missing_ok=True)
        self._ended.appendleft(set())

    @property
    def is_waiting(self) -> bool:
        """Return whether a reply is under way."""
        return bool(self._questions)

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
        late = {q.home for q in self._questions.values() if now_s > q.deadline_s}
        for home in late:
            home.kill()
            self._died(home, "did not answer in time and was killed")

    def metrics(self) -> Metrics:
        """Return the calls, their time and their failures since the last call."""
        counts, self._counts = self._counts, Counter()
        answered_s, self._answered_s = self._answered_s, 0.0
        num = counts["answered"]
        return Metrics(
            {
                **({"environment/step_s": Mean(answered_s, num)} if num else {}),
                "environment/calls": Sum(counts["call"]),
                "environment/repeated_calls": Sum(counts["repeated call"]),
                "environment/errors": Sum(counts["failed"]),
                "environment/timeouts": Sum(counts["timeout"]),
                "environment/deaths": Sum(counts["death"]),
                "environment/retries": Sum(counts["retry"]),
                "environment/replays": Sum(counts["replay"]),
                "environment/out_of_room": Sum(counts["out of room"]),
            }
        )

    def close(self) -> None:
        """End every process; replies that were not taken are lost."""
        self._questions.clear()
        self._home_of.clear()
        for home in self._homes:
            home.kill()
        self._homes.clear()

    def _ask(self, sample: Sample, *, attempt: int) -> None:
        rules = self.rules[sample.prompt.dataset]
        turns = turns_of(sample, rules, max_turns=self._config.max_turns)
        self._ended[0].discard(sample.id)
        home = self._home_of.get(sample.id)
        is_begun = home is not None
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if home is None and turns and not self._may_replay:
            self._give_up(
                number, sample, "its process has ended, with environment.on_restart=again"
            )
            return
        if home is None:
            home = self._home_of[sample.id] = self._emptiest()
            self._counts["replay"] += bool(turns)
        num_calls = 1 if is_begun else 1 + len(turns)
        limit_s = self._config.start_timeout_s + num_calls * self._config.step_timeout_s
        self._questions[number] = _Question(
            sample=sample, home=home, deadline_s=time.monotonic() + limit_s, attempt=attempt
        )
        home.ask(
            Ask(
                number=number,
                sample_id=sample.id,
                row=None if is_begun else row_of(sample.prompt),
                seed=episode_seed(self._seed, sample.prompt.id),
                turns=turns[-1:] if is_begun else turns,
                forgets_calls=sample.id.prompt_id < 0 and attempt == 1 and not sample.spans,
            )
        )

    def _emptiest(self) -> Home:
        """Return the process with the fewest episodes; start one while there are fewer than
        `environment.num_processes`.
        """
        if len(self._homes) < self._config.num_processes:
            self._homes.append(Home(self._settings, mailbox=self.mailbox, arrived=self._arrived))
            return self._homes[-1]
        num_episodes = Counter(map(id, self._home_of.values()))
        return min(self._homes, key=lambda home: num_episodes[id(home)])

    def _arrived(self, home: Home, answer: Answer | str) -> None:
        """Take in an answer, or the reason why a process has ended."""
        if home not in self._homes:
            return  # it was killed
        if isinstance(answer, str):
            self._died(home, answer)
            return
        question = self._questions.pop(answer.number)
        self._num_deaths = 0
        self._counts["call"] += answer.num_calls
        self._counts["repeated call"] += answer.num_repeated
        if answer.outcome == "answered":
            self._counts["answered"] += 1
            self._answered_s += answer.elapsed_s
            self._known[answer.number] = self._reply(question.sample, answer.results)
            return
        self._counts["timeout"] += answer.outcome == "timeout"
        self.let_go(question.sample.id)
        self._fail(answer.number, question, answer.message)

    def _died(self, home: Home, reason: str) -> None:
        """Ask again what a process has not answered; its other episodes are built again when their
        next turn ends.
        """
        self._homes.remove(home)
        self._counts["death"] += 1
        self._num_deaths += 1
        if self._num_deaths > MAX_RESTARTS * self._config.num_processes:
            raise EnvironmentFailedError(
                f"environment.function={self._config.function}: its processes keep ending, the "
                f"last one {reason}"
            )
        self._home_of = {key: at for key, at in self._home_of.items() if at is not home}
        lost = {number: q for number, q in self._questions.items() if q.home is home}
        for number, question in lost.items():
            del self._questions[number]
            self._fail(number, question, f"its process {reason}")

    def _fail(self, number: int, question: _Question, message: str) -> None:
        """Ask once more, or give up on the sample."""
        sample = question.sample
        may_replay = self._may_replay or not sample.completions
        if question.attempt < MAX_ATTEMPTS and may_replay:
            self._counts["retry"] += 1
            self._ask(sample, attempt=question.attempt + 1)
        else:
            self._give_up(number, sample, message)

    def _give_up(self, number: int, sample: Sample, message: str) -> None:
        self._counts["failed"] += 1
        self._known[number] = Reply(sample.id, sample.end, _failed(message))

    def _reply(self, sample: Sample, results: Sequence[StepResult]) -> Reply:
        """Return the last result as an observation; the others have been made a second time, and
        must be what the sample has.
        """
        try:
            observation = self._observation(sample, results)
        except TokenizerError as error:
            observation = _failed(str(error))
        if observation.failure:
            self._counts["failed"] += 1
        if observation.is_final:
            self.let_go(sample.id)
        return Reply(sample.id, sample.end, observation)

    def _observation(self, sample: Sample, results: Sequence[StepResult]) -> Observation:
        rules = self.rules[sample.prompt.dataset]
        heard = [span for span in sample.spans if isinstance(span, Observation)]
        first = len(heard) + 1 - len(results)  # observations before those of `results`
        for place, (before, again) in enumerate(zip(heard[first:], results[:-1], strict=True)):
            token_ids = _rendered(rules.dialogue, again, is_opening=first + place == 0)
            if tuple(before.token_ids) != token_ids or before.reward != again.reward:
                return _failed(
                    f"it said something else when it was built again, after turn {first + place}: "
                    "it is not repeatable; environment.on_restart=again begins such groups anew"
                )
        result, is_opening = results[-1], not heard
        if result.is_final or is_last_turn(sample, rules, self._config.max_turns):
            return Observation((), is_final=True, reward=result.reward)
        token_ids = _rendered(rules.dialogue, result, is_opening=is_opening)
        room = self._config.max_observation_tokens - (sample.end - sample.num_tokens)
        if len(token_ids) <= room:
            return Observation(token_ids, reward=result.reward)
        if is_opening:
            return _failed(
                f"its first words have {len(token_ids)} tokens, more than "
                f"environment.max_observation_tokens={self._config.max_observation_tokens}"
            )
        self._counts["out of room"] += 1
        return Observation((), is_final=True, reward=result.reward)


def _rendered(dialogue: Dialogue, result: StepResult, *, is_opening: bool) -> tuple[int, ...]:
    assert not isinstance(result.messages, str)
    write = dialogue.opening if is_opening else dialogue.following
    return write(result.messages)


def _failed(message: str) -> Observation:
    return Observation((), is_final=True, failure=f"the environment has failed: {message}")
