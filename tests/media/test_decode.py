"""Expected pixels are written by hand: files are made of few colours that survive their format."""

import base64
import io
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from lrlhf.media import MediaError, MediaOptions, Video, decode, read_image, read_video
from lrlhf.media.decode import check_image, check_video
from lrlhf.media.refs import MediaPart, PartOptions
from tests.vlms import gif_bomb

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
    assert video.fps == pytest.approx(1.2)  # 10 frames at 3 fps last 10/3 s, as these 4 do
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
        (
            lambda: film(format="matroska").replace(b"V_MPEG4", b"V_ZZZZ4"),
            "codec.mkv",
            "broken video",
        ),
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


def tagged(*entries: tuple[int, int, int, bytes]) -> bytes:
    """A photo of 3 x 2 pixels, to be turned to the right, with further EXIF tags."""
    tags = [(0x0112, 3, 1, struct.pack("<H", 6)), *entries]
    head, tail = b"II*\0" + struct.pack("<LH", 8, len(tags)), b""
    for tag, kind, count, value in tags:
        place = struct.pack("<L", 14 + 12 * len(tags) + len(tail))
        field = value.ljust(4, b"\0") if len(value) <= 4 else place
        head += struct.pack("<HHL", tag, kind, count) + field
        tail += b"" if len(value) <= 4 else value
    exif = b"Exif\0\0" + head + bytes(4) + tail
    return encoded(Image.new("RGB", (3, 2)), "JPEG", exif=exif)


@pytest.mark.parametrize(
    "entry",
    [
        (0x0128, 2, 2, b"2\0"),  # a unit of resolution that is text
        (0x0103, 1, 4, b"\1\2\3\4"),  # a compression that is four bytes
        (0x011A, 7, 8, b"\xff" * 8),  # a resolution of no type
        (0x011A, 11, 1, struct.pack("<f", float("nan"))),
        (0x8769, 4, 1, b"\xff" * 4),  # the offset of further tags leads out of the file
    ],
)
def test_a_photo_is_turned_upright_whatever_its_other_tags_are(
    entry: tuple[int, int, int, bytes],
) -> None:
    assert read_image(tagged(entry), OPTIONS).size == (2, 3)


def test_a_photo_whose_tags_cannot_be_read_is_shown_as_it_lies() -> None:
    broken = encoded(Image.new("RGB", (3, 2)), "JPEG", exif=b"Exif\0\0II*\0\xff")
    assert read_image(broken, OPTIONS).size == (3, 2)


def test_whatever_a_reader_raises_is_a_bad_row_and_what_this_package_raises_is_a_defect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Odd(Exception):  # noqa: N818
        pass

    def fail(*_: object, **__: object) -> None:
        raise Odd("not what was expected")

    monkeypatch.setattr(Image.Image, "convert", fail)
    assert reason(lambda: read_image(PIXELS, OPTIONS)) == "broken image"
    monkeypatch.undo()
    monkeypatch.setattr(decode, "_rgb", None)  # called in the package itself
    with pytest.raises(TypeError):
        read_image(PIXELS, OPTIONS)


CORNERS = {"a": [255, 0, 0], "b": [0, 255, 0], "c": [0, 0, 255], "d": [255, 255, 255]}


def corners(frame: Any) -> str:
    """Name the colours of a frame's corners, row by row."""
    places = [(2, 2), (2, -3), (-3, 2), (-3, -3)]
    distances = {
        place: {
            name: int(np.abs(frame[place].astype(int) - colour).sum())
            for name, colour in CORNERS.items()
        }
        for place in places
    }
    return "".join(min(near, key=lambda name: near[name]) for near in distances.values())


def film_of_corners(ratio: int = 1, matrix: Sequence[int] | None = None) -> bytes:
    """Two frames of 64 x 32: ``ab`` above ``cd``."""
    pixels = np.zeros((32, 64, 3), np.uint8)
    for name, colour in CORNERS.items():
        top, left = 16 * (name in "cd"), 32 * (name in "bd")
        pixels[top : top + 16, left : left + 32] = colour
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track = container.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = 64, 32, "yuv420p"
        track.bit_rate = 8_000_000
        track.codec_context.sample_aspect_ratio = ratio
        for _ in range(2):
            container.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(track.encode())
    content = bytearray(stream.getvalue())
    if matrix is not None:
        a, b, c, d = (65536 * entry for entry in matrix)
        start = content.find(b"tkhd") + 44
        content[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(content)


@pytest.mark.parametrize(
    ("matrix", "shape", "shown"),
    [
        (None, (32, 64), "abcd"),
        # x' = a x + c y, y' = b x + d y, with (a, b, c, d) as a phone writes it
        ((0, 1, -1, 0), (64, 32), "cadb"),  # by a quarter to the right
        ((-1, 0, 0, -1), (32, 64), "dcba"),
        ((0, -1, 1, 0), (64, 32), "bdac"),
        ((-1, 0, 0, 1), (32, 64), "badc"),  # mirrored, as by the camera at the front
        ((0, 1, 1, 0), (64, 32), "acbd"),
    ],
)
def test_a_film_is_laid_as_its_matrix_says(
    matrix: Sequence[int] | None, shape: tuple[int, int], shown: str
) -> None:
    video = read_video(film_of_corners(matrix=matrix), OPTIONS)
    assert video.frames.shape[1:3] == shape
    assert corners(video.frames[0]) == shown


def test_a_film_whose_pixels_are_not_square_is_stretched_and_then_turned() -> None:
    assert read_video(film_of_corners(2), OPTIONS).frames.shape[1:3] == (32, 128)
    turned = read_video(film_of_corners(2, (0, 1, -1, 0)), OPTIONS)
    assert turned.frames.shape[1:3] == (128, 32)
    assert corners(turned.frames[0]) == "cadb"


def test_frames_of_a_film_of_variable_rate_are_taken_by_their_time() -> None:
    # a frame each 0.1 s from 0 to 0.9 and from 10 to 10.9, and one from 1 to 10: 11 s
    times = [*range(0, 1000, 100), 1000, *range(10_000, 11_000, 100)]
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        track = container.add_stream("mpeg4", rate=1000)
        track.width = track.height = 16
        track.pix_fmt = "yuv420p"
        for index, time in enumerate(times):
            pixels = np.full((16, 16, 3), 12 * index, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(track.encode(frame))
        container.mux(track.encode())
    video = read_video(stream.getvalue(), MediaOptions(fps=1.0))
    # at 0.5, 1.5, … 10.5 s, or a little before: the container says how long the last one lasts
    assert numbers(video)[1:-1] == [10] * 9
    assert numbers(video)[0] in (4, 5)
    assert numbers(video)[-1] in (15, 16)
    assert len(video.frames) / video.fps == pytest.approx(11.0, abs=0.11)
    part = MediaPart(stream.getvalue(), PartOptions(video_start=10.0, video_end=10.5, nframes=5))
    cut = read_video(part, OPTIONS)
    assert numbers(cut) == [11, 12, 13, 14, 15]
    assert cut.fps == pytest.approx(10.0)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_each_frame_of_an_animation_lasts_as_long_as_it_says(format: str) -> None:
    lengths: Any = [100, 100, 1800]
    extra = {"lossless": True} if format == "WEBP" else {}
    content = animation(0, 40, 80, duration=lengths, format=format, **extra)
    whole = read_video(content, OPTIONS)
    assert shades(whole) == [0, 40, 80]
    assert whole.fps == pytest.approx(1.5)  # 3 frames in 2 s
    # at 0.5 and 1.5 s the last one is shown
    thinned = read_video(content, MediaOptions(max_frames=2))
    assert shades(thinned) == [80, 80]
    assert thinned.fps == pytest.approx(1.0)


def test_the_frames_of_an_animated_avif_are_read_and_not_its_still() -> None:
    # 10 frames of a second each, of which 2 per second are asked for: all of them
    moving = animation(*range(0, 100, 10), duration=1000, format="AVIF", quality=100)
    video = read_video(moving, OPTIONS)
    assert len(video.frames) == 10
    assert video.fps == pytest.approx(1.0)


@pytest.mark.parametrize("delay", [0, 10])
def test_a_gif_without_time_is_shown_as_browsers_do(delay: int) -> None:
    video = read_video(animation(0, 40, 80, duration=delay), MediaOptions(fps=50.0))
    assert video.fps == pytest.approx(10.0)


def test_frames_that_are_larger_than_the_first_are_seen_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("decoded")

    monkeypatch.setattr(GifImageFile, "load", fail)
    assert reason(lambda: read_video(gif_bomb(7000, 2), OPTIONS)) == "image too large"
    monkeypatch.setattr(decode, "_ANIMATION_PIXELS", 10_000)
    assert reason(lambda: read_video(gif_bomb(60, 3), OPTIONS)) == "video too large"


def test_frames_that_are_taken_have_so_many_pixels_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_TAKEN_PIXELS", 4 * 16 * 16)
    assert len(read_video(film(), OPTIONS).frames) == 4
    monkeypatch.setattr(decode, "_TAKEN_PIXELS", 4 * 16 * 16 - 1)
    assert reason(lambda: read_video(film(), OPTIONS)) == "video too large"
    assert len(read_video(film(), MediaOptions(max_pixels=100)).frames) == 4
    monkeypatch.undo()
    monkeypatch.setattr(decode, "_FILM_PIXELS", 255)
    assert reason(lambda: read_video(film(), OPTIONS)) == "broken video"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n", "a.mp4"),
        ("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n", "a.m3u8"),
        ("ffconcat version 1.0\nfile secret.mp4\n", "a.ffconcat"),
    ],
)
def test_a_list_that_names_other_films_is_none(tmp_path: Path, content: str, name: str) -> None:
    written(tmp_path, film(), "secret.mp4")
    path = written(tmp_path, content.encode(), name)
    assert reason(lambda: read_video(path, OPTIONS)) == "broken video"


def test_a_name_with_a_colon_is_no_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, film(), "concat:a|b.mp4")
    assert len(read_video(Path("concat:a|b.mp4"), OPTIONS).frames) == 4


def test_formats_that_start_programs_are_not_read() -> None:
    drawn = encoded(Image.new("RGB", (4, 4)), "EPS")
    with pytest.raises(MediaError, match=r"broken image: .* of none of the formats PNG, JPEG, "):
        check_image(drawn)


FRAMES = stills(*range(0, 80, 10))


@pytest.mark.parametrize(
    ("options", "shown", "fps"),
    [
        ({}, list(range(0, 80, 10)), 2.0),
        ({"fps": 4.0}, list(range(0, 80, 10)), 4.0),
        ({"sample_fps": 0.5}, list(range(0, 80, 10)), 0.5),
        # 4 s at 2 fps; middles of stretches of 2 and of 4 frames, of as many seconds
        ({"max_frames": 4}, [10, 30, 50, 70], 1.0),
        ({"nframes": 2}, [20, 60], 0.5),
        ({"video_start": 1.0, "video_end": 3.0}, [20, 30, 40, 50], 2.0),
        # of the same clock as the time stamps
        (
            {
                "timestamps": tuple(100.0 + index for index in range(8)),
                "video_start": 102.0,
                "video_end": 104.0,
            },
            [20, 30],
            1.0,
        ),
        # the last one lasts as long as the others on average: 8 frames in 8 s
        ({"timestamps": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)}, list(range(0, 80, 10)), 1.0),
    ],
)
def test_options_of_a_part_say_when_its_frames_were_taken(
    options: dict[str, Any], shown: list[int], fps: float
) -> None:
    video = read_video(MediaPart(FRAMES, PartOptions(**options)), OPTIONS)
    assert shades(video) == shown
    assert video.fps == pytest.approx(fps)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"max_pixels": 2}, (2, 1)),
        ({"min_pixels": 32}, (8, 4)),
        ({"min_pixels": 8, "max_pixels": 8}, (4, 2)),
        ({"resized_height": 5, "resized_width": 7}, (7, 5)),
    ],
)
def test_options_of_a_part_say_how_large_it_is_shown(
    options: dict[str, Any], size: tuple[int, int]
) -> None:
    own = PartOptions(**options)
    assert read_image(MediaPart(stills(0)[0], own), OPTIONS).size == size
    assert read_video(MediaPart(FRAMES, own), OPTIONS).frames.shape[1:3] == size[::-1]


@pytest.mark.parametrize(
    ("value", "options", "told"),
    [
        (FRAMES, {"nframes": 9}, "nframes is 9"),
        (FRAMES, {"nframes": 33}, "33, and 32 is the most"),
        (FRAMES, {"timestamps": (0.0, 1.0)}, "2 timestamps stand for 8 frames"),
        (film(), {"sample_fps": 2.0}, "describes frames that are given"),
        (FRAMES, {"resized_height": 100, "resized_width": 100}, "10000 pixels, and 9999"),
    ],
)
def test_options_of_a_part_that_cannot_be_followed_are_refused(
    value: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(MediaError, match=told) as caught:
        read_video(MediaPart(value, PartOptions(**options)), MediaOptions(max_pixels=9999))
    assert caught.value.reason == "option of a media part"
