import re
from pathlib import Path
from typing import Any

import pytest

from lrlhf.datamodules import BadDataError, PreferenceDataModule, PromptDataModule
from lrlhf.datamodules.rows.bad_rows import BadRow, BadRows
from tests.datamodules.conftest import TOKENIZER, Rows, WriteRows

GOOD_PROMPT = {"prompt": "fine", "answer": "#### 1", "tools": None}
GOOD_PAIR = {"prompt": "Q", "chosen": " x", "rejected": " y"}
USER = {"role": "user", "content": "hi"}

PROMPTS: list[tuple[str, Any, str, str, dict[str, Any]]] = [
    ("not json", '{"prompt": "a"', "unparsable JSON", "", {}),
    ("no utf-8", "\udcff", "unparsable JSON", "", {}),
    ("not an object", "[1, 2]", "wrong type", "not list", {}),
    ("misspelt column", {"promt": "a"}, "missing column", "did you mean 'promt'", {}),
    ("null", {"prompt": None}, "wrong type", "NoneType", {}),
    ("empty", {"prompt": "  \n"}, "empty text", "'prompt'", {}),
    ("messages of text", {"prompt": ["hi"]}, "wrong type", "role and content", {}),
    ("message without role", {"prompt": [{"content": "hi"}]}, "wrong type", "no role", {}),
    ("message without content", {"prompt": [{"role": "user"}]}, "empty text", "content", {}),
    ("content is a number", {"prompt": [{**USER, "content": 1}]}, "wrong type", "content", {}),
    ("unknown speaker", {"prompt": [{"from": "me", "value": "a"}]}, "wrong type", "'me'", {}),
    ("only an answer", {"messages": [{"role": "assistant", "content": "a"}]}, "empty", "", {}),
    ("tools are no list", {"prompt": [USER], "tools": {"a": 1}}, "wrong type", "'tools'", {}),
    ("too long", {"prompt": "123456789"}, "too long", "9 tokens", {"max_prompt_tokens": 8}),
    (
        "pattern without match",
        {"prompt": "a", "answer": "seven"},
        "pattern not found",
        "seven",
        {"column_patterns": {"answer": "#### (.+)"}},
    ),
    (
        "template over a missing column",
        {"prompt": "a", "anwser": "b"},
        "missing column",
        "did you mean 'anwser'",
        {"prompt_template": "{{ answer }}"},
    ),
    (
        "template that gives nothing",
        {"prompt": "a", "answer": ""},
        "empty text",
        "prompt_template",
        {"prompt_template": "{{ answer }}"},
    ),
    (
        "chat template that refuses",
        {"prompt": [USER]},
        "refused by the chat template",
        "no users here",
        {"chat_template": "{{ raise_exception('no users here') }}"},
    ),
]

PAIRS: list[tuple[str, Any, str, str]] = [
    ("prompt is a number", {**GOOD_PAIR, "prompt": 3}, "wrong type", "prompt"),
    ("misspelt chosen", {"choosen": "a", "rejected": "b"}, "missing column", "mean 'choosen'"),
    ("chosen is a number", {**GOOD_PAIR, "chosen": 4}, "wrong type", "'chosen'"),
    ("empty answer", {**GOOD_PAIR, "rejected": " "}, "empty text", "'rejected'"),
    ("identical", {**GOOD_PAIR, "rejected": " x"}, "identical candidates", "are equal"),
    (
        "nothing after the prompt",
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"},
        "empty text",
        "after the shared prompt",
    ),
    ("unknown label", {"candidate0": "a", "candidate1": "b", "label": "D"}, "unknown label", "'D'"),
    ("no label", {"candidate0": "a", "candidate1": "b", "lable": "A"}, "no label", "'lable'"),
    ("margin is text", {**GOOD_PAIR, "margin": "much"}, "wrong type", "'margin'"),
    (
        "margin is infinite",
        '{"prompt":"Q","chosen":"a","rejected":"b","margin":Infinity}',
        "wrong type",
        "finite",
    ),
    ("negative margin", {**GOOD_PAIR, "margin": -1}, "negative margin", "-1"),
    ("unknown head", {**GOOD_PAIR, "head": "hlepful"}, "unknown head", "'hlepful'"),
    ("one list of ids", {"chosen_ids": [1, 2]}, "missing column", "'rejected_ids'"),
    ("ids are text", {"chosen_ids": "1 2", "rejected_ids": [1]}, "wrong type", "token ids"),
    ("ids beyond", {"chosen_ids": [9999], "rejected_ids": [1]}, "wrong type", "outside 0"),
    ("too long", {"prompt": "Q", "chosen": "1" * 90, "rejected": "2"}, "too long", "max_tokens=64"),
]


@pytest.mark.parametrize(
    ("row", "reason", "detail", "options"),
    [case[1:] for case in PROMPTS],
    ids=[c[0] for c in PROMPTS],
)
def test_a_bad_prompt_row_is_named_with_file_line_and_reason(
    write_rows: WriteRows, row: Any, reason: str, detail: str, options: dict[str, Any]
) -> None:
    if row == "\udcff":
        path = write_rows([GOOD_PROMPT])
        with Path(path).open("ab") as stream:
            stream.write(b'{"prompt": "\xff"}\n')
    else:
        path = write_rows([GOOD_PROMPT, row])
    data = PromptDataModule(path, tokenizer=TOKENIZER, batch_size=1, **options)
    with pytest.raises(BadDataError, match="1 of 2 rows of the train data cannot be used") as error:
        data.setup("fit")
    message = str(error.value)
    assert reason in message
    assert f"{path}:2: " in message
    assert detail in message
    assert "max_bad_fraction to 0.5" in message


@pytest.mark.parametrize(
    ("row", "reason", "detail"), [case[1:] for case in PAIRS], ids=[c[0] for c in PAIRS]
)
def test_a_bad_preference_row_is_named_with_file_line_and_reason(
    write_rows: WriteRows, row: Any, reason: str, detail: str
) -> None:
    path = write_rows([GOOD_PAIR, row])
    data = PreferenceDataModule(
        path, tokenizer=TOKENIZER, batch_size=1, max_tokens=64, head_names=["helpful"]
    )
    with pytest.raises(BadDataError, match="1 of 2 rows of the train data cannot be used") as error:
        data.setup("fit")
    message = str(error.value)
    assert reason in message
    assert f"{path}:2: " in message
    assert detail in message


def prompts(*rows: Any, val: Any = None, **options: Any) -> PromptDataModule:
    data = PromptDataModule(Rows(rows), val, tokenizer=TOKENIZER, **{"batch_size": 1, **options})
    data.setup("fit")
    return data


def test_few_bad_rows_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    data = prompts(*({"prompt": f"p{n}"} for n in range(99)), {"prompt": ""})
    assert len(data.train_dataloader()) == 99
    (record,) = [record for record in caplog.records if "cannot be used" in record.message]
    assert record.levelname == "WARNING"
    assert "1 of 100 rows" in record.message


def test_bad_validation_rows_are_counted_by_themselves() -> None:
    with pytest.raises(BadDataError, match="1 of 2 rows of the validation data"):
        prompts(*[GOOD_PROMPT] * 50, val=Rows([GOOD_PROMPT, {"prompt": ""}]))


def test_data_without_a_usable_row_stops_whatever_is_allowed() -> None:
    with pytest.raises(BadDataError, match=r"no usable rows: 3 of 3[^$]*`prompt_column`"):
        prompts(*[{"promt": "a"}] * 3, max_bad_fraction=1.0)
    with pytest.raises(BadDataError, match="train data is empty"):
        prompts()


def test_at_most_five_rows_are_shown_per_reason() -> None:
    bad = BadRows("train")
    for number in range(9):
        bad.add(f"file:{number}", BadRow("too long", f"detail {number}"))
    bad.add("file:10", BadRow("empty text", "nothing"))
    assert bad.count == 10
    lines = bad.table().splitlines()
    assert lines[1].split() == ["9", "too", "long"]
    assert [line.split()[-1] for line in lines[2:7]] == ["0", "1", "2", "3", "4"]
    assert lines[7].split() == ["1", "empty", "text"]


def test_exactly_the_allowed_share_goes_on_and_the_message_names_enough() -> None:
    bad = BadRows("train")
    bad.total = 75
    bad.add("file:1", BadRow("too long", "detail"))
    bad.check(1 / 75)
    with pytest.raises(BadDataError, match=r"1\.33%, more than max_bad_fraction=0\.01") as error:
        bad.check(0.01)
    named = re.search(r"max_bad_fraction to ([\d.]+)", str(error.value))
    assert named is not None
    bad.check(float(named[1]))  # 1 of 75 is 0.01333…: 0.0133 would not do
