"""A comparison of runs: read, compared, and told on a terminal, as JSON, or as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lrlhf.apps.lab.compare import sentences
from lrlhf.apps.lab.compare.comparison import (
    Match,
    Row,
    RunComparison,
    Side,
    compare_sides,
    correct_for_several,
)
from lrlhf.apps.lab.compare.evaluations import read_evaluation
from lrlhf.apps.lab.run_files import RunFiles, plain_json
from lrlhf.secrets import escaped

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


def print_report(report: Report, console: Console, *, step: str = "last") -> None:
    """Write the report to a terminal; the first sentence is the answer."""
    for part in _parts(report, step):
        console.print(part)
    costs = cost_rows(report)
    if len(costs[0]) > 1:
        console.print()
        _print_costs(costs, console)


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


def _text(text: str, style: str = "") -> Text:
    """Return words without markup, and without what a terminal would act on."""
    return Text(escaped(text), style=style)


def _parts(report: Report, step: str) -> Iterator[RenderableType]:
    for one, letters in zip(report.comparisons, report.letters, strict=True):
        yield _text(sentences.answer(one, *letters), style="bold")
    yield _text("")
    for letter, side in report.sides.items():
        runs = ", ".join(
            f"{evaluation.folder} (step {evaluation.step})" for evaluation in side.evaluations
        )
        yield _text(f"{letter}: {runs}")
    for one, letters, diff in zip(report.comparisons, report.letters, report.configs, strict=True):
        yield _text("")
        yield _metrics(one, letters)
        yield _text(sentences.wins_and_losses(one, *letters))
        for sentence in sentences.notes(one, *letters):
            yield _text(sentence)
        if one.power is not None:
            yield _text(sentences.power_sentence(one, one.power))
            yield _table(sentences.needs(one, one.power))
        yield from _configs(diff, letters)
    for sentence in notes(report, step):
        yield _text(sentence)


def _print_costs(rows: Sequence[Sequence[Any]], console: Console) -> None:
    """Write a row per run, or a column per run where these rows are too long; cut off nothing."""
    table = _table(rows)
    unlimited = console.options.update(max_width=4096)
    if console.measure(table, options=unlimited).minimum > console.width:
        table = _table([*zip(*rows, strict=True)])
        for column in table.columns[1:]:
            column.min_width = None  # paths go on below
    width = max(console.width, console.measure(table, options=unlimited).minimum)
    console.print(table, width=width, crop=False)


def _metrics(comparison: RunComparison, letters: tuple[str, str]) -> Table:
    title = f"{letters[1]} against {letters[0]}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=None)
    table.add_column("metric", overflow="fold", min_width=10)
    for name in ("prompts", *letters, "difference", "95 % interval", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (comparison.main, *comparison.others, *comparison.subsets):
        style = "bold" if row is comparison.main else ""
        table.add_row(_text(row.name), f"{row.prompts:,}", *sentences.cells(row), style=style)
    table.caption = family_note(comparison)
    return table


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


def _configs(diff: ConfigDiff, letters: tuple[str, str]) -> Iterator[RenderableType]:
    for sentence in config_sentences(diff):
        yield _text(sentence)
    if diff.changes:
        yield _table([["option", *letters], *map(list, diff.changes)], left=True)


def _table(rows: Sequence[Sequence[Any]], *, left: bool = False) -> Table:
    """Lay out headings and rows; the first column is text, the others are numbers unless left."""
    table = Table(box=None)
    for index, name in enumerate(rows[0]):
        justify: Literal["left", "right"] = "left" if left or not index else "right"
        table.add_column(name, overflow="fold", justify=justify, min_width=len(name))
    for row in rows[1:]:
        table.add_row(*(_text(each if isinstance(each, str) else _shown(each)) for each in row))
    return table


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


def cost_rows(report: Report) -> list[list[Any]]:
    """Return headings and a row per run, without the columns that no run knows."""
    rows = {
        f"{letter} {evaluation.folder}": report.costs[str(evaluation.folder)]
        for letter, side in report.sides.items()
        for evaluation in side.evaluations
    }
    columns: dict[str, list[Any]] = {
        "steps": [cost.steps for cost in rows.values()],
        "responses": [cost.responses for cost in rows.values()],
        "tokens": [cost.tokens for cost in rows.values()],
        "seconds": [cost.total_seconds for cost in rows.values()],
    }
    for phase in dict.fromkeys(name for cost in rows.values() for name in cost.seconds):
        columns[f"{phase} s"] = [cost.seconds.get(phase) for cost in rows.values()]
    columns["peak GiB"] = [cost.peak_gib for cost in rows.values()]
    known = {name: own for name, own in columns.items() if any(each is not None for each in own)}
    return [["run", *known], *([run, *own] for run, own in _rows(list(rows), known))]


def _rows(
    runs: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, list[Any]]]:
    for index, run in enumerate(runs):
        yield run, [values[index] for values in columns.values()]


def _shown(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


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
            "main": _row(one.main),
            "others": [_row(row) for row in one.others],
            "subsets": [_row(row) for row in one.subsets],
            "power": None if one.power is None else plain_json(one.power),
            "config": plain_json(diff),
            "prompts": list(_prompts(one)),
        }
        for one, letters, diff in zip(
            report.comparisons, report.letters, report.configs, strict=True
        )
    ]
    costs = {folder: plain_json(cost) for folder, cost in report.costs.items()}
    return {"comparisons": comparisons, "costs": costs, "notes": list(notes(report, step))}


def _side(side: Side) -> dict[str, Any]:
    runs = [
        {"folder": str(evaluation.folder), "step": evaluation.step}
        for evaluation in side.evaluations
    ]
    return {"name": side.name, "runs": runs}


def _row(row: Row) -> dict[str, Any]:
    plain_row: dict[str, Any] = plain_json(row)
    return plain_row


def _prompts(comparison: RunComparison) -> Iterator[dict[str, Any]]:
    """Yield the main metric of each prompt, the mean over samples of each run."""
    a, b = comparison.matched.values[comparison.main.metric]
    for index, prompt in enumerate(comparison.matched.prompts):
        yield {
            "key": list(prompt.key),
            "a": plain_json(a[:, index].tolist()),
            "b": plain_json(b[:, index].tolist()),
        }
