"""How much a request may ask for, how many are served at once, and how others are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


def _check_positive(options: RequestLimits | QueueOptions) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None and field.default is None:
            continue
        if not value > 0:
            raise ValueError(f"{field.name} is {value}; it must be above 0")
        if not math.isfinite(value):
            raise ValueError(f"{field.name} is {value}; it must be a finite number")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of one request; larger requests are rejected, never truncated.

    Args:
        max_request_mb: Size of the body in millions of bytes.
        max_values: Objects, lists, texts, numbers and so on in the body, roughly: its commas and
            opening brackets are counted before anything is made of them.
        max_items: Responses in one request.
        max_chars: Characters of one response and its prompt.
        max_images: Images in one request, and videos; one that is repeated counts once.
        max_megapixels: Millions of pixels in all images and video frames of one request, counted
            before anything is decoded. Media wait as files: a quarter of these pixels is held
            decoded at a time, for all requests together, or one request alone that has more.
        max_frames: Frames of one video.
        max_pixels: Images and frames with more pixels are scaled down to this many; null: only
            the model's own processor scales. As ``media.max_pixels`` in training.
    """

    max_request_mb: float = 32.0
    max_values: int = 200_000
    max_items: int = 512
    max_chars: int = 200_000
    max_images: int = 512
    max_megapixels: float = 256.0
    max_frames: int = 64
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """How requests wait for the model and for each other.

    Args:
        max_batch_size: Responses of several requests that are scored together at most; a larger
            request is scored by itself. 1: every request by itself. A request is split only where a
            learned reward gets very long ones, so that others are served in between.
        max_queue: Requests that wait or are scored at once; others are refused with status 429. A
            request waits from when all of its body has arrived.
        max_queue_mb: Size of all bodies in the service, in millions of bytes, of which those count
            that have more than 0.25, as far as they have arrived. Those that come more slowly than
            100 kB/s give way to others.
        timeout_s: Seconds after which a request is given up.
    """

    max_batch_size: int = 64
    max_queue: int = 64
    max_queue_mb: float = 512.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _check_positive(self)
