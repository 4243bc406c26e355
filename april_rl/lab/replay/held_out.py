"""Held-out responses of a run, whose log-probabilities show what an update does to them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from april_rl.config import TrainConfig
from april_rl.config.prompt_sets import evaluation_set
from april_rl.task.data.tokenizer import load_tokenizer
from april_rl.types import Completion, Group, Prompt, Sample, SampleId, ScoredGroup

_MOST, _RIGHT_ABOVE = 64, 0.5  # responses of each kind; the reward of a right one


def held_out(run_dir: Path, step: int, config: TrainConfig) -> dict[str, list[ScoredGroup]]:
    """Return the first right and wrong responses of the last evaluation of each set before a step,
    by set and kind. Texts are tokenized again; episodes and what fits into no row are left out.
    """
    tokenizer, found = load_tokenizer(config.model.path), defaultdict[str, list[ScoredGroup]](list)
    for name, overrides in config.evaluation.sets.items():
        is_chat = evaluation_set(config.data, overrides).is_chat
        paths = (run_dir / "samples").glob(f"eval_{name}_step_*.jsonl")
        files = {int(path.stem.rpartition("_")[2]): path for path in paths}
        last = max((number for number in files if number < step), default=None)
        text = "" if last is None else files[last].read_text(encoding="utf-8")
        for record in map(json.loads, text.strip().split("\n") if text else ()):
            if record["reward"] is None or record.get("conversation"):
                continue
            kind = found[f"{name}, {'right' if record['reward'] > _RIGHT_ABOVE else 'wrong'}"]
            (prompt,) = tokenizer.encode([record["prompt"]], add_special_tokens=not is_chat)
            (response,) = tokenizer.encode([record["response"]], add_special_tokens=False)
            fits = len(prompt) + len(response) <= config.learner.max_tokens
            if response and fits and len(kind) < _MOST:
                kind.append(_group(len(kind), prompt, response))
    return {name: groups for name, groups in found.items() if groups}


def _group(number: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> ScoredGroup:
    completion = Completion(
        sample_id=SampleId(number, 0),
        start=0,
        policy_version=0,
        context_version=0,
        token_ids=response,
        logprobs=(0.0,) * len(response),
        finish_reason="stop",
    )
    asked = Prompt(id=number, token_ids=prompt, text="", answer="", source="")
    group = Group(prompt=asked, samples=(Sample(asked, 0, (completion,)),))
    return ScoredGroup(group=group, rewards=(0.0,))
