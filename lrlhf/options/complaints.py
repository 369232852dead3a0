"""What a report of jsonargparse says is wrong, in one sentence."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pydoc import locate as import_by_path
from typing import NamedTuple

from lrlhf.options.errors import hint, nearest

_KEY = re.compile(r'Parser key "(?P<key>[^"]+)"(?: element \d+)?:(?: (?P<rest>.+))?$')
_CLASS = re.compile(r"Problem with given class_path '(?P<name>[^']+)':$")
_UNION = "Does not validate against any of the Union subtypes"
_NO_ATTRIBUTE = re.compile(r"(?:module '.*' has no attribute|No module named) '(?P<name>[^']*)'")
_EXPECTED = re.compile(r"Expected an? (?P<type>.+?)(?:\. Got value: (?P<value>.*))?$", re.DOTALL)


class _Rule(NamedTuple):
    """How a sentence of jsonargparse is written here; `key` and `value` of the pattern are kept."""

    pattern: str
    sentence: str
    rank: int = 6


_HINT = r"(?P<hint>(?:; (?:did you|accepted).*)?)$"
_RULES = (
    _Rule(
        rf"Option '(?P<key>[^']+)' is not accepted{_HINT}",
        "{{class}} has no option '{key}'{hint}",
    ),
    _Rule(
        rf"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'{_HINT}",
        "{group} has no option '{key}'{hint}",
    ),
    _Rule(
        rf"Subcommand '[^']+' does not accept option '(?P<key>[^']+)'{_HINT}",
        "no such option{hint}",
    ),
    _Rule(rf"unrecognized arguments: --(?P<key>[^\s=]+).*?{_HINT}", "no such option{hint}"),
    _Rule(r"unrecognized arguments: (?P<word>\S+)", "unexpected argument '{word}'"),
    _Rule(
        r"the following arguments are required: (?P<key>[^,]+), (?P<others>.+)$",
        "required, but missing (so are {others})",
    ),
    _Rule(r"the following arguments are required: (?P<key>.+)$", "required, but missing"),
    _Rule(
        r"Multiple subclasses with name (?P<value>\w+)\. .*ambiguity: (?P<all>.+)\.$",
        "several classes are named {value}; give one in full: {all}",
        rank=5,
    ),
    _Rule(
        r"Type .+ expects a function or a callable class: (?P<why>.+)\. "
        r"Got value: (?:Namespace\(class_path=')?(?P<value>[\w.]+)",
        "no function or class '{value}' ({why}){near}",
    ),
    _Rule(
        r"--[\w.]+\.help: Expected a dot import path string: (?P<value>.+)$",
        "this option takes no class '{value}'; `lrlhf help {value}` explains a class of lrlhf",
    ),
    _Rule(r"Expected a dot import path string: (?P<value>.+)$", "no class '{value}'", rank=4),
    _Rule(
        r"(?s)(?:Not a valid subclass of|Does not implement protocol) (?P<type>\w+)"
        r"(?:\. Got value: (?P<value>.*?))?\s*Subclass types expect one of",
        "",
        rank=1,
    ),
    _Rule(
        r"Expected an instantiatable class, but (?:\w+\.)*(?P<type>\w+) is (?:abstract|a protocol)",
        "",
        rank=1,
    ),
)
_DATA_TYPE = ".python_rows.Rows"
"""Is among the types of an option that takes data."""
_DATA = (
    "expected text (a file, folder, pattern or hub id), {{class_path: ..., init_args: ...}}, or a "
    "list of these or of {{source, weight, columns}}, got {given}; rows themselves are given in a "
    "file or from Python"
)
_PLAIN_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "NoneType": "null",
    "list": "a list",
    "dict": "a mapping",
    "tuple": "a list",
}
_MAX_VALUE = 60


@dataclass(frozen=True)
class InClass:
    """A step of a path that enters the arguments of a class."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that is wrong, and where.

    Attributes:
        path: Keys from the outside in, with the classes that they belong to.
        sentence: What is wrong, unless ``expected`` says it.
        expected: Types that would have been right, in words.
        choices: Literal values that would have been right.
        value: What was found instead.
        rank: How specific it is; of the alternatives of a union the most specific one is shown.
    """

    path: tuple[str | InClass, ...] = ()
    sentence: str = ""
    expected: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    value: str | None = None
    rank: int = 0

    def under(self, *steps: str | InClass) -> Complaint:
        """Return the same complaint seen from further outside."""
        return replace(self, path=(*steps, *self.path), rank=max(self.rank, 10) + len(steps))

    def __str__(self) -> str:
        if self.sentence:
            return self.sentence
        listed = [*self.expected]
        if self.choices:
            listed.append("one of " + ", ".join(self.choices))
        text = f"expected {', '.join(listed[:-1])} or {listed[-1]}".replace(
            "expected  or", "expected"
        )
        if self.value is None:
            return text
        near = nearest(self.value, self.choices) if self.choices else ""
        return f"{text}, got {_quoted(self.value)}{near}"


def read_complaint(message: str) -> Complaint:
    """Reduce a report of jsonargparse to its most specific complaint."""
    return _read([line for line in message.splitlines() if line.strip()])


def _read(lines: Sequence[str]) -> Complaint:
    if not lines:
        return Complaint(sentence="not accepted")
    first, rest = lines[0], list(lines[1:])
    if match := _KEY.match(first):
        inner = ([match["rest"]] if match["rest"] else []) + _dedent(rest)
        return _read(inner).under(*match["key"].split("."))
    if match := _CLASS.match(first):
        return _named(_read(_dedent(rest)).under(InClass(match["name"])), match["name"])
    if first.startswith("- Expected a path but") and rest:
        return _read([rest[0].removeprefix("- "), *rest[1:]])
    if first == _UNION:
        return _read_union(rest)
    return _read_leaf("\n".join(lines))


def _named(complaint: Complaint, class_path: str) -> Complaint:
    """Fill in which class refuses an option, or that the class itself does not exist."""
    if len(complaint.path) == 1 and _NO_ATTRIBUTE.match(complaint.sentence):
        sentence = f"no class '{class_path}' ({complaint.sentence})"
        return Complaint(sentence=sentence, value=class_path, rank=9)
    name = class_path.rpartition(".")[2]
    return replace(complaint, sentence=complaint.sentence.replace("{class}", name))


def _read_union(lines: Sequence[str]) -> Complaint:
    subtypes = lines[0] if lines else ""
    body = [line for line in lines if not line.startswith(("Subtypes: ", "Errors:"))]
    errors = list(takewhile(lambda line: not line.startswith("Given value type: "), body))
    given = "\n".join(body[len(errors) + 1 :]).removeprefix("Given value: ")
    branches = [_read(bullet) for bullet in _bullets(_dedent(errors))]
    best = max(branches, key=lambda branch: branch.rank, default=Complaint(sentence="not accepted"))
    if best.rank in {4, 9}:
        names = _class_names(subtypes)
        near = hint((best.value or "").rpartition(".")[2], names)
        return replace(best, sentence=best.sentence + near, rank=8)
    if _DATA_TYPE in subtypes and (best.rank <= 2 or _is_row(best, given)):
        return Complaint(sentence=_DATA.format(given=_quoted(given)), value=given, rank=2)
    if best.rank > 2:
        return best
    plain = [branch for branch in branches if not branch.sentence]
    return Complaint(
        expected=tuple(dict.fromkeys(word for branch in plain for word in branch.expected)),
        choices=tuple(dict.fromkeys(word for branch in plain for word in branch.choices)),
        value=given,
        rank=2,
    )


def _is_row(complaint: Complaint, given: str) -> bool:
    """Tell whether a row of data was taken for an entry of a list of sources."""
    within = complaint.path[0] if complaint.path else None
    entry = isinstance(within, InClass) and within.name.endswith(".Weighted")
    return entry and not re.search(r"'(source|class_path)'", given)


def _read_leaf(text: str) -> Complaint:
    for rule in _RULES:
        if match := re.match(rule.pattern, text):
            groups = match.groupdict()
            near = _hint_in_module(groups["value"]) if "{near}" in rule.sentence else ""
            path = [part for name in ("group", "key") for part in groups.get(name, "").split(".")]
            expected = f"a {groups.get('type')} (class_path and init_args)"
            return Complaint(
                path=tuple(filter(None, path)),
                sentence=rule.sentence.format(**groups, near=near),
                expected=() if rule.sentence else (expected,),
                value=groups.get("value"),
                rank=rule.rank,
            )
    if match := _EXPECTED.match(text):
        literal = match["type"].startswith("typing.Literal[")
        return Complaint(
            choices=_literals(match["type"]) if literal else (),
            expected=() if literal else (_in_words(match["type"]),),
            value=match["value"],
            rank=2 if match["value"] is None else 3,
        )
    return Complaint(sentence=" ".join(text.split()), rank=5)


def _hint_in_module(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    public = [other for other in dir(import_by_path(module)) if not other.startswith("_")]
    return nearest(attribute, public)


def _class_names(subtypes: str) -> list[str]:
    """Short names of all classes that the types in a report stand for, private ones left out."""
    names: list[str] = []
    for path in re.findall(r"\b[A-Za-z_]\w*(?:\.\w+)+", subtypes.removeprefix("Subtypes: ")):
        base = import_by_path(path)
        below = _subclass_names(base)[1:] if isinstance(base, type) else []
        names.extend(below or [path.rpartition(".")[2]])
    return [name for name in names if not name.startswith("_")]


def _subclass_names(base: type) -> list[str]:
    children: list[type] = type.__subclasses__(base)
    return [base.__name__, *(name for child in children for name in _subclass_names(child))]


def _literals(type_text: str) -> tuple[str, ...]:
    values = ast.literal_eval(type_text.removeprefix("typing.Literal"))
    return tuple(str(value) for value in values)


def _in_words(type_text: str) -> str:
    match = re.fullmatch(r"<class '(?:[\w.]+\.)?(\w+)'>", type_text)
    if not match:
        return f"a {type_text}"
    return _PLAIN_TYPES.get(match[1], f"a {match[1]}")


def _quoted(value: str) -> str:
    flat = " ".join(value.split())
    flat = flat if len(flat) <= _MAX_VALUE else flat[:_MAX_VALUE] + "…"
    return "null" if flat == "None" else f"'{flat}'"


def _dedent(lines: Sequence[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


def _bullets(lines: Sequence[str]) -> list[list[str]]:
    """Split a list whose items start with a dash and continue indented."""
    items: list[list[str]] = []
    for line in lines:
        if line.startswith("- "):
            items.append([line[2:]])
        elif items:
            items[-1].append(line.removeprefix("  "))
    return items
