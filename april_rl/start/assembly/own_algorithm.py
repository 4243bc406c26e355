"""The user's own advantages and group filter; the loss is in `training/learner/own_loss.py`.

Each is called as the built-in ones are, with the arguments of `algorithm.args` that it names. The
result is checked at every call, so that a wrong shape ends the run before it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Advantage
from april_rl.config.user_code import Hook
from april_rl.training.algorithm.advantages import Credits, Floats64
from april_rl.types import Sample, ScoredGroup

GroupFilter = Callable[[ScoredGroup], bool]


def load_advantages(config: AlgorithmConfig) -> Credits | None:
    """Return the function of algorithm.advantage, None if built in; raise OwnFunctionError."""
    if config.advantage in Advantage.__members__:
        return None
    hook = Hook("algorithm.advantage", config.advantage)
    estimate = _load(hook, config, "samples", "rewards")

    def call_and_check(
        groups: Sequence[ScoredGroup], rewards: Sequence[ArrayLike]
    ) -> Sequence[Sequence[float | Floats64]]:
        samples = [scored.group.samples for scored in groups]
        return hook.call(lambda: _advantages_of(samples, estimate(samples, rewards)))

    return call_and_check


def load_group_filter(config: AlgorithmConfig) -> GroupFilter | None:
    """Return the function of algorithm.group_filter, None without one; raise OwnFunctionError."""
    if config.group_filter is None:
        return None
    hook = Hook("algorithm.group_filter", config.group_filter)
    keep = _load(hook, config, "scored")

    def call(scored: ScoredGroup) -> bool:
        kept = keep(scored)
        if isinstance(kept, bool | np.bool_):
            return bool(kept)
        raise TypeError(f"it returned {kept!r:.80}; return True for a group to train, or False")

    return lambda scored: hook.call(partial(call, scored))


def _load(hook: Hook, config: AlgorithmConfig, *given: str) -> Callable[..., Any]:
    return hook.load(*given, args=config.args, key="algorithm.args", is_shared=True)


def _advantages_of(
    samples: Sequence[Sequence[Sample]],
    returned: Any,  # noqa: ANN401
) -> list[list[float | Floats64]]:
    """Return what a function returned for groups of samples; raise TypeError for anything but a
    finite number, or one for each response token, for each sample.
    """
    groups = list(returned) if np.iterable(returned) else [returned]
    flat = [group for group in groups if isinstance(group, str) or not np.iterable(group)]
    if flat:
        raise TypeError(
            f"it returned {flat[0]!r:.80} where the advantages of a group belong; return for each "
            "group a list (or an array) with one number, or one array [R], for each sample"
        )
    found = [[np.asarray(each) for each in group] for group in groups]
    if [len(group) for group in found] != [len(group) for group in samples]:
        raise TypeError(
            f"it returned {[len(group) for group in found]} advantages for groups of "
            f"{[len(group) for group in samples]} samples; return one list for each group"
        )
    return [
        [_advantage_of(sample, each) for sample, each in zip(group, of_group, strict=True)]
        for group, of_group in zip(samples, found, strict=True)
    ]


def _advantage_of(sample: Sample, found: NDArray[Any]) -> float | Floats64:
    place = f"a sample of the prompt {sample.prompt.text!r:.80} ({sample.prompt.source})"
    if found.dtype.kind not in "biuf":
        raise TypeError(f"it returned {found.tolist()!r:.80} for {place}; return numbers")
    if found.ndim and found.shape != (sample.num_tokens,):
        raise TypeError(
            f"it returned an array of shape {list(found.shape)} for {place}, which has "
            f"{sample.num_tokens} response tokens; return a number or one for each token"
        )
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(found.astype(np.float32)).all()  # as it is trained
    if not is_finite:
        raise TypeError(f"it returned an advantage that is not finite in float32 for {place}")
    return found.astype(np.float64) if found.ndim else float(found)
