"""The parts that measure one thing by itself: the machine, the GPU tests, the learner."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from acceptance.session import PROJECT, FailedError, Measured, Row, Session, SkippedError

_LEAST_GIB = 40.0  # device memory needed to train the learner's row without recomputation
_KEPT_GIB = 1.4  # memory of CUDA graphs in the memory plan
_FLASH_ATTENTION_4 = ("H100", "H200", "B200")
_OFFLOAD = (
    "a step with learner.offload=all pays both, optimizer two thirds of them at every optimizer "
    "step; none pays nothing and is right wherever the memory plan fits"
)


def environment(session: Session) -> Measured:
    """Measure versions, memory and speeds."""
    found = session.measure("device.environment")
    packages = ", ".join(f"{name} {v}" for name, v in found["packages"].items() if v)
    versions = f"commit {found['commit']}, Python {found['python']}, {packages}"
    versions += f", CUDA or HIP {found['cuda']}" if found["cuda"] else ""
    measured, sheet = found["product_tflops"], found["sheet_tflops"]
    product = Row("bfloat16 product", f"{measured:,.3g} TFLOP/s")
    if sheet is not None:
        product = Row(
            "bfloat16 product",
            f"{measured:,.0f} TFLOP/s, {100 * measured / sheet:.0f} % of {sheet:,.0f}",
            "at least 60 % of the data sheet",
            measured >= 0.6 * sheet,
            "if less: the device is shared, capped in power, or hot",
        )
    rows = [
        Row("device", f"{session.machine.count} × {found['device']}"),
        Row("versions", versions),
        Row("host", f"{found['cores']} cores, {found['host_gib']:.0f} GiB of free memory"),
        product,
    ]
    if session.is_gpu:
        free, total = found["free_gib"], found["total_gib"]
        shown = f"{free:.1f} of {total:.1f} GiB free"
        meaning = "if less: another process uses the device"
        rows.append(Row("memory", shown, "at least 95 % free", free >= 0.95 * total, meaning))
    return Measured(rows, found)


def gpu_tests(session: Session) -> Measured:
    """Run `pytest -m gpu`; without vLLM, only the files that do not import the engine."""
    if session.machine.without_pytest:
        raise SkippedError(session.machine.without_pytest)
    files = {path: path.read_text() for path in sorted((PROJECT / "tests").rglob("test_*.py"))}
    asked = [path for path, text in files.items() if "mark.gpu" in text]
    left_out = [path for path in asked if "april_rl.training.engine" in files[path]]
    if not session.machine.without_engine:
        left_out = []
    report = session.folder / "logs" / "gpu_tests.xml"
    report.unlink(missing_ok=True)
    pytest = (sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}")
    log, status = session.run_any("gpu_tests", *pytest, *(p for p in asked if p not in left_out))
    if not report.is_file():
        raise FailedError(f"pytest ended with status {status} before its first test ({log})")
    return _of_report(ElementTree.parse(report).getroot(), [path.name for path in left_out])


def _of_report(report: ElementTree.Element, left_out: list[str]) -> Measured:
    cases = list(report.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [found for case in cases if (found := case.find("skipped")) is not None]
    if failed:
        names = ", ".join(case.get("name", "") for case in failed)
        raise FailedError(f"{len(failed)} of {len(cases)} failed: {names} (logs/gpu_tests.log)")
    if len(skipped) == len(cases):
        reason = skipped[0].get("message", "") if skipped else "there are none"
        raise SkippedError(f"all {len(cases)} tests were skipped: {reason}")
    measured = f"{len(cases) - len(skipped)} passed, {len(skipped)} skipped"
    if left_out:
        measured += f"; {', '.join(left_out)} left out, they need vLLM"
    meaning = "kernel, offload, memory plan, sleep and weight sync are right on this device"
    row = Row("tests", measured, "all pass", not skipped, meaning, holds_anywhere=True)
    return Measured([row])


def learner(session: Session) -> Measured:
    """Measure one optimizer step at lognormal lengths, the gain of compiled functions, and the
    cost of offloading.
    """
    work = {"num_groups": 8, "median_tokens": 1024} if session.is_gpu else _TINY_WORK
    path = session.model()
    found = session.measure("learner.measure", settings=_learner_settings(session, path), **work)
    sheet = found["sheet_tflops"]
    share = 100 * found["tflops"] / (sheet or found["product_tflops"])
    formula = "of model FLOPs: docs/gpu.md has the formula"
    utilisation = Row("of a matrix product's FLOP/s", f"{share:.0f} %", meaning=formula)
    if sheet is not None:
        utilisation = Row(
            "model FLOPs utilisation (MFU)",
            f"{share:.1f} % of the data sheet",
            "at least 12 %",
            share >= 12,
            "if less: profiler.steps=[5] shows which kernels take the time",
        )
    rate = found["gib"] / max(found["to_host_s"], found["back_s"])
    rows = [
        Row("update", f"{found['tokens_per_s']:,.0f} tokens per second, {found['time_s']:.2f} s"),
        Row("model FLOP/s", f"{found['tflops']:,.3g} TFLOP/s"),
        utilisation,
        Row(
            "weights and optimizer to the host, back",
            f"{found['to_host_s']:.3f}, {found['back_s']:.3f} s for {found['gib']:.2g} GiB",
            "at least 8 GiB/s each way",
            rate >= 8,
            _OFFLOAD,
            "learner.offload=none",
        ),
    ]
    if session.is_gpu:
        quantity = "peak memory, with weights and optimizer"
        rows.append(Row(quantity, f"{found['peak_gib']:.1f} GiB"))
        wide = session.model("model_4b", like="Qwen/Qwen3-4B", num_layers=4)
        fused, width = "learner.fused", "the widths of 4 B, four layers"
        with TemporaryDirectory() as cold:
            rows += [_compared_row(session, fused, "0.6 B", path, most=0.9, cache=cold, **work)]
        rows += [_compared_row(session, fused, width, wide, most=0.9, **work)]
        rows += [_compared_row(session, "learner.keep_attention", width, wide, **work)]
        if any(name in session.machine.name for name in _FLASH_ATTENTION_4):
            rows += [_compared_row(session, "learner.flash_attention_4", width, wide, **work)]
    return Measured(rows, found)


def _compared_row(
    session: Session, key: str, name: str, path: Path, *, most: float = 1.0, **work: object
) -> Row:
    """Compare an update with a setting and without; in recomputed layers if it keeps attention."""
    settings = _learner_settings(session, path)
    if key == "learner.keep_attention":
        settings = [*settings, "learner.activation_checkpointing=true"]
    without, found = (
        session.measure("learner.measure", settings=[*settings, f"{key}={value}"], **work)
        for value in ("false", "true")
    )
    ratio, memory = (found[each] / without[each] for each in ("time_s", "peak_gib"))
    share = 100 * found["tflops"] / (found["sheet_tflops"] or found["product_tflops"])
    return Row(
        f"{key}, {name}",
        f"{ratio:.2f} of the time, {memory:.2f} of the memory, {share:.1f} % of the FLOP/s, "
        f"{found['first_s']:.0f} s for the first update",
        f"at most {most:g} of the time",
        ratio <= most,
        "if not: it gains nothing here",
        "" if ratio <= 1 else f"{key}=false",
    )


def engine(session: Session) -> Measured:
    """Measure the speeds of the engine, the parts of a weight sync, and the memory that a
    sleeping engine keeps.
    """
    settings = [*_learner_settings(session, session.model()), *_ENGINE_ON_CPU]
    work = {"context": 256, "batch": 8}
    if session.is_gpu:
        settings[-len(_ENGINE_ON_CPU) :] = _ENGINE_ON_GPU
        work = {"context": 2048, "batch": 32}  # keys and values take 7 GiB
    found = session.measure("engine.measure", settings=settings, **work)
    sync, kept = found["sync"], found["asleep_gib"]
    rows = [
        Row(
            "decoding",
            f"{found['decode_bytes_per_s'] / 1e9:,.0f} GB/s of weights, keys and values, "
            f"{1000 * found['between_steps_s']:.1f} ms per step in addition",
        ),
        Row("prefill", f"{found['prefill_flops_per_s'] / 1e12:,.3g} TFLOP/s"),
        Row(
            "weight sync in parts",
            f"wake {sync['wake_s']:.3f}, gather {sync['gather_s']:.3f}, transfer and load "
            f"{sync['load_s']:.3f}, learner to the host {sync['offload_s']:.3f}, wake the cache "
            f"{sync['wake_cache_s']:.3f} s for {sync['bytes'] / 2**20:,.1f} MiB",
            "at most 2 s",
            sum(sync[key] for key in sync if key.endswith("_s")) <= 2,
            "if more, improve the slowest part; gathering waits for each tensor here",
        ),
        Row(
            "kept by a sleeping engine",
            f"{kept:.2f} GiB",
            f"at most {_KEPT_GIB} GiB",
            kept <= _KEPT_GIB,
            "the memory plan counts as much; if more, sleeping engines leave too little",
        ),
    ]
    return Measured(rows, found)


_ENGINE_ON_CPU = ("engine.kv_cache_gib=0.25",)
_ENGINE_ON_GPU = ("engine.gpu_memory_utilization=0.5", "engine.cuda_graphs=true")
_TINY_WORK = {"num_groups": 1, "median_tokens": 64}


def _learner_settings(session: Session, path: Path) -> list[str]:
    settings = [f"model.path={path}", "learner.offload=all"]
    if not session.is_gpu:
        return [*settings, "rollout.max_response_tokens=128", "learner.max_tokens=1024"]
    settings.append("rollout.max_response_tokens=8192")
    if session.machine.total_gib < _LEAST_GIB:
        return [*settings, "learner.max_tokens=8448", "learner.activation_checkpointing=true"]
    return [*settings, "learner.max_tokens=16384"]
