"""What the lab tells, as text, as JSON, and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lrlhf.apps.lab.page import Chart, Number, Section, Table, Text, write_page
from lrlhf.apps.lab.reward_lab.lab import SCORE, Lab, OddRow, Part, Share
from lrlhf.statistics.correlation import Correlation

DISCLAIMER = (
    "This is an audit: it tells what the values are, and raises no alarm. Whether a reward is "
    "exploited, only reading the responses tells."
)
_ROWS_IN_TEXT, _STEPS_IN_TEXT, _ROWS_ON_PAGE = 3, 10, 50
_BINS = 40
_COLUMNS = (
    "part", "without value", "mean", "std", "min", "5 %", "median", "95 %", "max", "distinct",
    "variance within prompts", "prompts without signal", "rank correlation with length",
)  # fmt: skip
_OF_SIGNAL = 10
"""The first column that is not of the values alone."""
_TIME_COLUMNS = ("part", "calls", "s per call p50", "p99", "s per response p50", "p99")


def as_text(lab: Lab) -> str:
    """Return the report as lines for a terminal."""
    return "\n".join(_lines(lab))


def as_json(lab: Lab) -> dict[str, Any]:
    """Return the report in JSON types: all figures, and the places of all rows without a value."""
    plain: dict[str, Any] = _plain(
        {
            "what": DISCLAIMER,
            "responses": lab.responses,
            "prompts": lab.prompts,
            "length_unit": lab.unit,
            "parts": [_part_json(part) for part in lab.parts],
            "correlations": [
                {"parts": list(names), **found._asdict()}
                for names, found in lab.correlations.items()
            ],
            "facts": list(lab.facts),
            "without_value": {
                name: [one.place for one in rows] for name, rows in lab.without_value.items()
            },
            "short_and_high": _rows_json(lab.short_and_high),
            "disputed": _rows_json(lab.disputed),
            "slowest": _rows_json(lab.slowest),
            "times": [one._asdict() for one in lab.times],
            "failures": dict(lab.failures),
            "steps": [one._asdict() for one in lab.steps],
        }
    )
    return plain


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        **part.distribution._asdict(),
        "missing": _share_json(part.missing),
        "within_groups": part.within_groups,
        "no_signal": _share_json(part.no_signal),
        "with_length": part.with_length._asdict(),
    }


def _share_json(share: Share) -> dict[str, Any]:
    return {**vars(share), "share": share.value}


def _rows_json(rows: Sequence[OddRow]) -> list[dict[str, Any]]:
    return [
        {
            "place": one.response.place,
            "value": one.value,
            "detail": one.detail,
            "prompt": one.response.prompt,
            "completion": one.response.completion,
        }
        for one in rows
    ]


def _plain(value: Any) -> Any:
    """Replace what JSON has no form for: NaN becomes null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_page(lab: Lab, path: str | Path, title: str) -> Path:
    """Write the report as one HTML file.

    Args:
        lab: What to write.
        path: The ``.html`` file.
        title: Of the page.

    Raises:
        ImportError: plotly is not installed; says how to install it.
    """
    sections = [
        Section("Values", [*_overview(lab), *(_histogram(lab, part) for part in lab.parts)])
    ]
    if lab.steps:
        sections.append(Section("Steps", _steps(lab)))
    if lab.times:
        sections.append(
            Section(
                "Time",
                [
                    Table(_TIME_COLUMNS, [list(one) for one in lab.times]),
                    _odd("Slowest calls", "seconds per response", lab.slowest),
                ],
            )
        )
    sections.append(
        Section(
            "Rows to look at",
            [
                _odd(
                    "High score for a short response",
                    "rank above that of the length",
                    lab.short_and_high,
                ),
                _odd("Parts disagree", "distance of the ranks", lab.disputed),
                *(_without(name, rows) for name, rows in lab.without_value.items() if rows),
            ],
        )
    )
    lead = f"{lab.responses:,} responses to {lab.prompts:,} prompts. {DISCLAIMER}"
    return write_page(path, title, sections, lead)


def _overview(lab: Lab) -> list[Text | Table]:
    correlations = [
        [*names, one.value, one.low, one.high, one.pairs] for names, one in lab.correlations.items()
    ]
    parts: list[Text | Table] = [Text(f"{fact}.") for fact in lab.facts]
    parts += [Text(f"In {count} calls: {failure}") for failure, count in lab.failures.items()]
    cells = [_cells(part) for part in lab.parts]
    values, signal = slice(0, _OF_SIGNAL), slice(_OF_SIGNAL, None)
    parts.append(Table(_COLUMNS[values], [own[values] for own in cells], title="Values"))
    told = [[own[0], *own[signal]] for own in cells]
    parts.append(Table([_COLUMNS[0], *_COLUMNS[signal]], told, title="Signal and length"))
    if correlations:
        columns = ["part", "other part", "Spearman", "95 % from", "to", "responses"]
        parts.append(Table(columns, _without_nan(correlations), title="Parts with each other"))
    return parts


def _without_nan(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[_plain(cell) for cell in row] for row in rows]


def _histogram(lab: Lab, part: Part) -> Chart:
    values = [value for value in lab.values[part.name].tolist() if not math.isnan(value)]
    trace = {"type": "histogram", "x": values, "nbinsx": _BINS, "name": part.name}
    layout = {"xaxis": {"title": {"text": part.name}}, "yaxis": {"title": {"text": "responses"}}}
    return Chart([trace], layout, title=f"{part.name}: values", height=220)


def _steps(lab: Lab) -> list[Text | Table | Chart]:
    steps = [one.step for one in lab.steps]
    means = [
        {"type": "scatter", "mode": "lines", "name": name, "x": steps,
         "y": [_plain(one.means[name]) for one in lab.steps]}
        for name in lab.values
    ]  # fmt: skip
    shares = [
        {"type": "scatter", "mode": "lines", "name": what, "x": steps,
         "y": [_plain(getattr(one, attribute)) for one in lab.steps]}
        for what, attribute in (
            ("responses without score", "missing"), ("prompts without signal", "no_signal"),
            ("rank correlation of score and length", "with_length"),
        )
    ]  # fmt: skip
    axis = {"xaxis": {"title": {"text": "step"}}}
    return [Chart(means, axis, title="Means by step"), Chart(shares, axis, title="Signal by step")]


def _odd(title: str, what: str, rows: Sequence[OddRow]) -> Table:
    cells: list[list[Any]] = [
        [one.value, one.response.place, one.detail, one.response.prompt, one.response.completion]
        for one in rows
    ]
    return Table([what, "row", "values", "prompt", "completion"], cells, title=title)


def _without(name: str, rows: Sequence[Any]) -> Table:
    shown = rows[:_ROWS_ON_PAGE]
    more = len(rows) - len(shown)
    return Table(
        ["row", "prompt", "completion"],
        [[one.place, one.prompt, one.completion] for one in shown],
        title=f"Without a value of {name}",
        note=f"{more:,} more are in the JSON report." if more else "",
    )


def _cells(part: Part) -> list[Any]:
    return [
        part.name,
        _percent(part.missing),
        *(_plain(float(value)) for value in part.distribution[:-1]),
        part.distribution.distinct,
        _number(part.within_groups, f"{part.within_groups:.1%}"),
        _percent(part.no_signal),
        _coefficient(part.with_length),
    ]


def _percent(share: Share) -> Number | None:
    low, high = share.interval
    return _number(share.value, f"{share.value:.1%} ({low:.1%} to {high:.1%})")


def _coefficient(found: Correlation) -> Number | None:
    interval = "" if math.isnan(found.low) else f" ({found.low:.2f} to {found.high:.2f})"
    return _number(found.value, f"{found.value:.2f}{interval}")


def _number(value: float, text: str) -> Number | None:
    return None if math.isnan(value) else Number(value, text)


def _told(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, Number):
        return cell.text
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _lines(lab: Lab) -> Iterator[str]:
    yield f"{lab.responses:,} responses to {lab.prompts:,} prompts; lengths in {lab.unit}"
    for part in lab.parts:
        yield ""
        yield part.name
        for column, cell in zip(_COLUMNS[1:], _cells(part)[1:], strict=True):
            yield f"  {column:<29} {_told(cell)}"
        for one in lab.without_value[part.name][:_ROWS_IN_TEXT] if part.name != SCORE else ():
            yield f"    no value: {one.place}: {_short(one.completion)}"
    yield from _block("parts with each other (Spearman)", [
        f"{one} and {two}: "
        f"{'one of them does not vary' if math.isnan(found.value) else _told(_coefficient(found))}"
        for (one, two), found in lab.correlations.items()
    ])  # fmt: skip
    yield from _block("true of every response", lab.facts)
    yield from _block(
        "failures", [f"{count} calls: {what}" for what, count in lab.failures.items()]
    )
    yield from _block("seconds, side by side as in a run", [
        f"{t.name}: call p50 {t.call_p50:.3g}, p99 {t.call_p99:.3g}; response p50 "
        f"{t.response_p50:.3g}, p99 {t.response_p99:.3g} ({t.calls} calls)"
        for t in lab.times
    ])  # fmt: skip
    yield from _block(_title("steps", lab.steps, _STEPS_IN_TEXT), [
        f"{one.step}: score {one.means[SCORE]:.4g}, without score {one.missing:.1%}, prompts "
        f"without signal {one.no_signal:.1%}, correlation with length "
        + ("undefined" if math.isnan(one.with_length) else f"{one.with_length:.2f}")
        for one in _spread(lab.steps)
    ])  # fmt: skip
    for title, rows in (
        ("slowest", lab.slowest),
        ("high score for a short response", lab.short_and_high),
        ("parts disagree", lab.disputed),
    ):
        shown = rows[:_ROWS_IN_TEXT]
        yield from _block(title, [
            f"{own.response.place}: {own.detail}: {_short(own.response.completion)}"
            for own in shown
        ])  # fmt: skip
    yield from ("", DISCLAIMER)


def _block(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", title, *(f"  {line}" for line in lines))


def _title(what: str, rows: Sequence[Any], most: int) -> str:
    return what if len(rows) <= most else f"{what}, {most} of {len(rows)} (--json has all)"


def _spread(steps: Sequence[Any]) -> Sequence[Any]:
    if len(steps) <= _STEPS_IN_TEXT:
        return steps
    last = len(steps) - 1
    return [steps[round(k * last / (_STEPS_IN_TEXT - 1))] for k in range(_STEPS_IN_TEXT)]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:80]}…"
