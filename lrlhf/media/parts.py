"""Parts of messages that show something: what is shown, in any of the ways chat formats write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lrlhf.media.decode import BadRow, MediaError, MediaOptions, check_image, read_image
from lrlhf.media.path_safety import FOREIGN, local_path
from lrlhf.media.refs import MediaPart, PartOptions, media_name
from lrlhf.types import Message

KINDS = ("image", "video", "audio")
_OPTIONS = {
    "image": ("max_pixels", "min_pixels", "resized_height", "resized_width"),
    "video": tuple(option.name for option in fields(PartOptions)),
    "audio": (),
}
"""Options of parts that are followed."""
_NOT_FOLLOWED = (
    "total_pixels", "raw_fps", "video_fps", "num_frames", "do_sample_frames", "do_resize", "detail",
    "audio_start", "audio_end",
)  # fmt: skip
"""Options of other programs, which would change what is shown."""
_LOW_DETAIL = 512 * 512
"""Pixels of an image with OpenAI's ``detail: low``."""


def parts_of(message: Message) -> Sequence[Any]:
    """Return the parts of a message; none of text."""
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def kind_of(part: Any) -> str | None:
    """Return what a part shows; None: it is text, or something else."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") is None:  # as Qwen's agents write it
        return next((kind for kind in KINDS if part.get(kind) is not None), None)
    kind = str(part["type"]).removesuffix("_url").removeprefix("input_")
    return kind if kind in KINDS else None


def data_keys(kind: str) -> tuple[str, ...]:
    """Return the keys under which a part may have what it shows."""
    return (kind, "bytes", "path", "url", f"{kind}_url", f"input_{kind}", "source")


def data_of(part: Mapping[str, Any], kind: str) -> Any:
    """Find what a part shows, in any of the ways that chat formats write it, and its options.

    Raises:
        BadRow: An option is not followed, or has an impossible value.
    """
    options = {**part}
    for key in data_keys(kind):
        value = part.get(key)
        if key == "source" and not isinstance(value, Mapping):  # it is Anthropic's, or a remark
            continue
        if isinstance(value, Mapping) and "url" in value:
            options |= value
            value = value["url"]
        if isinstance(value, Mapping) and "data" in value:  # as OpenAI's input_audio
            value = f"data:{kind}/{value.get('format', 'wav')};base64,{value['data']}"
        if value is not None:
            own = options_of(options, kind)
            return value if own == PartOptions() else MediaPart(value, own)
    return None


def options_of(part: Mapping[str, Any], kind: str) -> PartOptions:
    """Read the options of a part; see `data_of`."""
    options = {key: value for key, value in part.items() if value is not None}
    if options.get("detail") in ("auto", "high", "original"):
        del options["detail"]  # as the model's own processor scales
    if kind == "image" and options.get("detail") == "low":
        del options["detail"]
        options.setdefault("max_pixels", _LOW_DETAIL)
    followed = _OPTIONS[kind]
    other = [
        name
        for name in (*_NOT_FOLLOWED, *_OPTIONS["video"])
        if name in options and name not in followed
    ]
    if other:
        known = f"those of {kind}s are {', '.join(followed)}" if followed else f"{kind}s have none"
        raise _option(f"a part of type {kind!r} has {other[0]}, which is not followed; {known}")
    read = {name: _number(name, options[name]) for name in followed if name in options}
    if ("resized_height" in read) != ("resized_width" in read):
        raise _option("resized_height and resized_width go together, and a part has one of them")
    if read.get("video_end", math.inf) <= read.get("video_start", 0):
        raise _option("video_end of a part is not behind its video_start")
    return PartOptions(**read)


def _number(name: str, value: Any) -> Any:
    if name == "timestamps":
        stamps = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(stamps, list | tuple) and stamps:
            numbers = [_number("a timestamp", stamp) for stamp in stamps]
            if numbers == sorted({*numbers}):
                return tuple(numbers)
        raise _option(f"timestamps of a part are {stamps!r:.60}, not seconds that grow")
    least = 0 if name in ("video_start", "video_end", "a timestamp") else 1e-6
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    is_integer = name not in ("fps", "sample_fps") and least > 0
    if not number or not least <= value < math.inf or (is_integer and value != int(value)):
        kind = (
            "a whole number above 0" if is_integer else "a number above 0" if least else "seconds"
        )
        raise _option(f"{name} of a part is {value!r:.40}, not {kind}")
    return int(value) if is_integer else float(value)


def _option(what: str) -> BadRow:
    return BadRow(
        "option of a media part",
        what,
        remedy="leave the option out of the part, or set it for all rows in data.media",
    )


def anchored(value: Any, folder: Path | None, options: MediaOptions) -> Any:
    """Make the paths of a row absolute, and refuse those that lead out of its data."""
    if isinstance(value, MediaPart):
        return replace(value, value=anchored(value.value, folder, options))
    if isinstance(value, list | tuple):
        return [anchored(entry, folder, options) for entry in value]
    if isinstance(value, Mapping):
        # what a row knows of a file beside its content is only its name
        content = value.get("bytes")
        if content is not None and not isinstance(content, str):
            return value
        if value.get("array") is not None:
            return {**value, "bytes": None, "path": None}
        path = content or value.get("path")
        return value if path is None else anchored(path, folder, options)
    if isinstance(value, Path) and folder == FOREIGN:
        value = str(value)
    if not isinstance(value, str) or value.startswith("data:"):
        return value
    if "://" in value and not value.startswith("file:"):
        return value
    # absolute: parts are anchored again when columns fill them
    root = None if options.root is None else Path(options.root)
    return local_path(value, folder, root=root)


# ------------------------------------------------------------------ episodes


def read_parts(
    parts: Sequence[Any],
    options: MediaOptions,
    read_one: Callable[[Any, MediaOptions], Image.Image] = read_image,
) -> list[Message]:
    """Read the images of the parts of a message that an environment, a tool or an agent shows.

    Args:
        parts: Text, ``PIL.Image``s, and parts as in rows of data or of MCP.
        options: As of the data; files are read below ``root`` only.
        read_one: Reads an image.

    Returns:
        Text parts, and of each image ``{"type": "image", "image": …}`` with a ``PIL.Image``, RGB.

    Raises:
        BadRow: An image cannot be read, a part shows something else, or together they have more
            pixels than one image may have.
    """
    read: list[Message] = []
    pixels = 0
    for part in parts:
        if isinstance(part, Image.Image):
            part = {"type": "image", "image": part}
        if (kind := kind_of(part)) is None:
            if isinstance(part, Mapping) and (other := kind_of({**part, "type": None})):
                raise MediaError("two contents", f"a part of type 'text' has an {other} too")
            text = part if isinstance(part, str) else part["text"]
            # halves of surrogate pairs are no text that tokenizers read
            text = text.encode("utf-8", "replace").decode()
            read.append({"type": "text", "text": text})
            continue
        if kind != "image":
            raise MediaError(f"no {kind}s", f"episodes show images, and no {kind}s")
        value = data_of(part, kind)
        if value is None and isinstance(part.get("data"), str):  # as MCP has them
            value = f"data:{part.get('mimeType') or part.get('mime_type')};base64,{part['data']}"
        if value is None:
            raise MediaError("placeholder count", "a part of type 'image' has no image")
        if isinstance(value, Path):
            value = str(value)
        if options.root is None and _names_file(value):
            raise MediaError(
                "file outside the data",
                f"the file {media_name(value)} is named, and there is no media.root",
                remedy="set media.root to the folder that holds such files, or give their content",
            )
        value = anchored(value, FOREIGN, options)
        width, height = check_image(value)
        _check_pixels(pixels + width * height, value)
        image = read_one(value, options)
        pixels += max(image.width * image.height, width * height)  # it may be enlarged
        _check_pixels(pixels, value)
        read.append({"type": "image", "image": image})
    return read


def _check_pixels(pixels: int, value: Any) -> None:
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise MediaError(
            "image too large",
            f"{media_name(value)} and those before it have {pixels} pixels; {most} is the most "
            "that one message shows",
            remedy="scale such images down beforehand",
        )


def without_images(
    messages: Sequence[Message],
) -> tuple[tuple[Message, ...], tuple[Image.Image, ...]]:
    """Return messages with a bare part in the place of each image, and the images in order."""
    images: list[Image.Image] = []
    bare: list[Message] = []
    for message in messages:
        own = [part["image"] for part in parts_of(message) if _has_image(part)]
        if own:
            content = [
                {"type": "image"} if _has_image(part) else part for part in parts_of(message)
            ]
            message = {**message, "content": content}
        images += own
        bare.append(message)
    return tuple(bare), tuple(images)


def with_images(messages: Sequence[Message], images: Sequence[Image.Image]) -> tuple[Message, ...]:
    """Put images into bare parts, in order: the inverse of `without_images`."""
    waiting = iter(images)
    return tuple(
        {
            **message,
            "content": [
                {**part, "image": next(waiting)} if kind_of(part) == "image" else part
                for part in parts_of(message)
            ],
        }
        if any(kind_of(part) == "image" for part in parts_of(message))
        else message
        for message in messages
    )


def _names_file(value: Any) -> bool:
    value = value.value if isinstance(value, MediaPart) else value
    return (
        isinstance(value, str)
        and ("://" not in value or value.startswith("file:"))
        and not (value.startswith("data:"))
    )


def _has_image(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("image"), Image.Image)
