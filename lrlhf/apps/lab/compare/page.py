"""A comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lrlhf.apps.lab.compare import sentences
from lrlhf.apps.lab.compare.comparison import Comparison, Power, Row, scores_of
from lrlhf.apps.lab.compare.configs import ConfigDiff
from lrlhf.apps.lab.compare.report import Report, config_sentences, cost_rows, family_note, notes
from lrlhf.apps.lab.page import Chart, Section, Table, Text, write_page
from lrlhf.apps.lab.page.page import Cell
from lrlhf.statistics import power

_PROMPTS = 100
"""Rows of the table of prompts."""
_CHARS = 400
_STEPS = 24
Letters = tuple[str, str]


def write_comparison(report: Report, path: Path, *, step: str = "last") -> Path:
    """Write the report as a page.

    Args:
        report: What is told.
        path: The file.
        step: The evaluation that was asked for.

    Raises:
        ImportError: plotly is not installed; says how to install it.
    """
    sides = [
        f"{letter}: {', '.join(f'{one.folder} (step {one.step})' for one in side.evaluations)}"
        for letter, side in report.sides.items()
    ]
    answers = [
        sentences.answer(one, *letters)
        for one, letters in zip(report.comparisons, report.letters, strict=True)
    ]
    told = (*answers, *sides, *notes(report, step))
    sections = [Section("Answer", [Text(one) for one in told])]
    for one, letters, diff in zip(report.comparisons, report.letters, report.configs, strict=True):
        sections.append(Section(" against ".join(reversed(letters)), list(_parts(one, letters))))
        sections.append(Section("Prompts", [_prompts(one, letters)]))
        sections.append(Section("Config", list(_config(diff, letters))))
    costs = cost_rows(report)
    if len(costs[0]) > 1:
        sections.append(Section("Cost", [Table(costs[0], costs[1:])]))
    return write_page(path, "Comparison of runs", sections)


def _parts(found: Comparison, letters: Letters) -> Iterator[Text | Table | Chart]:
    columns = ["metric", "prompts", *letters, "difference", "from", "to", "p"]
    rows = [
        [row.subset or row.metric, row.prompts, *row.means, *_difference(row), row.adjusted_p]
        for row in (found.main, *found.others, *found.subsets)
    ]
    yield Table(columns, rows, note=f"From, to: 95 % interval. {family_note(found)}")
    yield _forest(found)
    yield Text(sentences.wins_and_losses(found, *letters))
    for note in sentences.notes(found, *letters):
        yield Text(note)
    if found.power is not None:
        yield Text(sentences.power_sentence(found, found.power))
        needed = sentences.needs(found, found.power)
        yield Table(needed[0], needed[1:])
        yield _power(found, found.power)


def _difference(row: Row) -> list[float | None]:
    return [_finite(value) for value in row.difference[:3]]


def _forest(found: Comparison) -> Chart:
    """Draw the main metric's difference, of all prompts and of each subset."""
    rows = [found.main, *found.subsets][::-1]
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
    title = f"Difference in {found.main.metric}, with 95 % intervals"
    return Chart([trace], layout, title, height=120 + 28 * len(rows))


def _finite(value: float) -> float | None:
    """Too few prompts have no interval; what differences of equal means leave is rounded to 0."""
    return round(value, 12) + 0.0 if np.isfinite(value) else None


def _power(found: Comparison, seen: Power) -> Chart:
    sizes = np.linspace(0, 2 * seen.detectable, _STEPS).tolist()
    prompts, seeds = found.main.prompts, found.seeds
    shares = [power(seen.variances, size, prompts=prompts, seeds=seeds) for size in sizes]
    trace = {"type": "scatter", "mode": "lines", "x": sizes, "y": shares}
    layout = {
        "xaxis": {"title": {"text": f"true difference in {found.main.metric}"}},
        "yaxis": {"title": {"text": "found"}, "range": [0, 1.02], "tickformat": ".0%"},
        "showlegend": False,
    }
    return Chart([trace], layout, "How often an evaluation like this one finds a difference")


def _prompts(found: Comparison, letters: Letters) -> Table:
    """Show the prompts with the largest differences, the best for B first."""
    a, b, there = scores_of(found.matched, found.main.metric)
    first, second = a.mean(axis=0), b.mean(axis=0)
    prompts = [one for one, has in zip(found.matched.prompts, there, strict=True) if has]
    gaps = second - first
    shown = np.argsort(-np.abs(gaps), kind="stable")[:_PROMPTS]
    shown = shown[np.argsort(-gaps[shown], kind="stable")]
    told = [f"answer of {letter}" for letter in letters]
    rows: list[list[Cell]] = [
        [
            " ".join(prompts[index].key[-2:] if found.matched.by == "row" else ()),
            _short(prompts[index].text),
            float(first[index]),
            float(second[index]),
            *map(_short, prompts[index].answers),
        ]
        for index in shown.tolist()
    ]
    note = f"The {len(rows)} of {len(prompts)} prompts with the largest differences; answers are "
    return Table(
        ["row", "prompt", *letters, *told],
        rows,
        note=f"{note}the first ones of the first seed. Texts end after {_CHARS} characters.",
    )


def _short(text: str) -> str:
    return text if len(text) <= _CHARS else f"{text[:_CHARS]}…"


def _config(diff: ConfigDiff, letters: Letters) -> Iterator[Text | Table]:
    for sentence in config_sentences(diff):
        yield Text(sentence)
    if diff.changes:
        yield Table(["option", *letters], [list(change) for change in diff.changes])
