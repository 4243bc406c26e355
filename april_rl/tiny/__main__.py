"""`python -m april_rl.tiny`: build the tiny policy and the problem files, print where they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from april_rl.tiny.prepare import (
    CacheError,
    build_once,
    policy_folder,
    resolve_problems,
    warm_start_problems,
)

MAX_THREADS = 8  # a model this small cannot use more


def main() -> int:
    """Build what is missing; exit code 0, or 1 with a message when the cache cannot be used."""
    try:
        problems = resolve_problems()
        build_once(policy_folder(), build_policy)
    except CacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    print(
        f"builtin:tiny is {policy_folder()}, builtin:arithmetic is in {problems}", file=sys.stderr
    )
    return 0


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
