"""Build the sampler of data.sampler for each set of prompts."""

from __future__ import annotations

import json
from functools import partial

import xxhash

from april_rl.config.task import SAMPLERS, DataConfig
from april_rl.config.user_code import Hook, check_call, import_function
from april_rl.task.data.samplers import ByPassRate, NewSampler, Sampler
from april_rl.task.data.stream import PromptStream
from april_rl.types import Prompt


def sampler_maker(config: DataConfig, *, seed: int) -> NewSampler | None:
    """Return what makes a set's sampler, after a trial; None: default. Raise OwnFunctionError."""
    if config.sampler == "shuffled":
        return None
    make: NewSampler = partial(_own, config, seed)
    if config.sampler in SAMPLERS:
        make = partial(_by_pass_rate, config, seed)
    Hook("data.sampler", config.sampler).call(
        partial(_try, make),
        "failed when it was made for two prompts, drawn from, saved and restored as a test",
    )
    return make


def _try(make: NewSampler) -> None:
    """Take prompts of two for more than an epoch, with rewards and a checkpoint in between."""
    prompts = [Prompt(id=n, token_ids=(n,), text="", answer="", source="") for n in range(2)]
    stream = PromptStream(prompts, seed=0, new_sampler=make)
    stream.learn(stream.take(), (1.0, 0.0))
    resumed = PromptStream(prompts, seed=0, new_sampler=make)
    resumed.restore(json.loads(json.dumps(stream.save())))
    for _ in range(4):
        resumed.take()


def _by_pass_rate(config: DataConfig, seed: int, num_prompts: int, name: str) -> Sampler:
    return ByPassRate(num_prompts, seed, name=name, **config.sampler_args)


def _own(config: DataConfig, seed: int, num_prompts: int, name: str) -> Sampler:
    found = import_function(config.sampler)
    own_seed = xxhash.xxh32_intdigest(f"{seed} {name}".encode()) if name else seed
    check_call(found, "num_prompts", "seed", args=config.sampler_args, key="data.sampler_args")
    made: Sampler = found(num_prompts, own_seed, **config.sampler_args)
    lacks = [method for method in ("draw", "save", "restore") if method not in dir(made)]
    if lacks:
        raise TypeError(f"{config.sampler} lacks the method {lacks[0]}")
    return made
