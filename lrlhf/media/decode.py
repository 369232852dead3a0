"""From files, bytes and arrays to pixels."""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageSequence

from lrlhf.media.refs import media_name

_REMOTE = ("http://", "https://", "s3://", "gs://", "hf://")
_STILLS = (".gif", ".webp", ".apng", ".png")
"""Files that Pillow reads frame by frame."""
_GIF_FPS = 10.0
_DAMAGED: tuple[type[Exception], ...] = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    RuntimeError,
    Image.DecompressionBombError,
)
"""How readers fail at damaged files."""


class BadRow(ValueError):  # noqa: N818 - one row is a finding to be counted, not yet an error
    """One row of a data set cannot be used.

    Args:
        reason: What rows are counted by, such as ``too long``.
        detail: What is wrong with this row, naming the column.
        remedy: What the user can do about rows like it.
    """

    def __init__(self, reason: str, detail: str, *, remedy: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.remedy = remedy


class MediaError(BadRow):
    """An image, video or audio that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """How images, videos and audio are read.

    Args:
        root: Folder that relative paths start from, and that holds all files which rows may name;
            None: that of the data file, out of which no relative path may lead. Rows of a hub data
            set name files only where this is given.
        max_pixels: Images and frames with more pixels are scaled down to this many, their shape
            kept; None: only the model's own processor scales.
        fps: Frames per second that are taken from a video.
        max_frames: Frames that are taken from one video at most, evenly over its length.
        check: What is looked at before training. "files": that files are there and are images
            or audio; "all": everything is read, and its tokens are counted; "auto": all where
            there are at most 2,000 rows. What turns out broken later is replaced by the next row,
            and logged.
    """

    root: str | None = None
    max_pixels: int | None = None
    fps: float = 2.0
    max_frames: int = 32
    check: Literal["auto", "files", "all"] = "auto"

    def __post_init__(self) -> None:
        for name in ("max_pixels", "fps", "max_frames"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"media.{name} is {value}; it must be above 0")
        if self.root is not None and not Path(self.root).expanduser().is_dir():
            raise ValueError(f"media.root {self.root!r} is no folder")


@dataclass(frozen=True, eq=False)
class Video:
    """Frames that were taken from a video.

    Args:
        frames: uint8 `[F, H, W, 3]`, RGB.
        fps: Frames per second of these frames.
    """

    frames: NDArray[np.uint8]
    fps: float


def read_image(value: Any, options: MediaOptions) -> Image.Image:
    """Read an image as RGB, turned upright, and no larger than the options say.

    Args:
        value: A path, bytes, a ``data:`` URI, a ``PIL.Image``, a uint8 array `[H, W]`, `[H, W, 3]`
            or `[H, W, 4]`, or ``{"bytes": …, "path": …}``.
        options: How.

    Raises:
        MediaError: It is missing, broken, empty, or of another type.
    """
    name = media_name(value)
    with explained("broken image", name), _opened_image(value, name) as opened:
        _check_size(opened.size, name)
        upright = ImageOps.exif_transpose(opened)
        image = _rgb(opened if upright is None else upright)
    return _scaled(image, options.max_pixels)


def check_image(value: Any) -> tuple[int, int]:
    """Look at the head of an image, without its pixels, and return its width and height.

    Raises:
        MediaError: It is no image.
    """
    name = media_name(value)
    with explained("broken image", name), _opened_image(value, name) as opened:
        _check_size(opened.size, name)
        return opened.size


def read_video(value: Any, options: MediaOptions) -> Video:
    """Read some frames of a video, evenly over its length.

    Args:
        value: A path or bytes of a file (with PyAV; animated GIF, WebP and PNG with Pillow), a
            list of images, a uint8 array `[F, H, W, 3]`, or ``{"bytes": …, "path": …}``.
        options: How many frames, and how large.

    Raises:
        MediaError: It is missing, broken, has no frames, or is of another type.
    """
    name = media_name(value)
    if isinstance(value, Video):
        return value
    value = local_content(value, name)
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 4:
            raise MediaError(
                "wrong type", f"a video is a uint8 array [F, H, W, 3], not {_kind(value)}"
            )
        value = list(value)
    if isinstance(value, list | tuple):
        chosen = [value[index] for index in _evenly(len(value), options.max_frames)]
        images = [read_image(entry, options) for entry in chosen]
        return Video(_frames(images, name), options.fps)
    if not isinstance(value, Path | bytes):
        raise MediaError("wrong type", f"a video is a path, bytes or frames, not {_kind(value)}")
    if _is_animation(value):
        return _animation(value, name, options)
    return _film(value, name, options)


def check_video(value: Any) -> None:
    """Make sure that a video's file is there and not empty, or raise `MediaError`."""
    name = media_name(value)
    content = None if isinstance(value, Video) else local_content(value, name)
    empty = content.stat().st_size == 0 if isinstance(content, Path) else False
    if empty or (isinstance(content, Sequence | np.ndarray) and len(content) == 0):
        raise MediaError("video without frames", f"{name} is empty")


@contextmanager
def explained(reason: str, name: str, *more: type[Exception]) -> Iterator[None]:
    """Turn what the readers of damaged files raise into a `MediaError`."""
    try:
        yield
    except MediaError:
        raise
    except _DAMAGED + more as error:
        raise MediaError(reason, f"{name}: {error}") from error


def local_content(value: Any, name: str) -> Any:
    """Turn what a row holds into an existing path, bytes, an array, or what it is."""
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        value = value.get("path") if inner is None else inner
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, torch.Tensor):
        return value.numpy(force=True)
    if isinstance(value, str):
        if value.startswith("data:"):
            return _data_uri(value, name)
        if value.startswith(_REMOTE):
            raise MediaError(
                "remote file",
                f"{name} is an address",
                remedy="download the files first, and give their paths",
            )
        value = Path(value.removeprefix("file://")).expanduser()
    if isinstance(value, Path) and not _is_file(value):
        raise MediaError("missing file", f"there is no file {name}", remedy="set media.root")
    return value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be read
        return False


def _data_uri(value: str, name: str) -> bytes:
    head, _, data = value.partition(",")
    reason = "broken audio" if head.startswith("data:audio/") else "broken image"
    if not head.endswith(";base64"):
        raise MediaError(reason, f"{name} is a data: URI that is not base64")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise MediaError(reason, f"{name}: {error}") from error


def _opened_image(value: Any, name: str) -> Image.Image:
    if isinstance(value, Image.Image):
        return value.copy()  # closed afterwards
    content = local_content(value, name)
    if isinstance(content, Path):
        return Image.open(content)
    if isinstance(content, bytes):
        return Image.open(io.BytesIO(content))
    if isinstance(content, np.ndarray):
        right = content.ndim == 2 or (content.ndim == 3 and content.shape[2] in (3, 4))
        if content.dtype != np.uint8 or not right:
            raise MediaError(
                "wrong type", f"an image is a uint8 array [H, W, 3], not {_kind(content)}"
            )
        _check_size((content.shape[1], content.shape[0]), name)
        return Image.fromarray(content)
    raise MediaError("wrong type", f"an image is a path, bytes or pixels, not {_kind(value)}")


def _check_size(size: tuple[int, int], name: str) -> None:
    """Refuse what has no pixels, and what has so many that a small file fills the memory."""
    if Image.MAX_IMAGE_PIXELS is not None and size[0] * size[1] > Image.MAX_IMAGE_PIXELS:
        raise MediaError(
            "image too large",
            f"{name} is {size[0]} x {size[1]} pixels; {Image.MAX_IMAGE_PIXELS} in all is the most",
            remedy="scale such images down beforehand",
        )
    if min(size) < 1:
        raise MediaError("zero-size image", f"{name} is {size[0]} x {size[1]} pixels")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would cut the values off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise MediaError(
            "wrong type", f"an image has pixels of mode {image.mode}, not 8 or 16 bits"
        )
    # what is transparent has a colour of its own, often black: show it on white instead
    if image.has_transparency_data:
        visible = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), visible)
    return image.convert("RGB")


def _scaled(image: Image.Image, max_pixels: int | None) -> Image.Image:
    width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return image
    factor = math.sqrt(max_pixels / (width * height))
    # where one side would be less than a pixel, the other one has all that there may be
    sides = (max(1, math.floor(side * factor)) for side in image.size)
    width, height = (min(side, max_pixels) for side in sides)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _evenly(count: int, most: int) -> list[int]:
    """Pick at most ``most`` of ``count`` places, the middles of equal stretches."""
    taken = min(count, most)
    return [int((index + 0.5) * count / taken) for index in range(taken)]


def _taken(count: int, fps: float, options: MediaOptions) -> int:
    """Number of frames to take from ``count`` at ``fps``."""
    wanted = max(1, round(count / fps * options.fps)) if fps > 0 else count
    return min(count, wanted, options.max_frames)


def _frames(images: Sequence[Image.Image], name: str) -> NDArray[np.uint8]:
    if not images:
        raise MediaError("video without frames", f"{name} has none")
    if len({image.size for image in images}) > 1:
        raise MediaError("broken video", f"the frames of {name} have different sizes")
    return np.stack([np.asarray(image) for image in images])


def _is_animation(content: Path | bytes) -> bool:
    if isinstance(content, Path):
        return content.suffix.lower() in _STILLS
    return content.startswith((b"GIF8", b"\x89PNG")) or content[8:12] == b"WEBP"


def _animation(content: Path | bytes, name: str, options: MediaOptions) -> Video:
    with explained("broken video", name), Image.open(_handle(content)) as opened:
        _check_size(opened.size, name)
        frames = [frame.copy() for frame in ImageSequence.Iterator(opened)]
        # of a WebP it is known only now
        milliseconds = float(opened.info.get("duration") or 1000 / _GIF_FPS)
    fps = 1000 / milliseconds
    chosen = _evenly(len(frames), _taken(len(frames), fps, options)) if frames else []
    images = [read_image(frames[index], options) for index in chosen]
    return Video(_frames(images, name), fps * len(chosen) / max(1, len(frames)))


def _film(content: Path | bytes, name: str, options: MediaOptions) -> Video:
    av = _pyav()
    with explained("broken video", name, av.error.FFmpegError):
        # a stream may not say how many frames it has: they are counted first
        count, fps = _measure(av, content)
        if not count:
            raise MediaError("video without frames", f"{name} has none")
        chosen = set(_evenly(count, _taken(count, fps, options)))
        images = []
        with av.open(_handle(content)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in chosen:
                    images.append(_scaled(frame.to_image().convert("RGB"), options.max_pixels))
                if len(images) == len(chosen):
                    break
    return Video(_frames(images, name), fps * len(images) / count)


def _measure(av: ModuleType, content: Path | bytes) -> tuple[int, float]:
    with av.open(_handle(content)) as container:
        if not container.streams.video:
            return 0, 1.0
        rate = container.streams.video[0].average_rate
        count = sum(1 for _ in container.decode(video=0))
    return count, float(rate) if rate else 1.0


def _handle(content: Path | bytes) -> str | io.BytesIO:
    return str(content) if isinstance(content, Path) else io.BytesIO(content)


def _pyav() -> ModuleType:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ImportError("reading video files needs PyAV: pip install 'lrlhf[vision]'") from error


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
