"""Settings with which a run must refuse to resume: docs/checkpoints.md says that they must stay or
may only grow, or the reward, memory or an engine notices the change later.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from april_rl.task.tiny.builtins import resolve
from kills.run import Run


def _other_model(run: Run) -> dict[str, object]:
    """Write a model of one more layer. Its weights are never read, so they need not fit."""
    folder = run.folder / "other_model"
    shutil.copytree(resolve(run.setting("model.path")), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return {"model.path": folder}


def _other_data(run: Run) -> dict[str, object]:
    """Write the same prompts, but one of them with another answer."""
    path = run.folder / "other_data.jsonl"
    first, *others = Path(resolve(run.setting("data.path"))).read_text().splitlines()
    row = json.loads(first) | {"answer": "another"}
    path.write_text("\n".join([json.dumps(row), *others]) + "\n")
    return {"data.path": path}


def _setting(key: str, value: object) -> Callable[[Run], dict[str, object]]:
    return lambda _: {key: value}


# Refusals, by the words that the message must contain.
REFUSALS: dict[str, Callable[[Run], dict[str, object]]] = {
    "rollout.group_size=3": _setting("rollout.group_size", 3),
    "seed=99": _setting("seed", 99),
    "lora.rank=2": _setting("lora.rank", 2),
    "trainer.num_groups=1": _setting("trainer.num_groups", 1),
    "rollout.max_staleness=1": _setting("rollout.max_staleness", 1),
    "num_layers": _other_model,
    "other_data.jsonl": _other_data,
    "reward.function=builtins:print": _setting("reward.function", "builtins:print"),
    "engine.kv_cache_gib": _setting("engine.kv_cache_gib", 9999),
}
