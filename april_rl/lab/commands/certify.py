"""`python -m april_rl certify model.path=FOLDER`: a certificate of numerics."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from april_rl.config import TrainConfig

_USAGE = """\
usage: python -m april_rl certify model.path=FOLDER [lora.rank=8] [engine.KEY=VALUE ...]
           [output=FOLDER]

  python -m april_rl certify model.path=Qwen/Qwen3-0.6B
  python -m april_rl certify model.path=FOLDER lora.rank=8 lora.sync=adapter
  python -m april_rl certify model.path=FOLDER rollout.max_response_tokens=8000

Does this model compute the same in transformers, in the learner and in the engine? Compared are
tokens, also those at which a run stops, log-probabilities and gradients: packed and alone, as
loaded, after an interruption, with kept caches, after an update with its weight sync, after sleep,
and in an export. Limits come from what rounding alone does to transformers, which runs on the CPU,
in twice the precision. It takes the settings of training, with a temperature of 0.8 and 48 response
tokens by default.

certificate.html and .json are written to `output`. Exit status 0: all pass; 1: one fails."""
_NUM_TEXTS, _PROMPT_TOKENS = 4, 256
_DEFAULTS = (
    *("data.path=builtin:arithmetic", "runtime.ray=false", "runtime.num_workers=1"),
    *("rollout.temperature=0.8", "rollout.group_size=1", "algorithm.advantage=reinforce_pp"),
    *("rollout.over_sampling_factor=1", "rollout.refill=false", f"trainer.num_groups={_NUM_TEXTS}"),
    *(f"data.max_prompt_tokens={_PROMPT_TOKENS}", "trainer.num_steps=20", "optimizer.lr=1e-4"),
    *("learner.max_mismatch=1e9", "rollout.max_response_tokens=48"),
)


def main(arguments: Sequence[str]) -> int:
    """Certify the model that `arguments` name; return the exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    from april_rl.config.store import compose_overrides, to_config
    from april_rl.start.commands.arguments import output_folder
    from april_rl.start.planning.checks import check_settings

    with output_folder(arguments, default="outputs/certificate") as (folder, settings):
        composed = compose_overrides([*_DEFAULTS, *settings])
        if not any(word.startswith("learner.max_tokens=") for word in settings):
            longest = _PROMPT_TOKENS + composed.rollout.max_response_tokens
            composed.learner.max_tokens = _NUM_TEXTS * longest  # all texts in one row
        config = check_settings(to_config(composed))
        folder.mkdir(parents=True, exist_ok=True)
        return _certify(config, folder, settings=" ".join(settings))


def _certify(config: TrainConfig, folder: Path, *, settings: str) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    from april_rl.lab.certify.certificate import write_certificate
    from april_rl.lab.certify.certify import comparisons
    from april_rl.run.tracking.labels import versions

    started, rows = time.perf_counter(), []
    for row in comparisons(config, folder, say=lambda stage: print(f"      {stage}", flush=True)):
        rows.append(row)
        print(f"{'pass' if row.passes else 'FAIL'}  {row.name:<16}{row.found}", flush=True)
        if not row.passes:
            print(f"      {row.compared}; the limit is {row.limit}", flush=True)
    about = {**versions(), "settings": settings}
    path = write_certificate(folder, rows, model=config.model.path, about=about)
    failed = ", ".join(row.name for row in rows if not row.passes)
    verdict = f"FAIL: {failed}" if failed else f"all {len(rows)} comparisons pass"
    print(f"{verdict}, after {time.perf_counter() - started:.0f} s: {path}")
    return 1 if failed else 0
