"""Joining a Ray cluster that somebody else started, and what to say when it is not to be had."""

from __future__ import annotations

import logging
import os
import socket

import ray
from ray.exceptions import AuthenticationError, RayError

from april_rl.errors import RunError

_ANSWER_S = 10.0


class JoinError(RunError):
    """The cluster of runtime.ray_address is not there, or does not let this process in."""


def join(address: str) -> None:
    """Become a driver of the cluster at `address`: host:port, or auto for the one whose node this
    machine is. Nothing when that is so already.

    Raises JoinError within seconds where nothing listens, and where the token is wrong or missing.
    """
    if ray.is_initialized():
        return
    if address != "auto":
        _listening(address)
    # Ray's twenty attempts of up to forty seconds are for a cluster that is still starting.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError) as error:
        raise JoinError(f"runtime.ray_address={address}: {_reason(error)}") from error


def _listening(address: str) -> None:
    """Nothing when something does at `address`: Ray itself would take minutes to find out."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise JoinError(
            f"runtime.ray_address={address}: no Ray cluster answers ({error}); it is the address "
            "that `ray start --head` printed, and `ray status` shows whether the cluster is up"
        ) from error


def _reason(error: BaseException) -> str:
    """Why Ray did not let this process in, and what to do, in one line."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    # Of a wrong token Ray keeps only the text of its exception.
    is_token = isinstance(error, AuthenticationError)
    if is_token or any("InvalidAuthToken" in str(link) for link in chain):
        mode = os.environ.get("RAY_AUTH_MODE", "not set")
        return (
            "the cluster wants its token, which is missing here or another one; set "
            f"RAY_AUTH_MODE=token (it is {mode}) and have the token of the node that started the "
            "cluster in ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
        )
    if any("No node info found" in str(link) for link in chain):
        return "this machine is no node of that cluster: `ray start --address=...` here first"
    return f"the Ray cluster cannot be joined ({' '.join(str(error).split())})"
