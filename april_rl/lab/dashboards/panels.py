"""Contents of the dashboards: sections of panels, and metrics without a panel, with the reason.

A key with a `*` stands for all metrics of its family (april_rl/tracking/keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from april_rl.tracking.keys import RUN_TIME, TRAINED_TOKENS

STEP = "step"
SWEPT = "rollout.over_sampling_factor"  # the setting that the sweep dashboard compares


class Panel(NamedTuple):
    """A line plot of metrics over an axis."""

    title: str
    keys: tuple[str, ...]
    axis: str = STEP


class PanelSection(NamedTuple):
    """A titled row of panels."""

    name: str
    panels: tuple[Panel, ...]


def _under(stage: str, *quantities: str) -> tuple[str, ...]:
    return tuple(f"{stage}/{quantity}" for quantity in quantities)


SECTIONS = (
    PanelSection(  # keys.FIRST_LOOK
        "overview",
        (
            Panel("reward", ("reward/mean",)),
            Panel("held-out accuracy", _under("eval", "*/avg_at_k", "*/pass_at_k", "*/maj_at_k")),
            Panel("response length", ("rollout/response_tokens_mean",)),
            Panel("tokens per second", ("rollout/generated_tokens_per_s",)),
            Panel("share of off-policy tokens", ("staleness/off_policy_token_frac",)),
            Panel("mean mismatch of engine and learner", ("mismatch/logprob_abs_mean",)),
            Panel("mean entropy", ("loss/entropy",)),
            Panel("time of a step", ("time/step_s",)),
        ),
    ),
    PanelSection(
        "reward",
        (
            Panel("reward over trained tokens", ("reward/mean",), TRAINED_TOKENS),
            Panel("reward over time", ("reward/mean",), RUN_TIME),
            Panel("held-out accuracy over time", ("eval/*/avg_at_k",), RUN_TIME),
            Panel("trained tokens per second", ("throughput/trained_tokens_per_s",)),
            Panel("reward by function and source", ("reward/*/mean", "source/*/reward_mean")),
        ),
    ),
    PanelSection(
        "rollout",
        (
            Panel(
                "response tokens",
                _under("rollout", *(f"response_tokens_{q}" for q in ("mean", "p50", "p95", "p99"))),
            ),
            Panel("longest response", ("rollout/response_tokens_max",)),
            Panel("truncated", ("rollout/truncated_frac",)),
            Panel("held-out response tokens", ("eval/*/response_tokens_mean",)),
            Panel("generated tokens per second", ("rollout/generated_tokens_per_s",)),
            Panel("finished samples per second", ("rollout/finished_samples_per_s",)),
            Panel("over-sampling factor", ("rollout/over_sampling_factor",)),
            Panel("resumed samples", _under("rollout", "resumed_samples", "kept_samples")),
            Panel("re-prefilled tokens", ("rollout/reprefill_tokens",)),
            Panel(
                "groups rejected and dropped",
                _under("rollout", "rejected_groups", "dropped_groups"),
            ),
            Panel("prompt tokens", ("rollout/prompt_tokens_mean",)),
        ),
    ),
    PanelSection(
        "staleness",
        (
            Panel("age of trained tokens", _under("staleness", "age_mean", "age_max")),
            Panel(
                "off-policy tokens",
                _under("staleness", "off_policy_token_frac", "old_cache_token_frac"),
            ),
            Panel("tokens by age", ("staleness/token_frac_age_*",)),
            Panel("tokens beyond the cap", ("staleness/masked_tokens",)),
            Panel("age by length of response", ("staleness/age_mean_len_*",)),
            Panel("off-policy by length", ("staleness/off_policy_token_frac_len_*",)),
        ),
    ),
    PanelSection(
        "learning",
        (
            Panel("loss", ("loss/total",)),
            Panel("entropy", ("loss/entropy",)),
            Panel("gradient norm", ("loss/grad_norm",)),
            Panel("learning rate", ("loss/lr",)),
            Panel("skipped steps", ("loss/bad_step",)),
            Panel("KL", _under("loss", "behaviour_kl", "reference_kl")),
            Panel("ratio", _under("loss", "ratio_mean", "is_weight_mean", "age_weight_mean")),
            Panel("largest ratio", ("loss/ratio_max",)),
            Panel("clipped and masked tokens", _under("loss", "clip_frac", "masked_frac")),
            Panel(
                "engine against learner", _under("mismatch", "logprob_abs_mean", "logprob_abs_max")
            ),
            Panel("spread of rewards", ("reward/std",)),
            Panel("groups without a signal", ("reward/no_signal_frac", "source/*/no_signal_frac")),
            Panel("trained groups by source", ("source/*/groups",)),
        ),
    ),
    PanelSection(
        "time",
        (
            Panel("step", ("time/step_s",)),
            Panel("phases", _under("time", "rollout_s", "update_s", "weight_sync_s", "score_s")),
            Panel("beside the step", _under("time", "checkpoint_s", "evaluation_s", "tracking_s")),
            Panel("rollout", _under("rollout", "engine_s", "controller_s", "stop_s", "abort_s")),
        ),
    ),
    PanelSection(
        "environments",
        (
            Panel("turns of a sample", _under("environment", "turns_mean", "contexts_mean")),
            Panel("tokens said by environments", ("environment/observation_tokens_mean",)),
            Panel("time of an answer", ("environment/step_s",)),
            Panel("slots empty meanwhile", ("environment/empty_slots_frac",)),
            Panel("calls made once", _under("environment", "calls", "repeated_calls")),
            Panel("failures", _under("environment", "errors", "timeouts", "deaths")),
            Panel("episodes built again or cut", _under("environment", "replays", "out_of_room")),
        ),
    ),
    PanelSection(
        "ledger",
        (
            Panel("prompts opened and trained", _under("ledger", "opened", "trained")),
            Panel("groups waiting", _under("ledger", "parked", "ready")),
            Panel("groups lost", _under("ledger", "rejected", "dropped")),
            Panel("parked tokens", ("rollout/parked_tokens",)),
            Panel(
                "failed rewards",
                _under("reward", "errors", "timeouts", "crashes", "no_scores", "soft_timeouts"),
            ),
        ),
    ),
    PanelSection(
        "engines",
        (
            Panel("occupied slots", ("rollout/occupancy",)),
            Panel("samples in flight", ("rollout/in_flight_mean",)),
            Panel("preempted samples", ("rollout/preempted_samples",)),
            Panel("attempts that an engine failed", ("rollout/failed_attempts",)),
            Panel("preempted tokens", ("rollout/preempted_tokens",)),
            Panel("share of the KV cache in use", ("rollout/kv_cache_frac",)),
            Panel("bytes in a weight sync", ("sync/bytes",)),
        ),
    ),
    PanelSection(
        "memory",
        (
            Panel("share in use", _under("memory", "gpu_used_frac", "host_used_frac")),
            Panel("peak of torch on a GPU", ("memory/gpu_peak_bytes",)),
            Panel("processes", _under("memory", "worker_rss_bytes", "controller_rss_bytes")),
            Panel("parked and ready groups", ("memory/buffer_bytes",)),
        ),
    ),
)

# Metrics, or families, without a panel.
LEFT_OUT: Mapping[str, str] = {
    RUN_TIME: "an axis",
    TRAINED_TOKENS: "an axis",
    "throughput/trained_tokens": "the rate and the total have it",
    "rollout/time_s": "time/rollout_s has it",
    "rollout/parked_groups": "ledger/parked has it",
    "rollout/ready_groups": "ledger/ready has it",
    "ledger/in_flight": "0 between steps",
    "reward/retries": "a retry that succeeds changes nothing; one that fails is in reward/errors",
    "environment/retries": "as reward/retries, of environment/errors",
    "eval/*/*_low": "the ends of intervals; tables of an evaluation have them",
    "eval/*/*_high": "the ends of intervals; tables of an evaluation have them",
    "source/*/reward/*/mean": "one line per source and function is too many for a panel",
    "checkpoint/*": "told in a line of the terminal when a checkpoint is written",
    "restart/*": "told in a line of the terminal when a run restarts",
    "histogram/*": "W&B draws histograms by itself, in a section of their own",
    **{
        f"eval/*/{quantity}": "told by the evaluation when it is not 0"
        for quantity in (
            *("truncated_frac", "errors", "left_out_prompts", "timeouts", "crashes", "no_scores"),
            *("soft_timeouts", "retries"),
        )
    },
}
