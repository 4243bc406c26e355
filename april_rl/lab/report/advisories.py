"""Advice about a run in words, the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp
from statistics import fmean

from april_rl.config.choices import SAMPLE_BY_SAMPLE
from april_rl.lab.report.bands import departure_line, departures
from april_rl.lab.report.gains import NUM_FILES, Gains
from april_rl.lab.report.learning_advice import learning_advice
from april_rl.lab.report.recorded_run import NO_SMALL_BATCHES, read_cost
from april_rl.lab.report.run_files import Row, RunFiles
from april_rl.lab.simulator.length_statistics import waitless_staleness
from april_rl.lab.simulator.recorded_lengths import RecordingError
from april_rl.run.tracking.signal_watch import NUM_SILENT, SignalWatch

_WORTH_SAYING = 1.1  # a predicted gain above this is reported
_LONG_TAIL = 0.2  # difference between share of the time and share of the samples
_MANY = 0.02  # share of samples without a reward
_TRUNCATED = 0.2
_DISPERSION = 1.25  # ratio of standard deviations; 1 is a random draw
_PREEMPTED = 0.01  # share of the samples
_PREFILLED_AGAIN = 0.05  # share of the rollouts' time
# Share of the KV cache in use at which parked samples give theirs up: room is left for the longest
# response and a block for each slot, which in a small cache is up to half of it.
_FULL_CACHE = 0.5
_SLOW_REWARD = 0.1  # share of the rollouts' time
_FEW_STEPS = 10  # steps over which the entropy is averaged; single batches vary by a half
# Below the first, in nats, the policy has e^0.05 = 1.05 tokens to choose from. Below the second
# Skywork-OR1 (arXiv 2505.22312) adds a bonus; some policies begin there, so that it counts as a
# collapse only after a fall to a fifth of the entropy at the beginning.
_CERTAIN, _LOW, _FALL = 0.05, 0.2, 0.2
_SEVERAL, _MOST_TURNS = 1.5, 0.8
_FASTER_REWARD = (
    "Use a faster reward, or run more of it in parallel: reward.num_processes, or its argument "
    "concurrency."
)
_FASTER_ENVIRONMENT = (
    "An environment takes {step_s:.1f} s to answer a turn (environment/step_s): make it faster, or "
    "give it more cores."
)


def advisories(run: RunFiles, gains: Gains | None) -> list[str]:
    """Return advice on what to change, the most useful first; none for a run without a problem."""
    return [
        *_departure(run),
        *_failures(run),
        *_slow_reward(run),
        *_contexts(run),
        *_signal(run),
        *_entropy(run),
        *learning_advice(run),
        *(_tail(run, gains) if gains and not run.is_tail_missing else ()),
        *_staleness(run),
        *_engines(run),
        *_learning(run),
    ]


def _departure(run: RunFiles) -> Iterator[str]:
    if found := departures(run.steps):
        why = f"python -m april_rl why {run.run_dir}"
        is_recorded = bool(run.setting("trainer.record_steps"))
        needed = "" if is_recorded else ", if it is run again with trainer.record_steps=all"
        yield f"At {departure_line(found)}. {why} tests what explains it{needed}."


def percent(value: float) -> str:
    """Return a share as a percentage, with one decimal below 10 %."""
    return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"


def _failures(run: RunFiles) -> Iterator[str]:
    errors = run.total("reward/errors")
    scored = max(errors, run.scored_samples)
    if errors > _MANY * scored:
        yield (
            f"The reward failed on {percent(errors / scored)} of the samples; their groups were "
            "dropped. See reward/errors, reward/timeouts and reward/crashes in metrics.jsonl."
        )


def _slow_reward(run: RunFiles) -> Iterator[str]:
    waited_s, rollout_s = run.total("time/score_s"), run.total("rollout/time_s")
    if waited_s <= _SLOW_REWARD * rollout_s:
        return
    step_s = run.mean("environment/step_s")
    what, advice = "rewards", _FASTER_REWARD
    if step_s is not None:
        what, advice = "rewards and environments", _FASTER_ENVIRONMENT.format(step_s=step_s)
    yield (
        f"Rollouts wait for {what} for {percent(waited_s / rollout_s)} of their time "
        f"({waited_s / len(run.steps):.1f} s a step), while no engine computes (time/score_s). "
        f"{advice}"
    )


def _contexts(run: RunFiles) -> Iterator[str]:
    contexts, turns = run.mean("environment/contexts_mean"), run.mean("environment/turns_mean")
    if contexts and turns and contexts > _SEVERAL and contexts > _MOST_TURNS * turns:
        yield (
            f"The agent begins a new context with nearly every request: {contexts:.1f} contexts in "
            f"{turns:.1f} turns (environment/contexts_mean). If an early message changes, such as "
            "the time of day, leave it out: training reads all of it again."
        )


def _signal(run: RunFiles) -> Iterator[str]:
    advantage = run.setting("algorithm.advantage")
    shares = [] if advantage in SAMPLE_BY_SAMPLE else run.series("reward/no_signal_frac")
    signal = SignalWatch(advantage)
    for step, share in shares:
        signal.add(step, share)
    if signal.num_steps >= NUM_SILENT:
        yield signal.advice
    elif shares and (mean := fmean(share for _, share in shares[len(shares) // 2 :])) > 0.5:
        is_replaced = run.setting("algorithm.dynamic_sampling")
        yield f"{percent(mean)} of the groups have no signal in the second half of the run" + (
            " and are replaced: easier or harder prompts, or more samples of each, cost less."
            if is_replaced
            else "; algorithm.dynamic_sampling=true would replace them."
        )


def _entropy(run: RunFiles) -> Iterator[str]:
    values = run.values("loss/entropy")
    if not values:
        return
    first, last = fmean(values[:_FEW_STEPS]), fmean(values[-_FEW_STEPS:])
    if last < _CERTAIN or (last < _LOW and last < _FALL * first):
        yield (
            f"Entropy has collapsed: {last:.3f} nats at the end of the run, {first:.3f} at its "
            f"beginning (loss/entropy). A token has {exp(last):.2f} alternatives, itself included, "
            "so the samples of a group hardly differ and little more is learned: continue from "
            "an earlier checkpoint with a lower optimizer.lr or with algorithm.entropy_target "
            "(docs/trouble.md)."
        )


def _tail(run: RunFiles, gains: Gains) -> Iterator[str]:
    own = round(run.mean("rollout/over_sampling_factor", late=True) or 1.0, 2)
    gain_now = gains.by_factor.get(own, 1.0) if own > 1 else 1.0
    best, gain = max(gains.by_factor.items(), key=lambda each: each[1], default=(own, gain_now))
    waiting, samples = gains.tail
    if waiting - samples < _LONG_TAIL:
        yield "Response lengths have hardly any tail, so over-sampling gains little" + (
            f": a synchronous rollout waits {percent(waiting)} of its time for the last "
            f"{percent(samples)} of its samples (by the simulator)."
            if samples
            else "."
        )
        return
    text = (
        f"{percent(waiting)} of a synchronous rollout would wait for the last {percent(samples)} "
        "of its samples"
    )
    if own > 1:
        text += f"; α = {own:g}, as run, gives {gain_now - 1:+.0%} samples/s over it"
    if gain > _WORTH_SAYING * gain_now:
        text += f"; α = {best:g} would give {gain / gain_now - 1:+.0%} over this run"
    text += " (by the simulator, with this run's lengths and engine cost)."
    if own > 1 and run.setting("rollout.refill"):
        text += f" {NO_SMALL_BATCHES}"
    yield text


def _staleness(run: RunFiles) -> Iterator[str]:
    cap = run.number("rollout.max_staleness")
    oldest = run.values("staleness/age_max")
    oldest = oldest[len(oldest) // 2 :]
    at_cap = sum(age >= cap for age in oldest) / len(oldest) if oldest and cap else 0.0
    if at_cap > 0.5:
        yield (
            f"The staleness cap binds: in {percent(at_cap)} of the later steps a token of age "
            f"{cap:g} was trained, so steps wait for their oldest groups, with "
            f"{percent(run.mean('rollout/occupancy', late=True) or 0.0)} of the slots in use. "
            + _larger_cap(run)
        )
    masked, trained = run.total("staleness/masked_tokens"), run.total("ledger/trained")
    if masked and trained:
        yield f"{masked:,.0f} tokens were older than the cap and had no loss weight."


def _larger_cap(run: RunFiles) -> str:
    own = run.mean("rollout/over_sampling_factor", late=True)
    longest = max(run.values("rollout/response_tokens_max"), default=0.0)
    mean = run.mean("rollout/response_tokens_mean", late=True)
    free = waitless_staleness(own, longest=longest, mean=mean) if own and mean else 0
    if free <= run.number("rollout.max_staleness"):  # tools make samples older, too
        return "A larger rollout.max_staleness or a smaller α avoids the wait."
    return (
        f"With α = {own:g} and responses of at most {longest:g} tokens, {mean:.0f} on average, no "
        f"step waits at rollout.max_staleness={free} (α · longest ÷ mean). The gain is shown by "
        f"python -m april_rl simulate --run {run.run_dir} --alpha {own:g} --max-staleness {free}."
    )


def _engines(run: RunFiles) -> Iterator[str]:
    rows = _reprefills(run)
    again = _reprefill_share(run, rows)
    if again > _PREFILLED_AGAIN:
        yield (
            f"{percent(again)} of the rollouts went into prefilling parked samples again (by the "
            f"engine's fitted cost); {_spares_prefill(run, rows)}"
        )
    preempted = run.total("rollout/preempted_samples")
    if preempted > _PREEMPTED * run.samples_per_step * len(run.steps):
        yield (
            f"Running samples lost their KV cache {preempted:,.0f} times: it is too small for the "
            "slots. Give it more memory or reduce α."
        )
    failed = run.total("rollout/failed_attempts")
    if failed:
        yield (
            f"Engines failed {failed:,.0f} attempts at a response, with log-probabilities that are "
            "not finite, no token or an error (docs/trouble.md)."
        )
    truncated = run.mean("rollout/truncated_frac", late=True) or 0.0
    if truncated > _TRUNCATED:
        yield (
            f"{percent(truncated)} of the responses are cut off by rollout.max_response_tokens="
            f"{run.setting('rollout.max_response_tokens')}."
        )


def _reprefills(run: RunFiles) -> list[Row]:
    """Return the steps that prefilled parked samples again, without the first steps after a resume
    of a run that keeps KV caches: these caches ended with the earlier process.
    """
    rows = [row for row in run.rows if row.get("rollout/reprefill_tokens")]
    if run.total("rollout/kept_samples"):
        return [row for row in rows if row.get("rollout/kept_samples")]
    return [row for row in rows if _is_full(row)] if _is_keeping(run) else rows


def _is_keeping(run: RunFiles) -> bool:
    return bool(run.total("rollout/kept_samples")) or run.setting("rollout.resume") == "keep"


def _is_full(row: Row) -> bool:
    used = row.get("rollout/kv_cache_frac") or 0.0
    return used >= _FULL_CACHE or bool(row.get("rollout/preempted_samples"))


def _spares_prefill(run: RunFiles, rows: Sequence[Row]) -> str:
    """Return the change that would keep the KV caches of parked samples."""
    if not _is_keeping(run):
        return "rollout.resume=keep, with engines that stay awake, saves that."
    if any(_is_full(row) for row in rows):
        return "their KV cache made room for running ones: give it more memory, or reduce α."
    return "their KV cache was not kept, although it had room (rollout/kept_samples)."


def _reprefill_share(run: RunFiles, rows: Sequence[Row]) -> float:
    """Return the share of the engines' time in rollouts that resumed samples needed in these steps
    before they could continue; 0 if the timelines lack the cost.
    """
    tokens = sum(row.get("rollout/reprefill_tokens") or 0.0 for row in rows)
    total_s = run.total("rollout/time_s") * run.num_engines
    if not tokens or not total_s:
        return 0.0
    try:
        cost = read_cost(run.run_dir, num_files=NUM_FILES)
    except RecordingError:
        return 0.0
    return tokens * cost.prefill_token_s / total_s


def _learning(run: RunFiles) -> Iterator[str]:
    limit, mismatch = run.number("learner.max_mismatch"), run.mean("mismatch/logprob_abs_mean")
    if limit and mismatch and mismatch > limit:
        yield (
            f"Engine and learner disagree by {mismatch:.3f} nats on tokens of equal weights, "
            f"more than learner.max_mismatch={limit:g}."
        )
    dispersion = run.length_bias.dispersion if run.length_bias else None
    if dispersion and dispersion > _DISPERSION and not run.is_tail_missing:
        yield (
            f"Batches are not like random draws: their mean length deviates {dispersion:.1f} times "
            "as far from that of neighbouring steps as a random draw would. A smaller α, or a "
            "larger rollout.max_staleness, makes them more alike (docs/experiments.md)."
        )
