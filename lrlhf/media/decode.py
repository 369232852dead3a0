"""From files, bytes and arrays to pixels."""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from lrlhf.media.refs import MediaPart, PartOptions, media_name
from lrlhf.options.conversion import settings

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
        animation = _gif(stream)
    elif head.startswith(b"\x89PNG"):
        animation = Animation((0, 0), _png(stream))
    elif head.startswith(b"RIFF") and head[8:] == b"WEBP":
        animation = Animation((0, 0), _webp(stream))
    else:
        animation = None
    stream.seek(0)
    return animation


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
            descriptor = stream.read(9)
            width = max(width, _little(descriptor[0:2]) + _little(descriptor[4:6]))
            height = max(height, _little(descriptor[2:4]) + _little(descriptor[6:8]))
            _skip_colours(stream, descriptor[8:9])
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


_REMOTE = ("http://", "https://", "s3://", "gs://", "hf://")
IMAGES = (
    "PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO",
    "PCX", "SGI",
)  # fmt: skip
"""Formats of images, by Pillow's names. Others may be read by programs of the system (EPS, WMF)."""
_UNKNOWN = f"it is damaged, or of none of the formats {', '.join(IMAGES)}"
_FILMS = (
    "mov,matroska,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,mxf,nut,ivf,dv,h264,hevc,m4v,av1,obu,"
    "wav,mp3,flac"
)
"""Containers of films and sounds, by FFmpeg's names. Others are lists that name further files: HLS,
DASH, concat, SDP, patterns of images."""
_FILM_PIXELS = 40_000_000
"""Pixels of a frame that has to be decoded: those of 8K, with the margins that decoders add."""
_ANIMATION_PIXELS = 2**32
"""Pixels of all frames of an animated picture, each of which has to be decoded."""
_TAKEN_PIXELS = 2**28
"""Pixels of all frames that are taken from one video: 805 MB."""
_TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a photo upright, by its EXIF orientation."""


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


@settings
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
        fps: Frames per second of these frames, which last as long as the video.
    """

    frames: NDArray[np.uint8]
    fps: float


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """How one image or video is read: by the options of all, and those of its part."""

    part: PartOptions
    max_pixels: int | None
    max_frames: int
    fps: float

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height that the part asks for."""
        height, width = self.part.resized_height, self.part.resized_width
        return None if height is None or width is None else (width, height)


def reading_of(value: Any, options: MediaOptions) -> tuple[Any, _Reading]:
    """Separate what is shown from the options of its part.

    Raises:
        MediaError: The part asks for more than ``media`` allows.
    """
    own = value.options if isinstance(value, MediaPart) else PartOptions()
    most = Image.MAX_IMAGE_PIXELS or math.inf
    limit = most if options.max_pixels is None else min(most, options.max_pixels)
    sizes = {
        "resized_height and resized_width": (own.resized_height or 0) * (own.resized_width or 0),
        "min_pixels": own.min_pixels or 0,
    }
    for name, pixels in sizes.items():
        if pixels > limit:
            raise _unusable(name, f"{pixels} pixels, and {limit} is the most", "media.max_pixels")
    for name in ("nframes", "min_frames"):
        frames = getattr(own, name) or 0
        if frames > options.max_frames:
            raise _unusable(name, f"{frames}, and {options.max_frames} is the most", "max_frames")
    limits = (options.max_pixels, own.max_pixels)
    return value.value if isinstance(value, MediaPart) else value, _Reading(
        part=own,
        max_pixels=min((each for each in limits if each is not None), default=None),
        max_frames=min(options.max_frames, own.max_frames or options.max_frames),
        fps=own.fps or options.fps,
    )


def _unusable(name: str, what: str, setting: str) -> MediaError:
    return MediaError(
        "option of a media part",
        f"{name} of a part is {what}",
        remedy=f"raise media.{setting.removeprefix('media.')}, or change the part",
    )


def read_image(value: Any, options: MediaOptions) -> Image.Image:
    """Read an image as RGB, turned upright, and no larger than the options say.

    Args:
        value: A path, bytes, a ``data:`` URI, a ``PIL.Image``, a uint8 array `[H, W]`, `[H, W, 3]`
            or `[H, W, 4]`, ``{"bytes": …, "path": …}``, or a `MediaPart` of these.
        options: How.

    Raises:
        MediaError: It is missing, broken, empty, or of another type.
    """
    value, how = reading_of(value, options)
    return _image(value, how)


def _image(value: Any, how: _Reading) -> Image.Image:
    name = media_name(value)
    with explained("broken image", name), _opened_image(value, name) as opened:
        _check_size(opened.size, name)
        opened.load()  # a TIFF file is turned as it is loaded, and says so afterwards
        turn = _TURNED.get(_orientation(opened))
        image = _rgb(opened if turn is None else opened.transpose(turn))
    return _scaled(image, how)


def _orientation(image: Image.Image) -> Any:
    """Return the one tag that matters, whatever the others are; 1: stored upright."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - viewers show a photo whose tags cannot be read as it lies
        return 1


def small_jpeg(image: Image.Image, side: int) -> str:
    """Return an image, scaled down to ``side``, as the ``data:`` URI of a JPEG."""
    small = image.copy()
    small.thumbnail((side, side))
    with io.BytesIO() as written:
        small.save(written, "JPEG", quality=80)
        return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def check_image(value: Any) -> tuple[int, int]:
    """Look at the head of an image, without its pixels, and return its width and height.

    Raises:
        MediaError: It is no image.
    """
    value = value.value if isinstance(value, MediaPart) else value
    name = media_name(value)
    with explained("broken image", name), _opened_image(value, name) as opened:
        _check_size(opened.size, name)
        return opened.size


def read_video(value: Any, options: MediaOptions) -> Video:
    """Read some frames of a video, evenly over its time.

    Args:
        value: A path or bytes of a file (with PyAV; animated GIF, WebP and PNG with Pillow), a
            list of images, a uint8 array `[F, H, W, 3]`, ``{"bytes": …, "path": …}``, or a
            `MediaPart` of these.
        options: How many frames, and how large.

    Raises:
        MediaError: It is missing, broken, has no frames, or is of another type.
    """
    value, how = reading_of(value, options)
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
        return _given(value, name, how)
    if not isinstance(value, Path | bytes):
        raise MediaError("wrong type", f"a video is a path, bytes or frames, not {_kind(value)}")
    for option in ("sample_fps", "timestamps"):
        if getattr(how.part, option) is not None:
            raise MediaError(
                "option of a media part",
                f"{name} is a file, and {option} describes frames that are given",
                remedy="write fps for the rate at which frames are taken from a film",
            )
    with explained("broken video", name), _opened(value) as stream:
        animation = animation_of(stream)
        if animation is not None:
            return _animation(stream, animation, name, how)
    return _film(value, name, how)


def check_video(value: Any) -> None:
    """Make sure that a video's file is there and not empty, or raise `MediaError`."""
    value = value.value if isinstance(value, MediaPart) else value
    name = media_name(value)
    content = None if isinstance(value, Video) else local_content(value, name)
    empty = content.stat().st_size == 0 if isinstance(content, Path) else False
    if empty or (isinstance(content, Sequence | np.ndarray) and len(content) == 0):
        raise MediaError("video without frames", f"{name} is empty")


@contextmanager
def explained(reason: str, name: str) -> Iterator[None]:
    """Turn whatever the readers of damaged files raise into a `MediaError`.

    They raise anything. What this package raises itself is a mistake of its own, unless it is an
    error of a file or a value, and goes on as it is.
    """
    try:
        yield
    except (MediaError, ImportError):
        raise
    except Exception as error:
        own = not isinstance(error, OSError | ValueError) and _is_own(error.__traceback__)
        # FFmpeg has a kind of its own, of frames that would be too large
        if own or type(error) is MemoryError:
            raise
        # without the addresses of what was opened, which Pillow and libsndfile name first
        known = isinstance(error, UnidentifiedImageError)
        detail = _UNKNOWN if known else getattr(error, "error_string", error)
        raise MediaError(reason, f"{name}: {detail}") from error


def _is_own(trace: TracebackType | None) -> bool:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # compiled readers have frames without a name
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("lrlhf.")


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
    if isinstance(content, Path | bytes):
        return open_image(content)
    if isinstance(content, np.ndarray):
        right = content.ndim == 2 or (content.ndim == 3 and content.shape[2] in (3, 4))
        if content.dtype != np.uint8 or not right:
            raise MediaError(
                "wrong type", f"an image is a uint8 array [H, W, 3], not {_kind(content)}"
            )
        _check_size((content.shape[1], content.shape[0]), name)
        return Image.fromarray(content)
    raise MediaError("wrong type", f"an image is a path, bytes or pixels, not {_kind(value)}")


def open_image(content: Path | bytes | BinaryIO, formats: Sequence[str] = IMAGES) -> Image.Image:
    """Open an image file of a known format, which names no other file and starts no program."""
    Image.init()  # an old Pillow knows fewer
    known = [name for name in formats if name in Image.OPEN]
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, "r", known)


def _check_size(size: tuple[int, int], name: str, most: int | None = None) -> None:
    """Refuse what has no pixels, and what has so many that a small file fills the memory."""
    most = Image.MAX_IMAGE_PIXELS if most is None else most
    if most is not None and size[0] * size[1] > most:
        raise MediaError(
            "image too large",
            f"{name} is {size[0]} x {size[1]} pixels; {most} in all is the most",
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


def _scaled(image: Image.Image, how: _Reading) -> Image.Image:
    size, most, least = image.size, how.max_pixels, how.part.min_pixels
    pixels = size[0] * size[1]
    if how.size is not None:
        size = how.size
    elif most is not None and pixels > most:
        factor = math.sqrt(most / pixels)
        # where one side would be less than a pixel, the other one has all that there may be
        width, height = (min(max(1, math.floor(side * factor)), most) for side in size)
        size = width, height
    elif least is not None and pixels < least:
        factor = math.sqrt(least / pixels)
        size = math.ceil(size[0] * factor), math.ceil(size[1] * factor)
    _check_size(size, "the scaled image")
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _chosen(
    starts: Sequence[float], end: float, name: str, how: _Reading, rate: float | None = None
) -> tuple[list[int], float]:
    """Pick the frames that are shown at the middles of equal stretches of a video's time.

    Args:
        starts: Seconds at which each frame begins, the first at 0.
        end: Second at which the last one ends.
        name: Of the video.
        how: How many.
        rate: Frames per second to take; None: all frames.

    Returns:
        Which frames, and how many per second they are.
    """
    if not starts:
        raise MediaError("video without frames", f"{name} has none")
    part = how.part
    begin, finish = (
        part.video_start or 0.0,
        min(end, math.inf if part.video_end is None else part.video_end),
    )
    if begin >= finish:
        raise MediaError(
            "video without frames", f"{name} lasts {end:.4g} s, and is shown from {begin:g} s on"
        )
    first, last = bisect_right(starts, begin) - 1, bisect_left(starts, finish)
    there, seconds = last - first, finish - begin
    target = there if rate is None else max(1, part.min_frames or 1, round(seconds * rate))
    if part.nframes is not None:
        target = part.nframes
        if target > there:
            raise MediaError(
                "option of a media part", f"nframes is {target}, and {name} has {there} frames"
            )
    count = min(target, there, how.max_frames)
    if count == there:
        return list(range(first, last)), count / seconds
    middles = (begin + (index + 0.5) * seconds / count for index in range(count))
    # a frame that begins at a middle is shown there, however both were rounded
    indices = [bisect_right(starts, middle + 1e-9 * end) - 1 for middle in middles]
    return indices, count / seconds


def _filled(images: Iterator[Image.Image], count: int, name: str) -> NDArray[np.uint8]:
    """Put frames of one size into an array, and hold one of them at a time beside it."""
    frames: NDArray[np.uint8] | None = None
    for index, image in enumerate(images):
        pixels = np.asarray(image)
        if frames is None:
            if count * pixels.size > 3 * _TAKEN_PIXELS:
                raise MediaError(
                    "video too large",
                    f"{count} frames of {image.width} x {image.height} pixels would be taken from "
                    f"{name}; {_TAKEN_PIXELS} pixels in all is the most",
                    remedy="lower media.max_pixels or media.max_frames",
                )
            frames = np.empty((count, *pixels.shape), np.uint8)
        if pixels.shape != frames.shape[1:]:
            raise MediaError("broken video", f"the frames of {name} have different sizes")
        frames[index] = pixels
    assert frames is not None  # there is one at least
    return frames


def _given(values: Sequence[Any], name: str, how: _Reading) -> Video:
    """Take frames of which the row has a list, at the rate that its part says."""
    stamps, rate = how.part.timestamps, how.part.sample_fps or how.fps
    starts, end = [index / rate for index in range(len(values))], len(values) / rate
    if stamps is not None:
        if len(stamps) != len(values):
            raise MediaError("option of a media part", f"{len(stamps)} timestamps stand for {name}")
        starts = [stamp - stamps[0] for stamp in stamps]
        end = _end(starts, None, rate)
        how = replace(how, part=_from_first(how.part, stamps[0]))
    chosen, fps = _chosen(starts, end, name, how)
    images = (_image(values[index], how) for index in chosen)
    return Video(_filled(images, len(chosen), name), fps)


def _from_first(part: PartOptions, first: float) -> PartOptions:
    """Count the part that is shown from the first time stamp on, as frames are counted."""
    begin, finish = part.video_start, part.video_end
    return replace(
        part,
        video_start=None if begin is None else max(0.0, begin - first),
        video_end=None if finish is None else finish - first,
    )


def _end(starts: Sequence[float], last: float | None, rate: float) -> float:
    """Return when the last frame ends, which lasts as long as the others do unless it says so."""
    if not last and len(starts) > 1:
        last = starts[-1] / (len(starts) - 1)
    return starts[-1] + (last or 1 / rate)


def _animation(stream: BinaryIO, animation: Animation, name: str, how: _Reading) -> Video:
    """Take frames from an animated picture, one after the other: each is made from the last."""
    with open_image(stream, ANIMATIONS) as opened:
        width, height = map(max, opened.size, animation.extent)
        _check_size((width, height), name, _FILM_PIXELS)
        count: int = opened.n_frames  # type: ignore[attr-defined]  # of the three formats
        if count * width * height > _ANIMATION_PIXELS:
            raise MediaError(
                "video too large",
                f"{name} has {count} frames of {width} x {height} pixels; {_ANIMATION_PIXELS} "
                "pixels in all is the most",
                remedy="scale such animations down beforehand",
            )
        # one that is shown instead where nothing moves comes first, and has no length
        seconds = animation.seconds[-count:] or [0.1]
        starts = [0.0, *np.cumsum(seconds).tolist()]
        chosen, fps = _chosen(starts[:-1], starts[-1], name, how, how.fps)
        images = _frames_of(opened, [index + count - len(seconds) for index in chosen], how)
        return Video(_filled(images, len(chosen), name), fps)


def _frames_of(opened: Image.Image, indices: Sequence[int], how: _Reading) -> Iterator[Image.Image]:
    for index in indices:
        opened.seek(index)
        _check_size(opened.size, "a frame", _FILM_PIXELS)
        yield _scaled(_rgb(opened.copy()), how)


def _film(content: Path | bytes, name: str, how: _Reading) -> Video:
    with explained("broken video", name):
        # a stream may say neither how many frames it has nor when: they are counted first
        starts, end = _timeline(content, name)
        chosen, fps = _chosen(starts, end, name, how, how.fps)
        images = (_scaled(image, how) for image in _film_frames(content, chosen, name))
        return Video(_filled(images, len(chosen), name), fps)


def _timeline(content: Path | bytes, name: str) -> tuple[list[float], float]:
    """Return when each frame of a film is shown, from its time stamps, and when the film ends."""
    starts: list[float | None] = []
    last = None
    with _opened_film(content, name) as container:
        stream = _stream(container)
        if stream is None:
            raise MediaError("video without frames", f"{name} has none")
        rate = float(stream.average_rate or stream.guessed_rate or 1)
        for frame in _decoded(container):
            starts.append(frame.time)
            last = float(frame.duration * frame.time_base) if frame.duration else None
    known = [start for start in starts if start is not None]
    if len(known) < len(starts) or known != sorted(known) or (known and known[0] == known[-1]):
        known = [index / rate for index in range(len(starts))]
    if not known:
        raise MediaError("video without frames", f"{name} has none")
    known = [start - known[0] for start in known]
    return known, _end(known, last, rate)


def _film_frames(content: Path | bytes, indices: Sequence[int], name: str) -> Iterator[Image.Image]:
    """Yield the frames at ``indices``, stretched and turned as a player shows them."""
    times = Counter(indices)
    with _opened_film(content, name) as container:
        ratio = _stream(container).sample_aspect_ratio
        for index, frame in enumerate(_decoded(container)):
            if times[index]:
                size = max(1, round(frame.width * (ratio or 1))), frame.height
                _check_size(size, name, _FILM_PIXELS)
                image = frame.to_image().convert("RGB")
                if size != image.size:
                    image = image.resize(size, Image.Resampling.BICUBIC)
                yield from [_turned(image, frame)] * times[index]
            if index == indices[-1]:
                return
    raise MediaError("broken video", f"{name} has fewer frames when it is read again")


def _turned(image: Image.Image, frame: Any) -> Image.Image:
    """Lay a frame as its display matrix says.

    The matrix is that of MP4: x' = a x + c y and y' = b x + d y, in its first, second, fourth and
    fifth number.
    """
    matrix = next((data for data in frame.side_data if data.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
    if abs(b) > abs(a):
        image, a, d = image.transpose(Image.Transpose.TRANSPOSE), c, b
    if a < 0:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if d < 0:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return image


def _opened(content: Path | bytes) -> BinaryIO:
    return content.open("rb") if isinstance(content, Path) else io.BytesIO(content)


def _opened_film(content: Path | bytes, name: str) -> Any:
    """Open a film of a known container, which reads no other file."""
    av = _pyav()
    # a name with a colon is no protocol
    source = f"file:{content}" if isinstance(content, Path) else io.BytesIO(content)
    try:
        return av.open(source, options={"format_whitelist": _FILMS, "protocol_whitelist": "file"})
    except av.error.ArgumentError as error:
        raise MediaError(
            "broken video",
            f"{name} is a film in none of the containers that are read: {_FILMS}",
            remedy="convert such films to MP4 or WebM",
        ) from error


def _stream(container: Any) -> Any:
    """Return the film, which a cover or a still picture may precede; None: there is none."""
    return container.streams.best("video")


def _decoded(container: Any) -> Iterator[Any]:
    stream = _stream(container)
    if stream.codec_context is None:
        raise ValueError("its codec is not known")
    stream.codec_context.options = {"max_pixels": str(_FILM_PIXELS)}
    return iter(container.decode(stream))


def _pyav() -> ModuleType:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ImportError("reading video files needs PyAV: pip install 'lrlhf[vision]'") from error


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
