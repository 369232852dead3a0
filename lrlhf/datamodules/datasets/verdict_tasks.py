"""Preference pairs as questions to a judge, for training it."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.loading.python_rows import Rows
from lrlhf.datamodules.loading.sources import Row, Source, Weighted, resolve_source
from lrlhf.datamodules.loading.splits import hold_out
from lrlhf.datamodules.rows.bad_rows import (
    BadDataError,
    BadRow,
    Unused,
    missing_column,
    unused_notes,
)
from lrlhf.datamodules.rows.chat import SYSTEM_COLUMNS, with_system
from lrlhf.datamodules.rows.columns import is_empty, text_of, with_turns
from lrlhf.datamodules.rows.conservation import Conservation, Reached
from lrlhf.datamodules.rows.media_rows import media_columns, media_in, media_text
from lrlhf.datamodules.rows.preference_rows import (
    SHOWN_CANDIDATES,
    UNORDERED_COLUMNS,
    LabelReader,
    PairTurns,
    candidate_columns,
    split_pair,
)
from lrlhf.datamodules.rows.prompt_rows import PAIR_COLUMNS
from lrlhf.media import MediaRefs
from lrlhf.media.parts import KINDS
from lrlhf.rewards import RewardError, completion_text
from lrlhf.rewards.judge.verdicts import (
    SWAPPED,
    SYSTEM,
    Choice,
    FormName,
    JudgeTemplate,
    Shown,
    prompt_text,
    verdict_form,
)
from lrlhf.types import Message, Prompt

MediaByKind = Mapping[str, list[Any]]


class CandidateMedia(NamedTuple):
    """One candidate."""

    text: str
    media: MediaByKind


class RatedPair(NamedTuple):
    """Two candidates and what people said of them."""

    prompt: Prompt
    media: MediaByKind
    """What the prompt shows."""
    candidates: tuple[CandidateMedia, CandidateMedia]
    label: float
    """1: the first is better, -1: the second, 0: neither."""
    placed: bool
    """Whether the row says which candidate stands first, and not only which is the better one."""
    further: frozenset[str]
    """Columns of the row that nothing of this was read from."""

    @property
    def reached(self) -> Reached:
        """What of the row the judge is shown; the answers are what it learns of."""
        answers = "\n".join(candidate.text for candidate in self.candidates)
        besides = repr((self.media, self.candidates, self.label))
        return Reached(f"{prompt_text(self.prompt)}\n{answers}", answers, besides, self.further)

    @property
    def shown(self) -> Shown:
        """What the candidates are."""
        media = self.candidates[0].media
        return "Image" if media["image"] else "Video" if media["video"] else "Response"

    def keys(self) -> Iterator[str]:
        """Yield what pairs of another split must not share: the prompt, or the candidates."""
        # one question may be asked about all pictures: pairs are told apart by what they show
        by_candidates = any(any(candidate.media.values()) for candidate in self.candidates)
        if not by_candidates and (self.prompt or any(self.media.values())):
            # not as Python writes it: images among its parts are others in each process
            yield f"{prompt_text(self.prompt)!r} {_digest(self.media)}"
        else:
            yield from (f"{each.text!r} {_digest(each.media)}" for each in self.candidates)


def read_pair(row: Row, labels: LabelReader, prompt_column: str = "prompt") -> RatedPair:
    """Read a row of any kind that `PreferenceDataModule` takes.

    Raises:
        BadRow: A column is missing, or holds something else.
    """
    row = with_turns(row, prompt_column, *PAIR_COLUMNS, *UNORDERED_COLUMNS)
    shown = _shown_pair(row, labels, prompt_column)
    if shown is not None:
        return shown
    names = candidate_columns(row)
    split = split_pair(row, prompt_column, names, hh_as_chat=True)
    turns = split.prompt if isinstance(split, PairTurns) else ()
    first, second = (
        CandidateMedia(_content(each), {kind: [] for kind in KINDS})
        for each in (split.first, split.second)
    )
    return RatedPair(
        _prompt_turns(split.prompt, row),
        media_text(turns, media_in(row)),
        (first, second),
        _label(row, labels, names),
        names == UNORDERED_COLUMNS,
        frozenset(row.keys() - {prompt_column, *names, *media_columns(), *SYSTEM_COLUMNS}),
    )


def _shown_pair(row: Row, labels: LabelReader, prompt_column: str) -> RatedPair | None:
    """Read a pair whose candidates are images or videos, if it is one."""
    for names, suffixes in SHOWN_CANDIDATES.items():
        media = [media_in(row, suffix) for suffix in suffixes]
        if not any(any(each.values()) for each in media):
            continue
        for suffix, one in zip(suffixes, media, strict=True):
            if not any(one.values()):
                raise BadRow("missing media", f"columns *{suffix} name no image and no video")
        texts = (text_of(row, name) if row.get(name) is not None else "" for name in names)
        first, second = map(CandidateMedia, texts, media)
        columns = (column for suffix in ("", *suffixes) for column in media_columns(suffix))
        return RatedPair(
            _prompt_turns(text_of(row, prompt_column), row),
            media_in(row),
            (first, second),
            _label(row, labels, names),
            names == UNORDERED_COLUMNS,
            frozenset(row.keys() - {prompt_column, *names, *columns, *SYSTEM_COLUMNS}),
        )
    return None


def _prompt_turns(prompt: Prompt, row: Row) -> Prompt:
    """Return a prompt with the row's system turn before it."""
    opening: tuple[Message, ...] = ({"role": "user", "content": prompt},) if prompt else ()
    turns = opening if isinstance(prompt, str) else prompt
    turns_with_system = with_system(turns, row)
    return prompt if turns_with_system == turns else turns_with_system


def _label(row: Row, labels: LabelReader, names: tuple[str, str]) -> float:
    return (labels.of_candidates(row) if names == UNORDERED_COLUMNS else labels.of_chosen(row))[0]


def _content(answer: str | tuple[Message, ...]) -> str:
    text = completion_text(answer)
    if not text.strip():
        raise BadRow("empty text", "a candidate has no text after the shared prompt")
    return text.strip()


def _digest(media: MediaByKind) -> str:
    return MediaRefs(*(tuple(media[kind]) for kind in KINDS)).key


logger = logging.getLogger(__name__)

_GOLD: dict[float, Choice] = {1.0: "A", -1.0: "B", 0.0: "tie"}
_MARK = re.compile("\0([01])\0")
"""Stands for what a candidate shows; no text has it."""


class VerdictTasks(Source):
    """Questions which of two candidates is better, from any pairs that a reward model learns from.

    A row has the question as ``prompt`` (messages) and the right reply as ``completion``, so that
    `SupervisedDataModule` trains on it and `PromptDataModule` makes a prompt of it. ``gold`` is
    the right verdict (``A``, ``B`` or ``tie``) for `VerdictCorrect`, ``pair`` and ``exchanged``
    say which pair it is and whether its candidates have changed places. All further columns stay.

    The question is the one that `JudgeReward` asks with the same form, template, rubric and system
    prompt in mode pairwise. Images of the prompt stand before it; candidates that are images or
    videos stand in the place of the responses.

    Args:
        pairs: Rows as of `PreferenceDataModule`: a file, a folder, a hub id, a `Source`, or
            rows from Python. Its files are in one folder.
        form: How the verdict is asked for and given: ``line``, ``direct`` or ``answer``, see
            `JudgeReward`.
        template: Jinja2 text of the question in place of the form's, which may use ``prompt``,
            ``responses``, ``letters``, ``rubric``, ``shown``, and columns.
        rubric: What counts, in words.
        rubric_column: Column with what counts in this row, such as ``criteria``, added to the
            rubric.
        system: System prompt; empty: none.
        positions: ``random``: each pair once, the better one first in exactly half of them, as the
            seed says; ``both``: each pair twice, its candidates exchanged; ``given``: as they are,
            where the better one of ``chosen`` and ``rejected`` is always the first. Rows whose
            reasoning is part of the reply stay as they are, because it names the positions.
        ties: Keep pairs of equally good candidates.
        reasoning_column: Column with the reasoning that the reply begins with, where a row has
            some and the form writes it; null: replies are verdicts alone. It must have seen the
            candidates in the order of ``candidate0`` and ``candidate1``, or of images ``_0`` and
            ``_1``: ``chosen`` and ``rejected`` do not tell in which order it saw them.
        prompt_column: Column with what the candidates answer.
        label_column: Column with the label of candidate 0 and 1; null: ``preference`` or another
            that `PreferenceDataModule` finds.
        part: Which pairs. Two sources with the same data, seed and ``validation_fraction``, one
            ``train`` and one ``validation``, share no prompt; with a share that a data module
            holds out, both orders of a pair could be in different parts.
        validation_fraction: Share of the pairs that ``validation`` gets.
        seed: Of the positions and the parts.

    Raises:
        ValueError: The form is not known, or the template is none or does not show both responses.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        pairs: str | Source | Rows,
        *,
        form: FormName = "line",
        template: str | None = None,
        rubric: str | None = None,
        rubric_column: str | None = None,
        system: str = SYSTEM,
        positions: Literal["random", "both", "given"] = "random",
        ties: bool = True,
        reasoning_column: str | None = "reasoning",
        prompt_column: str = "prompt",
        label_column: str | None = None,
        part: Literal["all", "train", "validation"] = "all",
        validation_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        self._given = Weighted(pairs).source
        self._form = verdict_form(form)
        self._template = JudgeTemplate(template or self._form.template)
        self._rubric, self._rubric_column, self._system = rubric, rubric_column, system
        if positions not in ("random", "both", "given"):
            raise ValueError(f"positions is {positions!r}; choose random, both or given")
        self._positions, self._ties = positions, ties
        self._reasoning_column, self._prompt_column = reasoning_column, prompt_column
        columns = {"preference": label_column} if label_column else {}
        self._labels = LabelReader(("preference",), columns)
        self._part, self._fraction, self._seed = part, validation_fraction, seed

    @property
    def name(self) -> str:
        paths = self._given
        return f"verdicts on {paths.name if isinstance(paths, Source) else paths}"

    @property
    def folder(self) -> Path | None:
        folders = {source.folder for source in self._sources()}
        if len(folders) > 1:
            raise BadDataError(f"{self.name}: files of several folders; give each its own entry")
        return folders.pop()

    def prepare(self) -> None:
        for source in self._sources():
            source.prepare()

    def rows(self) -> Iterable[Row | BadRow]:
        entries = self._of_part(self._pairs())
        decided = 0
        for location, entry in entries:
            if isinstance(entry, BadRow):
                yield entry
                continue
            row, pair = entry
            if pair.label == 0 and not self._ties:
                continue
            reasoning = self._reasoning(row)
            if reasoning and not pair.placed and self._positions != "given":
                yield _without_positions(self._reasoning_column)
                continue
            for exchanged in self._orders(pair, location, decided, bool(reasoning)):
                try:
                    yield self._task(row, pair, reasoning, exchanged) | {"pair": location}
                except BadRow as problem:
                    yield problem
            decided += pair.label != 0 and not reasoning

    def _sources(self) -> tuple[Source, ...]:
        paths = self._given
        assert isinstance(paths, str | Source)
        return resolve_source(paths)

    def _pairs(self) -> Iterator[tuple[str, tuple[Row, RatedPair] | BadRow]]:
        """Yield each pair with its place, and name what of them no question shows."""
        unused: Counter[Unused] = Counter()
        conservation = Conservation(
            lambda row, _: read_pair(row, self._labels, self._prompt_column),
            lambda pair: pair.reached,
            remedy="write it into the contents, or leave it out",
        )
        for source in self._sources():
            for number, row in enumerate(source, start=1):
                location = f"{source.name}:{number}"
                try:
                    if isinstance(row, BadRow):
                        raise row
                    pair = read_pair(row, self._labels, self._prompt_column)
                    unused.update(conservation.unused(row, None, pair))
                    yield location, (row, pair)
                except BadRow as problem:
                    yield location, problem
        for note in unused_notes(unused):
            rank_zero_only(logger.warning)("%s: %s", self.name, note)

    def _of_part(
        self, entries: Iterable[tuple[str, tuple[Row, RatedPair] | BadRow]]
    ) -> Iterable[tuple[str, tuple[Row, RatedPair] | BadRow]]:
        if self._part == "all":
            return entries
        held_out = [*entries]
        good = [n for n, (_, entry) in enumerate(held_out) if not isinstance(entry, BadRow)]
        keys = [[*entry[1].keys()] for _, entry in held_out if not isinstance(entry, BadRow)]
        train, validation = hold_out(keys, fraction=self._fraction, seed=self._seed)
        left_out = {good[n] for n in (validation if self._part == "train" else train)}
        return [entry for n, entry in enumerate(held_out) if n not in left_out]

    def _reasoning(self, row: Row) -> str:
        column = self._reasoning_column
        if column is None or not self._form.writes_reasoning or is_empty(row.get(column)):
            return ""
        return text_of(row, column).strip()

    def _orders(
        self, pair: RatedPair, location: str, decided: int, reasoned: bool
    ) -> tuple[bool, ...]:
        """Return whether the candidates change places, for each question about them.

        Args:
            pair: The pair.
            location: Where it stands.
            decided: Pairs before it of which one candidate is better and which may be exchanged.
            reasoned: Whether there is reasoning.
        """
        if reasoned or self._positions == "given":
            return (False,)
        if self._positions == "both":
            return (False, True)
        if pair.label == 0:
            return (_is_exchanged(self._seed, int(location.rpartition(":")[2]), index=1),)
        # of two pairs that follow each other one has the better candidate first
        better_first = _is_exchanged(self._seed, decided // 2) ^ bool(decided % 2)
        return ((pair.label > 0) != better_first,)

    def _task(self, row: Row, pair: RatedPair, reasoning: str, exchanged: bool) -> dict[str, Any]:
        gold = _GOLD[pair.label]
        gold = SWAPPED[gold] if exchanged else gold
        content = self._question(row, pair, exchanged)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return {
            **{name: value for name, value in row.items() if name in pair.further},
            "prompt": [*system, {"role": "user", "content": content}],
            "completion": self._form.write(gold, pair.shown, reasoning),
            "gold": gold,
            "exchanged": exchanged,
        }

    def _question(self, row: Row, pair: RatedPair, exchanged: bool) -> str | list[dict[str, Any]]:
        candidates = pair.candidates[::-1] if exchanged else pair.candidates
        shown = [_parts(candidate.media) for candidate in candidates]
        responses = [
            "\n".join(filter(None, (f"\0{n}\0" if shown[n] else "", one.text)))
            for n, one in enumerate(candidates)
        ]
        for column in self._template.columns:
            if column not in row:
                raise missing_column(column, row, setting="template")
        try:
            text = self._template.render(
                prompt=prompt_text(pair.prompt),
                responses=responses,
                rubric=self._rubric_of(row),
                shown=pair.shown,
                **{name: row[name] for name in self._template.columns},
            )
        except RewardError as error:
            raise BadRow("template failed", str(error)) from error
        pieces = _MARK.split(text)
        before = _parts(pair.media)
        if len(pieces) == 1 and not any(shown):
            return [*before, _text(text)] if before else text
        if {*pieces[1::2]} != {"0", "1"}:
            raise ValueError("template does not show both responses: use {{ responses[0] }} and …")
        filled = (shown[int(one)] if odd % 2 else [_text(one)] for odd, one in enumerate(pieces))
        return [*before, *(part for parts in filled for part in parts if part.get("text") != "")]

    def _rubric_of(self, row: Row) -> str | None:
        column = self._rubric_column
        own = None if column is None else text_of(row, column, setting="rubric_column")
        return "\n".join(filter(None, (self._rubric, own))) or None


def _without_positions(column: str | None) -> BadRow:
    return BadRow(
        "reasoning without positions",
        f"column {column!r} may name the positions of the candidates, and chosen and rejected do "
        "not tell them: the first one would always be right",
        remedy="name the candidates candidate0 and candidate1 in the order that the reasoning saw, "
        "with a label; or set `reasoning_column: null`, which leaves the reasoning out",
    )


def _parts(media: MediaByKind) -> list[dict[str, Any]]:
    return [{"type": kind, kind: value} for kind in KINDS for value in media[kind]]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _is_exchanged(seed: int, number: int, index: int = 0) -> bool:
    """Decide whether two candidates change places, by nothing but these numbers."""
    digest = hashlib.blake2b(f"{seed}:{number}:{index}".encode(), digest_size=1).digest()
    return digest[0] % 2 == 1
