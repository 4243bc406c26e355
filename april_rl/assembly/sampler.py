"""Build the sampler of data.sampler for each set of prompts."""

from __future__ import annotations

import inspect
from functools import partial

import xxhash

from april_rl.config.task import SAMPLERS, DataConfig
from april_rl.data.errors import DataError
from april_rl.data.samplers import ByPassRate, NewSampler, Sampler
from april_rl.outside.user_code import Caught, import_function


def sampler_maker(config: DataConfig, *, seed: int) -> NewSampler | None:
    """Return the function that makes a set's sampler; None for the default. Make one and draw
    from it as a test; raise DataError for a class that cannot be used.
    """
    if config.sampler == "shuffled":
        return None
    make: NewSampler = partial(_own, config, seed)
    if config.sampler in SAMPLERS:
        make = partial(_by_pass_rate, config, seed)
    with Caught() as caught:
        make(2, "").draw()
    if caught.message:
        raise DataError(
            f"data.sampler={config.sampler} failed when made for two prompts and drawn from as a "
            f"test: {caught.message}"
        )
    return make


def _by_pass_rate(config: DataConfig, seed: int, num_prompts: int, name: str) -> Sampler:
    return ByPassRate(num_prompts, seed, name=name, **config.sampler_args)


def _own(config: DataConfig, seed: int, num_prompts: int, name: str) -> Sampler:
    found = import_function(config.sampler)
    own_seed = xxhash.xxh32_intdigest(f"{seed} {name}".encode()) if name else seed
    inspect.signature(found).bind(num_prompts, own_seed, **config.sampler_args)
    made: Sampler = found(num_prompts, own_seed, **config.sampler_args)
    lacks = [method for method in ("draw", "save", "restore") if method not in dir(made)]
    if lacks:
        raise TypeError(f"{config.sampler} lacks the method {lacks[0]}")
    return made
