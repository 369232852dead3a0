"""Rollouts for people: a table in the terminal, in W&B, in TensorBoard."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lrlhf.callbacks.reports.curves import stack, strip
from lrlhf.callbacks.reports.markdown import inert
from lrlhf.callbacks.reports.markdown import table as markdown_table
from lrlhf.callbacks.reports.progress import short
from lrlhf.secrets import escaped
from lrlhf.types import Media

T = TypeVar("T")
_COLUMNS = ("prompt", "answer", "completion", "score", "rewards", "advantage", "length", "finish")
"""Of W&B and TensorBoard; the terminal has less room."""
_TELLING = (
    *("answer", "answers", "solution", "solutions", "final_answer", "ground_truth"),
    *("gold", "target", "expected", "reference"),
)
"""Data columns that help to judge a response, where the rewards do not say which they read."""
_UNASKED = ("system", "developer")
_EARLIER_CHARS = 60
_MAX_LINES = 12
_BREAKS = re.compile(r"\s*\n\s*")


def spread(records: Sequence[T], count: int) -> list[T]:
    """Pick up to ``count`` records at even distances, so that several prompts are among them."""
    count = min(count, len(records))
    return [records[index * len(records) // count] for index in range(count)]


def render(
    records: Sequence[Mapping[str, Any]],
    *,
    title: str,
    max_chars: int,
    answers: Mapping[str, str] | None = None,
) -> str:
    """Draw records as a table for a terminal.

    Of a chat the last turn is shown, and the beginning of those before it, but no system prompt
    and nothing of the template. Texts are shown as they are: nothing in them is taken for markup
    or for a control sequence. Prompts and right answers of more than ``max_chars`` lose their
    beginning, completions their middle, each with a mark in its place.

    Args:
        records: As `RolloutListener.on_rollout` gets them.
        title: Above the table.
        max_chars: Of each text.
        answers: Data columns by which responses are judged, with their headings; the first one
            that a row has is shown. None: columns with a name that is usual for answers, under it.
    """
    table = Table(
        title=Text(_visible(title)),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_lines=True,
    )
    known = [_answer(record, answers) for record in records]
    headings = dict.fromkeys(answer[0] for answer in known if answer is not None)
    table.add_column("prompt", overflow="fold")
    if headings:
        table.add_column(Text(_visible(" / ".join(headings))), overflow="fold", max_width=24)
    table.add_column("response", overflow="fold")
    table.add_column("score", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for record, answer in zip(records, known, strict=True):
        cells = [
            _end_of(_prompt_text(record, short=True), max_chars),
            *([_end_of(answer[1] if answer else "-", max_chars // 4)] if headings else []),
            _middle_cut(_text(record["completion"]), max_chars),
            _score(record),
            _number(record["advantage"]),
            _length(record),
        ]
        table.add_row(*(Text(_visible(cell, breaks=True)) for cell in cells))
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns if terminal else 120
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=terminal, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def send(
    trainer: L.Trainer,
    records: Sequence[Mapping[str, Any]],
    *,
    key: str,
    step: int,
    answers: Mapping[str, str] | None = None,
    media: Sequence[Media | None] | None = None,
) -> None:
    """Log records as a table to every attached logger that shows text; rank zero only.

    Args:
        trainer: Has the loggers.
        records: As `RolloutListener.on_rollout` gets them.
        key: Name of the table.
        step: Step that it belongs to.
        answers: As of `render`.
        media: What each record shows; a table has pictures where one of its records has some.
            TensorBoard, whose tables hold none, gets them below each other under ``<key>/images``.
    """
    shown = [None if each is None else strip(each) for each in media or [None] * len(records)]
    pictures = [picture for picture in shown if picture is not None]
    columns = ["step", *_COLUMNS, *(["images"] if pictures else [])]
    rows = [
        [step, *_typed(record, answers), *([shown[index]] if pictures else [])]
        for index, record in enumerate(records)
    ]
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            # only then is it sure to be installed
            image = import_module("wandb").Image
            logger.log_table(key, columns=columns, data=_with(image, rows), step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(key, _markdown(records, answers), global_step=step)
            if pictures:
                page = np.asarray(stack(pictures))
                logger.experiment.add_image(f"{key}/images", page, step, dataformats="HWC")


def _with(image: Callable[[Image.Image], Any], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[image(cell) if isinstance(cell, Image.Image) else cell for cell in r] for r in rows]


# ---- what a record says


def _prompt_text(record: Mapping[str, Any], *, short: bool) -> str:
    """What the policy answered to; of a chat the turns without the system prompt.

    Args:
        record: Has ``messages`` where the prompt is a chat.
        short: Of the turns before the last only the beginning.
    """
    if "messages" not in record:
        return _text(record["prompt"])
    turns = [turn for turn in record["messages"] if turn["role"] not in _UNASKED]
    if not turns:
        return _text(record["messages"])
    *earlier, last = turns
    if not earlier and last["role"] == "user":
        return _content(last["content"])
    messages = [(turn["role"], _content(turn["content"])) for turn in earlier]
    if short:
        messages = [(role, _beginning(" ".join(text.split()))) for role, text in messages]
    return "\n".join(f"{role}: {text}" for role, text in (*messages, _turn_text(last)))


def _turn_text(turn: Mapping[str, Any]) -> tuple[str, str]:
    return turn["role"], _content(turn["content"])


def _answer(record: Mapping[str, Any], answers: Mapping[str, str] | None) -> tuple[str, str] | None:
    """What the response is judged by, under its heading, if the row has it."""
    headings = answers or {}
    for name in (*headings, *_TELLING):
        value = record["columns"].get(name)
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            return headings.get(name, name), text
    return None


def _score(record: Mapping[str, Any]) -> str:
    """The score and, where it has several, its parts below it."""
    parts = [f"{name} {_number(value)}" for name, value in record["rewards"].items()]
    return "\n".join([_number(record["score"]), *(parts if len(parts) > 1 else [])])


def _length(record: Mapping[str, Any]) -> str:
    cut = "\ncut off" if record["finish_reason"] == "length" else ""
    return f"{record['length']}{cut}"


# ---- texts


def _beginning(text: str) -> str:
    return text if len(text) <= _EARLIER_CHARS else f"{text[:_EARLIER_CHARS]}…"


def _end_of(text: str, max_chars: int) -> str:
    text = text if len(text) <= max_chars else f"…{text[-max_chars:]}"
    lines = _lines(text)
    return "\n".join(lines if len(lines) <= _MAX_LINES else ["…", *lines[-_MAX_LINES:]])


def _middle_cut(text: str, max_chars: int) -> str:
    half = max_chars // 2
    text = text if len(text) <= max_chars else f"{text[:half]} … {text[-half:]}"
    lines, rest = _lines(text), _MAX_LINES // 2
    return "\n".join(lines if len(lines) <= _MAX_LINES else [*lines[:rest], "…", *lines[-rest:]])


def _lines(text: str) -> list[str]:
    return _BREAKS.split(text.strip())


def _visible(text: str, *, breaks: bool = False) -> str:
    """Replace what a terminal would act on by its escape sequence.

    Args:
        text: Whatever a model or a data set wrote.
        breaks: Leave line breaks.
    """
    text = escaped(text).replace("\t", "\\t")
    return text if breaks else text.replace("\n", "\\n")


def _text(value: Any) -> str:
    """Text as it is, or the turns of a chat with their roles."""
    if isinstance(value, str):
        return value
    return "\n".join(f"{turn['role']}: {_turn(turn)}" for turn in value)


def _turn(turn: Mapping[str, Any]) -> str:
    """Content of a turn, and the tools that it calls."""
    calls = turn.get("tool_calls")
    called = [json.dumps(calls, ensure_ascii=False)] if calls else []
    return " ".join(filter(None, [_content(turn.get("content")), *called]))


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    # a turn with media is a list of typed parts
    return " ".join(
        str(part["text"]) if "text" in part else f"<{part['type']}>" for part in content
    )


def _typed(record: Mapping[str, Any], answers: Mapping[str, str] | None) -> tuple[Any, ...]:
    """Cells of W&B, which sorts numbers as numbers; in the order of the columns."""
    answer = _answer(record, answers)
    return (
        _prompt_text(record, short=False),
        answer and answer[1],
        _text(record.get("episode") or record["completion"]),
        record["score"],
        json.dumps(record["rewards"]),
        record["advantage"],
        record["length"],
        record["finish_reason"],
    )


def _markdown(
    records: Sequence[Mapping[str, Any]], answers: Mapping[str, str] | None = None
) -> str:
    rows = []
    for record in records:
        prompt, answer, completion, score, _, advantage, *rest = _typed(record, answers)
        rewards = " ".join(f"{name}={_number(value)}" for name, value in record["rewards"].items())
        texts = (prompt, answer or "-", completion, _number(score), rewards, _number(advantage))
        rows.append([inert(str(text)) for text in (*texts, *rest)])
    return markdown_table(_COLUMNS, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else short(value)
