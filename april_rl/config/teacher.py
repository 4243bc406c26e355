"""Settings of a teacher: a frozen model whose probabilities the policy learns."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from april_rl.config.checks import check_bounds, require, within

_OF_SERVERS = ("model", "api_key_env", "timeout_s", "max_retries", "concurrency")


@dataclass(slots=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: the policy samples, the teacher scores the tokens."""

    path: str = ""  # Hugging Face folder or hub id, with the policy's tokenizer; empty: no teacher
    # weight of log(teacher / policy), which is added to the advantage of each token
    weight: float = within("> 0", 1.0)
    # in place of path: the address of a server with OpenAI's API that has the teacher, such as
    # http://host:8000/v1; it must return the log-probabilities of prompts (echo), as vLLM's does
    base_url: str = ""
    model: str = ""  # the teacher's name on that server
    # environment variable that has the server's key; null: it needs none
    api_key_env: str | None = None
    timeout_s: float = within("> 0", 60.0)  # limit of one attempt of a request
    # retries after a time-out, a lost connection, or a status 429 or 5xx of the server
    max_retries: int = within(">= 0", 5)
    concurrency: int = within(">= 1", 32)  # requests that are sent at a time

    @property
    def is_set(self) -> bool:
        """Return whether there is a teacher."""
        return bool(self.path or self.base_url)

    def __post_init__(self) -> None:
        check_bounds("teacher", self)
        require(
            not (self.path and self.base_url),
            "teacher.path and teacher.base_url: there is one teacher; set one of the two to null",
        )
        require(
            not self.base_url or bool(self.model),
            f"teacher.base_url={self.base_url} needs teacher.model, the teacher's name there",
        )
        for entry in fields(self):
            needs = "teacher.base_url" if entry.name in _OF_SERVERS else "teacher.path"
            value, is_on_server = getattr(self, entry.name), entry.name in _OF_SERVERS
            require(
                value == entry.default or bool(self.base_url if is_on_server else self.is_set),
                f"teacher.{entry.name}={value} has no effect without {needs}; set {needs}, or "
                "remove it",
            )
        require(
            self.api_key_env is None or self.api_key_env in os.environ,
            f"teacher.api_key_env={self.api_key_env}: there is no such environment variable",
        )
