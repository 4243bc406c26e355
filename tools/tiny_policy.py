"""Make the tiny policy and the problem files again, as the package has them.

`python tools/tiny_policy.py april_rl/tiny` replaces those of a checkout; it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from rich.progress import track
from tiny_task.problems import (
    NUM_HELD_OUT,
    Problem,
    held_out_problems,
    rl_problems,
    warm_start_problems,
)

from april_rl.tiny.builtins import HELD_OUT, POLICY, TRAIN

MAX_THREADS = 8  # a model this small cannot use more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for policy/ and problems/")
    folder: Path = parser.parse_args().folder
    write_problems(folder / TRAIN, rl_problems())
    write_problems(folder / HELD_OUT, held_out_problems(NUM_HELD_OUT))
    build_policy(folder / POLICY)
    print(f"builtin:tiny and builtin:arithmetic, made again: {folder}", file=sys.stderr)


def write_problems(path: Path, problems: list[Problem]) -> None:
    """Write one line of JSON with `prompt` and `answer` for each problem."""
    lines = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def build_policy(folder: Path) -> None:
    """Warm-start the policy, showing progress, and save it in `folder` as a Hugging Face model."""
    # Spinning threads slow down all others on shared cores. libgomp reads this variable when torch
    # is imported, which happens below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from tiny_task.tokenizer import build_tokenizer
    from tiny_task.warm_start import WarmStart, warm_start

    torch.set_num_threads(min(len(os.sched_getaffinity(0)), MAX_THREADS))
    settings = WarmStart()
    tokenizer = build_tokenizer()
    problems = warm_start_problems(settings.num_rows)
    show = partial(track, description="warm start")
    model = warm_start(settings, problems, tokenizer, shown=show)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
