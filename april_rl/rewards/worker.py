"""What runs in a reward process: it loads the functions, decodes responses, calls the functions and
checks what they return.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from april_rl.rewards.child_process import die_with_controller
from april_rl.rewards.functions import RewardFunction
from april_rl.rewards.jobs import About, Job, Responses, Result, Verdict
from april_rl.rewards.loading import Context, Reward, load_reward
from april_rl.rewards.plugins import Caught, memory_gib

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a reward process has loaded before its first job."""

    rewards: tuple[tuple[RewardFunction, Reward], ...]
    decode: Decode


# What this process has loaded, or why it failed. Global: the pool calls plain functions.
loaded: Loaded | Verdict = Verdict(outcome="refused", message="is not loaded")


def prepare_process(
    functions: tuple[RewardFunction, ...],
    *,
    context: Context,
    memory_bytes: int,
    decoder: bytes,
    states: Mapping[str, str],
    lifeline: Connection,
) -> None:
    """Set the limits of a reward process and load everything before its first job is timed;
    `decoder` is a pickled `Decode`, `states` those that rewards continue from, by function.
    """
    global loaded
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    die_with_controller(lifeline)
    loaded = load(functions, context, decoder=decoder, states=states)


def score(job: Job) -> Result:
    """Return the verdicts of the functions on each response of a job [n], and their states."""
    num = len(job.token_ids)
    if isinstance(loaded, Verdict):
        return Result([[loaded]] * num, {})
    with Caught() as caught:
        texts = [loaded.decode(token_ids) for token_ids in job.token_ids]
    if caught.message:
        return Result([[Verdict(outcome="undecoded", message=caught.message)]] * num, {})
    responses = Responses(
        prompt=job.prompt,
        texts=texts,
        num_tokens=[len(token_ids) for token_ids in job.token_ids],
        truncated=job.truncated,
    )
    return _result(loaded, responses, [job.whole_group])


def try_on(responses: Responses) -> list[list[Verdict]]:
    """Return the verdicts of every function on responses that are texts already [n]. A reward with
    a state has the same one afterwards.
    """
    if isinstance(loaded, Verdict):
        return [[loaded]] * len(responses.texts)
    states = [reward.state for _, reward in loaded.rewards]
    verdicts = _result(loaded, responses, [False, True]).verdicts
    for (function, reward), state in zip(loaded.rewards, states, strict=True):
        with Caught() as caught:
            if state is not None:
                reward.restore(state)
        if caught.message:
            message = f"cannot restore what it saved: {caught.message}"
            return [[Verdict(outcome="refused", name=function.name, message=message)]]
    return verdicts


def about_rewards() -> dict[str, About] | Verdict:
    """Return what the controller must know of each function, or why they cannot be loaded."""
    if isinstance(loaded, Verdict):
        return loaded
    return {
        function.name: About(reward.columns, reward.note) for function, reward in loaded.rewards
    }


def load(
    functions: tuple[RewardFunction, ...],
    context: Context,
    *,
    decoder: bytes,
    states: Mapping[str, str],
) -> Loaded | Verdict:
    """Return the functions and the decoder, or the verdict for every response when one of them
    cannot be loaded.
    """
    found: list[tuple[RewardFunction, Reward]] = []
    for function in functions:
        with Caught() as caught:
            state = states.get(function.name)
            found.append((function, load_reward(function, context, state=state)))
        if caught.message:
            message = f"cannot be loaded: {caught.message}"
            return Verdict(outcome="refused", name=function.name, message=message)
    with Caught() as caught:
        return Loaded(rewards=tuple(found), decode=pickle.loads(decoder))
    memory = f"reward.memory_gib = {memory_gib():g}"  # a library that does not fit may not say why
    return Verdict(
        outcome="undecoded",
        message=f"the tokenizer cannot be loaded with {memory}: {caught.message}",
    )


def _result(loaded: Loaded, responses: Responses, whole_groups: Sequence[bool]) -> Result:
    called = [
        (function.name, reward)
        for function, reward in loaded.rewards
        if function.wants_group in whole_groups
        if function.scores(responses.prompt.dataset)
    ]
    verdicts = [reward.verdicts(name, responses) for name, reward in called]
    return Result(
        verdicts=[list(of_response) for of_response in zip(*verdicts, strict=True)],
        states={name: reward.state for name, reward in called if reward.state is not None},
    )
