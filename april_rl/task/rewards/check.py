"""Tries reward functions on responses that are given as text, before training and in commands."""

from __future__ import annotations

from collections.abc import Sequence

from april_rl.answers.extraction import gold_answer
from april_rl.config.choices import Extract
from april_rl.config.task import RewardConfig
from april_rl.task.rewards.code.task_tests import IDLE_PROGRAMS
from april_rl.task.rewards.jobs import RewardError
from april_rl.task.rewards.pool import RewardPool
from april_rl.types import Prompt

# Rows of each set that are tried with their tests, at the start of a run and in a rehearsal.
NUM_ROWS_TRIED = 16
_NUM_SHOWN = 3  # rows that a message names


def check_reward(
    reward: RewardConfig, pool: RewardPool, examples: Sequence[Prompt]
) -> tuple[str, ...]:
    """Call every function for an example prompt of each data set, with its own answer in the form
    of `reward.extract`; return notes for the user. Raise RewardError when one fails.
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
                if functions[name].extracts_answer and value < 1
            ]
    return tuple(notes)


def check_tests(pool: RewardPool, prompts: Sequence[Prompt], *, most: int | None = None) -> None:
    """Try the tests for `code` on programs that solve nothing, on at most `most` prompts. Raise
    RewardError with the first rows whose tests cannot be read, or do not all fail.
    """
    if not any(f.function == "code" and f.scores(prompts[0].dataset) for f in pool.functions):
        return
    num = len(prompts) if most is None else min(most, len(prompts))
    tried = [prompts[place * len(prompts) // num] for place in range(num)]
    responses = [f"```python\n{program}\n```" for program in IDLE_PROGRAMS]
    scored = pool.try_on_each(tried, responses, function="code")
    faults = []
    for prompt, scores in zip(tried, scored, strict=True):
        failed = [score.message for of_one in scores for score in of_one if score.value is None]
        faults += [f"{prompt.source}: {message}" for message in failed[:1]]
    if faults:
        shown = "\n".join(faults[:_NUM_SHOWN])
        raise RewardError(
            f"{len(faults):,} of {num:,} rows have tests that do not show whether a program is "
            f"right:\n{shown}"
        )


def reads_answers(pool: RewardPool, dataset: str) -> bool:
    """Return whether a function that scores a data set may read the answer in a response."""
    return any(f.scores(dataset) and f.may_read_answer for f in pool.functions)


def gold_response(answer: str, how: Extract) -> str:
    """Return a response that states the data set's answer in the form that `how` reads."""
    answer = gold_answer(answer)
    if how is Extract.answer_line:
        return f"It follows.\nAnswer: {answer}"
    if how is Extract.last_number:
        return f"It is {answer}."
    return f"It is \\boxed{{{answer}}}."
