"""Figures as people read them: numbers, durations, sparklines, the line of a step, a sample."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from april_rl.tracking.samples_file import SampleRecord

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_CHARACTERS = 400  # of a prompt or a response


def fixed(digits: int) -> Callable[[float], str]:
    """A format with that many decimals; scientific for what would be too wide."""

    def write(value: float) -> str:
        return f"{value:.0e}" if abs(value) >= 1e5 else f"{value:.{digits}f}"

    return write


def nats(value: float) -> str:
    """Four decimals; scientific for what would read as zero."""
    return f"{value:.0e}" if 0 < abs(value) < 5e-5 else fixed(4)(value)


def compact(value: float) -> str:
    """A count in at most five characters: 143, 9.8k, 18.2k, 1.3M."""
    for bound, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (math.inf, 1e6, "M")):
        if abs(value) < bound:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if unit and abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0e}"


def percent(value: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    """Two units at most: 12s, 4m10s, 2h05m, 3d04h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` finite values as bars from their smallest to their largest."""
    shown = [value for value in values if math.isfinite(value)][-width:] if width > 0 else []
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top) if span > 0 else 0] for value in shown)


class Figure(NamedTuple):
    """One number of a step as it is shown."""

    key: str
    label: str
    heading: str  # of its column; empty: it has none
    width: int  # of its column
    write: Callable[[float], str]


FIGURES = (
    Figure("reward/mean", "reward", "reward", 8, fixed(3)),
    Figure("rollout/response_tokens_mean", "response tokens", "length", 8, compact),
    Figure("staleness/age_mean", "age, steps", "age", 7, fixed(2)),
    Figure("staleness/off_policy_token_frac", "off-policy", "off-policy", 12, percent),
    Figure("mismatch/logprob_abs_mean", "mismatch, nats", "mismatch", 10, nats),
    Figure("rollout/generated_tokens_per_s", "tokens/s", "tokens/s", 10, compact),
    Figure("time/step_s", "step time, s", "step s", 8, fixed(1)),
    Figure("rollout/truncated_frac", "truncated", "", 0, percent),
)
_COLUMNS = tuple(figure for figure in FIGURES if figure.heading)
_STEP_WIDTH, _LEFT_WIDTH = 6, 8


def written(figure: Figure, values: Mapping[str, float]) -> str:
    """The figure's value as text; a dash when the step has none."""
    value = values.get(figure.key, math.nan)
    return figure.write(value) if math.isfinite(value) else "-"


def heading() -> str:
    """The column headings that stand over `step_line`, 77 characters."""
    columns = "".join(f"{figure.heading:>{figure.width}}" for figure in _COLUMNS)
    return f"{'step':>{_STEP_WIDTH}}{columns}{'left':>{_LEFT_WIDTH}}"


LEGEND = (
    "age: steps since a token was sampled; off-policy: age 1 or more; "
    "mismatch: engine against learner; -: none"
)


def step_line(step: int, values: Mapping[str, float], *, left_s: float | None) -> str:
    """One step in aligned columns, 77 characters."""
    columns = "".join(f"{written(figure, values):>{figure.width}}" for figure in _COLUMNS)
    left = "-" if left_s is None else duration(left_s)
    return f"{step:>{_STEP_WIDTH}}{columns}{left:>{_LEFT_WIDTH}}"


def is_trained(values: Mapping[str, float]) -> bool:
    """Return whether these are the metrics of a training step: an evaluation alone has no line."""
    return any(figure.key in values for figure in _COLUMNS)


def accuracies(values: Mapping[str, float]) -> dict[str, float]:
    """avg@k of every evaluation set in `values`."""
    parts = ((key.split("/"), value) for key, value in values.items())
    return {part[1]: v for part, v in parts if part[0] == "eval" and part[-1] == "avg_at_k"}


def evaluation_lines(step: int, values: Mapping[str, float]) -> list[str]:
    """A line for every evaluation set in `values`."""
    lines = []
    for name, average in accuracies(values).items():
        line = f"{step:>{_STEP_WIDTH}}  {name}: avg@k {average:.3f}"
        line += _interval(values, f"eval/{name}/avg_at_k")
        for kind in ("pass", "maj"):
            if (found := values.get(f"eval/{name}/{kind}_at_k")) is not None:
                line += f", {kind}@k {found:.3f}{_interval(values, f'eval/{name}/{kind}_at_k')}"
        if (length := values.get(f"eval/{name}/response_tokens_mean")) is not None:
            line += f", {compact(length)} tokens a response"
        lines.append(line)
    return lines


def _interval(values: Mapping[str, float], key: str) -> str:
    """The interval of a figure, such as ` [0.430, 0.591]`; empty when it has none."""
    low, high = (values.get(f"{key}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def telling(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    """At most three of them: the best rewarded, the worst, and the one with most completions."""
    if not records:
        return []
    picked = (
        max(records, key=lambda record: record.reward),
        min(records, key=lambda record: record.reward),
        max(records, key=lambda record: (len(record.ages), record.num_tokens)),
    )
    return list(dict.fromkeys(picked))


def sample_text(step: int, record: SampleRecord, *, width: int) -> str:
    """A sample as an indented block of at most `width` columns, long texts cut in the middle."""
    ages = ", ".join(f"{tokens} of age {age}" for age, tokens in record.ages)
    title = (
        f"step {step}, prompt {record.prompt_id}, sample {record.index}: "
        f"reward {record.reward:.2f}, advantage {record.advantage:+.2f}, {record.finish_reason}, "
        f"{record.num_tokens} tokens ({ages})"
    )
    parts = (
        ("prompt", record.prompt),
        ("response", record.response),
        ("answer", record.answer),
    )
    block = [textwrap.fill(title, width, subsequent_indent="  ")]
    for label, text in parts:
        block += _labelled(label, cut(text), width=width)
    return "\n".join(block)


def cut(text: str) -> str:
    """Return the text without its middle when it is long."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} […] {text[-half:]}"


def _labelled(label: str, text: str, *, width: int) -> list[str]:
    """The lines of `text`, wrapped, the first behind its label."""
    lines = [
        piece
        for line in text.strip().splitlines() or [""]
        for piece in textwrap.wrap(line, max(width - 12, 20)) or [""]
    ]
    return [f"  {label if n == 0 else '':<10}{line}" for n, line in enumerate(lines)]
