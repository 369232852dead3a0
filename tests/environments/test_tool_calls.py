import json
import pickle
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrlhf.environments import (
    TOOL_CALL_FORMATS,
    MalformedCall,
    RegexCalls,
    ToolCall,
    detect_format,
    tool_call_format,
)
from tests.faults.fuzz_settings import fuzzing

PARIS = ToolCall("get_weather", {"city": "Paris"})
NAMES = sorted(TOOL_CALL_FORMATS)


def read(form: str, text: str) -> list[ToolCall | MalformedCall]:
    return list(TOOL_CALL_FORMATS[form](text))


def problem(form: str, text: str) -> str:
    """What is wrong with the only call of a text, which is all of the text."""
    (call,) = read(form, text)
    assert isinstance(call, MalformedCall)
    assert call.text == text
    return call.problem


TEMPERATURE = {"location": "San Francisco, CA, USA"}
TEMPERATURE_THEN = {**TEMPERATURE, "date": "2024-10-01"}

DOCUMENTED: list[tuple[str, str, list[ToolCall]]] = [
    # Qwen's page on function calling
    (
        "hermes",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": {"location": '
        '"San Francisco, CA, USA"}}\n</tool_call>\n<tool_call>\n{"name": "get_temperature_date", '
        '"arguments": {"location": "San Francisco, CA, USA", "date": "2024-10-01"}}\n'
        "</tool_call><|im_end|>",
        [
            ToolCall("get_current_temperature", TEMPERATURE),
            ToolCall("get_temperature_date", TEMPERATURE_THEN),
        ],
    ),
    # the model card of Hermes 2 Pro puts the arguments first
    (
        "hermes",
        '<tool_call>\n{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}\n'
        "</tool_call><|im_end|>",
        [ToolCall("get_stock_fundamentals", {"symbol": "TSLA"})],
    ),
    # what the chat template of Qwen3-Coder shows
    (
        "qwen3_coder",
        "I will look.\n<tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\n"
        "This is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        [
            ToolCall(
                "example_function_name",
                {
                    "example_parameter_1": "value_1",
                    "example_parameter_2": "This is the value for the second parameter\nthat can "
                    "span\nmultiple lines",
                },
            )
        ],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": {"location": "Paris, France", '
        '"format": "celsius"}}]</s>',
        [ToolCall("get_current_weather", {"location": "Paris, France", "format": "celsius"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply{"a": 3, "b": 6}</s>',
        [ToolCall("add", {"a": 3.5, "b": 4}), ToolCall("multiply", {"a": 3, "b": 6})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]bbc5b7ede[ARGS]{"a": 1}[TOOL_CALLS]sub-2[ARGS]{"b": 2}</s>',
        [ToolCall("add", {"a": 1}), ToolCall("sub-2", {"b": 2})],
    ),
    # the template of DeepSeek-V3-0324
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
        'get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        "<｜end▁of▁sentence｜>",
        [PARIS, ToolCall("get_weather", {"city": "Rome"})],
    ),
    # the model card of DeepSeek-V3.1
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        [PARIS],
    ),
    # Meta's prompt formats: Llama 3.2, and 3.1
    (
        "python",
        "[get_weather(city='San Francisco', metric='celsius'), "
        "get_weather(city='Seattle', metric='celsius')]<|eot_id|>",
        [
            ToolCall("get_weather", {"city": "San Francisco", "metric": "celsius"}),
            ToolCall("get_weather", {"city": "Seattle", "metric": "celsius"}),
        ],
    ),
    (
        "python",
        '<|python_tag|>[get_user_info(user_id=7890, special="black")]<|eot_id|>',
        [ToolCall("get_user_info", {"user_id": 7890, "special": "black"})],
    ),
    # the model card of LFM2
    (
        "python",
        '<|tool_call_start|>[get_candidate_status(candidate_id="12345")]<|tool_call_end|>Checking '
        "the current status of candidate ID 12345.<|im_end|>",
        [ToolCall("get_candidate_status", {"candidate_id": "12345"})],
    ),
    (
        "llama3_json",
        '{"name": "trending_songs", "parameters": {"n": "10", "genre": "all"}}<|eot_id|>',
        [ToolCall("trending_songs", {"n": "10", "genre": "all"})],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'
        '; {"name": "get_weather", "parameters": {"city": "Rome"}}<|eom_id|>',
        [PARIS, ToolCall("get_weather", {"city": "Rome"})],
    ),
]


@pytest.mark.parametrize(("form", "text", "calls"), DOCUMENTED)
def test_what_the_models_are_documented_to_write(
    form: str, text: str, calls: list[ToolCall]
) -> None:
    assert read(form, text) == calls


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        ),
        ("qwen3_coder", "<function=get_weather><parameter=city>Paris</parameter></function>"),
        ("mistral", ' [{"name": "get_weather", "arguments": {"city": "Paris"}}]'),
        ("mistral", 'get_weather{"city": "Paris"}'),
        ("python", 'get it: <|tool_call_start|>[get_weather(city="Paris")]'),
        ("python", '\n[get_weather(city="Paris")]\n'),
        ("llama3_json", 'So: {"name": "get_weather", "parameters": {"city": "Paris"}} it is.'),
        ("llama3_json", '{"arguments": {"city": "Paris"}, "name": "get_weather"}'),
    ],
)
def test_special_tokens_may_be_gone(form: str, text: str) -> None:
    assert read(form, text) == [PARIS]


def test_several_calls_without_special_tokens_are_all_read() -> None:
    text = 'get_weather{"city": "Paris"}add{"a": 1}'
    assert read("mistral", text) == [PARIS, ToolCall("add", {"a": 1})]


RENDERED: Mapping[str, str] = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "deepseek": "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜>',
    "python": '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
}


@pytest.mark.parametrize("form", NAMES)
def test_text_around_a_call_and_code_fences_do_not_matter(form: str) -> None:
    call = RENDERED[form]
    for text in (call, f"I'll look {{it}} up.\n\n{call}", f"```json\n{call}\n```\nDone."):
        assert read(form, text) == [PARIS]


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("before", ["", "Let me see.\n", "<think>\nhm\n</think>\n\n"])
def test_a_call_tells_where_it_begins(form: str, before: str) -> None:
    text = before + RENDERED[form]
    (call,) = read(form, text)
    assert isinstance(call, ToolCall)
    assert text[: call.start].rstrip() == before.rstrip()


def test_a_call_of_a_pattern_tells_where_it_begins() -> None:
    (call,) = RegexCalls(r"calc: (?P<expression>.+)", "calc")("So,\ncalc: 1 + 1")
    assert call == ToolCall("calc", {"expression": "1 + 1"})
    assert isinstance(call, ToolCall)
    assert call.start == 4


@pytest.mark.parametrize("form", NAMES)
def test_calls_in_the_reasoning_are_none(form: str) -> None:
    call = RENDERED[form]
    assert read(form, f"<think>\n{call}\n</think>\n\nNo need.") == []
    assert read(form, f"or {call}?\n</think>\n\n{call}") == [PARIS]
    assert read(form, f"\n<think>\n{call}") == []


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "The set {1, 2} and the list [1, 2] and f(x) = {x}.",
        '{"city": "Paris"}',
        '{"name": "Ann", "age": 3}',
        "[1, 2, 3]",
        "[see (the note)](https://example.org)",
        "tool_call, TOOL_CALLS, function=get_weather",
        'In JSON: {"name": …, "parameters": …}.',
        '```json\n{"a": {"b": []}}\n```',
        "a {b",
    ],
)
def test_text_that_only_looks_a_little_like_a_call_is_none(form: str, text: str) -> None:
    assert read(form, text) == []


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "not JSON: Expecting ','"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "no </tool_call>"),
        ("hermes", "<tool_call>", "not JSON: Expecting value (character 1)"),
        ("hermes", '<tool_call>{"name": "f"} }</tool_call>', "no </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "the call has no name"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f are no object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "no object"),
        ("hermes", "<tool_call>[]</tool_call>", "not an object"),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "not JSON: Expecting property name"),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>', "NaN is no number"),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1e999}}</tool_call>', "1e999 is no"),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"a":"\\ud800"}}</tool_call>',
            "surrogates not allowed",
        ),
        ("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>', "no <function=NAME>"),
        ("qwen3_coder", "<function=f", "no <function=NAME>"),
        ("qwen3_coder", "<function=f>", "no </function>"),
        ("qwen3_coder", "<function=f><parameter=a>1", "no </parameter> after the value of a"),
        ("qwen3_coder", "<function=f>\n1\n</function>", "no </function>"),
        ("mistral", "[TOOL_CALLS] none", "neither a list of calls nor NAME"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', "not JSON"),
        ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', "no name"),
        ("mistral", "[TOOL_CALLS]f{", "not JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "no <｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "no <｜tool▁call▁end｜>"),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>",
            "f are no object",
        ),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>",
            "no ```",
        ),
        ("python", "[f(a=1), g(b=", "not a list of calls in Python: '(' was never closed"),
        ("python", "[f('x')]", "f must be given its arguments by name, f(key=value)"),
        ("python", "[f(**{'a': 1})]", "f must be given each argument once and by its name"),
        ("python", "[f(a=1, a=2)]", "f must be given each argument once and by its name"),
        ("python", "[f(a=b)]", "the value of a is no literal"),
        ("python", "[f(a=__import__('os').getcwd())]", "the value of a is no literal"),
        ("python", "[f(a={[]: 1})]", "the value of a is no literal"),
        ("python", "[f(a={1, 2})]", "not JSON serializable"),
        ("python", "[f(a=b'x')]", "not JSON serializable"),
        ("python", "[f(a=1e999)]", "is no JSON"),
        ("python", "[f(a='\\ud800')]", "surrogates not allowed"),
        ("python", "[f(a=1), 2]", "not a list of calls, [NAME(key=value), …]"),
        ("python", "[f(a=1).b(c=2)]", "not a list of calls"),
        ("python", "[f(a=1)] and then?", "not a list of calls in Python"),
        ("python", "[f(a='\x00')]", "null bytes"),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1', "not JSON"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', "f are no object"),
        ("llama3_json", '{"parameters": {"a": 1}}', "no name"),
        ("llama3_json", "<|python_tag|>print(1)", "not JSON"),
    ],
)
def test_what_cannot_be_read_is_malformed_and_says_why(form: str, text: str, reason: str) -> None:
    told = problem(form, text)
    assert reason in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("form", "broken", "count"),
    [
        ("hermes", "<tool_call>{</tool_call>", 1),
        ("hermes", "<tool_call>{", 1),
        ("hermes", "<tool_call>{<tool_call>{", 2),
        ("qwen3_coder", "<tool_call><function=f></tool_call>", 1),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", 1),
        ("mistral", "[TOOL_CALLS]{", 1),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>", 1),
        ("python", "<|tool_call_start|>[f(]<|tool_call_end|>", 1),
        ("llama3_json", "<|python_tag|>{<|eom_id|>", 1),
    ],
)
def test_calls_around_a_malformed_one_are_read(form: str, broken: str, count: int) -> None:
    calls = read(form, f"{RENDERED[form]}\n{broken}\n{RENDERED[form]}")
    assert [calls[0], calls[-1]] == [PARIS, PARIS]
    assert [type(call) for call in calls[1:-1]] == [MalformedCall] * count


def test_tags_inside_of_a_json_string_end_no_call() -> None:
    tags = {"code": 'a</tool_call>b<tool_call>"'}
    call = json.dumps({"name": "run", "arguments": tags})
    assert read("hermes", f"<tool_call>{call}</tool_call>") == [ToolCall("run", tags)]


def test_the_words_of_json_are_values_in_python_calls_too() -> None:
    text = "[f(a=true, b=[null, False], c={'d': None}, e=(1, -2.5), g='\\d')]"
    values = {"a": True, "b": [None, False], "c": {"d": None}, "e": [1, -2.5], "g": "\\d"}
    assert read("python", text) == [ToolCall("f", values)]


def test_arguments_may_be_missing_where_something_else_says_that_it_is_a_call() -> None:
    nothing = [ToolCall("now", {})]
    assert read("hermes", '<tool_call>{"name": "now"}</tool_call>') == nothing
    assert read("qwen3_coder", "<function=now>\n</function>") == nothing
    assert read("python", "[now()]") == nothing
    assert read("llama3_json", '<|python_tag|>{"name": "now"}') == nothing


ODD = [
    *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<think>"),
    *("<parameter=a>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f{", "</think>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n", "```"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "<|eot_id|>", "</s>"),
    *('{"name": "f", "parameters": {', '"name":"f"', '"arguments":', "}", "{", "[", "]", "]}"),
    *("[f(", "a=", ")]", "(", ")", ",", ";", "'", '"', "\\", "\\ud800", "NaN", "1e999", "\n"),
]
ANY_TEXT = st.lists(st.sampled_from(ODD) | st.text(max_size=8), max_size=30).map("".join)


@fuzzing(300)
@given(ANY_TEXT)
def test_any_text_can_be_read(text: str) -> None:
    for form in TOOL_CALL_FORMATS.values():
        for call in form(text):
            if isinstance(call, ToolCall):
                json.dumps([call.name, dict(call.arguments)], allow_nan=False).encode()
                assert call.name
            else:
                assert call.text in text
                assert call.problem


NAME = st.text("abcxyz_019", max_size=8).map("n".__add__)
PROSE = st.text(st.characters(exclude_characters="<>[]{}`|", exclude_categories=["Cs"]), max_size=9)
TAG = re.compile(r"</think>|</parameter>|<function=|<\|[a-z_]+\|>|</s>")
"""What ends a call or the reasoning wherever it stands."""
TEXT = st.text(max_size=12).filter(lambda text: not TAG.search(text))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(ToolCall, NAME, st.dictionaries(NAME, VALUES, max_size=4)), min_size=1, max_size=4
)
Render = Callable[[ToolCall], str]


def as_json(call: ToolCall, key: str = "arguments", *, ascii_only: bool = False) -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=ascii_only)


def as_python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def deepseek_old(call: ToolCall) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{json.dumps(call.arguments)}\n```<｜tool▁call▁end｜>"
    )


def deepseek_new(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments)
    return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


RENDERS: list[tuple[str, Render]] = [
    ("hermes", lambda call: f"<tool_call>\n{as_json(call)}\n</tool_call>"),
    ("hermes", lambda call: f"<tool_call>{as_json(call, ascii_only=True)}</tool_call>"),
    ("mistral", lambda call: f"[TOOL_CALLS] [{as_json(call)}]"),
    ("mistral", lambda call: f"[TOOL_CALLS]{call.name}{json.dumps(call.arguments)}"),
    ("deepseek", deepseek_old),
    ("deepseek", deepseek_new),
    ("llama3_json", lambda call: as_json(call, "parameters") + ";"),
    ("python", lambda call: f"<|tool_call_start|>[{as_python(call)}]<|tool_call_end|>"),
]


@fuzzing(60)
@given(CALLS, PROSE)
def test_rendered_calls_are_read_back(calls: list[ToolCall], prose: str) -> None:
    for form, render in RENDERS:
        text = prose + prose.join(map(render, calls)) + prose
        assert read(form, text) == calls, form


@fuzzing(60)
@given(CALLS)
def test_lists_of_calls_are_read_back(calls: list[ToolCall]) -> None:
    assert read("mistral", f"[TOOL_CALLS] [{', '.join(map(as_json, calls))}]</s>") == calls
    assert read("python", f"[{', '.join(map(as_python, calls))}]<|eom|>") == calls


@fuzzing(60)
@given(st.dictionaries(NAME, TEXT))
def test_values_in_tags_are_read_back_with_their_line_breaks(values: dict[str, str]) -> None:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    assert read("qwen3_coder", text * 2) == [ToolCall("f", values)] * 2


MARKS = st.sampled_from(
    ["</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>", "</s>", "[TOOL_CALLS]"]
)
MARKED = st.builds(
    ToolCall,
    NAME,
    st.dictionaries(NAME, st.lists(MARKS | TEXT, max_size=4).map("".join), min_size=1, max_size=3),
)


@fuzzing(60)
@given(
    st.lists(MARKED, min_size=1, max_size=3),
    st.sampled_from(["", "<think>hm</think>", "hm</think>"]),
)
def test_marks_inside_of_arguments_are_letters(calls: list[ToolCall], thought: str) -> None:
    for form, render in RENDERS:
        assert read(form, thought + "\n".join(map(render, calls))) == calls, form
    values = {name: text for call in calls for name, text in call.arguments.items()}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"{thought}<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    assert read("qwen3_coder", text) == [ToolCall("f", values)]


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
@pytest.mark.parametrize("form", NAMES)
def test_no_call_vanishes_that_ends_in_the_midst(form: str, end: str) -> None:
    call = RENDERED[form].replace("Paris", "Paris </think> <tool_call>")
    (whole,) = read(form, call)
    assert isinstance(whole, ToolCall)
    for length in range(3, len(call)):
        if end and form == "python":
            continue  # what ends its lists
        cut = call[:length]
        found = read(form, f"{cut}{end}")
        assert found, cut
        if found != [whole]:  # the end of some lists may be missing
            assert all(isinstance(one, MalformedCall) for one in found), cut
            assert read(form, f"<think>\nhm\n</think>{cut}"), cut


SAID = '"a </think> b"'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {SAID}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {{"q": {SAID}}}}}</tool_call>'),
        ("mistral", f"[TOOL_CALLS][{SAID}]"),
        ("mistral", f'[TOOL_CALLS]{{"name": "f", "arguments": {{"q": {SAID}}}}}'),
        ("deepseek", f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>[{SAID}]<｜tool▁call▁end｜>"),
        ("python", f"[f({SAID})]"),
        ("python", f"[f(q={SAID} + x)]"),
        ("llama3_json", f'{{"name": "f", "parameters": {SAID}}}'),
        ("qwen3_coder", "<function=f>\n<parameter=q>\na </think> b\n</parameter>\n</function"),
    ],
)
def test_a_mark_in_the_values_of_what_is_no_call_ends_no_thought(form: str, text: str) -> None:
    assert problem(form, text)


def test_a_turn_that_ends_where_its_calls_were_to_begin_has_a_malformed_one() -> None:
    for end in ("", "\n", "<｜end▁of▁sentence｜>"):
        (found,) = read("deepseek", f"Let me look.<｜tool▁calls▁begin｜>{end}")
        assert isinstance(found, MalformedCall)
    assert read("deepseek", "Done.<｜end▁of▁sentence｜>") == []


def test_one_broken_call_of_several_is_told() -> None:
    good = RENDERED["hermes"]
    broken = good.replace("}", "", 1).replace("</tool_call>", "")
    kinds = [type(one) for one in read("hermes", f"{good}\n{broken}\n{good}")]
    assert kinds == [ToolCall, MalformedCall, ToolCall]
    nearly = [
        '{"name": "f" "parameters": {"a": 1}}',
        "{'name': 'f', 'parameters': {'a': 1}}",
        '{"name": "f", "parameters" {"a": 1}}',
    ]
    for text in nearly:
        assert "not JSON" in problem("llama3_json", text)


def test_thoughts_in_the_middle_of_a_turn_hold_no_calls() -> None:
    call = RENDERED["hermes"]
    assert read("hermes", f"<think>a</think>{call}<think>or {call}</think>{call}") == [PARIS] * 2
    first, told = read("hermes", f"<think>a</think>{call}<think>or {call}")
    assert first == PARIS
    assert isinstance(told, MalformedCall)
    assert "no </think> closes" in told.problem
    # a draft that was given up in a thought that the template has opened
    assert read("hermes", f"<tool_call>no, </think>{call}") == [PARIS]


DEEP = 200_000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":' + '{"a":' * DEEP),
        ("mistral", "[TOOL_CALLS]" + "[" * DEEP),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>" + '{"a":' * DEEP),
        ("python", "[f(a=" + "[" * DEEP + "]" * DEEP + ")]"),
        ("python", "[f(a=" + "-" * DEEP + "1)]"),
        ("python", "[f(a=" + "1+" * 3000 + "1)]"),
        ("llama3_json", '{"name":"f","parameters":' * (DEEP // 20)),
    ],
)
def test_deep_nesting_is_malformed(form: str, text: str) -> None:
    assert problem(form, text)


def test_nesting_is_limited_to_what_can_be_written_down_again() -> None:
    def nested(depth: int) -> str:
        arguments = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
        return f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'

    assert isinstance(read("hermes", nested(64))[0], ToolCall)
    assert "nested too deeply" in problem("hermes", nested(65))


@pytest.mark.parametrize("form", NAMES)
def test_large_texts_take_a_time_proportional_to_their_length(form: str) -> None:
    begun = time.process_time()
    for unit in ("<tool_call>{", "[TOOL_CALLS][", "<|python_tag|>{", "<function=a><parameter=b>"):
        read(form, unit * 20_000)
    # some 10 ms in all; with a time that is quadratic, 10 s and more
    assert time.process_time() - begun < 3.0


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json"])
def test_after_32_malformed_calls_the_rest_is_one(form: str) -> None:
    opening = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
    text = (opening[form] + "?") * 100
    calls = read(form, text)
    assert len(calls) == 32
    assert "".join(call.text for call in calls if isinstance(call, MalformedCall)) == text


def test_a_pattern_reads_calls_of_a_few_shot_prompt() -> None:
    calls = RegexCalls(r"(?m)^(?P<tool>\w+): (?P<query>[^|\n]+)(?:\|(?P<limit>\d+))?$")
    assert calls("First\nsearch: red cars|3\nnothing\ncalc: 1 + 2\n") == [
        ToolCall("search", {"query": "red cars", "limit": "3"}),
        ToolCall("calc", {"query": "1 + 2"}),
    ]
    assert calls("nothing") == []


def test_a_pattern_for_one_tool_names_it_outside() -> None:
    calls = pickle.loads(pickle.dumps(RegexCalls(r"guess: (?P<number>-?\d+)", tool="guess")))
    assert calls("guess: 4, guess: -5") == [
        ToolCall("guess", {"number": "4"}),
        ToolCall("guess", {"number": "-5"}),
    ]
    assert RegexCalls("stop!", tool="stop")("stop!") == [ToolCall("stop", {})]


def test_a_match_that_names_no_tool_is_malformed() -> None:
    calls = RegexCalls(r"<(?P<tool>\w+)?>")
    assert calls("<a><>") == [ToolCall("a", {}), MalformedCall("<>", "the call names no tool")]


def test_a_pattern_that_backtracks_for_ever_is_given_up() -> None:
    calls = RegexCalls(r"(?P<tool>(a+)+)$", timeout=0.05)
    begun = time.process_time()
    (call,) = calls("a" * 4000 + "b" * 4000 + "aaa!" * 4000)
    assert time.process_time() - begun < 2.0
    assert isinstance(call, MalformedCall)
    assert "in time" in call.problem


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": r"(?P<a>\w)"}, r"give the tool's name or have a group \(\?P<tool>…\)"),
        ({"pattern": r"(?P<tool>\w)", "tool": "f"}, "either"),
    ],
)
def test_a_pattern_that_does_not_say_what_is_called_is_refused(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        RegexCalls(**options)


def shouted(text: str) -> list[ToolCall]:
    return [ToolCall(text, {})] if text.isupper() else []


def test_a_format_is_found_by_name_or_path_or_is_there_already() -> None:
    assert tool_call_format("hermes") is TOOL_CALL_FORMATS["hermes"]
    assert tool_call_format(shouted) is shouted
    assert tool_call_format(f"{__name__}.shouted")("STOP") == [ToolCall("STOP", {})]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hermez", "unknown format of tool calls 'hermez', .*did you mean 'hermes'"),
        ("no.such.format", "'no.such.format' cannot be imported"),
        (f"{__name__}.ODD", "is a list, not a function"),
    ],
)
def test_a_format_that_does_not_exist_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tool_call_format(name)


# ---------------------------------------------------------------------- formats of templates

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Write HINT.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function %}CALL{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
XML = (
    "<tool_call>\n<function={{ call.name }}>\n{% for key, value in call.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
PYTHON = (
    "[{{ call.name }}({% for key, value in call.arguments.items() %}{{ key }}="
    "{{ value | tojson }}{% endfor %})]"
)
# arguments are joined as a text, which fails for a mapping, and only without content
DEEPSEEK = (
    "{{ bos_token + '' }}{% for message in messages %}{% if message.content is none %}"
    "{% for call in message.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}"
    "{{ '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
    "{% endfor %}{% else %}{{ message.role + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}]{{ eos_token }}{% endif %}{% endfor %}"
)


def chatml(call: str, hint: str = "calls") -> str:
    return CHATML.replace("CALL", call).replace("HINT", hint)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (chatml(f"<tool_call>\n{JSON}\n</tool_call>"), "hermes"),
        (chatml(XML), "qwen3_coder"),
        (chatml(f"<|tool_call_start|>{PYTHON}<|tool_call_end|>"), "python"),
        (chatml(PYTHON), "python"),
        (chatml(JSON.replace('arguments"', 'parameters"')), "llama3_json"),
        (chatml(f"<|tool_call|>[{JSON}]"), "llama3_json"),
        (MISTRAL, "mistral"),
        (DEEPSEEK, "deepseek"),
    ],
)
def test_the_format_is_what_reads_the_template_s_own_calls(template: str, name: str) -> None:
    assert detect_format(template) == name


@pytest.mark.parametrize(
    "template",
    [
        # the system's turn shows a format, and no turn has it
        chatml("", hint="<tool_call>" + '{"name": "f", "arguments": {}}' + "</tool_call>"),
        # GLM has calls in the same tag, in a way of its own
        chatml("<tool_call>{{ call.name }}\n<arg_key>word</arg_key></tool_call>"),
        "{{ raise_exception('no tools') }}",
        "{{ messages[7].content }}",
        "{% if",
        "",
    ],
)
def test_a_template_without_calls_that_can_be_read_has_no_format(template: str) -> None:
    assert detect_format(template) is None
