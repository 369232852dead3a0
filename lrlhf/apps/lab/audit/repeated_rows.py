"""Rows that come again, contradict each other, or stand in both splits."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lrlhf.apps.lab.audit.findings import FaultKind, Finding, FlaggedRow
from lrlhf.apps.lab.audit.rows import AuditedData, AuditedRow
from lrlhf.datamodules.loading.splits import connected_groups

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
            yield from self._similar((partner, two) for two in others for partner in partners)

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


DUPLICATE = FaultKind(
    "exact duplicates",
    "warning",
    "The same row stands in the data again, so it counts as often as it stands there.",
    "Keep one of each (PromptDataModule does so with deduplicate: true), unless the weight is "
    "wanted.",
)
NEAR_DUPLICATE = FaultKind(
    "near-duplicates",
    "warning",
    f"The words of another row of the same split come again almost unchanged (Jaccard index of "
    f"three-word runs {SIMILAR} or more, of prompt and answers), so that it counts twice.",
    "Keep one of each group, unless the variation is wanted.",
)
CONTRADICTION = FaultKind(
    "contradictory pairs",
    "warning",
    "The same two answers to the same prompt are judged one way here and the other way there; "
    "no reward model can be right about both.",
    "Decide by a majority of judgements, label a tie, or leave these pairs out.",
)
EQUAL = FaultKind(
    "equal candidates",
    "warning",
    "Both candidates are the same, at most but for case and white space, and one is labelled "
    "better: there is nothing to learn but noise.",
    "Leave these rows out, or label them a tie.",
)
LEAK = FaultKind(
    "leaks between train and validation",
    "error",
    "The prompt of a validation row (without a prompt, a text) also stands in the train data, so "
    "that the validation partly measures what was learned by heart.",
    "Take these rows out of one of the two, or hold out with val_size, which keeps equal prompts "
    "together.",
)
NEAR_LEAK = FaultKind(
    "near leaks between train and validation",
    "warning",
    "The prompt of a validation row stands almost unchanged in the train data (Jaccard index of "
    f"three-word runs {SIMILAR} or more).",
    "Take these rows out of one of the two before you trust the validation.",
)
IDENTICAL = "identical candidates"
"""Why a run leaves out pairs whose candidates are equal letter by letter."""


def repeated_rows(data: AuditedData) -> list[Finding]:
    """Find duplicates, near-duplicates, leaks, and pairs that contradict each other or nothing."""
    groups = _grouped((_identity(row), row) for row in data.rows)
    again = [
        FlaggedRow(row.split, row.place, f"same as {first.place}")
        for first, *others in groups
        for row in others
    ]
    total = len(data.rows)
    held_out = sum(row.split != "train" for row in data.rows)
    leaked = dict(_leaks(data.rows))
    return [
        *DUPLICATE.findings_of(again, total),
        *NEAR_DUPLICATE.findings_of(_near_duplicates([group[0] for group in groups]), total),
        *CONTRADICTION.findings_of(_contradictions(data.rows), total),
        *EQUAL.findings_of(_equal(data), total),
        *LEAK.findings_of(leaked.values(), held_out),
        *NEAR_LEAK.findings_of(_near_leaks(data.rows, leaked), held_out),
    ]


def _identity(row: AuditedRow) -> Hashable:
    """Return what an exact duplicate shares, in whatever order its candidates stand."""
    labels = {
        # 0 added: a tie is 0.0 the other way round too, not -0.0
        candidate: tuple(sign * label + 0.0 for label in row.labels)
        for candidate, sign in zip(row.candidates, (1.0, -1.0), strict=False)
    }
    # NaN is not equal to itself
    judged = tuple(sorted((candidate, str(own)) for candidate, own in labels.items()))
    return row.split, row.prompt.strip(), row.shown if not row.answers else "", judged


def _grouped(
    rows: Iterable[tuple[Hashable, AuditedRow]],
) -> list[list[AuditedRow]]:
    groups: dict[Hashable, list[AuditedRow]] = defaultdict(list)
    for key, row in rows:
        groups[key].append(row)
    return list(groups.values())


def _near_duplicates(rows: Sequence[AuditedRow]) -> Iterator[FlaggedRow]:
    similar = SimilarTexts([_full_text(row) for row in rows])
    partners: dict[int, dict[int, float]] = defaultdict(dict)
    for one, two, similarity in similar.pairs():
        if rows[one].split == rows[two].split and _alike(rows[one], rows[two], similar.are_similar):
            partners[one][two] = partners[two][one] = similarity
    keys = [[index, *partners.get(index, ())] for index in range(len(rows))]
    for _, *others in connected_groups(keys):
        for index in others:
            near, similarity = max(partners[index].items(), key=lambda item: (item[1], -item[0]))
            detail = f"{similarity:.2f} like {rows[near].place}"
            yield FlaggedRow(rows[index].split, rows[index].place, detail)


def _full_text(row: AuditedRow) -> str:
    """Return all that a row says, and a word that stands for what it shows."""
    return "\n\n".join((row.prompt, *sorted(row.answers), row.shown))


def _alike(one: AuditedRow, two: AuditedRow, are_similar: Callable[[str, str], bool]) -> bool:
    """Whether both the prompts and the answers are similar, and the same media are shown."""
    if one.shown != two.shown or _texts(one) == _texts(two):
        return False  # the same texts judged otherwise are contradictory, no duplicates
    answers = ["\n\n".join(sorted(row.answers)) for row in (one, two)]
    return are_similar(one.prompt, two.prompt) and are_similar(*answers)


def _texts(row: AuditedRow) -> Hashable:
    return row.prompt.strip(), frozenset(row.candidates)


def _contradictions(rows: Sequence[AuditedRow]) -> Iterator[FlaggedRow]:
    labelled = [row for row in rows if row.preferred is not None]
    keyed = ((_question_and_answers(row), row) for row in labelled)
    for group in _grouped(keyed):
        for head in range(len(group[0].labels)):
            better: dict[str, list[AuditedRow]] = defaultdict(list)
            for row in group:
                if abs(row.labels[head]) == 1:
                    better[row.candidates[0 if row.labels[head] > 0 else 1]].append(row)
            if len(better) < 2:
                continue
            one, two = better.values()
            for row, other in [(row, two[0]) for row in one] + [(row, one[0]) for row in two]:
                yield FlaggedRow(row.split, row.place, f"the other way round in {other.place}")


def _question_and_answers(row: AuditedRow) -> Hashable:
    # a pair of equal candidates contradicts nothing
    return _texts(row), row.place if len(set(row.candidates)) == 1 else ""


def _equal(data: AuditedData) -> Iterator[FlaggedRow]:
    for split, place, problem in data.bad:
        if problem.reason == IDENTICAL:
            yield FlaggedRow(split, place, problem.detail)
    for row in data.rows:
        if row.preferred is None:
            continue
        first, second = map(squashed, row.candidates)
        if first == second:
            yield FlaggedRow(row.split, row.place, "equal but for case and white space")


def _leaks(rows: Sequence[AuditedRow]) -> Iterator[tuple[tuple[str, str], FlaggedRow]]:
    trained = {key: row.place for row in rows if row.split == "train" for key in row.keys}
    for row in rows:
        shared = [trained[key] for key in row.keys if key in trained]
        if row.split != "train" and shared:
            leaked = FlaggedRow(row.split, row.place, f"prompt also in {shared[0]}")
            yield (row.split, row.place), leaked


def _near_leaks(
    rows: Sequence[AuditedRow], leaked: Container[tuple[str, str]]
) -> Iterator[FlaggedRow]:
    of_train: dict[str, AuditedRow] = {}
    of_held: dict[str, list[AuditedRow]] = defaultdict(list)
    for row in rows:
        text = "\n\n".join((row.prompt.strip() or "\n\n".join(row.answers), _context(row)))
        if row.split == "train":
            of_train.setdefault(text, row)
        elif (row.split, row.place) not in leaked:
            of_held[text].append(row)
    if not of_held:
        return
    texts = [*of_train, *of_held]
    similar = SimilarTexts(texts)
    for one, two, similarity in similar.pairs_across(
        [True] * len(of_train) + [False] * len(of_held)
    ):
        source = of_train[texts[one]]
        for row in of_held[texts[two]]:
            if _context(row) == _context(source):
                yield FlaggedRow(
                    row.split, row.place, f"prompt {similarity:.2f} like {source.place}"
                )


def _context(row: AuditedRow) -> str:
    """Return what stands for the images of a prompt; without one, those of the candidates."""
    return row.context if row.prompt.strip() else row.shown
