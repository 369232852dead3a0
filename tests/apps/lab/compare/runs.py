"""Folders of runs as `lrlhf fit` leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def response(row: int, score: float | None, **changed: Any) -> dict[str, Any]:
    """A line of EvalJSONL for a policy."""
    return {
        "step": 1,
        "source": "val.jsonl",
        "row": row,
        "prompt": f"question {row}",
        "completion": f"answer {row}",
        "score": score,
        "rewards": {"Exact": score},
        "length": 10 + row,
        "finish_reason": "stop",
        "columns": {"level": "easy" if row % 2 else "hard"},
        **changed,
    }


def pair(row: int, label: float | None, gap: float) -> dict[str, Any]:
    """A line of EvalJSONL for a reward model."""
    return {
        "step": 1,
        "source": "pairs.jsonl",
        "row": row,
        "prompt": f"question {row}",
        "candidate0": "one",
        "candidate1": "two",
        "labels": {"reward": label},
        "scores0": {"reward": gap},
        "scores1": {"reward": 0.0},
        "margins": {"reward": gap},
        "info": {},
    }


def write_run(
    folder: str | Path,
    records: Sequence[Mapping[str, Any]],
    *,
    step: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an evaluation, and the config if there is one."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(one)}\n" for one in records)
    (path / f"eval_scores_{step}.jsonl").write_text(lines)
    if config is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    return path


def scored(
    scores: Sequence[float | None], change: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> list[dict[str, Any]]:
    """A line for each score, rows from 1."""
    return [response(row, score, **change(row)) for row, score in enumerate(scores, start=1)]
