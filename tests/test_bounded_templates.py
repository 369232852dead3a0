"""Chat templates that take time or memory without end; honest ones render as in transformers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from lrlhf import bounded_templates
from lrlhf.bounded_templates import BoundedEnvironment, render_jinja_template
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.prompt_rows import PromptTemplate
from tests.conftest import CHAT_TEMPLATE

CHAT: Any = [{"role": "user", "content": "a" * 200}]
LOOPS = "{% for x in range(99999) %}" * 4 + "{% endfor %}" * 4
OVER_LETTERS = "{% for x in messages[0].content %}" * 6 + "{% endfor %}" * 6
ENDLESS = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
ENDLESS += "{{ m(40) }}"
DOUBLED = (
    "{% set n.t = n.t ~ n.t %}",
    "{% set n.t = n.t + n.t %}",
    "{% set n.t = '%s%s' % (n.t, n.t) %}",
    "{% set n.t = '{0}{0}'.format(n.t) %}",
    "{% set n.t = '%s%s' | format(n.t, n.t) %}",
    "{% set n.t = [n.t, n.t] | join %}",
    "{% set n.t = ''.join([n.t, n.t]) %}",
    "{% set n.t = n.t | replace('a', 'aa') %}",
    "{% set n.t = n.t.replace('a', 'aa') %}",
    "{% set t %}{{ n.t }}{{ n.t }}{% endset %}{% set n.t = t %}",
)
GROWING = [
    "{% set n = namespace(t='aaaaaaaaaaaaaaaa') %}{% for x in range(60) %}"
    f"{doubled}{{% endfor %}}{{{{ n.t | length }}}}"
    for doubled in DOUBLED
]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (LOOPS, "takes longer than 1 s"),
        (OVER_LETTERS, "takes longer than 1 s"),
        (ENDLESS, "takes longer than 1 s"),
        *((template, "16,777,216 letters") for template in GROWING),
        ("{{ 'a' * 10**10 }}", "more than 16,777,216 letters"),
        ("{{ 10**9 * 'a' }}", "more than 16,777,216 letters"),
        ("{{ ([0] * 10**9) | length }}", "more than 16,777,216 letters"),
        ("{{ 7 ** 7 ** 7 ** 7 }}", "more than 64 bits"),
        ("{{ 99999999999 * 99999999999 }}", "more than 64 bits"),
        ("{{ 'a' | center(9999999999) }}", "more than 16,777,216 letters"),
        ("{{ 'a\\nb' | indent(9999999999) }}", "more than 16,777,216 letters"),
        ("{{ 'a'.ljust(9999999999) }}", "more than 16,777,216 letters"),
        ("{{ '%9999999999d' % 1 }}", "pads to more"),
        ("{{ '%*d' % (9999999999, 1) }}", "pads to more"),
        ("{{ '%9999999999d' | format(1) }}", "pads to more"),
        ("{{ '{:9999999999}'.format(1) }}", "pads to more"),
        ("{{ '{:{}}'.format('a', 9999999999) }}", "pads to more"),
        ("{% for x in range(99999) %}{{ messages[0].content }}{% endfor %}", "16,777,216 letters"),
        ("{# " + "x" * 2**21 + " #}", "16,777,216 letters"),
    ],
)
def test_a_template_of_a_stranger_ends(
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    problem: str,
) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 1.0)
    for spelt in (template, template + "{% generation %}{% endgeneration %}"):
        monkeypatch.setattr(tokenizer, "chat_template", spelt)
        with pytest.raises(BadRow) as refused:
            ChatFormat(tokenizer).render_spans(CHAT, {})
        assert any(part in str(refused.value.detail) for part in problem.split("|"))
    # nothing is left that would be raised in the next
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    for _ in range(3):
        assert "user" in ChatFormat(tokenizer).render(CHAT, {}, prompt=True)


def test_the_templates_of_prompts_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 0.5)
    with pytest.raises(BadRow, match=r"takes longer than 0\.5 s"):
        PromptTemplate(LOOPS + "{{ a }}").render({"a": "b"})


def test_threads_are_watched_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 0.5)

    def rendered(template: str) -> str:
        try:
            return str(render_jinja_template([CHAT], chat_template=template)[0][0])
        except TemplateError as error:
            return str(error)

    honest = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(rendered, [LOOPS, *[honest] * 200, LOOPS, *[honest] * 200]))
    late = "the template takes longer than 0.5 s"
    assert found == [late, *["user"] * 200, late, *["user"] * 200]


def test_a_wait_of_the_machine_is_no_time_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 0.2)
    template = BoundedEnvironment().from_string("{{ wait(0.6) }}done")
    assert template.render(wait=lambda seconds: time.sleep(seconds) or "") == "done"
    assert threading.active_count() < 100


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        "{{ 'a * b %s' % 5 }}{{ '%5.2f' | format(1.5) }}{{ '{:>10}'.format('x') }}{{ 3 * 'ab' }}",
        "{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'a' | center(9) }}{{ 'a\\nb' | indent(4) }}{{ 3 * 5 }}",
        "{{ [1, 2, 3, 4] | batch(2) | list }}{{ 'a b c' | wordwrap(3) }}{{ 'x'.upper() }}",
    ],
)
def test_what_is_honest_renders_as_in_a_plain_sandbox(template: str) -> None:
    plain = ImmutableSandboxedEnvironment().from_string(template)
    bounded = BoundedEnvironment().from_string(template)
    assert bounded.render(messages=CHAT) == plain.render(messages=CHAT)
    assert "".join(bounded.generate(messages=CHAT)) == plain.render(messages=CHAT)
