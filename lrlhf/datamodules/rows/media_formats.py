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
from lrlhf.datamodules.rows.parsed_rows import number_of, plain, structure_of, text_of, wrong_type

Pair = dict[str, Any]

_SIDES = {"a": "A", "b": "B", "same": "C", "invalid": None}
_RESPONSES = {"response1": "A", "response2": "B", "other": "C"}
_VOTES = {"leftvote": "A", "rightvote": "B", "tievote": "C", "bothbad_vote": "C"}
_CRITERIA = ("Preference", "Coherence", "Alignment")
_TIE = 1e-9
"""Scores that differ by less are equal: sums of equal shares differ by rounding."""


def hpdv3(row: Row, folder: Path) -> Iterable[Pair]:
    """HPDv3: ``path1`` was preferred to ``path2``."""
    yield {
        "prompt": text_of(row, "prompt"),
        "image_0": _media_of(row, folder, "path1"),
        "image_1": _media_of(row, folder, "path2"),
        "preference": "A",
        "source": "HPDv3",
        **_extras(
            row,
            "confidence",
            "choice_dist",
            model_chosen="model1",
            model_rejected="model2",
            preferred_path="path1",
            rejected_path="path2",
        ),
    }


def imagerewarddb(row: Row, folder: Path) -> Iterable[Pair]:
    """ImageRewardDB: every two images of a prompt whose ranks differ; rank 1 is best.

    Images of equal rank make no pair, neither do they count as a tie: the accuracies that are
    published for this set leave them out.
    """
    for one, other in combinations(row["images"], 2):
        if float(one["rank"]) == float(other["rank"]):
            continue
        chosen, rejected = sorted((one, other), key=lambda image: float(image["rank"]))
        yield {
            "prompt": chosen["prompt"],
            "image_0": _media_of(chosen, folder, "image_path"),
            "image_1": _media_of(rejected, folder, "image_path"),
            "preference": "A",
            "source": "ImageRewardDB",
            **_extras(
                chosen,
                "prompt_id",
                "classification",
                chosen_img="image_path",
                rank_chosen="rank",
                overall_rating_chosen="overall_rating",
            ),
            **_extras(
                rejected,
                rejected_img="image_path",
                rank_rejected="rank",
                overall_rating_rejected="overall_rating",
            ),
        }


def rapidata_t2v(row: Row, folder: Path) -> Iterable[Pair]:
    """Rapidata's text to video sets: scores for preference, coherence and alignment.

    ``coherence`` and ``alignment`` compare the two scores of that criterion. ``preference``
    compares the sums over all judged criteria, and ``preference_vote`` the scores of that
    criterion alone. A criterion with only one score is not judged.
    """
    scores = {
        criterion: (
            _number_or_none(row, f"weighted_results1_{criterion}"),
            _number_or_none(row, f"weighted_results2_{criterion}"),
        )
        for criterion in _CRITERIA
    }
    judged = [(a, b) for a, b in scores.values() if a is not None and b is not None]
    labels = {
        "preference": _compare(*map(math.fsum, zip(*judged, strict=True))) if judged else None,
        "preference_vote": _compare(*scores["Preference"]),
        "coherence": _compare(*scores["Coherence"]),
        "alignment": _compare(*scores["Alignment"]),
    }
    yield {
        "prompt": text_of(row, "prompt"),
        "video_0": _media_of(row, folder, "file_name1"),
        "video_1": _media_of(row, folder, "file_name2"),
        **_judged(labels),
        "source": "Rapidata",
        **_extras(row, "model1", "model2", "file_name1", "file_name2"),
    }


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
    return {
        "prompt": text_of(row, "prompt"),
        f"{kind}_0": _media_of(row, folder, "response1_path", "response1"),
        f"{kind}_1": _media_of(row, folder, "response2_path", "response2"),
        **_judged({"preference": _label_of(row, "criteria_preference", _RESPONSES)}),
        "source": "OmniRewardBench",
        **_extras(row, "id", "criteria", "criteria_preference", "model1", "model2"),
        **_extras(row, "response1_path", "response2_path"),
    }


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
    shown = [model for model in ratings if row.get(model) is not None]
    media = {model: _media_of(row, folder, model) for model in shown}
    means = {model: _mean(ratings[model], f"HumanRatings[{model}]") for model in shown}
    yield from _rated(text_of(row, "Prompt"), "image", media, means, **_extras(row, id="Index"))


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
    paths = {model: {"path": f"{model}/{row['id']}.mp4"} for model in ratings}
    media = {model: _media_of(paths, folder, model) for model in ratings}
    means = {model: _mean(ratings[model], f"models[{model}]") for model in ratings}
    yield from _rated(text_of(row, "prompt"), "video", media, means, id=row["id"])


def _voted(row: Row, folder: Path, kind: str) -> Pair:
    edited = "instruct_prompt" in row
    sides = {
        f"{kind}_{index}": _media_of(
            row, folder, f"{side}_output_{kind}" if edited else f"{side}_{kind}"
        )
        for index, side in enumerate(("left", "right"))
    }
    return {
        "prompt": text_of(row, "instruct_prompt" if edited else "prompt"),
        **({"image": _media_of(row, folder, "source_image")} if edited else {}),
        **sides,
        **_judged({"preference": _label_of(row, "vote_type", _VOTES)}),
        "source": "GenAI-Bench",
        **_extras(row, "vote_type", model_0="left_model", model_1="right_model"),
    }


def _rated(
    prompt: str,
    kind: str,
    media: Mapping[str, str | bytes],
    means: Mapping[str, float | None],
    **more: object,
) -> Iterable[Pair]:
    for one, other in combinations(media, 2):
        yield {
            "prompt": prompt,
            f"{kind}_0": media[one],
            f"{kind}_1": media[other],
            **_judged({"preference": _compare(means[one], means[other])}),
            "source": "GenAI-Bench",
            "model_0": one,
            "model_1": other,
            **more,
        }


def videodpo(row: Row, folder: Path) -> Iterable[Pair]:
    """VideoDPO's ``pair.json``: the video numbered ``video1`` was preferred to ``video2``.

    Number 2n is ``winvideos/<n>.mp4``, number 2n + 1 ``losevideos/<n>.mp4``, n with six digits.
    """
    captions = row.get("frame_caption")
    first = captions[0] if isinstance(captions, list) and captions else captions
    yield {
        "prompt": text_of({**row, "frame_caption": first} if captions else row, "frame_caption"),
        "video_0": _media_of({"video1": _numbered(row, "video1")}, folder, "video1"),
        "video_1": _media_of({"video2": _numbered(row, "video2")}, folder, "video2"),
        "preference": "A",
        "source": "VideoDPO",
        **_extras(row, "score"),
    }


def videogen_rewardbench(row: Row, folder: Path) -> Iterable[Pair]:
    """VideoGen-RewardBench: ``Overall`` is the preference, and ``VQ``, ``MQ``, ``TA`` have heads.

    They stand for visual quality, motion quality and text alignment; ``same`` is a tie, and
    ``invalid`` or nothing no judgement.
    """
    labels = {name: _label_of(row, name, _SIDES) for name in ("VQ", "MQ", "TA") if name in row}
    yield {
        "prompt": text_of(row, "prompt"),
        "video_0": _media_of(row, folder, "path_A"),
        "video_1": _media_of(row, folder, "path_B"),
        **_judged({"preference": _label_of(row, "Overall", _SIDES), **labels}),
        "source": "VideoGen-RewardBench",
        **_extras(row, "Overall", "A_model", "B_model", "path_A", "path_B"),
    }


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


def _judged(labels: Mapping[str, str | None]) -> dict[str, str]:
    return {name: label for name, label in labels.items() if label is not None}


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
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    word = value.strip().lower() if isinstance(value, str) else None
    if word is None or word not in labels:
        raise BadRow(
            "unknown label", f"column {column!r} is {value!r}, which is none of {', '.join(labels)}"
        )
    return labels[word]


def _number_or_none(row: Row, column: str) -> float | None:
    """Return a number; none where the column is absent, empty or NaN, as tables write it."""
    value = row.get(column)
    if isinstance(value, float) and math.isnan(value):
        return None
    return number_of(row, column)


def _compare(first: float | None, second: float | None) -> str | None:
    """Return the label of the higher score; none unless both are there."""
    if first is None or second is None:
        return None
    if abs(first - second) < _TIE:
        return "C"
    return "A" if first > second else "B"


def _extras(row: Row, *columns: str, **renamed: str) -> dict[str, Any]:
    """Return what a row tells besides, as JSON types.

    Args:
        row: The raw row.
        columns: Columns to keep, where they hold something.
        renamed: New names of further columns.
    """
    wanted = {**{column: column for column in columns}, **renamed}
    return {
        name: plain(row[column])
        for name, column in wanted.items()
        if row.get(column) is not None and row[column] != ""
    }
