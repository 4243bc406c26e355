"""From a checked configuration to evaluated sets: what is sampled, figures, and records of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set
from april_rl.config.task import PromptSetConfig
from april_rl.data.prompts import PromptTable
from april_rl.evaluation.evaluator import CountingScorer, Evaluator
from april_rl.evaluation.figures import Figures, figures
from april_rl.evaluation.held_out import AnswerOf, HeldOut, Outcome
from april_rl.evaluation.settings import set_sampling
from april_rl.metrics import Metric, Metrics, Sum
from april_rl.rewards.extraction import extract_answer, normalised
from april_rl.rewards.functions import RewardFunction, reward_functions
from april_rl.rollout.ports import Engines
from april_rl.scheduling import tick_steps
from april_rl.tracking.samples_file import EvaluationRecord
from april_rl.tracking.terminal import Phase
from april_rl.tracking.tracker import Tracker

# Built-in reward functions that read an answer from a response, so that samples can vote.
_READ_ANSWERS = ("math_verify", "exact", "last_number", "reasoning_gym")


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
        function = _deciding(config, name)
        found[name] = HeldOut(
            name=name,
            prompts=prompts,
            sampling=sampling,
            function=function.name,
            answer_of=_answer_reader(function, config.reward.extract.name),
        )
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
    )


def evaluate(
    held_out: HeldOut,
    evaluator: Evaluator,
    *,
    decode: Callable[[Sequence[int]], str],
    on_progress: Callable[[int], None],
) -> Evaluated:
    """Sample, score and estimate a held-out set; `on_progress` gets the number of samples so far.

    Raises EvaluationError when samples are missing or no prompt has a reward for each of its own.
    """
    outcome = evaluator.run(held_out, on_progress)
    responses = [decode(sample.token_ids) for sample in outcome.samples]
    read = held_out.answer_of
    answers = None if read is None else [read(response) for response in responses]
    return Evaluated(
        held_out=held_out,
        figures=figures(outcome, answers),
        records=tuple(_records(outcome, responses, answers)),
    )


def evaluate_all(
    sets: Iterable[HeldOut],
    evaluator: Evaluator,
    *,
    decode: Callable[[Sequence[int]], str],
    tracker: Tracker,
    policy_version: int,
    show: Callable[[Phase, int], None],
) -> Metrics:
    """Evaluate every set and have `tracker` keep its samples; returns `eval/*` and the time.

    `show` gets the phase that is shown, and the number of samples so far.
    """
    values: dict[str, Metric] = {}
    started = time.perf_counter()
    for held_out in sets:
        name = held_out.name
        with tracker.phase(f"evaluating {name}", held_out.num_responses) as phase:
            evaluated = evaluate(
                held_out, evaluator, decode=decode, on_progress=partial(show, phase)
            )
        tracker.evaluation(policy_version, name, evaluated.records)
        values |= evaluated.figures.metrics(name)
    return Metrics({**values, "time/evaluation_s": Sum(time.perf_counter() - started)})


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


def _deciding(config: TrainConfig, name: str) -> RewardFunction:
    """Return the function that says which samples of the set `name` are right: the one that
    `evaluation.function` names, else the first that scores the set.
    """
    wanted = config.evaluation.function
    return next(
        function
        for function in reward_functions(config.reward)
        if (function.name == wanted if wanted else function.scores(name))
    )


def _answer_reader(function: RewardFunction, how: str) -> AnswerOf | None:
    """Return what reads the answer of a response in the form `how`, as the function does; None
    when a built-in reads none, and there is nothing to vote on. A user's own function may read one.

    Answers that differ in spaces or `$` only are one; 1/2 and 0.5 are two.
    """
    is_own = ":" in function.function
    if not is_own and function.function not in _READ_ANSWERS:
        return None
    wants_number = function.function == "last_number"

    def answer_of(response: str) -> str | None:
        stated = extract_answer(response, how)
        if wants_number:
            is_anywhere = stated is None and how == "auto"
            stated = extract_answer(response if is_anywhere else stated or "", "last_number")
        return None if stated is None else normalised(stated)

    return answer_of
