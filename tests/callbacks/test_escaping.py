"""Texts that a model or a data set wrote are shown, and never obeyed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lrlhf.callbacks.output_files import json_line
from lrlhf.callbacks.reports.rollout_table import _markdown, render
from tests.callbacks.fakes import record

HOSTILE = {
    "escape sequences": "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "a bell and a backspace": "a\x07b\x08c\x7f",
    "C1 controls": "\x9b2J",
    "text that turns around": "\u202etxt.exe",
    "rich markup": "[red]x[/red] [link=https://example.org]y[/link] [/]",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markdown": "![x](https://example.org/x.png) | a | `b` [c](javascript:d)",
    "half a surrogate pair": "\ud83d",
}


def hostile_record(text: str) -> dict[str, object]:
    return record(
        1, 0, prompt=text, completion=text, finish_reason=text, rewards={text: 1.0}, extras={}
    )


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_table_in_the_terminal(text: str) -> None:
    shown = render([hostile_record(text)], title=text, max_chars=400)
    body = shown.partition("\n")[2]
    assert all(character.isprintable() or character == "\n" for character in body)
    # nothing of it was taken for markup
    assert all(sign in body for sign in "[<!" if sign in text)


@pytest.mark.parametrize("text", [HOSTILE["html"], HOSTILE["markdown"]])
def test_a_table_in_tensorboard(text: str) -> None:
    header, rule, row = _markdown([hostile_record(text)]).splitlines()
    assert row.count("|") == header.count("|") == rule.count("|")
    for opener in ("<", "![", "](", "`"):
        assert opener not in row


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_line_of_json_is_one_line_without_controls(text: str) -> None:
    line = json_line({"completion": text})
    assert json.loads(line.encode()) == {"completion": text}
    assert not any(ord(character) < 32 for character in line)


def test_a_line_of_json_holds_every_plain_type() -> None:
    line = json_line(
        {
            "tensor": torch.tensor([1, 2]),
            "array": np.array([0.5]),
            "number": np.float32(0.25),
            "nested": {"a": (True, None)},
            "path": Path("x/y"),
            "nan": [float("-inf"), torch.tensor(float("nan"))],
            "text": "ü\n",
        }
    )
    assert line == (
        '{"tensor": [1, 2], "array": [0.5], "number": 0.25, "nested": {"a": [true, null]}, '
        '"path": "x/y", "nan": [null, null], "text": "ü\\n"}'
    )
    with pytest.raises(ValueError, match=r"'columns\.images\[1\]' holds a object"):
        json_line({"columns": {"images": ["x", object()]}})
