"""Messages as templates read them: parts or text, arguments as objects or as JSON."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lrlhf.models.chat_templates import readable_messages

PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
JOINS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content | selectattr('type', 'equalto', "
    "'text') %}{{ p.text }}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"
)
FIRST_PART = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}{% endfor %}"
)
ONLY_USER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p.text }};{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]


def rendered(messages: list[dict[str, Any]], template: str) -> str:
    render: Any = render_jinja_template
    (text,), _ = render([readable_messages(messages, template)], chat_template=template)
    return str(text)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("template", "of_parts", "of_text"),
    [
        (PRINTS, "a b", "a b"),
        (JOINS, "a b", "a b"),
        (PARTS_ONLY, "a b", "a b"),
        (BOTH, "a ;b;", "a b"),
        (FIRST_PART, "a b", "a b"),
    ],
)
def test_content_reaches_the_text_in_the_form_that_the_template_takes(
    template: str, of_parts: str, of_text: str, role: str
) -> None:
    assert rendered([{"role": role, "content": PARTS}], template) == f"<{role}>{of_parts}"
    assert rendered([{"role": role, "content": "a b"}], template) == f"<{role}>{of_text}"


def test_each_role_is_tried_by_itself() -> None:
    messages = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]
    assert rendered(messages, ONLY_USER) == "<user>a ;b;<assistant>a b"


def test_parts_that_are_no_text_are_not_printed() -> None:
    message = {"role": "user", "content": [*PARTS, {"type": "thinking", "thinking": "c"}]}
    with pytest.raises(ValueError, match=r"role 'user' as text, not as parts \(text, thinking\)"):
        readable_messages([message], PRINTS)


@pytest.mark.parametrize(
    "written",
    [
        "c.function.arguments | tojson",
        "c.function.arguments",
        "'' + c.function.arguments + ''",
        "c.function.arguments ~ ''",
        "c.function.arguments | string",
    ],
)
def test_arguments_are_json_however_a_template_writes_them(written: str) -> None:
    template = (
        f"{{% for m in messages %}}{{% for c in m.tool_calls %}}{{{{ {written} }}}}{{% endfor %}}"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "ü", "b": None}}}
    assert rendered([{"role": "assistant", "tool_calls": [call]}], template) == (
        '{"a": "ü", "b": null}'
    )


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}"


@pytest.mark.parametrize("given", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize(
    "says",
    [
        # as DeepSeek's, which knows a call by its null
        "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}",
        # cannot do without text, and prints null
        "{{ '' + m.content }}" + CALLS,
        "{{ m.content }}" + CALLS,
        # shows either
        "{% if m.content is defined %}{{ m.content }}{% else %}" + CALLS + "{% endif %}",
    ],
)
def test_a_turn_that_only_calls_says_nothing_in_the_way_that_the_template_reads(
    says: str, given: dict[str, Any]
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>" + says + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert rendered([{"role": "assistant", **given, "tool_calls": [call]}], template) == (
        "<assistant><call>f"
    )
