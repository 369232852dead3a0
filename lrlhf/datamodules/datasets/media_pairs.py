"""Pairs of generated images, videos or audio that people compared, from published data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lrlhf.datamodules.datasets.media_formats import (
    FileAndRow,
    Generic,
    MediaFormat,
    Pair,
    compared,
    numbered,
    ranked,
    rated,
    reasoned,
    rows_of_files,
)
from lrlhf.datamodules.loading.files import read_document
from lrlhf.datamodules.loading.sources import Row, Source
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, missing_column, nearest
from lrlhf.datamodules.rows.columns import number_of, text_of, wrong_type
from lrlhf.datamodules.rows.media_rows import KINDS

_OPPOSITE = {"A": "B", "B": "A", "leftvote": "rightvote", "rightvote": "leftvote"}
_COMPARED = {"a": "A", "b": "B", "c": "C"}
_LETTERS = {"a": "A", "b": "B", "same": "C", "invalid": None}
_RESPONSES = {"response1": "A", "response2": "B", "other": "C"}
_VOTES = {"leftvote": "A", "rightvote": "B", "tievote": "C", "bothbad_vote": "C"}


class MediaPairs(Source):
    """Pairs of generated images, videos or audio from a published preference data set.

    A row has ``prompt``, ``image_0`` and ``image_1``, ``video_0`` and ``video_1``, or ``audio_0``
    and ``audio_1`` (absolute path or bytes), ``preference`` and the set's further judgements
    (A: candidate 0 is better, B: candidate 1, C: equal; what was not judged has no column),
    ``source`` and what else the set tells. ``image`` is what both candidates started from, such as
    the first frame of a video.

    Where a set tells the better from the worse one, or names its candidates by model, which
    is candidate 0 follows from ``seed`` and the row's number: the same in every process and
    epoch, and either about half of the time.

    Args:
        format: ``hpdv3``, ``imagerewarddb``, ``rapidata_t2v``, ``rapidata_i2v``,
            ``imagegen_cot_reward`` (with ``reasoning``), ``omnireward_t2i``, ``omnireward_t2v``,
            ``omnireward_t2a``, ``genai_bench``, ``genai_bench_video``, ``videodpo``,
            ``videogen_rewardbench``, ``audio_alpaca``, or
            ``generic`` for rows that are pairs already.
        path: The set's file of rows, a folder or a pattern. For ``imagerewarddb`` a folder with
            its shards anywhere below it.
        seed: Another seed gives other orders.
        media_root: Folder that paths in the rows start from. By default the folder ``videos`` or
            ``Videos`` (rapidata) or ``media_data`` (omnireward) beside the file or one level up,
            the folder that holds ``images`` (imagerewarddb), else the folder of the file. Relative
            paths may not lead out of it; where it is given, absolute ones may not either.
    """

    def __init__(
        self, format: str, path: str, *, seed: int = 0, media_root: str | None = None
    ) -> None:
        if format not in FORMATS:
            raise BadDataError(
                f"there is no format {format!r} of media pairs{nearest(format, FORMATS)}; "
                f"there are {', '.join(FORMATS)}"
            )
        self._name = f"{format}:{path}"
        self._format = format
        self._path = Path(path).expanduser()
        self._seed = seed
        self._media_root = None if media_root is None else Path(media_root).expanduser().absolute()

    @property
    def name(self) -> str:
        return self._name

    def rows(self) -> Iterable[Row | BadRow]:
        known, empty = FORMATS[self._format], True
        for number, (file, row) in enumerate(known.rows(self._path)):
            try:
                if isinstance(row, BadRow):
                    raise row
                folder = self._media_root or known.folder(file)
                for index, pair in enumerate(known.pairs(row, folder, self._media_root)):
                    turned = known.random_order and is_exchanged(self._seed, number, index)
                    empty = False
                    yield exchanged(pair) if turned else pair
            except BadRow as problem:
                empty = False
                # the file, as the number of a pair does not tell it where a row makes several
                hint = f"see whether {file.name} is of the format {self._format!r}"
                detail = f"{problem.detail} (in {file.name})"
                yield BadRow(problem.reason, detail, remedy=problem.remedy or hint)
        if empty:
            raise BadDataError(
                f"{self.name}: no pair can be made of its rows, because there are none, or every "
                "candidate is alone with its prompt or as good as the others"
            )


def is_exchanged(seed: int, number: int, index: int = 0) -> bool:
    """Decide whether the candidates of a pair change places, by nothing but these numbers.

    Args:
        seed: Of the source.
        number: Of the raw row.
        index: Of the pair among those of the row.
    """
    digest = hashlib.blake2b(f"{seed}:{number}:{index}".encode(), digest_size=1).digest()
    return digest[0] % 2 == 1


def exchanged(pair: Mapping[str, Any]) -> Pair:
    """Let the candidates of a pair change places, with all that the row says of them."""
    other = {f"{name}_0": f"{name}_1" for name in (*KINDS, "model")}
    other |= {second: first for first, second in other.items()}
    turned = {other.get(column, column): value for column, value in pair.items()}
    for column in {"preference", "vote_type"} & turned.keys():
        turned[column] = _OPPOSITE.get(turned[column], turned[column])
    return turned


def _rows_with_ids(path: Path) -> Iterator[FileAndRow]:
    """Read as `rows_of_files`, and also a .json that maps ids to rows; they get the id."""
    file = path / "genai_video.json" if (path / "genai_video.json").is_file() else path
    samples: object = None
    if file.suffix.lower() == ".json":
        with suppress(BadDataError):  # told by what reads rows
            samples = read_document(file)
    if not isinstance(samples, dict):
        yield from rows_of_files(file)
        return
    for key, row in samples.items():
        known = isinstance(row, dict)
        yield file, {**row, "id": key} if known else wrong_type(key, "a row", row)


def _images_by_prompt(path: Path) -> Iterator[FileAndRow]:
    """Read rows about single images, and gather those of each prompt in ``images``.

    Args:
        path: A folder with shards such as ``train_1/train_1.json`` anywhere below it, or a file.
    """
    shards = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not shards:
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise BadDataError(
            f"the folder {str(path)!r} holds no shard such as train_1/train_1.json, but {held}; "
            "unpack the set's archives there, or give the folder with the shards"
        )
    prompts: dict[str, tuple[Path, list[Row]]] = {}
    for file, row in (found for shard in shards for found in rows_of_files(shard)):
        try:
            if isinstance(row, BadRow):
                raise row
            text_of(row, "prompt")
            text_of(row, "image_path")
            if row.get("prompt_id") is None:
                raise missing_column("prompt_id", row)
            if isinstance(row["prompt_id"], list | dict):
                raise wrong_type("prompt_id", "a text or number", row["prompt_id"])
            if number_of(row, "rank") is None:
                raise BadRow("no rank", "column 'rank' is missing or empty")
        except BadRow as problem:
            yield file, problem
        else:
            prompts.setdefault(str(row["prompt_id"]), (file, []))[1].append(row)
    for file, images in prompts.values():
        yield file, {"images": images}


def _folder_of_images(file: Path) -> Path:
    """Return the folder that holds ``images``, with which the paths in the shards begin."""
    parents = file.absolute().parents
    return next((above.parent for above in parents if above.name == "images"), file.parent)


def _beside_or_above(*names: str) -> Callable[[Path], Path]:
    """Return where a folder of one of these names is: beside the file of rows or one level up.

    Where there is none, paths start from the first name one level up, the layout on the hub.
    """

    def folder(file: Path) -> Path:
        parent = file.absolute().parent
        candidates = [base / name for base in (parent.parent, parent) for name in names]
        return next((found for found in candidates if found.is_dir()), candidates[0])

    return folder


def _rapidata(start: str | None) -> MediaFormat:
    heads = ("preference", "preference_vote", "coherence", "alignment")
    return MediaFormat(
        source="Rapidata",
        kind="video",
        candidates=(("file_name1",), ("file_name2",)),
        start=start,
        labels={head: head for head in heads},
        words=_COMPARED,
        kept=("model1", "model2", "file_name1", "file_name2"),
        expand=compared,
        folder=_beside_or_above("videos", "Videos"),
    )


def _omnireward(kind: str) -> MediaFormat:
    return MediaFormat(
        source="OmniRewardBench",
        kind=kind,
        candidates=(("response1_path", "response1"), ("response2_path", "response2")),
        labels={"preference": "criteria_preference"},
        words=_RESPONSES,
        # the same responses may be judged the other way round under other criteria
        kept=(
            *("id", "criteria", "criteria_preference", "model1", "model2"),
            *("response1_path", "response2_path"),
        ),
        folder=_beside_or_above("media_data"),
    )


def _genai_bench(kind: str) -> MediaFormat:
    return MediaFormat(
        source="GenAI-Bench",
        kind=kind,
        candidates=(
            (f"left_output_{kind}", f"left_{kind}"),
            (f"right_output_{kind}", f"right_{kind}"),
        ),
        prompt=("instruct_prompt", "prompt"),  # the first where images are edited
        start="source_image",
        labels={"preference": "vote_type"},
        words=_VOTES,
        kept=("id", "vote_type"),
        renamed={"model_0": "left_model", "model_1": "right_model"},
        expand=rated,
        rows=_rows_with_ids if kind == "video" else rows_of_files,
        random_order=True,
    )


FORMATS: Mapping[str, MediaFormat] = {
    "hpdv3": MediaFormat(
        source="HPDv3",
        kind="image",
        candidates=(("path1",), ("path2",)),
        kept=("confidence", "choice_dist"),
        renamed={
            "model_chosen": "model1",
            "model_rejected": "model2",
            "preferred_path": "path1",
            "rejected_path": "path2",
        },
        random_order=True,
    ),
    "imagerewarddb": MediaFormat(
        source="ImageRewardDB",
        kind="image",
        candidates=(("image_path_chosen",), ("image_path_rejected",)),
        kept=(
            "prompt_id",
            *(
                f"{column}_{side}"
                for side in ("chosen", "rejected")
                for column in ("rank", "overall_rating")
            ),
        ),
        renamed={
            "classification": "classification_chosen",
            "chosen_img": "image_path_chosen",
            "rejected_img": "image_path_rejected",
        },
        expand=ranked,
        rows=_images_by_prompt,
        folder=_folder_of_images,
        random_order=True,
    ),
    "imagegen_cot_reward": MediaFormat(
        source="ImageGen-CoT-Reward",
        kind="image",
        candidates=(("path0",), ("path1",)),
        labels={"preference": "verdict"},
        words={"a": "A", "b": "B", "tie": "C"},
        # it names the candidates by their places, which therefore stay
        kept=("reasoning",),
        expand=reasoned,
    ),
    "rapidata_t2v": _rapidata(None),
    "rapidata_i2v": _rapidata("prompt_asset"),
    "omnireward_t2i": _omnireward("image"),
    "omnireward_t2v": _omnireward("video"),
    "omnireward_t2a": _omnireward("audio"),
    "genai_bench": _genai_bench("image"),
    "genai_bench_video": _genai_bench("video"),
    "videodpo": MediaFormat(
        source="VideoDPO",
        kind="video",
        candidates=(("video1",), ("video2",)),
        prompt=("frame_caption",),
        kept=("score",),
        expand=numbered,
        random_order=True,
    ),
    "videogen_rewardbench": MediaFormat(
        source="VideoGen-RewardBench",
        kind="video",
        candidates=(("path_A",), ("path_B",)),
        labels={"preference": "Overall", "VQ": "VQ", "MQ": "MQ", "TA": "TA"},
        words=_LETTERS,
        kept=("Overall", "A_model", "B_model", "path_A", "path_B"),
    ),
    "audio_alpaca": MediaFormat(
        source="Audio-Alpaca",
        kind="audio",
        candidates=(("chosen",), ("rejected",)),
        kept=("strategy",),
        random_order=True,
    ),
    "generic": Generic(source="", kind="", candidates=((), ())),
}
