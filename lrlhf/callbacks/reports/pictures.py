"""Pictures of what a row shows."""

from __future__ import annotations

from PIL import Image, ImageOps

from lrlhf.types import Media

_GAP = 4
"""Pixels between two pictures."""


def picture(media: Media) -> Image.Image:
    """Return the first image, or the first frame of a video."""
    return _pictures(media)[0]


def strip(media: Media, *, side: int = 256) -> Image.Image:
    """Put all images, and the first frame of each video, side by side.

    Args:
        media: Of one row.
        side: Pixels of the square that each is fitted into.
    """
    shown = [ImageOps.pad(one.convert("RGB"), (side, side)) for one in _pictures(media)]
    page = Image.new("RGB", ((side + _GAP) * len(shown) - _GAP, side), "white")
    for number, one in enumerate(shown):
        page.paste(one, (number * (side + _GAP), 0))
    return page


def stack(strips: list[Image.Image]) -> Image.Image:
    """Put pictures below each other."""
    size = max(one.width for one in strips), sum(one.height + _GAP for one in strips) - _GAP
    page, top = Image.new("RGB", size, "white"), 0
    for one in strips:
        page.paste(one, (0, top))
        top += one.height + _GAP
    return page


def _pictures(media: Media) -> list[Image.Image]:
    return [*media.images, *(Image.fromarray(video.frames[0]) for video in media.videos)]
