"""Chat templates that take time or memory without end; honest ones render as in transformers."""

import threading
import time
import tracemalloc
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
# 2**50 comparisons, which nothing could interrupt
COMPARED = [
    f"{{% set n = namespace(l={opened}, m={opened}) %}}{{% for i in range(50) %}}"
    f"{{% set n.l = {opened[0]}n.l, n.l{opened[1]} %}}"
    f"{{% set n.m = {opened[0]}n.m, n.m{opened[1]} %}}{{% endfor %}}{compared}"
    for opened, compared in (("[]", "{{ n.l == n.m }}"), ("()", "{{ n.l in [n.m] }}"))
]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        *((template, "takes longer than 0.2 s") for template in (LOOPS, OVER_LETTERS, ENDLESS)),
        *((template, "1,048,576 letters") for template in [*GROWING, *COMPARED]),
        ("{{ 'a' * 10**10 }}", "more than 1,048,576 letters"),
        ("{{ 10**9 * 'a' }}", "more than 1,048,576 letters"),
        ("{{ ([0] * 10**9) | length }}", "more than 1,048,576 letters"),
        ("{{ 7 ** 7 ** 7 ** 7 }}", "more than 64 bits"),
        ("{{ 99999999999 * 99999999999 }}", "more than 64 bits"),
        ("{{ 'a' | center(9999999999) }}", "more than 1,048,576 letters"),
        ("{{ 'a\\nb' | indent(9999999999) }}", "more than 1,048,576 letters"),
        ("{{ 'a'.ljust(9999999999) }}", "more than 1,048,576 letters"),
        ("{{ '%9999999999d' % 1 }}", "pads to more"),
        ("{{ '%*d' % (9999999999, 1) }}", "pads to more"),
        ("{{ '%9999999999d' | format(1) }}", "pads to more"),
        ("{{ '{:9999999999}'.format(1) }}", "pads to more"),
        ("{{ '{:{}}'.format('a', 9999999999) }}", "pads to more"),
        ("{% for x in range(99999) %}{{ messages[0].content }}{% endfor %}", "1,048,576 letters"),
        ("{# " + "x" * 2**21 + " #}", "1,048,576 letters"),
    ],
)
def test_a_template_of_a_stranger_ends(
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    problem: str,
) -> None:
    monkeypatch.setattr(bounded_templates, "MAX_LETTERS", 2**20)
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 0.2 if "takes" in problem else 600.0)
    for spelt in (template, template + "{% generation %}{% endgeneration %}"):
        monkeypatch.setattr(tokenizer, "chat_template", spelt)
        with pytest.raises(BadRow) as refused:
            ChatFormat(tokenizer).render_spans(CHAT, {})
        assert problem in str(refused.value.detail)
    # nothing is left that would be raised in the next
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    for _ in range(3):
        assert "user" in ChatFormat(tokenizer).render(CHAT, {}, prompt=True)


LONG = "{% set a = 'x' * 2000000 %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a'.encode().ljust(600000000) | length }}",
        "{{ ('a' | attr('encode'))() }}",
        "{{ 'a'['encode']() }}",
        "{{ (1).to_bytes(600000000, 'big') | length }}",
        LONG + "{{ ('x' * 300).translate({120: a}) }}",
        "{{ [1] | batch(60000000, 'x') | list | length }}",
        "{{ [1] | slice(60000000) | list | length }}",
        "{{ [1] | tojson(indent=600000000) }}",
        LONG + "{{ range(300) | list | tojson(none, a) }}",
        LONG + "{{ range(300) | list | tojson(separators=(a, a)) }}",
        LONG + "{{ ('a\n' * 300) | indent(a, blank=true) }}",
        LONG + "{{ ('a\n' * 300) | indent(width=a) }}",
        "{{ ('a\n' * 300000) | indent(2000) }}",
        LONG + "{{ ('a b ' * 300) | wordwrap(2, wrapstring=a) }}",
        LONG + "{{ ('x' * 300) | replace(old='x', new=a) }}",
        LONG + "{{ ('x' * 300) | replace('x', new=a) }}",
        LONG + "{{ ('www.a.org ' * 300) | urlize(rel=a) }}",
        "{{ '%(a)600000000d' % {'a': 1} }}",
        "{{ '%(a(b)c)600000000d' % {'a(b)c': 1} }}",
        "{{ '%(a)600000000d' | format(a=1) }}",
        "{{ ['%600000000d'] | format(1) }}",
        "{{ ('%(a)999d' * 300000) % {'a': 1} }}",
        LONG + "{{ ('%(a)s' * 300) % {'a': a} }}",
        LONG + "{{ ('{a}' * 300).format(a=a) }}",
        "{{ '{0[}]:600000000}'.format({'}': 1}) }}",
        LONG + "{{ ([a] * 30) | join }}",
        LONG + "{{ [[a] * 30] | join }}",
        LONG + "{{ ([{'a': a}] * 30) | join(attribute='a') }}",
        LONG + "{{ [1, 2, 3, 4, 5, 6, 7, 8, 9] | join(d=a) }}",
        LONG + "{{ [a] * 30 }}",
        LONG + "{{ ([a] * 30) | tojson }}",
        LONG + "{{ ([a] * 30) | string | length }}",
        LONG + "{{ ([a] * 30) | pprint | length }}",
        LONG + "{{ ([[0] * 2000000] * 30) | sum(start=[]) | length }}",
        LONG + "{% set n = namespace(a=[a] * 30) %}{{ n }}",
        LONG + "{{ (" + "a ~ " * 30 + "a) | length }}",
        "{{ ('\t' * 300000).expandtabs(2000) | length }}",
        "{{ 1.5 | round(9999999, 'floor') }}",
        *(f"{{{{ ('x ' * 6000000){call} | length }}}}" for call in (".split()", ".rsplit(' ')")),
        "{{ ('\v' * 6000000).splitlines() | length }}",
        *(
            f"{{{{ ('x' * 6000000) | {to_list} | list | length }}}}"
            for to_list in ("list", "sort", "unique", "batch(2)", "slice(2)")
        ),
        "{{ strftime_now('%c' * 6000000) | length }}",
        "{{ '\\\\'" + " | pprint" * 40 + " }}",
        "{{ " + " ~ ".join(["'a' | center(3000000)"] * 30) + " }}",
    ],
)
def test_no_single_call_makes_much_of_little(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a call ends by itself: the thread that watches could not end it."""
    monkeypatch.setattr(bounded_templates, "MAX_SECONDS", 600.0)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            render_jinja_template([CHAT], chat_template=template)
        assert tracemalloc.get_traced_memory()[1] < 150e6
    finally:
        tracemalloc.stop()


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
    monkeypatch.setattr(bounded_templates, "MAX_LETTERS", 2**20)
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
        "{{ messages | tojson(indent=4) }}{{ [3, 1] | sort | join(', ') }}{{ 1.25 | round(1) }}",
        "{{ '%(a)5d' % {'a': 1} }}{{ 'aba' | replace(old='a', new='c') }}{{ messages | pprint }}",
        "{{ messages | map(attribute='role') | join(d='|') }}{{ 'www.a.org' | urlize(rel='x') }}",
        "{{ 'a' ~ 1 ~ [2] ~ nothing }}{{ messages }}{{ [1, 2] | sum }}{{ 'A\tb'.expandtabs(4) }}",
        "{{ 'a b\nc'.split() }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a\nb'.splitlines() }}"
        "{{ 'cab' | list }}{{ 'cab' | sort | batch(2) | list }}",
        "{% filter indent(2, true) %}a\nb{% endfilter %}{{ nothing | default('x') | upper }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '<' | e }}",
        "{% autoescape true %}{{ '<' ~ ('b' | safe) }}{{ ['<'] | join('&') }}{% endautoescape %}",
    ],
)
def test_what_is_honest_renders_as_in_a_plain_sandbox(template: str) -> None:
    plain = ImmutableSandboxedEnvironment().from_string(template)
    bounded = BoundedEnvironment().from_string(template)
    assert bounded.render(messages=CHAT) == plain.render(messages=CHAT)
    assert "".join(bounded.generate(messages=CHAT)) == plain.render(messages=CHAT)
