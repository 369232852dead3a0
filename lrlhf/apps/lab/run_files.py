"""The files that a run has written, as rows and data frames, and the files of reports on it."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrlhf.foreign_files import check_regular, read_yaml
from lrlhf.options.errors import ConfigError
from lrlhf.run.atomic import atomic_write

if TYPE_CHECKING:
    import pandas as pd


_LONGEST_LINE = 2**28
"""Bytes of a line that no record of a run has."""
_EVALUATION = re.compile(r"eval_scores_(\d+)\.jsonl")


class RunFiles:
    """Reads a run folder, while the run goes on too.

    Args:
        folder: ``trainer.default_root_dir`` of the run.

    Raises:
        FileNotFoundError: There is no such folder, or no run has written into it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._metrics = self.folder / "metrics.csv"
        self._responses = self.folder / "rollouts.jsonl"
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        if not (self._metrics.exists() or self._responses.exists() or self.evaluations):
            raise FileNotFoundError(
                f"{folder} holds no metrics.csv, rollouts.jsonl or eval_scores_<step>.jsonl; is it "
                "the folder of a run?"
            )

    def __repr__(self) -> str:
        return f"RunFiles({str(self.folder)!r})"

    @property
    def response_files(self) -> list[Path]:
        """The file of the responses of training, if there is one."""
        return [self._responses] if self._responses.exists() else []

    @property
    def config(self) -> dict[str, Any]:
        """The merged config; empty for a run that was started from Python."""
        return _mapping(self.folder / "config.yaml")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the module, by the config or, in Python, by what the logger kept."""
        model = self.config.get("model")
        if isinstance(model, Mapping):
            return dict(model.get("init_args", model))
        return _mapping(self.folder / "hparams.yaml")

    @property
    def media(self) -> list[Path]:
        """The folders of media that the config names (``media.root``) below the working folder.

        A run may be a stranger's, whose config could name any folder of this machine.
        """
        roots = (Path(root).expanduser() for root in dict.fromkeys(_roots(self.config.get("data"))))
        return [root for root in roots if Path.cwd() in root.resolve().parents]

    @property
    def evaluations(self) -> dict[int, Path]:
        """The file of each evaluation, by step, in order."""
        matches = ((_EVALUATION.fullmatch(path.name), path) for path in self.folder.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def metrics(self) -> pd.DataFrame:
        """Return every logged metric: a row per step, NaN where a step has none."""
        import pandas as pd  # noqa: PLC0415  takes half a second

        frame = pd.DataFrame(self.curves()).rename_axis("step").sort_index()
        return frame.astype(float)

    def curves(self) -> dict[str, dict[int, float]]:
        """Return the values of every logged metric by step, those of ``timings.csv`` too.

        Raises:
            ValueError: A cell is no number; names file, line and column.
        """
        curves_of: dict[str, dict[int, float]] = {}
        for path in (self._metrics, self.folder / "timings.csv"):
            if path.exists():
                _add_curves(path, curves_of)
        return curves_of

    def responses(self) -> Iterator[dict[str, Any]]:
        """Yield the responses of training, in the order of the steps."""
        for path in self.response_files:
            yield from records(path)

    def groups(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the responses to each prompt of an iteration, which stand behind each other."""
        names = ("step", "rank", "group", "source", "row")
        for _, rows in groupby(self.responses(), lambda row: [row.get(name) for name in names]):
            yield list(rows)

    def evaluation(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the records of the evaluation after a step; None: of the last.

        Raises:
            KeyError: There was none; names those that there are.
        """
        steps = list(self.evaluations)
        if step is None and steps:
            step = steps[-1]
        if step not in self.evaluations:
            raise KeyError(f"{self.folder} has no evaluation of step {step}; it has {steps}")
        return list(records(self.evaluations[step]))

    def response_table(self) -> pd.DataFrame:
        """Return the responses of training, one in a row.

        Of the records, which [callbacks](../callbacks.md) describes, nested values have columns of
        their own, such as ``rewards/exact_match`` and ``columns/answer``.
        """
        return _table(self.responses())

    def evaluation_table(self) -> pd.DataFrame:
        """Return the records of all evaluations, one in a row, as `response_table` does.

        The column ``step`` says which evaluation a row is of.
        """
        return _table(
            {"step": step, **record}
            for step, path in self.evaluations.items()
            for record in records(path)
        )


def _mapping(path: Path) -> dict[str, Any]:
    value = (read_yaml(path) if path.exists() else None) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no options by name but a {type(value).__name__}")
    return value


def _table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415  takes half a second

    return pd.json_normalize(list(rows), sep="/", max_level=1)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file; a last one that is still being written is left out.

    Raises:
        ValueError: A line is no JSON object; names file and line.
    """
    for number, line in complete_lines(path):
        yield record_of(line, path, number)


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of the lines that end in a line break.

    Raises:
        ValueError: It is a pipe or a device, or a line is too long for a record.
    """
    check_regular(path)
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE), b""), start=1):
            if len(line) == _LONGEST_LINE:
                raise ValueError(f"{path}, line {number} has more than {_LONGEST_LINE:,} bytes")
            if line.endswith(b"\n"):
                yield number, line


def record_of(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse a line of a file.

    Raises:
        ValueError: It is no JSON object; names file and line.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number} is no JSON object")
    return record


def _add_curves(path: Path, curves: dict[str, dict[int, float]]) -> None:
    """Add the columns of a CSV file; a step may have several rows, with other metrics in each."""
    lines = (line.decode(errors="replace") for _, line in complete_lines(path))
    for number, row in enumerate(csv.DictReader(lines), start=2):
        step = _number(row.pop("step", None) or "", path, number, "step")
        if not step.is_integer():
            raise ValueError(f"{path}, line {number}: the step is {step}, no whole number")
        for name, text in row.items():
            if text:
                value = _number(text, path, number, name)
                curve = curves.setdefault(name, {})
                if not (math.isnan(value) and int(step) in curve):
                    curve[int(step)] = value


def _number(text: str, path: Path, line: int, column: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {line}: {column} is {text!r}, no number") from error


def _roots(settings: Any) -> Iterator[str]:
    """Yield each ``root`` of ``media``, and each ``media_root``, wherever it stands."""
    if isinstance(settings, Mapping):
        media = settings.get("media")
        own = media.get("root") if isinstance(media, Mapping) else None
        yield from (each for each in (own, settings.get("media_root")) if isinstance(each, str))
        settings = list(settings.values())
    if isinstance(settings, list):
        for entry in settings:
            yield from _roots(entry)


def check_output(option: str, path: str | None) -> None:
    """Refuse a file that cannot be written, before anything takes time.

    Raises:
        ConfigError: It is a folder, or would lie in what is no folder.
    """
    if path is None:
        return
    above = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if Path(path).is_dir() or not above.is_dir():
        raise ConfigError(f"--{option} is {path}; give the name of a file in a folder")


def write_json(path: str, value: dict[str, Any]) -> None:
    """Write a JSON file, which appears complete or not at all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(Path(path)) as handle:
        handle.write(json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace"))


def plain_json(value: Any) -> Any:
    """Return a value as JSON has it: named tuples become objects, NaN and infinity null."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
