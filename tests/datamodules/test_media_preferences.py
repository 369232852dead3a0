"""Every picture is of one grey level, which tells whose it is."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lrlhf.datamodules import BadDataError, PreferenceDataModule
from lrlhf.datamodules.loading.sources import Source
from lrlhf.types import Media, PreferenceBatch, SequenceBatch
from tests.datamodules.conftest import Rows, vlm

Batches = Callable[..., list[PreferenceBatch]]
Only = Callable[..., PreferenceBatch]


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path) -> None:
    """Picture ``n`` is of the grey level ``10 n`` and makes ``n`` tokens."""
    for number in range(1, 6):
        picture(number).save(tmp_path / f"{number}.png")


def picture(number: int) -> Image.Image:
    return Image.new("L", (28 * number, 28), 10 * number)


def png(number: int) -> bytes:
    stream = io.BytesIO()
    picture(number).save(stream, format="PNG")
    return stream.getvalue()


def load(train: Source, folder: str, **options: Any) -> PreferenceDataModule:
    data = PreferenceDataModule(train, tokenizer=folder, **{"batch_size": 1, **options})
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture
def batches(tmp_path: Path, vlm_folder: str) -> Batches:
    """The train batches of rows beside the pictures."""

    def read(*rows: Any, **options: Any) -> list[PreferenceBatch]:
        data = load(Rows(rows, folder=tmp_path), vlm_folder, **options)
        return list(data.train_dataloader())

    return read


@pytest.fixture
def only(batches: Batches) -> Only:
    def read(*rows: Any, **options: Any) -> PreferenceBatch:
        (batch,) = batches(*rows, **options)
        return batch

    return read


def images(*numbers: int) -> str:
    """What pictures look like between their marks."""
    return "".join(
        f"<|vision_start|>{'<|image_pad|>' * number}<|vision_end|>" for number in numbers
    )


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def read(side: SequenceBatch, *, row: int = 0, answer: bool = False) -> str:
    mask = side.response_mask if answer else side.attention_mask
    return str(vlm().tokenizer.decode(side.input_ids[row][mask[row]]))


def texts(batch: PreferenceBatch, *, answer: bool = False) -> tuple[str, str]:
    return read(batch.candidate0, answer=answer), read(batch.candidate1, answer=answer)


def media_of(side: SequenceBatch, row: int = 0) -> Media:
    assert side.media is not None
    media = side.media[row]
    assert media is not None
    return media


def levels(batch: PreferenceBatch) -> tuple[list[int], list[int]]:
    """The pictures of either side; their tokens are checked on the way."""
    found = []
    placeholder = vlm().processor.placeholders["image"]
    for side in (batch.candidate0, batch.candidate1):
        media = media_of(side)
        numbers = [int(np.asarray(image)[0, 0, 0]) // 10 for image in media.images]
        assert media.tokens == {"image": sum(numbers)}
        assert int((side.input_ids == placeholder).sum()) == sum(numbers)
        # two patches high, two wide for each token
        assert media.tensors["image_grid_thw"].tolist() == [[1, 2, 2 * n] for n in numbers]
        found.append(numbers)
    return found[0], found[1]


def asks(text: str, *names: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": name} for name in names]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": asks("what?", "3.png")}, {}),
        ({"prompt": "<image>what?", "images": ["3.png"]}, {"as_chat": True}),
    ],
)
def test_answers_to_a_question_about_a_picture(
    only: Only, row: dict[str, Any], options: dict[str, Any]
) -> None:
    batch = only({**row, "chosen": "grey", "rejected": "red!", "id": 7}, **options)
    before = turn("user", f"{images(3)}what?") + "<|im_start|>assistant\n"
    answers = ("grey<|im_end|>\n", "red!<|im_end|>\n")
    assert texts(batch) == (before + answers[0], before + answers[1])
    # what counts begins behind the picture and the question
    assert texts(batch, answer=True) == answers
    assert levels(batch) == ([3], [3])
    assert batch.labels.tolist() == [[1.0]]
    (info,) = batch.info
    assert info["id"] == 7
    assert [Path(name).name for name in info["media0"]] == ["3.png"]
    assert info["media1"] == info["media0"]
    assert not {"image", "images", "prompt"} & info.keys()


def test_an_answer_may_show_a_picture_itself(only: Only) -> None:
    def answer(name: str) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "so: "}, {"type": "image", "path": name}]
        return [{"role": "assistant", "content": parts}]

    row = {"prompt": asks("draw", "2.png"), "chosen": answer("2.png"), "rejected": answer("3.png")}
    batch = only(row)
    assert levels(batch) == ([2, 2], [2, 3])
    assert texts(batch, answer=True) == (
        f"so: {images(2)}<|im_end|>\n",
        f"so: {images(3)}<|im_end|>\n",
    )


CATS = {"prompt": "a cat", "image_0": "1.png", "image_1": "2.png", "label": "A"}
BETTER = {"prompt": "a cat", "image_chosen": "1.png", "image_rejected": "2.png"}
TO = [{"type": "image"}, {"type": "text", "text": " to "}, {"type": "image"}]


def said(text: str) -> str:
    return turn("assistant", text)


def whole(text: str) -> list[dict[str, Any]]:
    return [*asks("a cat"), {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (BETTER, {}, [turn("user", f"{images(n)}a cat") for n in (1, 2)]),
        (
            {**BETTER, "chosen": whole("here"), "rejected": "there"},
            {},
            [turn("user", f"{images(n)}a cat") + said(("here", "there")[n - 1]) for n in (1, 2)],
        ),
        (
            {"prompt": "q", "image_0": "2.png", "candidate1": "no picture", "label": "A"},
            {},
            [turn("user", f"{images(2)}q"), turn("user", "q") + said("no picture")],
        ),
        ({**CATS, "prompt": None}, {}, [turn("user", images(n)) for n in (1, 2)]),
        # what both started from comes first
        ({**CATS, "image": "3.png"}, {}, [turn("user", f"{images(3, n)}a cat") for n in (1, 2)]),
        (
            {**CATS, "image": "3.png", "prompt": [{"role": "user", "content": TO}]},
            {},
            [turn("user", f"{images(3)} to {images(n)}") for n in (1, 2)],
        ),
        (
            {**CATS, "prompt": "a <b> cat", "style": "oil"},
            {"instruction": "Rate {{ prompt }} in {{ style }}."},
            [turn("system", "Rate a <b> cat in oil.") + turn("user", images(n)) for n in (1, 2)],
        ),
    ],
)
def test_candidates_are_shown_in_the_turn_of_a_user(
    only: Only, row: dict[str, Any], options: dict[str, Any], expected: list[str]
) -> None:
    batch = only(row, **options)
    assert list(texts(batch)) == expected
    assert batch.labels.tolist() == [[1.0]]
    assert not {"candidate0", "candidate1", "image_0", "image_1"} & batch.info[0].keys()


def gif(path: Path, *numbers: int) -> None:
    first, *others = [Image.new("L", (28, 28), 10 * number) for number in numbers]
    first.save(path, save_all=True, append_images=others, duration=500)


def test_equal_candidates_can_only_be_equal(tmp_path: Path, only: Only) -> None:
    row = {"prompt": "a cat", "image_0": "1.png", "image_1": "1.png"}
    with pytest.raises(BadDataError, match="identical candidates"):
        only({**row, "label": "A"})
    assert only({**row, "label": "C"}).labels.tolist() == [[0.0]]
    # the same answer to the same picture
    answers = {"prompt": asks("what?", "1.png"), "chosen": "grey", "rejected": "grey"}
    with pytest.raises(BadDataError, match="identical candidates"):
        only(answers)
    # other pictures of the same number of tokens
    picture(1).point(lambda level: level + 5).save(tmp_path / "other.png")
    other = {**row, "image_1": "other.png", "label": "A"}
    assert only(other).labels.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image_0": "1.png", "image_1": None, "label": "A"}, r"columns \*_1 name no image"),
        ({"image_rejected": "1.png"}, r"columns \*_chosen name no image"),
        ({"image_0": "1.png", "image_1": "9.png", "label": "A"}, "missing file"),
        ({"image_0": "1.png", "image_1": "2.png"}, "no label"),
        ({"image_0": "1.png", "image_1": "2.png", "label": "D"}, "unknown label"),
    ],
)
def test_pairs_that_lack_something_are_told(only: Only, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadDataError, match=reason):
        only({"prompt": "a cat", **row})


def test_the_limit_counts_the_tokens_of_pictures(only: Only) -> None:
    row = {"prompt": "a cat", "image_0": "1.png", "image_1": "5.png", "label": "A"}
    # a mark, "user", a line end, marks of the picture, "a cat", a mark and a line end: 15, and 5
    assert only(row, max_tokens=20).candidate1.input_ids.shape == (1, 20)
    with pytest.raises(BadDataError, match=r"5\.png: 20 tokens with the text, max_tokens=19"):
        only(row, max_tokens=19)


def test_pairs_that_share_a_picture_are_in_one_split(tmp_path: Path, vlm_folder: str) -> None:
    # four groups of three pairs, each about one picture, with prompts of their own
    rows = [
        {
            "prompt": f"{group} {number}",
            "image_0": f"{group}.png",
            "image_1": f"{group}.png",
            "label": "C",
            "group": group,
        }
        for group in (1, 2, 3, 4)
        for number in range(3)
    ]
    data = load(Rows(rows, folder=tmp_path), vlm_folder, val_size=3)
    train = {batch.info[0]["group"] for batch in data.train_dataloader()}
    held = {batch.info[0]["group"] for batch in data.val_dataloader()}
    assert not train & held
    assert train | held == {1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["candidates", "answers", "question is a turn"])
def test_pairs_that_share_one_question_about_different_pictures_can_be_split(
    tmp_path: Path, vlm_folder: str, kind: str
) -> None:
    for number in range(8):
        Image.new("L", (28, 28), 10 * number).save(tmp_path / f"own_{number}.png")
    candidates = [
        {"prompt": "sharp?", "image_0": f"own_{n}.png", "image_1": f"own_{n + 1}.png", "label": "A"}
        for n in range(0, 8, 2)
    ]
    question: Any = "sharp?"
    if kind == "question is a turn":
        question = [{"role": "user", "content": "sharp? <image>"}]
    answers = [
        {"prompt": question, "image": f"own_{n}.png", "chosen": "yes", "rejected": "no"}
        for n in range(4)
    ]
    rows = Rows(candidates if kind == "candidates" else answers, folder=tmp_path)
    data = load(rows, vlm_folder, val_fraction=0.5, as_chat=kind != "candidates")
    assert len(data.train_dataloader()) == len(data.val_dataloader()) == 2


def test_an_answer_shows_what_the_prompt_leaves_of_the_columns(only: Only) -> None:
    row = {
        "prompt": "which? <image>",
        "chosen": "<image> this",
        "rejected": "not <image>",
        "images": ["1.png", "5.png"],
    }
    pair = only(row, as_chat=True)
    for candidate in (pair.candidate0, pair.candidate1):
        assert [Path(name).name for name in candidate.media[0].names] == ["1.png", "5.png"]


def test_a_text_model_takes_no_pairs_with_media(model_folder: str) -> None:
    row = {"prompt": "p", "chosen": " a", "rejected": " b", "image": "1.png"}
    with pytest.raises(BadDataError, match="does not read column `image`"):
        load(Rows([row]), model_folder)
    shown = {"prompt": asks("p", "1.png"), "chosen": " a", "rejected": " b"}
    with pytest.raises(BadDataError, match="media for a text model"):
        load(Rows([shown]), model_folder)


def test_a_mark_in_one_candidate_leaves_the_other_none(only: Only) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "image": "1.png"}
    row |= {"chosen": whole("x <image>")[1:], "rejected": whole("y")[1:]}
    with pytest.raises(BadDataError, match="one candidate has a mark"):
        only(row)
