"""A chat completion endpoint on the loopback interface whose answers a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "teacher"  # the name in the list of models
Answer = Callable[[int, dict], tuple[int, str]]  # (number of the request, body): status and body


def says(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@dataclass
class JudgeServer:
    """An endpoint that records the requests it gets."""

    answer: Answer
    requests: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    port: int = 0
    max_model_len: int | None = None  # of the only model that it lists

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def serving(answer: Answer, *, retry_after: str = "0.01") -> Iterator[JudgeServer]:
    judge = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            judge.requests.append(body)
            judge.keys.append(self.headers["Authorization"])
            status, text = judge.answer(len(judge.requests), body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After", retry_after)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            about = {"id": MODEL, "object": "model", "created": 0, "owned_by": "a test"}
            models = {"object": "list", "data": [about | {"max_model_len": judge.max_model_len}]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(models).encode())

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # ignore clients that have given up
        judge.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield judge
        finally:
            server.shutdown()
            thread.join()
