"""A group in the making."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from april_rl.rollout.state import (
    Plain,
    restore_prompt,
    restore_sample,
    restore_score,
    save_prompt,
    save_sample,
    save_score,
)
from april_rl.types import Completion, Group, Prompt, Sample, Score, ScoredGroup


class OpenGroup:
    """The G samples of a prompt while they grow by completions, and their scores.

    Columns instead of a Sample each: with hundreds of engines there are hundreds of thousands, and
    of most all that is asked in a step is how long they are and who has them.
    """

    __slots__ = (
        "completions",
        "failure",
        "finished",
        "homes",
        "is_finished",
        "latest",
        "lengths",
        "num_unfinished",
        "num_unscored",
        "oldest_version",
        "prompt",
        "scores",
        "waiting",
        "work",
    )

    def __init__(self, prompt: Prompt, group_size: int) -> None:
        """All G samples empty, and no engine has one."""
        self.prompt = prompt
        self.completions: list[tuple[Completion, ...]] = [()] * group_size  # [G], each in order
        self.lengths = array("i", [0]) * group_size  # response tokens so far [G]
        self.is_finished = bytearray(group_size)  # 0 while it needs tokens [G]
        self.finished: list[Sample | None] = [None] * group_size  # [G]
        self.homes: list[int | None] = [None] * group_size  # engine that has it, or had it last [G]
        self.work = [0.0] * group_size  # tokens its engine has to compute; 0: none has it [G]
        self.scores: list[Score | None] = [None] * group_size  # [G]
        self.num_unscored = group_size  # samples
        self.failure: Score | None = None  # why the group cannot be trained
        self.latest: int | None = None  # the engine that was sent a sample last, in this step
        self.oldest_version: int | None = None  # of the group's oldest token
        self.num_unfinished = group_size  # samples
        self.waiting = list(range(group_size))  # indices of those that no engine has been sent yet

    @property
    def is_complete(self) -> bool:
        """Whether every sample is finished."""
        return not self.num_unfinished

    @property
    def is_scored(self) -> bool:
        """Whether every sample is finished and has its score."""
        return not (self.num_unscored or self.num_unfinished)

    @property
    def samples(self) -> list[Sample]:
        """All as they are now [G]."""
        return [self.sample(index) for index in range(len(self.lengths))]

    def sample(self, index: int) -> Sample:
        """The sample at that place as it is now."""
        return self.finished[index] or Sample(
            prompt=self.prompt, index=index, completions=self.completions[index]
        )

    def begin_step(self) -> None:
        """Every unfinished sample waits to be sent to an engine."""
        self.waiting = [index for index, ended in enumerate(self.is_finished) if not ended]
        self.latest = None

    def send(self, count: int, *, engine: int, expected_tokens: float) -> tuple[list[int], float]:
        """`engine` has the first `count` waiting samples from now on; returns their indices, and
        the tokens it has to compute for them: what it prefills, and a response as long as expected.
        """
        sent = self.waiting[:count]
        del self.waiting[:count]
        lengths, homes, work = self.lengths, self.homes, self.work
        each, total = len(self.prompt.token_ids) + expected_tokens, 0.0
        for index in sent:
            homes[index] = engine
            work[index] = each + lengths[index]
            total += work[index]
        self.latest = engine
        return sent, total

    def extend(self, completion: Completion) -> Sample | None:
        """Have a sample grow by a completion that starts where it ends; returns it when it is
        finished by that.
        """
        index = completion.sample_id.index
        assert not self.is_finished[index], completion.sample_id
        assert completion.start == self.lengths[index], (completion.sample_id, completion.start)
        num_tokens = len(completion.token_ids)
        self.completions[index] += (completion,)
        self.lengths[index] += num_tokens
        if num_tokens and self.oldest_version is None:
            self.oldest_version = completion.policy_version  # later ones are not older
        if completion.finish_reason is None:
            return None
        self.num_unfinished -= 1
        self.is_finished[index] = 1
        sample = self.finished[index] = self.sample(index)
        return sample

    def note(self, score: Score) -> None:
        """A finished sample has its score."""
        index = score.sample_id.index
        self.num_unscored -= self.scores[index] is None
        self.scores[index] = score
        if self.failure is None and not score.is_valid:
            self.failure = score

    def scored(self) -> ScoredGroup:
        """The group as a value, when it is complete and scored."""
        assert self.is_scored
        rewards = tuple([score.value for score in self.scores if score is not None])
        samples = tuple([sample for sample in self.finished if sample is not None])
        group = Group(prompt=self.prompt, samples=samples)
        return ScoredGroup(group=group, rewards=rewards)

    def save(self) -> Plain:
        """Prompt, samples, which engine had each, and the scores so far."""
        scores = [save_score(score) for score in self.scores if score is not None]
        return {
            **save_group(self.prompt, self.samples),
            "homes": list(self.homes),
            "scores": scores,
        }

    @classmethod
    def restore(cls, state: Plain, *, num_engines: int) -> Self:
        """The group that `save` was called of; an engine that is none of `num_engines` is home to
        nobody.
        """
        restored = restore_group(state)
        group = cls(restored.prompt, len(restored.samples))
        for sample in restored.samples:
            for completion in sample.completions:
                group.extend(completion)
        group.oldest_version = restored.oldest_version
        group.begin_step()
        group.homes = [
            home if home is not None and home < num_engines else None for home in state["homes"]
        ]
        for score in state["scores"]:
            group.note(restore_score(score, prompt_id=group.prompt.id))
        return group


def lengths_of(groups: Collection[OpenGroup]) -> tuple[NDArray[np.intc], NDArray[np.bool_]]:
    """Response tokens of all their samples, one group behind the other [ΣG], and whether those are
    finished.
    """
    lengths = b"".join([group.lengths for group in groups])
    is_finished = b"".join([group.is_finished for group in groups])
    return np.frombuffer(lengths, np.intc), np.frombuffer(is_finished, np.bool_)


def save_group(prompt: Prompt, samples: Sequence[Sample]) -> Plain:
    """A prompt and its samples."""
    return {"prompt": save_prompt(prompt), "samples": [save_sample(sample) for sample in samples]}


def restore_group(state: Plain) -> Group:
    """What `save_group` was given."""
    prompt = restore_prompt(state["prompt"])
    samples = (
        restore_sample(sample, prompt=prompt, index=index)
        for index, sample in enumerate(state["samples"])
    )
    return Group(prompt=prompt, samples=tuple(samples))
