"""Facts about an environment's class that the controller needs before it reads the data."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from april_rl.config.environment import EnvironmentConfig
from april_rl.config.secrets import forget_secrets
from april_rl.environments.adapters import columns_of, is_of_tools, methods_of, tools_of
from april_rl.environments.jobs import EnvironmentFailedError
from april_rl.environments.loading import check_loadable, load_class
from april_rl.rewards.child_process import die_with_controller, lifeline, limit_memory
from april_rl.rewards.plugins import GIB, Caught
from april_rl.rewards.processes import stop


class Description(NamedTuple):
    """Facts of a class."""

    tools: tuple[Mapping[str, Any], ...] = ()  # their JSON schemas, for the chat template
    columns: tuple[str, ...] = ()  # data columns that its `reset` names


def describe(config: EnvironmentConfig) -> Description:
    """Return the facts of the class that `environment.function` names, from a process of its own.
    Raise EnvironmentFailedError when it cannot be loaded.
    """
    pool = ProcessPool(
        max_workers=1,
        initializer=_prepare,
        initargs=(config, lifeline()),
        context=multiprocessing.get_context("forkserver"),
    )
    limit_s = config.start_timeout_s
    try:
        found = pool.schedule(_described, args=(config,), timeout=limit_s).result()
    except (TimeoutError, ProcessExpired) as error:
        found = (
            f"its process died or did not load it within environment.start_timeout_s={limit_s:g}: "
            f"{error}"
        )
    finally:
        stop(pool)
    if isinstance(found, str):
        raise EnvironmentFailedError(f"{config.setting}: {found}")
    return found


def _prepare(config: EnvironmentConfig, lifeline: Connection) -> None:
    limit_memory(int(config.memory_gib * GIB))
    die_with_controller(lifeline)
    forget_secrets(config.secrets)


def _described(config: EnvironmentConfig) -> Description | str:
    with Caught() as caught:
        check_loadable(config)
        if config.has_agent:
            return Description()
        found = load_class(config.function, config.args)
        if not is_of_tools(found):
            return Description()
        from transformers.utils.chat_template_utils import get_json_schema

        methods = methods_of(found(**config.args))
        tools = tuple(get_json_schema(methods[name]) for name in tools_of(found))
        return Description(tools, columns_of(found))
    return caught.message
