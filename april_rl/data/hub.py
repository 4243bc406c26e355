"""Load data sets of the Hugging Face hub, by id and configuration."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import datasets

from april_rl.data.errors import DataError

# The error of `datasets` when a set has several configurations and none was named.
_SEVERAL = re.compile(r"Config name is missing.*available configs: (\[.*?\])", re.DOTALL)


def hub_name(path: str) -> tuple[str, str | None]:
    """Split a path into a data set id and its configuration (None if the path names none).

    The configuration follows a colon, as in openai/gsm8k:main. A local folder is never split.
    """
    if Path(path).is_dir():
        return path, None
    dataset, _, configuration = path.partition(":")
    return dataset, configuration or None


def load_split(path: str, *, split: str) -> datasets.Dataset:
    """Load one split of a data set from the hub, its cache or a folder.

    Raises DataError listing the configurations if there are several and the path names none; errors
    of `datasets` pass through.
    """
    dataset, configuration = hub_name(path)
    try:
        return datasets.load_dataset(dataset, configuration, split=split)
    except ValueError as error:
        several = _SEVERAL.search(str(error))
        if several is None:
            raise
        choices = " or ".join(f"{dataset}:{name}" for name in ast.literal_eval(several[1]))
        raise DataError(f"it has several configurations; name one: {choices}") from None
