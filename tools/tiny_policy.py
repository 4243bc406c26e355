"""Rebuild the tiny policy, its teacher and the problem files that the package contains.

`python tools/tiny_policy.py april_rl/tiny` replaces the files of a checkout; it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track
from tiny_task.problems import (
    NUM_HELD_OUT,
    Problem,
    held_out_problems,
    rl_problems,
    warm_start_problems,
)

from april_rl.tiny.builtins import HELD_OUT, TRAIN

# The teacher never solves in haste, and sees three times as many solutions.
TEACHER = {"hasty_fraction": 0.0, "num_rows": 96_000}
MAX_THREADS = 8  # a model this small cannot use more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for policy/ and problems/")
    folder: Path = parser.parse_args().folder
    write_problems(folder / TRAIN, rl_problems())
    write_problems(folder / HELD_OUT, held_out_problems(NUM_HELD_OUT))
    for name, settings in (("policy", {}), ("teacher", TEACHER)):
        build_model(folder / name, settings, description=f"warm start of the {name}")
    made = "builtin:tiny, builtin:tiny_teacher and builtin:arithmetic"
    print(f"rebuilt {made}: {folder}", file=sys.stderr)


def write_problems(path: Path, problems: list[Problem]) -> None:
    """Write one line of JSON with `prompt` and `answer` for each problem."""
    lines = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def build_model(folder: Path, changes: Mapping[str, Any], *, description: str) -> None:
    """Warm-start a model with `changes` to the policy's settings, showing progress, and save it in
    `folder` as a Hugging Face model.
    """
    # Spinning threads slow all others down on shared cores. libgomp reads this variable when
    # torch is imported, which happens below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from tiny_task.tokenizer import build_tokenizer
    from tiny_task.warm_start import WarmStart, warm_start

    torch.set_num_threads(min(len(os.sched_getaffinity(0)), MAX_THREADS))
    settings = WarmStart(**changes)
    tokenizer = build_tokenizer()
    problems = warm_start_problems(settings.num_rows)
    show = partial(track, description=description)
    model = warm_start(settings, problems, tokenizer, shown=show)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
