"""Texts that are nearly the same, among hundred thousands, by MinHash and LSH."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SIMILAR = 0.8
"""Jaccard similarity from which on texts are nearly the same."""
FEWEST = 10
"""Shingles below which a text is compared as a whole: a word more or less would be a third."""
_WORDS = 3
_BANDS, _ROWS = 16, 6
"""Texts of similarity s become candidates with probability 1 - (1 - s^6)^16: 0.99 of 0.8."""
_CHUNK, _COUNTED = 512, 10_000
_PARTNERS = 4
_COMMON, _COMMON_FROM = 0.02, 20
"""Share and number of texts above which a shingle that all of them have is boilerplate."""
_SIMILAR_REST = 0.7
"""Jaccard similarity without boilerplate from which on texts are nearly the same; smaller, as where
many texts are alike in parts there is little else in them."""
_COUNTERS = 22
"""Bits of a shingle by which it is counted: collisions with one of the few common ones are rare."""
_WORD = re.compile(r"\w+")
# written without spaces: each letter is a word
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")

Shingles = NDArray[np.uint32]


def squashed(text: str) -> str:
    """Return a text without what case and white space tell apart."""
    return " ".join(text.casefold().split())


class SimilarTexts:
    """Finds nearly equal texts, the same ones in whatever order they are given.

    A text is the set of its runs of three words (shingles), case and punctuation left out. Two
    texts are similar if the Jaccard index of their sets is `SIMILAR` or more, and still 0.7 or more
    without boilerplate: the shingles that more than 2 % of the texts, and more than 20, have, such
    as those of an instruction around different questions. Texts with few shingles beside
    boilerplate are similar if they are equal but for case and white space. MinHash signatures in
    bands (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3), of what is no
    boilerplate, propose pairs, and every pair is compared in full.

    Args:
        texts: Distinct ones.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        digests = [hashlib.blake2b(_bytes(text), digest_size=16).digest() for text in texts]
        self._order = sorted(range(len(texts)), key=digests.__getitem__)
        self._words = _Words()
        self._shingles = [self._shingle(texts[index]) for index in self._order]
        self._squashed = [squashed(texts[index]) for index in self._order]
        self._is_common = _common(self._shingles)

    def pairs(self) -> Iterator[tuple[int, int, float]]:
        """Yield pairs of similar texts, by index, and their similarity.

        Of many that are alike each comes with one or two others, not with all.
        """
        for group in self._buckets():
            yield from self._similar((group[0], other) for other in group[1:])
            yield from self._similar(pairwise(group[1:]))

    def pairs_across(self, first: Sequence[bool]) -> Iterator[tuple[int, int, float]]:
        """Yield pairs of a text of the ``first`` set and one of the others, by index."""
        sides = [first[index] for index in self._order]
        for group in self._buckets():
            partners = [member for member in group if sides[member]][:_PARTNERS]
            others = [member for member in group if not sides[member]]
            yield from self._similar((one, two) for two in others for one in partners)

    def _similar(self, candidates: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, float]]:
        for one, two in candidates:
            if (one, two) in self._compared:
                continue
            self._compared.add((one, two))
            similarity = self._similarity(one, two)
            if similarity >= SIMILAR:
                yield self._order[one], self._order[two], similarity

    def are_similar(self, one: str, two: str) -> bool:
        """Whether parts of two of the texts are similar by themselves."""
        if squashed(one) == squashed(two):
            return True
        return self._of_shingles(self._shingle(one), self._shingle(two)) >= SIMILAR

    def _similarity(self, one: int, two: int) -> float:
        if self._squashed[one] == self._squashed[two]:
            return 1.0
        return self._of_shingles(self._shingles[one], self._shingles[two])

    def _of_shingles(self, one: Shingles, two: Shingles) -> float:
        """Return the Jaccard index; 0 where what is no boilerplate is little, or not similar."""
        rest = self._rest(one), self._rest(two)
        if min(map(len, rest)) < FEWEST or _jaccard(*rest) < _SIMILAR_REST:
            return 0.0
        return _jaccard(one, two)

    def _rest(self, shingles: Shingles) -> Shingles:
        """Leave boilerplate out."""
        return shingles[~self._is_common[_counter(shingles)]]

    def _buckets(self) -> Iterator[list[int]]:
        """Yield groups of texts that may be similar, each in order of their digests."""
        self._compared: set[tuple[int, int]] = set()
        alike: dict[str, list[int]] = defaultdict(list)
        for index, text in enumerate(self._squashed):
            alike[text].append(index)
        yield from (group for group in alike.values() if len(group) > 1)
        rests = {
            index: rest
            for index, shingles in enumerate(self._shingles)
            if len(rest := self._rest(shingles)) >= FEWEST
        }
        if len(rests) < 2:
            return
        signatures = _signatures(list(rests.values()))
        positions = np.array(list(rests))
        del rests
        for band in range(_BANDS):
            rows = np.ascontiguousarray(signatures[:, band * _ROWS : (band + 1) * _ROWS])
            keys = rows.view(f"V{rows.itemsize * _ROWS}").ravel()
            _, group_of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
            members = np.argsort(group_of, kind="stable")
            ends = np.cumsum(sizes)
            for end, size in zip(ends[sizes > 1], sizes[sizes > 1], strict=True):
                yield positions[members[end - size : end]].tolist()

    def _shingle(self, text: str) -> Shingles:
        """Return the distinct shingles of a text, sorted."""
        text = text.casefold()
        if not text.isascii():
            text = _UNSPACED.sub(r" \g<0> ", text)
        words = _WORD.findall(text)
        ids = np.fromiter(map(self._words.__getitem__, words), np.uint64, len(words))
        runs = len(ids) - _WORDS + 1
        if runs < 1:
            return np.empty(0, np.uint32)
        mixed = np.zeros(runs, np.uint64)
        for place, factor in enumerate(_MIXERS):
            mixed += ids[place : place + runs] * factor
        return np.unique((mixed >> np.uint64(32)).astype(np.uint32))


_MIXERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


def _signatures(shingles: Sequence[Shingles]) -> NDArray[np.uint32]:
    """Return the MinHash signature of each set: of every permutation the smallest value."""
    random = np.random.default_rng(0)
    count = _BANDS * _ROWS
    factors = random.integers(0, 2**31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    offsets = random.integers(0, 2**32, count, dtype=np.uint32)
    signatures = np.empty((len(shingles), count), np.uint32)
    for start in range(0, len(shingles), _CHUNK):
        chunk = shingles[start : start + _CHUNK]
        joined = np.concatenate(chunk)
        begins = np.cumsum([0, *map(len, chunk[:-1])])
        for column, (factor, offset) in enumerate(zip(factors, offsets, strict=True)):
            # modulo 2**32: a bijection, as the factor is odd
            values = joined * factor + offset
            signatures[start : start + _CHUNK, column] = np.minimum.reduceat(values, begins)
    return signatures


def _common(shingles: Sequence[Shingles]) -> NDArray[np.bool_]:
    """Return of each counter whether it is that of boilerplate."""
    counts = np.zeros(1 << _COUNTERS, np.int64)
    for start in range(0, len(shingles), _COUNTED):
        joined = np.concatenate(shingles[start : start + _COUNTED])
        counts += np.bincount(_counter(joined), minlength=len(counts))
    return counts > max(_COMMON_FROM, _COMMON * len(shingles))


def _counter(shingles: Shingles) -> Shingles:
    return shingles >> np.uint32(32 - _COUNTERS)


def _jaccard(one: Shingles, two: Shingles) -> float:
    shared = len(np.intersect1d(one, two, assume_unique=True))
    return shared / (len(one) + len(two) - shared)


class _Words(dict[str, int]):
    """Numbers that stand for words, the same in every process."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(_bytes(word), digest_size=8).digest()
        number = self[word] = int.from_bytes(digest, "little")
        return number


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
