"""One row of a preference data set: from its columns to two texts and their labels, to tokens."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, missing_column, nearest
from lrlhf.datamodules.rows.chat import (
    ChatFormat,
    Endings,
    Span,
    Text,
    Tokens,
    Turns,
    common_prefix,
    loses_text,
    read_messages,
    tokenize,
    tokenize_ended,
    tokenize_spans,
    with_end,
    with_system,
)
from lrlhf.datamodules.rows.collate import Candidate, PairRow
from lrlhf.datamodules.rows.columns import (
    is_empty,
    number_of,
    structure_of,
    text_of,
    with_turns,
    wrong_type,
)
from lrlhf.datamodules.rows.conservation import Reached, after
from lrlhf.datamodules.rows.media_rows import (
    DeferredMedia,
    MediaReader,
    bare_parts,
    media_columns,
    parts_in,
)
from lrlhf.datamodules.rows.prompt_rows import (
    PromptTemplate,
    is_transcript,
    repeat_prompt,
    split_messages,
    split_texts,
    transcript_messages,
    without_prompt,
)
from lrlhf.media import MediaRefs
from lrlhf.models import unsplit
from lrlhf.rewards.learned import text_without_marks
from lrlhf.rollout.records import plain_json
from lrlhf.types import Message

LABELS = {"a": 1.0, "b": -1.0, "c": 0.0, "equal": 0.0, "tie": 0.0, "same": 0.0}
"""Label texts in lower case; A: candidate 0 is better, B: candidate 1, the others: a tie."""

MISSING = float("nan")


@dataclass(frozen=True)
class LabelReader:
    """Reads one label per head, in the order of ``heads``.

    A head that ``columns`` does not name is looked up in the column ``labels`` (a mapping from
    heads to labels), then in columns called like the head or ``<head>_label``; with one head,
    ``label`` and ``preference`` serve too.
    """

    heads: Sequence[str]
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for head in self.columns:
            if head not in self.heads:
                raise ValueError(
                    f"label_columns names the head {head!r}{nearest(head, self.heads)}; "
                    f"the heads are {', '.join(self.heads)}"
                )

    def of_candidates(self, row: Row) -> tuple[float, ...]:
        """Read +1, -1 or 0 per head of a row with ``candidate0`` and ``candidate1``; NaN: none."""
        labels = tuple(self._label(row, head) for head in self.heads)
        if all(math.isnan(label) for label in labels):
            problem = missing_column(
                self.columns.get(self.heads[0], "labels"), row, setting="label_columns"
            )
            raise BadRow(
                "no label",
                f"none of the heads {', '.join(self.heads)} is labelled: {problem.detail}",
                remedy="name each head's column in `label_columns`",
            )
        return labels

    def of_chosen(self, row: Row) -> tuple[float, ...]:
        """Read the labels of a row with ``chosen`` and ``rejected``.

        With several heads the column ``head`` says which of them, one name or a list, judged
        chosen better; the others are not labelled.
        """
        named = row.get("head")
        if len(self.heads) == 1 and named is None:
            return (1.0,)
        if named is None:
            raise BadRow(
                "no label",
                f"it says which answer is better, not by which head ({', '.join(self.heads)})",
                remedy="add a column `head` with the head's name, or `columns: {head: …}` to the "
                "source in the list",
            )
        listed = [named] if isinstance(named, str) else named
        if not isinstance(listed, list | tuple):
            raise wrong_type("head", "a head's name or a list of them", named)
        for head in listed:
            if head not in self.heads:
                raise BadRow(
                    "unknown head", f"column 'head' names {head!r}{nearest(str(head), self.heads)}"
                )
        return tuple(1.0 if head in listed else MISSING for head in self.heads)

    def _label(self, row: Row, head: str) -> float:
        if head in self.columns:
            return _label_of(row.get(self.columns[head]), self.columns[head])
        labels = row.get("labels")
        written = isinstance(labels, str) and labels.lstrip().startswith("{")
        if written or isinstance(labels, Mapping):
            labels = structure_of(row, "labels", dict) or {}
            return _label_of(labels.get(head), f"labels[{head}]")
        names = [head, f"{head}_label"]
        if len(self.heads) == 1:
            names += ["labels", "label", "preference"]
        for name in names:
            if row.get(name) is not None:
                return _label_of(row[name], name)
        return MISSING


def _label_of(value: object, column: str) -> float:
    if is_empty(value):
        return MISSING
    key = value.strip().lower() if isinstance(value, str) else None
    if key not in LABELS:
        raise BadRow(
            "unknown label",
            f"column {column!r} is {value!r}",
            remedy="write A (candidate 0 is better), B (candidate 1 is better) or C (equal)",
        )
    return LABELS[key]


@dataclass(frozen=True)
class MarginReader:
    """Reads by how much the better candidate should win.

    Args:
        column: Column with the margin; None: it is not read.
        scores: Columns with the scores of the better and the worse candidate, whose difference is
            the margin of a row that has none in ``column``; None: scores are columns like any.
    """

    column: str | None = "margin"
    scores: tuple[str, str] | None = None

    def __call__(self, row: Row) -> float | None:
        """Return the margin of a row, None where it has none, or raise `BadRow`."""
        margin = None if self.column is None else number_of(row, self.column)
        what = f"column {self.column!r}"
        if margin is None and self.scores is not None:
            better, worse = (self._score(row, name) for name in self.scores)
            margin = better - worse
            what = f"{self.scores[0]} - {self.scores[1]}"
        if margin is not None and margin < 0:
            raise BadRow(
                "negative margin",
                f"{what} is {margin:g}: the better one cannot win by less",
                remedy="see which of the two candidates is the better one",
            )
        return margin

    def _score(self, row: Row, column: str) -> float:
        if column not in row:
            raise missing_column(column, row, setting="score_columns")
        score = number_of(row, column)
        if score is None:
            raise wrong_type(column, "a number", row[column])
        return score


UNORDERED_COLUMNS = ("candidate0", "candidate1")
SHOWN_CANDIDATES = {
    UNORDERED_COLUMNS: ("_0", "_1"),
    ("chosen", "rejected"): ("_chosen", "_rejected"),
}
"""Columns of the candidates' texts, and what follows ``image``, ``video`` or ``audio`` in the names
of the columns with their media."""


@dataclass(frozen=True)
class TextPair:
    """Two candidates as text."""

    prompt: Text
    candidates: tuple[Text, Text]
    """Each with the prompt before it, as the model reads them."""
    refs: tuple[MediaRefs, MediaRefs]
    """What each shows, in its prompt and in itself."""
    prompt_refs: MediaRefs = MediaRefs()  # noqa: RUF009  frozen
    """What the prompt of text answers shows."""
    spans: tuple[Sequence[Span] | None, Sequence[Span] | None] = (None, None)
    """Characters of an answer that are learnt; None: all."""


@dataclass(frozen=True)
class PairDraft:
    """A row that was read and not yet tokenised."""

    pair: TextPair
    keys: tuple[str, ...]
    """Pairs that share one of these belong in the same split."""
    labels: tuple[float, ...]
    margin: float | None
    info: Mapping[str, Any]

    @property
    def reached(self) -> Reached:
        """What of the row the model reads, and what metrics tell apart."""
        texts = [text.text for text in self.pair.candidates]
        learnt = (after(self.pair.prompt.text, text) for text in texts)
        besides = repr((self.labels, self.margin, self.pair.refs))
        rendered = self.pair.candidates[0].complete
        return Reached("\n".join(texts), "\n".join(learnt), besides, ("source",), rendered=rendered)


@dataclass(frozen=True)
class PreferenceParser:
    """Reads rows as pairs of candidates; options as in `PreferenceDataModule`."""

    chat: ChatFormat
    labels: LabelReader
    margins: MarginReader
    media: MediaReader
    prompt_column: str = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    as_chat: bool = False
    hh_as_chat: bool = False
    instruction: PromptTemplate | None = None
    answers_only: bool = False
    """The module learns to write the candidates, which cannot be images then."""

    def __call__(self, row: Row, folder: Path | None = None) -> PairDraft:
        """Parse one row, or raise `BadRow`; relative paths start from ``folder``."""
        answers = (self.chosen_column, self.rejected_column, *UNORDERED_COLUMNS)
        row = with_turns(row, self.prompt_column, *answers)
        shown = self._shown(row, folder)
        if shown is not None:
            return shown
        names = candidate_columns(row, (self.chosen_column, self.rejected_column))
        pair, prompt = self._texts(row, folder, *names)
        # the same question about another picture is another prompt
        keys: tuple[str, ...] = (keyed(prompt, pair.prompt_refs),)
        if not prompt.strip() and not pair.prompt_refs:
            both = zip(pair.candidates, pair.refs, strict=True)
            keys = tuple(keyed(text.text, refs) for text, refs in both)
        return self._draft(row, pair, keys, names)

    def _shown(self, row: Row, folder: Path | None) -> PairDraft | None:
        """Read a pair whose candidates are images, videos or audio, if it is one.

        A candidate is shown in the turn of a user, beside the prompt; a text of its own follows
        as the assistant's answer.
        """
        for names, suffixes in SHOWN_CANDIDATES.items():
            own = [self.media.of_columns(row, folder, suffix) for suffix in suffixes]
            if not any(own):
                continue
            if self.answers_only:
                raise _no_answers(row, suffixes)
            shared = self.media.of_columns(row, folder)
            for name, suffix, refs in zip(names, suffixes, own, strict=True):
                if not refs and row.get(name) is None:
                    raise BadRow(
                        "missing media",
                        f"columns *{suffix} name no image, video or audio, and there is no "
                        f"{name!r}",
                    )
            (first, first_refs), (second, second_refs) = (
                self._shown_candidate(row, name, shared + refs, folder)
                for name, refs in zip(names, own, strict=True)
            )
            nothing = Text("", complete=True)
            pair = TextPair(nothing, (first, second), (first_refs, second_refs))
            # one question may be asked about all pictures: pairs are told apart by what they show
            keys = tuple(
                refs.key if refs else f"{name} {row.get(name)!r} {shared.key}"
                for name, refs in zip(names, own, strict=True)
            )
            columns = [column for suffix in suffixes for column in media_columns(suffix)]
            return self._draft(row, pair, keys, (*names, *columns))
        return None

    def _shown_candidate(
        self, row: Row, answer_column: str, refs: MediaRefs, folder: Path | None
    ) -> tuple[Text, MediaRefs]:
        prompt = row.get(self.prompt_column)
        shown: Message = {"role": "user", "content": bare_parts(refs)}
        turns: Turns
        if self.instruction is not None:
            turns = ({"role": "system", "content": self.instruction.render(row)}, shown)
        elif isinstance(prompt, list | tuple):
            turns = with_system(read_messages(prompt, self.prompt_column), row)
        else:
            prompt_turns = _user(prompt) if isinstance(prompt, str) else ()
            turns = with_system(prompt_turns or (shown,), row)
        if row.get(answer_column) is not None:
            answer = _turns(row, answer_column)
            turns = sum(without_prompt(turns, answer, answer_column), ())
        turns, refs = self.media.of_messages(turns, refs, folder)
        return Text(self.chat.render(turns, row, prompt=False), complete=True), refs

    def _draft(
        self, row: Row, pair: TextPair, keys: tuple[str, ...], names: tuple[str, ...]
    ) -> PairDraft:
        """Label a pair; ``names`` are the columns that it was read from, the candidates' first."""
        unordered = names[0] == "candidate0"
        labels = self.labels.of_candidates(row) if unordered else self.labels.of_chosen(row)
        equal = pair.candidates[0] == pair.candidates[1] and pair.refs[0].key == pair.refs[1].key
        if equal and any(abs(label) == 1 for label in labels):
            what = f"columns {names[0]!r} and {names[1]!r}"
            if row.get(names[0]) != row.get(names[1]):
                raise BadRow(
                    "identical candidates",
                    f"{what} differ only in what the chat template leaves out",
                    remedy="give a `chat_template` that keeps it",
                )
            raise BadRow("identical candidates", f"{what} are equal")
        used = {self.prompt_column, *names, "tools", "chat_template_kwargs", self.margins.column}
        if any(pair.refs):
            used |= {*media_columns()}
        info = {
            key: plain_json(value)
            for key, value in row.items()
            if key not in used and value is not None
        }
        if any(pair.refs):
            info |= {"media0": list(pair.refs[0].names), "media1": list(pair.refs[1].names)}
        return PairDraft(pair, keys, labels, self.margins(row), info)

    def _texts(
        self, row: Row, folder: Path | None, first: str, second: str
    ) -> tuple[TextPair, str]:
        """Return the pair, and the prompt as text, by which prompts are compared."""
        split = split_pair(
            row,
            self.prompt_column,
            (first, second),
            as_chat=self.as_chat,
            hh_as_chat=self.hh_as_chat,
        )
        if isinstance(split, PairTurns):
            return self._chat(row, folder, *split)
        refs = self.media.of_columns(row, folder)
        texts = [self.media.of_texts((split.prompt, own), refs) for own in split[1:]]
        pair = (Text("".join(texts[0]), False), Text("".join(texts[1]), False))
        prompt = texts[0][0]
        before = self.media.refs_within((prompt,), refs)
        return TextPair(Text(prompt, False), pair, (refs, refs), before), prompt

    def _chat(
        self, row: Row, folder: Path | None, turns: Turns, first: Turns, second: Turns
    ) -> tuple[TextPair, str]:
        for answer in (first, second):
            if not any(turn.get("content") or turn.get("tool_calls") for turn in answer):
                raise BadRow("empty text", "a candidate has no content after the shared prompt")
        turns = with_system(turns, row)
        shared = self.media.of_columns(row, folder)
        # an answer may show what the columns have left
        conversations, refs = zip(
            *(self.media.of_messages((*turns, *rest), shared, folder) for rest in (first, second)),
            strict=True,
        )
        start = len(turns)
        prompt = conversations[0][:start]  # what stands first is filled first
        if conversations[1][:start] != prompt:
            raise BadRow(
                "placeholder count",
                "one candidate has a mark of an image, video or audio, and neither the prompt nor "
                "the other candidate has one",
                remedy="put the mark into the prompt, or into both candidates",
            )
        before = self.chat.opened(prompt, row) if prompt else ""
        texts, spans = [], []
        for chat in conversations:
            texts.append(Text(self.chat.render(chat, row, prompt=False), True))
            spans.append(self.chat.answer_spans(chat, row, start) if self.answers_only else None)
        pair = TextPair(
            Text(before, True),
            (texts[0], texts[1]),
            (refs[0], refs[1]),
            refs[0].first(parts_in(prompt)),
            (spans[0], spans[1]),
        )
        return pair, before


def _no_answers(row: Row, suffixes: Sequence[str]) -> BadDataError:
    named = {column for suffix in suffixes for column in media_columns(suffix)}
    shown = ", ".join(sorted(named & row.keys()))
    return BadDataError(
        f"a row has images, videos or audio as its candidates ({shown}), which a policy cannot "
        "learn to write: train a RewardModel on such pairs; for DPO put what both answers are "
        "about into image, video or audio, and the answers into chosen and rejected"
    )


def candidate_columns(
    row: Row, columns: tuple[str, str] = ("chosen", "rejected")
) -> tuple[str, str]:
    """Return the columns of the candidates' texts: candidate0 and candidate1, or ``columns``.

    Raises:
        BadRow: One is missing.
    """
    unordered = any(row.get(name) is not None for name in UNORDERED_COLUMNS)
    names = UNORDERED_COLUMNS if unordered else columns
    for name, setting in zip(names, ("chosen_column", "rejected_column"), strict=True):
        if row.get(name) is None:
            raise missing_column(name, row, setting=setting)
    return names


class PairTexts(NamedTuple):
    """A prompt and two answers as plain text."""

    prompt: str
    first: str
    second: str


class PairTurns(NamedTuple):
    """The turns of a prompt, and those of either answer alone."""

    prompt: Turns
    first: Turns
    second: Turns


def split_pair(
    row: Row,
    prompt_column: str,
    names: tuple[str, str],
    *,
    as_chat: bool = False,
    hh_as_chat: bool = False,
) -> PairTexts | PairTurns:
    """Tell the prompt of a pair from its answers; options as in `PreferenceDataModule`.

    Raises:
        BadRow: A column holds something else, or nothing is left of an answer.
    """
    prompt = row.get(prompt_column)
    if any(isinstance(value, list | tuple) for value in (prompt, *(row[name] for name in names))):
        return _conversations(row, prompt_column, *names)
    texts = text_of(row, names[0]), text_of(row, names[1])
    if prompt is None:
        if hh_as_chat and is_transcript(texts[0]) and is_transcript(texts[1]):
            return PairTurns(*split_messages(*map(transcript_messages, texts)))
        prompt, *answers = split_texts(*texts)
    else:
        prompt = text_of(row, prompt_column, allow_empty=True)
        answers = list(texts)
        if repeat_prompt(prompt, *texts, in_chat=as_chat):
            answers = [text.removeprefix(prompt) for text in texts]
    for name, answer in zip(names, answers, strict=True):
        if not answer.strip():
            raise BadRow("empty text", f"column {name!r} has nothing after the shared prompt")
    if not as_chat:
        return PairTexts(prompt, *answers)
    first, second = ((_turn("assistant", answer),) for answer in answers)
    return PairTurns(_user(prompt), first, second)


def _conversations(row: Row, prompt_column: str, first: str, second: str) -> PairTurns:
    """Return the turns of the prompt, and those of either answer alone."""
    candidates = _turns(row, first), _turns(row, second)
    prompt = row.get(prompt_column)
    if isinstance(prompt, str | None):
        user = _user(prompt or "")
    else:
        user = read_messages(prompt, prompt_column)
    if not user:
        return PairTurns(*split_messages(*candidates))
    before, answer = without_prompt(user, candidates[0], first)
    other_before, other_answer = without_prompt(user, candidates[1], second)
    if before != other_before:
        raise BadRow(
            "different prompts",
            f"what stands before the answer is not the same in {first!r} and {second!r}",
        )
    return PairTurns(before, answer, other_answer)


def tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase,
    drafts: Sequence[PairDraft],
    endings: Endings | None = None,
) -> list[PairRow | BadRow]:
    """Tokenise both candidates of every pair.

    An answer begins where the ids of prompt and answer part from the ids of the prompt alone, so
    that a token which spans both counts as answer.

    Args:
        tokenizer: Of the texts.
        drafts: The pairs.
        endings: How answers end that are learnt; None: nothing is written.
    """
    pairs = [draft.pair for draft in drafts]
    prompts = tokenize(tokenizer, [pair.prompt for pair in pairs])
    both = [
        tokenize_ended(tokenizer, [pair.candidates[index] for pair in pairs]) for index in (0, 1)
    ]
    lossy, specials = loses_text(tokenizer), tokenizer.all_special_tokens
    rows: list[PairRow | BadRow] = []
    for draft, prompt, *ids in zip(drafts, prompts, *both, strict=True):
        try:
            first, second = (
                _candidate(draft.pair, index, prompt, ids[index], tokenizer, endings)
                for index in (0, 1)
            )
        except BadRow as problem:
            rows.append(problem)
        else:
            keys = tuple(digest(key) for key in draft.keys)
            rows.append(
                PairRow(
                    texts=(first, second),
                    labels=draft.labels,
                    margin=draft.margin,
                    keys=keys,
                    info=draft.info,
                    source_texts=_row_texts(draft.pair, specials) if lossy else None,
                )
            )
    return rows


def _row_texts(pair: TextPair, specials: Sequence[str]) -> tuple[str, str, str]:
    """Return the prompt and the answers as text, without what a template puts around answers."""
    starts = [_shared_start(pair.prompt.text, text.text) for text in pair.candidates]
    first, second = (
        text_without_marks(text.text.removeprefix(start), specials if text.complete else ())
        for start, text in zip(starts, pair.candidates, strict=True)
    )
    return unsplit(starts[0]), unsplit(first), unsplit(second)


def _shared_start(prompt: str, text: str) -> str:
    """Return the prompt as far as a text begins with it, cut in front of the word that differs."""
    start = commonprefix([prompt, text])  # noqa: RUF071  of letters, as it is meant
    return start if start == prompt else re.sub(r"\S*\Z", "", start)


def _candidate(
    pair: TextPair,
    index: int,
    prompt: Tokens,
    ids: Tokens,
    tokenizer: PreTrainedTokenizerBase,
    endings: Endings | None,
) -> Candidate:
    start = common_prefix(prompt, ids)
    if start >= len(ids):
        raise BadRow("empty text", f"the answer of candidate {index} has no token")
    text, spans, trained = pair.candidates[index], pair.spans[index], None
    ends: tuple[int, ...] = ()
    if spans is not None:
        ((_, trained),) = tokenize_spans(tokenizer, [text.text], [spans])
    text = with_end(tokenizer, text)
    if endings is not None:
        learnt = np.arange(len(ids)) >= start if trained is None else trained
        ended = endings.learnt(ids, learnt, open_ended=text.complete)
        if len(ended.ids) > len(ids):
            text = text._replace(text=text.text + endings.mark)
        ids, trained, ends = ended.ids, None if trained is None else ended.trained, ended.ends
    refs = pair.refs[index]
    alone = not pair.prompt.text or len(refs) == len(pair.prompt_refs)
    before = None if alone else DeferredMedia(pair.prompt, pair.prompt_refs)
    deferred = DeferredMedia(text, refs, before) if refs else None
    return Candidate(input_ids=ids, start=start, trained=trained, ends=ends, deferred=deferred)


def keyed(key: str, refs: MediaRefs) -> str:
    """Return what tells a text apart from others: itself, and what it shows."""
    return f"{key}\n{refs.key}" if refs else key


def digest(key: str) -> str:
    """Stand for a long text where only equality matters."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _turns(row: Row, column: str) -> Turns:
    if isinstance(row[column], str):
        return (_turn("assistant", text_of(row, column)),)
    return read_messages(row[column], column)


def _user(prompt: str) -> Turns:
    return (_turn("user", prompt),) if prompt.strip() else ()


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
