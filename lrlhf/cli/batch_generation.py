"""Answers a file of prompts batch by batch, and goes on where an earlier process stopped."""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from lrlhf.callbacks.output_files import json_line
from lrlhf.cli.trained_policy import TrainedPolicy, load_named
from lrlhf.datamodules import FileSource
from lrlhf.datamodules.loading.files import is_data_file
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.datamodules.rows.prompt_rows import (
    DEFAULT_PROMPT_COLUMN,
    PAIR_COLUMNS,
    PromptTemplate,
    column_or_dialogue,
)
from lrlhf.modules.policy.generate import GeneratedText, PromptReader, TextGenerator
from lrlhf.options.errors import ConfigError
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.rollout.records import plain_json
from lrlhf.run import sample_seeds
from lrlhf.run.atomic import HELD, atomic_write


class AnswerFile:
    """Written as ``<name>.partial``, beside what it is made with, until it is finished.

    Args:
        path: Must not exist.
        lines_per_row: Lines of one row are written together or not at all.

    Raises:
        ConfigError: It exists, or another process writes it.
    """

    def __init__(self, path: Path, lines_per_row: int) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._settings = path.with_name(f"{path.name}.settings.json")
        self._lines_per_row = lines_per_row
        self._handle: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self._path.exists():
            raise ConfigError(f"output: {self._path} exists; choose another name, or remove it")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = self._partial.open("a+b")
            fcntl.flock(self._handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._handle is not None:
                self._handle.close()
            if error.errno in HELD:
                raise ConfigError(f"output: another process writes {self._partial}") from error
            raise ConfigError(f"output: {self._path} cannot be written: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._handle is not None
        self._handle.close()
        if self._partial.exists() and self._partial.stat().st_size == 0:
            self._partial.unlink()
            self._settings.unlink(missing_ok=True)

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Go on where an earlier process with the same settings stopped.

        Returns:
            Number of the last row that is written; 0: none is.

        Raises:
            ConfigError: The partial file was made with other settings.
        """
        assert self._handle is not None
        plain = json.loads(json.dumps(settings))
        if self._partial.stat().st_size:
            known = json.loads(self._settings.read_text()) if self._settings.exists() else {}
            changed = sorted(key for key in plain if known.get(key) != plain[key])
            if changed:
                raise ConfigError(
                    f"output: {self._partial} was begun with another {', '.join(changed)}; remove "
                    "it to start over, or choose another name"
                )
            # not before: the lines of a row may be others under other settings
            return self._last_row()
        with atomic_write(self._settings) as handle:
            handle.write(json.dumps(plain).encode())
        return 0

    def write(self, lines: Sequence[str]) -> None:
        """Append the lines of whole rows."""
        assert self._handle is not None
        self._handle.writelines(f"{line}\n".encode() for line in lines)
        self._handle.flush()

    def finish(self) -> None:
        """Give the file its name.

        Raises:
            ConfigError: It has been taken in the meantime.
        """
        assert self._handle is not None
        os.fsync(self._handle.fileno())
        if self._path.exists():
            raise ConfigError(
                f"output: {self._path} exists by now; the responses are in {self._partial}"
            )
        self._partial.rename(self._path)
        self._settings.unlink(missing_ok=True)

    def _last_row(self) -> int:
        """Cut off what a killed process left half written; returns the last whole row."""
        assert self._handle is not None
        self._handle.seek(0)
        end = position = last = 0
        for number, line in enumerate(self._handle, start=1):
            if not line.endswith(b"\n"):
                break
            position += len(line)
            if number % self._lines_per_row == 0:
                end, last = position, int(json.loads(line)["row"])
        self._handle.truncate(end)
        return last


_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
_PROMPTS = ("prompt_column", "prompt_template", "as_chat", "system_prompt")
_MAX_NEW_TOKENS = 512
_SECONDS = 10.0
"""Between two lines about progress."""
_TOO_LONG = "prompt_too_long"


class _Numbered(NamedTuple):
    """A row and its number in the file, from 1."""

    number: int
    row: PromptRow


def answer_file(parsed: argparse.Namespace) -> str:
    """Answer what the options of ``lrlhf generate`` name, and return a summary.

    Raises:
        ConfigError: A file, a row or an option cannot be used.
    """
    for name in ("n", "batch_size"):
        if getattr(parsed, name) < 1:
            raise ConfigError(f"{name} is {getattr(parsed, name)}; it must be 1 or more")
    _sampling(parsed, None)  # what is out of its range, before anything is loaded
    _check_first_row(parsed)
    with AnswerFile(parsed.output, parsed.n) as output:
        trained = load_named(parsed)
        sampling = _sampling(parsed, trained.sampling)
        prompts = {**trained.prompts, **_set_options(parsed, _PROMPTS)}
        settings = {"sampling": repr(sampling), "prompts": repr(sorted(prompts.items()))}
        settings |= {name: getattr(parsed, name) for name in ("n", "seed", "use_ema", "dtype")}
        settings |= {"model": _stamp(trained), "file": _stamp_of(parsed.prompts)}
        done = output.begin(settings)
        rows = _rows(parsed.prompts, _reader(trained, prompts), behind=done)
        rows = _noting_the_format(rows, trained, prompts)
        try:
            counts = _answer(rows, trained, sampling, parsed, output)
        except KeyboardInterrupt:
            sys.stderr.write("the same command goes on where this one was\n")
            raise
        output.finish()
    cut, long = counts["length"], counts[_TOO_LONG]
    remarks = [f"{cut} cut off at {sampling.max_new_tokens} tokens"] if cut else []
    remarks += [f"{long} without a completion: the prompt leaves no room"] if long else []
    remark = f" ({', '.join(remarks)})" if remarks else ""
    lines = f"{counts.total()}{' more' if done else ''} line{'' if counts.total() == 1 else 's'}"
    return f"wrote {lines} to {parsed.output}{remark}"


def _answer(
    rows: Iterator[_Numbered],
    trained: TrainedPolicy,
    sampling: Sampling,
    parsed: argparse.Namespace,
    output: AnswerFile,
) -> Counter[str]:
    """Answer batch after batch; returns how often each reason ended a response."""
    generator = TextGenerator(trained.policy, TransformersEngine())
    counts: Counter[str] = Counter()
    began = shown = time.monotonic()
    at_once = max(1, parsed.batch_size // parsed.n)
    while batch := list(itertools.islice(rows, at_once)):
        rooms = [generator.room(each.row) for each in batch]
        fitting = [
            one
            for one, room in zip(batch, rooms, strict=True)
            if room is None or room >= sampling.max_new_tokens
        ]
        seeds = [
            s for item in fitting for s in sample_seeds(parsed.seed, item.number, count=parsed.n)
        ]
        answers: dict[int, list[GeneratedText]] = {}
        if fitting:
            texts = generator.answer([one.row for one in fitting], sampling, seeds=seeds)
            answers = {one.number: own for one, own in zip(fitting, texts, strict=True)}
        lines: list[str] = []
        for row in batch:
            own = answers.get(row.number)
            for sample in range(parsed.n):
                answer = None if own is None else own[sample]
                record = _record(row, answer, sample if parsed.n > 1 else None)
                counts[record["finish_reason"]] += 1
                lines.append(json_line(record))
        output.write(lines)
        if time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            rate = counts.total() / (shown - began)
            sys.stderr.write(f"row {batch[-1].number}: {rate:.1f} responses per second\n")
    return counts


def _record(one: _Numbered, answer: GeneratedText | None, sample: int | None) -> dict[str, Any]:
    return {
        "row": one.number,
        **({} if sample is None else {"sample": sample}),
        "prompt": plain_json(one.row.prompt),
        "completion": None if answer is None else answer.text,
        "finish_reason": _TOO_LONG if answer is None else answer.finish_reason,
        "length": 0 if answer is None else answer.length,
        "columns": plain_json(one.row.columns),
    }


def _sampling(parsed: argparse.Namespace, of_run: Sampling | None) -> Sampling:
    sampling = of_run or Sampling(max_new_tokens=_MAX_NEW_TOKENS)
    options = _set_options(parsed, _SAMPLING)
    if "stop" in options:
        options["stop"] = tuple(options["stop"])
    if options.get("max_new_tokens", sampling.min_new_tokens) < sampling.min_new_tokens:
        options["min_new_tokens"] = 0  # the run's, which the limit leaves no room for
    try:
        return replace(sampling, **options)
    except ValueError as error:
        raise ConfigError(str(error).removeprefix("sampling.")) from error


def _set_options(parsed: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    options = {name: getattr(parsed, name) for name in names}
    return {name: value for name, value in options.items() if value is not None}


def _reader(trained: TrainedPolicy, prompts: Mapping[str, Any]) -> PromptReader:
    template = prompts.get("prompt_template")
    try:
        chat = ChatFormat(
            trained.policy.tokenizer,
            prompts.get("chat_template"),
            prompts.get("chat_template_kwargs") or {},
        )
        return PromptReader(
            trained.policy,
            chat,
            column=prompts.get("prompt_column", DEFAULT_PROMPT_COLUMN),
            template=None if template is None else PromptTemplate(template),
            as_chat=prompts.get("as_chat", False),
            system_prompt=prompts.get("system_prompt"),
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _rows(path: Path, reader: PromptReader, *, behind: int) -> Iterator[_Numbered]:
    """Go through the rows of a file behind one of them, read when they are needed.

    Raises:
        ConfigError: A row cannot be used; names it.
    """
    for number, row in _raw_rows(path):
        if number <= behind:
            continue
        try:
            yield _Numbered(number, reader.read(row, path.absolute().parent))
        except (BadRow, ValueError) as problem:
            raise _refusal(path, number, problem) from problem


def _noting_the_format(
    rows: Iterator[_Numbered], trained: TrainedPolicy, prompts: Mapping[str, Any]
) -> Iterator[_Numbered]:
    """Say that a model with a chat template is given plain texts, by the first of the rows.

    A run's config says which of the two it was trained on; a model alone does not.
    """
    chats = trained.policy.tokenizer.chat_template is not None
    unsaid = chats and trained.sampling is None and "as_chat" not in prompts
    for row in rows:
        if unsaid and isinstance(row.row.prompt, str):
            sys.stderr.write(
                f"{trained.origin} has a chat template, and texts are given to it as they are; "
                "--as_chat makes each the user's turn of a chat, as in training with as_chat "
                "(--no-as_chat: as they are, without this line)\n"
            )
        unsaid = False
        yield row


def _raw_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix == ".txt":
        try:
            with path.open(encoding="utf-8") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield number, {DEFAULT_PROMPT_COLUMN: line.rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason})") from error
        return
    if not is_data_file(path):
        raise ConfigError(
            f"{path}: prompts are read from .jsonl, .json, .csv, .parquet (each also .gz or .zst) "
            "and .txt"
        )
    try:
        for number, row in enumerate(FileSource(str(path)), start=1):
            if isinstance(row, BadRow):
                raise _refusal(path, number, row)
            yield number, row
    except BadDataError as error:
        raise ConfigError(str(error)) from error


def _check_first_row(parsed: argparse.Namespace) -> None:
    """Refuse a file without prompts before the model is loaded."""
    first = next(_raw_rows(parsed.prompts), None)
    if first is None:
        raise ConfigError(f"{parsed.prompts}: it has no rows")
    number, row = first
    column = parsed.prompt_column or DEFAULT_PROMPT_COLUMN
    # a run's config may name another column, or have a template, which is seen to later
    if parsed.prompt_column is None and (parsed.prompt_template or not _is_model(parsed.source)):
        return
    try:
        if not set(PAIR_COLUMNS) <= row.keys():
            column_or_dialogue(
                row, column, default=DEFAULT_PROMPT_COLUMN, setting="--prompt_column"
            )
    except BadRow as problem:
        raise _refusal(parsed.prompts, number, problem) from problem


def _is_model(source: str) -> bool:
    return not Path(source).exists() or (Path(source) / "config.json").is_file()


def _refusal(path: Path, number: int, problem: Exception) -> ConfigError:
    detail = getattr(problem, "detail", str(problem))
    remedy = getattr(problem, "remedy", "")
    return ConfigError(f"{path}:{number}: {detail}{f'; {remedy}' if remedy else ''}")


def _stamp(trained: TrainedPolicy) -> str:
    """Tell a model from one that has taken its name since."""
    path = Path(trained.origin)
    return _stamp_of(path) if path.exists() else trained.origin


def _stamp_of(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_mtime_ns} {status.st_size}"
