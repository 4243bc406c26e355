"""Length bias: whether trained responses are as long as those of all opened groups.

Partial rollouts train short responses first: until the long ones of the first steps are
finished, trained responses are shorter than the policy's. After that, as many long responses
arrive from earlier steps as are left to later steps. A schedule that lost or starved long
samples would show here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from april_rl.lab.simulator.length_statistics import dispersion, restricted_mean
from april_rl.training.rollout.measures.timeline import Timeline

WINDOW_STEPS = 20  # recorded steps; a group lives for fewer if every step is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """The difference between the groups that some steps trained and the groups that they opened."""

    opened_tokens_mean: float  # response length of all samples of the opened groups
    trained_tokens_mean: float
    dispersion: float | None  # how much the batches' mean lengths vary; 1 is a random draw

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> Self | None:
        """Return the length bias of recorded steps, oldest first; None if no sample of an opened
        group is finished, or nothing was trained.

        The length of a sample that no recorded step finishes is a lower bound.
        """
        trained = [group.lengths for each in timelines for group in each.trained]
        finished, unfinished = _opened_lengths(timelines)
        if not (trained and finished):
            return None
        batches = [[fmean(group.lengths) for group in each.trained] for each in timelines]
        return cls(
            opened_tokens_mean=restricted_mean(finished, unfinished),
            trained_tokens_mean=fmean(length for lengths in trained for length in lengths),
            dispersion=dispersion(batches),
        )


def _opened_lengths(timelines: Sequence[Timeline]) -> tuple[list[int], list[int]]:
    """Return the lengths of finished and of unfinished samples in groups that these steps
    opened.
    """
    # By sample: its tokens, and whether it has finished.
    known: dict[tuple[int, int], tuple[int, bool]] = {}
    for each in timelines:
        for stay in each.stays:
            is_finished = stay.outcome == "finished"
            known[stay.prompt_id, stay.sample] = stay.start + stay.tokens, is_finished
        for act in each.acts:
            if act.is_finished and (act.prompt_id, act.sample) in known:
                known[act.prompt_id, act.sample] = known[act.prompt_id, act.sample][0], True
        for prompt_id, lengths in each.settled:
            known |= {(prompt_id, i): (length, True) for i, length in enumerate(lengths)}
    opened = {prompt_id for each in timelines for prompt_id in each.opened}
    found = [value for (prompt_id, _), value in known.items() if prompt_id in opened]
    finished = [length for length, is_finished in found if is_finished]
    return finished, [length for length, is_finished in found if not is_finished]
