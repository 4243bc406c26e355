"""The HTTP server of a process with agents: it serves chat and text completions that the policy
samples.

It listens at environment.address. Each episode has a key of its own, which is valid until the
episode ends. A request waits on its connection until the policy has taken a turn, even across
weight syncs and while the sample is parked.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from aiohttp import web

from april_rl.task.environments.agent import responses
from april_rl.task.environments.agent.chat import CompletionRequest, RefusedError
from april_rl.task.environments.agent.responses import ApiResponse

_MAX_BODY_BYTES = 4 << 20
_NO_EPISODE = "no running episode has this key"
_SERVED = "this endpoint serves POST /v1/chat/completions, POST /v1/completions and GET /v1/models"


class Client(NamedTuple):
    """The client that sent a request."""

    is_retry: bool  # the client says that it sends the request again
    is_gone: Callable[[], bool]  # whether the client's connection is lost


# Takes a request made with one key; raises RefusedError.
Ask = Callable[[CompletionRequest, Client], asyncio.Future[ApiResponse]]


class Access(NamedTuple):
    """Base URL and API key for a client."""

    base_url: str
    key: str


class Endpoint:
    """The server, for one event loop; it starts with the first episode."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._of_key: dict[str, Ask] = {}
        self._port: asyncio.Task[int] | None = None

    async def admit(self, ask: Ask) -> Access:
        """Return the access of a new episode."""
        if self._port is None:
            self._port = asyncio.get_running_loop().create_task(self._listen())
        port, key = await asyncio.shield(self._port), secrets.token_urlsafe(24)
        self._of_key[key] = ask
        return Access(f"http://{self._address}:{port}/v1", key)

    def dismiss(self, access: Access) -> None:
        self._of_key.pop(access.key, None)

    async def _listen(self) -> int:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_with_errors])
        for path, parse in (
            ("/v1/chat/completions", CompletionRequest.of_chat),
            ("/v1/completions", CompletionRequest.of_text),
        ):
            app.router.add_post(path, partial(self._complete, parse))
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, self._address, 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    async def _complete(
        self, parse: Callable[[object], CompletionRequest], http: web.Request
    ) -> web.StreamResponse:
        ask = self._ask_of(http)
        if ask is None:
            return _error(401, _NO_EPISODE)
        try:
            request = parse(await http.json())
            completed = await asyncio.shield(ask(request, _client(http)))
        except RefusedError as error:
            return _error(400, str(error))
        except RecursionError:
            return _error(400, "the body is nested too deeply")
        except ValueError as error:
            return _error(400, f"the body is not valid JSON: {error}")
        if not request.is_streamed:
            return web.json_response(responses.body(completed, request))
        events = responses.events(completed, request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with suppress(ConnectionError):  # the client has given up waiting
            await response.prepare(http)
            for event in (*map(json.dumps, events), "[DONE]"):
                await response.write(f"data: {event}\n\n".encode())
            await response.write_eof()
        return response

    def _ask_of(self, http: web.Request) -> Ask | None:
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        return self._of_key.get(key.strip()) if scheme.lower() == "bearer" else None

    async def _models(self, http: web.Request) -> web.Response:
        if self._ask_of(http) is None:
            return _error(401, _NO_EPISODE)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "april_rl"}
        return web.json_response({"object": "list", "data": [model]})


@web.middleware
async def _with_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Report a wrong path or method, or a body that is too long, in the form of the API."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        return _error(error.status, f"a body may have at most {_MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path} is not served; {_SERVED}")


def check_address(address: str) -> None:
    """Raise ValueError for an address at which this machine cannot listen."""
    if address in ("0.0.0.0", "::"):
        raise ValueError(
            f"environment.address={address} is not an address that an agent can reach: give "
            "this machine's address in the agents' network"
        )
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        raise ValueError(f"environment.address={address}: cannot listen there: {error}") from None


def _client(http: web.Request) -> Client:
    """Return the client that sent a request; OpenAI's clients count their retries."""
    return Client(
        is_retry=http.headers.get("x-stainless-retry-count", "0") != "0",
        is_gone=lambda: http.transport is None or http.transport.is_closing(),
    )


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": None, "param": None}
    return web.json_response({"error": error}, status=status)
