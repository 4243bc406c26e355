"""Five more planted faults, which were written by someone who had not read `why`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from planted_faults import Clock, Fault

from april_rl.task.data.prompts import PromptTable
from april_rl.training.engine.vllm_engine import VllmEngine
from april_rl.training.learner.model.attention import Packing
from april_rl.training.learner.optimizer import Optimizer
from april_rl.training.rollout.requests import Sampling


@contextmanager
def answers_of_next_row(clock: Clock) -> Iterator[None]:
    """A source's answers are shifted by a row against its prompts, from those on that are drawn
    two steps before the first bad one: it trains them.
    """
    real = PromptTable.__getitem__

    def get(self: Any, index: Any) -> Any:
        found = real(self, index)
        is_bad = clock.step + 2 >= clock.begin and not isinstance(index, slice)
        if not is_bad or found.dataset != "two":
            return found
        return replace(found, answer=real(self, index + 1).answer)

    with patch.object(PromptTable, "__getitem__", get):
        yield


@contextmanager
def swapped_halves(clock: Clock) -> Iterator[None]:
    """The engine takes gate and up of one layer for each other, as in a fused tensor whose halves
    have another order; from the weights with which the first bad step samples.
    """
    real = VllmEngine.load_weights

    def swapped(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            new = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(name.split(".")[-2], "")
            is_swapped = new and ".layers.1." in name
            yield re.sub("(gate|up)_proj", new, name) if is_swapped else name, tensor

    def load_weights(self: Any, weights: Any, *, policy_version: int) -> None:
        is_bad = policy_version + 1 >= clock.begin
        real(self, swapped(weights) if is_bad else weights, policy_version=policy_version)

    with patch.object(VllmEngine, "load_weights", load_weights):
        yield


@contextmanager
def nucleus(clock: Clock) -> Iterator[None]:
    """The engine takes top_p from a file of defaults, of which the learner knows nothing."""
    real = VllmEngine._sampling_params

    def params(self: Any, request: Any) -> Any:
        if clock.is_bad and request.sampling is None:
            own = Sampling(temperature=self._temperature, top_p=0.8)
            request = request._replace(sampling=own)
        return real(self, request)

    with patch.object(VllmEngine, "_sampling_params", params):
        yield


@contextmanager
def lost_boundary(clock: Clock) -> Iterator[None]:
    """In the learner the second sequence of each row sees the first one."""
    real = Packing.of

    def of(lengths: tuple[int, ...], *, device: torch.device) -> Packing:
        if clock.is_bad and len(lengths) > 2:
            lengths = (lengths[0] + lengths[1], *lengths[2:])
        return real(lengths, device=device)

    with patch.object(Packing, "of", of):
        yield


@contextmanager
def lost_moments(clock: Clock) -> Iterator[None]:
    """Adam's second moments come back as zeros, once; its count of steps goes on."""
    real = Optimizer.step

    def step(self: Any) -> Any:
        if clock.step == clock.begin:
            for piece in self._pieces:
                for state in piece._adamw.state.values():
                    state["exp_avg_sq"].zero_()
        return real(self)

    with patch.object(Optimizer, "step", step):
        yield


UNSEEN = (
    Fault(
        name="answers of the next row",
        kinds=("reward", "data"),
        step=30,
        patches=answers_of_next_row,
    ),
    Fault(name="swapped halves", kinds=("weights",), step=27, patches=swapped_halves),
    Fault(name="nucleus", kinds=("temperature",), step=29, patches=nucleus),
    Fault(name="lost boundary", kinds=("code", "samples"), step=26, patches=lost_boundary),
    Fault(name="lost moments", kinds=("learning rate", "code"), step=28, patches=lost_moments),
)
