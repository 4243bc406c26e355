"""Environments from a checked configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set, has_chat, training_sets
from april_rl.config.task import PromptSetConfig
from april_rl.metrics import Metrics
from april_rl.task.data.stop_tokens import stop_token_ids
from april_rl.task.data.tokenizer import Tokenizer
from april_rl.task.environments.dialogue import Dialogue
from april_rl.task.environments.loading import Description, describe
from april_rl.task.environments.pool import EnvironmentPool
from april_rl.task.environments.protocol import EnvironmentFailedError
from april_rl.task.environments.turns import EpisodeRules
from april_rl.task.evaluation.settings import set_sampling
from april_rl.task.processes.child_process import raise_open_files
from april_rl.task.rewards.pool import RewardPool
from april_rl.types import Reply, Sample, Score

_FILES_OF_AGENT = 6  # both ends of its connection, its output, and the files that starting it opens


class RewardsAndEnvironments:
    """A `rollout.ports.Outside` over pools of rewards and environments, which share a mailbox."""

    def __init__(self, rewards: RewardPool, environments: EnvironmentPool) -> None:
        """Take both; the caller closes them."""
        self._rewards, self._environments = rewards, environments

    def submit(self, sample: Sample, *, group_size: int) -> None:
        """Score a finished sample, whose episode is over."""
        self._environments.forget(sample.id)
        self._rewards.submit(sample, group_size=group_size)

    def act(self, sample: Sample) -> None:
        self._environments.act(sample)

    def collect(
        self, timeout_s: float | None, look: Callable[[], None] = lambda: None
    ) -> list[Score | Reply]:
        """Return scores and replies as `rollout.ports.Outside` says."""
        parties = (self._rewards, self._environments)
        return self._rewards.mailbox.collect(parties, timeout_s, look)

    def save(self) -> dict[str, str]:
        """Return the states of the rewards for a checkpoint that is written now."""
        self._environments.notes.on_save()
        return self._rewards.save()

    def on_evaluation_end(self) -> None:
        self._environments.notes.on_evaluation_end()

    def metrics(self) -> Metrics:
        return Metrics({**self._rewards.metrics(), **self._environments.metrics()})


def open_files_line(
    config: TrainConfig, description: Description, *, num_episodes: int
) -> Iterator[str]:
    """Yield a line if the system allows fewer open files than the agents of a process need."""
    if not description.is_agent:
        return
    allowed, num_processes = raise_open_files(), config.environment.num_processes
    needed = _FILES_OF_AGENT * math.ceil(num_episodes / num_processes)
    if needed > allowed:
        yield (
            f"environments: {num_episodes} agents in {num_processes} processes need about {needed} "
            f"open files in each, and the system allows {allowed}: raise the limit (ulimit -Hn), "
            "or environment.num_processes"
        )


def description_of(config: TrainConfig, tokenizer: Tokenizer) -> Description:
    """Return the description of the environment, empty if there is none. Raise
    EnvironmentFailedError or TokenizerError when it, or the calls of its tools, cannot be used.
    """
    found = describe(config.environment, config.user_code)
    if found.tools:
        tokenizer.check_tool_calls()
    played = {name: each for name, each in _prompt_sets(config).items() if each.environment}
    if not found.has_reward and any(map(config.reward.environment_weight, played)):
        raise EnvironmentFailedError(
            f"{config.environment.setting} has tools that are functions, which give no reward, and "
            "reward.function=environment reads one: choose another reward"
        )
    return found


def columns_of_environment(
    config: TrainConfig, description: Description
) -> dict[str, tuple[str, ...]]:
    """Return the data columns that the environment gets, by data set."""
    names = [name for name, each in _prompt_sets(config).items() if each.environment]
    return dict.fromkeys(names, (*config.environment.columns, *description.columns))


def _prompt_sets(config: TrainConfig) -> dict[str, PromptSetConfig]:
    held_out = config.evaluation.sets.items()
    return training_sets(config.data) | {k: evaluation_set(config.data, s) for k, s in held_out}


def episode_rules(
    config: TrainConfig, tokenizer: Tokenizer, description: Description
) -> dict[str, EpisodeRules]:
    """Return the rules of the episodes of each data set that has an environment."""
    budget = config.rollout.max_response_tokens
    chosen = {name: (each, budget) for name, each in training_sets(config.data).items()}
    for name, held_out in config.evaluation.sets.items():
        sampling = set_sampling(config, held_out)
        chosen[name] = (evaluation_set(config.data, held_out), sampling.max_response_tokens)
    tools, has_agent = description.tools, description.is_agent
    given = {"tools": list(tools)} if tools else {}
    is_chat = has_chat(config.data, config.evaluation.sets)
    stop_ids = frozenset(stop_token_ids(config.model.path, is_chat=is_chat))
    return {
        name: EpisodeRules(
            config=config.environment,
            dialogue=Dialogue(
                tokenizer=tokenizer,
                is_chat=each.is_chat,
                variables=each.chat_template_kwargs | given,
                stop_ids=stop_ids,
                has_tools=bool(tools) or (has_agent and tokenizer.has_tool_calls),
                has_agent=has_agent,
            ),
            max_response_tokens=most,
        )
        for name, (each, most) in chosen.items()
        if each.environment
    }
