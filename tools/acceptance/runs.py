"""The parts that are whole commands of april_rl: a certificate of numerics, the smoke recipe,
over-sampling factors, asynchronous scheduling, kept KV caches, several workers.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from acceptance.session import TOOLS, FailedError, Measured, Row, Session, SkippedError, last_words
from april_rl.run.tracking.metrics_file import read_metrics

_MISMATCH = "mismatch/logprob_abs_mean"
_MAX_MISMATCH = 0.05  # nats; the default of learner.max_mismatch
_STEPS = 10
_CLEAR_GAIN = 1.05  # a smaller ratio of two runs may be noise
# An update needs different rewards, and random weights never answer right.
_NOISE = "reward.function=april_rl.lab.rehearsal.noise:even_sum"
# Extra settings of runs of tools/bench.py step; on a GPU the model has 0.6 B parameters.
_ON_GPU = (
    *("runtime.device=gpu", "runtime.num_workers=1"),
    *("engine.gpu_memory_utilization=0.3", "learner.activation_checkpointing=true"),
)
_ON_CPU = ("engine.kv_cache_gib=0.25", "runtime.threads=1")

Modes = Mapping[str, tuple[str, ...]]
CERTIFIED: Modes = {"plain": (), "adapter": ("lora.rank=8", "lora.sync=adapter")}
ALPHAS: Modes = {
    "synchronous": ("rollout.over_sampling_factor=1", "rollout.refill=false"),
    "refill, α 1.5": ("rollout.over_sampling_factor=1.5",),
    "refill, α 2": ("rollout.over_sampling_factor=2",),
}
GRAPHS: Modes = {
    "eager": ("engine.cuda_graphs=false",),
    "CUDA graphs": ("engine.cuda_graphs=true",),
}
ASYNCHRONOUS: Modes = {
    "off, ticks of 8": ("engine.args.async_scheduling=false", "rollout.tick_steps=8"),
    "on, ticks of 8": ("engine.args.async_scheduling=true", "rollout.tick_steps=8"),
    "on, ticks of 32": ("engine.args.async_scheduling=true", "rollout.tick_steps=32"),
}
KEEP: Modes = {
    "sleeps, prefilled again": ("rollout.resume=reprefill", "engine.sleep=always"),
    "awake, prefilled again": ("rollout.resume=reprefill", "engine.sleep=never"),
    "awake, kept": ("rollout.resume=keep", "engine.sleep=never"),
}
FP8: Modes = {"16 bits": (), "FP8": ("+kv_cache=fp8", "learner.max_mismatch=9")}


def certify(session: Session) -> Measured:
    """Certify the numerics of the plain model, and with adapters that are sent alone."""
    rows: list[Row] = []
    for name, settings in CERTIFIED.items():
        folder = session.folder / f"certificate_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        command = (sys.executable, "-m", "april_rl", "certify", f"model.path={session.model()}")
        own = (*settings, *(() if session.is_gpu else _ON_CPU), f"output={folder}")
        log, _ = session.run_any(f"certify_{name}", *command, *own)
        if not (written := folder / "certificate.json").is_file():
            raise FailedError(f"{last_words(log)} ({log})")
        for row in json.loads(written.read_text("utf-8"))["rows"]:
            quantity, measured, limit = f"{name}: {row['name']}", row["found"], row["limit"]
            words = row["compared"]
            rows.append(Row(quantity, measured, limit, row["passes"], words, holds_anywhere=True))
    return Measured(
        rows, {"compared": len(rows), "failed": sum(not r.is_as_expected for r in rows)}
    )


def mismatch_row(quantity: str, values: Sequence[float]) -> Row:
    """Return a line that compares the mismatches of a run's steps with the default limit."""
    return Row(
        quantity,
        " ".join(f"{value:.2g}" for value in values) + " nats",
        f"at most {_MAX_MISMATCH}",
        max(values) <= _MAX_MISMATCH,
        "if more in the first step: engine and learner compute the model differently; if more in "
        "later steps: the engine does not get the learner's weights",
        holds_anywhere=True,
    )


def smoke(session: Session) -> Measured:
    """Run ten steps of qwen3_0_6b_smoke, with random weights of that size if there is no hub."""
    settings, weights = smoke_settings(session)
    run_dir = session.folder / "smoke"
    shutil.rmtree(run_dir, ignore_errors=True)
    train = (sys.executable, "-m", "april_rl.train", "+recipe=qwen3_0_6b_smoke")
    session.run("smoke", *train, *settings, f"hydra.run.dir={run_dir}")
    steps = [row for row in read_metrics(run_dir / "metrics.jsonl") if "time/step_s" in row]
    mismatch = [found for row in steps if (found := row.get(_MISMATCH)) is not None]
    late: Sequence[Mapping[str, Any]] = steps[1:]
    totals = {key: sum(row[key] for row in late) for key in _SMOKE_TIMES}
    total_s, rollout_s = totals["time/step_s"], totals["time/rollout_s"]
    shares = ", ".join(
        f"{name.replace('_', ' ')} {100 * totals[f'time/{name}_s'] / total_s:.0f} %"
        for name in ("rollout", "update", "weight_sync")
    )
    shared_s = (total_s - rollout_s - totals["time/update_s"]) / len(late)
    controller = totals["rollout/controller_s"] / totals["rollout/time_s"]
    stop_s = median(row["rollout/stop_s"] for row in late)
    rows = [
        Row("weights", weights),
        Row(
            "step",
            f"{total_s / len(late):.2f} s: {shares}",
            "the rollout takes most of it",
            rollout_s > total_s / 2,
            "over-sampling shortens the rollout",
        ),
        Row(
            "neither rollout nor update",
            f"{shared_s:.2f} s a step",
            "at most 4 s",
            shared_s <= 4,
            "what every step pays for one device that learner and engine share",
        ),
        mismatch_row("mismatch of each step", mismatch),
        Row(
            "controller, of the rollout",
            f"{100 * controller:.1f} %",
            "at most 5 %",
            controller <= 0.05,
            "if more: ticks are too short for this engine",
            "" if controller <= 0.05 else "rollout.tick_steps=16",
        ),
        Row(
            "end of a rollout",
            f"{stop_s:.3f} s",
            "at most 0.5 s",
            stop_s <= 0.5,
            "samples that are not needed yet are aborted and parked",
        ),
    ]
    return Measured(rows, {"mismatch": mismatch, "weights": weights, "steps": len(steps)})


_SMOKE_TIMES = (
    *("time/step_s", "time/rollout_s", "time/update_s", "time/weight_sync_s"),
    *("rollout/controller_s", "rollout/time_s"),
)


def smoke_settings(session: Session) -> tuple[list[str], str]:
    """Return the overrides of the recipe, and a description of its weights."""
    common = [f"trainer.num_steps={_STEPS}", "tracking.wandb=disabled"]
    without_hub = "on CPU the model is tiny"
    if session.is_gpu:
        without_hub = session.measure("device.hub")["without_hub"]
    if not without_hub:
        return [*common, "evaluation.max_prompts=50"], "Qwen/Qwen3-0.6B, GSM8K"
    rows = session.folder / "questions.jsonl"
    questions = (
        {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b}\n#### {a + b}"}
        for a in range(32)
        for b in range(32)
    )
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    own = [f"model.path={session.model()}", f"data.path={rows}", "~evaluation.sets.gsm8k", _NOISE]
    if session.is_gpu:
        own.append("rollout.max_response_tokens=512")
    else:
        own += ["rollout.max_response_tokens=96", "trainer.num_groups=4", "rollout.group_size=4"]
        # The model's tokens are characters, and it has no chat template.
        own += ["data.template=plain", "~data.chat_template_kwargs.enable_thinking"]
        own += ["runtime.device=cpu", "learner.max_tokens=2048", *_ON_CPU]
    return [*common, *own], f"random; {without_hub}"


def alpha(session: Session) -> Measured:
    """Compare α 1, 1.5 and 2 on a model whose responses have a long tail."""
    return _compare(session, "alpha", ALPHAS, least=1.2)


def graphs(session: Session) -> Measured:
    """Compare engine.cuda_graphs off and on."""
    if not session.is_gpu:
        raise SkippedError("there are no CUDA graphs without a GPU")
    return _compare(session, "graphs", GRAPHS)


def asynchronous(session: Session) -> Measured:
    """Compare engine.args.async_scheduling off and on, and longer ticks."""
    return _compare(session, "async", ASYNCHRONOUS)


def keep(session: Session) -> Measured:
    """Compare re-prefill with a sleeping and an awake engine, and rollout.resume=keep."""
    modes = dict(KEEP)
    if not session.is_gpu:  # no engine sleeps there
        del modes["sleeps, prefilled again"]
    return _compare(session, "keep", modes)


def fp8(session: Session) -> Measured:
    """Compare keys and values of 16 and of eight bits; any mismatch is allowed, and shown."""
    return _compare(session, "fp8", FP8)


def workers(session: Session) -> Measured:
    """Compare one worker with one for each device."""
    count = session.machine.count if session.is_gpu else 2
    if count < 2:
        raise SkippedError("there is one device")
    modes = {f"workers: {n}": (f"runtime.num_workers={n}",) for n in (1, count)}
    num_groups = 8 * count if session.is_gpu else 4  # both use the same batch
    return _compare(session, "workers", modes, least=0.5 * count, num_groups=num_groups)


def _bench_step(session: Session, name: str, modes: Modes, **changes: int) -> list[dict[str, Any]]:
    """Run `tools/bench.py step`."""
    sizes = {"num_groups": 8, "group_size": 8, "max_response_tokens": 512, "steps": _STEPS}
    if not session.is_gpu:
        sizes = {"num_groups": 4, "group_size": 4, "max_response_tokens": 256, "steps": 6}
    sizes = {"rounds": 1, "warmup_steps": 3, **sizes, **changes}
    args: list[object] = ["--model", session.model()]
    args += [word for key, n in sizes.items() for word in (f"--{key.replace('_', '-')}", n)]
    args += ["--set", *(_ON_GPU if session.is_gpu else _ON_CPU)]
    for mode, settings in modes.items():
        args += ["--mode", mode, *settings]
    runs: list[dict[str, Any]] = session.run_json(name, TOOLS / "bench.py", "step", *args)
    return runs


def _compare(
    session: Session, name: str, modes: Modes, *, least: float = 1.0, **changes: int
) -> Measured:
    """Compare modes with the first, and return the settings of the fastest."""
    first, *others = runs = _bench_step(session, name, modes, **changes)
    best = max(others, key=lambda run: run["of_first"])
    is_better = best["of_first"] >= _CLEAR_GAIN
    chosen = best["mode"] if is_better else first["mode"]
    tail = first["response_tokens_p99"] / first["response_tokens_mean"]
    lengths = f"mean {first['response_tokens_mean']:.0f}, 99th percentile {tail:.1f} means"
    noise = f"{100 * (_CLEAR_GAIN - 1):.0f} %"
    result = Row(
        "result",
        chosen if is_better else f"{chosen}, as nothing gains {noise}",
        meaning=f"for lengths like these; a gain below {noise} is taken for noise",
        setting=" ".join(modes[chosen]),
    )
    gains = [_gain_row(run, first, least=least) for run in others]
    return Measured([Row("response tokens", lengths), *gains, result], {"modes": runs})


def _gain_row(run: dict[str, Any], first: dict[str, Any], *, least: float) -> Row:
    return Row(
        f"{run['mode']}, against {first['mode']}",
        f"{run['of_first']:.2f} × the trained tokens/s",
        f"at least {least:g} ×",
        run["of_first"] >= least,
        f"slots in use {_change('{:.0%}', first, run, 'occupancy')}, the rollout's share of a step "
        f"{_change('{:.0%}', first, run, 'rollout_frac')}, tokens prefilled again "
        f"{_change('{:,.0f}', first, run, 'reprefill_tokens')}, mismatch at most "
        f"{max(run['mismatch'], default=0.0):.2g} nats",
    )


def _change(form: str, first: dict[str, Any], run: dict[str, Any], key: str) -> str:
    return f"{form.format(first[key])} → {form.format(run[key])}"
