"""One row of a preference data set as a question to a judge: prompt, candidates and label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import SYSTEM_COLUMNS, with_system
from lrlhf.datamodules.rows.columns import text_of, with_turns
from lrlhf.datamodules.rows.conservation import Reached
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
from lrlhf.rewards import completion_text
from lrlhf.rewards.judge.verdicts import Shown, prompt_text
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
