"""`python -m april_rl.tiny FOLDER`: make the tiny policy and the problem files anew, as this
package has them; with FOLDER=april_rl/tiny they replace those of a checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from april_rl.tiny.builtins import HELD_OUT, POLICY, TRAIN
from april_rl.tiny.task import (
    NUM_HELD_OUT,
    Problem,
    held_out_problems,
    rl_problems,
    warm_start_problems,
)

MAX_THREADS = 8  # a model this small cannot use more


def main() -> int:
    """Make both; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m april_rl.tiny",
        description="Make the tiny task anew: problem files, and a policy after a warm start "
        "of some minutes.",
    )
    parser.add_argument("folder", type=Path, help="folder for policy/ and problems/")
    folder = parser.parse_args().folder
    try:
        write_problems(folder / TRAIN, rl_problems())
        write_problems(folder / HELD_OUT, held_out_problems(NUM_HELD_OUT))
        build_policy(folder / POLICY)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"builtin:tiny and builtin:arithmetic, made anew: {folder}", file=sys.stderr)
    return 0


def write_problems(path: Path, problems: list[Problem]) -> None:
    """Write one line of JSON with `prompt` and `answer` for each problem."""
    lines = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def build_policy(folder: Path) -> None:
    """Warm-start the policy, showing progress, and save it in `folder` as a Hugging Face model."""
    # Spinning threads slow all others down on shared cores. libgomp reads this variable when
    # torch is imported, which happens below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers reads this on import; the warm start shows its own progress bar.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch

    from april_rl.tiny.progress import ProgressDisplay
    from april_rl.tiny.tokenizer import build_tokenizer
    from april_rl.tiny.warm_start import WarmStart, warm_start

    torch.set_num_threads(min(len(os.sched_getaffinity(0)), MAX_THREADS))
    settings = WarmStart()
    tokenizer = build_tokenizer()
    with ProgressDisplay() as display:
        problems = warm_start_problems(settings.num_rows)
        model = warm_start(settings, problems, tokenizer, report=display.show)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
