"""What runs in a reward process: it loads the functions, decodes responses, calls the functions and
checks what they return.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from april_rl.rewards.child_process import die_with_controller
from april_rl.rewards.functions import RewardFunction
from april_rl.rewards.jobs import Job, Responses, Verdict
from april_rl.rewards.loading import Context, LoadedFunction, load_function
from april_rl.rewards.plugins import Caught, memory_gib

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a reward process has loaded before its first job."""

    functions: tuple[LoadedFunction, ...]
    decode: Decode


# What this process has loaded, or why it failed. Global: the pool calls plain functions.
loaded: Loaded | Verdict = Verdict(outcome="refused", message="is not loaded")


def prepare_process(
    functions: tuple[RewardFunction, ...],
    *,
    context: Context,
    memory_bytes: int,
    decoder: bytes,
) -> None:
    """Set the limits of a reward process and load everything before its first job is timed;
    `decoder` is a pickled `Decode`.
    """
    global loaded
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    die_with_controller()
    loaded = load(functions, context, decoder)


def score(job: Job) -> list[list[Verdict]]:
    """Return the verdicts of the functions on each response of a job [n]."""
    num = len(job.token_ids)
    if isinstance(loaded, Verdict):
        return [[loaded]] * num
    with Caught() as caught:
        texts = [loaded.decode(token_ids) for token_ids in job.token_ids]
    if caught.message:
        return [[Verdict(outcome="undecoded", message=caught.message)]] * num
    responses = Responses(
        prompt=job.prompt,
        texts=texts,
        num_tokens=[len(token_ids) for token_ids in job.token_ids],
        truncated=job.truncated,
    )
    return _verdicts(loaded, responses, [job.whole_group])


def score_texts(responses: Responses) -> list[list[Verdict]]:
    """Return the verdicts of every function on responses that are texts already [n]."""
    if isinstance(loaded, Verdict):
        return [[loaded]] * len(responses.texts)
    return _verdicts(loaded, responses, [False, True])


def needed_columns() -> dict[str, tuple[str, ...]] | Verdict:
    """Return the data columns that each function takes, or why they cannot be loaded."""
    if isinstance(loaded, Verdict):
        return loaded
    return {function.settings.name: function.columns for function in loaded.functions}


def function_notes() -> tuple[str, ...] | Verdict:
    """Return notes on the functions for the user, or why they cannot be loaded."""
    if isinstance(loaded, Verdict):
        return loaded
    return tuple(f"{f.settings}: {f.note}" for f in loaded.functions if f.note)


def load(
    functions: tuple[RewardFunction, ...], context: Context, decoder: bytes
) -> Loaded | Verdict:
    """Return the functions and the decoder, or the verdict for every response when one of them
    cannot be loaded.
    """
    found: list[LoadedFunction] = []
    for function in functions:
        with Caught() as caught:
            found.append(load_function(function, context))
        if caught.message:
            message = f"cannot be loaded: {caught.message}"
            return Verdict(outcome="refused", name=function.name, message=message)
    with Caught() as caught:
        return Loaded(functions=tuple(found), decode=pickle.loads(decoder))
    memory = f"reward.memory_gib = {memory_gib():g}"  # a library that does not fit may not say why
    return Verdict(
        outcome="undecoded",
        message=f"the tokenizer cannot be loaded with {memory}: {caught.message}",
    )


def _verdicts(
    loaded: Loaded, responses: Responses, whole_groups: Sequence[bool]
) -> list[list[Verdict]]:
    called = [
        function.scorer(responses)
        for function in loaded.functions
        if function.settings.wants_group in whole_groups
        if function.settings.scores(responses.prompt.dataset)
    ]
    return [list(of_response) for of_response in zip(*called, strict=True)]
