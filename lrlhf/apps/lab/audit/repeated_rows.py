"""Rows that come again, contradict each other, or stand in both splits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence

from lrlhf.apps.lab.audit.findings import FaultKind, Finding, RowToLookAt
from lrlhf.apps.lab.audit.rows import AuditedData, AuditedRow
from lrlhf.apps.lab.audit.similar_texts import SIMILAR, SimilarTexts, squashed
from lrlhf.datamodules.loading.splits import connected_groups

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
        RowToLookAt(row.split, row.place, f"same as {first.place}")
        for first, *others in groups
        for row in others
    ]
    total = len(data.rows)
    held = sum(row.split != "train" for row in data.rows)
    leaked = dict(_leaks(data.rows))
    return [
        *DUPLICATE.found(again, total),
        *NEAR_DUPLICATE.found(_near_duplicates([group[0] for group in groups]), total),
        *CONTRADICTION.found(_contradictions(data.rows), total),
        *EQUAL.found(_equal(data), total),
        *LEAK.found(leaked.values(), held),
        *NEAR_LEAK.found(_near_leaks(data.rows, leaked), held),
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


def _near_duplicates(rows: Sequence[AuditedRow]) -> Iterator[RowToLookAt]:
    found = SimilarTexts([_whole(row) for row in rows])
    partners: dict[int, dict[int, float]] = defaultdict(dict)
    for one, two, similarity in found.pairs():
        if rows[one].split == rows[two].split and _alike(rows[one], rows[two], found.are_similar):
            partners[one][two] = partners[two][one] = similarity
    keys = [[index, *partners.get(index, ())] for index in range(len(rows))]
    for _, *others in connected_groups(keys):
        for index in others:
            near, similarity = max(partners[index].items(), key=lambda item: (item[1], -item[0]))
            detail = f"{similarity:.2f} like {rows[near].place}"
            yield RowToLookAt(rows[index].split, rows[index].place, detail)


def _whole(row: AuditedRow) -> str:
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


def _contradictions(rows: Sequence[AuditedRow]) -> Iterator[RowToLookAt]:
    judged = [row for row in rows if row.preferred is not None]
    keyed = ((_question_and_answers(row), row) for row in judged)
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
                yield RowToLookAt(row.split, row.place, f"the other way round in {other.place}")


def _question_and_answers(row: AuditedRow) -> Hashable:
    # a pair of equal candidates contradicts nothing
    return _texts(row), row.place if len(set(row.candidates)) == 1 else ""


def _equal(data: AuditedData) -> Iterator[RowToLookAt]:
    for split, place, problem in data.bad:
        if problem.reason == IDENTICAL:
            yield RowToLookAt(split, place, problem.detail)
    for row in data.rows:
        if row.preferred is None:
            continue
        first, second = map(squashed, row.candidates)
        if first == second:
            yield RowToLookAt(row.split, row.place, "equal but for case and white space")


def _leaks(rows: Sequence[AuditedRow]) -> Iterator[tuple[tuple[str, str], RowToLookAt]]:
    trained = {key: row.place for row in rows if row.split == "train" for key in row.keys}
    for row in rows:
        shared = [trained[key] for key in row.keys if key in trained]
        if row.split != "train" and shared:
            told = RowToLookAt(row.split, row.place, f"prompt also in {shared[0]}")
            yield (row.split, row.place), told


def _near_leaks(
    rows: Sequence[AuditedRow], leaked: Container[tuple[str, str]]
) -> Iterator[RowToLookAt]:
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
    found = SimilarTexts(texts)
    for one, two, similarity in found.pairs_across([True] * len(of_train) + [False] * len(of_held)):
        source = of_train[texts[one]]
        for row in of_held[texts[two]]:
            if _context(row) == _context(source):
                yield RowToLookAt(
                    row.split, row.place, f"prompt {similarity:.2f} like {source.place}"
                )


def _context(row: AuditedRow) -> str:
    """Return what stands for the images of a prompt; without one, those of the candidates."""
    return row.context if row.prompt.strip() else row.shown
