"""A tracker without any display, and a sample for it."""

from dataclasses import fields, replace
from pathlib import Path

from april_rl.config.schema import TrackingConfig
from april_rl.run.tracking.labels import RunLabels
from april_rl.run.tracking.samples_file import SampleRecord, records_of
from april_rl.run.tracking.tracker import Tracker, open_view
from april_rl.types import Completion, Group, Prompt, Sample, SampleId, ScoredGroup


def make_tracker(run_dir: Path, **changes: object) -> Tracker:
    """Return a tracker; `changes` are fields of the tracking section or arguments of
    the tracker.
    """
    names = {field.name for field in fields(TrackingConfig)}
    quiet = {"backends": [], "save_samples_every": None}
    section = quiet | {name: changes[name] for name in names & changes.keys()}
    settings = {
        "config": {"name": "trial", "rollout": {"group_size": 8}},
        "tracking": TrackingConfig(**section),
        "num_steps": 4,
        "advantage": "grpo",
        "labels": RunLabels(name="trial"),
    }
    settings |= {name: changes[name] for name in changes.keys() - names}
    if "view" not in settings:
        title, num_steps = "trial: 4 steps of 16 groups", settings["num_steps"]
        settings["view"] = open_view(title=title, num_steps=num_steps, has_panel=False)
    return Tracker(run_dir=run_dir, **settings)


def make_sample() -> Sample:
    prompt = Prompt(id=7, token_ids=(1, 2), text="12+7=", answer="19", source="sums.jsonl:8")
    parts = ((0, 3, None), (3, 0, None), (3, 2, "stop"))
    sample = Sample(prompt=prompt, index=2)
    for version, (start, count, reason) in enumerate(parts, start=4):
        completion = Completion(
            sample_id=SampleId(7, 2),
            start=start,
            policy_version=version,
            context_version=version,
            token_ids=(5,) * count,
            logprobs=(-0.5,) * count,
            finish_reason=reason,
        )
        sample = sample.with_span(completion)
    return sample


def make_record(**changes: object) -> SampleRecord:
    sample = make_sample()
    group = Group(prompt=sample.prompt, samples=(sample,))
    scored = ScoredGroup(group=group, rewards=(1.0,))
    (record,) = records_of([scored], [[0.87]], decode=lambda _: "19 ✓", policy_version=6)
    return replace(record, **({"ends": ()} | changes))
