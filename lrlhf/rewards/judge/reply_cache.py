"""Replies that were paid for already."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from lrlhf.rewards.function import RewardError
from lrlhf.rewards.judge.chat_endpoint import Reply

_PATIENCE_S = 60.0
"""For other processes that write."""


class ReplyCache:
    """A file of replies by the request that they answer, which several processes may share.

    Args:
        path: An SQLite database; it is made where there is none. None: nothing is kept.
        judge: Who replies; replies of others are not found.
    """

    def __init__(self, path: str | None, judge: str) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._judge = judge

    def find(self, requests: Sequence[bytes]) -> dict[bytes, Reply]:
        """Return the replies that are known."""
        if self._path is None:
            return {}
        query = "SELECT text, finished FROM replies WHERE request = ?"
        with self._open(self._path) as database:
            rows = (
                (one, database.execute(query, (self._key(one),)).fetchone()) for one in requests
            )
            return {one: Reply(row[0], finished=bool(row[1])) for one, row in rows if row}

    def keep(self, replies: Mapping[bytes, Reply]) -> None:
        """Add replies."""
        if self._path is None or not replies:
            return
        with self._open(self._path) as database:
            database.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)",
                [(self._key(one), reply.text, reply.finished) for one, reply in replies.items()],
            )

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(path, timeout=_PATIENCE_S)) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS replies "
                    "(request BLOB PRIMARY KEY, text TEXT NOT NULL, finished INTEGER NOT NULL)"
                )
                yield database
        except (sqlite3.Error, OSError) as error:
            raise RewardError(f"cache: {path} cannot be used: {error}") from error

    def _key(self, request: bytes) -> bytes:
        return hashlib.sha256(self._judge.encode() + b"\n" + request).digest()
