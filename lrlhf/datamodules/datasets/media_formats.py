"""Published sets of judged images, videos and audio: in which columns each keeps its pairs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote, urlsplit

from lrlhf.datamodules.loading.path_safety import local_path
from lrlhf.datamodules.loading.sources import Row, nearest_path, resolve_source
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, missing_column
from lrlhf.datamodules.rows.chat import read_messages
from lrlhf.datamodules.rows.columns import (
    is_empty,
    number_of,
    structure_of,
    text_of,
    wrong_type,
)
from lrlhf.datamodules.rows.media_rows import KINDS, media_columns
from lrlhf.rewards.judge.verdicts import read_answer, reasoning_before_answer
from lrlhf.rollout.records import plain_json

Pair = dict[str, Any]
FileAndRow = tuple[Path, Row | BadRow]

_CRITERIA = ("Preference", "Coherence", "Alignment")
_CAPTION = re.compile(r"Text Caption:\s*(.+)")
_NO_NAMES = {"", ".", ".."}
_TIE = 1e-9
"""Scores that differ by less are equal: sums of equal shares differ by rounding."""


def rows_of_files(path: Path) -> Iterator[FileAndRow]:
    """Read the rows of a file, of the files of a folder, or of those that fit a pattern."""
    if not path.exists() and not any(character in str(path) for character in "*?["):
        raise BadDataError(f"there is no file or folder {str(path)!r}{nearest_path(path)}")
    for source in resolve_source(str(path)):
        empty = True
        for row in source:
            empty = False
            yield Path(source.name), row
        if empty:
            raise BadDataError(f"{source.name}: there are no rows in it")


def _folder_of_file(file: Path) -> Path:
    return file.parent


def _unchanged(row: Row) -> Iterable[Row]:
    return (row,)


@dataclass(frozen=True, kw_only=True)
class MediaFormat:
    """How one set is read; where several columns are named, the first that a row has counts.

    Args:
        source: What the pairs' column ``source`` says.
        kind: ``image``, ``video`` or ``audio``.
        candidates: Columns with the file of either candidate.
        prompt: Columns with the prompt.
        start: Column with the image that both candidates started from; a row must have it where
            it has the first column of ``prompt``.
        labels: Column of each judgement; None: candidate 0 was preferred.
        words: Labels for the words in those columns; None: no judgement.
        kept: Further columns of the pairs.
        renamed: More of them, from the name in the pairs to the column of the set.
        expand: Makes rows with these columns of one row of the set.
        rows: From what the user gave to the rows of the set, each with its file.
        folder: From the file of a row to the folder that its paths start from.
        random_order: Whether the seed decides which is candidate 0, as the set does not.
    """

    source: str
    kind: str
    candidates: tuple[tuple[str, ...], tuple[str, ...]]
    prompt: tuple[str, ...] = ("prompt",)
    start: str | None = None
    labels: Mapping[str, str] | None = None
    words: Mapping[str, str | None] | None = None
    kept: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None
    expand: Callable[[Row], Iterable[Row]] = _unchanged
    rows: Callable[[Path], Iterator[FileAndRow]] = rows_of_files
    folder: Callable[[Path], Path] = _folder_of_file
    random_order: bool = False

    def pairs(self, raw: Row, folder: Path, root: Path | None) -> Iterator[Pair]:
        """Read the pairs of one row of the set; ``folder`` and ``root`` as in `local_path`.

        Raises:
            BadRow: A column is missing, or holds something else.
        """
        for row in self.expand(raw):
            prompt = next((column for column in self.prompt if column in row), self.prompt[0])
            pair: Pair = {"prompt": text_of(row, prompt)}
            for index, columns in enumerate(self.candidates):
                pair[f"{self.kind}_{index}"] = media_of(row, columns, folder, root)
            if self.start is not None and self.prompt[0] in row:
                pair["image"] = media_of(row, (self.start,), folder, root)
            for head, column in (self.labels or {}).items():
                label = self._label(row, column)
                if label is not None:
                    pair[head] = label
            if self.labels is None:
                pair["preference"] = "A"
            kept = {name: name for name in self.kept} | dict(self.renamed or {})
            info = {
                name: plain_json(row[column])
                for name, column in kept.items()
                if not is_empty(row.get(column))
            }
            yield {**pair, "source": self.source, **info}

    def _label(self, row: Row, column: str) -> str | None:
        """Translate the word in ``column``; nothing there, or no such column, is no judgement."""
        value, words = row.get(column), self.words or {}
        if is_empty(value):
            return None
        word = value.strip().lower() if isinstance(value, str) else None
        if word is None or word not in words:
            raise BadRow(
                "unknown label",
                f"column {column!r} is {value!r}, which is none of {', '.join(words)}",
            )
        return words[word]


class Generic(MediaFormat):
    """Rows that are pairs already; paths become absolute and empty columns go, all else stays."""

    def pairs(self, raw: Row, folder: Path, root: Path | None) -> Iterator[Pair]:
        row = {column: value for column, value in raw.items() if value is not None and value != ""}
        kinds = [kind for kind in KINDS if {f"{kind}_0", f"{kind}_1"} & row.keys()]
        if len(kinds) > 1:
            raise BadRow(
                "two kinds of media",
                f"it has columns of {' and of '.join(f'{kind}s' for kind in kinds)} to compare",
                remedy="give each row image_0 and image_1, video_0 and video_1, or audio_0 and "
                "audio_1",
            )
        candidates = [f"{kind}_{index}" for kind in kinds or ["image"] for index in (0, 1)]
        media = {column: _held_or_named(row, column, folder, root) for column in candidates}
        others = {column for suffix in ("", "_0", "_1") for column in media_columns(suffix)}
        shown = {
            column: _all_media_of(row[column], column, folder, root)
            for column in row.keys() & others - media.keys()
        }
        yield {**row, "prompt": text_of(row, "prompt"), **media, **shown}


def _all_media_of(value: object, column: str, folder: Path, root: Path | None) -> Any:
    """Read a cell as `media_of`, also lists (of lists) of media."""
    if isinstance(value, list):
        return [_all_media_of(one, column, folder, root) for one in value]
    return _held_or_named({column: value}, column, folder, root)


def _held_or_named(row: Row, column: str, folder: Path, root: Path | None) -> Any:
    """Read a cell as `media_of`, or return samples and addresses that hold the file as they are."""
    value = row.get(column)
    samples = isinstance(value, Mapping) and value.get("array") is not None
    if samples or (isinstance(value, str) and value.startswith("data:")):
        return value
    return media_of(row, (column,), folder, root)


def media_of(row: Row, columns: Sequence[str], folder: Path, root: Path | None) -> str | bytes:
    """Return the bytes in the first of ``columns`` that has some, else the first's local path.

    A column holds bytes, a path, an address, or a mapping with ``bytes`` and ``path``. An address
    stands for the file of its last name in the folder of its second last name, if there is such a
    folder, else in ``folder``.

    Raises:
        BadRow: None of the columns says where the file is, or it leads outside, see `local_path`.
    """
    given = {name: row[name] for name in columns if row.get(name) is not None and row[name] != ""}
    for value in given.values():
        content = value.get("bytes") if isinstance(value, Mapping) else value
        if isinstance(content, bytes) and content:
            return content
    for column, value in given.items():
        path = value.get("path") if isinstance(value, Mapping) else value
        if isinstance(path, str) and path:
            local = _local(path, folder, column)
            return local if root is None else local_path(local, None, root=root)
    for column, value in given.items():
        raise wrong_type(column, "bytes or a path", value)
    if any(column in row for column in columns):
        raise BadRow("no file", f"column {columns[0]!r} is empty")
    raise missing_column(columns[0], row)


def _local(path: str, folder: Path, column: str) -> str:
    if "://" not in path or path.startswith("file:"):
        return local_path(path, folder, root=None)
    *parents, name = unquote(urlsplit(path).path).split("/")
    if name in _NO_NAMES:
        raise wrong_type(column, "an address that ends in a file's name", path)
    inner = folder / parents[-1] if parents and parents[-1] not in _NO_NAMES else folder
    # from the inner folder, which may be a link to another disk
    return local_path(name, inner if inner.is_dir() else folder, root=None)


def _better(first: float | None, second: float | None) -> str | None:
    """Return the label of the higher score; none unless both are there."""
    if first is None or second is None:
        return None
    if abs(first - second) < _TIE:
        return "C"
    return "A" if first > second else "B"


def compared(row: Row) -> Iterable[Row]:
    """Compare Rapidata's scores: of coherence and alignment, and for ``preference`` their sums.

    The sums are over all criteria that have both scores; ``preference_vote`` compares the scores
    of the criterion of that name alone.
    """
    scores = {
        name: [
            None if is_empty(row.get(column)) else number_of(row, column)
            for column in (f"weighted_results1_{name}", f"weighted_results2_{name}")
        ]
        for name in _CRITERIA
    }
    judged = [(a, b) for a, b in scores.values() if a is not None and b is not None]
    labels = {
        "preference": _better(*map(math.fsum, zip(*judged, strict=True))) if judged else None,
        "preference_vote": _better(*scores["Preference"]),
        "coherence": _better(*scores["Coherence"]),
        "alignment": _better(*scores["Alignment"]),
    }
    yield {**row, **labels}


def ranked(row: Row) -> Iterable[Row]:
    """Pair a prompt's images whose ranks differ; rank 1 is best.

    Images of equal rank make no pair, neither do they count as a tie: the accuracies that are
    published for this set leave them out.
    """
    for both in combinations(row["images"], 2):
        chosen, rejected = sorted(both, key=lambda image: float(image["rank"]))
        if float(chosen["rank"]) != float(rejected["rank"]):
            sides = (("chosen", chosen), ("rejected", rejected))
            own = {f"{key}_{side}": image[key] for side, image in sides for key in image}
            yield {**own, "prompt": chosen["prompt"], "prompt_id": chosen["prompt_id"]}


def rated(row: Row) -> Iterable[Row]:
    """Pair the models of a row with ratings, BaiqiL/GenAI-Bench; the higher mean gets the vote.

    The images are in a column per model; a video is at ``<model>/<id>.mp4``.
    """
    column = next((name for name in ("HumanRatings", "models") if name in row), None)
    if column is None:  # TIGER-Lab/GenAI-Bench: it has the votes
        yield row
        return
    kind = "video" if column == "models" else "image"
    if kind == "video" and row.get("id") is None:
        raise missing_column("id", row)
    ratings = structure_of(row, column, dict) or {}
    shown = {
        model: f"{model}/{row['id']}.mp4" if kind == "video" else row.get(model)
        for model in ratings
    }
    models = [model for model in ratings if shown[model] is not None]
    means = {model: _mean(ratings[model], f"{column}[{model}]") for model in models}
    votes = {"A": "leftvote", "B": "rightvote", "C": "tievote", None: None}
    for left, right in combinations(models, 2):
        yield {
            "prompt": row.get("Prompt", row.get("prompt")),
            f"left_{kind}": shown[left],
            f"right_{kind}": shown[right],
            "left_model": left,
            "right_model": right,
            "vote_type": votes[_better(means[left], means[right])],
            "id": row.get("Index", row.get("id")),
        }


def _mean(ratings: object, column: str) -> float | None:
    if not isinstance(ratings, list | None):
        raise wrong_type(column, "a list of ratings", ratings)
    given = [number_of({column: rating}, column) for rating in ratings or []]
    numbers = [number for number in given if number is not None]
    return fmean(numbers) if numbers else None


def reasoned(row: Row) -> Iterable[Row]:
    """Read ImageGen-CoT-Reward: a question, and a reply that reasons and gives a verdict.

    The prompt is what stands behind ``Text Caption:`` in the question, which must have it.
    """
    messages = read_messages(structure_of(row, "conversations", list), "conversations")
    question, reply = (str(messages[index].get("content") or "") for index in (0, -1))
    images = structure_of(row, "images", list)
    if images is None or len(images) != 2:
        raise wrong_type("images", "a list of two images", images)
    caption = _CAPTION.search(question)
    if caption is None:
        raise BadRow("no caption", f"its question has no line 'Text Caption: …': {question!r:.80}")
    yield {
        **row,
        "prompt": caption.group(1).strip(" *[]\"'"),
        "path0": images[0],
        "path1": images[1],
        "verdict": read_answer(reply) or reply[-80:],
        "reasoning": reasoning_before_answer(reply),
    }


def numbered(row: Row) -> Iterable[Row]:
    """Name VideoDPO's files: 2n is ``winvideos/<n>.mp4``, 2n + 1 ``losevideos/<n>.mp4``."""
    files: dict[str, str | None] = {}
    for column in ("video1", "video2"):
        number = number_of(row, column)
        if number is None or number < 0 or number != int(number):
            raise wrong_type(column, "the number of a video", row.get(column))
        half, lost = divmod(int(number), 2)
        files[column] = f"{'losevideos' if lost else 'winvideos'}/{half:06d}.mp4"
    captions = row.get("frame_caption")
    if isinstance(captions, list) and captions:
        row = {**row, "frame_caption": captions[0]}
    yield {**row, **files}
