"""Read and try the inputs of a run before a worker starts: tokenizer, rewards, environments,
data. Training and `evaluate` do this in the same way, with different prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import training_sets
from april_rl.run.tracking.terminal import View
from april_rl.run.tracking.tracker import open_view
from april_rl.start.assembly.environments import (
    RewardsAndEnvironments,
    columns_of_environment,
    description_of,
    episode_rules,
)
from april_rl.start.planning.sizes import context_length
from april_rl.task.data.sets import PromptSets
from april_rl.task.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.task.environments.check import check_environment
from april_rl.task.environments.loading import Description
from april_rl.task.environments.pool import EnvironmentPool
from april_rl.task.processes.child_process import raise_open_files
from april_rl.task.rewards.check import NUM_ROWS_TRIED, check_reward, check_tests
from april_rl.task.rewards.pool import RewardPool
from april_rl.types import Prompt

if TYPE_CHECKING:
    from april_rl.task.teacher_server import TeacherServer

_NUM_TRIED = 256  # tokens of the vocabulary that a teacher's server is asked about


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSite:
    """Where a run is built: its settings, its folder, its terminal, and what is closed with it."""

    config: TrainConfig
    folder: Path
    view: View
    stack: ExitStack

    def show(self, lines: Iterable[str]) -> None:
        """Print lines for the user."""
        for line in lines:
            self.view.message(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Parts of a run that are read before a worker starts."""

    tokenizer: Tokenizer
    rewards: RewardPool
    description: Description  # what the rewards and the data need to know about the environment
    sets: PromptSets  # reads prompts with the columns that the rewards and the environment use


def open_site(
    config: TrainConfig,
    *,
    folder: Path,
    stack: ExitStack,
    title: str,
    num_steps: int,
    lines: Iterable[str],
) -> RunSite:
    """Open the view, and show `lines` there; closing `stack` closes it."""
    # A panel would be drawn over the prompt of the debugger.
    has_panel = None if config.runtime.ray else False
    view = open_view(title=title, num_steps=num_steps, has_panel=has_panel)
    stack.callback(view.close)
    site = RunSite(config=config, folder=folder.resolve(), view=view, stack=stack)
    site.show(lines)
    return site


def read_inputs(site: RunSite, *, states: Mapping[str, str] | None = None) -> Inputs:
    """Load tokenizer, rewards (continued from `states`) and environment, or raise RunError."""
    config, tokenizer = site.config, load_tokenizer(site.config.model.path)
    with site.view.phase("loading the reward"):
        description = description_of(config, tokenizer)
        rewards = RewardPool(
            config.reward,
            config.user_code,
            decode=tokenizer.decoder(),
            folder=site.folder,
            states=states,
        )
        site.stack.callback(rewards.close)
    of_environment = columns_of_environment(config, description)
    columns = {
        name: (*rewards.columns_of(name), *of_environment.get(name, ()))
        for name in (*training_sets(config.data), *config.evaluation.sets)
    }
    sets = PromptSets(
        data=config.data,
        tokenizer=tokenizer,
        seed=config.seed,
        columns=columns,
        tools=description.tools,
        has_agent=description.is_agent,
        tell=site.view.message,
    )
    return Inputs(tokenizer=tokenizer, rewards=rewards, description=description, sets=sets)


def teacher_server(site: RunSite, inputs: Inputs) -> TeacherServer | None:
    """Return the server at teacher.base_url, or None, after trying it; raise RunError."""
    if not site.config.teacher.base_url:
        return None
    from april_rl.task.teacher_server import (
        TeacherServer,  # importing openai takes a second
    )

    server = site.stack.enter_context(closing(TeacherServer(site.config.teacher)))
    with site.view.phase("trying the teacher"):
        tried = inputs.tokenizer.spread_ids(_NUM_TRIED)
        texts = [inputs.tokenizer.show_text([token_id]) for token_id in tried]
        server.check(tried, texts, longest=context_length(site.config)[0])
    return server


def try_outside(
    site: RunSite,
    inputs: Inputs,
    training: Sequence[Sequence[Prompt]],
    *,
    held_out: Sequence[Sequence[Prompt]] = (),
) -> RewardPool | RewardsAndEnvironments:
    """Try rewards and environments on prompts of every set, and return them; raise RunError."""
    config, rewards = site.config, inputs.rewards
    with site.view.phase("trying the reward"):
        try_rewards(config, rewards, training, held_out=held_out, tell=site.view.message)
        if not config.environment.is_set:
            return rewards
        raise_open_files()
        environments = EnvironmentPool(
            config.environment,
            config.user_code,
            episode_rules(config, inputs.tokenizer, inputs.description),
            seed=config.seed,
            mailbox=rewards.mailbox,
            folder=site.folder / "environments",
            num_saves=config.checkpoint.keep_last,
        )
        site.stack.callback(environments.close)
        examples = [prompts[0] for prompts in (*training, *held_out)]
        check_environment(environments, [each for each in examples if each.has_environment])
        return RewardsAndEnvironments(rewards, environments)


def try_rewards(
    config: TrainConfig,
    rewards: RewardPool,
    sets: Sequence[Sequence[Prompt]],
    *,
    held_out: Sequence[Sequence[Prompt]] = (),
    tell: Callable[[str], None],
) -> None:
    """Try the tests of some rows of each set, and call every function on the first prompt of each
    of `sets`; `tell` receives notes for the user. Raise RewardError.
    """
    for prompts in (*sets, *held_out):
        check_tests(rewards, prompts, most=NUM_ROWS_TRIED)
    for note in check_reward(config.reward, rewards, [prompts[0] for prompts in sets]):
        tell(note)
