"""From a checked configuration to evaluated sets: what is sampled, figures, and records of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set
from april_rl.config.task import PromptSetConfig
from april_rl.data.prompts import PromptTable
from april_rl.evaluation.evaluator import CountingScorer, Evaluator
from april_rl.evaluation.figures import Figures, figures
from april_rl.evaluation.held_out import HeldOut, Outcome
from april_rl.evaluation.settings import set_sampling
from april_rl.rewards.extraction import extract_answer, normalised
from april_rl.rollout.ports import Engines
from april_rl.scheduling import tick_steps
from april_rl.tracking.samples_file import EvaluationRecord

# Reward functions that read an answer from a response, so that samples can vote.
_READ_ANSWERS = ("math_verify", "exact", "last_number")

AnswerOf = Callable[[str], str | None]


class Load(Protocol):
    """How the prompts of a set are read."""

    def __call__(self, *, key: str, chosen: PromptSetConfig, dataset: str) -> PromptTable:
        """Return the prompts of the set that the setting `key` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluated set: its figures, and a record of every sample."""

    held_out: HeldOut
    figures: Figures
    records: tuple[EvaluationRecord, ...]  # [P · k]


def held_out_sets(config: TrainConfig, load: Load) -> dict[str, HeldOut]:
    """Return the sets of `evaluation.sets` by name, their prompts read by `load`."""
    found = {}
    for name, chosen in config.evaluation.sets.items():
        sampling = set_sampling(config, chosen)
        table = load(
            key=f"evaluation.sets.{name}.path",
            chosen=evaluation_set(config.data, chosen),
            dataset=name,
        )
        prompts = table[: sampling.max_prompts or None]
        found[name] = HeldOut(name=name, prompts=prompts, sampling=sampling)
    return found


def build_evaluator(
    config: TrainConfig, engines: Engines, rewards: CountingScorer, *, num_slots: int
) -> Evaluator:
    """Return the evaluator; `num_slots`: requests computed together over all engines."""
    return Evaluator(
        engines,
        rewards,
        temperature=config.rollout.temperature,
        num_slots=num_slots,
        tick_steps=tick_steps(config, num_engines=engines.num_engines),
        tick_timeout_s=config.runtime.stall_timeout_s,
        seed=config.seed,
        function=_deciding_name(config),
    )


def answer_reader(config: TrainConfig) -> AnswerOf | None:
    """Return what reads the answer of a response as the reward does; None when the deciding reward
    function reads none, and there is nothing to vote on.

    Answers that differ in spaces or `$` only are one; 1/2 and 0.5 are two.
    """
    reward, name = config.reward, _deciding_name(config)
    function = reward.function if name is None else reward.functions[name].function
    if not _reads_answers(function):
        return None
    how = reward.extract.name

    def answer_of(response: str) -> str | None:
        stated = extract_answer(response, how)
        return None if stated is None else normalised(stated)

    return answer_of


def evaluate(
    held_out: HeldOut,
    evaluator: Evaluator,
    *,
    decode: Callable[[Sequence[int]], str],
    answer_of: AnswerOf | None,
    on_progress: Callable[[int], None],
) -> Evaluated:
    """Sample, score and estimate a held-out set; `on_progress` gets the number of samples so far.

    Raises EvaluationError when samples are missing or no prompt has a reward for each of its own.
    """
    outcome = evaluator.run(held_out, on_progress)
    responses = [decode(sample.token_ids) for sample in outcome.samples]
    answers = None if answer_of is None else [answer_of(response) for response in responses]
    return Evaluated(
        held_out=held_out,
        figures=figures(outcome, answers),
        records=tuple(_records(outcome, responses, answers)),
    )


def _records(
    outcome: Outcome, responses: Sequence[str], answers: Sequence[str | None] | None
) -> list[EvaluationRecord]:
    found = []
    rewards = outcome.rewards.ravel().tolist()
    for place, (sample, reward) in enumerate(zip(outcome.samples, rewards, strict=True)):
        assert sample.finish_reason is not None, sample.id
        found.append(
            EvaluationRecord(
                prompt_id=-1 - sample.prompt.id,
                index=sample.index,
                prompt=sample.prompt.text,
                response=responses[place],
                answer=sample.prompt.answer,
                stated=None if answers is None else answers[place],
                reward=None if math.isnan(reward) else reward,
                finish_reason=sample.finish_reason,
                num_tokens=sample.num_tokens,
                source=sample.prompt.source,
            )
        )
    return found


def _deciding_name(config: TrainConfig) -> str | None:
    """The name in reward.functions of the function that says whether a sample is right; None when
    there is only one function.
    """
    functions = config.reward.functions
    return (config.evaluation.function or next(iter(functions))) if functions else None


def _reads_answers(function: str) -> bool:
    """Whether samples vote: with the built-ins that compare an answer, and with a user's own, which
    may.
    """
    return function in _READ_ANSWERS or ":" in function
