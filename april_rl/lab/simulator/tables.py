"""Tables of simulated outcomes for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from april_rl.lab.simulator.prediction import Prediction


def comparison_table(predictions: Sequence[Prediction], *, title: str) -> Table:
    """Return a table with a row for every over-sampling factor. Memory is that of the engine
    that held most.
    """
    table = Table(title=title)
    heads = ("α", "step s", "samples/s", "gain", "occupied", "off-policy", "age mean", "max")
    for head in ("mode", *heads, "re-prefill", "peak KV"):
        table.add_column(head, justify="left" if head == "mode" else "right", no_wrap=True)
    for each in predictions:
        outcome = each.outcome
        table.add_row(
            each.mode.name,
            f"{outcome.factor:g}",
            f"{outcome.step_s:.3g}",
            f"{outcome.trained_samples_per_s:.3g}",
            f"{each.gain:.2f}",
            f"{outcome.occupancy:.2f}",
            f"{outcome.off_policy_token_frac:.2f}",
            f"{outcome.age_mean:.2f}",
            f"{outcome.age_max}",
            f"{outcome.reprefill_per_generated_token:.2f}",
            f"{outcome.peak_kv_tokens:,} tokens",
        )
    return table
