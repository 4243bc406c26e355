"""Calls every reward function once as a test, before training starts."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.config.choices import Extract
from april_rl.config.task import RewardConfig
from april_rl.rewards.extraction import gold_answer
from april_rl.rewards.functions import reward_functions
from april_rl.rewards.processes import RewardError
from april_rl.rewards.trial import RewardTrial
from april_rl.types import Prompt


def check_reward(
    reward: RewardConfig, trial: RewardTrial, examples: Sequence[Prompt]
) -> tuple[str, ...]:
    """Call every function once for an example prompt of each data set, with its own answer in the
    form that `reward.extract` reads; return notes for the user.

    Raise RewardError when a function fails.
    """
    notes = [*trial.notes]
    functions = {function.name: function for function in reward_functions(reward)}
    for example in examples:
        response = gold_response(example.answer, reward.extract)
        for verdict in trial.verdicts(example, [response] * 2)[0]:
            function = functions[verdict.name]
            if verdict.outcome == "crash":
                raise RewardError(
                    f"{function} raised when called once as a test: {verdict.message}"
                )
            if verdict.outcome == "no_score":
                raise RewardError(
                    f"{function} {verdict.message}, which was the data set's own answer "
                    f"{example.answer!r:.60} ({example.source}); a run would drop every group"
                )
            if (
                verdict.value is not None
                and function.function in _READ_ANSWERS
                and verdict.value < 1
            ):
                notes.append(
                    f"{function} gives {verdict.value:g} to the data set's own answer "
                    f"{example.answer!r:.60} in the form reward.extract={reward.extract.value} "
                    f"({example.source}): no response to this prompt can be right"
                )
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
