"""Rollouts for people: a table in the terminal, in W&B, in TensorBoard."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS = ("prompt", "completion", "score", "rewards", "advantage", "length", "finish")


def spread(records: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Pick up to ``count`` records at even distances, so that several prompts are among them."""
    count = min(count, len(records))
    return [records[index * len(records) // count] for index in range(count)]


def render(records: Sequence[Mapping[str, Any]], *, title: str, max_chars: int) -> str:
    """Draw records as a table for a terminal.

    Texts are shown as they are: nothing in them is taken for markup or for a control sequence.
    Prompts of more than ``max_chars`` lose their beginning, completions their middle, each with a
    mark in its place.
    """
    table = Table(
        title=Text(_visible(title)), title_justify="left", box=box.SIMPLE_HEAD, show_lines=True
    )
    for name in _COLUMNS:
        numeric = name in ("score", "advantage", "length")
        table.add_column(
            name,
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
            ratio={"prompt": 2, "completion": 3}.get(name),
        )
    half = max_chars // 2
    for prompt, completion, *rest in map(_cells, records):
        if len(prompt) > max_chars:
            prompt = f"…{prompt[-max_chars:]}"
        if len(completion) > max_chars:
            completion = f"{completion[:half]} … {completion[-half:]}"
        table.add_row(*map(Text, (prompt, completion, *rest)))
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns if terminal else 120
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=terminal).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def send(trainer: L.Trainer, records: Sequence[Mapping[str, Any]], *, key: str, step: int) -> None:
    """Log records as a table to every attached logger that shows text; rank zero only."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            rows = [[step, *_typed(record)] for record in records]
            logger.log_table(key, columns=["step", *_COLUMNS], data=rows, step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(key, _markdown(records), global_step=step)


def _visible(text: str) -> str:
    """Replace what a terminal would act on, or not show, by its escape sequence."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _text(value: Any) -> str:
    """Text as it is, or the turns of a chat with their roles."""
    if isinstance(value, str):
        return value
    return "\n".join(f"{turn['role']}: {_content(turn['content'])}" for turn in value)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    # a turn with media is a list of typed parts
    return " ".join(
        str(part["text"]) if "text" in part else f"<{part['type']}>" for part in content
    )


def _typed(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cells of W&B, which sorts numbers as numbers; in the order of the columns."""
    return (
        _text(record["prompt"]),
        _text(record["completion"]),
        record["score"],
        json.dumps(record["rewards"]),
        record["advantage"],
        record["length"],
        record["finish_reason"],
    )


def _cells(record: Mapping[str, Any]) -> list[str]:
    """Cells for people, in the order of the columns."""
    prompt, completion, score, _, advantage, length, finish = _typed(record)
    rewards = " ".join(f"{name}={_number(value)}" for name, value in record["rewards"].items())
    texts = (prompt, completion, _number(score), rewards, _number(advantage), length, finish)
    return [_visible(str(text)) for text in texts]


def _markdown(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *(map(_inert, _cells(one)) for one in records)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _inert(text: str) -> str:
    """Keep Markdown and HTML from reading the text: every sign that could open either."""
    return "".join(
        f"&#{ord(character)};" if character in "\\`*_{}[]()<>#+-!|&~" else character
        for character in text
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
