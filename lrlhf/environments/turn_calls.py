"""The calls and the thoughts in a turn of a policy, whatever the format of the calls is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import regex


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy asks for."""

    name: str
    arguments: Mapping[str, Any]
    """Values as JSON has them; only texts, if the format knows nothing else."""
    start: int | None = field(default=None, compare=False)
    """Where it begins in the text of the turn; None: the format does not tell."""
    end: int | None = field(default=None, compare=False)
    """Where it ends, with others that stand in one list with it."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What was meant as a call and cannot be read as one."""

    text: str
    problem: str
    """What is wrong with it, in words for the policy."""


ToolCallFormat = Callable[[str], Sequence[ToolCall | MalformedCall]]
"""Finds the calls in the text of one turn."""


class MalformedError(Exception):
    """A call cannot be read.

    Args:
        problem: Why, in words for the policy.
        reached: Where the text stops being a call; None: soon.
    """

    def __init__(self, problem: str, reached: int | None = None) -> None:
        super().__init__(problem)
        self.reached = reached


class Read(NamedTuple):
    """What was read at the beginning of a call."""

    calls: list[ToolCall]
    end: int
    """Where the text goes on."""


class Format(NamedTuple):
    """Where calls begin, and where the text goes on after one that cannot be read."""

    opening: re.Pattern[str]
    resume: re.Pattern[str]
    """The end of a call, or the place where the next one begins."""
    head: regex.Pattern[str]
    """What a call begins with; a text that ends in it has begun one."""


_MOST_MALFORMED = 32
"""Of one turn: an error of Python's JSON takes a time that grows with the text before it."""
_LEAST_BEGUN = 2
"""Letters of a call's beginning that are no accident at the end of a turn."""
_THINK, _THINK_END = "<think>", "</think>"
_MARK = re.compile(f"{_THINK}|{_THINK_END}")
_ENDINGS = re.compile(r"(?:\s|<[|\uff5c](?!tool)[^<>\s]*[|\uff5c]>|</s>)*\Z")
"""Special tokens that end a turn, and not those that begin a call."""


class _Scan:
    """Goes through a turn from the left.

    Marks of thoughts that stand in what has been read of a call are a part of it.

    Args:
        turn: Reasoning included.
        form: Of the calls.
        read: Reads what begins at a match of ``form.opening``; raises `MalformedError`.
    """

    def __init__(self, turn: str, form: Format, read: Callable[[str, re.Match[str]], Read]) -> None:
        self._form, self._read = form, read
        self._text, self._place = turn, 0
        self._offset = 0
        """Letters of the turn before the text."""
        self._has_thought = False
        self._malformed = 0
        self.calls: list[ToolCall | MalformedCall] = []

    def run(self) -> None:
        """Find all calls."""
        if self._text.lstrip().startswith(_THINK):
            if _THINK_END not in self._text:
                return  # it thinks to the end
            self._thought_until(self._text.index(_THINK_END))
        opening, mark = self._searched()
        while opening or mark:
            if mark and not (opening and opening.start() < mark.start()):
                if not self._thought(mark):
                    return
            elif opening:
                self._call(opening)
            opening, mark = self._searched(opening, mark)
        self._begun()

    def _searched(
        self, opening: re.Match[str] | None = None, mark: re.Match[str] | None = None
    ) -> tuple[re.Match[str] | None, re.Match[str] | None]:
        """Return the next beginning of a call and the next mark, which may be known already."""

        def next_of(pattern: re.Pattern[str], known: re.Match[str] | None) -> re.Match[str] | None:
            if known and known.string is self._text and known.start() >= self._place:
                return known
            return pattern.search(self._text, self._place)

        return next_of(self._form.opening, opening), next_of(_MARK, mark)

    def _thought_until(self, end: int) -> None:
        """Take all that precedes a mark for a thought, in which there are no calls."""
        self._offset += end + len(_THINK_END)
        self._text, self._place = self._text[end + len(_THINK_END) :], 0
        self._has_thought, self._malformed = True, 0
        self.calls.clear()

    def _thought(self, mark: re.Match[str]) -> bool:
        """Pass a mark of a thought; tells whether the turn goes on behind it."""
        if mark.group() == _THINK_END and not self._has_thought:
            self._thought_until(mark.start())  # the chat template may have opened it
            return True
        self._place = mark.end()
        if mark.group() == _THINK_END:
            return True
        self._has_thought = True
        end = self._text.find(_THINK_END, self._place)
        if end >= 0:
            self._place = end + len(_THINK_END)
            return True
        if lost := self._form.opening.search(self._text, self._place):
            text = self._text[lost.start() :].strip()
            problem = f"the call stands in a thought that no {_THINK_END} closes"
            self.calls.append(MalformedCall(text, problem))
        return False

    def _call(self, opening: re.Match[str]) -> None:
        text = self._text
        try:
            found, self._place = self._read(text, opening)
            start, end = self._offset + opening.start(), self._offset + self._place
            self.calls += [replace(call, start=start, end=end) for call in found]
            return
        except MalformedError as error:
            problem, reached = str(error), error.reached or opening.end()
        self._malformed += 1
        resume = self._form.resume.search(text, opening.end())
        self._place = resume.end() if resume and self._malformed < _MOST_MALFORMED else len(text)
        end = -1 if self._has_thought else text.find(_THINK_END, reached, self._place)
        if end >= 0:
            self._thought_until(end)
            return
        self.calls.append(MalformedCall(text[opening.start() : self._place].strip(), problem))

    def _begun(self) -> None:
        """Find a call at the end of whose beginning the turn ends."""
        ending = _ENDINGS.search(self._text, self._place)
        text = self._text[: ending.start()] if ending else self._text
        begun = self._form.head.search(text, self._place, partial=True)
        if begun and begun.partial and len(begun.group()) >= _LEAST_BEGUN:
            self.calls.append(
                MalformedCall(begun.group().strip(), "the call ends in its beginning")
            )


def calls_in(
    turn: str, form: Format, read: Callable[[str, re.Match[str]], Read]
) -> list[ToolCall | MalformedCall]:
    """Read all calls of a turn.

    Args:
        turn: Reasoning included.
        form: Of the calls.
        read: Reads what begins at a match of ``form.opening``; raises `MalformedError`.
    """
    scan = _Scan(turn, form, read)
    scan.run()
    return scan.calls
