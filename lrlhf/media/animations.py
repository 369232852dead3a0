"""What animated pictures say of their frames, before any of them is decoded."""

from __future__ import annotations

from typing import BinaryIO, NamedTuple

ANIMATIONS = ("PNG", "GIF", "WEBP")
"""Pillow's names of the formats that are read frame by frame."""
_UNTIMED = 0.1
"""Seconds of a frame that has no time of its own, as browsers and FFmpeg show it."""


class Animation(NamedTuple):
    """The frames of an animated picture."""

    extent: tuple[int, int]
    """Width and height that hold every frame; (0, 0): the head of the file says them."""
    seconds: list[float]
    """Length of each frame; empty: a single picture."""


def animation_of(stream: BinaryIO) -> Animation | None:
    """Read lengths and sizes of frames from the blocks of a file; None: it is of another format.

    The first frame of a GIF says nothing of the later ones, and a few bytes may become many
    millions of pixels.
    """
    stream.seek(0)
    head = stream.read(12)
    if head.startswith((b"GIF87a", b"GIF89a")):
        found = _gif(stream)
    elif head.startswith(b"\x89PNG"):
        found = Animation((0, 0), _png(stream))
    elif head.startswith(b"RIFF") and head[8:] == b"WEBP":
        found = Animation((0, 0), _webp(stream))
    else:
        found = None
    stream.seek(0)
    return found


def _gif(stream: BinaryIO) -> Animation:
    stream.seek(6)
    head = stream.read(7)
    width, height = _little(head[0:2]), _little(head[2:4])
    _skip_colours(stream, head[4:5])
    delay, seconds = 0, []
    while (kind := stream.read(1)) not in (b"", b";"):
        if kind == b"!":
            label, size = stream.read(1), _little(stream.read(1))
            block = stream.read(size)
            if label == b"\xf9":
                delay = _little(block[1:3])
            _skip_blocks(stream, size)
        elif kind == b",":
            place = stream.read(9)
            width = max(width, _little(place[0:2]) + _little(place[4:6]))
            height = max(height, _little(place[2:4]) + _little(place[6:8]))
            _skip_colours(stream, place[8:9])
            stream.read(1)  # the width of its codes
            _skip_blocks(stream, 1)
            seconds.append(delay / 100 if delay > 1 else _UNTIMED)
            delay = 0
    return Animation((width, height), seconds)


def _skip_colours(stream: BinaryIO, flags: bytes) -> None:
    if _little(flags) & 0x80:
        stream.seek(3 << ((flags[0] & 7) + 1), 1)


def _skip_blocks(stream: BinaryIO, size: int) -> None:
    while size and (size := _little(stream.read(1))):
        stream.seek(size, 1)


def _png(stream: BinaryIO) -> list[float]:
    stream.seek(8)
    seconds = []
    while len(head := stream.read(8)) == 8 and head[4:] != b"IEND":
        body = stream.read(26) if head[4:] == b"fcTL" else b""
        if body:
            numerator, denominator = (int.from_bytes(body[at : at + 2], "big") for at in (20, 22))
            seconds.append(numerator / (denominator or 100) or _UNTIMED)
        stream.seek(int.from_bytes(head[:4], "big") - len(body) + 4, 1)
    return seconds


def _webp(stream: BinaryIO) -> list[float]:
    stream.seek(12)
    seconds = []
    while len(head := stream.read(8)) == 8:
        body = stream.read(16) if head[:4] == b"ANMF" else b""
        if body:
            seconds.append(_little(body[12:15]) / 1000 or _UNTIMED)
        size = _little(head[4:])
        stream.seek(size + size % 2 - len(body), 1)
    return seconds


def _little(content: bytes) -> int:
    return int.from_bytes(content, "little")
