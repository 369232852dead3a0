"""One row of a preference data set, from its columns to two texts and their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import ChatFormat, read_messages
from lrlhf.datamodules.rows.columns import plain, text_of, wrong_type
from lrlhf.datamodules.rows.implicit_prompts import (
    is_transcript,
    repeat_prompt,
    shared_length,
    split_messages,
    split_texts,
    transcript_messages,
    without_prompt,
)
from lrlhf.datamodules.rows.media_rows import MediaReader, bare_parts, media_columns
from lrlhf.datamodules.rows.preference_labels import LabelReader, MarginReader
from lrlhf.datamodules.rows.prompt_rows import PromptTemplate
from lrlhf.datamodules.rows.tokenizing import Text
from lrlhf.media import MediaRefs
from lrlhf.types import Message

_SHOWN_CANDIDATES = {
    ("candidate0", "candidate1"): ("_0", "_1"),
    ("chosen", "rejected"): ("_chosen", "_rejected"),
}
"""Columns of the candidates' texts, and what follows ``image`` or ``video`` in the names of the
columns with their media."""
_ID_COLUMNS = (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))


@dataclass(frozen=True)
class TextPair:
    """Two candidates as text."""

    prompt: Text
    candidates: tuple[Text, Text]
    """Each with the prompt before it, as the model reads them."""
    refs: tuple[MediaRefs, MediaRefs] = (MediaRefs(), MediaRefs())
    """What each shows, in its prompt and in itself."""
    prompt_refs: MediaRefs = field(default_factory=MediaRefs)
    """What the prompt of text answers shows."""


@dataclass(frozen=True)
class TokenPair:
    """Two candidates that the data brings as token ids."""

    candidates: tuple[list[int], list[int]]


@dataclass(frozen=True)
class PairDraft:
    """A row that was read and not yet tokenised."""

    pair: TextPair | TokenPair
    keys: tuple[str, ...]
    """Pairs that share one of these belong in the same split."""
    labels: tuple[float, ...]
    margin: float | None
    info: Mapping[str, Any]


@dataclass(frozen=True)
class PreferenceParser:
    """Reads rows as pairs of candidates.

    Args:
        chat: Renders chat messages.
        labels: Reads the labels.
        prompt_column: Text or messages; absent where both candidates are whole conversations.
        margins: Reads the margins.
        as_chat: Make plain prompts and answers the turns of a chat.
        hh_as_chat: Make ``Human: … Assistant: …`` transcripts the turns of a chat.
        vocabulary: Bound of token ids that the data brings.
        media: Finds images and videos.
        instruction: System turn of pairs whose candidates are images or videos.
    """

    chat: ChatFormat
    labels: LabelReader
    vocabulary: int
    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    margins: MarginReader = field(default_factory=MarginReader)
    as_chat: bool = False
    hh_as_chat: bool = False
    media: MediaReader = MediaReader()  # noqa: RUF009  frozen
    instruction: PromptTemplate | None = None

    def __call__(self, row: Row, folder: Path | None = None) -> PairDraft:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        for names in _ID_COLUMNS:
            if names[0] in row or names[1] in row:
                first, second = (self._ids(row, name) for name in names)
                shared = first[: shared_length(first, second)]
                return self._draft(row, TokenPair((first, second)), (str(shared),), names)
        shown = self._shown(row, folder)
        if shown is not None:
            return shown
        names = self._candidate_columns(row)
        pair, prompt = self._texts(row, folder, *names)
        texts = tuple(text.text for text in pair.candidates)
        keys = (prompt,) if prompt.strip() else texts
        if pair.refs[0]:
            # the same question about another picture is another prompt
            keys = tuple(f"{key}\n{pair.refs[0].key}" for key in keys)
        return self._draft(row, pair, keys, names)

    def _shown(self, row: Row, folder: Path | None) -> PairDraft | None:
        """Read a pair whose candidates are images or videos, if it is one.

        A candidate is shown in the turn of a user, beside the prompt; a text of its own follows
        as the assistant's answer.
        """
        for names, suffixes in _SHOWN_CANDIDATES.items():
            columns = {column for suffix in suffixes for column in media_columns(suffix)}
            own = [self.media.of_columns(row, folder, suffix) for suffix in suffixes]
            if not any(own):
                continue
            shared = self.media.of_columns(row, folder)
            for name, suffix, refs in zip(names, suffixes, own, strict=True):
                if not refs and row.get(name) is None:
                    raise BadRow(
                        "missing media",
                        f"columns *{suffix} name no image and no video, and there is no {name!r}",
                    )
            both = [
                self._shown_candidate(row, name, shared + refs, folder)
                for name, refs in zip(names, own, strict=True)
            ]
            (first, first_refs), (second, second_refs) = both
            pair = TextPair(
                Text("", complete=True), (first, second), refs=(first_refs, second_refs)
            )
            prompt = row.get(self.prompt_column)
            keys = tuple(refs.key for refs in own)
            keys = (*keys, prompt) if isinstance(prompt, str) and prompt.strip() else keys
            used = (*names, *columns, *media_columns())
            return self._draft(row, pair, keys, used)
        return None

    def _shown_candidate(
        self, row: Row, answer_column: str, refs: MediaRefs, folder: Path | None
    ) -> tuple[Text, MediaRefs]:
        prompt = row.get(self.prompt_column)
        shown: Message = {"role": "user", "content": bare_parts(refs)}
        turns: tuple[Message, ...]
        if self.instruction is not None:
            turns = ({"role": "system", "content": self.instruction.render(row)}, shown)
        elif isinstance(prompt, list | tuple):
            turns = read_messages(prompt, self.prompt_column)
        else:
            turns = (_user(prompt) if isinstance(prompt, str) else ()) or (shown,)
        if row.get(answer_column) is not None:
            answer = self._turns(row, answer_column)
            turns = sum(without_prompt(turns, answer, answer_column), ())
        turns, refs = self.media.of_messages(turns, refs, folder)
        return Text(self.chat.render(turns, row, prompt=False), complete=True), refs

    def _draft(
        self, row: Row, pair: TextPair | TokenPair, keys: tuple[str, ...], names: tuple[str, ...]
    ) -> PairDraft:
        """Label a pair; ``names`` are the columns that it was read from, the candidates' first."""
        unordered = names[0] == "candidate0"
        labels = self.labels.of_candidates(row) if unordered else self.labels.of_chosen(row)
        if _equal(pair) and any(abs(label) == 1 for label in labels):
            raise BadRow("identical candidates", f"columns {names[0]!r} and {names[1]!r} are equal")
        used = {self.prompt_column, *names, "tools", "chat_template_kwargs", self.margins.column}
        shows = isinstance(pair, TextPair) and any(pair.refs)
        if shows:
            used |= {*media_columns()}
        info = {key: plain(value) for key, value in row.items() if key not in used}
        if isinstance(pair, TextPair) and shows:
            info |= {"media0": list(pair.refs[0].names), "media1": list(pair.refs[1].names)}
        return PairDraft(pair, keys, labels, self.margins(row), info)

    def _candidate_columns(self, row: Row) -> tuple[str, str]:
        if "candidate0" in row or "candidate1" in row:
            names = ("candidate0", "candidate1")
        else:
            names = (self.chosen_column, self.rejected_column)
        settings = ("chosen_column", "rejected_column")
        for name, setting in zip(names, settings, strict=True):
            if name not in row:
                raise missing_column(name, row, setting=setting)
        return names

    def _texts(
        self, row: Row, folder: Path | None, first: str, second: str
    ) -> tuple[TextPair, str]:
        """Return the pair, and the prompt as text, by which prompts are compared."""
        prompt = row.get(self.prompt_column)
        if isinstance(prompt, list | tuple) or any(
            isinstance(row[name], list | tuple) for name in (first, second)
        ):
            return self._chat(row, folder, *self._conversations(row, prompt, first, second))
        texts = text_of(row, first), text_of(row, second)
        if prompt is None:
            if self.hh_as_chat and is_transcript(texts[0]) and is_transcript(texts[1]):
                turns = split_messages(*map(transcript_messages, texts))
                return self._chat(row, folder, *turns)
            prompt, *answers = split_texts(*texts)
        else:
            prompt = text_of(row, self.prompt_column, allow_empty=True)
            answers = list(texts)
            if repeat_prompt(prompt, *texts, in_chat=self.as_chat):
                answers = [text.removeprefix(prompt) for text in texts]
        for name, answer in zip((first, second), answers, strict=True):
            if not answer.strip():
                raise BadRow("empty text", f"column {name!r} has nothing after the shared prompt")
        if self.as_chat:
            said = ((_turn("assistant", answer),) for answer in answers)
            return self._chat(row, folder, _user(prompt), *said)
        pair = (Text(prompt + answers[0], False), Text(prompt + answers[1], False))
        refs = self.media.of_columns(row, folder)
        return TextPair(Text(prompt, False), pair, (refs, refs), refs), prompt

    def _conversations(
        self, row: Row, prompt: object, first: str, second: str
    ) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
        """Return the turns of the prompt, and those of either answer alone."""
        candidates = self._turns(row, first), self._turns(row, second)
        if isinstance(prompt, str | None):
            given = _user(prompt or "")
        else:
            given = read_messages(prompt, self.prompt_column)
        if not given:
            return split_messages(*candidates)
        before, answer = without_prompt(given, candidates[0], first)
        other_before, other_answer = without_prompt(given, candidates[1], second)
        if before != other_before:
            raise BadRow(
                "different prompts",
                f"what stands before the answer is not the same in {first!r} and {second!r}",
            )
        return before, answer, other_answer

    def _chat(
        self,
        row: Row,
        folder: Path | None,
        turns: tuple[Message, ...],
        first: tuple[Message, ...],
        second: tuple[Message, ...],
    ) -> tuple[TextPair, str]:
        for answer in (first, second):
            if not any(turn.get("content") or turn.get("tool_calls") for turn in answer):
                raise BadRow("empty text", "a candidate has no content after the shared prompt")
        shared = self.media.of_columns(row, folder)
        turns, shown = self.media.of_messages(turns, shared, folder)
        before = self.chat.render(turns, row, prompt=True) if turns else ""
        texts, refs = [], []
        for rest in (first, second):
            answer, more = self.media.of_messages(rest, MediaRefs(), folder)
            texts.append(Text(self.chat.render((*turns, *answer), row, prompt=False), True))
            refs.append(shown + more)
        pair = TextPair(Text(before, True), (texts[0], texts[1]), (refs[0], refs[1]), shown)
        return pair, before

    def _turns(self, row: Row, column: str) -> tuple[Message, ...]:
        if isinstance(row[column], str):
            return (_turn("assistant", text_of(row, column)),)
        return read_messages(row[column], column)

    def _ids(self, row: Row, column: str) -> list[int]:
        if column not in row:
            raise missing_column(column, row)
        ids = row[column]
        if not isinstance(ids, list | tuple) or not all(type(token) is int for token in ids):
            raise wrong_type(column, "a list of token ids", ids)
        if not ids:
            raise BadRow("empty text", f"column {column!r} holds no token")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise BadRow(
                "wrong type",
                f"column {column!r} holds token ids outside 0…{self.vocabulary - 1}",
                remedy="the ids come from another tokenizer: give text instead",
            )
        return list(ids)


def _equal(pair: TextPair | TokenPair) -> bool:
    if isinstance(pair, TextPair) and pair.refs[0].key != pair.refs[1].key:
        return False
    return pair.candidates[0] == pair.candidates[1]


def _user(prompt: str) -> tuple[Message, ...]:
    return (_turn("user", prompt),) if prompt.strip() else ()


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
