"""`reasoning_gym`: 1.0 when the task's own verifier gives the answer exactly 1, else 0.0.

For rows of `data.path=reasoning_gym:NAME`, whose column `entry` says which task it is and what it
asks. The answer is read as `reward.extract` says; a response that states several different answers
is wrong. Less than 1 counts as 0 because several verifiers give partial credit for wrong text. A
verifier that raises counts the answer as wrong (they raise on text they cannot read), and so does
nan: a distance to it is below every limit. A missing package or column ends the run at its start.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from april_rl.answers.extraction import normalise, stated_answers
from april_rl.config.user_code import Caught
from april_rl.task.rewards.loading import Reward, RewardContext

_NUMBER = r"[-+().\s\dij]*+"
_NAN = re.compile(rf"{_NUMBER}(?:nan{_NUMBER})++", re.IGNORECASE)  # also nan + 2i


def build(context: RewardContext) -> Reward:
    """Return the function; it takes no arguments. Raises ImportError without the package."""
    library: Any = importlib.import_module("reasoning_gym")
    verifier: Callable[[str], Callable[..., float]] = cache(library.get_score_answer_fn)

    def reasoning_gym(
        prompts: list[str],  # noqa: ARG001
        responses: list[str],
        answers: list[str],  # noqa: ARG001
        *,
        entry: list[str],
    ) -> list[float]:
        pairs = zip(responses, entry, strict=True)
        return [score(response, json.loads(of_one)) for response, of_one in pairs]

    def score(response: str, entry: dict[str, Any]) -> float:
        stated = stated_answers(response, context.extract)
        if len({normalise(text) for text in stated}) != 1:
            return 0.0
        text, verify, value = stated[-1].strip(), verifier(entry["task"]), 0.0
        if _NAN.fullmatch(text) and text != entry["answer"]:
            return 0.0
        with Caught():
            value = verify(text, entry)
        return float(value == 1)

    return Reward(call=reasoning_gym)
