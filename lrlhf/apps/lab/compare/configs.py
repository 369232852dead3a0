"""How the configs of two sides differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.compare.comparison import Side
from lrlhf.apps.lab.run_files import RunFiles

_SEEDS = {"seed_everything", "seed"}
_PLACES = {"default_root_dir", "dirpath", "save_dir", "ckpt_path"}
_ABSENT = "(not set)"


class Change(NamedTuple):
    """An option that is not the same on both sides."""

    option: str
    a: str
    b: str


class ConfigDiff(NamedTuple):
    """How two sides were configured differently."""

    changes: list[Change]
    apart: list[str]
    """Seeds, folders and loggers that differ, which say nothing of the recipes."""
    within: list[str]
    """Options that differ between the runs of one side, which are to differ in seeds only."""
    missing: list[str]
    """Runs without a config.yaml."""


def config_diff(a: Side, b: Side) -> ConfigDiff:
    """Compare the configs that runs have saved."""
    sides = [[_options(evaluation.folder) for evaluation in side.evaluations] for side in (a, b)]
    missing = [
        str(one.folder)
        for side, options in zip((a, b), sides, strict=True)
        for one, own in zip(side.evaluations, options, strict=True)
        if not own
    ]
    known = [[own for own in side if own] for side in sides]
    within = [name for side in known for name in _differing(side) if not _is_apart(name)]
    if not all(known):
        return ConfigDiff([], [], _once(within), missing)
    first, second = known[0][0], known[1][0]
    names = _differing([first, second])
    changes = [
        Change(name, first.get(name, _ABSENT), second.get(name, _ABSENT))
        for name in names
        if not _is_apart(name)
    ]
    return ConfigDiff(changes, [name for name in names if _is_apart(name)], _once(within), missing)


def same_seeds(side: Side) -> list[str]:
    """Return the runs of a side that have the seed of one before them."""
    seen: dict[str, Path] = {}
    notes = []
    for evaluation in side.evaluations:
        seed = _options(evaluation.folder).get("seed_everything")
        if seed is not None and seed in seen:
            notes.append(f"{evaluation.folder} and {seen[seed]} (seed {seed})")
        elif seed is not None:
            seen[seed] = evaluation.folder
    return notes


def _options(folder: Path) -> dict[str, str]:
    return dict(_flat(RunFiles(folder).config))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each option with its value as text; of items of a list the number is in the name."""
    items: Sequence[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        items = [(f"{name}[{index}]", inner) for index, inner in enumerate(value)]
    if items:
        for key, inner in items:
            yield from _flat(inner, key)
    elif name:
        yield name, str(value)


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for own in configs for name in own)
    return [name for name in names if len({own.get(name) for own in configs}) > 1]


def _is_apart(name: str) -> bool:
    last = name.rpartition(".")[2]
    known = name in _SEEDS or last in _PLACES or name == "model.init_args.seed"
    return known or name.startswith("trainer.logger")


def _once(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
