"""Pairs of generated images or videos that people compared, from published data sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.datamodules.loading.files import read_rows_of_file
from lrlhf.datamodules.loading.path_safety import local_path
from lrlhf.datamodules.loading.sources import Row, Source, nearest_path, resolve_source
from lrlhf.datamodules.rows import media_formats
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, missing_column, nearest
from lrlhf.datamodules.rows.columns import number_of, text_of, wrong_type
from lrlhf.datamodules.rows.media_formats import Pair
from lrlhf.datamodules.rows.media_rows import KINDS

_OPPOSITE = {"A": "B", "B": "A", "C": "C"}


class MediaPairs(Source):
    """Pairs of generated images or videos from a published preference data set.

    A row has ``prompt``, ``image_0`` and ``image_1`` or ``video_0`` and ``video_1`` (absolute path
    or bytes), ``preference`` and the set's further judgements (A: candidate 0 is better, B:
    candidate 1, C: equal; what was not judged has no column), ``source`` and what else the set
    tells. ``image`` is what both candidates started from, such as the first frame of a video.

    Where a set tells the better from the worse one, or names its candidates by model, which
    is candidate 0 follows from ``seed`` and the row's number: the same in every process and
    epoch, and either about half of the time.

    Args:
        format: ``hpdv3``, ``imagerewarddb``, ``rapidata_t2v``, ``rapidata_i2v``,
            ``omnireward_t2i``, ``omnireward_t2v``, ``genai_bench``, ``genai_bench_video``,
            ``videodpo``, ``videogen_rewardbench``, or ``generic`` for rows that are pairs already.
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
                for index, pair in enumerate(known.pairs(row, folder)):
                    self._keep_in_root(pair)
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
                f"{self.name}: no pair can be made of its rows, because every candidate is alone "
                "with its prompt or as good as the others"
            )

    def _keep_in_root(self, pair: Pair) -> None:
        if self._media_root is not None:
            shown = (pair.get(f"{kind}{suffix}") for kind in KINDS for suffix in ("", "_0", "_1"))
            for path in (value for value in shown if isinstance(value, str)):
                local_path(path, None, root=self._media_root)


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
    other = {f"{name}_0": f"{name}_1" for name in ("image", "video", "model")}
    other |= {second: first for first, second in other.items()}
    turned = {other.get(column, column): value for column, value in pair.items()}
    if "preference" in turned:
        turned["preference"] = _OPPOSITE[turned["preference"]]
    return turned


class _FileAndRow(NamedTuple):
    """A raw row and where it was read."""

    file: Path
    row: Row | BadRow


def _rows_of_files(path: Path) -> Iterator[_FileAndRow]:
    """Read the rows of a file, of the files of a folder, or of those that fit a pattern."""
    if not path.exists() and not any(character in str(path) for character in "*?["):
        raise BadDataError(f"there is no file or folder {str(path)!r}{nearest_path(path)}")
    for source in resolve_source(str(path)):
        yield from _of_file(Path(source.name), read_rows_of_file(Path(source.name)))


def _of_file(file: Path, rows: Iterable[Row | BadRow]) -> Iterator[_FileAndRow]:
    empty = True
    for row in rows:
        empty = False
        yield _FileAndRow(file, row)
    if empty:
        raise BadDataError(f"{file}: there are no rows in it")


def _genai_video_rows(path: Path) -> Iterator[_FileAndRow]:
    """Read as `_rows_of_files`, and also a .json that maps ids to rows; they get the id."""
    file = path / "genai_video.json"
    file = file if file.is_file() else path
    samples: object = None
    if file.is_file() and file.suffix.lower() == ".json":
        try:
            samples = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadDataError(f"{file}: cannot be read as .json: {error}") from error
    if not isinstance(samples, dict):
        return _rows_of_files(file)
    known = (
        {**row, "id": key} if isinstance(row, dict) else wrong_type(key, "a row", row)
        for key, row in samples.items()
    )
    return _of_file(file, known)


def _image_reward_prompts(path: Path) -> Iterator[_FileAndRow]:
    """Read rows about single images, and gather those of each prompt in ``images``.

    Args:
        path: A folder with shards such as ``train_1/train_1.json`` anywhere below it, or a file.
    """
    prompts: dict[str, tuple[Path, list[Row]]] = {}
    for file, row in _image_reward_rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            prompt_id = _check_image(row)
        except BadRow as problem:
            yield _FileAndRow(file, problem)
        else:
            prompts.setdefault(prompt_id, (file, []))[1].append(row)
    for file, images in prompts.values():
        yield _FileAndRow(file, {"images": images})


def _image_reward_rows(path: Path) -> Iterator[_FileAndRow]:
    if not path.is_dir():
        yield from _rows_of_files(path)
        return
    shards = sorted(path.rglob("*.json"))
    if not shards:
        held = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
        raise BadDataError(
            f"the folder {str(path)!r} holds no shard such as train_1/train_1.json, but {held}; "
            "unpack the set's archives there, or give the folder with the shards"
        )
    for shard in shards:
        yield from _of_file(shard, read_rows_of_file(shard))


def _check_image(row: Row) -> str:
    text_of(row, "prompt")
    text_of(row, "image_path")
    prompt_id = row.get("prompt_id")
    if prompt_id is None:
        raise missing_column("prompt_id", row)
    if isinstance(prompt_id, list | dict):
        raise wrong_type("prompt_id", "a text or number", prompt_id)
    if number_of(row, "rank") is None:
        raise BadRow("no rank", "column 'rank' is missing or empty")
    return str(prompt_id)


def _own_folder(file: Path) -> Path:
    """Return the folder that the file of rows is in."""
    return file.parent


def _beside_or_above(*names: str) -> Callable[[Path], Path]:
    """Return where a folder of one of these names is: beside the file of rows or one level up.

    Where there is none, paths start from the first name one level up, the layout on the hub.
    """

    def folder(file: Path) -> Path:
        parent = file.absolute().parent
        candidates = [base / name for base in (parent.parent, parent) for name in names]
        return next((found for found in candidates if found.is_dir()), candidates[0])

    return folder


def _image_reward_folder(file: Path) -> Path:
    """Return the folder that holds ``images``, with which the paths in the shards begin."""
    parents = file.absolute().parents
    return next((above.parent for above in parents if above.name == "images"), file.parent)


class MediaFormat(NamedTuple):
    """How one set is read."""

    pairs: Callable[[Row, Path], Iterable[Pair]]
    """From one raw row, and the folder that its paths start from, to pairs."""
    folder: Callable[[Path], Path] = _own_folder
    """From the file of a row to the folder that its paths start from."""
    rows: Callable[[Path], Iterable[_FileAndRow]] = _rows_of_files
    """From what the user gave to raw rows, each with its file."""
    random_order: bool = False
    """Whether the set says nothing about which is candidate 0, so that the seed decides."""


_VIDEOS, _MEDIA_DATA = _beside_or_above("videos", "Videos"), _beside_or_above("media_data")
FORMATS: Mapping[str, MediaFormat] = {
    "hpdv3": MediaFormat(media_formats.hpdv3, random_order=True),
    "imagerewarddb": MediaFormat(
        media_formats.imagerewarddb, _image_reward_folder, _image_reward_prompts, random_order=True
    ),
    "rapidata_t2v": MediaFormat(media_formats.rapidata_t2v, _VIDEOS),
    "rapidata_i2v": MediaFormat(media_formats.rapidata_i2v, _VIDEOS),
    "omnireward_t2i": MediaFormat(media_formats.omnireward_t2i, _MEDIA_DATA),
    "omnireward_t2v": MediaFormat(media_formats.omnireward_t2v, _MEDIA_DATA),
    "genai_bench": MediaFormat(media_formats.genai_bench, random_order=True),
    "genai_bench_video": MediaFormat(
        media_formats.genai_bench_video, rows=_genai_video_rows, random_order=True
    ),
    "videodpo": MediaFormat(media_formats.videodpo, random_order=True),
    "videogen_rewardbench": MediaFormat(media_formats.videogen_rewardbench),
    "generic": MediaFormat(media_formats.generic),
}
