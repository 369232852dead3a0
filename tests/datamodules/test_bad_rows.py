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

PROMPTS: list[tuple[Any, str, str, dict[str, Any]]] = [
    ('{"prompt": "a"', "unparsable JSON", "", {}),
    ("\udcff", "not UTF-8", "0xFF", {}),  # no UTF-8
    ("[1, 2]", "wrong type", "not list", {}),
    ({"promt": "a"}, "missing column", "did you mean 'promt'", {}),
    ({"prompt": None}, "missing column", "no value", {}),
    ({"prompt": "  \n"}, "empty text", "'prompt'", {}),
    ({"prompt": [{"content": "hi"}]}, "wrong type", "no role", {}),
    ({"prompt": [{"role": "user"}]}, "empty text", "content", {}),
    ({"prompt": [{**USER, "content": 1}]}, "wrong type", "content", {}),
    ({"prompt": [{"from": "me", "value": "a"}]}, "unknown role", "'me'", {}),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "empty", "", {}),
    ({"chosen": "yes", "rejected": "no"}, "empty text", "share no prompt", {}),
    ({"prompt": [USER], "tools": {"a": 1}}, "wrong type", "'tools'", {}),
    ({"prompt": "123456789"}, "too long", "9 tokens", {"max_prompt_tokens": 8}),
    (
        {"prompt": "a", "answer": "seven"},
        "pattern not found",
        "seven",
        {"column_patterns": {"answer": "#### (.+)"}},
    ),
    ({"anwser": "b"}, "missing column", "mean 'anwser'", {"prompt_template": "{{ answer }}"}),
    ({"answer": ""}, "empty text", "prompt_template", {"prompt_template": "{{ answer }}"}),
    (
        {"prompt": [USER]},
        "refused by the chat template",
        "no users here",
        {"chat_template": "{{ raise_exception('no users here') }}"},
    ),
]
UNORDERED = {"candidate0": "a", "candidate1": "b"}
PAIRS: list[tuple[Any, str, str]] = [
    ({**GOOD_PAIR, "prompt": 3}, "wrong type", "prompt"),
    ({"choosen": "a", "rejected": "b"}, "missing column", "mean 'choosen'"),
    ({**GOOD_PAIR, "chosen": 4}, "wrong type", "'chosen'"),
    ({**GOOD_PAIR, "rejected": " x"}, "identical candidates", "are equal"),
    (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"},
        "empty text",
        "after the shared prompt",
    ),
    ({**UNORDERED, "label": "D"}, "unknown label", "'D'"),
    ({**UNORDERED, "lable": "A"}, "no label", "'lable'"),
    ({**GOOD_PAIR, "margin": "much"}, "wrong type", "'margin'"),
    ({**GOOD_PAIR, "margin": float("inf")}, "wrong type", "finite"),
    ({**GOOD_PAIR, "margin": -1}, "negative margin", "-1"),
    ({**GOOD_PAIR, "head": "hlepful"}, "unknown head", "'hlepful'"),
    ({**GOOD_PAIR, "chosen": "1" * 90}, "too long", "max_tokens=64"),
]


def check_message(data: Any, path: str, reason: str, detail: str) -> None:
    with pytest.raises(BadDataError, match="1 of 2 rows of the train data cannot be used") as error:
        data.setup("fit")
    for said in (reason, f"{path}:2: ", detail, "max_bad_fraction to 0.5"):
        assert said in str(error.value)


@pytest.mark.parametrize(("row", "reason", "detail", "options"), PROMPTS)
def test_a_bad_prompt_row_is_named_with_file_line_and_reason(
    write_rows: WriteRows, row: Any, reason: str, detail: str, options: dict[str, Any]
) -> None:
    path = write_rows([GOOD_PROMPT, "x" if row == "\udcff" else row])
    if row == "\udcff":
        Path(path).write_bytes(Path(path).read_bytes().replace(b"x", b'{"prompt": "\xff"}'))
    data = PromptDataModule(path, tokenizer=TOKENIZER, batch_size=1, **options)
    check_message(data, path, reason, detail)


@pytest.mark.parametrize(("row", "reason", "detail"), PAIRS)
def test_a_bad_preference_row_is_named_with_file_line_and_reason(
    write_rows: WriteRows, row: Any, reason: str, detail: str
) -> None:
    path = write_rows([GOOD_PAIR, row])
    heads = ["helpful"]
    data = PreferenceDataModule(path, tokenizer=TOKENIZER, max_tokens=64, head_names=heads)
    check_message(data, path, reason, detail)


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
