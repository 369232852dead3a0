"""The files that a run has written, as rows and data frames."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import pandas as pd

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
    def _metrics(self) -> Path:
        return self.folder / "metrics.csv"

    @property
    def _responses(self) -> Path:
        return self.folder / "rollouts.jsonl"

    @property
    def config(self) -> dict[str, Any]:
        """The merged config; empty for a run that was started from Python."""
        path = self.folder / "config.yaml"
        return yaml.safe_load(path.read_text()) if path.exists() else {}

    @property
    def evaluations(self) -> dict[int, Path]:
        """The file of each evaluation, by step, in order."""
        found = ((_EVALUATION.fullmatch(path.name), path) for path in self.folder.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def metrics(self) -> pd.DataFrame:
        """Return every logged metric: a row per step, NaN where a step has none."""
        import pandas as pd  # noqa: PLC0415  takes half a second

        if not self._metrics.exists():
            return pd.DataFrame(index=pd.Index([], name="step"))
        # a step has a row of training and one of the evaluation after it
        return pd.read_csv(self._metrics).groupby("step").last()

    def responses(self) -> Iterator[dict[str, Any]]:
        """Yield the responses of training, in the order of the steps."""
        if self._responses.exists():
            yield from records(self._responses)

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


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file; a last one that is still being written is left out.

    Raises:
        ValueError: A line is no JSON object; names file and line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield record
