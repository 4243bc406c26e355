"""Read and try the inputs of a run before a worker starts: tokenizer, rewards, environments,
data. Training and `evaluate` do this in the same way, with different prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from april_rl.config import TrainConfig
from april_rl.run.tracking.terminal import View
from april_rl.start.assembly.environments import (
    RewardsAndEnvironments,
    description_of,
    with_environments,
)
from april_rl.start.assembly.rewards import build_rewards, try_rewards
from april_rl.start.planning.sizes import context_length
from april_rl.task.data.sets import PromptSets
from april_rl.task.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.task.environments.loading import Description
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Parts of a run that are read before a worker starts."""

    tokenizer: Tokenizer
    rewards: RewardPool
    description: Description  # what the rewards and the data need to know about the environment
    sets: PromptSets  # reads prompts with the columns that the rewards and the environment use


def read_inputs(site: RunSite, *, states: Mapping[str, str] | None = None) -> Inputs:
    """Load tokenizer, rewards and the description of the environment; rewards with a state continue
    from `states`. Raise RunError when one cannot be loaded.
    """
    config, tokenizer = site.config, load_tokenizer(site.config.model.path)
    with site.view.phase("loading the reward"):
        description = description_of(config, tokenizer)
        rewards, columns = build_rewards(
            config,
            tokenizer,
            folder=site.folder,
            description=description,
            stack=site.stack,
            states=states,
        )
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
    """Return the server at teacher.base_url after trying it on tokens of the whole vocabulary, or
    None if there is none. Raise RunError when it cannot score what the policy samples.
    """
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
    """Try the rewards, and the environments if there are any, on prompts of every set, and
    return them. Raise RunError when one fails.
    """
    config = site.config
    with site.view.phase("trying the reward"):
        try_rewards(config, inputs.rewards, training, held_out=held_out, tell=site.view.message)
        return with_environments(
            config,
            inputs.rewards,
            inputs.tokenizer,
            description=inputs.description,
            examples=[prompts[0] for prompts in (*training, *held_out)],
            folder=site.folder,
            stack=site.stack,
        )
