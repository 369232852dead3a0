"""Converts published sets of compared images, videos and sounds into preference pairs.

    python -m lrlhf.examples.convert_media_pairs hpdv3 hpdv3/train.json pairs.jsonl

The source is a file, a folder or a pattern. A row for `PreferenceDataModule` has ``prompt``,
``image_0`` and ``image_1`` (or ``video``, ``audio``), a label for each judgement (A: candidate 0 is
better, B: candidate 1, C: equal; what was not judged has none), ``source`` and what else the set
tells. ``image`` is what both candidates started from. Media that the rows of a set hold are written
into a folder beside the output. Where a set tells the better one from the worse, or names its
candidates by model, the seed decides which is candidate 0. Rows that are not of the set's form are
left out, and said.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from lrlhf.datamodules import BadDataError, BadRow
from lrlhf.datamodules.loading.sources import resolve_source
from lrlhf.datamodules.rows.chat import read_messages
from lrlhf.datamodules.rows.columns import is_empty, number_of, structure_of, text_of
from lrlhf.media.path_safety import local_path
from lrlhf.rewards.judge.verdicts import read_answer, reasoning_before_answer
from lrlhf.rollout.records import plain_json

Row = Mapping[str, Any]
Rows = Iterator[tuple[Path, Row | BadRow]]
KINDS = ("image", "video", "audio")


def rows_of_files(path: Path) -> Rows:
    """Read the rows of a file, of the files of a folder, or of those that fit a pattern."""
    for source in resolve_source(str(path)):
        for row in source:
            yield Path(source.name), row


# ------------------------------------------------------------------ sets


def hpdv3(row: Row) -> Iterator[Row]:
    """MizzenAI/HPDv3: the first image is the better one."""
    files = {"preferred_path": row["path1"], "rejected_path": row["path2"]}
    models = {"model_chosen": row.get("model1"), "model_rejected": row.get("model2")}
    told = {name: row.get(name) for name in ("confidence", "choice_dist")}
    yield pair(row, "image", row["path1"], row["path2"], "A", **models, **files, **told)


def imagerewarddb(row: Row) -> Iterator[Row]:
    """zai-org/ImageRewardDB: pairs of a prompt's images whose ranks differ; rank 1 is best.

    Images of equal rank make no pair, neither do they count as a tie: the accuracies that are
    published for this set leave them out.
    """
    for both in combinations(row["images"], 2):
        chosen, rejected = sorted(both, key=lambda image: float(image["rank"]))
        if float(chosen["rank"]) != float(rejected["rank"]):
            told = {
                f"{name}_{side}": image.get(name)
                for side, image in (("chosen", chosen), ("rejected", rejected))
                for name in ("rank", "overall_rating")
            }
            files = (chosen["image_path"], rejected["image_path"])
            told |= {"prompt_id": chosen["prompt_id"]}
            told |= {"chosen_img": files[0], "rejected_img": files[1]}
            yield pair(chosen, "image", *files, "A", **told)


def images_by_prompt(path: Path) -> Rows:
    """Read rows of ImageRewardDB about single images, and gather those of each prompt."""
    shards = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    prompts: dict[str, tuple[Path, list[Row]]] = {}
    for file, row in (found for shard in shards for found in rows_of_files(shard)):
        if isinstance(row, BadRow) or row.get("rank") is None or row.get("prompt_id") is None:
            yield file, row if isinstance(row, BadRow) else BadRow("no rank", f"{row!r:.80}")
        else:
            prompts.setdefault(str(row["prompt_id"]), (file, []))[1].append(row)
    for file, images in prompts.values():
        yield file, {"images": images}


def imagegen_cot_reward(row: Row) -> Iterator[Row]:
    """CodeGoat24/ImageGen-CoT-Reward-5K: a question, and a reply that reasons and gives a verdict.

    The reasoning names candidates by their places, which therefore stay.
    """
    messages = read_messages(structure_of(row, "conversations", list), "conversations")
    question, reply = (str(messages[place].get("content") or "") for place in (0, -1))
    caption = re.search(r"Text Caption:\s*(.+)", question)
    if caption is None:
        raise BadRow("no caption", f"its question has no line 'Text Caption: …': {question!r:.80}")
    words = {"a": "A", "b": "B", "tie": "C"}
    first, second = row["images"]
    label = of_word(str(read_answer(reply) or reply[-80:]), words)
    prompt, reasoning = caption.group(1).strip(" *[]\"'"), reasoning_before_answer(reply)
    yield pair({"prompt": prompt}, "image", first, second, label, reasoning=reasoning)


def rapidata(row: Row) -> Iterator[Row]:
    """Rapidata's scores of videos: of coherence and alignment, and for ``preference`` their sums.

    The sums are over all criteria that have both scores; ``preference_vote`` compares the scores
    of the criterion of that name alone. ``prompt_asset`` is the first frame of both.
    """
    scores = {
        name: [
            None if is_empty(row.get(column)) else number_of(row, column)
            for column in (f"weighted_results1_{name}", f"weighted_results2_{name}")
        ]
        for name in ("Preference", "Coherence", "Alignment")
    }
    judged = [(a, b) for a, b in scores.values() if a is not None and b is not None]
    told = {
        "preference_vote": better(*scores["Preference"]),
        "coherence": better(*scores["Coherence"]),
        "alignment": better(*scores["Alignment"]),
        **{name: row.get(name) for name in ("model1", "model2", "file_name1", "file_name2")},
        "image": row.get("prompt_asset"),
    }
    label = better(*map(math.fsum, zip(*judged, strict=True))) if judged else None
    yield pair(row, "video", row["file_name1"], row["file_name2"], label, **told)


def omnireward(kind: str) -> Callable[[Row], Iterator[Row]]:
    """Read HongbangYuan/OmniRewardBench; other criteria may judge the same responses otherwise."""
    names = ("id", "criteria", "criteria_preference", "model1", "model2")
    words = {"response1": "A", "response2": "B", "other": "C"}

    def read(row: Row) -> Iterator[Row]:
        sides = [held(row, f"response{n}") or row[f"response{n}_path"] for n in (1, 2)]
        told = {name: row.get(name) for name in (*names, "response1_path", "response2_path")}
        yield pair(row, kind, *sides, of_word(row.get("criteria_preference"), words), **told)

    return read


def genai_bench(kind: str) -> Callable[[Row], Iterator[Row]]:
    """Read votes of TIGER-Lab/GenAI-Bench, or ratings of models of BaiqiL/GenAI-Bench.

    Of ratings the higher mean gets the vote. Images of a row are in a column per model; a video is
    at ``<model>/<id>.mp4``.
    """
    words = {"leftvote": "A", "rightvote": "B", "tievote": "C", "bothbad_vote": "C"}

    def read(row: Row) -> Iterator[Row]:
        if (ratings := row.get("HumanRatings" if kind == "image" else "models")) is None:
            yield voted(row)
            return
        shown = {
            model: f"{model}/{row['id']}.mp4" if kind == "video" else row.get(model)
            for model in ratings
        }
        told = {"prompt": row.get("Prompt", row.get("prompt"))}
        for first, second in combinations([name for name in ratings if shown[name] is not None], 2):
            label = better(
                *(fmean(ratings[name]) if ratings[name] else None for name in (first, second))
            )
            names = {"model_0": first, "model_1": second, "id": row.get("Index", row.get("id"))}
            yield pair(told, kind, shown[first], shown[second], label, **names)

    def voted(row: Row) -> Row:
        edits = "instruct_prompt" in row
        sides = [row[f"{side}_output_{kind}" if edits else f"{side}_{kind}"] for side in SIDES]
        told = {f"model_{n}": row.get(f"{side}_model") for n, side in enumerate(SIDES)}
        told |= {"image": row["source_image"]} if edits else {}
        asked = {"prompt": row["instruct_prompt" if edits else "prompt"]}
        vote = {"id": row.get("id"), "vote_type": row.get("vote_type")}
        return pair(asked, kind, *sides, of_word(row.get("vote_type"), words), **told, **vote)

    return read


SIDES = ("left", "right")


def rows_with_ids(path: Path) -> Rows:
    """Read rows, and also a JSON file that maps ids to rows, which then have the id."""
    file = path / "genai_video.json" if (path / "genai_video.json").is_file() else path
    if file.suffix == ".json" and isinstance(found := json.loads(file.read_text("utf-8")), dict):
        for key, row in found.items():
            named = isinstance(row, dict)
            yield file, {**row, "id": key} if named else BadRow("another form", f"{key!r}: {row!r}")
    else:
        yield from rows_of_files(file)


def videodpo(row: Row) -> Iterator[Row]:
    """VideoDPO: video 2n is ``winvideos/<n>.mp4``, 2n + 1 is ``losevideos/<n>.mp4``."""
    halves = [divmod(int(row[column]), 2) for column in ("video1", "video2")]
    files = [f"{'losevideos' if lost else 'winvideos'}/{half:06d}.mp4" for half, lost in halves]
    caption = row["frame_caption"]
    prompt = {"prompt": caption[0] if isinstance(caption, list) else caption}
    yield pair(prompt, "video", *files, "A", score=row.get("score"))


def videogen_rewardbench(row: Row) -> Iterator[Row]:
    """KwaiVGI/VideoGen-RewardBench: four judgements of two videos."""
    words = {"a": "A", "b": "B", "same": "C", "invalid": None}
    heads = {name: of_word(row.get(name), words) for name in ("VQ", "MQ", "TA")}
    told = {name: row.get(name) for name in ("Overall", "A_model", "B_model", "path_A", "path_B")}
    label = of_word(row.get("Overall"), words)
    yield pair(row, "video", row["path_A"], row["path_B"], label, **heads, **told)


def audio_alpaca(row: Row) -> Iterator[Row]:
    """declare-lab/audio-alpaca: Parquet files with the sounds inside."""
    yield pair(row, "audio", row["chosen"], row["rejected"], "A", strategy=row.get("strategy"))


def pair(row: Row, kind: str, first: Any, second: Any, preference: str | None, **told: Any) -> Row:
    """Return a pair about the prompt of a row; what is empty has no column."""
    told |= {"preference": preference}
    known = {name: value for name, value in told.items() if not is_empty(value)}
    return {"prompt": text_of(row, "prompt"), f"{kind}_0": first, f"{kind}_1": second, **known}


def held(row: Row, column: str) -> Any:
    """Return a cell that holds the file itself; None: it does not."""
    value = row.get(column)
    content = value.get("bytes") if isinstance(value, Mapping) else value
    return value if isinstance(content, bytes) else None


def better(first: float | None, second: float | None) -> str | None:
    """Return the label of the higher score; none unless both are there."""
    if first is None or second is None:
        return None
    if abs(first - second) < 1e-9:  # sums of equal shares differ by rounding
        return "C"
    return "A" if first > second else "B"


def of_word(value: Any, words: Mapping[str, str | None]) -> str | None:
    """Return the label of a word; nothing there is no judgement."""
    if is_empty(value):
        return None
    if str(value).strip().lower() not in words:
        raise BadRow("unknown label", f"{value!r} is none of {', '.join(words)}")
    return words[str(value).strip().lower()]


# ------------------------------------------------------------------ folders


def beside(file: Path) -> Path:
    """Return the folder of the file of rows."""
    return file.absolute().parent


def with_images(file: Path) -> Path:
    """Return the folder that holds ``images``, with which the paths of a set begin."""
    parents = file.absolute().parents
    return next((above.parent for above in parents if above.name == "images"), beside(file))


def beside_or_above(*names: str) -> Callable[[Path], Path]:
    """Return where a folder of one of these names is: beside the file of rows or one level up."""

    def folder(file: Path) -> Path:
        bases = (beside(file).parent, beside(file))
        candidates = [base / name for base in bases for name in names]
        return next((found for found in candidates if found.is_dir()), candidates[0])

    return folder


class MediaSet(NamedTuple):
    """A set: its name in the pairs, its reader, and whether the seed orders its candidates."""

    source: str
    pairs: Callable[[Row], Iterator[Row]]
    ordered_by_seed: bool = False
    rows: Callable[[Path], Rows] = rows_of_files
    folder: Callable[[Path], Path] = beside


_VIDEOS, _MEDIA = beside_or_above("videos", "Videos"), beside_or_above("media_data")
SETS = {
    "hpdv3": MediaSet("HPDv3", hpdv3, True),
    "imagerewarddb": MediaSet("ImageRewardDB", imagerewarddb, True, images_by_prompt, with_images),
    "imagegen_cot_reward": MediaSet("ImageGen-CoT-Reward", imagegen_cot_reward),
    "rapidata": MediaSet("Rapidata", rapidata, folder=_VIDEOS),
    "omnireward_t2i": MediaSet("OmniRewardBench", omnireward("image"), folder=_MEDIA),
    "omnireward_t2v": MediaSet("OmniRewardBench", omnireward("video"), folder=_MEDIA),
    "omnireward_t2a": MediaSet("OmniRewardBench", omnireward("audio"), folder=_MEDIA),
    "genai_bench": MediaSet("GenAI-Bench", genai_bench("image"), True),
    "genai_bench_video": MediaSet("GenAI-Bench", genai_bench("video"), True, rows_with_ids),
    "videodpo": MediaSet("VideoDPO", videodpo, True),
    "videogen_rewardbench": MediaSet("VideoGen-RewardBench", videogen_rewardbench),
    "audio_alpaca": MediaSet("Audio-Alpaca", audio_alpaca, True),
}


# ------------------------------------------------------------------ writing


def exchanged(row: Row) -> Row:
    """Let the candidates of a pair change places, with all that the row says of them."""
    ends = {"_0": "_1", "_1": "_0"}
    moved = {f"{name}{end}" for name in (*KINDS, "model") for end in ends}
    turned = {
        name[:-2] + ends[name[-2:]] if name in moved else name: value for name, value in row.items()
    }
    opposite = {"A": "B", "B": "A", "leftvote": "rightvote", "rightvote": "leftvote"}
    for column in {"preference", "vote_type"} & turned.keys():
        turned[column] = opposite.get(turned[column], turned[column])
    return turned


def placed(value: Any, folder: Path, root: Path | None, media: Path) -> str:
    """Return the path of a file: of bytes, which are written, of a path or of an address.

    An address stands for the file of its last name in the folder of its second last name, if there
    is such a folder, else in ``folder``.
    """
    content, path = value, value
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
    if isinstance(content, bytes):
        suffix = Path(path).suffix if isinstance(path, str) else ""
        file = media / f"{hashlib.blake2b(content, digest_size=12).hexdigest()}{suffix}"
        media.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return str(file.absolute())
    if not isinstance(path, str) or not path:
        raise BadRow("no file", f"{value!r:.80} names no file")
    if "://" in path and not path.startswith("file:"):
        *parents, path = unquote(urlsplit(path).path).split("/")
        if path in {"", ".", ".."}:
            raise BadRow("no file", f"the address {value!r} ends in no name of a file")
        inner = folder / parents[-1] if parents and parents[-1] not in {"", ".", ".."} else folder
        folder = inner if inner.is_dir() else folder
    local = local_path(path, folder, root=None)
    return local if root is None else local_path(local, None, root=root)


def converted(
    name: str, path: Path, media: Path, seed: int, root: Path | None
) -> Iterator[Row | BadRow]:
    """Yield the pairs of a set, and what cannot be one."""
    known = SETS[name]
    for number, (file, row) in enumerate(known.rows(path)):
        folder = known.folder(file) if root is None else root
        try:
            if isinstance(row, BadRow):
                raise row
            for index, one in enumerate(known.pairs(row)):
                shown = {
                    column: placed(one[column], folder, root, media)
                    for column in one
                    if column.startswith(KINDS)
                }
                digest = hashlib.blake2b(
                    f"{seed}:{number}:{index}".encode(), digest_size=1
                ).digest()
                turns = known.ordered_by_seed and digest[0] % 2 == 1
                done = plain_json({**one, **shown, "source": known.source})
                yield exchanged(done) if turns else done
        except BadRow as problem:
            yield BadRow(problem.reason, f"{problem.detail} (in {file.name})")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield BadRow("another form", f"{type(error).__name__} {error} (in {file.name})")


def main(arguments: list[str] | None = None) -> None:
    """Write the pairs of a set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=list(SETS))
    parser.add_argument("source", type=Path, help="file of its rows, a folder or a pattern")
    parser.add_argument("output", type=Path, help="JSONL to write")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other orders")
    parser.add_argument(
        "--media-root", type=Path, help="folder that paths start from, and must not lead out of"
    )
    given = parser.parse_args(arguments)
    root = None if given.media_root is None else given.media_root.expanduser().absolute()
    media, written, left_out = given.output.with_suffix(".media"), 0, Counter[str]()
    with given.output.open("w", encoding="utf-8") as file:
        for row in converted(given.set, given.source, media, given.seed, root):
            if not isinstance(row, BadRow):
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
                written += 1
                continue
            if not left_out[row.reason]:
                sys.stderr.write(f"left out: {row.reason}: {row.detail}\n")
            left_out[row.reason] += 1
    sys.stdout.write(f"{written} pairs in {given.output}, {left_out.total()} left out\n")
    if not written:
        sys.exit(f"error: no pair can be made of {given.source} as {given.set}")


if __name__ == "__main__":
    try:
        main()
    except BadDataError as error:
        sys.exit(f"error: {error}")
