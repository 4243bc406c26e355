"""Numbers, steps, evaluations and samples as text."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from april_rl.run.tracking.samples_file import SampleRecord

_SHOWN_CHARACTERS = 400  # characters shown of a prompt or a response


def decimals(digits: int) -> Callable[[float], str]:
    """Return a format with `digits` decimals, scientific for numbers that would be too wide."""
    return lambda value: f"{value:.0e}" if abs(value) >= 1e5 else f"{value:.{digits}f}"


def nats(value: float) -> str:
    """Return four decimals, or scientific notation for a number that would read as zero."""
    return f"{value:.0e}" if 0 < abs(value) < 5e-5 else decimals(4)(value)


def compact(value: float) -> str:
    """Return a count in at most five characters: 143, 9.8k, 18.2k, 1.3M."""
    for bound, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (math.inf, 1e6, "M")):
        if abs(value) < bound:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if unit and abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.0e}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    """Return a duration in at most two units: 12s, 4m10s, 2h05m, 3d04h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


class LineColumn(NamedTuple):
    """A metric in the line of a step."""

    key: str
    heading: str
    width: int
    write: Callable[[float], str]


_COLUMNS = (
    LineColumn("reward/mean", "reward", 8, decimals(3)),
    LineColumn("rollout/response_tokens_mean", "length", 8, compact),
    LineColumn("staleness/age_mean", "age", 7, decimals(2)),
    LineColumn("staleness/off_policy_token_frac", "off-policy", 12, percent),
    LineColumn("mismatch/logprob_abs_mean", "mismatch", 10, nats),
    LineColumn("rollout/generated_tokens_per_s", "tokens/s", 10, compact),
    LineColumn("time/step_s", "step s", 8, decimals(1)),
)
HEADING = f"{'step':>6}{''.join(f'{c.heading:>{c.width}}' for c in _COLUMNS)}{'left':>8}"
LEGEND = (
    "age: steps since a token was sampled; off-policy: age 1 or more; "
    "mismatch: engine against learner; -: none"
)


def is_trained(values: Mapping[str, float]) -> bool:
    """Return whether these are metrics of a training step, and not of an evaluation alone."""
    return any(column.key in values for column in _COLUMNS)


def step_line(step: int, values: Mapping[str, float], *, left_s: float | None) -> str:
    """Return the figures of a step and the time left of the run, in columns under `HEADING`."""
    line = f"{step:>6}"
    for column in _COLUMNS:
        value = values.get(column.key, math.nan)
        line += f"{column.write(value) if math.isfinite(value) else '-':>{column.width}}"
    return f"{line}{'-' if left_s is None else duration(left_s):>8}"


def courses(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values whose history is drawn: reward, truncated share, evaluated sets."""
    keys = {"reward": "reward/mean", "truncated": "rollout/truncated_frac"}
    keys |= {f"{name} avg@k": f"eval/{name}/avg_at_k" for name in _evaluated_sets(values)}
    return {label: values[key] for label, key in keys.items() if key in values}


def evaluation_lines(values: Mapping[str, float]) -> list[str]:
    """Return a line for every evaluated set."""
    lines = []
    for name in _evaluated_sets(values):
        estimates = ", ".join(
            f"{kind}@k {found:.3f}{_interval(values, f'eval/{name}/{kind}_at_k')}"
            for kind in ("avg", "pass", "maj")
            if (found := values.get(f"eval/{name}/{kind}_at_k")) is not None
        )
        length = values.get(f"eval/{name}/response_tokens_mean")
        tokens = "" if length is None else f", {compact(length)} tokens a response"
        lines.append(f"{name}: {estimates}{tokens}")
    return lines


def _evaluated_sets(values: Mapping[str, float]) -> list[str]:
    keys = (key.split("/") for key in values)
    return [parts[1] for parts in keys if parts[0] == "eval" and parts[-1] == "avg_at_k"]


def _interval(values: Mapping[str, float], key: str) -> str:
    low, high = (values.get(f"{key}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def telling(records: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Return the samples with the highest and lowest reward and with the most turns."""
    if not records:
        return []
    picked = (
        max(records, key=lambda record: record.reward),
        min(records, key=lambda record: record.reward),
        max(records, key=lambda r: (len(r.conversation), len(r.ages), r.num_tokens)),
    )
    return list(dict.fromkeys(picked))


def ages_text(ages: Iterable[tuple[int, int]]) -> str:
    """Return the number of tokens of each age as text, from completions with their ages."""
    tokens_of: Counter[int] = Counter()
    for age, tokens in ages:
        tokens_of[age] += tokens
    return ", ".join(f"{tokens} of age {age}" for age, tokens in tokens_of.items())


def sample_text(step: int, record: SampleRecord, *, width: int) -> str:
    """Return a sample as an indented block of at most `width` columns."""
    ages = ages_text(record.ages)
    advantage = "" if record.advantage is None else f"advantage {record.advantage:+.2f}, "
    title = (
        f"step {step}, prompt {record.prompt_id}, sample {record.index}: "
        f"reward {record.reward:.2f}, {advantage}{record.finish_reason}, "
        f"{record.num_tokens} tokens ({ages})"
    )
    said = record.conversation or (("response", record.response),)
    texts = [("prompt", record.prompt), *said, ("answer", record.answer)]
    block = [textwrap.fill(title, width, subsequent_indent="  ")]
    column = 2 + max(len(label) for label, _ in texts)
    for label, text in texts:
        for n, line in enumerate(_wrap(cut(text), width=max(width - 2 - column, 20))):
            block.append(f"  {label if n == 0 else '':<{column}}{line}")
    return "\n".join(block)


def cut(text: str) -> str:
    """Return the text, without its middle when it is long."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} […] {text[-half:]}"


def _wrap(text: str, *, width: int) -> list[str]:
    lines = text.strip().splitlines() or [""]
    return [piece for line in lines for piece in textwrap.wrap(line, width) or [""]]
