"""A stand-in for the Hugging Face hub: the part of its HTTP interface that an upload uses."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER, ORGANISATION, TOKEN = "someone", "lab", "hf_right"


@dataclass
class Hub:
    """The server's files and the requests that it received."""

    url: str = ""
    role: str = "write"  # role of the token
    repositories: dict[str, bool] = field(default_factory=dict)  # name: whether it is private
    branches: set[str] = field(default_factory=set)
    commits: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # branch, header
    files: dict[str, bytes] = field(default_factory=dict)  # files of the last commit, by path
    large: dict[str, bytes] = field(default_factory=dict)  # by sha256
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and body of the response to a request with the right token."""
        if path == "/api/whoami-v2":
            token = {"role": self.role, "displayName": "laptop"}
            return 200, {"name": USER, "auth": {"accessToken": token}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if method == "PUT":
            self.large[path.rpartition("/")[2]] = body
            return 200, {}
        if found := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(?:/(\w+)/([\w-]+))?", path):
            return self._of_repository(*found.groups(), body=body)
        assert path.endswith(".git/info/lfs/objects/batch"), path
        objects = json.loads(body)["objects"]
        upload = [{"upload": {"href": f"{self.url}/large/{each['oid']}"}} for each in objects]
        found = zip(objects, upload, strict=True)
        return 200, {"objects": [{**each, "actions": actions} for each, actions in found]}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in (USER, ORGANISATION):
            return 403, {"error": "you have no rights there"}
        if name in self.repositories:
            return 409, {"error": "it is there already", "url": f"{self.url}/{name}"}
        self.repositories[name] = asked.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{name}"}

    def _of_repository(
        self, name: str, verb: str | None, branch: str, *, body: bytes
    ) -> tuple[int, Any]:
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        if verb is None:
            return 200, {"id": name, "private": self.repositories[name]}
        if verb == "branch":
            self.branches.add(branch)
            return 200, {}
        if verb == "preupload":
            mode = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            modes = [mode[each["path"].endswith(".safetensors")] for each in files]
            told = zip(files, modes, strict=True)
            return 200, {
                "files": [
                    {"path": each["path"], "uploadMode": chosen, "shouldIgnore": False}
                    for each, chosen in told
                ]
            }
        assert verb == "commit"
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            self._receive(line["key"], line["value"])
        self.commits.append((branch, next(v["value"] for v in lines if v["key"] == "header")))
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40}

    def _receive(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "file":
            assert value["encoding"] == "base64"
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            content = self.large[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            self.files[value["path"]] = content


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        """Handler that passes requests to `hub` and rejects requests without its token."""

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if is_known or self.command == "PUT":  # the address of a large file needs no token
                status, answer = hub.answer(self.command, path, body)
            else:
                status, answer = 401, {"error": "Invalid username or password."}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815, the server's names

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
