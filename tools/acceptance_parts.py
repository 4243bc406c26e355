"""The parts of tools/gpu_acceptance.py that measure one thing by itself: the machine, the GPU
tests, sleep and sync, ticks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any
from xml.etree import ElementTree

from acceptance_session import PROJECT, FailedError, Measured, Row, Session, SkippedError

_MAX_MISMATCH = 0.05  # nats; the default of learner.max_mismatch


def environment(session: Session) -> Measured:
    """Versions, memory, and the two speeds that others are held against."""
    found = session.found("environment", "acceptance_device.py", "environment")
    packages = ", ".join(f"{name} {v}" for name, v in found["packages"].items() if v)
    versions = f"commit {found['commit']}, Python {found['python']}, {packages}"
    rows = [
        Row(quantity="device", measured=f"{session.machine.count} × {found['device']}"),
        Row(quantity="versions", measured=versions + _of_driver(found)),
        Row(
            quantity="host",
            measured=f"{found['cores']} cores, {found['host_gib']:.0f} GiB of free memory",
        ),
        _product_row(found),
        Row(
            quantity="copy within the memory",
            measured=f"{found['copy_gb_s']:,.0f} GB/s, read and written",
            meaning="the yardstick of the weight sync below",
        ),
    ]
    return Measured(rows=[*rows, *(_gpu_rows(found) if session.is_gpu else [])], values=found)


def _of_driver(found: dict[str, Any]) -> str:
    return f", CUDA or HIP {found['cuda']}" if found["cuda"] else ""


def _product_row(found: dict[str, Any]) -> Row:
    """Compare the bfloat16 product with the data sheet if the device is listed."""
    measured, sheet = found["product_tflops"], found["sheet_tflops"]
    quantity = "bfloat16 product"
    if sheet is None:
        meaning = "not in tools/bench_device.py: no data sheet to compare with"
        return Row(quantity=quantity, measured=f"{measured:,.3g} TFLOP/s", meaning=meaning)
    return Row(
        quantity=quantity,
        measured=f"{measured:,.0f} TFLOP/s, {100 * measured / sheet:.0f} % of {sheet:,.0f}",
        expected="at least 60 % of the data sheet",
        meaning="if less: the device is shared, capped in power, or hot",
        is_as_expected=measured >= 0.6 * sheet,
    )


def _gpu_rows(found: dict[str, Any]) -> list[Row]:
    free, total = found["free_gib"], found["total_gib"]
    slower = min(found["to_host_gb_s"], found["from_host_gb_s"])
    return [
        Row(
            quantity="memory",
            measured=f"{free:.1f} of {total:.1f} GiB free",
            expected="at least 95 % free",
            meaning="if less: another process uses the device",
            is_as_expected=free >= 0.95 * total,
        ),
        Row(
            quantity="pinned copies to the host, back",
            measured=f"{found['to_host_gb_s']:.0f}, {found['from_host_gb_s']:.0f} GB/s",
            expected="at least 10 GB/s",
            meaning="what learner.offload pays with",
            is_as_expected=slower >= 10,
        ),
    ]


def gpu_tests(session: Session) -> Measured:
    """`pytest -m gpu`; without vLLM, the files that do not import the engine."""
    if session.machine.without_pytest:
        raise SkippedError(session.machine.without_pytest)
    files = sorted(
        path for path in (PROJECT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    left_out = [path.name for path in files if "april_rl.engine" in path.read_text()]
    if not session.machine.without_engine:
        left_out = []
    report = session.folder / "logs" / "gpu_tests.xml"
    report.unlink(missing_ok=True)
    asked = [path for path in files if path.name not in left_out]
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}"]
    log, status = session.run_any("gpu_tests", *pytest, *asked)
    if not report.is_file():
        raise FailedError(f"pytest ended with status {status} before its first test ({log})")
    return _of_report(ElementTree.parse(report).getroot(), left_out)


def _of_report(report: ElementTree.Element, left_out: Sequence[str]) -> Measured:
    cases = list(report.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [reason for case in cases if (reason := case.find("skipped")) is not None]
    if failed:
        names = ", ".join(case.get("name", "") for case in failed)
        raise FailedError(f"{len(failed)} of {len(cases)} failed: {names} (logs/gpu_tests.log)")
    if len(skipped) == len(cases):
        reason = skipped[0].get("message", "") if skipped else "there are none"
        raise SkippedError(f"all {len(cases)} tests were skipped: {reason}")
    measured = f"{len(cases) - len(skipped)} passed, {len(skipped)} skipped"
    if left_out:
        measured += f"; {', '.join(left_out)} left out, they need vLLM"
    row = Row(
        quantity="tests",
        measured=measured,
        expected="all pass",
        meaning="kernel, offload, memory plan, sleep and weight sync are right on this device",
        is_as_expected=not skipped,
        holds_anywhere=True,
    )
    return Measured(rows=[row])


def sync(session: Session) -> Measured:
    """Sleep, wake and weight sync, by `acceptance_engine.py sync`."""
    small = [] if session.is_gpu else ["--num-groups", 2, "--max-response-tokens", 64]
    script = ("sync", "acceptance_engine.py", "sync")
    found = session.found(*script, "--model", session.model(), *small)
    steps = found["steps"]
    late = {key: median(step[key] for step in steps[1:]) for key in steps[0]}
    ideal_s = 2 * found["bytes"] / found["copy_gb_s"] / 1e9  # read and written once
    mismatch = [step["mismatch"] for step in steps]
    rows = [
        Row(
            quantity="mismatch, before and after three syncs",
            measured=" ".join(f"{value:.4f}" for value in mismatch) + " nats",
            expected=f"at most {_MAX_MISMATCH}",
            meaning="if more: the engine does not compute with the learner's weights, or the two "
            "compute the model differently; a tiny model without the sync: 0.08, then 0.14",
            is_as_expected=max(mismatch) <= _MAX_MISMATCH,
            holds_anywhere=True,
        ),
        Row(
            quantity="weight sync",
            measured=f"{late['sync_s']:.3f} s for {found['bytes'] / 2**20:,.1f} MiB in "
            f"{found['num_tensors']} tensors",
            expected="at most 2 s",
            meaning=f"{late['sync_s'] / ideal_s:,.0f} × a plain copy of the bytes; what is beyond "
            f"it is {1e3 * late['sync_s'] / found['num_tensors']:.2f} ms a tensor",
            is_as_expected=late["sync_s"] <= 2,
        ),
    ]
    if session.is_gpu:
        rows += _sleep_rows(late, session.machine.total_gib)
    return Measured(rows=rows, values={**found, "mismatch": mismatch})


def _sleep_rows(late: dict[str, float], total_gib: float) -> list[Row]:
    asleep_s = late["sleep_s"] + late["wake_weights_s"] + late["wake_kv_cache_s"]
    return [
        Row(
            quantity="sleep, wake of weights, wake of the KV cache",
            measured=f"{late['sleep_s']:.2f}, {late['wake_weights_s']:.2f}, "
            f"{late['wake_kv_cache_s']:.2f} s",
            expected="together at most 2 s",
            meaning="what every step pays for sharing the device",
            is_as_expected=asleep_s <= 2,
        ),
        Row(
            quantity="memory that a sleep frees",
            measured=f"{late['freed_gib']:.1f} GiB",
            expected=f"at least {0.3 * total_gib:.0f} GiB of the engine's {0.4 * total_gib:.0f}",
            meaning="if less: the learner will lack it",
            is_as_expected=late["freed_gib"] >= 0.3 * total_gib,
        ),
        Row(
            quantity="memory that a step leaves behind",
            measured=f"{late['left_gib']:.2f} GiB",
            expected="at most 0.5 GiB",
            meaning="if more: something grows from step to step",
            is_as_expected=late["left_gib"] <= 0.5,
        ),
    ]


def ticks(session: Session) -> Measured:
    """Tick and abort times, on a GPU with CUDA graphs and eager."""
    model = ("--model", session.model())
    small = () if session.is_gpu else ("--in-flight", 1, 8, 32)
    script = ("acceptance_engine.py", "ticks", *model, *small)
    eager = session.found("ticks_eager", *script, "--eager")
    graphs = session.found("ticks", *script) if session.is_gpu else eager
    rows = [_tick_row(row, graphs["tick_steps"]) for row in graphs["rows"]]
    first, last = graphs["rows"][0], graphs["rows"][-1]
    rows.append(
        Row(
            quantity="cost of more samples in flight",
            measured=f"a tick with {last['in_flight']} takes {last['tick_s'] / first['tick_s']:.2f}"
            f" × the time of one with {first['in_flight']}",
            meaning="near 1: a slot that waits for the longest response costs as much as a busy "
            "one, which is what over-sampling makes use of",
        )
    )
    longest_s = max(row["abort_s"] for row in graphs["rows"])
    rows.append(
        Row(
            quantity="longest abort",
            measured=f"{1e3 * longest_s:.2f} ms",
            expected="at most 100 ms",
            meaning="what a step waits for at its end before samples are parked",
            is_as_expected=longest_s <= 0.1,
        )
    )
    if session.is_gpu:
        rows.append(_graphs_row(eager, graphs))
    return Measured(rows=rows, values={"eager": eager, "graphs": graphs})


def _tick_row(row: dict[str, float], tick_steps: int) -> Row:
    return Row(
        quantity=f"tick with {row['in_flight']} in flight",
        measured=f"{1e3 * row['tick_s'] / tick_steps:.1f} ms an engine step, "
        f"{1e3 * row['tick_s']:.0f} ms a tick of {tick_steps}, {row['tokens_per_s']:,.0f} tokens/s",
    )


def _graphs_row(eager: dict[str, Any], graphs: dict[str, Any]) -> Row:
    """Compare CUDA graphs with eager at the largest number of samples in flight; show the extra
    start time.
    """
    gain = eager["rows"][-1]["tick_s"] / graphs["rows"][-1]["tick_s"]
    extra_s = graphs["start_s"] - eager["start_s"]
    return Row(
        quantity="CUDA graphs",
        measured=f"{gain:.2f} × as fast as eager, {extra_s:.0f} s more to start",
        expected="faster than eager",
        meaning="the start is paid once a run",
        setting=f"engine.cuda_graphs={'true' if gain > 1 else 'false'}",
        is_as_expected=gain > 1,
    )
