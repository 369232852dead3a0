import asyncio
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict
from uuid import UUID

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pydantic import BaseModel

from lrlhf.environments import (
    Tool,
    ToolArgumentsError,
    result_text,
    tools_by_name,
    tools_of,
    tools_of_functions,
)


def weather(city: str, days: int = 1) -> str:
    """Forecasts the weather.

    Args:
        city: Where.
        days: How many days ahead.
    """
    return f"{city} in {days} days"


class Point(TypedDict):
    x: int


def every_type(  # noqa: PLR0913  one of each type
    integer: int = 0,
    number: float = 0.0,
    text: str = "",
    flag: bool = False,
    numbers: list[int] | None = None,
    table: dict[str, float] | None = None,
    unit: Literal["c", "f"] = "c",
    either: int | str = 0,
    pair: tuple[int, str] = (0, ""),
    nested: list[int] | dict[str, int] | None = None,
    point: Point | None = None,
    anything: Any = None,
) -> dict[str, Any]:
    """Returns what it is given.

    Args:
        integer: One.
        number: Two.
        text: Three.
        flag: Four.
        numbers: Five.
        table: Six.
        unit: Seven.
        either: Eight.
        pair: Nine.
        nested: Ten.
        point: Eleven.
        anything: Twelve.
    """
    return dict(locals())


def tool(function: Callable[..., Any]) -> Tool:
    (found,) = tools_of_functions([function])
    return found


def problem(function: Callable[..., Any], **arguments: Any) -> str:
    """What the policy is told of wrong arguments."""
    with pytest.raises(ToolArgumentsError) as caught:
        tool(function).call(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Base:
    def later(self, word: str) -> str:
        """Overridden.

        Args:
            word: Any.
        """
        raise AssertionError(word)

    def early(self) -> str:
        """Says early."""
        return "early"


class Counter(Base):
    """As TRL's documentation has it: state, a reset that takes anything, a tool, a reward."""

    started: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **kwargs: Any) -> str | None:
        self.count = 0
        return None

    def zoom(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.count

    def later(self, word: str) -> str:
        """Repeats a word.

        Args:
            word: What to repeat.
        """
        return f"{word}{self.count}"

    @staticmethod
    def add(a: float, b: float) -> float:
        """Adds.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    @classmethod
    def kind(cls) -> str:
        """Names the class."""
        return cls.__name__

    async def slowly(self) -> str:
        """Takes its time."""
        return f"slow {self.count}"

    @property
    def done(self) -> bool:
        raise AssertionError("done is read")

    @property
    def boom(self) -> str:
        raise AssertionError("a property is read")

    @functools.cached_property
    def bang(self) -> str:
        raise AssertionError("a property is read")

    def _private(self) -> None: ...

    def reward(self) -> float:
        return 0.0

    def get_reward(self) -> float:
        return 0.0

    def malformed_call(self, text: str, problem: str) -> str:
        return text + problem

    def close(self) -> None: ...

    class Inner:
        """Not a method."""


def test_a_function_is_described_as_chat_templates_take_it() -> None:
    described = tool(weather)
    assert described.name == "weather"
    assert described.schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecasts the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                },
                "required": ["city"],
            },
            "return": {"type": "string"},
        },
    }


def test_public_methods_are_tools_in_their_order_and_inherited_ones_come_first() -> None:
    names = [found.name for found in tools_of(Counter())]
    assert names == ["later", "early", "zoom", "add", "kind", "slowly"]


def test_the_tools_of_an_environment_act_on_it_alone() -> None:
    first, second = Counter(), Counter()
    called = {name: found.call for name, found in tools_by_name(tools_of(first)).items()}
    assert called["zoom"]({"step": 2}) == 2
    assert called["zoom"]({"step": 3}) == 5
    assert called["later"]({"word": "a"}) == "a5"
    assert called["add"]({"a": 1, "b": 0.5}) == 1.5
    assert called["kind"]({}) == "Counter"
    assert called["early"]({}) == "early"
    assert tools_by_name(tools_of(second))["zoom"].call({"step": 1}) == 1


def test_an_async_tool_is_there_to_be_awaited() -> None:
    returned = tools_by_name(tools_of(Counter()))["slowly"].call({})
    assert inspect.isawaitable(returned)

    async def waited() -> Any:
        return await returned

    assert asyncio.run(waited()) == "slow 0"


def test_all_instances_of_a_class_have_the_same_schemas_made_once() -> None:
    first, second = (tools_of(Counter()) for _ in range(2))
    assert all(one.schema is other.schema for one, other in zip(first, second, strict=True))


def test_a_subclass_hides_a_tool_or_gives_it_another_name() -> None:
    class Other(Base):
        early = None  # type: ignore[assignment]
        alias = Base.later

    named = tools_by_name(tools_of(Other()))
    assert list(named) == ["later", "alias"]
    assert named["alias"].schema["function"]["name"] == "alias"


def test_a_method_of_the_environment_keeps_its_annotations_as_texts() -> None:
    space: dict[str, Any] = {}
    source = (
        "from __future__ import annotations\n"
        "class Env:\n"
        "    def go(self, steps: int) -> str:\n"
        "        '''Goes.\n\n        Args:\n            steps: How far.\n        '''\n"
        "        return 's' * steps\n"
    )
    exec(source, space)
    (found,) = tools_of(space["Env"]())
    assert found.call({"steps": "2"}) == "ss"


def no_docstring(city: str) -> None: ...


def no_hint(city) -> None:  # type: ignore[no-untyped-def]
    """Says.

    Args:
        city: Where.
    """


def no_line(city: str, day: int) -> None:
    """Says.

    Args:
        city: Where.
    """


def no_such_type(city: "Town") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Says.

    Args:
        city: Where.
    """


def not_json(city: str, day: list[date]) -> None:
    """Says.

    Args:
        city: Where.
        day: When.
    """


def no_schema(values: Iterator[int]) -> None:
    """Says.

    Args:
        values: What.
    """


def any_number(*cities: str) -> None:
    """Says.

    Args:
        cities: Where.
    """


def by_position(city: str, /) -> None:
    """Says.

    Args:
        city: Where.
    """


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (no_docstring, r"no_docstring.* no docstring.*a tool needs a docstring"),
        (no_hint, r"no_hint.*city.*missing a type hint.*type hint for each argument"),
        (no_line, r"no_line.*no description for the argument 'day'.*`Args:`"),
        (no_such_type, r"no_such_type.*'Town' is not defined"),
        (not_json, r"not_json.*the argument 'day' is a date.*make it in the function"),
        (no_schema, r"no_schema.*type hint.*Iterator"),
        (any_number, r"any_number.*\*cities: str has no name"),
        (by_position, r"by_position.*city: str has no name"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_in_one_line(
    function: Callable[..., Any], missing: str
) -> None:
    with pytest.raises(ValueError, match=missing) as caught:
        tools_of_functions([function])
    assert "\n" not in str(caught.value)


def test_a_method_that_cannot_be_described_is_named_with_its_class() -> None:
    class Env:
        def helper(self) -> None: ...

    with pytest.raises(ValueError, match=r"'Env\.helper'.*begins with an underscore"):
        tools_of(Env())


def test_tools_are_found_by_import_path_and_finished_ones_are_taken_as_they_are() -> None:
    finished = Tool("remote", weather, {"type": "function", "function": {"parameters": {}}})
    found = tools_of_functions([f"{__name__}.weather", finished])
    assert [one.name for one in found] == ["weather", "remote"]
    assert found[0].call({"city": "Rome"}) == "Rome in 1 days"


def test_a_schema_from_elsewhere_is_checked_as_far_as_it_is_known() -> None:
    table = {"type": "object", "additionalProperties": False, "minProperties": 9}
    parameters = {"type": "object", "properties": {"table": table}}
    made = Tool("remote", dict, {"type": "function", "function": {"parameters": parameters}})
    assert made.call({"table": {"a": 1}}) == {"table": {"a": 1}}
    assert made.call({}) == {}
    with pytest.raises(ToolArgumentsError, match="'table' must be object, not 3"):
        made.call({"table": 3})


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        (["weather"], r"'weather' is no import path"),
        (["no.such.tool"], r"'no.such.tool' cannot be imported"),
        ([f"{__name__}.Counter"], r"is a type: give a function"),
        ([functools.partial(weather, days=2)], r"is a partial: give a function"),
        ([weather, f"{__name__}.weather"], r"two tools are called 'weather'"),
        (weather, r"must be a list"),
        ("a.b", r"must be a list"),
    ],
)
def test_what_is_no_list_of_functions_is_refused(functions: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tools_of_functions(functions)


def test_a_tool_and_a_method_of_the_same_name_are_refused() -> None:
    def early() -> str:
        """Says."""
        return ""

    with pytest.raises(ValueError, match="two tools are called 'early'"):
        tools_by_name([*tools_of_functions([early]), *tools_of(Base())])


@pytest.mark.parametrize(
    ("argument", "given", "taken"),
    [
        ("integer", 3, 3),
        ("integer", " 3 ", 3),
        ("integer", "-4", -4),
        ("number", 3, 3),
        ("number", "3", 3),
        ("number", "1.5", 1.5),
        ("text", "3", "3"),
        ("text", "true", "true"),
        ("text", "null", "null"),
        ("flag", True, True),
        ("flag", "true", True),
        ("flag", "False", False),
        ("numbers", [1, 2], [1, 2]),
        ("numbers", "[1, 2]", [1, 2]),
        ("numbers", None, None),
        ("numbers", "None", None),
        ("table", {"a": 1, "b": 0.5}, {"a": 1, "b": 0.5}),
        ("table", '{"a": 1}', {"a": 1}),
        ("unit", "f", "f"),
        ("either", "3", "3"),
        ("either", 3, 3),
        ("pair", [1, "a"], [1, "a"]),
        ("nested", [1], [1]),
        ("nested", {"a": 1}, {"a": 1}),
        ("nested", None, None),
        ("point", {"x": 1}, {"x": 1}),
        ("anything", "3", "3"),
        ("anything", [True], [True]),
    ],
)
def test_values_reach_the_function_in_the_types_of_its_hints(
    argument: str, given: Any, taken: Any
) -> None:
    received = tool(every_type).call({argument: given})[argument]
    assert received == taken
    assert type(received) is type(taken)


@pytest.mark.parametrize(
    ("argument", "given", "wanted"),
    [
        ("integer", True, "'integer' must be integer, not True"),
        ("integer", "true", "must be integer, not 'true'"),
        ("integer", 1.5, "must be integer, not 1.5"),
        ("integer", "three", "must be integer, not 'three'"),
        ("integer", "1.5", "must be integer, not '1.5'"),
        ("integer", None, "must be integer, not None"),
        ("integer", "9" * 5000, "must be integer, not '999"),
        ("number", True, "must be number, not True"),
        ("number", "NaN", "must be number, not 'NaN'"),
        ("text", 3, "must be string, not 3"),
        ("text", None, "must be string, not None"),
        ("flag", 1, "must be boolean, not 1"),
        ("numbers", [1, "2"], "must be array of integer or null, not [1, '2']"),
        ("numbers", [True], "must be array of integer or null"),
        ("numbers", "[" * 100_000, "must be array of integer or null"),
        ("table", {"a": "b"}, "must be object of number or null"),
        ("table", [1], "must be object of number or null"),
        ("unit", "k", """must be one of "c", "f", not 'k'"""),
        ("either", 1.5, "must be integer or string, not 1.5"),
        ("pair", [1], "must be array of integer, string, not [1]"),
        ("pair", ["a", 1], "must be array of integer, string"),
        ("nested", ["a"], "must be array of integer or object of integer or null"),
    ],
)
def test_a_value_of_another_type_is_refused_in_words_for_the_policy(
    argument: str, given: Any, wanted: str
) -> None:
    assert wanted in problem(every_type, **{argument: given})


def test_all_that_is_wrong_with_the_arguments_is_said_at_once() -> None:
    assert problem(weather, town="Rome", days="two") == (
        "wrong arguments: 'city' is missing; there is no argument 'town'; 'days' must be integer, "
        "not 'two'. weather takes city (string), days (integer, optional)"
    )
    assert problem(tools_by_name(tools_of(Base()))["early"].function, x=1).endswith(
        "early takes none"
    )


def test_a_tool_with_wrong_arguments_is_not_called_and_its_own_errors_stay_its_own() -> None:
    called = []

    def divide(a: int, b: int) -> float:
        """Divides.

        Args:
            a: Above.
            b: Below.
        """
        called.append(a)
        if b < 0:
            raise TypeError("below zero")
        return a / b

    for wrong in ({}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": "x", "b": 2}):
        with pytest.raises(ToolArgumentsError):
            tool(divide).call(wrong)
    assert called == []
    with pytest.raises(ZeroDivisionError):
        tool(divide).call({"a": 1, "b": 0})
    with pytest.raises(TypeError, match=r"^below zero$"):
        tool(divide).call({"a": 1, "b": -1})


class Plain:
    def __str__(self) -> str:
        return "as text"


@dataclass
class Place:
    name: str
    seen: list[date]


class Color(Enum):
    RED = "red"


class Model(BaseModel):
    size: int
    price: Decimal


LOOP: list[Any] = []
LOOP.append(LOOP)
PICTURE = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as\nit is", "as\nit is"),
        ("", ""),
        (None, ""),
        (3, "3"),
        (True, "true"),
        ({"größe": [1, None]}, '{"größe": [1, null]}'),
        ((1, "a"), '[1, "a"]'),
        (math.pi, "3.141592653589793"),
        (np.arange(1200), str([*range(1200)])),
        (np.float32(0.5), "0.5"),
        (np.array([["a", "b"]]), '[["a", "b"]]'),
        (torch.tensor([True, False]), "[true, false]"),
        (Place("x", [date(2024, 5, 3)]), '{"name": "x", "seen": ["2024-05-03"]}'),
        (Model(size=1, price=Decimal("2.50")), '{"size": 1, "price": "2.50"}'),
        (datetime(2024, 5, 3, 1, 2), "2024-05-03T01:02:00"),
        (Decimal("0.10"), "0.10"),
        ([Color.RED, UUID(int=1)], '["red", "00000000-0000-0000-0000-000000000001"]'),
        ({1: True, None: MappingProxyType({})}, '{"1": true, "null": {}}'),
        ("a\ud800b", "a?b"),
        (["\ud800"], '["?"]'),
    ],
)
def test_the_text_of_a_result(value: Any, text: str) -> None:
    assert result_text(value) == text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (PICTURE, "PIL.Image.Image, which JSON has no form for; return a text"),
        (
            [{"type": "image", "image": PICTURE}, {"type": "text", "text": "seen"}],
            "PIL.Image.Image",
        ),
        ((n for n in range(3)), "generator, which"),
        (b"png", "bytes, which"),
        ({1, 2}, "set, which"),
        (Plain(), "Plain, which"),
        ({"a": Plain}, "type, which"),
        (math.nan, "nan, no number of JSON"),
        (np.array([1.0, math.inf]), "inf, no number"),
        (np.array(["2024-01-01"], dtype="M8[ns]"), "numpy.ndarray of datetime64"),
        (pyarrow.table({"a": [1]}), "Table, which"),
        (1j, "complex, which"),
        ({(1, 2): 3}, "a key that is tuple"),
        ({1: "a", "1": "b"}, "cannot tell apart"),
        (LOOP, "list that is nested too deeply"),
        (torch.ones(2).to_sparse(), "torch.Tensor that cannot be read: "),
        ({"a": 10**5000}, "dict that cannot be read: Exceeds the limit"),
    ],
)
def test_what_json_cannot_hold_is_refused_and_never_shown_as_python_does(
    value: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        result_text(value)
    assert "0x" not in str(caught.value)


def test_null_is_none_where_a_value_may_be_null() -> None:
    def find(
        word: str | None = None, city: str = "", kind: Literal["null", "a"] | None = None
    ) -> Any:
        """Finds.

        Args:
            word: One.
            city: Two.
            kind: Three.
        """
        return [word, city, kind]

    assert tool(find).call({"word": "null", "city": "null", "kind": "null"}) == [
        None,
        "null",
        "null",
    ]
    assert tool(find).call({"word": None}) == [None, "", None]
    assert tool(find).call({"word": "None"})[0] is None
    assert "'city' must be string, not None" in problem(find, city=None)


def test_the_words_of_the_errors_are_those_of_the_schema() -> None:
    told = problem(every_type, integer="x")
    kinds = re.findall(r"(\w+) \(([^()]*), optional\)", told)
    assert dict(kinds) == {
        "integer": "integer",
        "number": "number",
        "text": "string",
        "flag": "boolean",
        "numbers": "array of integer or null",
        "table": "object of number or null",
        "unit": 'one of "c", "f"',
        "either": "integer or string",
        "pair": "array of integer, string",
        "nested": "array of integer or object of integer or null",
        "point": "object or null",
        "anything": "any value",
    }


def test_an_environment_offers_tools_with_schemas_of_their_own() -> None:
    class Shell:
        def look(self) -> str:
            """Looks around."""
            return "a room"

        def offered_tools(self) -> list[Tool]:
            parameters = {"type": "object", "properties": {}, "additionalProperties": {}}
            function = {"name": "run", "description": "Runs.", "parameters": parameters}
            return [Tool("run", dict, {"type": "function", "function": function})]

    look, run = tools_of(Shell())
    assert (look.name, run.name) == ("look", "run")
    assert run.call({"any": "thing"}) == {"any": "thing"}
    with pytest.raises(ToolArgumentsError, match="no argument 'any'"):
        look.call({"any": "thing"})
