"""Pictures of what a row shows; of audio, its waveform."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from lrlhf.media import Audio
from lrlhf.types import Media

_GAP = 4
"""Pixels between two pictures."""
_WAVEFORM = (256, 128)


def picture(media: Media) -> Image.Image:
    """Return the first image, the first frame of a video, or the waveform of an audio."""
    return _pictures(media)[0]


def strip(media: Media, *, side: int = 256) -> Image.Image:
    """Put all images, the first frame of each video, and waveforms of audio side by side.

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
    frames = (Image.fromarray(video.frames[0]) for video in media.videos)
    return [*media.images, *frames, *map(_waveform, media.audios)]


def _waveform(audio: Audio) -> Image.Image:
    """Draw the loudest samples of each stretch of a sound, the whole of it across the width."""
    middle, loudest = (_WAVEFORM[1] - 1) / 2, max(np.abs(audio.samples).max(), 1e-9)
    drawn = Image.new("RGB", _WAVEFORM, "white")
    pen = ImageDraw.Draw(drawn)
    for column, part in enumerate(np.array_split(audio.samples, _WAVEFORM[0])):
        top, bottom = part.max() / loudest, part.min() / loudest
        pen.line([(column, (1 - top) * middle), (column, (1 - bottom) * middle)], "black")
    return drawn
