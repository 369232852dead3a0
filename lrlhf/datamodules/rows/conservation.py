"""What becomes of each value of a row: it is learnt, read, used otherwise, or unused.

For each structure of rows (columns, kinds of turns and which follow which, which texts stand in
what the model reads) that is found out once, by parsing a row of it whose texts are replaced by
marks: what stands in the text that the model reads arrived there. A value whose mark is nowhere is
changed or removed by itself; if what comes of the row stays the same, nothing reads this value. A
text whose mark arrives, and which is not in the text itself, is shortened or rewritten.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from PIL import Image

from lrlhf.datamodules.loading.plain_rows import read_turns
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, Unused
from lrlhf.datamodules.rows.chat import (
    LOSS_MARKS,
    SYSTEM_COLUMNS,
    THOUGHT_KEYS,
    read_messages,
    read_tools,
)
from lrlhf.datamodules.rows.columns import is_empty
from lrlhf.datamodules.rows.media_rows import media_columns
from lrlhf.media.parts import KINDS
from lrlhf.models import unsplit
from lrlhf.models.chat_templates import TemplateConstants

DraftT = TypeVar("DraftT")
At = tuple[str | int, ...]
"""Where a value stands in a row: column, number of the turn, key, …"""

_CALL_PARTS = ("tool_use", "tool_call")
_CALL_FIELDS = ("name", "arguments", "input")
"""What of a call the model says; identifiers and the like are not of its choice."""
_PICTURES = frozenset(
    column
    for suffix in ("", "_0", "_1", "_chosen", "_rejected")
    for column in media_columns(suffix)
)
_REMOVED = object()
_LAST = 2
_SHORT = 12
_FIRST_MARK, _OTHER = 0xF0000, 0x10000
"""Characters of private use, and how far it is from those to the other ones."""
_TOOLS, _CALLS, _KWARGS = "tools", "tool_calls", "chat_template_kwargs"
_MEDIA_MARK = re.compile(r"<[^<>\s]*(?:image|img|video|audio)[^<>\s]*>|\[IMG\]", re.IGNORECASE)
_EMPTY = ("", "[]", "{}", "null")
"""Texts of cells that hold nothing, some of them as JSON."""
_STRUCTURAL = ("role", "type")
"""Keys whose values say what the others are."""


class Reached(NamedTuple):
    """What a row has become."""

    text: str
    """All that the model reads."""
    learnt: str
    """Those parts of it that the model learns."""
    besides: str = ""
    """Whatever else was read of the row, such as labels and media, as text."""
    named: Collection[str] = ()
    """Columns that are passed on under their names."""
    rendered: bool = False
    """A chat template made the text."""


def after(prompt: str, text: str) -> str:
    """Return what a text adds to a prompt."""
    if text.startswith(prompt):  # at once; letter by letter takes as long as all else
        return text[len(prompt) :]
    return text[len(commonprefix([prompt, text])) :]  # noqa: RUF071  of letters, as it is meant


class Kind(NamedTuple):
    """What values of many rows have in common."""

    key: str
    """Of a turn or a part, or the column; of a call or a tool also that of the field in it."""
    role: str = ""
    """Of the turn; empty: it is a column."""
    part: str = ""
    """Type of the content part that has the key; empty: the turn itself has it."""
    before: str = ""
    """Mark of the template, or of a picture, that follows this piece of a text."""
    exact: bool = False
    """The text arrives, but not as it is."""

    def __str__(self) -> str:
        if not self.role:
            name = f"column `{self.key}`"
        else:
            part = f"parts of type {self.part} in " if self.part else ""
            name = f"`{self.key}` of {part}turns of the {self.role}"
        name = f"what stands before {self.before!r} in {name}" if self.before else name
        return f"the exact text of {name}" if self.exact else name

    @property
    def outer(self) -> str:
        """Key or column that the value is in."""
        return self.key.partition(".")[0]

    @property
    def remedy(self) -> str:
        """What to do where such values are unused."""
        if self.exact:
            return "give a `chat_template` that keeps it as it is"
        if not self.role and self.key in SYSTEM_COLUMNS:
            return "make the rows chats (`as_chat: true`), or leave the column out"
        if not self.role and self.key in _PICTURES:
            return "train a model that takes it, or leave the column out"
        if self.outer == _KWARGS:
            return "the chat template has no such variable: correct the name, or leave it out"
        if not self.role and self.outer != _TOOLS and not self.before:
            return "rename the column to one that is read, if it matters"
        if self.key in LOSS_MARKS:
            return "only answers that are learnt turn by turn are masked by it; leave it out here"
        if self.part:
            return "leave it out, or write it as the model's processor reads it"
        return "give a `chat_template` that keeps it, or leave it out"


class _Value(NamedTuple):
    """A value of a row, or a piece of a text in it."""

    at: At
    kind: Kind
    piece: int | None = None
    """Number of the piece of a text that the template takes apart; None: the whole value."""
    stage: int = 0
    """Of the turn: 0 before the last one of a user, 1 behind it, `_LAST` for the last of all."""
    text: str = ""
    """What is to stand in the text that the model reads."""

    @property
    def turn(self) -> At:
        """Column and number of the turn, or the column alone."""
        return self.at[:2] if self.kind.role else self.at[:1]

    @property
    def owner(self) -> At:
        """Key, part or column in which it stands."""
        return self.at[: 4 if self.kind.part else 3] if self.kind.role else self.at[:1]


class _Verdict(NamedTuple):
    """What is unused of each row of a structure."""

    unused: tuple[Unused, ...]
    refused: tuple[Unused, ...]
    """What of it was clearly meant to be read, or learnt."""


class Conservation(Generic[DraftT]):
    """Finds what is lost of rows.

    Args:
        parse: Reads a row.
        reached: Says what has become of a row that was read.
        constants: Of the chat template.
        own_columns: Columns that are not from the source of the rows.
        remedy: What to do where something is lost; empty: it depends on what it is.
    """

    def __init__(
        self,
        parse: Callable[[Row, Path | None], DraftT],
        reached: Callable[[DraftT], Reached],
        constants: TemplateConstants = TemplateConstants(),  # noqa: B008  a tuple
        own_columns: Collection[str] = (),
        remedy: str = "",
    ) -> None:
        self._remedy = remedy
        self._own_columns = own_columns
        self._parse, self._become, self._constants = parse, reached, constants
        self._verdicts: dict[object, _Verdict] = {}

    def unused(self, row: Row, folder: Path | None, draft: DraftT) -> tuple[Unused, ...]:
        """Return what is lost of a row that was read.

        Raises:
            BadRow: It was clearly meant to be read, or learnt.
        """
        row, base = _normalized_row(row), self._reached(draft)
        marks, read = self._constants.marks, _Read(base)
        # tools are long, and mostly stand in the text as they are
        tools = row.get(_TOOLS)
        whole = isinstance(tools, list) and bool(tools) and all(map(read.has_json, tools))
        values, contents = _values({**row, _TOOLS: None} if whole else row, marks)
        if any(value.at[0] in _PICTURES or value.kind.part in KINDS for value in values):
            # in texts they become what the model reads in the place of a picture
            marks += (*{*_MEDIA_MARK.findall(" ".join(value.text for value in values))},)
            values, contents = _values({**row, _TOOLS: None} if whole else row, marks)
        standing = {text: read.standing(text) for text in {value.text for value in values} if text}
        others = frozenset(
            (value[1:4], how)
            for value in values
            if value.text and (how := standing[value.text]) != "apart"
        )
        tool_count = len(row[_TOOLS][:2]) if whole else 0
        structure = (contents, others, tool_count, *self._unread_options(row))
        verdict = self._verdicts.get(structure)
        if verdict is None:
            marking = _Marking(row, marks, _values(row, marks)[0])
            verdict = self._verdicts[structure] = self._verdict(row, folder, base, marking)
        if verdict.refused:
            what = " and ".join(unused.name for unused in verdict.refused)
            raise BadRow(
                "left out of the text",
                f"the model does not read {what}",
                remedy="; ".join(dict.fromkeys(unused.remedy for unused in verdict.refused)),
            )
        return verdict.unused

    def _verdict(
        self,
        row: Row,
        folder: Path | None,
        base: Reached,
        marking: _Marking,
    ) -> _Verdict:
        values, read = marking.values, _Read(base)
        absent = {value for value in values if value.text and read.standing(value.text) == "absent"}
        unread = self._unread_columns(row, folder, base, values)
        kinds = {Kind(f"{_KWARGS}.{name}"): False for name in self._unread_options(row)}
        kinds |= {
            Kind(column): _is_essential_column(column, base) or _is_only_picture(column, row)
            for column in unread
        }
        passed = {*base.named, *self._own_columns, *unread, _KWARGS}
        values = [value for value in values if value.at[0] not in passed]
        marked = {value: None for value in values if marking.can_mark(value, base.text)}
        whole = self._outcome(marking.row(marked), folder)
        arrivals = _Arrivals(marking)
        alone: dict[object, list[_Value]] = {}
        inexact: list[_Value] = []
        for value in values:
            if value in marked and whole is not None and arrivals.add(value, whole):
                continue
            if value in marked or value.kind.role or value.at[0] == _TOOLS:
                alike = (value.kind, value.stage, type(_at(row, value.at)))
                alone.setdefault(alike, []).append(value)
            elif value in absent and base.rendered and self._is_cut(row, folder, marking, value):
                inexact.append(value)
                arrivals.add(value, self._outcome(marking.row([value]), folder) or base)

        def without(group: Sequence[_Value]) -> Reached | None:
            effective = [value for value in marked if whole and value not in group]
            return self._outcome(marking.row(effective, group), folder)

        unused = arrivals.missing_of([*alone.values()], without, whole or base)
        inexact += (value for value in marked if value in arrivals.values & absent)
        for value in (*unused, *inexact):
            if _is_repeated(value, base) and value.kind.key == "content":
                continue
            kind = value.kind._replace(exact=value in inexact)
            if value.owner not in arrivals.read:
                kind = kind._replace(key=kind.outer)
            kinds[kind] = kinds.get(kind, False) or _is_essential(value, base, arrivals)
        named = {Unused(str(kind), self._remedy or kind.remedy): kinds[kind] for kind in kinds}
        return _Verdict(
            tuple(named), tuple(unused for unused, essential in named.items() if essential)
        )

    def _is_cut(self, row: Row, folder: Path | None, marking: _Marking, value: _Value) -> bool:
        """Whether the end of a column is unused, which is read and may be taken apart."""
        column, mark = str(value.at[0]), marking.mark(value)
        outcome = self._outcome({**row, column: row[column] + mark}, folder)
        return outcome is not None and not _has(outcome, mark)

    def _unread_columns(
        self, row: Row, folder: Path | None, base: Reached, values: Sequence[_Value]
    ) -> list[str]:
        """Return the columns without which all is the same, and that are not in the text either."""
        passed = {*base.named, *self._own_columns, _KWARGS, _TOOLS}
        roles = {str(value.at[0]): value.kind.role for value in values}
        readable = {
            name for name in roles if isinstance(row[name], str) and row[name].strip() in base.text
        }
        columns = {name: role for name, role in roles.items() if name not in passed | readable}

        def without(names: Collection[str]) -> bool:
            rest = {name: cell for name, cell in row.items() if name not in names}
            return _is_same(self._outcome(rest, folder), base)

        plain = [column for column, role in columns.items() if not role]
        others = [column for column, role in columns.items() if role]
        if plain and not without(plain):
            plain = [column for column in plain if without([column])]
        return [*plain, *(column for column in others if without([column]))]

    def _reached(self, draft: DraftT) -> Reached:
        reached = self._become(draft)
        return reached._replace(text=unsplit(reached.text), learnt=unsplit(reached.learnt))

    def _outcome(self, row: Row, folder: Path | None) -> Reached | None:
        """Return what becomes of a row; None: it cannot be read."""
        try:
            return self._reached(self._parse(row, folder))
        except (BadRow, BadDataError):
            return None

    def _unread_options(self, row: Row) -> list[str]:
        options = row.get(_KWARGS)
        known_options = options if isinstance(options, Mapping) else {}
        return [name for name in known_options if name not in self._constants.variables]


def _is_same(outcome: Reached | None, other: Reached) -> bool:
    return outcome is not None and outcome[:3] == other[:3]


def _has(outcome: Reached, mark: str) -> bool:
    return mark in outcome.text or repr(mark)[1:-1] in outcome.besides


def _is_essential_column(column: str, base: Reached) -> bool:
    """Whether a column that nothing reads was clearly meant to be read."""
    # a plain text may have been rendered already, with its tools
    return column in _PICTURES or column in SYSTEM_COLUMNS or (column == _TOOLS and base.rendered)


def _is_only_picture(column: str, row: Row) -> bool:
    """Whether a column of another name holds the pictures of a row that has no others."""
    cell = row[column]
    cells = cell if isinstance(cell, list | tuple) else [cell]
    shows = any(not _is_nothing(row.get(name)) for name in _PICTURES)
    return not shows and any(
        isinstance(value, Image.Image) or (isinstance(value, Mapping) and value.get("bytes"))
        for value in cells
    )


def _is_repeated(value: _Value, base: Reached) -> bool:
    """Whether it is of an answer beside a prompt, to which the policy is to find its own."""
    answers = value.kind.role == "assistant" or value.at[0] == "rejected"
    return value.stage == _LAST and answers and not base.learnt


def _is_essential(value: _Value, base: Reached, arrivals: _Arrivals) -> bool:
    """Whether a lost value was clearly meant to be read, or learnt."""
    kind = value.kind
    learnt, read = value.turn in arrivals.learnt, value.turn in arrivals.read
    if kind.outer == _TOOLS and not kind.role:
        return not read and _is_essential_column(_TOOLS, base)
    if not kind.role:
        return learnt or _is_essential_column(kind.key, base)
    if _is_repeated(value, base):
        return False
    if kind.outer == _CALLS or kind.part in _CALL_PARTS:
        is_call_field = kind.key.rpartition(".")[2] in _CALL_FIELDS
        return value.owner not in arrivals.read or (learnt and is_call_field)
    if kind.key in THOUGHT_KEYS:
        return learnt
    if kind.key in ("content", "text", "input", kind.part) and kind.part not in KINDS:
        # earlier thoughts: such a template leaves them out of prompts, too
        return learnt or not read or kind.role != "assistant"
    return False


class _Read:
    """What the model reads of a row, in which values are looked for."""

    def __init__(self, base: Reached) -> None:
        self._text = base.text
        self._all = base.text + base.besides

    @cached_property
    def _folded(self) -> str:
        return _folded(self._all)

    def has_json(self, value: object) -> bool:
        """Whether a value stands in the text as templates write it that keep all of it."""
        return any(
            json.dumps(value, ensure_ascii=False, indent=indent) in self._text
            for indent in (None, 4)
        )

    def standing(self, text: str) -> str:
        """Return whether a text is there: ``apart``, ``inside`` a word, ``absent``.

        What is inside a word may be there by chance. Templates may change the case of letters and
        white space.
        """
        if text in self._text:
            return "apart" if len(text) >= _SHORT or _is_word(text, self._text) else "inside"
        # as JSON and Python write it, also within a text that is JSON
        forms = [repr(text), json.dumps(text)]
        if any(form[1:-1] != text for form in forms):
            forms.append(json.dumps(text, ensure_ascii=False))
            forms += [json.dumps(form[1:-1], ensure_ascii=False) for form in forms]
        if any(form[1:-1] in self._all for form in forms):
            return "apart"
        return "apart" if _folded(text) in self._folded else "absent"


def _is_word(word: str, text: str) -> bool:
    """Whether a word is somewhere in a text and no part of a longer one."""
    start = text.find(word)
    while start >= 0:
        around = text[max(start - 1, 0) : start] + text[start + len(word) : start + len(word) + 1]
        if not any(letter.isalnum() or letter == "_" for letter in around):
            return True
        start = text.find(word, start + 1)
    return False


def _folded(text: str) -> str:
    return "".join(text.split()).casefold()


class _Marking:
    """Puts marks in the place of values of a row.

    Texts that are equal in two columns get equal marks, as conversations that share their first
    turns must still share them; texts that are equal in one column get different ones.
    """

    def __init__(self, row: Row, separators: Sequence[str], values: Sequence[_Value]) -> None:
        self._row, self._separators = row, separators
        self.values = values
        self._marks: dict[_Value, int] = {}
        numbers: dict[object, int] = {}
        times: Counter[object] = Counter()
        for value in values:
            # a text alone may be the question of a conversation beside it
            role = value.kind.role or ("system" if value.at[0] in SYSTEM_COLUMNS else "user")
            text = value.text or repr(_at(row, value.at))
            key = value.kind.key if value.piece is None else ""
            answers = value.stage == _LAST and role == "assistant"
            identity = (text, value.kind.before, key, role, answers)
            times[value.at[0], identity] += 1
            same = (identity, times[value.at[0], identity])
            self._marks[value] = _FIRST_MARK + numbers.setdefault(same, len(numbers))

    def mark(self, value: _Value, shift: int = 0) -> str:
        """Return the character that the text of a value is replaced by, or another one."""
        return chr(self._marks[value] + shift)

    def can_mark(self, value: _Value, text: str) -> bool:
        """Whether marks can stand for a value, which may be somewhere in a text."""
        if value.kind.role or value.at[0] in (_TOOLS, *_PICTURES):
            return bool(value.text) and value.at[0] not in _PICTURES
        cell = _at(self._row, value.at)
        pieces = _pieces(cell, self._separators)[::2] if isinstance(cell, str) else []
        return any(piece.strip() and piece.strip() in text for piece in pieces)

    def row(self, marked: Iterable[_Value], changed: Iterable[_Value] = ()) -> Row:
        """Return the row with marks in the place of some values, and others changed or removed."""
        cells: dict[At, Any] = {}
        pieces: dict[At, list[str]] = {}
        for shift, values in ((0, marked), (_OTHER, changed)):
            for value in values:
                cell = _at(self._row, value.at)
                mark = self.mark(value, shift)
                if value.piece is not None and value.at[0] not in _PICTURES:
                    parts = pieces.setdefault(value.at, _pieces(cell, self._separators))
                    parts[value.piece] = _masked(parts[value.piece], mark)
                elif shift == 0 or (isinstance(cell, str) and self.can_mark(value, cell)):
                    cells[value.at] = _masked(cell, mark)
                elif isinstance(cell, bool | int | float):
                    cells[value.at] = type(cell)(not cell)
                else:
                    cells[value.at] = _REMOVED
        cells |= {at: "".join(parts) for at, parts in pieces.items()}
        replaced: Row = _with(self._row, (), cells)
        return replaced


class _Arrivals:
    """Values that arrive, and of which turns, columns and calls something is read or learnt."""

    def __init__(self, marking: _Marking) -> None:
        self.read: set[At] = set()
        self.learnt: set[At] = set()
        self.values: set[_Value] = set()
        self._marking = marking

    def add(self, value: _Value, outcome: Reached, shift: int = 0) -> bool:
        """Look for the mark of a value; returns whether it is there."""
        mark = self._marking.mark(value, shift)
        if mark in outcome.learnt:
            self.learnt.add(value.turn)
        there = _has(outcome, mark)
        if there:
            self.values.add(value)
            self.read.update((value.turn, value.owner))
        return there

    def missing_of(
        self,
        groups: Sequence[Sequence[_Value]],
        without: Callable[[Sequence[_Value]], Reached | None],
        base: Reached,
    ) -> list[_Value]:
        """Return values without which all is the same; of the others, it is added what they do."""
        every = [*chain(*groups)]
        if len(groups) > 1 and _is_same(without(every), base):  # at once, as mostly
            return every
        missing: list[_Value] = []
        for group in groups:
            if _is_same(outcome := without(group), base):
                missing += group
            else:
                self._add_changed(group, outcome)
        return missing

    def _add_changed(self, values: Sequence[_Value], outcome: Reached | None) -> None:
        """Add values that make a difference; no ``outcome``: the row cannot be read then."""
        marked = [outcome is not None and self.add(value, outcome, _OTHER) for value in values]
        if not any(marked):  # they are read, and not as they are
            self.read.update(at for value in values for at in (value.turn, value.owner))


def _values(row: Row, separators: Sequence[str]) -> tuple[list[_Value], object]:
    """Return the values of a row, and what there is of them in its turns and columns.

    That is what is in a turn, and which turns follow which; where they stand does not count.
    """
    groups = [*_groups(row, separators)]
    contents = frozenset(pairwise([frozenset(), *map(_contents, groups)]))
    return [*chain(*groups)], contents


def _contents(group: Iterable[_Value]) -> frozenset[tuple[object, bool]]:
    """Return what is in a turn or column, and whether in several of its parts, calls or tools."""
    entries: dict[object, set[At]] = {}
    for value in group:
        entry = value.at[: len(value.owner) + (not value.kind.part)]
        entries.setdefault((*value[1:4], bool(value.text)), set()).add(entry)
    return frozenset((alike, len(ats) > 1) for alike, ats in entries.items())


def _groups(row: Row, separators: Sequence[str]) -> Iterator[list[_Value]]:
    """Go through the values of a row: those of each turn together, and each column."""
    for column, cell in row.items():
        if _is_nothing(cell):
            continue
        if _are_turns(cell):
            roles = [str(turn.get("role")) for turn in cell]
            last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
            for number, (turn, role) in enumerate(zip(cell, roles, strict=True)):
                stage = _LAST if number == len(cell) - 1 else int(number > last_user)
                yield [*_of_turn(turn, (column, number), role, stage, separators)]
        elif column == _TOOLS:
            yield [*_leaves(cell, _Value((column,), Kind(column)))]
        elif isinstance(cell, str):
            yield [*_of_text(cell, (column,), Kind(column), 0, separators)]
        else:
            yield [_Value((column,), Kind(column))]


def _normalized_row(row: Row) -> Row:
    """Return a row whose turns and tools are as the parsers read them, whatever their form."""
    cells = dict(row)
    for column, cell in row.items():
        with suppress(BadRow):  # of a column that is not read
            if column == _TOOLS:
                cells[column] = read_tools(row)
            elif _are_turns(turns := read_turns(cell, column)):
                cells[column] = read_messages(turns, column)
    return cells


def _of_turn(
    turn: Mapping[str, Any], at: At, role: str, stage: int, separators: Sequence[str]
) -> Iterator[_Value]:
    for key, value in turn.items():
        if key in _STRUCTURAL or _is_nothing(value):
            continue
        if key != "content":
            yield from _leaves(value, _Value((*at, key), Kind(key, role), None, stage))
        elif isinstance(value, str):
            yield from _of_text(value, (*at, key), Kind(key, role), stage, separators)
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                yield from _of_part(part, (*at, key, number), role, stage, separators)


def _of_part(
    part: object, at: At, role: str, stage: int, separators: Sequence[str]
) -> Iterator[_Value]:
    if isinstance(part, str):
        yield from _of_text(part, at, Kind("content", role), stage, separators)
    elif isinstance(part, Mapping):
        named = str(part.get("type", "")).removesuffix("_url").removeprefix("input_")
        for key, value in part.items():
            if key == "text" and isinstance(value, str):
                text = Kind("content", role)
                yield from _of_text(value, (*at, key), text, stage, separators)
            elif key not in _STRUCTURAL and not _is_nothing(value):
                whole = _Value((*at, key), Kind(key, role, named), None, stage)
                yield from [whole] if named in KINDS else _leaves(value, whole)


def _of_text(
    text: str, at: At, kind: Kind, stage: int, separators: Sequence[str]
) -> Iterator[_Value]:
    pieces = _pieces(text, separators)
    for number in range(0, len(pieces), 2):
        if pieces[number] and not pieces[number].isspace():
            own = kind._replace(before=pieces[number + 1]) if pieces[number + 1 :] else kind
            yield _Value(at, own, number, stage, text=pieces[number].strip())


def _leaves(value: Any, whole: _Value) -> Iterator[_Value]:
    """Go through what is in a value, such as calls or tools; what is empty stands for itself."""
    if not isinstance(value, Mapping | list | tuple):
        text = value.strip() if isinstance(value, str) else ""
        yield _Value(whole.at, whole.kind, None, whole.stage, text)
        return
    leaves: list[_Value] = []
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        kind = whole.kind
        if kind.key in (_CALLS, _TOOLS) and isinstance(key, str) and key != "function":
            kind = kind._replace(key=f"{kind.key}.{key}")
        # templates do this or that by the type of a call, or of what a schema describes
        is_type = key == "type" and not isinstance(entry, Mapping)
        if not _is_nothing(entry) and not (is_type and not kind.key.endswith(_CALL_FIELDS)):
            leaves += _leaves(entry, _Value((*whole.at, key), kind, None, whole.stage))
    yield from leaves or [whole]


def _pieces(text: str, separators: Sequence[str]) -> list[str]:
    """Cut a text at the separators, which stand at the odd places of the list."""
    there = [separator for separator in separators if separator in text]
    return re.split(f"({'|'.join(map(re.escape, there))})", text) if there else [text]


def _are_turns(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in value
    )


def _is_nothing(value: object) -> bool:
    if isinstance(value, str):
        return value.strip() in _EMPTY
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return is_empty(value) or (isinstance(value, Mapping) and not value)


def _masked(text: str, mark: str) -> str:
    """Replace a text, but not the white space around it."""
    core = text.strip()
    return text.replace(core, mark * len(core), 1) if core else text


def _at(value: Any, at: At) -> Any:
    for key in at:
        value = value[key]
    return value


def _with(value: Any, here: At, cells: Mapping[At, Any]) -> Any:
    """Return a value with others in the place of its parts."""
    if here in cells:
        return cells[here]
    if isinstance(value, Mapping):
        entries = {key: _with(entry, (*here, key), cells) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not _REMOVED}
    if isinstance(value, list | tuple):
        listed = [_with(entry, (*here, number), cells) for number, entry in enumerate(value)]
        return [entry for entry in listed if entry is not _REMOVED]
    return value
