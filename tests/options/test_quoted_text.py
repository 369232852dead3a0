"""Text in quotes is text in options without a type, from a config, from Python and dumped again."""

from typing import Any

import pytest
import yaml

from lrlhf.arguments import TakesOptions
from lrlhf.options.parser import Parser

LOOKS_LIKE_MORE = (
    *("1", "-7", "1e3", "1.5", "true", "null", "~", "yes", "[1, 2]", "{a: 1}", "a: 1", "'x'"),
    *("2024-01-01", "12:30", "0x1F", "0b_", "# none", "", " 1 ", "-", "*a", "\u0661", "{a}"),
)


class Part(TakesOptions):
    """Has options of every shape without a type of its own."""

    def __init__(
        self,
        free: Any = None,
        entries: list[Any] | None = None,
        options: dict[str, Any] | None = None,
        number_or_any: int | Any = None,
        number_or_text: int | float | bool | str | None = None,
    ) -> None:
        self.values = {
            **{"free": free, "entries": entries, "options": options},
            **{"number_or_any": number_or_any, "number_or_text": number_or_text},
        }


class Whole(TakesOptions):
    """Has parts that only a parser makes."""

    def __init__(self, parts: list[Part], options: dict[str, Any] | None = None) -> None:
        self.parts, self.options = parts, options


def shapes(value: Any) -> dict[str, Any]:
    return {
        "free": value,
        "entries": [value, [value]],
        "options": {"a": value, "deep": {"b": [value, {"c": value}]}},
        "number_or_any": value,
        "number_or_text": value,
    }


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [leaf for part in value for leaf in leaves(part)] if type(value) is list else [value]


def from_yaml(text: str, *flags: str) -> Part:
    parser = Parser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(Part, "part")
    config = parser.parse_args([f"--config={text}", *flags])
    saved = parser.dump(config, skip_unset=False)  # as beside a checkpoint, and read once more
    part: Part = parser.instantiate(parser.parse_args([f"--config={saved}"])).part
    return part


@pytest.mark.parametrize("text", LOOKS_LIKE_MORE)
def test_quoted_text_stays_text_through_both_doors(text: str) -> None:
    config = {"part": {"class_path": f"{__name__}.Part", "init_args": shapes(text)}}
    written = yaml.safe_dump(config, default_style='"', allow_unicode=True)
    described = {"class_path": f"{__name__}.Part", "init_args": shapes(text)}
    for part in (from_yaml(written), Whole([described]).parts[0]):  # type: ignore[list-item]
        assert part.values == shapes(text)
        assert {type(leaf) for leaf in leaves(part.values)} == {str}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *[("1", 1), ("true", True), ("1e3", 1000.0), ("[1, '2']", [1, "2"])],
        *[("null", None), ("[1, null]", [1, None]), ("{a: null}", {"a": None})],
        *[("'1'", "1"), ('"true"', "true"), ("{a: '1'}", {"a": "1"}), ("word", "word")],
    ],
)
def test_a_flag_is_read_as_yaml_once(flag: str, value: Any) -> None:
    written = yaml.safe_dump(
        {"part": {"class_path": f"{__name__}.Part", "init_args": {"options": {"kept": "1"}}}}
    )
    part = from_yaml(written, f"--part.init_args.options.a={flag}", f"--part.free={flag}")
    assert part.values["options"] == {"kept": "1", "a": value}
    assert part.values["free"] == value
    assert type(part.values["free"]) is type(value)
