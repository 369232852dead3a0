"""What becomes of each value of a row: it is learnt, read, used otherwise, or lost.

For each structure of rows (columns, roles, keys of turns, kinds of contents) that is found out
once, by parsing a row of it whose texts are replaced by marks: what stands in the text that the
model reads arrived there. A value whose mark is nowhere is changed or removed by itself; if what
comes of the row stays the same, nothing reads this value.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from PIL import Image

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, Unused
from lrlhf.datamodules.rows.chat import LOSS_MARKS, SYSTEM_COLUMNS, THOUGHT_KEYS, usual_role
from lrlhf.datamodules.rows.columns import is_empty
from lrlhf.datamodules.rows.media_rows import KINDS, media_columns
from lrlhf.models import unsplit
from lrlhf.models.chat_templates import TemplateConstants

DraftT = TypeVar("DraftT")
At = tuple[str | int, ...]
"""Where a value stands in a row: column, number of the turn, key, …"""

_CALL_KEYS = ("tool_calls", "function_call")
_CALL_PARTS = ("tool_use", "tool_call")
_PICTURES = frozenset(
    column
    for suffix in ("", "_0", "_1", "_chosen", "_rejected")
    for column in media_columns(suffix)
)
_REMOVED = object()
_LAST = 2
_FIRST_MARK, _OTHER = 0xF0000, 0x10000
"""Characters of private use, and how far it is from those to the other ones."""
_TOOLS, _KWARGS = "tools", "chat_template_kwargs"
_EMPTY = ("", "[]", "{}", "null")
"""Texts of cells that hold nothing, some of them as JSON."""
_STRUCTURAL = ("role", "from", "type")
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
    return text[len(commonprefix([prompt, text])) :]  # noqa: RUF071  of letters, as it is meant


class Kind(NamedTuple):
    """What values of many rows have in common."""

    key: str
    """Of a turn or a part, or the column."""
    role: str = ""
    """Of the turn; empty: it is a column."""
    part: str = ""
    """Type of the content part that has the key; empty: the turn itself has it."""
    before: str = ""
    """Mark of the template that follows this piece of a text."""

    def __str__(self) -> str:
        if not self.role:
            name = f"column `{self.key}`"
        else:
            part = f"parts of type {self.part} in " if self.part else ""
            name = f"`{self.key}` of {part}turns of the {self.role}"
        return f"what stands before {self.before!r} in {name}" if self.before else name

    @property
    def remedy(self) -> str:
        """What to do where such values are lost."""
        if not self.role and self.key in SYSTEM_COLUMNS:
            return "make the rows chats (`as_chat: true`), or leave the column out"
        if not self.role and self.key in _PICTURES:
            return "train a model that takes it, or leave the column out"
        if self.key.startswith(f"{_KWARGS}."):
            return "the chat template has no such variable: correct the name, or leave it out"
        if not self.role and self.key != _TOOLS and not self.before:
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

    @property
    def turn(self) -> At:
        """Column and number of the turn, or the column alone."""
        return self.at[:2] if self.kind.role else self.at[:1]


class _Verdict(NamedTuple):
    """What is lost of each row of a structure."""

    unused: tuple[Unused, ...]
    refused: tuple[Unused, ...]
    """What of it was clearly meant to be read, or learnt."""


class Conservation(Generic[DraftT]):
    """Finds what is lost of rows.

    Args:
        parse: Reads a row.
        reached: Says what has become of a row that was read.
        constants: Of the chat template.
        ours: Columns that are not from the source of the rows.
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
        groups = [*_groups(row, self._constants.marks)]
        structure = (
            *dict.fromkeys(
                tuple(dict.fromkeys((value.kind, value.piece, value.stage) for value in group))
                for group in groups
            ),
        )
        verdict = self._verdicts.get(structure)
        if verdict is None:
            values = [value for group in groups for value in group]
            verdict = self._verdict(row, folder, self._reached(draft), values)
            self._verdicts[structure] = verdict
        if verdict.refused:
            what = " and ".join(unused.name for unused in verdict.refused)
            raise BadRow(
                "left out of the text",
                f"the model reads nothing of {what}",
                remedy="; ".join(dict.fromkeys(unused.remedy for unused in verdict.refused)),
            )
        return verdict.unused

    def _verdict(
        self, row: Row, folder: Path | None, base: Reached, values: Sequence[_Value]
    ) -> _Verdict:
        unread = self._unread_columns(row, folder, base, values)
        kinds = {Kind(f"{_KWARGS}.{name}"): False for name in self._unread_options(row)}
        kinds |= {
            Kind(column): _is_essential_column(column, base) or _is_only_picture(column, row)
            for column in unread
        }
        passed = {*base.named, *self._own_columns, *unread, _KWARGS}
        values = [value for value in values if value.at[0] not in passed]
        marking = _Marking(row, self._constants.marks, values)
        marked = {value: None for value in values if marking.can_mark(value, base.text)}
        reached = self._outcome(marking.row(marked), folder)
        arrivals = _Arrivals(marking)
        alone: dict[object, list[_Value]] = {}
        for value in values:
            if value in marked and reached is not None and arrivals.add(value, reached):
                continue
            if value in marked or value.kind.role:  # other columns are known to be read
                alone.setdefault((value.kind, value.stage), []).append(value)
        unused: list[_Value] = []
        for group in alone.values():
            effective = [value for value in marked if reached and value not in group]
            outcome = self._outcome(marking.row(effective, group), folder)
            if _is_same(outcome, reached or base):
                unused += group
            else:
                arrivals.add_changed(group, outcome)
        for value in unused:
            if _is_repeated(value, base) and value.kind.key == "content":
                continue
            learnt, read = value.turn in arrivals.learnt, value.turn in arrivals.read
            essential = _is_essential(value, base, learnt=learnt, read=read)
            kinds[value.kind] = kinds.get(value.kind, False) or essential
        named = {Unused(str(kind), self._remedy or kind.remedy): kinds[kind] for kind in kinds}
        return _Verdict(tuple(named), tuple(each for each, essential in named.items() if essential))

    def _unread_columns(
        self, row: Row, folder: Path | None, base: Reached, values: Sequence[_Value]
    ) -> list[str]:
        """Return the columns without which all is the same, and that are not in the text either."""
        passed = {*base.named, *self._own_columns, _KWARGS, _TOOLS}
        roles = {str(value.at[0]): value.kind.role for value in values}
        columns = {column: role for column, role in roles.items() if column not in passed}
        texts = {column for column in columns if isinstance(row[column], str)}
        columns = {
            column: role
            for column, role in columns.items()
            if column not in texts or row[column].strip() not in base.text
        }

        def without(names: Collection[str]) -> bool:
            rest = {name: cell for name, cell in row.items() if name not in names}
            return _is_same(self._outcome(rest, folder), base)

        plain = [column for column, role in columns.items() if not role]
        others = [column for column, role in columns.items() if role]
        if not without(plain):
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


def _is_essential(value: _Value, base: Reached, *, learnt: bool, read: bool) -> bool:
    """Whether a lost value was clearly meant to be read, or learnt."""
    kind = value.kind
    if not kind.role:
        return learnt or _is_essential_column(kind.key, base)
    if _is_repeated(value, base):
        return False
    if kind.key in _CALL_KEYS or kind.part in _CALL_PARTS:
        return True
    if kind.key in THOUGHT_KEYS:
        return learnt
    if kind.key in ("content", "text", "input", kind.part) and kind.part not in KINDS:
        # earlier thoughts: such a template leaves them out of prompts, too
        return learnt or not read or kind.role != "assistant"
    return False


class _Marking:
    """Puts marks in the place of values of a row.

    Texts that are equal in two columns get equal marks, as conversations that share their first
    turns must still share them; texts that are equal in one column get different ones.
    """

    def __init__(self, row: Row, separators: Sequence[str], values: Sequence[_Value]) -> None:
        self._row, self._separators = row, separators
        self._marks: dict[_Value, int] = {}
        numbers: dict[object, int] = {}
        times: Counter[object] = Counter()
        for value in values:
            # a text alone may be the question of a conversation beside it
            role = value.kind.role or ("system" if value.at[0] in SYSTEM_COLUMNS else "user")
            text, key = _at(row, value.at), value.kind.key
            if value.piece is not None:
                text, key = _pieces(text, separators)[value.piece].strip(), ""
            answers = value.stage == _LAST and role == "assistant"
            signature = (repr(text), value.kind.before, key, role, answers)
            times[value.at[0], signature] += 1
            same = (signature, times[value.at[0], signature])
            self._marks[value] = _FIRST_MARK + numbers.setdefault(same, len(numbers))

    def mark(self, value: _Value, shift: int = 0) -> str:
        """Return the character that the text of a value is replaced by, or another one."""
        return chr(self._marks[value] + shift)

    def can_mark(self, value: _Value, text: str) -> bool:
        """Whether marks can stand for a value, which may be somewhere in a text."""
        if value.kind.part in KINDS or value.at[0] in _PICTURES:
            return False
        current = _at(self._row, value.at)
        if value.kind.role or value.kind.key == _TOOLS:
            return isinstance(current, str | list | tuple | Mapping)
        pieces = _pieces(current, self._separators)[::2] if isinstance(current, str) else []
        return any(piece.strip() and piece.strip() in text for piece in pieces)

    def row(self, marked: Iterable[_Value], changed: Iterable[_Value] = ()) -> Row:
        """Return the row with marks in the place of some values, and others changed or removed."""
        cells: dict[At, Any] = {}
        pieces: dict[At, list[str]] = {}
        for shift, values in ((0, marked), (_OTHER, changed)):
            for value in values:
                current = _at(self._row, value.at)
                mark = self.mark(value, shift)
                if value.piece is not None and value.at[0] not in _PICTURES:
                    parts = pieces.setdefault(value.at, _pieces(current, self._separators))
                    parts[value.piece] = _masked(parts[value.piece], mark)
                elif shift == 0 or (isinstance(current, str) and self.can_mark(value, current)):
                    cells[value.at] = _deep(current, mark)
                elif isinstance(current, bool | int | float):
                    cells[value.at] = type(current)(not current)
                else:
                    cells[value.at] = _REMOVED
        cells |= {at: "".join(parts) for at, parts in pieces.items()}
        replaced: Row = _with(self._row, (), cells)
        return replaced


class _Arrivals:
    """Turns and columns of which something was read, and of which something is learnt."""

    def __init__(self, marking: _Marking) -> None:
        self.read: set[At] = set()
        self.learnt: set[At] = set()
        self._marking = marking

    def add(self, value: _Value, outcome: Reached, shift: int = 0) -> bool:
        """Look for the mark of a value; returns whether it is there."""
        mark = self._marking.mark(value, shift)
        if mark in outcome.learnt:
            self.learnt.add(value.turn)
        there = mark in outcome.text or repr(mark)[1:-1] in outcome.besides
        if there:
            self.read.add(value.turn)
        return there

    def add_changed(self, values: Sequence[_Value], outcome: Reached | None) -> None:
        """Add values that make a difference; no ``outcome``: the row cannot be read then."""
        marked = [outcome is not None and self.add(value, outcome, _OTHER) for value in values]
        if not any(marked):  # they are read, and not as they are
            self.read.update(value.turn for value in values)


def _groups(row: Row, separators: Sequence[str]) -> Iterator[list[_Value]]:
    """Go through the values of a row: those of each turn together, and each column."""
    for column, cell in row.items():
        if _is_nothing(cell):
            continue
        if _are_turns(cell):
            roles = [usual_role(str(turn.get("role", turn.get("from")))) for turn in cell]
            last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
            for number, (turn, role) in enumerate(zip(cell, roles, strict=True)):
                stage = _LAST if number == len(cell) - 1 else int(number > last_user)
                yield [*_of_turn(turn, (column, number), role, stage, separators)]
        elif isinstance(cell, str) and column != _TOOLS:
            yield [*_of_text(cell, (column,), Kind(column), 0, separators)]
        else:
            yield [_Value((column,), Kind(column))]


def _of_turn(
    turn: Mapping[str, Any], at: At, role: str, stage: int, separators: Sequence[str]
) -> Iterator[_Value]:
    for key, value in turn.items():
        if key in _STRUCTURAL or _is_nothing(value):
            continue
        if key != "content" and not (key == "value" and "from" in turn):
            yield _Value((*at, key), Kind(key, role), None, stage)
        elif isinstance(value, str):
            yield from _of_text(value, (*at, key), Kind("content", role), stage, separators)
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
                yield _Value((*at, key), Kind(key, role, named), None, stage)


def _of_text(
    text: str, at: At, kind: Kind, stage: int, separators: Sequence[str]
) -> Iterator[_Value]:
    pieces = _pieces(text, separators)
    for number in range(0, len(pieces), 2):
        if pieces[number] and not pieces[number].isspace():
            own = kind._replace(before=pieces[number + 1]) if pieces[number + 1 :] else kind
            yield _Value(at, own, number, stage)


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


def _deep(value: Any, mark: str) -> Any:
    """Replace all texts in a value, also in one that is JSON."""
    if isinstance(value, Mapping):
        return {k: v if k in _STRUCTURAL else _deep(v, mark) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_deep(entry, mark) for entry in value]
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(_deep(json.loads(value), mark), ensure_ascii=False)
        except ValueError:
            pass  # a text that begins like JSON
    return _masked(value, mark)


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
