"""How an update trained each token of each response.

Legend: [N] response tokens of a row, [R] tokens of a response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from april_rl.training.algorithm.losses import LossInputs
from april_rl.training.learner.objective import RowLoss
from april_rl.training.learner.row import PackedRow
from april_rl.training.recorded_steps import RecordedStep
from april_rl.types import Sample

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedResponse:
    """A response, and how each of its tokens was trained.

    `tokens` has, each [R]: ages; advantages; ratios, learner ÷ what the loss compares it with;
    weights of the off-policy correction; masks, 1 for a token that a mask leaves out; clipped, 1
    if the loss clipped it; pushes, minus the gradient of the loss by the log-probability: above 0,
    the update makes the token more likely.
    """

    sample: Sample
    reward: float
    tokens: Mapping[str, Floats]

    @property
    def size(self) -> float:
        """Return how much the response pulls at the update, whichever way."""
        return float(np.abs(self.tokens["pushes"]).sum())

    def figures(self, total: float) -> dict[str, object]:
        """Return means over the tokens, and the share of the pushes of all responses."""
        means = {name: float(each.mean()) for name, each in self.tokens.items() if len(each)}
        return {
            "prompt_id": self.sample.prompt.id,
            "index": self.sample.index,
            "num_tokens": self.sample.num_tokens,
            "finish_reason": self.sample.finish_reason,
            "reward": self.reward,
            **means,
            "share": self.size / max(total, 1e-30),
        }


class Watched:
    """The rows of an update as the objective computed them; pushes add up over passes."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], dict[str, Floats]] = {}  # by tokens and a probability

    def clear(self) -> None:
        """Forget all rows, before another update."""
        self._found.clear()

    def __call__(self, row: PackedRow, inputs: LossInputs, loss: RowLoss) -> None:
        """Note a row, and the gradient of its log-probabilities when it is known."""
        values = {
            "ages": row.ages,
            "advantages": inputs.advantages,
            "ratios": (inputs.logprobs - inputs.anchor_logprobs).exp(),
            "weights": loss.importance_weights,
            "masks": loss.is_masked,
            "clipped": loss.clipped,
            "pushes": row.loss_weights * 0,
        }
        keys = []
        for tokens in _each_response(row):
            key = _key(row.labels[tokens], row.behaviour_logprobs[tokens])
            keys.append((key, tokens))
            own = {name: _floats(value[tokens]) for name, value in values.items()}
            self._found.setdefault(key, own)
        if inputs.logprobs.requires_grad:
            add = partial(self._add, keys)
            inputs.logprobs.register_hook(add)  # type: ignore[no-untyped-call]

    def _add(self, keys: Sequence[tuple[tuple[int, ...], slice]], gradient: Tensor) -> None:
        for key, tokens in keys:
            self._found[key]["pushes"] -= _floats(gradient[tokens])

    def responses(self, recorded: RecordedStep) -> list[TrainedResponse]:
        """Return every trained response of a step, those that pull most at the update first. Equal
        responses to a prompt share what they did.
        """
        samples = [sample for scored in recorded.groups for sample in scored.group.samples]
        rewards = [reward for scored in recorded.groups for reward in scored.rewards]
        keys = [_key(sample.token_ids, sample.behaviour_logprobs) for sample in samples]
        times, found = Counter(keys), []
        for sample, reward, key in zip(samples, rewards, keys, strict=True):
            if (values := self._found.get(key)) is not None:
                own = {**values, "pushes": values["pushes"] / times[key]}
                found.append(TrainedResponse(sample=sample, reward=reward, tokens=own))
        return sorted(found, key=lambda response: -response.size)


def _each_response(row: PackedRow) -> Iterator[slice]:
    end = 0
    for length in row.responses.lengths.tolist():
        begin, end = end, end + length
        if length:
            yield slice(begin, end)


def _key(token_ids: Sequence[int] | Tensor, logprobs: Sequence[float] | Tensor) -> tuple[int, ...]:
    """Return what tells a response from others: its tokens and the bits of a probability."""
    first = np.float32(float(logprobs[0])).view(np.int32) if len(logprobs) else 0
    return (int(first), *(int(token) for token in token_ids))


def _floats(values: Tensor) -> Floats:
    found: Floats = values.detach().double().cpu().numpy().copy()
    return found
