"""A comparison of runs: read, compared, and told in sentences and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.compare import sentences
from lrlhf.apps.lab.compare.comparison import (
    Match,
    RunComparison,
    Side,
    compare_sides,
    correct_for_several,
)
from lrlhf.apps.lab.compare.evaluations import read_evaluation
from lrlhf.apps.lab.page import Number, Table
from lrlhf.apps.lab.run_files import RunFiles, plain_json

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
    differing = [name for side in known for name in _differing(side) if not _is_apart(name)]
    within = [*dict.fromkeys(differing)]
    if not all(known):
        return ConfigDiff([], [], within, missing)
    first, second = known[0][0], known[1][0]
    names = _differing([first, second])
    changes = [
        Change(name, first.get(name, _ABSENT), second.get(name, _ABSENT))
        for name in names
        if not _is_apart(name)
    ]
    return ConfigDiff(
        changes, [name for name in names if _is_apart(name)], [*dict.fromkeys(within)], missing
    )


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


_SECONDS = "_s"
_PEAK = "allocated_bytes.all.peak"
"""End of what DeviceStatsMonitor calls the most memory that a GPU's tensors took."""
_OWN_PEAK = "perf/memory_gib"
"""The same of the rank that took the most; without a GPU what the process had in memory."""
_GIB = 2**30


class Cost(NamedTuple):
    """Of one run; None: its files do not tell."""

    steps: int | None
    responses: int | None
    tokens: int | None
    """Of the responses."""
    seconds: dict[str, float]
    """By phase of an iteration: mean over the logged steps, times all steps."""
    peak_gib: float | None
    """The most memory that one process took: on its GPU, or without one in all."""

    @property
    def total_seconds(self) -> float | None:
        return math.fsum(self.seconds.values()) if self.seconds else None


def cost_of(folder: Path) -> Cost:
    """Read what a run has cost from ``metrics.csv``, ``timings.csv`` and ``rollouts.jsonl``.

    Raises:
        ValueError: A file is damaged; names it.
    """
    run = RunFiles(folder)
    curves = run.curves()
    steps = max((step for curve in curves.values() for step in curve), default=None)
    columns = {
        name: finite
        for name, curve in curves.items()
        if (finite := [*filter(math.isfinite, curve.values())])
    }
    peaks = [max(own) / _GIB for name, own in columns.items() if name.endswith(_PEAK)]
    peaks += columns.get(_OWN_PEAK, [])
    lengths = [record.get("length") for record in run.responses()]
    counted = [length for length in lengths if isinstance(length, int)]
    return Cost(
        steps=steps,
        responses=len(lengths) or None,
        tokens=sum(counted) if counted else None,
        seconds={
            name.removeprefix("perf/").removesuffix(_SECONDS): math.fsum(values)
            / len(values)
            * (steps or len(values))
            for name, values in columns.items()
            if _is_phase(name)
        },
        peak_gib=max(peaks, default=None),
    )


def _is_phase(name: str) -> bool:
    return name.startswith("perf/") and name.endswith(_SECONDS) and not name.endswith("_per_s")


class Report(NamedTuple):
    """One or several sides against the same one."""

    comparisons: list[RunComparison]
    costs: dict[str, Cost]
    """By folder of the run."""
    configs: list[ConfigDiff]
    """Of each comparison."""

    @property
    def letters(self) -> list[tuple[str, str]]:
        """What the two sides of each comparison are called in sentences: A and B, A and C."""
        return [("A", chr(ord("B") + index)) for index in range(len(self.comparisons))]

    @property
    def sides(self) -> dict[str, Side]:
        """Each side by its letter."""
        return {"A": self.comparisons[0].a} | {
            letter: one.b for (_, letter), one in zip(self.letters, self.comparisons, strict=True)
        }


def compare_runs(
    sides: Mapping[str, Sequence[Path]],
    *,
    step: str = "last",
    metric: str | None = None,
    by: Sequence[str] = (),
    how: Match = "auto",
    differences: Sequence[float] = (),
) -> Report:
    """Compare the evaluations of runs.

    Args:
        sides: Folders of each side's runs, which differ in their seeds, by name; the others are
            compared with the first.
        step: Evaluation of each run: ``last``, ``best`` or a number.
        metric: The main one; None: score of policies, accuracy of reward models.
        by: Columns of the rows to make subsets of.
        how: Prompts are matched by ``row``, ``text`` or ``auto``, see `match`.
        differences: Of the main metric, to say what it takes to see them.

    Raises:
        FileNotFoundError: A run or its evaluation is not there.
        KeyError: A run has no evaluation of that step.
        ValueError: A file is damaged, or the sides have nothing in common: no prompt, or not the
            temperature of the first run.
    """
    read: list[Side] = []
    temperature = None
    for name, folders in sides.items():
        read.append(Side(name, []))
        for folder in folders:
            evaluation = read_evaluation(folder, step, metric, temperature)
            read[-1].evaluations.append(evaluation)
            temperature = read[0].evaluations[0].temperature
    comparisons = correct_for_several(
        [
            compare_sides(read[0], side, metric=metric, by=by, how=how, differences=differences)
            for side in read[1:]
        ]
    )
    costs = {str(folder): cost_of(folder) for folders in sides.values() for folder in folders}
    return Report(comparisons, costs, [config_diff(read[0], side) for side in read[1:]])


def notes(report: Report, step: str) -> Iterator[str]:
    """Say what holds for the whole report."""
    if step == "best":
        yield (
            "The best step of each run was chosen on these same prompts, which flatters all of "
            "them, and most the run with the most evaluations."
        )
    for side in report.sides.values():
        for note in same_seeds(side):
            yield f"The same seed twice: {note}. Runs of one side are to differ in their seeds."


def family_note(comparison: RunComparison) -> str:
    """Say which p-values are corrected for which tests."""
    count = len(comparison.others) + len(comparison.subsets)
    if not count:
        return ""
    what = f"{comparison.main.metric}: one test"
    if comparison.main.adjusted_p != comparison.main.difference.p_value:
        what = f"{comparison.main.metric}: corrected for the sides compared with A"
    tests = "test" if count == 1 else f"{count} tests"
    return f"p of {what}; of the other {tests} corrected together (Holm). Intervals are not."


def config_sentences(diff: ConfigDiff) -> Iterator[str]:
    """Say what the table of changed options leaves out."""
    if diff.missing:
        yield f"No config.yaml: {', '.join(diff.missing)}."
    elif not diff.changes:
        yield "The configs have the same options."
    if diff.apart:
        yield f"Not counted as differences: {', '.join(diff.apart)}."
    if diff.within:
        yield (f"The runs of one side differ in more than their seeds: {', '.join(diff.within)}.")


def cost_table(report: Report) -> Table:
    """Return a row per run, without the columns that no run knows."""
    runs = {
        f"{letter} {evaluation.folder}": report.costs[str(evaluation.folder)]
        for letter, side in report.sides.items()
        for evaluation in side.evaluations
    }
    phases = dict.fromkeys(name for cost in runs.values() for name in cost.seconds)
    rows = [
        {
            "steps": cost.steps,
            "responses": cost.responses,
            "tokens": cost.tokens,
            "seconds": _decimal(cost.total_seconds),
            **{f"{phase} s": _decimal(cost.seconds.get(phase)) for phase in phases},
            "peak GiB": _decimal(cost.peak_gib),
        }
        for cost in runs.values()
    ]
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [[run, *(row[name] for name in known)] for run, row in zip(runs, rows, strict=True)]
    return Table(["run", *known], cells if known else [])


def _decimal(value: float | None) -> Number | None:
    return None if value is None else Number(value, f"{value:,.1f}")


def as_json(report: Report, *, step: str = "last") -> dict[str, Any]:
    """Return everything that the report says in JSON types; infinite ends are None."""
    comparisons = [
        {
            "answer": sentences.answer(one, *letters),
            "scope": sentences.scope(one, *letters),
            "notes": list(sentences.notes(one, *letters)),
            "a": _side(one.a),
            "b": _side(one.b),
            "matched_by": one.matched.by,
            "unmatched": one.matched.unmatched,
            "main": one.main,
            "others": one.others,
            "subsets": one.subsets,
            "power": one.power,
            "config": diff,
            "prompts": list(_prompts(one)),
        }
        for one, letters, diff in zip(
            report.comparisons, report.letters, report.configs, strict=True
        )
    ]
    whole = {"comparisons": comparisons, "costs": report.costs, "notes": [*notes(report, step)]}
    plain: dict[str, Any] = plain_json(whole)
    return plain


def _side(side: Side) -> dict[str, Any]:
    runs = [
        {"folder": str(evaluation.folder), "step": evaluation.step}
        for evaluation in side.evaluations
    ]
    return {"name": side.name, "runs": runs}


def _prompts(comparison: RunComparison) -> Iterator[dict[str, Any]]:
    """Yield the main metric of each prompt, the mean over samples of each run."""
    a, b = comparison.matched.values[comparison.main.metric]
    for index, prompt in enumerate(comparison.matched.prompts):
        yield {"key": list(prompt.key), "a": a[:, index].tolist(), "b": b[:, index].tolist()}
