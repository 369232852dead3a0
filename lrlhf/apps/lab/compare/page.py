"""A comparison as sections: on a terminal, or as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from lrlhf.apps.lab.compare import sentences
from lrlhf.apps.lab.compare.comparison import Power, Row, RunComparison, scores_of
from lrlhf.apps.lab.compare.report import (
    ConfigDiff,
    Report,
    config_sentences,
    cost_table,
    family_note,
    notes,
)
from lrlhf.apps.lab.page import Cell, Chart, Number, Section, Table, Text, print_page, write_page
from lrlhf.statistics import power

_PROMPTS = 100
"""Rows of the table of prompts."""
_CHARS = 400
_STEPS = 24
Letters = tuple[str, str]


def print_report(report: Report, console: Console, *, step: str = "last") -> None:
    """Write the report to a terminal; the first sentence is the answer.

    Args:
        report: What is told.
        console: The terminal.
        step: The evaluation that was asked for.
    """
    print_page([*_sections(report, step)], console)


def write_comparison(report: Report, path: str | Path, *, step: str = "last") -> Path:
    """Write the report as a page, which has the prompts too.

    Args:
        report: What is told.
        path: The file.
        step: The evaluation that was asked for.

    Raises:
        ImportError: plotly is not installed; says how to install it.
    """
    answer, *sections = _sections(report, step)
    prompts = [
        Section(f"Prompts, {_title(letters)}", [_prompts(one, letters)])
        for one, letters in zip(report.comparisons, report.letters, strict=True)
    ]
    return write_page(path, "Comparison of runs", [answer, *sections, *prompts])


def _sections(report: Report, step: str) -> Iterator[Section]:
    compared = [*zip(report.comparisons, report.letters, report.configs, strict=True)]
    answers = [sentences.answer(one, *letters) for one, letters, _ in compared]
    sides = [
        f"{letter}: {', '.join(f'{run.folder} (step {run.step})' for run in side.evaluations)}"
        for letter, side in report.sides.items()
    ]
    yield Section("Answer", [*map(Text, answers), Text(""), *map(Text, sides)])
    for one, letters, diff in compared:
        yield Section(_title(letters), [*_parts(one, letters), *_config(diff, letters)])
    if remarks := [*map(Text, notes(report, step))]:
        yield Section("Notes", remarks)
    if (costs := cost_table(report)).rows:
        yield Section("Cost", [costs])


def _title(letters: Letters) -> str:
    return " against ".join(reversed(letters))


def _parts(comparison: RunComparison, letters: Letters) -> Iterator[Text | Table | Chart]:
    rows: list[list[Cell]] = [
        [row.name, row.prompts, *map(Number, _numbers(row), sentences.cells(row))]
        for row in (comparison.main, *comparison.others, *comparison.subsets)
    ]
    columns = ["metric", "prompts", *letters, "difference", "95 % interval", "p"]
    yield Table(columns, rows, note=family_note(comparison))
    yield _forest(comparison)
    yield Text(sentences.wins_and_losses(comparison, *letters))
    for note in sentences.notes(comparison, *letters):
        yield Text(note)
    if comparison.power is not None:
        yield Text(sentences.power_sentence(comparison, comparison.power))
        headings, *needs = sentences.needs(comparison, comparison.power)
        yield Table(headings, [[size, *map(_count, counts)] for size, *counts in needs])
        yield _power(comparison, comparison.power)


def _numbers(row: Row) -> list[float]:
    """Return what the cells of a row are sorted by."""
    return [*row.means, row.difference.value, row.difference.low, row.adjusted_p]


def _count(text: str) -> Number:
    digits = text.replace(",", "")
    return Number(int(digits) if digits.isdecimal() else math.inf, text)


def _forest(comparison: RunComparison) -> Chart:
    """Draw the main metric's difference, of all prompts and of each subset."""
    rows = [comparison.main, *comparison.subsets][::-1]
    values = [row.difference.value for row in rows]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": values,
        "y": [row.subset or "all prompts" for row in rows],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_finite(row.difference.high - row.difference.value) for row in rows],
            "arrayminus": [_finite(row.difference.value - row.difference.low) for row in rows],
        },
    }
    layout = {"xaxis": {"zeroline": True}, "yaxis": {"automargin": True}, "showlegend": False}
    title = f"Difference in {comparison.main.metric}, with 95 % intervals"
    return Chart([trace], layout, title, height=120 + 28 * len(rows))


def _finite(value: float) -> float | None:
    """Too few prompts have no interval; what differences of equal means leave is rounded to 0."""
    return round(value, 12) + 0.0 if np.isfinite(value) else None


def _power(comparison: RunComparison, seen: Power) -> Chart:
    sizes = np.linspace(0, 2 * seen.detectable, _STEPS).tolist()
    prompts, seeds = comparison.main.prompts, comparison.seeds
    shares = [power(seen.variances, size, prompts=prompts, seeds=seeds) for size in sizes]
    trace = {"type": "scatter", "mode": "lines", "x": sizes, "y": shares}
    layout = {
        "xaxis": {"title": {"text": f"true difference in {comparison.main.metric}"}},
        "yaxis": {"title": {"text": "found"}, "range": [0, 1.02], "tickformat": ".0%"},
        "showlegend": False,
    }
    return Chart([trace], layout, "How often an evaluation like this one finds a difference")


def _prompts(comparison: RunComparison, letters: Letters) -> Table:
    """Show the prompts with the largest differences, the best for B first."""
    a, b, there = scores_of(comparison.matched, comparison.main.metric)
    first, second = a.mean(axis=0), b.mean(axis=0)
    prompts = [one for one, has in zip(comparison.matched.prompts, there, strict=True) if has]
    gaps = second - first
    shown = np.argsort(-np.abs(gaps), kind="stable")[:_PROMPTS]
    shown = shown[np.argsort(-gaps[shown], kind="stable")]
    headings = [f"answer of {letter}" for letter in letters]
    rows: list[list[Cell]] = [
        [
            " ".join(prompts[index].key[-2:] if comparison.matched.by == "row" else ()),
            _short(prompts[index].text),
            float(first[index]),
            float(second[index]),
            *map(_short, prompts[index].answers),
        ]
        for index in shown.tolist()
    ]
    note = f"The {len(rows)} of {len(prompts)} prompts with the largest differences; answers are "
    return Table(
        ["row", "prompt", *letters, *headings],
        rows,
        note=f"{note}the first ones of the first seed. Texts end after {_CHARS} characters.",
    )


def _short(text: str) -> str:
    return text if len(text) <= _CHARS else f"{text[:_CHARS]}…"


def _config(diff: ConfigDiff, letters: Letters) -> Iterator[Text | Table]:
    yield from map(Text, config_sentences(diff))
    if diff.changes:
        yield Table(["option", *letters], diff.changes)
