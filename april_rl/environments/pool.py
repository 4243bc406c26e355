"""The environments of a run, in processes of their own, while generation continues.

An episode stays in the process where it began. When that process dies, or the run was resumed,
it is built again in another one by calling its methods with the same arguments; they must return
the same messages as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from april_rl.config.choices import OnRestart
from april_rl.config.environment import EnvironmentConfig
from april_rl.data.tokenizer import TokenizerError
from april_rl.environments.calls import Notes
from april_rl.environments.episode import EpisodeReply, EpisodeRequest
from april_rl.environments.loading import limits_of
from april_rl.environments.process import serve
from april_rl.environments.protocol import EnvironmentFailedError, StepResult
from april_rl.environments.turns import (
    EpisodeRules,
    episode_seed,
    failure,
    is_last_turn,
    observation_of,
    row_of,
    turns_of,
)
from april_rl.errors import RunError
from april_rl.metrics import Mean, Metric, Metrics, Sum
from april_rl.outside.mailbox import Mailbox
from april_rl.outside.process import Process
from april_rl.outside.supervisor import Question, Supervisor
from april_rl.types import Observation, Reply, Sample, SampleId

# The counts that are logged as metrics.
_COUNTS = (
    *("calls", "repeated_calls", "errors", "timeouts", "deaths", "retries", "replays"),
    "out_of_room",
)


class EnvironmentPool(Supervisor):
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
        """Start no process yet: processes start with the first question. `rules` are by data
        set; events go to `mailbox`; `folder` holds the calls of each sample, which are removed
        `num_saves` saves after the sample has ended.
        """
        super().__init__(config.num_processes)
        self.setting, self.rules, self.mailbox = config.setting, rules, mailbox
        self.folder = folder
        self.notes = Notes(folder, num_saves=num_saves)
        self._config, self._seed = config, seed
        self._may_replay = config.on_restart is OnRestart.replay
        self._replied_s = 0.0  # total duration of the calls that returned

    def act(self, sample: Sample) -> None:
        self._ask(sample.id, sample)

    def forget(self, sample_id: SampleId) -> None:
        """Forget an episode, here and in its process, if there is one."""
        self.notes.end(sample_id)
        self._forget(sample_id)

    def metrics(self) -> Metrics:
        """Return the calls, their time and their failures since the last call of this method."""
        counts, self._counts = self._counts, Counter()
        values: dict[str, Metric] = {f"environment/{each}": Sum(counts[each]) for each in _COUNTS}
        if counts["steps"]:
            values["environment/step_s"] = Mean(self._replied_s, counts["steps"])
        self._replied_s = 0.0
        return Metrics(values)

    def _start(self) -> Process:
        return Process(
            partial(serve, self._config, self.folder),
            limits_of(self._config),
            mailbox=self.mailbox,
            received=self._on_reply,
            ended=self._on_end,
        )

    def _can_begin_again(self, subject: Sample) -> bool:
        return self._may_replay or not subject.completions

    def _origin(self, subject: Sample) -> tuple[str, int] | None:
        return None if subject.spans else (subject.prompt.dataset, subject.prompt.id)

    def _request(self, question: Question, *, is_begun: bool) -> EpisodeRequest:
        sample, config = question.subject, self._config
        self.notes.keep(sample.id)
        self._counts["replays"] += bool(sample.completions) and not is_begun
        rules = self.rules[sample.prompt.dataset]
        turns = turns_of(sample, rules, config.max_turns, last_alone=is_begun)
        num_calls = 1 if is_begun else 2 + len(turns)
        question.limit_s = config.start_timeout_s + num_calls * config.step_timeout_s
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
        self._note(question, self._observation(question.subject, reply.results))
        return ""

    def _give_up(self, question: Question, message: str) -> None:
        self._note(question, failure(message))

    def _final_error(self, reason: str) -> EnvironmentFailedError:
        return EnvironmentFailedError(f"{self.setting}: {reason}")

    def _note(self, question: Question, observation: Observation) -> None:
        sample = question.subject
        self._counts["errors"] += bool(observation.failure)
        if observation.is_final:
            self.forget(sample.id)
        self._known[question.number] = Reply(sample.id, sample.end, observation)

    def _observation(self, sample: Sample, results: Sequence[StepResult]) -> Observation:
        rules = self.rules[sample.prompt.dataset]
        try:
            observation = observation_of(results, sample, rules, config=self._config)
        except TokenizerError as error:
            observation = failure(str(error))
        except RunError:
            raise
        except Exception as error:  # a template may raise anything; it ends one sample
            observation = failure(f"{type(error).__name__}: {error}")
        is_expected = results[-1].is_final or is_last_turn(sample, rules, self._config.max_turns)
        self._counts["out_of_room"] += observation.is_final and not is_expected
        return observation
