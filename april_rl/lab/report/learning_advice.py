"""Advice about learning: a reward that rises while something else falls."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from april_rl.lab.report.run_files import RunFiles

Samples = Sequence[Mapping[str, Any]]

_MIN_GROUPS = 8  # with finished and cut-off responses
_ERRORS = 2.0  # standard errors from which a difference counts
_DEPTH = r"mismatch/to_(\d+)_tokens"
_DEEPER = 3.0  # mismatch of the deepest tokens ÷ mismatch of the first
_LONG_TEXT = 400  # characters; shorter texts hardly compress
_REPEATED = 0.15  # compressed ÷ plain size; English prose is near 0.5
_HALVED = 0.5  # of what it was in the first samples


def learning_advice(run: RunFiles) -> Iterator[str]:
    """Yield advice on what the policy may be learning instead of its task."""
    for name in run.evaluation_sets:
        yield from _held_out(run, name)
    late = [samples for _, samples in run.all_samples()]
    yield from _truncation(list(chain.from_iterable(late[len(late) // 2 :])))
    yield from _repetition(run.first_samples[1], run.samples[1])
    yield from _depth(run)


def _held_out(run: RunFiles, name: str) -> Iterator[str]:
    """Find a held-out accuracy that fell below the interval of an earlier one."""
    key = f"eval/{name}/avg_at_k"
    lows, highs = dict(run.series(f"{key}_low")), dict(run.series(f"{key}_high"))
    found = run.series(key)
    if len(found) < 2 or found[-1][0] not in highs:
        return
    best, accuracy = max(found, key=lambda each: each[1])
    last, ended = found[-1]
    if highs[last] >= lows.get(best, 0.0):
        return
    text = f"{name} fell from {accuracy:.3f} at step {best} to {ended:.3f} (avg@k)"
    before, after = (_reward_about(run, step) for step in (best, last))
    if before is None or after is None or after < before:
        yield (
            f"{text}, and the reward of training with it: an update went wrong. Continue from the "
            f"checkpoint before step {best} with a lower optimizer.lr (docs/trouble.md)."
        )
        return
    yield (
        f"{text} while the reward of training went from {before:.2f} to {after:.2f}: the policy "
        "learns what the reward pays, and not the task. Read the last samples, and see what else "
        "the reward pays for: python -m april_rl attack."
    )


def _reward_about(run: RunFiles, step: int) -> float | None:
    """Return the mean reward of the ten steps up to this one; before the first step, of the first
    ten.
    """
    rewards = run.series("reward/mean")
    near = [value for at, value in rewards if step - 10 < at <= step]
    near = near or [value for _, value in rewards[:10]]
    return fmean(near) if near else None


def _truncation(samples: Samples) -> Iterator[str]:
    """Find rewards that pay more for a response that was cut off than for a finished one of the
    same prompt.
    """
    groups: dict[int, dict[bool, list[float]]] = {}
    for sample in samples:
        rewards = groups.setdefault(sample["prompt_id"], {True: [], False: []})
        rewards[sample["finish_reason"] == "length"].append(sample["reward"])
    both = [each for each in groups.values() if all(each.values())]
    gains = [fmean(each[True]) - fmean(each[False]) for each in both]
    if len(gains) < _MIN_GROUPS:
        return
    gain = fmean(gains)
    if gain > _ERRORS * stdev(gains) / len(gains) ** 0.5:
        yield (
            f"Being cut off pays: responses that reached rollout.max_response_tokens are paid "
            f"{gain:.2f} more than finished ones of the same prompt ({len(gains)} groups). The "
            "reward may read an answer in unfinished text; algorithm.mask_truncated leaves such "
            "responses out, algorithm.overlong_buffer_frac makes them cost."
        )


def _repetition(first: Samples, last: Samples) -> Iterator[str]:
    """Find long responses that have come to repeat themselves."""
    now = [_compression(sample["response"]) for sample in last if _is_long(sample)]
    if not now or (share := fmean(now)) > _REPEATED:
        return
    before = [_compression(sample["response"]) for sample in first if _is_long(sample)]
    if before and share > _HALVED * fmean(before):
        return
    was = f", {fmean(before):.0%} in the first samples" if before else ""
    yield (
        f"Long responses repeat themselves: compressed they have {share:.0%} of their size{was}. "
        "The reward may pay for length, or the policy has collapsed: read the last samples."
    )


def _is_long(sample: Mapping[str, Any]) -> bool:
    return len(sample["response"]) >= _LONG_TEXT


def _compression(text: str) -> float:
    plain = text.encode()
    return len(zlib.compress(plain)) / len(plain)


def _depth(run: RunFiles) -> Iterator[str]:
    """Find a mismatch that grows with the depth in the context."""
    keys = {key for row in run.rows for key in row}
    depths = {int(found[1]): key for key in keys if (found := re.fullmatch(_DEPTH, key))}
    means = {depth: mean for depth in sorted(depths) if (mean := run.mean(depths[depth]))}
    if len(means) < 2:
        return
    (near, first), *_, (far, deepest) = means.items()
    limit = run.number("learner.max_mismatch")
    if deepest > _DEEPER * first and deepest > limit / 2:
        yield (
            f"Engine and learner disagree more and more along a response: {first:.4f} nats up to "
            f"{near:,} tokens, {deepest:.4f} up to {far:,}. Rotary embeddings or an attention "
            "window may differ: python -m april_rl certify shows where."
        )
