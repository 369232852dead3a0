"""The rows of a data module as an audit looks at them: read as a run reads them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.core import RowDataModule, RowKind
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.loading.splits import Located, Split
from lrlhf.datamodules.loading.validation import title_of
from lrlhf.datamodules.rows.bad_rows import BadRow, BadRows
from lrlhf.datamodules.rows.chat import ChatFormat, Span
from lrlhf.datamodules.rows.collate import Candidate
from lrlhf.datamodules.rows.media_rows import TokenizedText, media_columns
from lrlhf.datamodules.rows.preference_rows import PairDraft, PreferenceParser
from lrlhf.datamodules.rows.prompt_rows import (
    ASSISTANT,
    PromptDraft,
    PromptParser,
    is_transcript,
    transcript_messages,
)
from lrlhf.datamodules.rows.supervised_rows import SupervisedDraft, SupervisedParser, SupervisedRow
from lrlhf.media import MediaRefs
from lrlhf.rewards.function import content_text
from lrlhf.types import Message

Parser = PreferenceParser | PromptParser | SupervisedParser
Turn = tuple[str, str]
"""Role and content."""
Turns = list[Turn]
_UNORDERED = ("candidate0", "candidate1", *media_columns("_0"), *media_columns("_1"))


@dataclass(frozen=True, kw_only=True)
class AuditedRow:
    """One row that a run can use."""

    prompt: str
    """Without what a chat template adds."""
    question: str
    """What was asked last: the user's last turn, or all of a plain prompt."""
    answers: tuple[str, ...] = ()
    """The two candidates, without the prompt; of a row of prompts none; of a text to be learnt what
    begins with the assistant's first turn, the completion, or all of it."""
    labels: tuple[float, ...] = ()
    """By head: +1 the first candidate is better, -1 the second, 0 equal, NaN not labelled."""
    unordered: bool = False
    """The order of the candidates says nothing of which is better."""
    roles: tuple[tuple[str, ...], ...] = ()
    """Of the turns of each candidate with its prompt, or of the whole text; of text none."""
    blank: str = ""
    """What is blank in it, such as a turn; empty: nothing."""
    refs: tuple[MediaRefs, ...]
    """What each candidate shows, or what the prompt shows."""
    context: str = ""
    """What tells apart what the prompt shows; empty: nothing."""
    tokens: tuple[int, ...] = ()
    """Of each candidate with its prompt, or of the whole text."""
    answer_tokens: tuple[int, ...] = ()
    """Of each candidate, or of a text to be learnt those that the loss is on."""
    doubled: str = ""
    """A special token that stands twice in a row; empty: none."""
    keys: tuple[str, ...] = ()
    """Rows that share one belong in the same split."""
    split: str = ""
    place: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Prompt and answers."""
        return (self.prompt, *self.answers)

    @property
    def candidates(self) -> tuple[str, ...]:
        """What tells the answers apart: text, and what is shown."""
        pairs = zip(self.answers, self.refs, strict=True) if self.answers else ()
        return tuple(f"{answer.strip()}\n{refs.key if refs else ''}" for answer, refs in pairs)

    @property
    def shown(self) -> str:
        """What tells apart what the row shows; empty: it shows nothing."""
        return " ".join(refs.key for refs in self.refs if refs)

    @property
    def preferred(self) -> int | None:
        """Which candidate is better by the first head that says so; None: by no head."""
        unequal = [label for label in self.labels if abs(label) == 1]
        return (0 if unequal[0] > 0 else 1) if unequal else None


class BadRowFound(NamedTuple):
    """One row that a run leaves out."""

    split: str
    place: str
    problem: BadRow


class AuditedData(NamedTuple):
    """All rows."""

    rows: Sequence[AuditedRow]
    bad: Sequence[BadRowFound]
    totals: dict[str, int]
    """Rows by split, whether they can be used or not."""
    tokenizer: PreTrainedTokenizerBase
    is_pairs: bool

    @property
    def total(self) -> int:
        """Rows of all splits."""
        return sum(self.totals.values())


def read_data(data: RowDataModule[Any, Any], trainer: object) -> AuditedData:
    """Read every row of the training and validation data as a run would.

    Args:
        data: A `PromptDataModule`, `PreferenceDataModule` or `SupervisedDataModule`.
        trainer: Has what the data takes from the module that it is used with, such as a
            ``tokenizer``.

    Raises:
        BadDataError: A source cannot be read, or the data makes no sense as a whole.
        ValueError: The data module is of another kind, or has no tokenizer.
    """
    bad: list[BadRowFound] = []
    counters: list[BadRows] = []
    parsers: list[Parser] = []

    class RecordingBadRows(BadRows):
        def __init__(self, what: str) -> None:
            super().__init__(what)
            counters.append(self)

        def add(self, place: str, problem: BadRow) -> None:
            super().add(place, problem)
            bad.append(BadRowFound(self.what, place, problem))

    def audited(kind: RowKind[Any, Any, Any]) -> RowKind[Any, Any, Any]:
        if not isinstance(kind.parse, Parser):
            raise ValueError(
                f"{type(data).__name__} holds rows of another kind; audited are prompts "
                "(PromptDataModule), pairs (PreferenceDataModule) and texts (SupervisedDataModule)"
            )
        parsers.append(kind.parse)
        return _audited_kind(kind, kind.parse)

    train, held_out = data.read_all(trainer, audited, RecordingBadRows)
    splits = {"train": train, **{title_of(name): part for name, part in held_out.items()}}
    rows = [
        replace(located.value, split=split)
        for split, part in splits.items()
        for located in part.rows
    ]
    totals = {counter.what: counter.total for counter in counters}
    for split, part in splits.items():
        if split not in totals:  # some of the train rows
            totals["train"] -= len(part.rows)
            totals[split] = len(part.rows)
    parser = parsers[0]
    return AuditedData(
        rows, bad, totals, parser.chat.tokenizer, isinstance(parser, PreferenceParser)
    )


@dataclass(frozen=True)
class _Contents(ChatFormat):
    """Writes what was said, without roles and marks, and remembers the turns."""

    seen: list[Turns] = field(default_factory=list)

    def render(self, messages: Sequence[Message], row: Row, *, prompt: bool) -> str:
        del row, prompt
        turns = [(str(message["role"]), _content(message)) for message in messages]
        self.seen.append(turns)
        return "".join(f"{content}\n\n" for _, content in turns)

    def opened(self, messages: Sequence[Message], row: Row) -> str:
        return self.render(messages, row, prompt=True)

    def answer_spans(self, messages: Sequence[Message], row: Row, start: int) -> None:
        del messages, row, start

    def render_spans(
        self, messages: Sequence[Message], row: Row, *, without: Container[int] = ()
    ) -> tuple[str, list[Span]]:
        del without
        return self.render(messages, row, prompt=False), []


def _content(message: Message) -> str:
    calls = message.get("tool_calls")
    content = message.get("content")
    shows = isinstance(content, list | tuple) and any(p.get("type") != "text" for p in content)
    return content_text(content) + (f"\n{calls}" if calls else "") + ("\n<media>" * shows)


class _Kept(NamedTuple):
    """A row as the data module has it, parsed or tokenised, and what the audit keeps of it."""

    value: Any
    row: AuditedRow


def _audited_kind(kind: RowKind[Any, Any, Any], parser: Parser) -> RowKind[Any, Any, Any]:
    """Return a kind whose rows are `AuditedRow`s, of which the same are bad."""
    contents = _Contents(parser.chat.tokenizer)
    plain = replace(parser, chat=contents)
    specials = _specials(parser)

    def parse(row: Row, folder: Path | None) -> _Kept:
        contents.seen.clear()
        parsed_plain = plain(row, folder)
        # without turns the chat format had no part in it
        parsed = parser(row, folder) if contents.seen else parsed_plain
        if isinstance(parsed_plain, PairDraft):
            own = _of_pair(row, parsed_plain, contents.seen)
        elif isinstance(parsed_plain, SupervisedDraft):
            own = _of_text(parsed_plain, contents.seen)
        else:
            own = _of_prompt(parsed_plain, contents.seen)
        column = parser.column if isinstance(parser, PromptParser) else parser.prompt_column
        # beside messages, or a whole text, nobody reads a prompt
        read = not isinstance(parser, SupervisedParser) or parser.completion_column in row
        prompt = row.get(column) if read else None
        if isinstance(prompt, str) and not prompt.strip():
            own = replace(own, blank=f"column {column!r}")
        return _Kept(parsed, own)

    def finish(drafts: Sequence[_Kept]) -> list[_Kept | BadRow]:
        assert kind.finish is not None
        finished = kind.finish([draft.value for draft in drafts])
        return [
            value
            if isinstance(value, BadRow)
            else _Kept(value, _counted(draft.row, value, specials, tuple(kind.keys(value))))
            for draft, value in zip(drafts, finished, strict=True)
        ]

    def check(split: Split[_Kept], what: str) -> Split[AuditedRow]:
        plain_rows = [Located(row.component, row.place, row.value.value) for row in split.rows]
        places = {row.place for row in kind.check(replace(split, rows=plain_rows), what).rows}
        own = [
            Located(row.component, row.place, replace(row.value.row, place=row.place))
            for row in split.rows
            if row.place in places
        ]
        return Split(split.components, own, split.columns)

    return replace(
        kind,
        reached=lambda draft: draft.value.reached,
        parse=parse,
        finish=finish,
        check=check,
        keys=lambda row: row.keys,
        texts=lambda draft: kind.texts(draft.value),
        notes=lambda _: (),  # an audit has findings of its own
        placed=lambda row, _: row,
    )


def _specials(parser: Parser) -> dict[int, str]:
    """Return the special tokens that must not stand twice in a row, by id."""
    tokenizer = parser.chat.tokenizer
    may = {tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id}
    may = (may - {tokenizer.eos_token_id, tokenizer.bos_token_id}) | {*parser.media.placeholders}
    ids = sorted({*tokenizer.all_special_ids} - may)
    return {token: str(tokenizer.convert_ids_to_tokens(token)) for token in ids}


def _counted(
    row: AuditedRow, value: Any, specials: dict[int, str], keys: tuple[str, ...]
) -> AuditedRow:
    texts: Sequence[TokenizedText] = value.texts
    ids = [text.input_ids for text in texts]
    learnt = [len(text.input_ids) - text.start for text in texts if isinstance(text, Candidate)]
    learnt += [int(text.trained.sum()) for text in texts if isinstance(text, SupervisedRow)]
    return replace(
        row,
        tokens=tuple(len(token_id) for token_id in ids),
        answer_tokens=tuple(learnt),
        doubled=next(filter(None, (_doubled(each, specials) for each in ids)), ""),
        keys=keys,
    )


def _doubled(ids: NDArray[np.int32], specials: Mapping[int, str]) -> str:
    """Return the special token of the lowest id that stands twice in a row; empty: none."""
    again = {*ids[1:][ids[1:] == ids[:-1]].tolist()} & specials.keys()
    return specials[min(again)] if again else ""


def _of_pair(row: Row, draft: PairDraft, seen: Sequence[Turns]) -> AuditedRow:
    pair, prompt = draft.pair, draft.pair.prompt.text
    turns = list(seen[-2:])  # before them comes the prompt alone
    if not turns and is_transcript(prompt):
        turns = [_transcript(text.text) for text in pair.candidates]
    return AuditedRow(
        prompt=prompt,
        answers=tuple(text.text.removeprefix(prompt) for text in pair.candidates),
        labels=draft.labels,
        unordered=any(name in row for name in _UNORDERED),
        refs=pair.refs,
        context=_context(pair.prompt_refs),
        **_spoken(turns, turns[0] if turns else (), prompt),
    )


def _of_prompt(draft: PromptDraft, seen: Sequence[Turns]) -> AuditedRow:
    text, turns = draft.text.text, list(seen)
    if not turns and is_transcript(text):
        turns = [_transcript(text.removesuffix(ASSISTANT))]
    return AuditedRow(
        prompt=text,
        refs=(draft.refs,),
        context=_context(draft.refs),
        **_spoken(turns, turns[0] if turns else (), text),
    )


def _of_text(draft: SupervisedDraft, seen: Sequence[Turns]) -> AuditedRow:
    turns = seen[0] if seen else []  # behind them comes the prompt alone
    first = next((i for i, (role, _) in enumerate(turns) if role == "assistant"), len(turns))
    if turns:
        prompt = "".join(f"{content}\n\n" for _, content in turns[:first])
    else:
        prompt = draft.prompt.text if draft.prompt is not None else ""
    return AuditedRow(
        prompt=prompt,
        answers=(draft.text.text.removeprefix(prompt),),
        refs=(draft.refs,),
        context=_context(draft.refs),
        **_spoken([turns] if turns else [], turns[:first], prompt),
    )


def _spoken(conversations: Sequence[Turns], opening: Sequence[Turn], prompt: str) -> dict[str, Any]:
    """Return the question, the roles and what is blank, of the turns of a row if it has any."""
    questions = [content for role, content in opening if role == "user"]
    blank = [role for turns in conversations for role, content in turns if not content.strip()]
    return {
        "question": questions[-1] if questions else "" if conversations else prompt,
        "roles": tuple(tuple(role for role, _ in turns) for turns in conversations),
        "blank": f"a turn of the {blank[0]}" if blank else "",
    }


def _context(refs: MediaRefs) -> str:
    return refs.key if refs else ""


def _transcript(text: str) -> Turns:
    return [(str(turn["role"]), str(turn["content"])) for turn in transcript_messages(text)]
