"""report.html of one run: figures, advice, time, and the timeline of a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from april_rl.lab.report import html
from april_rl.lab.report.advisories import advisories, percent
from april_rl.lab.report.charts import MAX_POINTS, average, charts
from april_rl.lab.report.gains import Gains, simulated_gains
from april_rl.lab.report.learning_charts import update
from april_rl.lab.report.planned import Planned
from april_rl.lab.report.run_files import ReportError, RunFiles, read_run
from april_rl.lab.report.sample_blocks import age_key, sample_blocks
from april_rl.lab.report.step_trace import write_step_traces
from april_rl.lab.report.timeline_chart import busy_frac, chrome_trace, timeline_spec
from april_rl.lab.report.vega import Chart
from april_rl.training.rollout.measures.timeline import Timeline

NAME = "report.html"
_OF_UPDATE = (
    "Means over the optimizer steps of each step. Entropy that falls towards 0 leaves nothing to "
    "learn from; a gradient norm or a KL that grows for many steps often comes before a fall of "
    "the reward. What to do then is in docs/trouble.md."
)


class WrittenReport(NamedTuple):
    """The page, its advice for the terminal, and the traces of profiled steps."""

    path: Path
    advice: list[str]
    traces: list[Path]


def write_report(run_dir: Path, *, plan: Path | None = None) -> WrittenReport:
    """Write report.html into a run directory, with the Chrome trace of its timeline and those of
    profiled steps; with `plan`, what it said is held against the run. Raises ReportError when it
    is not a run directory, the plan is not of this run, or the page cannot be written.
    """
    run = read_run(run_dir)
    gains = simulated_gains(run)
    advice = [*([] if plan is None else Planned.of(run, plan).lines()), *advisories(run, gains)]
    text = html.page(f"{run.name}: report", _body(run, gains, advice))
    try:
        step, timeline = run.timeline
        if timeline is not None:
            _trace_path(run_dir, step).write_text(json.dumps(chrome_trace(timeline)) + "\n")
        (run_dir / NAME).write_text(text, encoding="utf-8")
        traces = write_step_traces(run_dir)
    except OSError as error:
        raise ReportError(f"{run_dir / NAME} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{run_dir / 'profile'} cannot be read ({error}): remove it") from error
    return WrittenReport(run_dir / NAME, advice, traces)


def _trace_path(run_dir: Path, step: int) -> Path:
    return run_dir / "timeline" / f"step_{step:05d}.trace.json"


def _body(run: RunFiles, gains: Gains | None, advice: list[str]) -> Iterator[str]:
    yield f"<header><h1>{escape(run.name)}</h1><p>{escape(_what_ran(run))}</p>"
    yield f'<p class="soft">{escape(str(run.run_dir.resolve()))}</p>'
    yield html.figures(head_figures(run))
    yield html.advice(advice) + "</header>\n<main>"
    drawn = charts(run)
    for chart in drawn[:4]:
        yield html.chart_block(chart)
    of_update = update(average(run.steps, limit=MAX_POINTS))
    yield html.small_charts("The learner's update", _OF_UPDATE, of_update)
    yield from _timeline(run, gains)
    for chart in drawn[4:]:
        yield html.chart_block(chart)
    for step, samples in (run.first_samples, run.samples):
        if samples:
            yield f"<section><h2>Samples of step {step}</h2>{age_key()}{sample_blocks(samples)}"
            yield "</section>"
    yield "</main>"


def _what_ran(run: RunFiles) -> str:
    """Return the model, the data, and the progress of the run."""
    wanted = int(run.number("trainer.num_steps"))
    last = max((step for step, _ in run.series("time/step_s")), default=0)
    ended = f"all {wanted} steps" if last >= wanted else f"ended after step {last} of {wanted}"
    if last < wanted and (run.run_dir / "stall_report.txt").is_file():
        ended += ", a worker failed (stall_report.txt)"
    groups, size = run.number("trainer.num_groups"), run.number("rollout.group_size")
    return (
        f"{run.setting('model.path')} on {run.setting('data.path')}: {ended}; "
        f"{groups:g} groups of {size:g} a step, α = {run.setting('rollout.over_sampling_factor')}"
        f"{'' if run.setting('rollout.refill') else ' without refill'}, "
        f"seed {run.setting('seed')}."
    )


def head_figures(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield the figures of the head: label, value, note."""
    for name in run.evaluation_sets[:1]:
        found = run.series(f"eval/{name}/avg_at_k")
        ends = [run.series(f"eval/{name}/avg_at_k_{end}")[-1:] for end in ("low", "high")]
        interval = ", ".join(f"{value:.3f}" for end in ends for _, value in end)
        note = f"[{interval}], {found[0][1]:.3f} at step {found[0][0]}"
        yield f"avg@k, {name}", f"{found[-1][1]:.3f}", note
    if (reward := run.mean("reward/mean", late=True)) is not None:
        yield "mean reward", f"{reward:.3f}", "of the second half of the steps"
    if seconds := run.values("time/step_s"):
        rate = sum(run.trained_samples) / sum(seconds)
        yield "trained samples/s", f"{rate:.1f}", "steps with their update, without evaluations"
        yield "time of a step", f"{median(seconds):.2f} s", "median"
    if (share := run.mean("staleness/off_policy_token_frac")) is not None:
        age = run.mean("staleness/age_mean") or 0.0
        yield "off-policy tokens", percent(share), f"mean age {age:.2f}"
    for key, label in (
        ("loss/teacher_kl", "KL from the teacher, nats"),
        ("critic/explained_variance", "variance of returns that the critic explains"),
    ):
        if found := run.series(key):
            yield label, f"{found[-1][1]:.2f}", f"{found[0][1]:.2f} at step {found[0][0]}"


def _timeline(run: RunFiles, gains: Gains | None) -> Iterator[str]:
    """Yield the last saved step, and a simulated synchronous one on the same scale."""
    step, timeline = run.timeline
    if timeline is None or not timeline.stays:
        return
    shown = [timeline, *([gains.synchronous] if gains else [])]
    until_s = max(each.time_s for each in shown)
    # By the engines' counts, which are finer than the timeline's.
    occupancy = dict(run.series("rollout/occupancy")).get(step, 0.0)
    caption = (
        "Each row is a slot of an engine, each bar a sample, coloured by the age of its first "
        f"token. {_counts(timeline)} Slots were in use {percent(occupancy)} of the "
        f"time.{_length_bias(run)}"
    )
    trace = _trace_path(run.run_dir, step).name
    yield html.chart_block(
        Chart(
            id="timeline",
            title=f"Rollout of step {step}",
            caption=f"{caption} The same for Perfetto: timeline/{trace}.",
            spec=timeline_spec(timeline, until_s=until_s),
        )
    )
    if gains is None:
        return
    idle = 1 - busy_frac(gains.synchronous)
    notes = " Simulated smaller than the run, with the times of the run." * gains.is_scaled
    notes += " Real steps have longer responses, which are parked here still." * run.is_tail_missing
    yield html.chart_block(
        Chart(
            id="synchronous",
            title="The same work in a synchronous step",
            caption=f"Simulated on the lengths and the engine cost of this run: all samples of a "
            f"step start together, and its end waits for the longest. Slots are idle "
            f"{percent(idle)} of the time.{notes}",
            spec=timeline_spec(gains.synchronous, until_s=until_s, height=280),
        )
    )


def _length_bias(run: RunFiles) -> str:
    bias = run.length_bias
    if bias is None:
        return ""
    return (
        f" In the last recorded steps trained responses have {bias.trained_tokens_mean:.0f} tokens "
        f"on average, all responses to the prompts opened there {bias.opened_tokens_mean:.0f}."
    )


def _counts(timeline: Timeline) -> str:
    num = Counter(stay.outcome for stay in timeline.stays)
    finished = num["finished"] + sum(act.is_finished for act in timeline.acts)
    resumed = sum(stay.is_resumed for stay in timeline.stays)
    counts = f"{finished} samples finished, {num['parked']} were parked, {resumed} were resumed."
    if not timeline.acts:
        return counts
    mean_s = fmean(act.ended_s - act.begun_s for act in timeline.acts)
    return (
        f"{counts} In the grey rows samples wait for their environment and hold no "
        f"slot: {len(timeline.acts)} times, {mean_s:.2f} s on average."
    )
