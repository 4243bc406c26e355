"""Samples of several turns: where each turn ends, and how long the tool between two turns takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

from april_rl.lab.simulator.length_distributions import LengthDistribution, uniform
from april_rl.training.rollout.requests import Request
from april_rl.types import Observation, Sample

# Names by which users give the turns.
NUMBERS = ("turns", "observation_tokens", "tool_s", "tool_sigma")
_NORMAL = NormalDist()
# Streams of tool calls count down from here, so that they never meet those of lengths and rewards.
_FIRST_STREAM = -3


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of every sample: `num_turns` of equal length with a tool call after each but the
    last.

    The seconds of a call are lognormal: `tool_sigma` is the deviation of their logarithm.
    """

    num_turns: int
    observation_tokens: int = 0  # tokens that a call adds
    tool_s: float = 0.0  # median time of a call
    tool_sigma: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, float]) -> Self | None:
        """Return the turns that these NUMBERS describe, None if there are none of them. Raise
        ValueError for turns that cannot be simulated.
        """
        if not given:
            return None
        if "turns" not in given:
            raise ValueError(f"{', '.join(NUMBERS[1:])} have no effect without turns; remove them")
        return cls(
            num_turns=int(given["turns"]),
            observation_tokens=int(given.get("observation_tokens", 0)),
            tool_s=given.get("tool_s", 0.0),
            tool_sigma=given.get("tool_sigma", 0.0),
        )

    def __post_init__(self) -> None:
        """Raise ValueError for turns that cannot be simulated."""
        if self.num_turns < 1:
            raise ValueError(f"turns must be >= 1, got {self.num_turns}")
        if min(self.observation_tokens, self.tool_s, self.tool_sigma) < 0:
            raise ValueError("observation_tokens, tool_s and tool_sigma must be >= 0")
        if self.num_turns == 1 and (self.observation_tokens or self.tool_s):
            raise ValueError("observation_tokens and tool_s have no effect with one turn")

    @property
    def observed_tokens(self) -> int:
        return (self.num_turns - 1) * self.observation_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The environment of simulated samples: it begins and ends without delay, but its tool takes
    time. A response that reaches its budget ends before its last turn.
    """

    turns: Turns
    length_of: LengthDistribution  # response tokens over all turns
    max_response_tokens: int
    seed: int

    def turn_end(self, request: Request) -> int:
        """Return how many tokens the sample has after its prompt when its present turn ends."""
        num_sampled = self.max_response_tokens - request.max_tokens
        num_turns = self.turns.num_turns
        length = max(self.length_of(request.sample_id), num_sampled + 1)
        turn = num_sampled * num_turns // length
        return request.start - num_sampled + math.ceil((turn + 1) * length / num_turns)

    def observation(self, sample: Sample) -> Observation:
        """Return the observation after the sample's last turn; empty before the first one."""
        if not sample.spans:
            return Observation(())
        if sample.num_tokens >= min(self.length_of(sample.id), self.max_response_tokens):
            return Observation((), is_final=True)
        return Observation((0,) * self.turns.observation_tokens)

    def seconds(self, sample: Sample, observation: Observation) -> float:
        """Return how long the tool takes to reply with `observation`. It depends only on the
        sample, the turn and the seed.
        """
        if not sample.spans or observation.is_final or not self.turns.tool_s:
            return 0.0
        turn = sum(isinstance(span, Observation) for span in sample.spans)
        stream = _FIRST_STREAM - (sample.index * self.turns.num_turns + turn)
        z = _NORMAL.inv_cdf(uniform(self.seed, sample.prompt.id, stream))
        return self.turns.tool_s * math.exp(self.turns.tool_sigma * z)
