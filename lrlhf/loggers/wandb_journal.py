"""The rows handed to Weights & Biases, kept until it is sure to have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrlhf.loggers.growing_file import GrowingFile, whole_lines
from lrlhf.run.checkpoints.set_aside import set_aside


class RowJournal:
    """A line of JSON for each row of one run, each in the file when `append` returns.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._file = GrowingFile(path)

    def begin(self, run_id: str, rows: int = 0) -> None:
        """Start a file for a run; that of another run is renamed.

        Args:
            run_id: Of the run.
            rows: How many rows it has had before.
        """
        set_aside("ResumingWandbLogger", [self.path], [self.path] if self.path.exists() else [])
        self.rows = rows
        self._file.replace(_line({"id": run_id}))

    def append(self, metrics: Mapping[str, Any], step: int | None) -> int:
        """Write a row and return its number, counted from 0."""
        number = self.rows
        self._file.append(_line({"row": number, "step": step, "metrics": _plain(metrics)}))
        self.rows += 1
        return number

    def go_back(self, run_id: str, rows: int) -> list[dict[str, Any]]:
        """Forget all but the first rows; return those that are here.

        ``metrics`` of a row is None where it held more than numbers and text.

        Raises:
            ValueError: A line cannot be read.
        """
        header, *records = self._read() or [{"id": None}]
        if header["id"] != run_id:
            self.begin(run_id, rows)
            return []
        kept = [record for record in records if record["row"] < rows]
        self.rows = rows
        self._file.replace(b"".join(map(_line, [header, *kept])))
        return kept

    def sync(self) -> None:
        """Bring the rows to the disk."""
        self._file.sync()

    def _read(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in whole_lines(self.path).splitlines()]
        except ValueError as error:
            raise ValueError(
                f"{self.path} holds a line that is no JSON ({error}); move the file away"
            ) from error


def _line(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record)}\n".encode()


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values, or None where one is a table or an image, which only W&B can write."""
    plain = all(isinstance(value, str | int | float | None) for value in metrics.values())
    return dict(metrics) if plain else None
