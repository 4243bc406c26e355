"""Replies of a judge, in a file that all reward processes share."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import xxhash

WAIT_S = 30.0  # how long to wait while another process writes


def request_key(request: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(request, sort_keys=True).encode())


class JudgeCache:
    """Replies by request, in an SQLite file; safe for several processes on one machine.

    Not for network file systems, whose locks SQLite cannot rely on.
    """

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)"
        )

    def get(self, request: str) -> str | None:
        """Return the reply to a request; None when there is none."""
        statement = "SELECT reply FROM replies WHERE request = ?"
        row = self._connection.execute(statement, (request,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: str, reply: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (request, reply))

    def close(self) -> None:
        self._connection.close()
