"""Film reviews with ratings as the files of the whole road, and measures that train nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

OPENING = "Film review:"
"""What every text begins with."""
_FIRST_WORDS = 4
"""Of a review, that a policy is given to go on from."""


def write_files(reviews: Sequence[tuple[str, float]], lexicon: str, folder: Path) -> None:
    """Write what the steps read; no review is in two files but `pairs` and `texts` of validation.

    Args:
        reviews: Texts and their mean ratings, in any order that is always the same.
        lexicon: Lines of a word and the mean of its ratings.
        folder: Where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held_out, rest = reviews[: len(reviews) // 10], reviews[len(reviews) // 10 :]
    third = len(rest) // 3
    _write(folder / "texts.jsonl", map(_text, rest[:third]))
    _write(folder / "prompts.jsonl", map(_prompt, rest[third : 2 * third]))
    _write(folder / "pairs.jsonl", _pairs(rest[2 * third :]))
    _write(folder / "texts_val.jsonl", map(_text, held_out[:128]))
    _write(folder / "prompts_val.jsonl", map(_prompt, held_out[:128]))
    _write(folder / "pairs_val.jsonl", _pairs(held_out))
    (folder / "lexicon.tsv").write_text(lexicon, encoding="utf-8")


def _text(review: tuple[str, float]) -> dict[str, object]:
    begun, rest = _begun(review[0])
    return {"prompt": begun, "completion": rest, "rating": review[1]}


def _prompt(review: tuple[str, float]) -> dict[str, object]:
    return {"prompt": _begun(review[0])[0], "rating": review[1]}


def _begun(text: str) -> tuple[str, str]:
    words = text.split()
    begun = " ".join([OPENING, *words[:_FIRST_WORDS]])
    return begun, " ".join(["", *words[_FIRST_WORDS:]])


def _pairs(reviews: Sequence[tuple[str, float]]) -> Iterable[dict[str, object]]:
    """Let each clearly positive review meet a clearly negative one."""
    good = [text for text, rating in reviews if rating > 1.5]
    bad = [text for text, rating in reviews if rating < -1.5]
    for better, worse in zip(good, bad, strict=False):
        yield {"prompt": OPENING, "chosen": f" {better}", "rejected": f" {worse}"}


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


class Valence:
    """Mean of the ratings that people gave the single words of a text; other words count as 0.

    Args:
        lexicon: File with a word and a rating per line.
    """

    def __init__(self, lexicon: str) -> None:
        lines = Path(lexicon).read_text(encoding="utf-8").splitlines()
        self._ratings = {word: float(rating) for word, rating in (x.split("\t") for x in lines)}

    def __call__(self, completions: list[str]) -> list[float]:
        return [self._mean(_words(text)) for text in completions]

    def _mean(self, words: list[str]) -> float:
        return sum(self._ratings.get(word, 0.0) for word in words) / max(1, len(words))


class DifferentWords:
    """Share of a text's words that it has not said before: low where a policy repeats itself."""

    def __call__(self, completions: list[str]) -> list[float]:
        found = map(_words, completions)
        return [len(set(words)) / max(1, len(words)) for words in found]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())
