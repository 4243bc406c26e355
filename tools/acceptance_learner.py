"""The learner's parts of tools/gpu_acceptance.py, which need no engine: an update, and offload."""

from __future__ import annotations

from acceptance_session import Measured, Row, Session

_LEAST_GIB = 40.0  # device memory that trains the learner's row without recomputation
_FORMULA = (
    "FLOPs of a step: 6 · weights · tokens + 6 · layers · heads · head size · Σ length² (PaLM, "
    "arXiv 2204.02311, appendix B, with half of the pairs: attention is causal)"
)


def learner(session: Session) -> Measured:
    """One update, by tools/bench_gpu.py."""
    lines = _bench_gpu(session, "update")
    tokens_per_s, tflops = lines["tokens per second"], lines["model TFLOP/s"]
    mfu = lines.get("model FLOPs utilisation")
    rows = [
        Row(
            quantity="update",
            measured=f"{tokens_per_s:,.0f} tokens per second, {lines['time']:.2f} s",
            meaning="of prompts and responses, at lognormal lengths",
        ),
        Row(quantity="model FLOP/s", measured=f"{tflops:,.3g} TFLOP/s", meaning=_FORMULA),
    ]
    if mfu is None:
        compared = lines["of a matrix product"]
        meaning = "no peak is known for this device, so this is no model FLOPs utilisation (MFU)"
        shown = f"{compared:.0f} % of its FLOP/s"
        rows.append(Row(quantity="against a matrix product", measured=shown, meaning=meaning))
    else:
        rows.append(
            Row(
                quantity="model FLOPs utilisation (MFU)",
                measured=f"{mfu:.1f} % of the data sheet",
                expected="at least 25 %",
                meaning="if less: `tools/bench_gpu.py --parts attention plain` tells whether the "
                "attention kernel is slow or the learner is slower than a plain loop",
                is_as_expected=mfu >= 25,
            )
        )
    peak = lines["peak memory above the weights"]
    rows.append(
        Row(quantity="peak memory above weights and optimizer", measured=f"{peak:,.0f} MiB")
    )
    return Measured(rows=rows, values=lines)


def offload(session: Session) -> Measured:
    """Weights and optimizer state to the host and back, by tools/bench_gpu.py."""
    lines = _bench_gpu(session, "offload")
    gib, away_s, back_s = (lines[key] for key in ("weights and moments", "to the host", "back"))
    rate = gib / max(away_s, back_s)
    row = Row(
        quantity="to the host, back",
        measured=f"{away_s:.3f}, {back_s:.3f} s for {gib:.2g} GiB; the slower way {rate:.0f} GiB/s",
        expected="at least 8 GiB/s each way",
        meaning="a step with learner.offload=all pays both; optimizer pays two thirds of them at "
        "every optimizer step; none pays nothing and is right wherever the memory plan fits",
        setting="learner.offload=none",
        is_as_expected=rate >= 8,
    )
    return Measured(rows=[row], values=lines)


def _bench_gpu(session: Session, part: str) -> dict[str, float]:
    """The numbers of one part of tools/bench_gpu.py, by quantity."""
    args = ["--size", "qwen3_0.6b"]
    if not session.is_gpu:
        sizes = ["--num-groups", 1, "--max-response-tokens", 128, "--max-tokens", 1024]
        args = ["--size", "tiny", "--rounds", 2, *sizes]
    elif session.machine.total_gib < _LEAST_GIB:
        args += ["--activation-checkpointing", "--max-tokens", 8192]
    lines = session.found(part, "bench_gpu.py", "--parts", part, *args)
    return {line["quantity"]: line["number"] for line in lines if line["part"] == part}
