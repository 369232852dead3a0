"""Published sets of judged images and videos: their own columns, read as pairs.

A pair is a row with ``prompt``, ``image_0`` and ``image_1`` (or ``video_0`` and ``video_1``), each
the bytes or the absolute path of a file, and a column per judgement: A (candidate 0 is better),
B or C (equal). What was not judged has no column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote, urlsplit

from lrlhf.datamodules.loading.path_safety import local_path
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.columns import (
    is_empty,
    number_of,
    plain,
    structure_of,
    text_of,
    wrong_type,
)

Pair = dict[str, Any]
Labels = Mapping[str, str | None]

_LETTERS = {"a": "A", "b": "B", "same": "C", "invalid": None}
_RESPONSES = {"response1": "A", "response2": "B", "other": "C"}
_VOTES = {"leftvote": "A", "rightvote": "B", "tievote": "C", "bothbad_vote": "C"}
_CRITERIA = ("Preference", "Coherence", "Alignment")
_TIE = 1e-9
"""Scores that differ by less are equal: sums of equal shares differ by rounding."""


def hpdv3(row: Row, folder: Path) -> Iterable[Pair]:
    """HPDv3: ``path1`` was preferred to ``path2``."""
    media = _media(row, folder, "image", "path1", "path2")
    kept = _kept(
        row,
        "confidence",
        "choice_dist",
        model_chosen="model1",
        model_rejected="model2",
        preferred_path="path1",
        rejected_path="path2",
    )
    yield _pair("HPDv3", text_of(row, "prompt"), media, {"preference": "A"}, kept)


def imagerewarddb(row: Row, folder: Path) -> Iterable[Pair]:
    """ImageRewardDB: every two images of a prompt whose ranks differ; rank 1 is best.

    Images of equal rank make no pair, neither do they count as a tie: the accuracies that are
    published for this set leave them out.
    """
    for both in combinations(row["images"], 2):
        chosen, rejected = sorted(both, key=lambda image: float(image["rank"]))
        if float(chosen["rank"]) == float(rejected["rank"]):
            continue
        kept = _kept(chosen, "prompt_id", "classification")
        for name, image in (("chosen", chosen), ("rejected", rejected)):
            columns = {f"{name}_img": "image_path", f"rank_{name}": "rank"}
            kept |= _kept(image, **columns, **{f"overall_rating_{name}": "overall_rating"})
        media = {
            f"image_{index}": _media_of(image, folder, "image_path")
            for index, image in enumerate((chosen, rejected))
        }
        yield _pair("ImageRewardDB", chosen["prompt"], media, {"preference": "A"}, kept)


def rapidata_t2v(row: Row, folder: Path) -> Iterable[Pair]:
    """Rapidata's text to video sets: scores for preference, coherence and alignment.

    ``coherence`` and ``alignment`` compare the two scores of that criterion. ``preference``
    compares the sums over all judged criteria, and ``preference_vote`` the scores of that
    criterion alone. A criterion with only one score is not judged.
    """
    columns = {name: [f"weighted_results{n}_{name}" for n in (1, 2)] for name in _CRITERIA}
    scores = {
        name: [None if is_empty(row.get(column)) else number_of(row, column) for column in both]
        for name, both in columns.items()
    }
    judged = [(a, b) for a, b in scores.values() if a is not None and b is not None]
    labels = {
        "preference": _compare(*map(math.fsum, zip(*judged, strict=True))) if judged else None,
        "preference_vote": _compare(*scores["Preference"]),
        "coherence": _compare(*scores["Coherence"]),
        "alignment": _compare(*scores["Alignment"]),
    }
    media = _media(row, folder, "video", "file_name1", "file_name2")
    kept = _kept(row, "model1", "model2", "file_name1", "file_name2")
    yield _pair("Rapidata", text_of(row, "prompt"), media, labels, kept)


def rapidata_i2v(row: Row, folder: Path) -> Iterable[Pair]:
    """Rapidata's image to video sets: as `rapidata_t2v`, with the first frame as ``image``."""
    image = _media_of(row, folder, "prompt_asset")
    for pair in rapidata_t2v(row, folder):
        yield {**pair, "image": image}


def omnireward_t2i(row: Row, folder: Path) -> Iterable[Pair]:
    """OmniRewardBench, text to image, see `_omnireward`."""
    yield _omnireward(row, folder, "image")


def omnireward_t2v(row: Row, folder: Path) -> Iterable[Pair]:
    """OmniRewardBench, text to video, see `_omnireward`."""
    yield _omnireward(row, folder, "video")


def _omnireward(row: Row, folder: Path, kind: str) -> Pair:
    """Read which response was preferred under the words in ``criteria``; ``other`` is a tie.

    Rows with the same two responses and other criteria may be judged the other way round, so
    ``criteria`` belongs into what the judge is told.
    """
    media = {
        f"{kind}_{index}": _media_of(row, folder, f"{response}_path", response)
        for index, response in enumerate(("response1", "response2"))
    }
    labels = {"preference": _label_of(row, "criteria_preference", _RESPONSES)}
    kept = _kept(row, "id", "criteria", "criteria_preference", "model1", "model2")
    kept |= _kept(row, "response1_path", "response2_path")
    return _pair("OmniRewardBench", text_of(row, "prompt"), media, labels, kept)


def genai_bench(row: Row, folder: Path) -> Iterable[Pair]:
    """Two sets of this name, told apart by their columns.

    TIGER-Lab/GenAI-Bench, image generation and editing: one pair per row and its ``vote_type``;
    ``tievote`` and ``bothbad_vote`` are ties. When editing, the prompt is the instruction and
    ``image`` what is to be edited. BaiqiL/GenAI-Bench: a column per model, all of them rated in
    ``HumanRatings``; every two models make a pair and the higher mean wins.
    """
    if "HumanRatings" not in row:
        yield _voted(row, folder, "image")
        return
    ratings = structure_of(row, "HumanRatings", dict) or {}
    media = {
        model: _media_of(row, folder, model) for model in ratings if row.get(model) is not None
    }
    means = {model: _mean(ratings[model], f"HumanRatings[{model}]") for model in media}
    yield from _rated(text_of(row, "Prompt"), "image", media, means, _kept(row, id="Index"))


def genai_bench_video(row: Row, folder: Path) -> Iterable[Pair]:
    """As `genai_bench`, of videos.

    TIGER-Lab/GenAI-Bench: its rows of the task ``video_generation``. ``genai_video.json`` of the
    other one maps ids to a prompt and each model's ratings; the video is at ``<model>/<id>.mp4``.
    """
    if "models" not in row:
        yield _voted(row, folder, "video")
        return
    if row.get("id") is None:
        raise missing_column("id", row)
    ratings = structure_of(row, "models", dict) or {}
    media = {model: _local(f"{model}/{row['id']}.mp4", folder, model) for model in ratings}
    means = {model: _mean(ratings[model], f"models[{model}]") for model in ratings}
    yield from _rated(text_of(row, "prompt"), "video", media, means, {"id": row["id"]})


def _voted(row: Row, folder: Path, kind: str) -> Pair:
    edited = "instruct_prompt" in row
    shown = f"output_{kind}" if edited else kind
    media = _media(row, folder, kind, f"left_{shown}", f"right_{shown}")
    if edited:
        media["image"] = _media_of(row, folder, "source_image")
    labels = {"preference": _label_of(row, "vote_type", _VOTES)}
    kept = _kept(row, "vote_type", model_0="left_model", model_1="right_model")
    prompt = text_of(row, "instruct_prompt" if edited else "prompt")
    return _pair("GenAI-Bench", prompt, media, labels, kept)


def _rated(
    prompt: str,
    kind: str,
    media: Mapping[str, str | bytes],
    means: Mapping[str, float | None],
    kept: Mapping[str, object],
) -> Iterable[Pair]:
    for one, other in combinations(media, 2):
        shown = {f"{kind}_0": media[one], f"{kind}_1": media[other]}
        labels = {"preference": _compare(means[one], means[other])}
        models = {"model_0": one, "model_1": other}
        yield _pair("GenAI-Bench", prompt, shown, labels, {**models, **kept})


def videodpo(row: Row, folder: Path) -> Iterable[Pair]:
    """VideoDPO's ``pair.json``: the video numbered ``video1`` was preferred to ``video2``.

    Number 2n is ``winvideos/<n>.mp4``, number 2n + 1 ``losevideos/<n>.mp4``, n with six digits.
    """
    captions = row.get("frame_caption")
    first = captions[0] if isinstance(captions, list) and captions else captions
    prompt = text_of({**row, "frame_caption": first} if captions else row, "frame_caption")
    files = {name: _numbered(row, name) for name in ("video1", "video2")}
    media = _media(files, folder, "video", "video1", "video2")
    yield _pair("VideoDPO", prompt, media, {"preference": "A"}, _kept(row, "score"))


def videogen_rewardbench(row: Row, folder: Path) -> Iterable[Pair]:
    """VideoGen-RewardBench: ``Overall`` is the preference, and ``VQ``, ``MQ``, ``TA`` have heads.

    They stand for visual quality, motion quality and text alignment; ``same`` is a tie, and
    ``invalid`` or nothing no judgement.
    """
    columns = {"preference": "Overall", "VQ": "VQ", "MQ": "MQ", "TA": "TA"}
    labels = {head: _label_of(row, column, _LETTERS) for head, column in columns.items()}
    media = _media(row, folder, "video", "path_A", "path_B")
    kept = _kept(row, "Overall", "A_model", "B_model", "path_A", "path_B")
    yield _pair("VideoGen-RewardBench", text_of(row, "prompt"), media, labels, kept)


def generic(row: Row, folder: Path) -> Iterable[Pair]:
    """Rows that are pairs already; paths become absolute and empty columns go, all else stays."""
    full = {column: value for column, value in row.items() if value is not None and value != ""}
    kinds = [kind for kind in ("image", "video") if {f"{kind}_0", f"{kind}_1"} & full.keys()]
    if len(kinds) > 1:
        raise BadRow(
            "two kinds of media",
            "it has columns of images and of videos to compare",
            remedy="give each row image_0 and image_1, or video_0 and video_1",
        )
    kind = kinds[0] if kinds else "image"
    columns = [f"{kind}_0", f"{kind}_1", *(["image"] if "image" in full else [])]
    media = {column: _media_of(full, folder, column) for column in columns}
    yield {**full, "prompt": text_of(row, "prompt"), **media}


def _pair(
    source: str,
    prompt: str,
    media: Mapping[str, str | bytes],
    labels: Labels,
    kept: Mapping[str, object],
) -> Pair:
    judged = {head: label for head, label in labels.items() if label is not None}
    return {"prompt": prompt, **media, **judged, "source": source, **kept}


def _kept(row: Row, *columns: str, **renamed: str) -> dict[str, Any]:
    """Return ``columns`` of a row, and others by new names, as JSON types, without empty ones."""
    wanted = {**{column: column for column in columns}, **renamed}
    return {
        name: plain(row[column])
        for name, column in wanted.items()
        if row.get(column) is not None and row[column] != ""
    }


def _mean(ratings: object, column: str) -> float | None:
    if ratings is None or ratings == []:
        return None
    if not isinstance(ratings, list):
        raise wrong_type(column, "a list of ratings", ratings)
    given = [number_of({column: rating}, column) for rating in ratings]
    numbers = [number for number in given if number is not None]
    return fmean(numbers) if numbers else None


def _numbered(row: Row, column: str) -> str | None:
    number = number_of(row, column)
    if number is None:
        return None
    if number < 0 or number != int(number):
        raise wrong_type(column, "the number of a video", row[column])
    half, lost = divmod(int(number), 2)
    return f"{'losevideos' if lost else 'winvideos'}/{half:06d}.mp4"


def _media(row: Row, folder: Path, kind: str, first: str, second: str) -> dict[str, str | bytes]:
    return {
        f"{kind}_{index}": _media_of(row, folder, column)
        for index, column in enumerate((first, second))
    }


def _media_of(row: Row, folder: Path, *columns: str) -> str | bytes:
    """Return the bytes in the first of ``columns`` that has some, else the first's local path.

    A column holds bytes, a path, or a mapping with ``bytes`` and ``path``.

    Args:
        row: The raw row.
        folder: What relative paths start from. An address stands for the file of its last name
            there, in the subfolder of its second last name where there is one.
        columns: Where the file may be; the first is the one to complain about.

    Raises:
        BadRow: None of the columns says where the file is, or it leads out of ``folder``.
    """
    given = {name: row[name] for name in columns if row.get(name) is not None and row[name] != ""}
    for value in given.values():
        content = value.get("bytes") if isinstance(value, Mapping) else value
        if isinstance(content, bytes) and content:
            return content
    for column, value in given.items():
        path = value.get("path") if isinstance(value, Mapping) else value
        if isinstance(path, str) and path:
            return _local(path, folder, column)
    if given:
        column = next(iter(given))
        raise wrong_type(column, "bytes or a path", given[column])
    if columns[0] in row:
        raise BadRow("no file", f"column {columns[0]!r} is empty")
    raise missing_column(columns[0], row)


def _local(path: str, folder: Path, column: str) -> str:
    if "://" not in path or path.startswith("file:"):
        return local_path(path, folder, root=None)
    address = urlsplit(path)
    *parents, name = unquote(address.path).split("/")
    if not name:
        raise wrong_type(column, "an address that ends in a file's name", path)
    inner = folder / parents[-1] if parents and parents[-1] not in {"", ".", ".."} else folder
    return local_path(name, inner if inner.is_dir() else folder, root=None)


def _label_of(row: Row, column: str, labels: Mapping[str, str | None]) -> str | None:
    """Translate the word in ``column``; nothing there, or no such column, is no judgement.

    Raises:
        BadRow: The word is none of those in ``labels``.
    """
    value = row.get(column)
    if is_empty(value):
        return None
    word = value.strip().lower() if isinstance(value, str) else None
    if word is None or word not in labels:
        raise BadRow(
            "unknown label", f"column {column!r} is {value!r}, which is none of {', '.join(labels)}"
        )
    return labels[word]


def _compare(first: float | None, second: float | None) -> str | None:
    """Return the label of the higher score; none unless both are there."""
    if first is None or second is None:
        return None
    if abs(first - second) < _TIE:
        return "C"
    return "A" if first > second else "B"
