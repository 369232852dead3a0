"""What rows name as their images and videos, and where it ends up in the messages."""

from pathlib import Path
from typing import Any

import pytest

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaRefs
from lrlhf.media.refs import MediaPart, PartOptions
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
ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}

IMAGE_PARTS: list[dict[str, Any]] = [
    {"type": "image", "path": "/a"},
    {"type": "image", "image_url": "/a"},
    {"type": "image_url", "image_url": {"url": "/a", "detail": "auto"}},
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
        ([{"role": "assistant", "content": "hi"}], MediaRefs(("/1.png",)), "no turn of a user"),
        # marks are counted over the whole conversation
        (
            [{"role": "user", "content": "<image>"}, SAID, user(words("<image> <image>"))],
            MediaRefs(("/1.png", "/2.png")),
            "the text has 3 <image>, the row 2 image(s): /1.png, /2.png",
        ),
        (
            [user(IMAGE, words("<image>"))],
            MediaRefs(("/1.png",)),
            "the text has 1 <image> beside 1 part(s) without data, the row 1 image(s): /1.png",
        ),
        (
            [user({"type": "image", "image": "/own.png"}, words("<image>"))],
            NOTHING,
            "the text has 1 <image>, the row 0 image(s)",
        ),
        (
            [{"role": "user", "content": "<image>"}],
            MediaRefs(columns=frozenset({"image"})),
            "the text has 1 <image>, the row 0 image(s)",
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


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (
            [ASKED, SAID, {"role": "user", "content": "<image> what?"}],
            [ASKED, SAID, user(IMAGE, words(" what?"))],
        ),
        ([user(words("<image> what?"))], [user(IMAGE, words(" what?"))]),
        (
            [{"role": "system", "content": "see <image>"}, ASKED],
            [{"role": "system", "content": [words("see "), IMAGE]}, ASKED],
        ),
        (
            [ASKED, SAID, {"role": "tool", "content": "<image>"}],
            [ASKED, SAID, {"role": "tool", "content": [IMAGE]}],
        ),
        (  # the model's own mark, as its template writes it
            [{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>what?"}],
            [user(IMAGE, words("what?"))],
        ),
        ([{"role": "user", "content": "<|image_pad|>what?"}], [user(IMAGE, words("what?"))]),
    ],
)
def test_a_mark_stands_for_its_picture_wherever_it_is(
    places: MediaReader, turns: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    bare, refs = places.of_messages(turns, MediaRefs(("/1.png",)), FOLDER)
    assert [*bare] == expected
    assert refs == MediaRefs(("/1.png",))


def test_marks_and_parts_share_the_columns_in_the_order_of_the_conversation(
    places: MediaReader,
) -> None:
    columns = MediaRefs(("/1.png", "/2.png", "/3.png"), ("/1.mp4",))
    turns = [
        user(words("<image>, "), {"type": "image", "image": "/own.png"}, IMAGE),
        SAID,
        {"role": "user", "content": "<video> and <image>"},
    ]
    bare, refs = places.of_messages(turns, columns, FOLDER)
    assert [*bare] == [
        user(IMAGE, words(", "), IMAGE, IMAGE),
        SAID,
        user(VIDEO, words(" and "), IMAGE),
    ]
    assert refs == MediaRefs(("/1.png", "/own.png", "/2.png", "/3.png"), ("/1.mp4",))


def test_in_a_row_that_shows_nothing_of_a_kind_marks_are_letters(places: MediaReader) -> None:
    turns = [{"role": "user", "content": "what does <video> mean in HTML?"}]
    assert places.of_messages(turns, NOTHING, FOLDER) == (tuple(turns), NOTHING)
    part = {"type": "image", "image": "/own.png"}
    bare, _ = places.of_messages([user(part, words("a <video>"))], NOTHING, FOLDER)
    assert [*bare] == [user(IMAGE, words("a <video>"))]


def test_marks_of_plain_texts_become_those_of_the_model(places: MediaReader) -> None:
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    two = MediaRefs(("/1.png", "/2.png"))
    assert places.of_texts(("a <image>", "b <image>"), two) == (f"a {shown}", f"b {shown}")
    assert places.refs_within(("a <image>",), two) == MediaRefs(("/1.png",))
    own = (f"{shown} a <image>", "b")  # what the model reads already stays as it is
    assert places.of_texts(own, two) == (f"{shown} a {shown}", "b")
    assert places.of_texts(("<|image_pad|>",), two.first({"image": 1, "video": 0, "audio": 0})) == (
        "<|image_pad|>",
    )
    assert places.of_texts(("<image>",), NOTHING) == ("<image>",)
    with pytest.raises(BadRow, match="1 <image>, the row 2 image"):
        places.of_texts(("a <image>", "b"), two)


def test_options_of_parts_come_with_what_they_show(places: MediaReader) -> None:
    shown = {"type": "video", "video": "/a.mp4", "fps": 1, "max_pixels": 100.0, "nframes": None}
    address = {"type": "image_url", "image_url": {"url": "/a.png", "detail": "low"}}
    column = places.of_columns({"images": [{"image": "/b.png", "resized_height": 28,
                                            "resized_width": 56}]}, FOLDER)  # fmt: skip
    _, refs = places.of_messages([user(shown, address, IMAGE)], column, FOLDER)
    assert refs == MediaRefs(
        (
            MediaPart("/a.png", PartOptions(max_pixels=512 * 512)),
            MediaPart("/b.png", PartOptions(resized_height=28, resized_width=56)),
        ),
        (MediaPart("/a.mp4", PartOptions(fps=1.0, max_pixels=100)),),
    )


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("image", {"fps": 2}, "has fps, which is not followed"),
        ("video", {"total_pixels": 10}, "has total_pixels, which is not followed"),
        ("audio", {"max_pixels": 10}, "audios have none"),
        ("image", {"detail": "huge"}, "has detail"),
        ("image", {"max_pixels": "many"}, "max_pixels of a part is 'many', not a whole number"),
        ("image", {"max_pixels": True}, "not a whole number"),
        ("video", {"fps": 0}, "fps of a part is 0, not a number above 0"),
        ("image", {"resized_height": 10}, "go together"),
        ("video", {"video_start": 3.0, "video_end": 2.0}, "not behind its video_start"),
        ("video", {"timestamps": [1, 0]}, "not seconds that grow"),
        ("video", {"nframes": 64}, "nframes of a part is 64, and 32 is the most"),
    ],
)
def test_options_that_are_not_followed_are_refused_by_name(
    places: MediaReader, kind: str, options: dict[str, Any], told: str
) -> None:
    found = problem(places, [user({"type": kind, kind: "/a", **options})], NOTHING)
    assert found.reason == "option of a media part"
    assert told in found.detail


@pytest.mark.parametrize("images", [None, [], [None], ["", None], float("nan")])
def test_a_cell_of_nothing_shows_nothing(places: MediaReader, images: object) -> None:
    refs = places.of_columns({"images": images}, FOLDER)
    assert len(refs) == 0
    assert refs.columns == {"image"}
