"""Charts of what was learned: reward, evaluation, teacher, critic, mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from april_rl.lab.report.run_files import Row, RunFiles
from april_rl.lab.report.vega import LOG, STEP, Chart, Lines, Spec, axis, base, legend
from april_rl.run.tracking.keys import KEYS

_WINDOW = 10  # steps over which the drawn mean is taken
_SMALL = 110  # pixels of height
_UPDATE = {
    "loss/total": "Loss",
    "loss/entropy": "Entropy",
    "loss/grad_norm": "Gradient norm",
    "loss/clip_frac": "Clipped tokens",
    "loss/behaviour_kl": "KL from the policy that sampled",
    "loss/reference_kl": "KL from the reference",
}
_UNITS = {key.key: key.unit for key in KEYS}
_ENOUGH = 5  # points in a window that an interval needs: fewer say little about their spread
MISMATCH = Lines(
    id="mismatch",
    title="Mismatch of engine and learner",
    caption="Difference of log-probabilities on tokens that both computed with equal weights, "
    "in nats. It should stay flat.",
    keys={"mean": "mismatch/logprob_abs_mean", "largest": "mismatch/logprob_abs_max"},
    unit="nats",
    scale=LOG,
)
TEACHER = Lines(
    id="teacher",
    title="Distance from the teacher",
    caption="Divergence on the tokens of each trained batch, in nats per token. At 0 the "
    "policy equals its teacher.",
    keys={"KL(policy ‖ teacher)": "loss/teacher_kl"},
    unit="nats",
)
CRITIC = Lines(
    id="critic",
    title="The critic",
    caption="Share of the returns' variance that the values explain (1: all of it, 0: as much "
    "as their mean does), and the mean distance of value and return, by the age of tokens.",
    keys={
        "explained variance": "critic/explained_variance",
        "error, tokens of age 0": "critic/error_new",
        "error, older tokens": "critic/error_old",
    },
)


def reward(steps: Sequence[Row]) -> Chart | None:
    """Return the chart of rewards; None without any."""
    rows = [row for row in steps if row.get("reward/mean") is not None]
    if not rows:
        return None
    values: list[Spec] = []
    for place, row in enumerate(rows):
        window = [r["reward/mean"] or 0.0 for r in rows[max(0, place - _WINDOW + 1) : place + 1]]
        mean = fmean(window)
        low = high = None
        if len(window) >= _ENOUGH:
            error = 1.96 * stdev(window) / len(window) ** 0.5
            low, high = mean - error, mean + error
        point = {"step": row["step"], "reward": row["reward/mean"], "mean": mean}
        values.append({**point, "low": low, "high": high})
    band = {"y": axis("low", "reward", scale={"zero": False}), "y2": {"field": "high"}}
    layers = [
        {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "area", "opacity": 0.25},
            "encoding": band,
        },
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": axis("mean", "reward")}},
        {
            "mark": {"type": "point", "filled": True, "opacity": 0.9, "size": 36, "tooltip": True},
            "encoding": {"y": axis("reward", "reward")},
        },
    ]
    return Chart(
        id="reward",
        title="Reward",
        caption=f"Mean reward of each trained batch (points), and the mean of the last {_WINDOW} "
        f"points with its 95 % interval once there are {_ENOUGH}. Over-sampling makes batches "
        "unlike random draws, so judge learning by the evaluation.",
        spec=base(values, encoding={"x": STEP}, layer=layers),
    )


def evaluation(run: RunFiles) -> Chart | None:
    """Return the chart of avg@k on held-out sets; None without an evaluation."""
    values: list[Spec] = [
        {
            "step": row["step"],
            "set": name,
            "value": value,
            "low": row.get(f"{key}_low"),
            "high": row.get(f"{key}_high"),
        }
        for name in run.evaluation_sets
        for key in [f"eval/{name}/avg_at_k"]
        for row in run.rows
        if (value := row.get(key)) is not None
    ]
    if not values:
        return None
    colour = axis("set", "", "nominal", legend=legend())
    y = axis("value", "avg@k", scale={"zero": False})
    bars = {"y": axis("low", "avg@k", scale={"zero": False}), "y2": {"field": "high"}}
    mark: Spec = {"type": "line", "point": {"filled": True, "size": 40}, "tooltip": True}
    return Chart(
        id="evaluation",
        title="Evaluation on held-out prompts",
        caption="Mean reward over k samples of each prompt (avg@k), with 95 % intervals over "
        "prompts. It is an accuracy where rewards are 0 or 1.",
        spec=base(
            values,
            encoding={"x": STEP, "color": colour},
            layer=[
                {"mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6}, "encoding": bars},
                {"mark": mark, "encoding": {"y": y}},
            ],
        ),
    )


def update(steps: Sequence[Row]) -> list[Chart]:
    """Return a small chart for each metric of the learner's update that the run has."""
    drawn = (
        Lines(
            id=key.replace("/", "-"), title=title, caption=key, keys={title: key}, unit=_UNITS[key]
        ).chart(steps, height=_SMALL)
        for key, title in _UPDATE.items()
    )
    return [chart for chart in drawn if chart is not None]
