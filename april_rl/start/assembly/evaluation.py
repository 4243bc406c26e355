"""Build the evaluator and the evaluation sets from a checked configuration."""

from __future__ import annotations

from typing import Protocol

from april_rl.answers.extraction import extract_answer, normalise, with_thinking
from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set
from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError
from april_rl.task.data.files import of_held_out
from april_rl.task.data.prompts import PromptTable
from april_rl.task.evaluation.evaluator import CountingOutside, Evaluator
from april_rl.task.evaluation.held_out import AnswerOf, HeldOut
from april_rl.task.evaluation.settings import set_sampling
from april_rl.task.rewards.functions import RewardFunction, reward_functions
from april_rl.training.rollout.ports import Engines


class Load(Protocol):
    """Function that reads the prompts of a set."""

    def __call__(self, *, key: str, chosen: PromptSetConfig, dataset: str) -> PromptTable:
        """Return the prompts of the set that the setting `key` names."""


def held_out_sets(config: TrainConfig, load: Load) -> dict[str, HeldOut]:
    """Return the sets of `evaluation.sets`, read by `load`; raise DataError with the remedy."""
    found = {}
    for name, chosen in config.evaluation.sets.items():
        sampling = set_sampling(config, chosen)
        try:
            table = load(
                key=f"evaluation.sets.{name}.path",
                chosen=evaluation_set(config.data, chosen),
                dataset=name,
            )
        except DataError as error:
            raise of_held_out(error, name) from error
        prompts = table[: sampling.max_prompts]
        # The first function that scores the set decides what is right.
        function = next(each for each in reward_functions(config.reward) if each.scores(name))
        found[name] = HeldOut(
            name=name,
            path=chosen.path,
            prompts=prompts,
            sampling=sampling,
            function=function.name,
            answer_of=_answer_reader(function, config.reward.extract.name),
        )
    return found


def build_evaluator(
    config: TrainConfig, engines: Engines, rewards: CountingOutside, *, num_slots: int
) -> Evaluator:
    """Return the evaluator; `num_slots` is the total number of requests computed together."""
    return Evaluator(
        engines,
        rewards,
        temperature=config.rollout.temperature,
        num_slots=num_slots,
        tick_steps=config.rollout.steps_per_tick,
        tick_timeout_s=config.runtime.stall_timeout_s,
        seed=config.seed,
    )


def _answer_reader(function: RewardFunction, how: str) -> AnswerOf | None:
    """Return a function that extracts the answer of a response in the form `how`.

    Return None for a built-in that extracts no answer: there is nothing to vote on. A user's
    function may extract one. A response in thoughts that its prompt began has none. Answers that
    differ only in spaces or `$` are equal texts.
    """
    is_own = ":" in function.function
    if not is_own and not function.extracts_answer:
        return None
    wants_number = function.function == "last_number"

    def answer_of(prompt: str, response: str) -> str | None:
        response = with_thinking(prompt, response)
        stated = extract_answer(response, how)
        if wants_number:
            is_anywhere = stated is None and how == "auto"
            stated = extract_answer(response if is_anywhere else stated or "", "last_number")
        return None if stated is None else normalise(stated)

    return answer_of
