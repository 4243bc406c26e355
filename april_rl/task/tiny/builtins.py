"""Replace the `builtin:` paths of a configuration by the folders and files of this package.

`builtin:tiny` is the folder of a Hugging Face model with its tokenizer, warm-started on worked
solutions, half of them hasty; `builtin:tiny_teacher` is a model of the same size that saw three
times as many solutions, all of them complete. `builtin:arithmetic` and
`builtin:arithmetic_held_out` are jsonl files with the columns `prompt` and `answer`.
`tools/tiny_policy.py` of commit 24ae8689 made all of them.
"""

from __future__ import annotations

import copy
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.errors import RunError

PREFIX = "builtin:"
POLICY, TEACHER = "policy", "teacher"
TRAIN, HELD_OUT = "problems/train.jsonl", "problems/held_out.jsonl"

_PACKAGE = Path(__file__).resolve().parent
_MODELS = {"tiny": POLICY, "tiny_teacher": TEACHER}
_FILES = {**_MODELS, "arithmetic": TRAIN, "arithmetic_held_out": HELD_OUT}


def resolve(path: str, *, key: str = "path") -> str:
    """Return the file or folder of a `builtin:` path, and other paths unchanged; raise RunError."""
    if not path.startswith(PREFIX):
        return path
    name = path.removeprefix(PREFIX)
    if name not in _FILES:
        is_model = key in ("model.path", "teacher.path", "critic.path")
        fitting = [PREFIX + known for known in _FILES if (known in _MODELS) == is_model]
        known = " or ".join(fitting)
        raise RunError(f"{key}={path}: no such builtin; choose {known}")
    return str(_PACKAGE / _FILES[name])


def resolve_builtins(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every `builtin:` path replaced; a model's becomes absolute,
    since workers run in other directories. Raise RunError naming the key.
    """
    config = copy.deepcopy(config)
    config.model.path = _model(config.model.path, key="model.path")
    for key, section in (("teacher.path", config.teacher), ("critic.path", config.critic)):
        section.path = _model(section.path, key=key) if section.path else None
    config.data.path = resolve(config.data.path, key="data.path")
    for name, source in config.data.sources.items():
        source.path = resolve(source.path, key=f"data.sources.{name}.path")
    for name, held_out in config.evaluation.sets.items():
        held_out.path = resolve(held_out.path, key=f"evaluation.sets.{name}.path")
    return config


def _model(path: str, *, key: str) -> str:
    """Return the absolute path of a model's folder; return a hub id unchanged."""
    found = resolve(path, key=key)
    return str(Path(found).absolute()) if Path(found).is_dir() else found
