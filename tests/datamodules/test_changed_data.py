"""A resumed run notices that its data, or what reads it, is not what it was."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.datamodules.loading.loader import fingerprint
from lrlhf.datamodules.rows.chat import Text
from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.datamodules.rows.media_rows import DeferredMedia
from lrlhf.media import MediaRefs
from tests.conftest import build_tokenizer
from tests.datamodules.conftest import TOKENIZER, Rows, numbered_prompts
from tests.vlms import save_vlm


def prompts(rows: Any, **options: Any) -> PromptDataModule:
    data = PromptDataModule(
        rows if isinstance(rows, Rows) else Rows(rows),
        **{"tokenizer": TOKENIZER, "batch_size": 2, **options},
    )
    data.setup("fit")
    data.train_dataloader()
    return data


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    data = prompts(numbered_prompts(10))
    for _ in zip(range(3), data.train_dataloader(), strict=False):
        pass
    return data.state_dict()


def changed_rows(what: str) -> list[dict[str, Any]]:
    rows = numbered_prompts(12 if what == "more rows" else 10)
    if what == "a column":
        rows[7]["number"] = 70
    elif what == "the order":
        rows[7], rows[8] = rows[8], rows[7]
    return rows


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a column", "data has changed"),
        ("the order", "data has changed"),
        ("more rows", "had 10 usable rows and has 12 now"),
    ],
)
def test_rows_that_changed_stop_the_run_unless_that_is_accepted(
    saved: dict[str, Any], what: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=rf"{message}.*--data\.accept_changed_data true"):
        prompts(changed_rows(what)).load_state_dict(saved)
    data = prompts(changed_rows(what), accept_changed_data=True)
    with caplog.at_level(logging.WARNING):
        data.load_state_dict(saved)
    assert message in caplog.text
    assert "accepted" in caplog.text
    assert data.state_dict()["batches"] == 3
    assert len(list(data.train_dataloader())) == (3 if what == "more rows" else 2)


def test_another_tokenizer_is_told_apart_from_other_rows(saved: dict[str, Any]) -> None:
    other = build_tokenizer()
    other.add_tokens(["prompt"])
    with pytest.raises(ValueError, match=r"other tokens \(other texts, tokenizer or chat template"):
        prompts(numbered_prompts(10), tokenizer=other).load_state_dict(saved)


def test_a_pair_that_was_turned_round_stops_a_reward_model() -> None:
    pairs = [{"prompt": "p ", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(6)]

    def loaded(rows: list[dict[str, Any]]) -> PreferenceDataModule:
        data = PreferenceDataModule(Rows(rows), tokenizer=TOKENIZER, batch_size=2)
        data.setup("fit")
        data.train_dataloader()
        return data

    state = loaded(pairs).state_dict()
    loaded(pairs).load_state_dict(state)
    turned = [*pairs[:5], {**pairs[5], "chosen": "b 5", "rejected": "a 5"}]
    with pytest.raises(ValueError, match="data has other tokens"):
        loaded(turned).load_state_dict(state)


def test_other_texts_beside_the_prompts_stop_the_run() -> None:
    def loaded(*texts: str) -> PromptDataModule:
        return prompts(numbered_prompts(10), pretraining=Rows({"text": text} for text in texts))

    state = loaded("one of two", "two of two").state_dict()
    loaded("one of two", "two of two").load_state_dict(state)
    with pytest.raises(ValueError, match="the texts beside the prompts"):
        loaded("one of two", "two of 2").load_state_dict(state)


def shown(image: Any) -> PromptRow:
    ids = np.array([1, 2], dtype=np.int32)
    return PromptRow(
        input_ids=ids,
        deferred=DeferredMedia(Text("<im>", complete=True), MediaRefs((image,))),
        prompt="look",
        columns={},
    )


def test_pictures_count_by_name_or_by_what_is_in_them() -> None:
    grey, black = (Image.new("L", (2, 2), level) for level in (9, 0))
    equal = [("/a/x.png", "/b/x.png"), (grey, grey.copy()), (["/a/1"], ["/b/1"])]
    different = [("/a/x.png", "/a/y.png"), (grey, black), (["/a/1"], ["/a/2"])]
    different.append(({"bytes": b"1", "path": "x"}, {"bytes": b"2", "path": "x"}))
    assert all(fingerprint([shown(a)]) == fingerprint([shown(b)]) for a, b in equal)
    assert all(fingerprint([shown(a)]) != fingerprint([shown(b)]) for a, b in different)


def changed_at(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


SMALL, LARGE = bytes(range(256)) * 256, bytes(range(256)) * 1000  # 64 KiB and 250 KiB


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SMALL, changed_at(SMALL, len(SMALL) - 1)),
        (LARGE, changed_at(LARGE, len(LARGE) - 1)),
        (LARGE, changed_at(LARGE, len(LARGE) // 3)),
        (LARGE, LARGE + b"!"),
        (SMALL, None),
    ],
)
def test_what_is_in_a_file_that_a_row_names_counts(
    tmp_path: Path, before: bytes, after: bytes | None
) -> None:
    def digests(folder: str, content: bytes | None, way: int) -> Any:
        path = tmp_path / folder / "x.png"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        in_a_part, frames = {"bytes": None, "path": str(path)}, [path]
        return fingerprint([[shown(str(path)), shown(in_a_part), shown(frames), path][way]])

    for way in range(4):
        first = digests("a", before, way)
        assert digests("b", before, way) == first
        then = digests("a", after, way)
        assert (then.data, then.tokens) == (first.data, first.tokens)
        assert then.files != first.files


def test_pictures_that_changed_places_are_seen(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("x.png", "y.png")]
    found = []
    for contents in (b"12", b"21"):
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(bytes([content]))
        found.append(fingerprint(shown(str(path)) for path in paths).files)
    assert found[0] != found[1]


def test_a_picture_that_was_painted_over_stops_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "<image> what is it?", "image": f"{n}.png"} for n in range(4)]

    def loaded() -> PromptDataModule:
        return prompts(Rows(rows, folder=tmp_path), tokenizer=str(tmp_path / "model"), as_chat=True)

    save_vlm("qwen2_vl", tmp_path / "model")
    for number in range(4):
        Image.new("L", (28, 28), number).save(tmp_path / f"{number}.png")
    state = loaded().state_dict()
    loaded().load_state_dict(state)
    Image.new("L", (28, 28), 99).save(tmp_path / "2.png")
    with pytest.raises(ValueError, match="files that the train rows name have changed"):
        loaded().load_state_dict(state)


def test_rows_do_not_run_into_each_other() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint([["a"], "b"]) != fingerprint([["a", "b"]])
    assert fingerprint([1]) != fingerprint([True])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([object()]) == fingerprint([object()])


def test_a_date_in_the_prompts_stops_no_run_on_another_day(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = [{"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(10)]

    def on(day: str, rows: Any = turns) -> PromptDataModule:
        # what strftime_now would write differs by day; here the day is in the template
        template = (
            "{# strftime_now #}" + day + "{% for message in messages %}{{ message.content }}"
            "{% endfor %}"
        )
        return prompts(rows, chat_template=template)

    saved = on("Friday").state_dict()
    with caplog.at_level(logging.WARNING):
        on("Saturday").load_state_dict(saved)
    assert "other tokens" in caplog.text
    with pytest.raises(ValueError, match="data has changed"):
        on("Friday", [*turns[1:], turns[0]]).load_state_dict(saved)
