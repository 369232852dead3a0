"""The human ratings that the VADER sentiment lexicon was made with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from lrlhf.datamodules.datasets.ratings import Part, RatedPairs, RatedText
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
from lrlhf.models import cache_dir

Domain = Literal["movie", "amazon", "nyt", "tweets"]

_FILES: dict[str, str] = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
}
_REQUIREMENT = "vaderSentiment==3.3.2"
_SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
_OUTER_MEMBER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_INNER_FOLDER = "hutto_ICWSM_2014"
_DOWNLOAD_TIMEOUT = 600.0


class VaderRatings(RatedPairs):
    """Pairs of texts that people rated as clearly positive and clearly negative.

    20 or more people rated each text from -4 to 4. The files come from the source distribution of
    the package vaderSentiment 3.3.2 (MIT), which is downloaded once.

    Args:
        domains: ``movie`` and ``amazon`` reviews, ``nyt`` editorials, ``tweets``.
        low: A rejected text is rated below this.
        high: A chosen text is rated above this.
        min_chars: Texts have more characters than this.
        max_chars: Texts have fewer characters than this.
        part: Which texts to pair, see `RatedPairs`.
        validation_fraction: Share of the texts that ``part: validation`` gets.
        seed: Of the parting and the pairing.
        max_pairs: Largest number of pairs.
        margin_scale: Margin of a pair per point of rating; None: no margins.
        uses_per_text: Number of pairs that a text may be part of.
        archive: Path of the source distribution, where it cannot be downloaded.

    Reference:
        Hutto and Gilbert 2014, VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
        Social Media Text, ICWSM. Its authors ask to be cited.
    """

    def __init__(  # noqa: PLR0913 - the constructor is the schema of the config
        self,
        domains: Sequence[Domain] = ("movie",),
        *,
        low: float = -1.5,
        high: float = 1.5,
        min_chars: int = 20,
        max_chars: int = 160,
        part: Part = "all",
        validation_fraction: float = 0.1,
        seed: int = 0,
        max_pairs: int | None = None,
        margin_scale: float | None = None,
        uses_per_text: int = 1,
        archive: str | None = None,
    ) -> None:
        if low >= high:
            raise ValueError(f"low={low} must be below high={high}")
        unknown = [domain for domain in domains if domain not in _FILES]
        if unknown or not domains:
            raise ValueError(f"domains={list(domains)!r}: choose from {', '.join(_FILES)}")
        super().__init__(
            part=part,
            validation_fraction=validation_fraction,
            # any text above `high` may meet any below `low`, and none of its own kind
            min_gap=high - low,
            seed=seed,
            max_pairs=max_pairs,
            margin_scale=margin_scale,
            uses_per_text=uses_per_text,
        )
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
            for line in (folder / _FILES[domain]).read_text(encoding="utf-8").split("\n"):
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
        if self._archive is not None:
            content = _read_archive(Path(self._archive).expanduser())
            folder = cache_dir() / "data" / f"vader-{hashlib.sha256(content).hexdigest()[:12]}"
        else:
            content = None
            folder = cache_dir() / "data" / f"vader-{_SDIST_SHA256[:12]}"
        if not all((folder / name).is_file() for name in _FILES.values()):
            _unpack(_download() if content is None else content, folder)
        return folder


def _parse(line: str) -> RatedText | BadRow:
    cells = line.rstrip("\r").split("\t")
    try:
        _, rating, text = cells
        return RatedText(float(rating), text)
    except ValueError:
        return BadRow("wrong type", f"not an id, a rating and a text: {line[:60]!r}")


def _read_archive(path: Path) -> bytes:
    if not path.is_file():
        raise BadDataError(
            f"VaderRatings: there is no file archive={str(path)!r}; it is the source distribution "
            f"that `pip download --no-deps --no-binary :all: {_REQUIREMENT}` fetches"
        )
    return path.read_bytes()


def _download() -> bytes:
    """Fetch the source distribution with pip and check that it is the known one."""
    by_hand = (
        f"Where a network is: `pip download --no-deps --no-binary :all: {_REQUIREMENT}`, then give "
        "the .tar.gz file as VaderRatings' `archive`"
    )
    # asked for as a module, pip would take setuptools' distutils from everyone in this process,
    # and torch.compile could not start its compiler any more
    if next(iter(importlib.metadata.distributions(name="pip")), None) is None:
        raise BadDataError(
            "VaderRatings downloads its texts with pip, which this environment lacks: run "
            f"`{sys.executable} -m ensurepip`. {by_hand}"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        try:
            done = subprocess.run(
                [*command, "--dest", folder, _REQUIREMENT],
                capture_output=True,
                text=True,
                check=False,
                timeout=_DOWNLOAD_TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise BadDataError(
                f"VaderRatings: pip got no {_REQUIREMENT} in {error.timeout:.0f} s. {by_hand}"
            ) from error
        found = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or len(found) != 1:
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise BadDataError(
                f"VaderRatings: pip could not fetch {_REQUIREMENT}: {' '.join(last)}. {by_hand}"
            )
        content = found[0].read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SDIST_SHA256:
        raise BadDataError(
            f"VaderRatings: what pip fetched as {_REQUIREMENT} has SHA-256 {digest}, not the known "
            f"{_SDIST_SHA256}: the package index gave another file. {by_hand}"
        )
    return content


def _unpack(sdist: bytes, folder: Path) -> None:
    """Write the rating files, each complete or not at all; nothing else leaves the archive."""
    inner = _member(sdist, _OUTER_MEMBER)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES.values():
        content = _member(inner, f"{_INNER_FOLDER}/{name}")
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(folder / name)


def _member(archive: bytes, name: str) -> bytes:
    """Read one member by its exact name into memory, so that no path of the archive is used."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            stream = tar.extractfile(name)
            if stream is not None:
                return stream.read()
    except (KeyError, tarfile.TarError, EOFError, OSError) as error:
        raise BadDataError(
            f"VaderRatings: {name!r} cannot be read from the source distribution: {error}. Give "
            f"the one of {_REQUIREMENT}"
        ) from error
    raise BadDataError(f"VaderRatings: {name!r} in the source distribution is no file")
