"""Tries reward functions on responses given as text: before training starts, and in commands."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.config.choices import Extract
from april_rl.config.task import RewardConfig
from april_rl.rewards.extraction import gold_answer
from april_rl.rewards.jobs import RewardError
from april_rl.rewards.pool import RewardPool
from april_rl.types import Prompt


def check_reward(
    reward: RewardConfig, pool: RewardPool, examples: Sequence[Prompt]
) -> tuple[str, ...]:
    """Call every function once for an example prompt of each data set, with its own answer in the
    form that `reward.extract` reads; return notes for the user.

    Raise RewardError when a function fails.
    """
    notes = [*pool.notes()]
    functions = {function.name: function for function in pool.functions}
    for example in examples:
        response = gold_response(example.answer, reward.extract)
        for score in pool.try_on(example, [response] * 2)[0]:
            if score.outcome == "crash":
                raise RewardError(f"{score.message}, when called once as a test")
            if score.outcome == "no_score":
                raise RewardError(
                    f"{score.message}, which was the data set's own answer {example.answer!r:.60} "
                    f"({example.source}); a run would drop every group"
                )
            notes += [
                f"{functions[name]} gives {value:g} to the data set's own answer "
                f"{example.answer!r:.60} in the form reward.extract={reward.extract.value} "
                f"({example.source}): no response to this prompt can be right"
                for name, value in score.parts
                if functions[name].function in _READ_ANSWERS and value < 1
            ]
    return tuple(notes)


def gold_response(answer: str, how: Extract) -> str:
    """Return a response that states the data set's answer in the form that `how` reads."""
    answer = gold_answer(answer)
    if how is Extract.answer_line:
        return f"It follows.\nAnswer: {answer}"
    if how is Extract.last_number:
        return f"It is {answer}."
    return f"It is \\boxed{{{answer}}}."


_READ_ANSWERS = ("math_verify", "exact", "last_number", "reasoning_gym")
