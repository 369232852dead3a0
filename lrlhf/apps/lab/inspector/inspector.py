"""Reads runs, and writes the page of the inspector."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.page.page import packed, write_document
from lrlhf.apps.lab.run_files import RunFiles, complete_lines, plain_json, record_of, records
from lrlhf.media import MediaError, MediaOptions, read_image
from lrlhf.media.decode import small_jpeg

_STEP = re.compile(rb'\{"step": (\d+)[,}]')
_HAS_TOKENS = b'"tokens": {'
_GOLDEN = (math.sqrt(5) - 1) / 2


class Source(NamedTuple):
    """A file with a line per response."""

    run: int
    """Index of the run."""
    path: Path
    evaluation: bool


class Counted(NamedTuple):
    """A file, and what is known of its lines before they are read."""

    source: Source
    lines: dict[int, list[int]]
    """Line numbers, from 1, by step."""
    with_tokens: set[int]
    """Numbers of the lines that hold the values of their tokens."""


def counted(source: Source) -> Counted:
    """Look through a file without reading its texts."""
    lines: dict[int, list[int]] = defaultdict(list)
    with_tokens = set()
    for number, line in complete_lines(source.path):
        lines[_step_of(line, source.path, number)].append(number)
        # in a text the quotes would be escaped
        if _HAS_TOKENS in line:
            with_tokens.add(number)
    return Counted(source, dict(lines), with_tokens)


def chosen_lines(files: Sequence[Counted], count: int) -> list[set[int]]:
    """Choose ``count`` lines of all files, as many of every step as of every other.

    Steps with fewer lines give what they have. Of two evaluations with equally many lines the same
    are chosen, so that prompts can be followed; one line with token values is in every choice.
    """
    positions = [(index, step) for index, file in enumerate(files) for step in file.lines]
    shares = even_shares([len(files[index].lines[step]) for index, step in positions], count)
    chosen: list[set[int]] = [set() for _ in files]
    for (index, step), share in zip(positions, shares, strict=True):
        numbers, with_tokens = files[index].lines[step], files[index].with_tokens
        first = next((number for number in numbers if number in with_tokens), None)
        order = sorted(range(len(numbers)), key=lambda at: (numbers[at] != first, at * _GOLDEN % 1))
        chosen[index].update(numbers[at] for at in order[:share])
    return chosen


def even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split ``total`` evenly over parts of these sizes, none of which gives more than it has.

    Fewer than there are parts are taken at even distances.
    """
    level = _level(sizes, total)
    shares, exact, assigned = [], 0.0, 0
    for size in sizes:
        exact += min(size, level)
        share = min(size, math.floor(exact + 1e-6) - assigned)
        shares.append(share)
        assigned += share
    return shares


def _level(sizes: Sequence[int], total: int) -> float:
    """Return how much each part gives at most, so that all together give ``total``."""
    left: float = total
    for done, size in enumerate(sorted(sizes)):
        level = left / (len(sizes) - done)
        if size >= level:
            return level
        left -= size
    return math.inf


def read_chosen(file: Counted, chosen: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the records of chosen lines.

    Raises:
        ValueError: A line is no JSON object; names file and line.
    """
    for number, line in complete_lines(file.source.path):
        if number in chosen:
            yield record_of(line, file.source.path, number)


def _step_of(line: bytes, path: Path, number: int) -> int:
    if match := _STEP.match(line):
        return int(match[1])
    step = record_of(line, path, number).get("step", 0)
    if not isinstance(step, int):
        raise ValueError(f"{path}, line {number}: step is {json.dumps(step)}, no whole number")
    return step


_DIGITS = 6
NOTHING = -1
"""In place of the number of a text."""


class Texts:
    """Texts of which each stands once; columns hold their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def all(self) -> list[str]:
        """The texts in the order of their numbers."""
        return list(self._numbers)

    def number(self, text: Any) -> int:
        """Return the number of a text; of None: `NOTHING`."""
        if text is None:
            return NOTHING
        return self._numbers.setdefault(str(text), len(self._numbers))

    def json_number(self, value: Any) -> int:
        """Return the number of a value as JSON; of one that is empty: `NOTHING`."""
        return (
            NOTHING if value in (None, "", [], {}) else self.number(json.dumps(plain_json(value)))
        )


def short_number(value: Any) -> float | int | None:
    """Return a number with six digits; None of what is no number, or not finite."""
    if isinstance(value, bool | int):
        return int(value)
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


_BINS = 10
_OWN = {
    *("step", "set", "dataloader", "source", "row", "prompt", "candidate0", "candidate1"),
    *("labels", "scores0", "scores1", "margins", "info", "media"),
}


class LabelledMargin(NamedTuple):
    """What one head made of one pair that people have judged."""

    margin: float
    """Score of candidate 0 less that of candidate 1."""
    label: float
    """1: candidate 0 is better, -1: candidate 1."""
    length: int | None
    """Characters of candidate 0 less those of candidate 1; None: there is no text."""

    @property
    def signed(self) -> float:
        """By how much the better candidate won."""
        return self.margin * self.label


def labelled_pairs(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, LabelledMargin]]]:
    """Yield the pairs of an evaluation, and by head those that are labelled and not equal.

    Raises:
        ValueError: A line is no pair; names file and line.
    """
    for number, record in enumerate(records(path), start=1):
        margins, labels = record.get("margins"), record.get("labels")
        if not isinstance(margins, dict) or not isinstance(labels, dict):
            raise ValueError(f"{path}, line {number}: a pair needs margins and labels by head")
        first, second = record.get("candidate0"), record.get("candidate1")
        length = None
        if isinstance(first, str) and isinstance(second, str):
            length = len(first) - len(second)
        margins_of = {
            head: LabelledMargin(margin, labels[head], length)
            for head, value in margins.items()
            if (margin := short_number(value)) is not None and labels.get(head) in (1, -1)
        }
        yield record, margins_of


def page_of(path: Path, count: int, texts: Texts) -> list[dict[str, Any]]:
    """Return an evaluation as the page reads it, each validation set by itself.

    Args:
        path: Its file.
        count: Pairs to show at most, as many of each set as of every other; of a set that has
            more, half are the worst mistakes, and the others are taken at even distances. The
            statistics are of all pairs.
        texts: Takes the texts.

    Raises:
        ValueError: A line is no pair; names file and line.
    """
    margins: dict[str, dict[str, list[LabelledMargin]]] = {}
    worst: dict[str, list[float]] = {}
    for record, by_head in labelled_pairs(path):
        name = _set_of(record)
        least = min((pair.signed for pair in by_head.values()), default=math.inf)
        worst.setdefault(name, []).append(least)
        heads = margins.setdefault(name, {})
        for head, pair in by_head.items():
            heads.setdefault(head, []).append(pair)
    shares = even_shares([len(own) for own in worst.values()], count)
    chosen = {
        name: _chosen(own, share) for (name, own), share in zip(worst.items(), shares, strict=True)
    }
    shown: dict[str, list[dict[str, Any]]] = {name: [] for name in worst}
    numbers: Counter[str] = Counter()
    for record, _ in labelled_pairs(path):
        name = _set_of(record)
        if numbers[name] in chosen[name]:
            shown[name].append(_row(record, texts))
        numbers[name] += 1
    return [
        {
            "set": name,
            "total": len(worst[name]),
            "pairs": shown[name],
            "heads": {head: head_statistics(pairs) for head, pairs in margins[name].items()},
        }
        for name in worst
    ]


def _set_of(record: Mapping[str, Any]) -> str:
    return str(record.get("set", record.get("dataloader", "")))


def head_statistics(pairs: Sequence[LabelledMargin]) -> dict[str, Any]:
    """Return what the labelled pairs say of a head.

    ``accuracy``: the share of pairs in which the better candidate has the higher score, where equal
    scores count half, here and below. ``calibration``: for ten ranges of the predicted
    probability, sigmoid(|margin|) in [0.5, 1], that the candidate with the higher score is better:
    pairs, mean prediction, and share in which it is. ``calibration_error``: the mean distance of
    the two, weighted by pairs. ``length``: shares of pairs in which model and people prefer the
    longer text, and the correlation of margin and difference in length.
    """
    bins: list[list[LabelledMargin]] = [[] for _ in range(_BINS)]
    for pair in pairs:
        bin_index = int((_sigmoid(abs(pair.margin)) - 0.5) * 2 * _BINS)
        bins[min(bin_index, _BINS - 1)].append(pair)
    calibration = [
        {
            "pairs": len(part),
            "predicted": statistics.fmean(_sigmoid(abs(pair.margin)) for pair in part),
            "right": _share_won(pair.signed for pair in part),
        }
        for part in bins
        if part
    ]
    gaps = (entry["pairs"] * abs(entry["predicted"] - entry["right"]) for entry in calibration)
    return {
        "pairs": len(pairs),
        "accuracy": _share_won(pair.signed for pair in pairs),
        "calibration": calibration,
        "calibration_error": sum(gaps) / len(pairs),
        "length": _length_bias(pairs),
    }


def _length_bias(pairs: Sequence[LabelledMargin]) -> dict[str, Any] | None:
    with_length = [(pair, pair.length) for pair in pairs if pair.length]
    if not with_length:
        return None
    margins = [pair.margin for pair, _ in with_length]
    lengths = [length for _, length in with_length]
    varied = min(len(set(margins)), len(set(lengths))) > 1
    return {
        "pairs": len(with_length),
        "model_prefers_longer": _share_won(pair.margin * length for pair, length in with_length),
        "people_prefer_longer": _share_won(pair.label * length for pair, length in with_length),
        "correlation": statistics.correlation(margins, lengths) if varied else None,
    }


def _chosen(worst: Sequence[float], count: int) -> set[int]:
    if len(worst) <= count:
        return set(range(len(worst)))
    order = sorted(range(len(worst)), key=worst.__getitem__)
    half, rest = order[: count // 2], sorted(order[count // 2 :])
    even = count - len(half)
    return {*half, *(rest[index * len(rest) // even] for index in range(even))}


def _row(record: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    def numbers(values: Any) -> dict[str, Any]:
        return {head: short_number(value) for head, value in (values or {}).items()}

    more = {key: value for key, value in record.items() if key not in _OWN}
    return {
        **{key: texts.number(record.get(key)) for key in ("prompt", "candidate0", "candidate1")},
        **{key: numbers(record.get(key)) for key in ("labels", "scores0", "scores1", "margins")},
        "place": texts.number(_place(record)),
        "media": texts.json_number(record.get("media")),
        "more": texts.json_number({**more, **(record.get("info") or {})}),
    }


def _place(record: Mapping[str, Any]) -> str | None:
    return f"{record['source']}:{record.get('row')}" if record.get("source") else None


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def _share_won(gaps: Iterable[float]) -> float:
    return statistics.fmean(0.5 if gap == 0 else float(gap > 0) for gap in gaps)


_NUMBERS = ("step", "score", "advantage", "length", "group", "rank", "row")
_TEXTS = ("prompt", "completion", "finish_reason", "source")
_LEFT_OUT = {
    *("token_ids", "given_tokens", "tokens", "rewards", "media", "pictures"),
    *(*_NUMBERS, *_TEXTS),
}
"""What has a place of its own, and ids, which say nothing to people."""


class Responses:
    """Gathers responses in columns of the same length.

    Args:
        texts: Takes the texts.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self.size = 0
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("run", "evaluation", "media", *_NUMBERS, *_TEXTS)
        }
        self._rewards: dict[str, list[Any]] = {}
        self._more: dict[str, list[int]] = {}
        self._tokens: dict[int, dict[str, list[Any]]] = {}

    def add(self, source: Source, record: Mapping[str, Any]) -> None:
        """Add a line of ``rollouts.jsonl`` or of an evaluation."""
        columns, texts = self._columns, self._texts
        columns["run"].append(source.run)
        columns["evaluation"].append(int(source.evaluation))
        columns["media"].append(texts.json_number(record.get("media")))
        for name in _NUMBERS:
            columns[name].append(short_number(record.get(name)))
        for name in _TEXTS:
            columns[name].append(texts.number(record.get(name)))
        rewards = record.get("rewards")
        parts = rewards.items() if isinstance(rewards, Mapping) else ()
        self._fill(self._rewards, ((name, short_number(value)) for name, value in parts), None)
        more = ((key, value) for key, value in record.items() if key not in _LEFT_OUT)
        numbers = ((key, texts.json_number(value)) for key, value in more)
        self._fill(self._more, numbers, NOTHING)
        if _are_tokens(tokens := record.get("tokens")):
            self._tokens[self.size] = plain_json(tokens)
        self.size += 1

    def _fill(
        self, columns: dict[str, list[Any]], cells: Iterable[tuple[str, Any]], missing: Any
    ) -> None:
        """Add a row of columns of which any may be missing, and of which there may be new ones."""
        for name, cell in cells:
            columns.setdefault(name, [missing] * self.size).append(cell)
        for column in columns.values():
            column.extend([missing] * (self.size + 1 - len(column)))

    def page_data(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "columns": self._columns,
            "rewards": self._rewards,
            "more": self._more,
            "tokens": self._tokens,
        }


def _are_tokens(tokens: Any) -> bool:
    """Tell whether these are lists with an entry per token, as `RolloutLog` writes them."""
    if not isinstance(tokens, Mapping) or not isinstance(tokens.get("texts"), list):
        return False
    return all(
        isinstance(column, list) and len(column) == len(tokens["texts"])
        for column in tokens.values()
    )


_SIDE = 384
_OPTIONS = MediaOptions(max_pixels=4 * _SIDE * _SIDE)


class Thumbnails:
    """Makes data URIs of image files until they take so many bytes.

    A record may have been written by somebody else, and a page is passed on: an image is embedded
    only where its file, symbolic links followed, lies in one of the folders.

    Args:
        max_bytes: Of all of them.
        folders: Of the runs, and of the files of their data.
    """

    def __init__(self, max_bytes: int, folders: Iterable[Path]) -> None:
        self._left = max_bytes
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self.uris: dict[str, str] = {}
        """By the name of the image in the records."""
        self.left_out = 0
        """Images that are files, and had no room."""
        self.outside = 0
        """Files that lie in none of the folders."""
        self._seen: set[str] = set()

    def add(self, media: Iterable[object]) -> None:
        """Add what names files of images; other names are shown as they are."""
        for name in media:
            if isinstance(name, str) and name not in self._seen:
                self._add(name, self._thumbnail(name))

    def add_recorded(self, pictures: object) -> None:
        """Add images that a record holds itself, as ``data:`` URIs by name."""
        for name, value in pictures.items() if isinstance(pictures, Mapping) else ():
            if name not in self._seen and str(value).startswith("data:image/"):
                with suppress(MediaError):  # it was written by somebody else
                    self._add(str(name), small_jpeg(read_image(str(value), _OPTIONS), _SIDE))

    def _add(self, name: str, uri: str | None) -> None:
        self._seen.add(name)
        if uri is not None and len(uri) > self._left:
            self.left_out += 1
        elif uri is not None:
            self._left -= len(uri)
            self.uris[name] = uri

    def add_json(self, media: str) -> None:
        """The same of a list of names as JSON."""
        names = json.loads(media)
        self.add(names if isinstance(names, list) else ())

    def _thumbnail(self, name: str) -> str | None:
        """Return an image file as a small JPEG; None: the name is that of none."""
        try:
            target = Path(os.path.realpath(name))
            if not target.is_file():
                return None
        except (OSError, ValueError):  # no name of a file
            return None
        if not any(target.is_relative_to(folder) for folder in self._folders):
            self.outside += 1
            return None
        try:
            return small_jpeg(read_image(target, _OPTIONS), _SIDE)
        except MediaError:
            return None  # a video, a damaged file: the page shows the name


_IMAGE_BYTES = 4_000_000
_POINTS = 2_000


class RunSources(NamedTuple):
    """Where the parts of a run are."""

    files: RunFiles
    responses: list[Source]
    pairs: dict[int, Path]
    """Evaluations of a reward model by step."""
    unknown: list[Path]
    """Evaluations whose lines are neither responses nor pairs."""


def run_sources(run: RunFiles, index: int) -> RunSources:
    """Look which files a run has.

    Args:
        run: The run.
        index: Its number in the page.

    Raises:
        ValueError: The first line of an evaluation cannot be read; names it.
    """
    responses = [Source(index, path, evaluation=False) for path in run.response_files]
    pairs: dict[int, Path] = {}
    unknown: list[Path] = []
    for step, path in run.evaluations.items():
        first = next(records(path), {})
        if "margins" in first:
            pairs[step] = path
        elif "completion" in first:
            responses.append(Source(index, path, evaluation=True))
        elif first:
            unknown.append(path)
    return RunSources(run, responses, pairs, unknown)


def page_data(
    runs: Sequence[RunSources],
    names: Sequence[str],
    files: Sequence[Counted],
    count: int,
    media_root: str | Path | None = None,
) -> dict[str, Any]:
    """Return what the page reads, in JSON types.

    Args:
        runs: The runs.
        names: What the page calls them.
        files: Their files of responses.
        count: Responses, and pairs, at most.
        media_root: See `write_inspector`.

    Raises:
        ValueError: A line of a file cannot be read; names file and line.
    """
    texts = Texts()
    responses = Responses(texts)
    recorded: list[object] = []
    for file, chosen in zip(files, chosen_lines(files, count), strict=True):
        for record in read_chosen(file, chosen):
            responses.add(file.source, record)
            recorded.append(record.get("pictures"))
    evaluations = _evaluations(runs, count, texts)
    columns = responses.page_data()
    roots = [folder for run in runs for folder in (run.files.folder, *run.files.media)]
    if media_root is not None:
        roots.append(Path(media_root))
    thumbnails = Thumbnails(_IMAGE_BYTES, roots)
    for pictures in recorded:
        thumbnails.add_recorded(pictures)
    of_pairs = (pair["media"] for evaluation in evaluations for pair in evaluation["pairs"])
    for number in dict.fromkeys((*columns["columns"]["media"], *of_pairs)):
        if number != NOTHING:
            thumbnails.add_json(texts.all[number])
    curves = [_curves(run.files) for run in runs]
    total = sum(len(numbers) for file in files for numbers in file.lines.values())
    outside = (
        f"{thumbnails.outside} image files lie neither in the folder of a run nor in its "
        "media.root below the working folder, and are named only; --media_root DIR embeds those "
        "in DIR."
    )
    points = max(points for _, points in curves)
    every = -(-points // _POINTS)
    thinned = f"Curves have up to {points:,} points, of which the page shows one in {every}."
    return {
        "runs": [
            {"name": name, "folder": str(run.files.folder), "curves": shown}
            for name, run, (shown, _) in zip(names, runs, curves, strict=True)
        ],
        "notes": [
            *_left_out("responses", responses.size, total, "each step"),
            *_left_out(
                "pairs",
                sum(len(evaluation["pairs"]) for evaluation in evaluations),
                sum(evaluation["total"] for evaluation in evaluations),
                "each evaluation, and half of them its worst mistakes; the charts count all",
            ),
            *_left_out("images", len(thumbnails.uris), len(thumbnails.uris) + thumbnails.left_out),
            *([outside] if thumbnails.outside else []),
            *([thinned] if every > 1 else []),
            *(f"{path} holds neither responses nor pairs." for run in runs for path in run.unknown),
        ],
        "texts": texts.all,
        "responses": columns,
        "evaluations": evaluations,
        "images": thumbnails.uris,
    }


def _evaluations(runs: Sequence[RunSources], count: int, texts: Texts) -> list[dict[str, Any]]:
    """Return the evaluations of reward models by validation set, each with a share of the pairs."""
    positions = [
        (index, step, path) for index, run in enumerate(runs) for step, path in run.pairs.items()
    ]
    each = max(1, count // max(1, len(positions)))
    return [
        {"run": index, "step": step, **of_set}
        for index, step, path in positions
        for of_set in page_of(path, each, texts)
    ]


def _curves(run: RunFiles) -> tuple[dict[str, Any], int]:
    """Return steps and values by metric, thinned out, and the points of the longest one."""
    curves = {name: curve for name, curve in run.curves().items() if name != "epoch"}
    longest = max(map(len, curves.values()), default=0)
    shown = {}
    for name, curve in curves.items():
        steps = sorted(curve)
        # counted from the end: the last value is always there
        thinned = steps[:: -max(1, -(-len(steps) // _POINTS))][::-1]
        shown[name] = {"steps": thinned, "values": [short_number(curve[step]) for step in thinned]}
    return shown, longest


def _left_out(what: str, shown: int, total: int, of_each: str = "") -> Iterator[str]:
    if shown < total:
        note = f"{shown:,} of {total:,} {what} are in this page"
        yield f"{note}, evenly many of {of_each}." if of_each else f"{note}."


_PACKAGE = "lrlhf.apps.lab.inspector"
_RESPONSES = 10_000
_DATA_BYTES = 17_000_000
"""Of data in a page of 20 MB, in which plotly takes two."""
_SCRIPTS = (
    *("elements", "data", "texts", "curves", "filters", "response"),
    *("responses", "diff", "prompts", "pairs", "main"),
)


def write_inspector(
    runs: Sequence[str | Path],
    output: str | Path,
    *,
    max_responses: int | None = None,
    media_root: str | Path | None = None,
) -> str:
    """Write a page with the curves, responses and judged pairs of runs.

    Args:
        runs: Their folders.
        output: The ``.html`` file; it appears complete or not at all.
        max_responses: Responses, and pairs, in the page at most. None: 10,000, or as many as a page
            of 20 MB holds. What is left out is left out evenly over the steps, and the page says
            how much that is.
        media_root: Folder whose images the page may embed. None: the folders of the runs, and
            those that their configs name (``media.root``) below the working folder.

    Returns:
        What was written, for people.

    Raises:
        FileNotFoundError: A folder is missing, or is not that of a run.
        ValueError: A run is named twice, or a line of a file cannot be read; names file and line.
        ImportError: plotly is not installed.
    """
    names = _names([Path(run) for run in runs])
    read = [run_sources(RunFiles(run), index) for index, run in enumerate(runs)]
    files = [counted(source) for run in read for source in run.responses]
    count = max_responses or _RESPONSES
    while True:
        data = page_data(read, names, files, count, media_root)
        content = packed(data)
        if max_responses is not None or len(content) <= _DATA_BYTES or count == 1:
            break
        pairs = sum(len(each["pairs"]) for each in data["evaluations"])
        shown = max(data["responses"]["size"], pairs) or count
        count = max(1, int(min(count, shown) * 0.9 * _DATA_BYTES / len(content)))
    path = write_document(
        output,
        _PACKAGE,
        "inspector.html.jinja",
        script=_script(),
        plotly=True,
        title=" · ".join(names),
        notes=data["notes"],
        data=content,
    )
    return "\n".join([f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", *data["notes"]])


def _names(runs: Sequence[Path]) -> list[str]:
    """Name runs after their folders, with as many parents as it takes to tell them apart."""
    resolved = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, resolved)) + 1):
        names = ["/".join(parts[-depth:]) for parts in resolved]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a run is named twice among {', '.join(map(str, runs))}: name each once")


@cache
def _script() -> str:
    """Return the scripts of the page as one, in a scope of its own."""
    folder = files(_PACKAGE).joinpath("templates")
    parts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return "\n".join(['(() => {\n"use strict";', *parts, "})();"])
