"""What rows name as their images and videos, and where it ends up in the messages."""

from pathlib import Path
from typing import Any

import pytest

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaRefs
from tests.datamodules.conftest import vlm

FOLDER = Path("/data")
NOTHING = MediaRefs()


@pytest.fixture(scope="module")
def places() -> MediaReader:
    return MediaReader(vlm().processor)


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}
VIDEO = {"type": "video"}


IMAGE_PARTS: list[dict[str, Any]] = [
    {"type": "image", "path": "/a"},
    {"type": "image", "image_url": "/a"},
    {"type": "image_url", "image_url": {"url": "/a", "detail": "low"}},
    {"type": "image_url", "url": "/a"},
    {"type": "image", "image": None, "path": "/a"},
    {"type": "image", "image": {"bytes": None, "path": "/a"}},
]


@pytest.mark.parametrize("part", IMAGE_PARTS)
def test_every_spelling_of_an_image_or_video_is_read(
    places: MediaReader, part: dict[str, Any]
) -> None:
    turns, refs = places.of_messages([user(words("look: "), part)], NOTHING, FOLDER)
    assert turns == (user(words("look: "), IMAGE),)
    assert refs == MediaRefs(("/a",))
    film = {key.replace("image", "video"): value for key, value in part.items()}
    film["type"] = film["type"].replace("image", "video")
    turns, refs = places.of_messages([user(film, words("what?"))], NOTHING, FOLDER)
    assert turns == (user(VIDEO, words("what?")),)
    assert refs == MediaRefs((), ("/a",))


def test_bare_parts_are_filled_from_the_columns_in_order(places: MediaReader) -> None:
    columns = places.of_columns(
        {"image": "/1.png", "images": ["/2.png", "/3.png"], "video": "/1.mp4"}, FOLDER
    )
    assert columns == MediaRefs(("/1.png", "/2.png", "/3.png"), ("/1.mp4",))
    turns = [
        user(IMAGE, VIDEO, {"type": "image", "image": "/own.png"}, IMAGE),
        user({"type": "image_url"}),
    ]
    bare, refs = places.of_messages(turns, columns, FOLDER)
    assert bare == (user(IMAGE, VIDEO, IMAGE, IMAGE), user(IMAGE))
    assert refs == MediaRefs(("/1.png", "/own.png", "/2.png", "/3.png"), ("/1.mp4",))


def problem(places: MediaReader, turns: list[dict[str, Any]], columns: MediaRefs) -> BadRow:
    with pytest.raises(BadRow) as caught:
        places.of_messages(turns, columns, FOLDER)
    return caught.value


@pytest.mark.parametrize(
    ("turns", "columns", "detail"),
    [
        (
            [{"role": "user", "content": "<image> <image>"}],
            MediaRefs(("/1.png",)),
            "the text has 2 <image>, the row 1 image(s): /1.png",
        ),
        (
            [user(IMAGE, IMAGE)],
            MediaRefs(("/1.png",)),
            "more parts of type 'image' than the row has images",
        ),
        ([user(VIDEO)], NOTHING, "more parts of type 'video' than the row has"),
        (
            [user(IMAGE)],
            MediaRefs(("/1.png", "/2.png")),
            "1 of the 2 images, videos and audios of the columns have no part",
        ),
        (
            [{"role": "assistant", "content": "hi"}],
            MediaRefs(("/1.png",)),
            "no turn of a user",
        ),
    ],
)
def test_counts_that_do_not_fit_are_told(
    places: MediaReader, turns: list[dict[str, Any]], columns: MediaRefs, detail: str
) -> None:
    found = problem(places, turns, columns)
    assert found.reason == "placeholder count"
    assert detail in found.detail


def test_parts_of_audio_are_taken_out_in_every_way_that_they_are_written(
    places: MediaReader,
) -> None:
    shown = {"data": "AAAA", "format": "mp3"}
    parts = [
        {"type": "audio", "audio": "/a.wav"},
        {"type": "audio", "audio_url": "/b.wav"},
        {"type": "audio_url", "audio_url": {"url": "/c.wav"}},
        {"type": "input_audio", "input_audio": shown},
        {"type": "audio"},
    ]
    columns = MediaRefs(audios=("/d.wav",))
    (turn,), refs = places.of_messages([user(*parts, words("what?"))], columns, FOLDER)
    heard = ("/a.wav", "/b.wav", "/c.wav", "data:audio/mp3;base64,AAAA", "/d.wav")
    assert refs == MediaRefs(audios=heard)
    assert turn["content"] == [*[{"type": "audio"}] * 5, words("what?")]


def test_a_text_model_is_told_that_it_reads_no_audio() -> None:
    turns = [user({"type": "audio", "audio": "/a.wav"}, words("what is said?"))]
    found = problem(MediaReader(), turns, NOTHING)
    assert found.reason == "media for a text model"
    assert "a part of type 'audio'" in found.detail


def test_to_a_text_model_media_columns_are_columns_like_any() -> None:
    places = MediaReader()
    assert places.of_columns({"image": "/1.png", "video": "/1.mp4"}, FOLDER) == NOTHING
    turns = [{"role": "user", "content": "hi"}, user(words("there"))]
    assert places.of_messages(turns, NOTHING, FOLDER) == (tuple(turns), NOTHING)
    assert places.of_columns({"image": "a.png"}, None) == NOTHING


@pytest.mark.parametrize(
    ("value", "anchored"),
    [
        ("cats/1.png", "/data/cats/1.png"),
        ("/cats/1.png", "/cats/1.png"),
        ({"bytes": None, "path": "1.png"}, "/data/1.png"),
        ({"bytes": b"1", "path": "1.png"}, {"bytes": b"1", "path": "1.png"}),
        (b"12", b"12"),
        ("data:image/png;base64,AA==", "data:image/png;base64,AA=="),
        ("https://example.org/a.png", "https://example.org/a.png"),
    ],
)
def test_relative_paths_start_from_the_data_file(
    places: MediaReader, value: Any, anchored: Any
) -> None:
    assert places.of_columns({"image": value}, FOLDER).images == (anchored,)
    _, refs = places.of_messages([user({"type": "image", "image": value})], NOTHING, FOLDER)
    assert refs.images == (anchored,)
