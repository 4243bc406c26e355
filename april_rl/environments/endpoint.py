"""The HTTP server of a process with agents: completions, of chats and of texts, that the policy
samples.

It listens at environment.address. Each episode has a key of its own, which ends with it. A request
waits on its connection until the policy has answered, over weight syncs and while its sample is
parked.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from aiohttp import web

from april_rl.environments import answers
from april_rl.environments.answers import Answered
from april_rl.environments.chat import CompletionRequest, RefusedError

_MAX_BODY_BYTES = 4 << 20


class Client(NamedTuple):
    """Who has sent a request."""

    is_retry: bool  # it says that it sends the request again
    is_gone: Callable[[], bool]  # its connection is lost


class Asked(Protocol):
    """Receiver of the requests made with one key."""

    def ask(self, request: CompletionRequest, client: Client) -> asyncio.Future[Answered]:
        """Take a request; raise RefusedError."""


class Access(NamedTuple):
    """Base URL and API key for a client."""

    base_url: str
    key: str


class Endpoint:
    """The server, for one event loop; it starts with the first episode."""

    def __init__(self, address: str) -> None:
        """Listen to nothing yet."""
        self._address = address
        self._of_key: dict[str, Asked] = {}
        self._port: asyncio.Task[int] | None = None

    async def admit(self, asked: Asked) -> Access:
        """Return the access of a new episode."""
        if self._port is None:
            self._port = asyncio.get_running_loop().create_task(self._listen())
        port, key = await asyncio.shield(self._port), secrets.token_urlsafe(24)
        self._of_key[key] = asked
        return Access(f"http://{self._address}:{port}/v1", key)

    def dismiss(self, access: Access) -> None:
        """End the key of an episode."""
        self._of_key.pop(access.key, None)

    async def _listen(self) -> int:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        for path, parse in (
            ("/v1/chat/completions", CompletionRequest.of_chat),
            ("/v1/completions", CompletionRequest.of_text),
        ):
            app.router.add_post(path, partial(self._complete, parse))
        app.router.add_get("/v1/models", _models)
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, self._address, 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    async def _complete(
        self, parse: Callable[[object], CompletionRequest], http: web.Request
    ) -> web.StreamResponse:
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        asked = self._of_key.get(key)
        if asked is None:
            return _error(401, "no episode has this key: it has ended, or there never was one")
        try:
            request = parse(await http.json())
            answered = await asyncio.shield(asked.ask(request, _client(http)))
        except RefusedError as error:
            return _error(400, str(error))
        except ValueError as error:
            return _error(400, f"the body is no JSON: {error}")
        if not request.is_streamed:
            return web.json_response(answers.body(answered, request))
        events = answers.events(answered, request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        with suppress(ConnectionError):  # of a client that has lost patience
            await response.prepare(http)
            for event in (*map(json.dumps, events), "[DONE]"):
                await response.write(f"data: {event}\n\n".encode())
            await response.write_eof()
        return response


def check_address(address: str) -> None:
    """Raise ValueError for an address at which this machine cannot listen."""
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        raise ValueError(f"environment.address={address}: cannot listen there: {error}") from None


def _client(http: web.Request) -> Client:
    """Return who has sent a request; clients of OpenAI count their retries."""
    return Client(
        is_retry=http.headers.get("x-stainless-retry-count", "0") != "0",
        is_gone=lambda: http.transport is None or http.transport.is_closing(),
    )


async def _models(_: web.Request) -> web.Response:
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "april_rl"}
    return web.json_response({"object": "list", "data": [model]})


def _error(status: int, message: str) -> web.Response:
    told = {"message": message, "type": "invalid_request_error", "code": None, "param": None}
    return web.json_response({"error": told}, status=status)
