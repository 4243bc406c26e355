"""The parts of tools/gpu_acceptance.py that are whole runs of `python -m april_rl.train`: the smoke
recipe, over-sampling factors, asynchronous scheduling, kept KV caches, several workers.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from acceptance_session import Measured, Row, Session, SkippedError, check_settings

from april_rl.tracking.metrics_file import read_metrics

_MISMATCH = "mismatch/logprob_abs_mean"
_STEPS = 10
_CLEAR_GAIN = 1.05  # a smaller ratio of two runs is taken for noise
# Extra settings of runs of tools/bench.py step; on a GPU the model has 0.6 B parameters.
_ON_GPU = (
    *("runtime.device=gpu", "runtime.num_workers=1", "engine.cuda_graphs=false"),
    *("engine.gpu_memory_utilization=0.3", "learner.activation_checkpointing=true"),
)
_ON_CPU = ("engine.kv_cache_gib=0.25", "runtime.threads=1")


def smoke(session: Session) -> Measured:
    """Ten steps of qwen3_0_6b_smoke, with random weights of that size where there is no hub."""
    settings, weights = _smoke_settings(session)
    run_dir = session.folder / "smoke"
    shutil.rmtree(run_dir, ignore_errors=True)
    train = [sys.executable, "-m", "april_rl.train", "+recipe=qwen3_0_6b_smoke"]
    log = session.run("smoke", *train, *settings, f"hydra.run.dir={run_dir}")
    steps = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/step_s" in row]
    late = steps[1:]
    mismatch = [row[_MISMATCH] for row in steps if row.get(_MISMATCH) is not None]
    rows = [
        Row(quantity="weights", measured=weights),
        *_sleep_rows(log),
        _step_row(late),
        Row(
            quantity="mismatch, mean and largest step",
            measured=f"{fmean(mismatch):.4f}, {max(mismatch):.4f} nats",
            expected="at most 0.05",
            meaning="engine and learner agree about the log-probabilities of the same weights",
            is_as_expected=max(mismatch) <= 0.05,
            holds_anywhere=True,
        ),
        Row(
            quantity="response tokens trained",
            measured=f"{_median(late, 'throughput/trained_tokens_per_s'):,.0f} per second",
        ),
        _controller_row(late),
        Row(
            quantity="end of a rollout",
            measured=f"{_median(late, 'rollout/stop_s'):.3f} s, of which the abort "
            f"{_median(late, 'rollout/abort_s'):.3f} s",
            expected="at most 0.5 s",
            meaning="samples that are not needed yet are aborted and parked",
            is_as_expected=_median(late, "rollout/stop_s") <= 0.5,
        ),
    ]
    values = {"mismatch": mismatch, "weights": weights, "steps": len(steps)}
    return Measured(rows=rows, values=values)


def _smoke_settings(session: Session) -> tuple[list[str], str]:
    """Return the overrides of the recipe, and a description of its weights."""
    common = [f"trainer.num_steps={_STEPS}", "tracking.wandb=disabled"]
    hub: dict[str, str] = {"without_hub": "on CPU the model is tiny"}
    if session.is_gpu:
        hub = session.found("hub", "acceptance_device.py", "hub")
    if not hub["without_hub"]:
        return [*common, "evaluation.max_prompts=50"], "Qwen/Qwen3-0.6B, GSM8K"
    rows = session.folder / "questions.jsonl"
    questions = (
        {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b}\n#### {a + b}"}
        for a in range(32)
        for b in range(32)
    )
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    own = [f"model.path={session.model()}", f"data.path={rows}", "~evaluation.sets.gsm8k"]
    # Rewards have to differ for an update to do something, and random weights answer nothing right.
    own += ["reward.function=april_rl.rehearsal.noise:even_sum", "rollout.max_response_tokens=512"]
    if not session.is_gpu:
        own[-1] = "rollout.max_response_tokens=96"
        own += ["runtime.device=cpu", "trainer.num_groups=4", "rollout.group_size=4"]
        # Its tokens are characters, and it has no chat template.
        own += ["data.template=plain", "~data.chat_template_kwargs.enable_thinking"]
        own += ["learner.max_tokens=2048", *_ON_CPU]
    return [*common, *own], f"random; {hub['without_hub']}"


def _sleep_rows(log: Path) -> list[Row]:
    """Return what the run printed about engine.sleep=auto, if anything."""
    said = [line for line in log.read_text().splitlines() if line.startswith("engine.sleep=auto: ")]
    return [Row(quantity="engine.sleep=auto", measured=line.split(": ", 1)[1]) for line in said[:1]]


def _step_row(steps: Sequence[Mapping[str, Any]]) -> Row:
    total_s = sum(row["time/step_s"] for row in steps)
    parts = {"rollout": "rollout_s", "update": "update_s", "weight sync": "weight_sync_s"}
    shares = {name: sum(row[f"time/{key}"] for row in steps) for name, key in parts.items()}
    shown = ", ".join(f"{name} {100 * s / total_s:.0f} %" for name, s in shares.items())
    return Row(
        quantity="step",
        measured=f"{_median(steps, 'time/step_s'):.2f} s: {shown}",
        expected="the rollout takes most of it",
        meaning="what over-sampling shortens is the rollout; sync and update are below",
        is_as_expected=shares["rollout"] == max(shares.values()),
    )


def _controller_row(steps: Sequence[Mapping[str, Any]]) -> Row:
    share = sum(r["rollout/controller_s"] for r in steps) / sum(r["rollout/time_s"] for r in steps)
    return Row(
        quantity="controller, of the rollout",
        measured=f"{100 * share:.1f} %",
        expected="at most 5 %",
        meaning="if more: ticks are too short for this engine",
        setting="" if share <= 0.05 else "rollout.tick_steps=16",
        is_as_expected=share <= 0.05,
    )


def _median(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return median(row[key] for row in steps)


def alpha(session: Session) -> Measured:
    """α 1, 1.5 and 2 on a model whose responses have a long tail."""
    rows = _bench_step(session, "alpha")
    first = rows[0]
    tail = first["response_tokens_p99"] / first["response_tokens_mean"]
    lengths = f"mean {first['response_tokens_mean']:.0f}, 99th percentile {tail:.1f} means"
    table = [Row(quantity="response tokens", measured=lengths)]
    for row in rows[1:]:
        table.append(_gain_row(row, first, least=1.2))
    best = max(rows, key=lambda row: row["trained_tokens_per_s"])
    factor = best["over_sampling_factor"]
    setting = f"rollout.over_sampling_factor={factor:g}"
    setting += " rollout.refill=false" if best is first else ""
    table.append(
        Row(
            quantity="fastest",
            measured=best["mode"],
            meaning="for lengths like these, by a few steps after the first three; "
            "rollout.over_sampling_factor=auto finds it for yours",
            setting=setting,
        )
    )
    return Measured(rows=table, values=_values(rows))


def asynchronous(session: Session) -> Measured:
    """engine.async_scheduling off and on."""
    modes = {
        "off": ("engine.async_scheduling=false",),
        "on": ("engine.async_scheduling=true",),
    }
    rows = _bench_step(session, "async", modes)
    return Measured(rows=_against_first(rows, modes), values=_values(rows))


def keep(session: Session) -> Measured:
    """rollout.resume: re-prefill where the engine sleeps, where it stays awake, and keep."""
    modes = {
        "sleeps, prefilled again": ("rollout.resume=reprefill", "engine.sleep=always"),
        "awake, prefilled again": ("rollout.resume=reprefill", "engine.sleep=never"),
        "awake, kept": ("rollout.resume=keep", "engine.sleep=never"),
    }
    if not session.is_gpu:  # where no engine sleeps
        del modes["sleeps, prefilled again"]
    rows = _bench_step(session, "keep", modes)
    prefilled = [f"{row['reprefill_tokens']:,.0f} tokens a step ({row['mode']})" for row in rows]
    shown = Row(quantity="prefilled a second time", measured=", ".join(prefilled))
    return Measured(rows=[shown, *_against_first(rows, modes)], values=_values(rows))


def workers(session: Session) -> Measured:
    """One worker against one for each device."""
    count = session.machine.count if session.is_gpu else 2
    if count < 2:
        raise SkippedError("there is one device")
    modes = {str(n): (f"runtime.num_workers={n}",) for n in (1, count)}
    rows = _bench_step(session, "workers", modes, num_groups=8 * count if session.is_gpu else 4)
    one, all_of_them = rows
    speedup = all_of_them["of_first"]
    row = Row(
        quantity=f"{count} workers against one, the same batch",
        measured=f"{speedup:.2f} × the trained tokens/s; weight sync "
        f"{100 * all_of_them['weight_sync_frac']:.0f} % of the step "
        f"(one: {100 * one['weight_sync_frac']:.0f} %)",
        expected=f"at least {0.5 * count:g} ×",
        meaning="less than the number of devices: a step ends with its longest responses"
        if session.is_gpu
        else "here they share the same cores",
        is_as_expected=speedup >= 0.5 * count,
    )
    return Measured(rows=[row], values=_values(rows))


def _bench_step(
    session: Session,
    name: str,
    modes: Mapping[str, tuple[str, ...]] | None = None,
    *,
    num_groups: int | None = None,
) -> list[dict[str, Any]]:
    """Run `tools/bench.py step`; raises SkippedError when the configuration refuses a mode."""
    for settings in (modes or {}).values():
        check_settings(_ON_GPU if session.is_gpu else _ON_CPU, settings)
    sizes = {"num-groups": 8, "group-size": 8, "max-response-tokens": 512, "steps": _STEPS}
    if not session.is_gpu:
        sizes = {"num-groups": 4, "group-size": 4, "max-response-tokens": 256, "steps": 6}
    sizes["num-groups"] = num_groups or sizes["num-groups"]
    args: list[object] = ["--rounds", 1, "--warmup-steps", 3, "--model", session.model()]
    args += [word for key, value in sizes.items() for word in (f"--{key}", value)]
    args += ["--set", *(_ON_GPU if session.is_gpu else _ON_CPU)]
    for mode, settings in (modes or {}).items():
        args += ["--mode", mode, *settings]
    rows: list[dict[str, Any]] = session.found(name, "bench.py", "step", *args)
    return rows


def _against_first(
    rows: Sequence[dict[str, Any]], modes: Mapping[str, tuple[str, ...]]
) -> list[Row]:
    """Compare the other modes with the first, and return the settings of the fastest."""
    first, *others = rows
    best = max(others, key=lambda row: row["of_first"])
    is_better = best["of_first"] >= _CLEAR_GAIN
    chosen = best if is_better else first
    least = f"{100 * (_CLEAR_GAIN - 1):.0f} %"
    result = Row(
        quantity="result",
        measured=best["mode"] if is_better else f"{first['mode']}, as nothing gains {least}",
        meaning=f"a gain below {least} is taken for noise",
        setting=" ".join(modes[chosen["mode"]]),
    )
    return [*(_gain_row(row, first, least=1.0) for row in others), result]


def _gain_row(row: dict[str, Any], first: dict[str, Any], *, least: float) -> Row:
    return Row(
        quantity=f"{row['mode']}, against {first['mode']}",
        measured=f"{row['of_first']:.2f} × the trained tokens/s",
        expected=f"at least {least:g} ×",
        meaning=f"slots in use {100 * row['occupancy']:.0f} % of the time "
        f"({first['mode']}: {100 * first['occupancy']:.0f} %), the rollout is "
        f"{100 * row['rollout_frac']:.0f} % of a step ({100 * first['rollout_frac']:.0f} %)",
        is_as_expected=row["of_first"] >= least,
    )


def _values(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"modes": rows, "mismatch": [value for row in rows for value in row["mismatch"]]}
