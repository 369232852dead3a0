"""Lines on the disk until they are written in order, so that memory does not grow with them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import lightning as L

from lrlhf.callbacks.output_files import gather_on_zero

_AT_ONCE = 1000
"""Lines that ranks send each other in one go."""


class _Place(NamedTuple):
    """What a line is sorted by, and where it is in the file."""

    key: tuple[Any, ...]
    offset: int
    length: int


class LineSpool:
    """Lines of text and their places in an order, kept in a temporary file."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: tuple[Any, ...], line: str) -> None:
        """Keep a line; of equal keys the one that came first stays first."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the lines
        text = line.encode()
        self._places.append(_Place(key, self._file.seek(0, 2), len(text)))
        self._file.write(text)

    def clear(self) -> None:
        """Drop all lines."""
        if self._file is not None:
            self._file.close()
        self._file, self._places = None, []

    def gather(self, trainer: L.Trainer) -> None:
        """Move the lines of all ranks to rank zero, in rank order; all ranks call."""
        if trainer.world_size == 1:
            return
        own, self._places = self._places, []
        source, self._file = self._file, None
        counts = gather_on_zero(trainer, [len(own)])
        rounds = trainer.strategy.broadcast(-(-max(counts, default=0) // _AT_ONCE))
        for number in range(rounds):
            part = own[number * _AT_ONCE : (number + 1) * _AT_ONCE]
            lines = [(place.key, _read(source, place).decode()) for place in part if source]
            for key, line in gather_on_zero(trainer, lines):
                self.add(key, line)
        if source is not None:
            source.close()

    def sorted_lines(self) -> Iterator[bytes]:
        """Go through the lines in the order of their keys."""
        for place in sorted(self._places, key=lambda place: place.key):
            if self._file is not None:
                yield _read(self._file, place)


def _read(file: IO[bytes], place: _Place) -> bytes:
    file.seek(place.offset)
    return file.read(place.length)
