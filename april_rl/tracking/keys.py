"""The frozen metric keys: what dashboards, scripts and a resumed run may rely on.

More keys may be added, none removed. A `*` stands for one part that the run decides: the age
of a token, the name of an evaluation set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FROZEN: dict[str, tuple[str, ...]] = {
    "rollout": (
        "time_s",
        "generated_tokens_per_s",
        "finished_samples_per_s",
        "in_flight_mean",
        "occupancy",
        "resumed_samples",
        "parked_groups",
        "parked_tokens",
        "ready_groups",
        "reprefill_tokens",
        "rejected_groups",
        "truncated_frac",
        "response_tokens_mean",
        "response_tokens_p50",
        "response_tokens_p95",
        "response_tokens_p99",
        "response_tokens_max",
        "over_sampling_factor",
        "stop_s",
    ),
    "staleness": ("age_mean", "age_max", "off_policy_token_frac", "token_frac_age_*"),
    "reward": ("mean", "std", "no_signal_frac", "errors"),
    "loss": (
        "total",
        "clip_frac",
        "kl",
        "entropy",
        "grad_norm",
        "ratio_mean",
        "ratio_max",
        "is_weight_mean",
        "age_weight_mean",
    ),
    "mismatch": ("logprob_abs_mean", "logprob_abs_max"),
    "ledger": ("opened", "in_flight", "parked", "ready", "trained", "rejected", "dropped"),
    "time": ("rollout_s", "score_s", "update_s", "weight_sync_s", "checkpoint_s", "step_s"),
    "throughput": ("trained_tokens_per_s",),
    "sync": ("bytes",),
    "eval": ("*/avg_at_k", "*/pass_at_k", "*/response_tokens_mean"),
}

FROZEN_KEYS: tuple[str, ...] = tuple(
    f"{stage}/{quantity}" for stage, quantities in FROZEN.items() for quantity in quantities
)

_KEY = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.\-]+)+")
_STAGES = tuple(FROZEN)


def check(key: str) -> None:
    """Raise ValueError unless `key` has the form `stage/quantity`."""
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"metric key {key!r} must have the form stage/quantity, such as reward/mean"
        )


def sort_key(key: str) -> tuple[int, str]:
    """Orders keys by stage, the frozen stages first and as they are listed here, then by name."""
    stage = key.partition("/")[0]
    return (_STAGES.index(stage) if stage in FROZEN else len(_STAGES), key)


def missing(keys: Iterable[str]) -> list[str]:
    """The frozen keys that nothing in `keys` stands for; one key is enough for a pattern."""
    present = tuple(keys)
    return [frozen for frozen in FROZEN_KEYS if not any(_matches(frozen, key) for key in present)]


def _matches(frozen: str, key: str) -> bool:
    """Whether `key` is the frozen key, `*` standing for any text without a slash."""
    return re.fullmatch(re.escape(frozen).replace(r"\*", "[^/]+"), key) is not None
