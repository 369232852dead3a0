"""`UnpairedPreferenceDataModule`: labels, pairs in two rows, and the answers to other prompts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lrlhf.datamodules import BadDataError, UnpairedPreferenceDataModule
from lrlhf.types import SequenceBatch, UnpairedBatch
from tests.datamodules.conftest import TOKENIZER, Rows, WriteRows, vlm

END = "<|endoftext|>"
ROWS: list[dict[str, Any]] = [
    {"prompt": "a?", "completion": " one", "label": True},
    {"prompt": "b?", "completion": " two", "label": False},
    {"prompt": "c?", "completion": " six", "label": False},
]


def load(*rows: Any, folder: Path | None = None, **options: Any) -> UnpairedPreferenceDataModule:
    data = UnpairedPreferenceDataModule(
        Rows(rows, folder=folder),
        **{"tokenizer": TOKENIZER, "batch_size": len(rows), "shuffle": False, **options},
    )
    data.setup("fit")
    return data


def batch_of(*rows: Any, **options: Any) -> UnpairedBatch:
    (batch,) = load(*rows, **options).train_dataloader()
    return batch


def read(batch: SequenceBatch, tokenizer: Any = TOKENIZER) -> list[tuple[str, str]]:
    """What each row says, and what of it counts."""
    masks = (batch.attention_mask, batch.response_mask)
    return [
        (
            str(tokenizer.decode(batch.input_ids[row, masks[0][row]])),
            str(tokenizer.decode(batch.input_ids[row, masks[1][row]])),
        )
        for row in range(len(batch))
    ]


def refused(*rows: Any, **options: Any) -> str:
    with pytest.raises(BadDataError) as error:
        load(*rows, **options)
    return str(error.value)


# ---- rows


def test_each_prompt_stands_before_its_own_answer_and_before_another() -> None:
    batch = batch_of(*ROWS)
    assert batch.labels.tolist() == [True, False, False]
    assert read(batch) == [
        (f"a? one{END}", f" one{END}"),
        (f"b? two{END}", f" two{END}"),
        (f"c? six{END}", f" six{END}"),
    ]
    assert read(batch.mismatched) == [
        (f"a? two{END}", f" two{END}"),
        (f"b? six{END}", f" six{END}"),
        (f"c? one{END}", f" one{END}"),
    ]
    assert batch.places == ("rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3")


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2, "shuffle": True}])
def test_the_pairs_depend_neither_on_batches_nor_on_their_order(options: Any) -> None:
    expected = dict(zip(read(batch_of(*ROWS)), read(batch_of(*ROWS).mismatched), strict=True))
    loader = load(*ROWS, **options).train_dataloader()
    batches = [batch for _ in range(3) for batch in loader]
    seen = [pair for one in batches for pair in zip(read(one), read(one.mismatched), strict=True)]
    assert {*seen} == {*expected.items()}


def test_a_pair_of_answers_makes_two_rows() -> None:
    pairs = [
        {"prompt": "a?", "chosen": " one", "rejected": " two"},
        # the prompt in the answers
        {"chosen": "b? three", "rejected": "b? four"},
    ]
    batch = batch_of(*pairs, batch_size=4)
    assert batch.labels.tolist() == [True, False, True, False]
    assert [said for _, said in read(batch)] == [
        f"{word}{END}" for word in (" one", " two", " three", " four")
    ]
    # answers to the same prompt are no mismatched pairs; a? three is as long as the longest row
    assert [whole for whole, _ in read(batch.mismatched)] == [
        f"a? three{END}",
        f"a? four{END}",
        f"b? one{END}",
        f"b? two{END}",
    ]
    assert batch.places == ("rows.jsonl:1",) * 2 + ("rows.jsonl:2",) * 2


def test_chats_and_their_pairs() -> None:
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    other = {"role": "user", "content": "hey"}
    batch = batch_of(
        {"prompt": [user], "completion": [said], "label": True},
        {"messages": [other, said], "label": "False"},
        {"chosen": [user, said], "rejected": [user, {**said, "content": "no"}]},
        batch_size=4,
    )
    assert batch.labels.tolist() == [True, False, True, False]
    whole, learnt = read(batch)[0]
    assert whole == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert learnt == "ho<|im_end|>\n"
    assert "user\nhey<|im_end|>" in read(batch.mismatched)[1][0]


def test_a_mismatched_pair_is_no_longer_than_the_longest_row() -> None:
    rows = [
        {"prompt": "a long prompt?", "completion": "1", "label": True},
        {"prompt": "b?", "completion": "a long answer", "label": False},
        {"prompt": "c?", "completion": "3", "label": True},
    ]
    batch = batch_of(*rows)
    longest = int(batch.lengths.max())
    assert read(batch.mismatched) == [
        ("a long prompt?", ""),
        (f"b?3{END}", f"3{END}"),
        (f"c?1{END}", f"1{END}"),
    ]
    assert int(batch.mismatched.lengths.max()) <= longest


def test_one_prompt_that_most_rows_have() -> None:
    rows = [{**ROWS[0], "completion": f" {word}"} for word in ("xxx", "yyy", "zzz")]
    batch = batch_of(*rows, ROWS[1])
    # shifted by three: only what comes from another prompt counts
    assert [said for _, said in read(batch.mismatched)] == [
        f" two{END}",
        "",
        "",
        f" zzz{END}",
    ]


def test_images_stay_with_their_prompt(vlm_folder: str, tmp_path: Path) -> None:
    pixels = np.zeros((56, 84, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1.png")
    asked = [{"role": "user", "content": "<image>what?"}]
    rows: list[dict[str, Any]] = [
        {"prompt": asked, "image": "1.png", "chosen": "seven", "rejected": "eight"},
        {"prompt": [{"role": "user", "content": "and?"}], "completion": "nine", "label": True},
        {"prompt": [{"role": "user", "content": "so?"}], "completion": "five", "label": True},
    ]
    batch = batch_of(*rows, folder=tmp_path, batch_size=4, tokenizer=vlm_folder)
    assert batch.media is not None
    assert batch.mismatched.media == batch.media  # the same objects: the model looks once
    assert [media is not None for media in batch.media] == [True, True, False, False]
    tokenizer = vlm().tokenizer
    for part in (batch, batch.mismatched):
        shown = part.input_ids == vlm().processor.placeholders["image"]
        assert shown.sum(dim=1).tolist() == [6, 6, 0, 0]  # 2 x 3 squares of 28 pixels
    said = [text for _, text in read(batch.mismatched, tokenizer)]
    assert [text[:4] for text in said] == ["nine", "five", "seve", "eigh"]


def test_an_answer_that_shows_an_image_stands_behind_no_other_prompt(
    vlm_folder: str, tmp_path: Path
) -> None:
    Image.fromarray(np.zeros((56, 84, 3), np.uint8)).save(tmp_path / "1.png")
    says, shown = {"role": "assistant", "content": "so"}, {"role": "user", "content": "<image>"}
    asked = {"prompt": [{"role": "user", "content": "what?"}], "label": True}
    rows = [
        {**asked, "completion": [says, shown, says], "image": "1.png"},
        {"prompt": [{"role": "user", "content": "and?"}], "completion": "nine", "label": False},
    ]
    batch = batch_of(*rows, folder=tmp_path, tokenizer=vlm_folder)
    said = [text for _, text in read(batch.mismatched, vlm().tokenizer)]
    assert [text[:4] for text in said] == ["nine", ""]


# ---- what is refused


@pytest.mark.parametrize("label", [1, 0.5, "yes", []])
def test_labels_are_true_or_false(label: Any) -> None:
    text = refused(*ROWS, {**ROWS[0], "label": label})
    assert f"column 'label' is {label!r}" in text
    assert "labels are true (desirable) or false (undesirable)" in text


def test_a_row_without_a_label() -> None:
    assert "no column 'label'" in refused(*ROWS, {"prompt": "a?", "completion": " one"})
    assert "no column 'rejected'" in refused(*ROWS, {"prompt": "a?", "chosen": " one"})


def test_what_cannot_be_used_is_counted_in_answers() -> None:
    pairs = [{"prompt": prompt, "chosen": " one", "rejected": " two"} for prompt in "abc" + "x" * 3]
    for pair in pairs[3:]:
        pair["prompt"] = "a prompt that is too long"
    assert len(batch_of(*pairs, max_tokens=9, max_bad_fraction=0.5, batch_size=6)) == 6
    text = refused(*pairs, max_tokens=9)
    assert "6 of 12 rows of the train data cannot be used: 50.00%" in text
    # one answer of a pair that is too long
    pairs[3] = {"prompt": "d", "chosen": " one that is too long", "rejected": " two"}
    assert len(batch_of(*pairs, max_tokens=9, max_bad_fraction=0.5, batch_size=7)) == 7


@pytest.mark.parametrize(
    "row", [{"text": "a? one"}, {"messages": [{"role": "user", "content": "a?"}]}]
)
def test_no_remedy_names_an_option_of_other_data(row: Any) -> None:
    text = refused(*ROWS, {**row, "label": True})
    assert "loss_on" not in text
    assert "text_column" not in text


@pytest.mark.parametrize(("label", "word"), [(True, "desirable"), (False, "undesirable")])
def test_one_label_alone(label: bool, word: str) -> None:
    text = refused(*({**row, "label": label} for row in ROWS))
    assert f"all 3 train rows are {word}" in text
    assert ("train SFT on these" in text) == label
    # of rows that nothing is learnt from it may be
    load(*ROWS, val=Rows([{**ROWS[0], "label": label}]))


def test_one_prompt_alone(write_rows: WriteRows) -> None:
    rows = [{**row, "prompt": "a?"} for row in ROWS]
    assert "all 3 train rows have the same prompt" in refused(*rows)
    data = UnpairedPreferenceDataModule(write_rows(rows), tokenizer=TOKENIZER, batch_size=3)

    class Module:
        estimates_kl = False

    data.trainer = type("Trainer", (), {"lightning_module": Module, "world_size": 1})  # type: ignore[assignment]
    kind = data._make_kind(data.trainer)
    assert len(kind.load(data._train, "train", 0.0).rows) == 3
