"""The endless, shuffled stream of prompts, and its exact state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from april_rl.data.errors import DataError
from april_rl.types import Prompt


def epoch_order(num_prompts: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of one epoch [num_prompts].

    From the raw bits of a bit generator, whose stream numpy keeps over its versions; it does not
    promise that of `Generator.permutation`.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_prompts)
    return np.argsort(bits, kind="stable")


class PromptStream:
    """A `rollout.ports.PromptSource`: every prompt once an epoch, each epoch in another order."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        """`prompts` keep all but their ids; `seed` is not negative."""
        assert prompts, "a stream needs at least one prompt"
        self._prompts = tuple(prompts)
        self._seed = seed
        self._move_to(epoch=0, cursor=0)

    def take(self) -> Prompt:
        """The next prompt; its id is its position in the stream, epoch · num_prompts + cursor."""
        if self._cursor == len(self._prompts):
            self._move_to(epoch=self._epoch + 1, cursor=0)
        position = self._epoch * len(self._prompts) + self._cursor
        prompt = self._prompts[int(self._order[self._cursor])]
        self._cursor += 1
        return replace(prompt, id=position)

    def state(self) -> dict[str, int]:
        """Where the stream stands, as plain data."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "num_prompts": len(self._prompts),
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on exactly where `state` was taken; raises DataError for another seed or data set."""
        if state["seed"] != self._seed:
            raise DataError(
                f"seed={self._seed} is not the seed of the saved prompt stream ({state['seed']}): "
                "resume with the same one"
            )
        if state["num_prompts"] != len(self._prompts):
            raise DataError(
                f"data.path gives {len(self._prompts)} prompts and the saved prompt stream had "
                f"{state['num_prompts']}: resume with the same data, tokenizer and "
                "data.max_prompt_tokens"
            )
        self._move_to(epoch=state["epoch"], cursor=state["cursor"])

    def _move_to(self, *, epoch: int, cursor: int) -> None:
        """Stand before place `cursor` of an epoch."""
        self._order = epoch_order(len(self._prompts), seed=self._seed, epoch=epoch)
        self._epoch = epoch
        self._cursor = cursor
