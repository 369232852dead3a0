"""The files of reports: refused early, and written whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lrlhf.options.errors import ConfigError
from lrlhf.run.atomic import atomic_write


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
