"""A resumed run notices that its data, or what reads it, is not what it was."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.datamodules.loading.fingerprint import fingerprint
from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.datamodules.rows.media_rows import Unread
from lrlhf.datamodules.rows.tokenizing import Text
from lrlhf.media import MediaRefs
from tests.conftest import build_tokenizer
from tests.datamodules.conftest import WriteRows, numbered_prompts
from tests.vlms import save_vlm


def prompts(
    path: str, tokenizer: PreTrainedTokenizerBase | str, **options: Any
) -> PromptDataModule:
    data = PromptDataModule(path, tokenizer=tokenizer, batch_size=2, **options)
    data.setup("fit")
    return data


def state_of(path: str, tokenizer: PreTrainedTokenizerBase, batches: int = 3) -> dict[str, Any]:
    data = prompts(path, tokenizer)
    stream = iter(data.train_dataloader())
    for _ in range(batches):
        next(stream)
    return data.state_dict()


@pytest.fixture
def saved(write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return state_of(write_rows(numbered_prompts(10)), tokenizer)


def changed_rows(what: str) -> list[dict[str, Any]]:
    rows = numbered_prompts(10)
    if what == "a column":
        rows[7]["number"] = 70
    elif what == "a text":
        rows[7]["prompt"] += "!"
    elif what == "the order":
        rows[7], rows[8] = rows[8], rows[7]
    elif what == "a new column":
        rows[7]["answer"] = None
    return rows


@pytest.mark.parametrize("what", ["a column", "a text", "the order", "a new column"])
def test_rows_that_changed_stop_the_run(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, saved: dict[str, Any], what: str
) -> None:
    data = prompts(write_rows(changed_rows(what)), tokenizer)
    with pytest.raises(ValueError, match=r"data has changed.*--data\.accept_changed_data true"):
        data.load_state_dict(saved)


def test_the_same_rows_in_a_file_of_another_folder_go_on(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, saved: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "moved").mkdir()
    data = prompts(write_rows(changed_rows("nothing"), "moved/other.jsonl"), tokenizer)
    data.load_state_dict(saved)
    assert data.state_dict() == saved


def test_more_rows_are_told_by_their_numbers(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, saved: dict[str, Any]
) -> None:
    data = prompts(write_rows(numbered_prompts(12)), tokenizer)
    with pytest.raises(ValueError, match="had 10 usable rows and has 12 now"):
        data.load_state_dict(saved)


def test_another_tokenizer_is_told_apart_from_other_rows(
    write_rows: WriteRows, saved: dict[str, Any]
) -> None:
    other = build_tokenizer()
    other.add_tokens(["prompt"])
    data = prompts(write_rows(numbered_prompts(10)), other)
    with pytest.raises(ValueError, match=r"other tokens \(other texts, tokenizer or chat template"):
        data.load_state_dict(saved)


@pytest.mark.parametrize("rows", [10, 12])
def test_what_changed_can_be_accepted_and_is_still_said(
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerBase,
    saved: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    rows: int,
) -> None:
    new = [{**row, "prompt": f"other {row['number']}"} for row in numbered_prompts(rows)]
    data = prompts(write_rows(new), tokenizer, accept_changed_data=True)
    with caplog.at_level(logging.WARNING):
        data.load_state_dict(saved)
    assert "accepted" in caplog.text
    assert data.state_dict()["batches"] == 3
    assert len(list(data.train_dataloader())) == rows // 2 - 3


def test_a_checkpoint_from_before_there_were_digests_goes_on(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, saved: dict[str, Any]
) -> None:
    old = {key: value for key, value in saved.items() if key not in ("data", "tokens")}
    data = prompts(write_rows(changed_rows("a text")), tokenizer)
    data.load_state_dict(old)
    assert data.state_dict()["batches"] == 3


def test_a_pair_that_was_turned_round_stops_a_reward_model(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    pairs = [{"prompt": "p ", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(6)]

    def loaded(rows: list[dict[str, Any]]) -> PreferenceDataModule:
        data = PreferenceDataModule(
            write_rows(rows), tokenizer=tokenizer, head_names=["preference"], batch_size=2
        )
        data.setup("fit")
        data.train_dataloader()
        return data

    state = loaded(pairs).state_dict()
    loaded(pairs).load_state_dict(state)
    swapped = [*pairs[:5], {**pairs[5], "chosen": "b 5", "rejected": "a 5"}]
    with pytest.raises(ValueError, match="data has other tokens"):
        loaded(swapped).load_state_dict(state)


def test_other_texts_beside_the_prompts_stop_the_run(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(numbered_prompts(10))

    def loaded(*texts: str) -> PromptDataModule:
        beside = write_rows([{"text": text} for text in texts], "texts.jsonl")
        data = prompts(path, tokenizer, pretraining=beside)
        data.train_dataloader()
        return data

    state = loaded("one of two", "two of two").state_dict()
    loaded("one of two", "two of two").load_state_dict(state)
    with pytest.raises(ValueError, match="the texts beside the prompts"):
        loaded("one of two", "two of 2").load_state_dict(state)


def shown(image: Any) -> PromptRow:
    ids = np.array([1, 2], dtype=np.int32)
    return PromptRow("look", ids, {}, Unread(Text("<im>", complete=True), MediaRefs((image,))))


def test_pictures_count_by_name_or_by_what_is_in_them() -> None:
    grey, black = (Image.new("L", (2, 2), level) for level in (9, 0))
    assert fingerprint([shown("/a/x.png")]) == fingerprint([shown("/b/x.png")])
    assert fingerprint([shown("/a/x.png")]) != fingerprint([shown("/a/y.png")])
    assert fingerprint([shown(grey)]) == fingerprint([shown(grey.copy())])
    assert fingerprint([shown(grey)]) != fingerprint([shown(black)])
    assert fingerprint([shown({"bytes": b"1", "path": "x"})]) != fingerprint(
        [shown({"bytes": b"2", "path": "x"})]
    )


def changed_at(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


SMALL, LARGE = bytes(range(256)) * 256, bytes(range(256)) * 1000  # 64 KiB and 250 KiB


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SMALL, changed_at(SMALL, 40_000)),
        (SMALL, changed_at(SMALL, len(SMALL) - 1)),
        (LARGE, changed_at(LARGE, 0)),
        (LARGE, changed_at(LARGE, len(LARGE) - 1)),
        (LARGE, changed_at(LARGE, len(LARGE) // 3)),
        (LARGE, LARGE + b"!"),
        (SMALL, None),
    ],
)
@pytest.mark.parametrize("named", ["text", "in a part", "frames", "file to replay"])
def test_what_is_in_a_file_that_a_row_names_counts(
    tmp_path: Path, before: bytes, after: bytes | None, named: str
) -> None:
    def digests(folder: str, content: bytes | None) -> Any:
        path = tmp_path / folder / "x.png"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        ways = {
            "text": shown(str(path)),
            "in a part": shown({"bytes": None, "path": str(path)}),
            "frames": shown([path]),
            "file to replay": path,
        }
        return fingerprint([ways[named]])

    first = digests("a", before)
    assert digests("b", before) == first
    then = digests("a", after)
    assert (then.data, then.tokens) == (first.data, first.tokens)
    assert then.files != first.files


def test_pictures_that_changed_places_are_seen(tmp_path: Path) -> None:
    rows = [shown(str(tmp_path / name)) for name in ("x.png", "y.png")]
    found = []
    for contents in (b"12", b"21"):
        for name, content in zip(("x.png", "y.png"), contents, strict=True):
            (tmp_path / name).write_bytes(bytes([content]))
        found.append(fingerprint(rows).files)
    assert found[0] != found[1]


def test_a_picture_that_was_painted_over_stops_the_run(
    write_rows: WriteRows, tmp_path: Path
) -> None:
    def loaded() -> PromptDataModule:
        rows = [{"prompt": "<image> what is it?", "image": f"{n}.png"} for n in range(4)]
        data = prompts(write_rows(rows), str(tmp_path / "model"), as_chat=True)
        data.train_dataloader()
        return data

    save_vlm("qwen2_vl", tmp_path / "model")
    for number in range(4):
        Image.new("L", (28, 28), number).save(tmp_path / f"{number}.png")
    state = loaded().state_dict()
    loaded().load_state_dict(state)
    Image.new("L", (28, 28), 99).save(tmp_path / "2.png")
    with pytest.raises(ValueError, match="files that the train rows name have changed"):
        loaded().load_state_dict(state)
    loaded().load_state_dict({key: value for key, value in state.items() if key != "files"})


def test_rows_do_not_run_into_each_other() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint([["a"], "b"]) != fingerprint([["a", "b"]])
    assert fingerprint([1]) != fingerprint([True])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([object()]) == fingerprint([object()])


def test_a_date_in_the_prompts_stops_no_run_on_another_day(
    write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    def template(day: str) -> str:
        # what strftime_now would write differs by day; here the day is in the template
        return (
            "{# strftime_now #}" + day + "{% for message in messages %}{{ message.content }}"
            "{% endfor %}"
        )

    turns = [{"prompt": [{"role": "user", "content": f"question {n}"}]} for n in range(10)]
    path = write_rows(turns)
    tokenizer = build_tokenizer()
    before = prompts(path, tokenizer, chat_template=template("Friday"))
    next(iter(before.train_dataloader()))
    saved = before.state_dict()
    with caplog.at_level(logging.WARNING):
        prompts(path, tokenizer, chat_template=template("Saturday")).load_state_dict(saved)
    assert "other tokens" in caplog.text
    other = write_rows([*turns[1:], turns[0]], "other.jsonl")
    with pytest.raises(ValueError, match="data has changed"):
        prompts(other, tokenizer, chat_template=template("Friday")).load_state_dict(saved)
