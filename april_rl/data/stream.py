"""The endless, shuffled stream of prompts, and its exact state.

The stream of one set yields every prompt once an epoch. A mixture takes from several such streams:
the next prompt comes from the source that is furthest behind its share, so that after n prompts a
source of weight w has given n · w / Σ w of them, give or take a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from april_rl.data.errors import DataError
from april_rl.data.prompts import PromptTable
from april_rl.types import Prompt


def epoch_order(num_prompts: int, *, seed: int, epoch: int, name: str = "") -> NDArray[np.int64]:
    """Return the permutation of one epoch [num_prompts] of the source `name`.

    It is made from the raw bits of a bit generator, whose stream numpy keeps stable over versions;
    numpy makes no such promise for `Generator.permutation`.
    """
    entropy = [seed, epoch, xxhash.xxh3_64_intdigest(name.encode())] if name else [seed, epoch]
    bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(num_prompts)
    return np.argsort(bits, kind="stable")


class Origin(NamedTuple):
    """Source of the prompts of a stream."""

    path: str = ""  # as the settings name it
    fingerprint: str = ""  # of all prompts: another one means other prompts


NO_ORIGIN = Origin()
_HOW_TO_GO_ON = (
    "resume with the same data, tokenizer, templates and data.max_prompt_tokens, or train on the "
    "new data in a new run that starts from an export of this one (model.path=RUN/exports/step_N)"
)


class PromptStream:
    """A `rollout.ports.PromptSource` that yields every prompt once an epoch, in a new order each
    time.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        name: str = "",
        origin: Origin = NO_ORIGIN,
    ) -> None:
        """`prompts` are yielded with new ids; `seed` is not negative; `name` is the name of the
        source, and `origin` is what a saved stream is compared with.
        """
        assert prompts, "a stream needs at least one prompt"
        self._prompts, self._name, self._origin = prompts, name, origin
        self._seed = seed
        self._move_to(epoch=0, cursor=0)

    @property
    def num_taken(self) -> int:
        """Return the number of prompts taken so far, which is the id of the next one."""
        return self._epoch * len(self._prompts) + self._cursor

    def take(self) -> Prompt:
        """Return the next prompt; its id is its position in the stream, epoch · num_prompts +
        cursor.
        """
        position = self.num_taken
        if self._cursor == len(self._prompts):
            self._move_to(epoch=self._epoch + 1, cursor=0)
        prompt = self._prompts[int(self._order[self._cursor])]
        self._cursor += 1
        return replace(prompt, id=position)

    def save(self) -> dict[str, int | str]:
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "cursor": self._cursor,
            "num_prompts": len(self._prompts),
            "fingerprint": self._origin.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken; raises DataError if seed or data differ."""
        if state["seed"] != self._seed:
            raise DataError(
                f"seed={self._seed} is not the seed of the saved prompt stream ({state['seed']}): "
                "resume with the same seed"
            )
        if state["num_prompts"] != len(self._prompts):
            raise DataError(
                f"{self._setting} gives {len(self._prompts)} prompts and the saved prompt stream "
                f"had {state['num_prompts']}: {_HOW_TO_GO_ON}"
            )
        if state.get("fingerprint", self._origin.fingerprint) != self._origin.fingerprint:
            raise DataError(
                f"{self._setting} has changed since the checkpoint was written: it gives "
                f"{len(self._prompts)} prompts, as before, but other tokens, answers or another "
                f"order: {_HOW_TO_GO_ON}"
            )
        self._move_to(epoch=state["epoch"], cursor=state["cursor"])

    @property
    def _setting(self) -> str:
        key = f"data.sources.{self._name}.path" if self._name else "data.path"
        return f"{key}={self._origin.path}"

    def _move_to(self, *, epoch: int, cursor: int) -> None:
        self._order = epoch_order(len(self._prompts), seed=self._seed, epoch=epoch, name=self._name)
        self._epoch = epoch
        self._cursor = cursor


class MixedStream:
    """A `rollout.ports.PromptSource` over several sources, each with its share of the prompts."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        *,
        seed: int,
        origins: Mapping[str, Origin] | None = None,
    ) -> None:
        """`weights` [source] are positive; only their ratios matter. `origins` [source] are what a
        saved stream is compared with.
        """
        assert sources.keys() == weights.keys(), (sources.keys(), weights.keys())
        self._streams = {
            name: PromptStream(
                prompts, seed=seed, name=name, origin=(origins or {}).get(name, NO_ORIGIN)
            )
            for name, prompts in sources.items()
        }
        self._weights = dict(weights)

    def take(self) -> Prompt:
        """Return the next prompt; its id is its position in the whole stream."""
        position = sum(stream.num_taken for stream in self._streams.values())
        return replace(self._streams[self._next_source()].take(), id=position)

    def _next_source(self) -> str:
        """Return the source furthest behind its share (Sainte-Laguë's rule); the first one of a
        tie.
        """
        return min(
            self._streams,
            key=lambda name: (self._streams[name].num_taken + 0.5) / self._weights[name],
        )

    def save(self) -> dict[str, Any]:
        return {
            name: {**stream.save(), "weight": self._weights[name]}
            for name, stream in self._streams.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken; raises DataError if seed or mixture differ."""
        saved = {name: source["weight"] for name, source in state.items()}
        if saved != self._weights:
            raise DataError(
                f"data.sources has the weights {self._weights} and the saved prompt stream "
                f"{saved}: resume with the same mixture"
            )
        for name, stream in self._streams.items():
            stream.restore(state[name])


def stream_of(
    sources: Mapping[str, PromptTable], weights: Mapping[str, float], *, seed: int
) -> PromptStream | MixedStream:
    """Return the stream of one set, which has the name "", or of a mixture."""
    origins = {name: Origin(table.path, table.fingerprint) for name, table in sources.items()}
    if sources.keys() == {""}:
        return PromptStream(sources[""], seed=seed, origin=origins[""])
    return MixedStream(sources, weights, seed=seed, origins=origins)
