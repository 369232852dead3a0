"""What a person sees of the responses."""

from typing import Any

import pytest

from lrlhf.callbacks.reports.rollout_table import render
from tests.callbacks.fakes import record

SYSTEM = {"role": "system", "content": "You are a calculator."}


def table(*records: dict[str, Any], **options: Any) -> str:
    return render(records, title="step 1", **{"max_chars": 400, **options})


def cells(shown: str) -> list[str]:
    """The first line of the body, by column."""
    row = shown.splitlines()[4]
    return [cell for cell in row.split("  ") if cell]


def chat(*turns: dict[str, Any], **changes: Any) -> dict[str, Any]:
    template = "<|im_start|>system\nYou are a calculator.<|im_end|>\n<|im_start|>assistant\n"
    return record(1, 0, prompt=template, messages=list(turns), **changes)


def test_of_a_chat_the_question_is_shown_without_system_prompt_and_template() -> None:
    shown = table(chat(SYSTEM, {"role": "user", "content": "2 + 2?"}))
    assert "2 + 2?" in shown
    assert not any(text in shown for text in ("calculator", "im_start", "user", "assistant"))


def test_earlier_turns_are_shortened_and_the_last_is_whole() -> None:
    long = "a very long beginning " * 9
    turns = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": "Go\non."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]},
    ]
    shown = " ".join(table(chat(*turns)).split())
    assert "user: a very long" in shown
    assert shown.count("a very long beginning") < 4
    assert "assistant: Go on." in shown
    assert "user: <image> And this?" in shown


@pytest.mark.parametrize(
    ("columns", "answers", "heading", "shown"),
    [
        ({"answer": "4"}, {"answer": "right answer"}, "right answer", "4"),
        # what nothing is compared with, as the preferred response of a pair, is no right answer
        ({"reference": "Four!"}, None, "reference", "Four!"),
        ({"target": "4"}, {}, "target", "4"),
        ({"solution": 4, "question": "2 + 2?"}, None, "solution", "4"),
        # what the rewards judge by goes first
        ({"answer": "four", "number": "4"}, {"number": "right answer"}, "right answer", "4"),
        ({"answer": "four", "letter": "q"}, {"letter": "letter"}, "letter", "q"),
        ({"answer": ["4", "four"]}, None, "answer", '["4", "four"]'),
    ],
)
def test_what_a_response_is_judged_by_stands_beside_it(
    columns: dict[str, Any], answers: dict[str, str] | None, heading: str, shown: str
) -> None:
    drawn = table(record(1, 0, columns=columns), answers=answers)
    head = [cell.strip() for cell in drawn.splitlines()[2].split("  ") if cell.strip()]
    assert head[1] == heading
    assert [cell.strip() for cell in cells(drawn)][1] == shown


def test_rows_that_are_judged_by_different_columns_name_both() -> None:
    rows = [record(1, index, columns=columns) for index, columns in
            enumerate([{"answer": "4"}, {"reference": "Yes."}, {"answer": "5"}])]  # fmt: skip
    assert "right answer / reference" in table(*rows, answers={"answer": "right answer"})


def test_without_such_a_column_in_the_data_there_is_none_in_the_table() -> None:
    shown = table(record(1, 0, columns={"topic": "sums"}))
    assert "topic" not in shown
    assert "sums" not in shown


def test_of_a_long_answer_the_end_is_shown() -> None:
    worked = {"answer": "First we add. " * 20 + "#### 72"}
    shown = table(record(1, 0, columns=worked))
    assert "#### 72" in shown
    assert shown.count("First we add.") < 10


def test_parts_of_a_score_are_shown_where_there_are_several() -> None:
    shown = table(record(1, 0, rewards={"exact": 1.0, "format": None}))
    assert "exact 1" in shown
    assert "format -" in shown
    assert "exact" not in table(record(1, 0, rewards={"exact": 1.0}))


def test_a_response_that_was_cut_off_is_marked() -> None:
    assert "cut off" in table(record(1, 0, finish_reason="length"))
    assert "cut off" not in table(record(1, 0))


def test_a_response_of_many_lines_keeps_its_two_ends() -> None:
    lines = [f"line {number}" for number in range(1, 60)]
    shown = table(record(1, 0, completion="\n\n".join(lines)), max_chars=10_000)
    assert "line 1 " in shown
    assert "line 59" in shown
    assert "line 30" not in shown
    assert len(shown.splitlines()) < 25


def test_what_is_left_of_a_zero_is_a_zero() -> None:
    assert "e-" not in table(record(1, 0, advantage=-2.2e-7))


def test_in_a_notebook_the_table_is_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = table(record(1, 0))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # rich would draw it itself
    assert table(record(1, 0)) == drawn
    assert "step 1" in drawn
