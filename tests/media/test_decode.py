"""Expected pixels are written by hand: files are made of few colours that survive their format."""

import base64
import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from lrlhf.media import MediaError, MediaOptions, Video, read_image, read_video
from lrlhf.media.decode import check_image, check_video

OPTIONS = MediaOptions()
PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=format, **options)
    return stream.getvalue()


def png() -> bytes:
    return encoded(Image.fromarray(PIXELS))


def written(folder: Path, content: bytes, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def colours(image: Image.Image) -> list[list[list[int]]]:
    return np.asarray(image).tolist()


def reason(read: Callable[[], object]) -> str:
    with pytest.raises(MediaError) as caught:
        read()
    return caught.value.reason


def write_film(
    target: Any,
    levels: list[int],
    *,
    rate: int = 10,
    codec: str = "mpeg4",
    size: int = 16,
    format: str = "mp4",
) -> None:
    """Write a film whose frames are each of one grey level."""
    with av.open(target, mode="w", format=format) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, rate)
        container.start_encoding()  # writes the head, also of a film without frames
        for level in levels:
            pixels = np.full((size, size, 3), level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def film(count: int = 20, **options: Any) -> bytes:
    """Frame ``i`` is of the grey level ``12 i``."""
    stream = io.BytesIO()
    write_film(stream, [12 * index for index in range(count)], **options)
    return stream.getvalue()


def numbers(video: Video) -> list[int]:
    """Which frames of a film were taken, by their grey level."""
    assert video.frames.dtype == np.uint8
    assert video.frames.shape[3] == 3
    spread = [int(frame.max()) - int(frame.min()) for frame in video.frames]
    assert max(spread) <= 4  # one grey level each; lossy by a little
    levels = [float(frame.mean()) for frame in video.frames]
    assert all(abs(level - 12 * round(level / 12)) <= 4 for level in levels)
    return [round(level / 12) for level in levels]


def shades(video: Video) -> list[int]:
    """The grey levels of frames that were not compressed."""
    assert all(frame.min() == frame.max() for frame in video.frames)
    return [int(frame.flat[0]) for frame in video.frames]


def stills(*levels: int) -> list[Image.Image]:
    return [Image.new("RGB", (4, 2), (level, level, level)) for level in levels]


def animation(*levels: int, duration: int = 100, format: str = "GIF", **options: Any) -> bytes:
    first, *others = stills(*levels)
    return encoded(
        first, format, save_all=True, append_images=others, duration=duration, loop=0, **options
    )


def as_data(path: Path, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def forms_of_a_file(path: Path) -> list[Any]:
    content = path.read_bytes()
    return [
        path,
        str(path),
        f"file://{path}",
        content,
        bytearray(content),
        as_data(path),
        {"bytes": content, "path": "lost.png"},
        {"bytes": None, "path": str(path)},
        {"bytes": content, "path": None},
    ]


def test_every_form_of_an_image_gives_the_same_pixels(tmp_path: Path) -> None:
    path = written(tmp_path, png(), "a picture.png")
    in_memory = [Image.fromarray(PIXELS), PIXELS, torch.from_numpy(PIXELS)]
    for value in [*forms_of_a_file(path), *in_memory]:
        check_image(value)
        for _ in range(2):  # what was given in memory can be read again
            image = read_image(value, OPTIONS)
            assert image.mode == "RGB"
            assert colours(image) == PIXELS.tolist()


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        # stored as one row, red green; 3: turned by half, 6: its left end is the top,
        # 8: its left end is the bottom, 2: mirrored
        (3, [["green", "red"]]),
        (6, [["red"], ["green"]]),
        (8, [["green"], ["red"]]),
    ],
)
def test_a_photo_is_turned_upright(orientation: int, upright: list[list[str]]) -> None:
    names = {"red": [255, 0, 0], "green": [0, 255, 0]}
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.array([[names["red"], names["green"]]], dtype=np.uint8))
    image = read_image(encoded(stored, exif=exif), OPTIONS)
    assert colours(image) == [[names[name] for name in row] for row in upright]


def test_what_is_transparent_shows_white() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putdata([0, 1])
    assert colours(read_image(encoded(palette), OPTIONS)) == [[[255, 0, 0], [0, 0, 255]]]
    see_through = encoded(palette, transparency=0)
    assert colours(read_image(see_through, OPTIONS)) == [[[255, 255, 255], [0, 0, 255]]]
    # black that covers 128 of 255: 255 * 127 / 255 is left of the white
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert colours(read_image(half, OPTIONS)) == [[[127, 127, 127]]]
    grey = Image.new("LA", (1, 1), (40, 0))
    assert colours(read_image(encoded(grey), OPTIONS)) == [[[255, 255, 255]]]
    keyed = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    shown = read_image(encoded(keyed, transparency=(1, 2, 3)), OPTIONS)
    assert colours(shown) == [[[255, 255, 255], [4, 5, 6]]]


def test_greys_of_sixteen_bits_keep_their_upper_eight() -> None:
    deep = Image.fromarray(np.array([[0x0000, 0x00FF, 0x1234, 0x8000, 0xFFFF]], dtype=np.uint16))
    levels = [0x00, 0x00, 0x12, 0x80, 0xFF]
    for content in (encoded(deep), encoded(deep, "TIFF")):
        assert colours(read_image(content, OPTIONS)) == [[[level] * 3 for level in levels]]


@pytest.mark.parametrize(
    ("size", "most"), [((33, 7), 48), ((101, 100), 500), ((3, 999), 48), ((3, 999), 1), ((7, 7), 1)]
)
def test_max_pixels_is_never_exceeded(size: tuple[int, int], most: int) -> None:
    width, height = read_image(Image.new("RGB", size), MediaOptions(max_pixels=most)).size
    assert 1 <= width * height <= most
    if min(width, height) > 1:
        # each side is rounded down by less than a pixel
        assert abs(width / size[0] - height / size[1]) < 1 / size[0] + 1 / size[1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("https://example.org/a.png", "remote file"),
        ("data:image/png;base64,####", "broken image"),
        ("data:text/plain,hello", "broken image"),
        (b"", "broken image"),
        (b"<html>404</html>", "broken image"),
        (np.zeros((0, 4, 3), np.uint8), "zero-size image"),
        (np.zeros((4, 4, 3), np.float32), "wrong type"),
        (np.zeros((3, 4, 5), np.uint8), "wrong type"),
        (17, "wrong type"),
        ({"bytes": None, "path": None}, "wrong type"),
        ("x" * 300, "missing file"),
        (Path("/"), "missing file"),
    ],
)
def test_what_is_no_image_is_refused_before_its_pixels_are_read(value: Any, expected: str) -> None:
    assert reason(lambda: check_image(value)) == expected
    assert reason(lambda: read_image(value, OPTIONS)) == expected


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_truncated_image_is_found_when_its_pixels_are_read(tmp_path: Path, format: str) -> None:
    noise = np.random.Generator(np.random.Philox(0)).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(noise), format)
    if format == "JPEG":
        check_image(content[:-40])  # its head looks well
    path = written(tmp_path, content[: len(content) // 2], f"half.{format.lower()}")
    with pytest.raises(MediaError, match=r"half\.") as caught:
        read_image(path, OPTIONS)
    assert caught.value.reason == "broken image"


@pytest.mark.parametrize(
    ("options", "taken", "fps"),
    [
        # 20 frames at 10 fps last 2 s. At 2 fps that is 4 frames, the middles of stretches of 5:
        # 2.5, 7.5, 12.5, 17.5, rounded down
        ({}, [2, 7, 12, 17], 2.0),
        # 3 stretches of 6.67: 3.3, 10, 16.7; 3 frames in 2 s
        ({"max_frames": 3}, [3, 10, 16], 1.5),
        # no more than there are
        ({"fps": 60.0, "max_frames": 50}, list(range(20)), 10.0),
        # 0.2 frames: at least one
        ({"fps": 0.1}, [10], 0.5),
    ],
)
def test_frames_of_a_film_are_the_middles_of_equal_stretches(
    options: dict[str, Any], taken: list[int], fps: float
) -> None:
    video = read_video(film(), MediaOptions(**options))
    assert numbers(video) == taken
    assert video.fps == pytest.approx(fps)
    assert video.frames.shape[1:] == (16, 16, 3)


@pytest.mark.parametrize(
    "wrap",
    [
        tuple,
        lambda frames: [encoded(frame) for frame in frames],
        lambda frames: np.stack([np.asarray(frame) for frame in frames]),
        lambda frames: torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])),
    ],
)
def test_frames_that_are_given_are_taken_evenly(wrap: Callable[[list[Image.Image]], Any]) -> None:
    frames = wrap(stills(*range(0, 100, 10)))
    check_video(frames)
    # stretches of 2.5: middles 1.25, 3.75, 6.25, 8.75
    video = read_video(frames, MediaOptions(max_frames=4, fps=3.0))
    assert shades(video) == [10, 30, 60, 80]
    assert video.frames.shape == (4, 2, 4, 3)
    assert video.fps == 3.0
    whole = read_video(frames, MediaOptions(max_frames=10))
    assert shades(whole) == list(range(0, 100, 10))


@pytest.mark.parametrize(
    ("format", "name"), [("GIF", "a.gif"), ("WEBP", "a.webp"), ("PNG", "a.png")]
)
def test_an_animation_is_read_with_its_own_speed(tmp_path: Path, format: str, name: str) -> None:
    extra = {"lossless": True} if format == "WEBP" else {}
    levels = [0, 40, 80, 120, 160, 200, 220, 240]
    path = written(tmp_path, animation(*levels, duration=250, format=format, **extra), name)
    # 8 frames of 250 ms last 2 s: at 2 fps 4 frames, middles 1, 3, 5, 7
    for form in (str(path), path.read_bytes(), {"bytes": path.read_bytes(), "path": name}):
        video = read_video(form, OPTIONS)
        assert shades(video) == [40, 120, 200, 240]
        assert video.fps == pytest.approx(2.0)
    assert shades(read_video(path, MediaOptions(max_frames=2))) == [80, 220]  # middles 2 and 6


def sound() -> bytes:
    stream = io.BytesIO()
    with av.open(stream, mode="w", format="wav") as container:
        track = container.add_stream("pcm_s16le", rate=8000)
        samples = np.zeros((1, 800), dtype=np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(track.encode(frame))
        container.mux(track.encode())
    return stream.getvalue()


def header_only() -> bytes:
    """A film whose stream is told of, and has no frame."""
    stream = io.BytesIO()
    write_film(stream, [], format="avi")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (sound, "song.mp3", "video without frames"),
        (header_only, "none.avi", "video without frames"),
        (lambda: b"no film at all " * 50, "text.mp4", "broken video"),
        (lambda: film()[:60], "cut.mp4", "broken video"),
        (lambda: b"GIF89a", "cut.gif", "broken video"),
    ],
)
def test_a_file_that_shows_nothing_is_refused_by_name(
    tmp_path: Path, content: Callable[[], bytes], name: str, expected: str
) -> None:
    path = written(tmp_path, content(), name)
    with pytest.raises(MediaError, match=name) as caught:
        read_video(str(path), OPTIONS)
    assert caught.value.reason == expected


@pytest.mark.parametrize(
    ("value", "expected", "checked"),
    [
        ([], "video without frames", True),
        (np.zeros((0, 4, 4, 3), np.uint8), "video without frames", True),
        (np.zeros((2, 4, 4, 3), np.float32), "wrong type", False),
        (3.5, "wrong type", False),
        (None, "wrong type", False),
        ([*stills(1), Image.new("RGB", (9, 9))], "broken video", False),
        ([*stills(1), "gone.png"], "missing file", False),
        ("gs://bucket/a.mp4", "remote file", True),
        ("data:video/mp4;base64,####", "broken image", True),
        ("x" * 300, "missing file", True),
    ],
)
def test_what_is_no_video_is_refused(
    tmp_path: Path, value: Any, expected: str, checked: bool
) -> None:
    assert reason(lambda: read_video(value, OPTIONS)) == expected
    if checked:
        assert reason(lambda: check_video(value)) == expected
    empty = written(tmp_path, b"", "nothing.mp4")
    assert reason(lambda: check_video(empty)) == "video without frames"
