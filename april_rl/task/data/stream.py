"""The endless stream of prompts, and its exact state.

A sampler chooses the prompts of one set, by default each once an epoch. A mixture takes from
several such streams: the next prompt comes from the source that is furthest behind its share.
After n prompts a source of weight w has given about n · w / Σ w of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from april_rl.config.user_code import Caught
from april_rl.errors import DataError
from april_rl.task.data.prompts import PromptTable
from april_rl.task.data.samplers import Learns, NewSampler, Shuffled
from april_rl.types import Prompt

_REMEDY = (
    "resume with the same data, tokenizer, templates and data.max_prompt_tokens, or train on the "
    "new data in a new run that starts from an export of this one (model.path=RUN/exports/step_N)"
)


class PromptStream:
    """A `rollout.ports.PromptSource` over one set, in the order that a sampler chooses."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        name: str = "",
        path: str = "",
        fingerprint: str = "",
        new_sampler: NewSampler | None = None,
    ) -> None:
        """`prompts` get new ids; `path` is their source as the settings name it; `restore` compares
        their `fingerprint`, a hash of all of them; the default sampler is `Shuffled`.
        """
        assert prompts, "a stream needs at least one prompt"
        self._prompts, self._name = prompts, name
        self._path, self._fingerprint = path, fingerprint
        self._seed = seed
        self._sampler = (
            Shuffled(len(prompts), seed, name=name)
            if new_sampler is None
            else new_sampler(len(prompts), name)
        )
        self._learner = self._sampler if isinstance(self._sampler, Learns) else None
        self._drawn: dict[int, int] = {}  # index by id of prompts whose rewards are awaited
        self.num_taken = 0

    @property
    def learns(self) -> bool:
        return self._learner is not None

    def take(self, prompt_id: int | None = None) -> Prompt:
        """Return the next prompt; its id is the number of prompts taken before, or `prompt_id`."""
        prompt_id = self.num_taken if prompt_id is None else prompt_id
        index = self._draw()
        if self._learner is not None:
            self._drawn[prompt_id] = index
        self.num_taken += 1
        return replace(self._prompts[index], id=prompt_id)

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Give the rewards [G] of a prompt's group to a sampler that reads them."""
        index = self._drawn.pop(prompt.id, None)
        if self._learner is not None and index is not None:
            self._call("learn", index, rewards)

    def save(self) -> dict[str, Any]:
        """Return plain data for JSON; raise DataError if the sampler's state cannot be written."""
        return {
            "seed": self._seed,
            "num_taken": self.num_taken,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
            "drawn": [*self._drawn.items()],
            "sampler": self._sampler_state(),
            "sampler_name": type(self._sampler).__name__,
        }

    def _draw(self) -> int:
        drawn, num_prompts = self._call("draw"), len(self._prompts)
        is_integer = isinstance(drawn, int | np.integer) and not isinstance(drawn, bool)
        if is_integer and 0 <= drawn < num_prompts:
            return int(drawn)
        source = f" of data.sources.{self._name}" if self._name else ""
        raise DataError(
            f"data.sampler: draw of {type(self._sampler).__name__} returned {drawn!r} of type "
            f"{type(drawn).__name__} for {num_prompts} prompts{source}; return the index of one of "
            f"them, an integer from 0 to {num_prompts - 1}"
        )

    def _sampler_state(self) -> Any:  # noqa: ANN401
        """Return a copy of the sampler's state: it is written while the sampler changes."""
        state = self._call("save")
        try:
            written = json.loads(json.dumps(state))
            if not _has_text_keys(state):
                raise TypeError("it would turn keys of a dict into texts")
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"data.sampler: what save of {type(self._sampler).__name__} returned cannot be "
                f"written as JSON ({error}), so no checkpoint would have it; return plain numbers, "
                "texts, lists, and dicts with texts as keys (of numpy: int(x), float(x), "
                "x.tolist())"
            ) from error
        return written

    def _call(self, method: str, *args: object) -> Any:  # noqa: ANN401
        """Call a method of the sampler; raise DataError when it fails, so that the run can stop
        with everything saved.
        """
        with Caught() as caught:
            return getattr(self._sampler, method)(*args)
        raise DataError(
            f"data.sampler: {method} of {type(self._sampler).__name__} failed: {caught.message}"
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; raise DataError if seed, data or sampler differ."""
        if state["seed"] != self._seed:
            raise DataError(
                f"seed={self._seed} is not the seed of the saved prompt stream ({state['seed']}): "
                "resume with the same seed"
            )
        if state["num_prompts"] != len(self._prompts):
            raise DataError(
                f"{self._setting} gives {len(self._prompts)} prompts and the saved prompt stream "
                f"had {state['num_prompts']}: {_REMEDY}"
            )
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"{self._setting} has changed since the checkpoint was written: it gives "
                f"{len(self._prompts)} prompts, as before, but their tokens, answers or order "
                f"differ: {_REMEDY}"
            )
        name = type(self._sampler).__name__
        if state["sampler_name"] != name:
            raise DataError(
                f"data.sampler is {name}, and the checkpoint has the state of "
                f"{state['sampler_name']}: resume with the same sampler"
            )
        self._call("restore", state["sampler"])
        self._drawn = dict(state["drawn"])
        self.num_taken = state["num_taken"]

    @property
    def _setting(self) -> str:
        key = f"data.sources.{self._name}.path" if self._name else "data.path"
        return f"{key}={self._path}"


def _has_text_keys(state: object) -> bool:
    """Return whether every dict in a state has texts as keys, which JSON keeps."""
    if isinstance(state, dict):
        return all(isinstance(key, str) and _has_text_keys(state[key]) for key in state)
    return not isinstance(state, list | tuple) or all(map(_has_text_keys, state))


class MixedStream:
    """A `rollout.ports.PromptSource` over several sources, each with its share of the prompts."""

    def __init__(self, streams: Mapping[str, PromptStream], weights: Mapping[str, float]) -> None:
        """`weights` [source] are positive, and only their ratios matter."""
        assert streams.keys() == weights.keys(), (streams.keys(), weights.keys())
        self._streams, self._weights = dict(streams), dict(weights)

    def take(self) -> Prompt:
        """Return the next prompt; its id is its position in the whole stream."""
        position = sum(stream.num_taken for stream in self._streams.values())
        # The source furthest behind its share (Sainte-Laguë's rule); the first one of a tie.
        source = min(
            self._streams,
            key=lambda name: (self._streams[name].num_taken + 0.5) / self._weights[name],
        )
        return self._streams[source].take(position)

    @property
    def learns(self) -> bool:
        return any(stream.learns for stream in self._streams.values())

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        self._streams[prompt.dataset].learn(prompt, rewards)

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
    sources: Mapping[str, PromptTable],
    weights: Mapping[str, float],
    *,
    seed: int,
    new_sampler: NewSampler | None = None,
) -> PromptStream | MixedStream:
    """Return the stream of one set, which has the name "", or of a mixture."""
    streams = {
        name: PromptStream(
            table,
            seed=seed,
            name=name,
            path=table.path,
            fingerprint=table.fingerprint,
            new_sampler=new_sampler,
        )
        for name, table in sources.items()
    }
    return streams[""] if streams.keys() == {""} else MixedStream(streams, weights)
