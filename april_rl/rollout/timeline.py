"""The timeline of a step, from what its launches sent and its ticks gave back."""

from __future__ import annotations

from april_rl.rollout.open_group import OpenGroup
from april_rl.rollout.stats import StepStats
from april_rl.timeline import Span, Timeline
from april_rl.types import Completion, SampleId


def timeline_of(stats: StepStats) -> Timeline:
    """Return the timeline of a step that has ended; before the next one extends its groups."""
    ended = {
        completion.sample_id: (at_s, completion)
        for at_s, completions in stats.returned
        for completion in completions
        if completion.policy_version == stats.policy_version  # not a late one of an earlier step
        and (completion.token_ids or completion.finish_reason is not None)
    }
    spans = []
    for sent in stats.sent:
        for group, index in sorted(sent.samples, key=lambda each: (each[0].prompt.id, each[1])):
            if (found := ended.get(SampleId(group.prompt.id, index))) is None:
                continue  # it never had a slot, or its engine hung
            at_s, completion = found
            spans.append(
                Span(
                    prompt_id=group.prompt.id,
                    sample=index,
                    engine=sent.engine,
                    sent_s=sent.at_s - stats.started,
                    ended_s=at_s - stats.started,
                    start=completion.start,
                    tokens=len(completion.token_ids),
                    age=_age(group, completion),
                    is_finished=completion.finish_reason is not None,
                )
            )
    return Timeline(
        policy_version=stats.policy_version,
        time_s=stats.time_s,
        stop_s=stats.stop_s,
        slots={sent.engine: sent.slots for sent in stats.sent},
        spans=tuple(spans),
    )


def _age(group: OpenGroup, completion: Completion) -> int:
    """Return the steps between the sample's first token and this completion."""
    parts = group.completions[completion.sample_id.index]
    return completion.policy_version - parts[0].policy_version if parts else 0
