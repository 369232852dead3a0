"""What becomes of each value of a row: learnt, read, named in a warning, or refused.

Expected outcomes are read off the templates below, which do what published ones do.
"""

import json
import logging
import random
from typing import Any

import pytest
from PIL import Image

from lrlhf.datamodules import (
    BadDataError,
    PreferenceDataModule,
    PromptDataModule,
    StepwiseDataModule,
    SupervisedDataModule,
)
from tests.datamodules.conftest import TOKENIZER, Rows

PICTURE = Image.new("RGB", (2, 2))
ROLE = "<|im_start|>{{ m.role }}\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + ROLE + "{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
MARKED = (
    "{% for m in messages %}" + ROLE + "{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}" + OPEN
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
)
QWEN25 = (
    TOOLS + "{% for m in messages %}" + ROLE + "{{ m.content or '' }}" + CALLS + "<|im_end|>\n"
    "{% endfor %}" + OPEN
)
# thoughts stand in the content or beside it, and are shown behind the last question only
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + TOOLS
    + "{% for m in messages %}"
    + ROLE
    + "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% set said = m.content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{% if thought and loop.index0 > ns.last %}<think>{{ thought }}</think>{% endif %}"
    "{{ said }}" + CALLS + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + OPEN
)
# no thoughts of any turn, and no tools
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}"
    "{{ m.content }}{% endif %}<|im_end|>\n{% else %}" + ROLE + "{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + OPEN
)
# results come from the role ipython, a developer is unknown
LLAMA3 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'ipython' %}<|im_start|>ipython\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role in ['system', 'user', 'assistant'] %}" + ROLE + "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}" + OPEN
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<|im_start|>{{ role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
# knows two roles, and passes over what others say
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "marked": MARKED,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "r1": R1,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
}


def turn(role: str, content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


ASK, REPLY = turn("user", "ask"), turn("assistant", "reply")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "VALUE"}}}
TOOL = {"type": "function", "function": {"name": "VALUE", "parameters": {"type": "object"}}}
THOUGHT = "<think>VALUE</think>reply"
LAST = {"loss_on": "completion"}

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "answer": ({"messages": [ASK, turn("assistant", "VALUE")]}, {}),
    "thought": ({"messages": [ASK, turn("assistant", THOUGHT)]}, LAST),
    "earlier thought": ({"messages": [ASK, turn("assistant", THOUGHT), ASK, REPLY]}, LAST),
    "reasoning": ({"messages": [ASK, {**REPLY, "reasoning_content": "VALUE"}]}, LAST),
    "tool_calls": ({"messages": [ASK, turn("assistant", "", tool_calls=[CALL])]}, LAST),
    "tool result": ({"messages": [ASK, REPLY, turn("tool", "VALUE"), REPLY]}, LAST),
    "tools": ({"messages": [ASK, REPLY], "tools": [TOOL]}, {}),
    "tools as JSON": ({"messages": [ASK, REPLY], "tools": json.dumps([TOOL])}, {}),
    "no tools as JSON": ({"messages": [ASK, turn("assistant", "VALUE")], "tools": "[]"}, {}),
    "system": ({"messages": [turn("system", "VALUE"), ASK, REPLY]}, {}),
    "developer": ({"messages": [turn("developer", "VALUE"), ASK, REPLY]}, {}),
    "system column": ({"messages": [ASK, REPLY], "system": "VALUE"}, {}),
    "weight 0": ({"messages": [ASK, turn("assistant", "VALUE", weight=0), ASK, REPLY]}, {}),
    "weight 1": ({"messages": [ASK, turn("assistant", "VALUE", weight=1), ASK, REPLY]}, {}),
    "name": ({"messages": [{**ASK, "name": "VALUE"}, REPLY]}, {}),
    "column": ({"messages": [ASK, REPLY], "id": "VALUE"}, {}),
    "unknown role": ({"messages": [turn("critic", "VALUE"), ASK, REPLY]}, {}),
    "gpt": ({"messages": [turn("human", "ask"), turn("GPT", "VALUE")]}, {}),
}
# in the order of TEMPLATES; l: learnt, r: read, n: named, x: refused
OUTCOMES = {
    "answer": "l l l l l l l l",
    "thought": "l l l l x l l l",
    "earlier thought": "r r r n n r r r",
    "reasoning": "x x x l x x x x",
    "tool_calls": "x x l l x l x x",
    "tool result": "r r r r r r r x",
    "tools": "x x r r x r x x",
    "tools as JSON": "x x r r x r x x",
    "no tools as JSON": "l l l l l l l l",
    "system": "r r r r r r x x",
    "developer": "r r r r r r x x",
    "system column": "r r r r r r x x",
    "weight 0": "r r r r r r r r",
    "weight 1": "l l l l l l l l",
    "name": "n n n n n n n n",
    "column": "n n n n n n n n",
    "unknown role": "x x x x x x x x",
    "gpt": "l l l l l l l l",
}


def text_of(batch: Any, kind: str) -> tuple[str, str]:
    """Return all text of the first row, and what of it is learnt."""
    if kind == "pretraining":
        batch = batch.pretraining
    batch = batch.candidate0 if kind == "pairs" else batch
    ids, counts = batch.input_ids[0], batch.attention_mask[0]
    learnt = getattr(batch, "response_mask", counts & False)[0] if kind != "prompts" else counts & 0
    return TOKENIZER.decode(ids[counts]), TOKENIZER.decode(ids[learnt.bool()])


def outcome(data: Any, kind: str, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    try:
        data.setup("fit")
    except BadDataError:
        return "x"
    text, learnt = text_of(next(iter(data.train_dataloader())), kind)
    if "VALUE" in text:
        return "l" if "VALUE" in learnt else "r"
    return "n" if "neither the model nor the task reads" in caplog.text else "-"


@pytest.mark.parametrize("field", FIELDS)
def test_what_becomes_of_a_field_in_each_template(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, options = FIELDS[field]
    found = [
        outcome(supervised([row], chat_template=template, **options), "texts", caplog)
        for template in TEMPLATES.values()
    ]
    assert found == OUTCOMES[field].split()


def supervised(rows: list[dict[str, Any]], **options: Any) -> SupervisedDataModule:
    options = {"tokenizer": TOKENIZER, "batch_size": 1, "shuffle": False, **options}
    return SupervisedDataModule(Rows(rows), **options)


def module(kind: str, turns: list[dict[str, Any]], columns: dict[str, Any], template: str) -> Any:
    """Make data of one row, whose prompt or text are turns."""
    options = {"tokenizer": TOKENIZER, "batch_size": 1, "chat_template": template}
    if kind == "texts":
        return SupervisedDataModule(Rows([{"messages": [*turns, REPLY], **columns}]), **options)
    if kind == "prompts":
        return PromptDataModule(Rows([{"prompt": turns, **columns}]), **options)
    if kind == "pretraining":
        texts = Rows([{"messages": [*turns, REPLY], **columns}])
        return PromptDataModule(Rows([{"prompt": "a"}]), pretraining=texts, **options)
    if kind == "steps":
        answer = {"completions": ["a"], "labels": [1]}
        return StepwiseDataModule(Rows([{"prompt": turns, **answer, **columns}]), **options)
    answers = {"chosen": "reply", "rejected": "other"}
    return PreferenceDataModule(Rows([{"prompt": turns, **answers, **columns}]), **options)


SAID = [ASK, {**REPLY, "reasoning_content": "VALUE"}, ASK]
KINDS = ("texts", "prompts", "pairs", "steps", "pretraining")


@pytest.mark.parametrize(
    ("turns", "columns", "template", "outcomes"),
    [
        ([ASK], {"tools": [TOOL]}, CHATML, "x x x x x"),
        ([ASK], {"tools": [TOOL]}, QWEN3, "r r r r l"),
        ([ASK], {"system": "VALUE"}, CHATML, "r r r r l"),
        ([ASK], {"system": "VALUE"}, MISTRAL, "x x x x x"),
        ([turn("system", "VALUE"), ASK], {}, MISTRAL, "x x x x x"),
        ([turn("critic", "VALUE"), ASK], {}, CHATML, "x x x x x"),
        ([turn("human", "VALUE")], {}, CHATML, "r r r r l"),
        # an earlier thought is missed where it is to be learnt
        (SAID, {}, CHATML, "x n n n x"),
        ([ASK, {**REPLY, "tool_calls": [CALL]}, ASK], {}, CHATML, "x x x x x"),
        ([{**ASK, "weight": 0}], {}, CHATML, "n n n n n"),
        # rewards get all columns, and metrics of pairs tell sources apart
        ([ASK], {"id": "VALUE"}, CHATML, "n - n n n"),
        ([ASK], {"source": "VALUE"}, CHATML, "n - - n n"),
        ([ASK], {"image": "VALUE.png"}, CHATML, "x - x x x"),
        ([ASK], {"chat_template_kwargs": {"enable_thinkin": False}}, CHATML, "n n n n n"),
    ],
)
def test_what_becomes_of_a_field_in_each_kind_of_row(
    turns: list[dict[str, Any]],
    columns: dict[str, Any],
    template: str,
    outcomes: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [outcome(module(kind, turns, columns, template), kind, caplog) for kind in KINDS]
    assert found == outcomes.split()


def refusal(data: Any) -> str:
    with pytest.raises(BadDataError) as error:
        data.setup("fit")
    return str(error.value)


def test_values_are_named_with_their_rows_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    row = {"messages": [{**ASK, "name": "me"}, REPLY], "id": 1}
    supervised([row, {"messages": [ASK, REPLY], "id": 2}]).setup("fit")
    named = "neither the model nor the task reads"
    assert f"{named} `name` of turns of the user of 1 row: give a `chat_template`" in caplog.text
    assert f"{named} column `id` of 2 rows: rename the column" in caplog.text


def test_options_that_the_template_lacks_are_named_for_each_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = [{"chat_template_kwargs": {name: True}} for name in ("thinkin", "toolz")]
    supervised([{"messages": [ASK, REPLY], **each} for each in options]).setup("fit")
    assert all(f"`chat_template_kwargs.{name}`" in caplog.text for name in ("thinkin", "toolz"))


@pytest.mark.parametrize("template", [R1, QWEN3])
def test_no_message_advises_the_setting_that_loses_thoughts(template: str) -> None:
    chat = [ASK, turn("assistant", THOUGHT), ASK, turn("assistant", THOUGHT)]
    told = refusal(supervised([{"messages": chat}], chat_template=template))
    assert "that keeps" in told
    assert "loss_on" not in told


def test_a_pair_whose_candidates_differ_in_what_the_template_cuts() -> None:
    pair = {"prompt": [ASK], **{c: [turn("assistant", f"<think>{c}</think>4")] for c in "ab"}}
    data = PreferenceDataModule(
        Rows([pair]), tokenizer=TOKENIZER, chat_template=R1, chosen_column="a", rejected_column="b"
    )
    assert "'a' and 'b' differ only in what the chat template leaves out" in refusal(data)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("mark", ["weight", "train", "trainable", "loss_mask", "loss"])
def test_turns_that_are_marked_are_not_learnt(template: str, mark: str) -> None:
    marks = [1, 0, True, False]
    chat = [
        each
        for number, value in enumerate(marks)
        for each in (ASK, turn("assistant", f"a{number}", **{mark: value}))
    ]
    data = supervised([{"messages": chat}], chat_template=template)
    data.setup("fit")
    learnt = text_of(next(iter(data.train_dataloader())), "texts")[1]
    assert learnt.replace("\n", "") == "a0<|im_end|>a2<|im_end|>"
    # of a completion of several turns
    data = supervised([{"prompt": [ASK], "completion": chat[1:]}], chat_template=template)
    data.setup("fit")
    learnt = text_of(next(iter(data.train_dataloader())), "texts")[1]
    assert learnt.replace("\n", "") == "a0<|im_end|>a2<|im_end|>"


@pytest.mark.parametrize(
    ("weights", "learnt"),
    [
        ([0, 1], ["a1<|im_end|>", "<|endoftext|>"]),
        ([1, 0], ["a0<|im_end|>"]),
        ([1, 0, 1], ["a0<|im_end|>", "a2<|im_end|>", "<|endoftext|>"]),
    ],
)
@pytest.mark.parametrize("between", [[ASK], []])
def test_a_mark_behind_the_last_answer_is_part_of_it(
    weights: list[int], learnt: list[str], between: list[Any]
) -> None:
    """As TRL's template for Phi-3, which ends a chat with a token that is marked, too."""
    template = MARKED + (
        "{% if not add_generation_prompt and messages[-1].role == 'assistant' %}"
        "{% generation %}<|endoftext|>{% endgeneration %}{% endif %}"
    )
    chat = [ASK]
    for number, weight in enumerate(weights):
        chat += [turn("assistant", f"a{number}", weight=weight), *between]
    chat = chat[:-1] if between else chat
    data = supervised([{"messages": chat}], chat_template=template)
    data.setup("fit")
    assert text_of(next(iter(data.train_dataloader())), "texts")[1] == "".join(learnt)


@pytest.mark.parametrize(
    ("marks", "options", "told"),
    [
        ({"weight": 0.5}, {}, "turn 2 has weight 0.5"),
        ({"loss": "no"}, {}, "turn 2 has loss 'no'"),
        ({"weight": 1, "train": False}, {}, "weight 1, train False"),
        ({"weight": 0}, {}, "every answer is marked"),
        ({"weight": 0}, LAST, "every answer is marked"),
        ({"weight": 0}, {"loss_on": "all"}, "loss_on is all"),
    ],
)
def test_marks_that_cannot_be_followed_are_refused(
    marks: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    assert told in refusal(supervised([{"messages": [ASK, {**REPLY, **marks}]}], **options))


def test_a_row_has_one_system_turn() -> None:
    two = {"messages": [turn("system", "one"), ASK, REPLY], "system": "two"}
    assert "'two' | 'one'" in refusal(supervised([two]))
    data = supervised([two | {"system": "one "}], system_prompt="three")
    data.setup("fit")
    assert text_of(next(iter(data.train_dataloader())), "texts")[0].count("system\n") == 1
    own = supervised([{"messages": [ASK, REPLY], "system": "two"}], system_prompt="three")
    own.setup("fit")
    text = text_of(next(iter(own.train_dataloader())), "texts")[0]
    assert "system\ntwo<|im_end|>" in text
    assert "three" not in text


def test_calls_as_turns_of_their_own_are_calls() -> None:
    chat = [
        {"from": "human", "value": "ask"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
        {"from": "observation", "value": "result"},
        {"from": "gpt", "value": "done"},
    ]
    data = supervised([{"conversations": chat, "tools": json.dumps([TOOL])}], chat_template=QWEN25)
    data.setup("fit")
    text, learnt = text_of(next(iter(data.train_dataloader())), "texts")
    assert "<|im_start|>tool\nresult<|im_end|>" in text
    assert learnt == '<tool_call>f{"x": 1}</tool_call><|im_end|>\ndone<|im_end|>\n'


def test_a_call_in_a_part_that_the_template_passes_over() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "VALUE"}}
    said = turn("assistant", [{"type": "text", "text": "reply"}, use])
    template = (
        "{% for m in messages %}" + ROLE + "{% for p in m.content if p.type == 'text' %}"
        "{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}" + OPEN
    )
    told = refusal(supervised([{"messages": [ASK, said, ASK, REPLY]}], chat_template=template))
    assert "`input` of parts of type tool_use in turns of the assistant" in told


@pytest.mark.parametrize(
    ("kind", "row", "lost"),
    [
        # as of preference data: the same turns again, of which nothing is read
        (
            "texts",
            {"messages": [ASK, REPLY], "prompt": "ask", "rejected": [ASK, REPLY]},
            "rejected",
        ),
        ("pairs", {"prompt": "ask", "messages": [ASK, REPLY]}, "messages"),
        # the policy finds its own answer
        ("prompts", {"chosen": [ASK, REPLY], "rejected": [ASK, turn("assistant", "no")]}, ""),
        ("prompts", {"messages": [ASK, {**REPLY, "content": THOUGHT}]}, ""),
        ("prompts", {"q": "ask", "system": "s"}, ""),
        ("texts", {"messages": [ASK, REPLY], "system": "s", "tools": []}, ""),
    ],
)
def test_columns_beside_those_that_are_read(
    kind: str, row: dict[str, Any], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "chat_template": R1}
    data: Any = SupervisedDataModule(Rows([row]), **options)
    if kind == "pairs":
        answers = {"chosen": [ASK, REPLY], "rejected": [ASK, turn("assistant", "no")]}
        data = PreferenceDataModule(Rows([row | answers]), **options)
    elif kind == "prompts":
        template = "{{ q }}" if "q" in row else None
        data = PromptDataModule(Rows([row]), prompt_template=template, as_chat=True, **options)
    data.setup("fit")
    told = "neither the model nor the task reads" + (f" column `{lost}` of 1 row" if lost else "")
    assert (told in caplog.text) is bool(lost)


@pytest.mark.parametrize("cell", [PICTURE, [PICTURE], {"bytes": b"png", "path": None}])
def test_a_picture_in_a_column_of_another_name_is_refused(cell: object) -> None:
    turns = [turn("user", "q"), turn("assistant", "a")]
    row = {"messages": turns, "photo": cell}
    data = SupervisedDataModule([row], tokenizer=TOKENIZER, batch_size=1)
    assert "does not read column `photo`" in refusal(data)


def each_turn(content: str = "{{ m.content }}", more: str = "") -> str:
    """Return a template that writes something for each turn."""
    said = f"{{% for m in messages %}}{ROLE}{content}{more}<|im_end|>\n{{% endfor %}}"
    return said + OPEN


SECOND = {"type": "function", "function": {"name": "second", "arguments": {"y": "VALUE"}}}
TWO_CALLS = [ASK, turn("assistant", "", tool_calls=[CALL, SECOND])]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
DESCRIBED = {"name": "f", "description": "VALUE", "parameters": SCHEMA}
TWO_TOOLS = [TOOL, {"type": "function", "function": DESCRIBED}]
FIRST_CALL = each_turn(more="{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}")
NAMES = each_turn(more="{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}")
FIRST_TOOL = "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + CHATML
TOOL_TYPES = (
    "{% for t in tools or [] %}{{ t.name }} {% for k, v in "
    "t.parameters.properties.items() %}{{ k }} {{ v.type }} {% endfor %}{% endfor %}"
) + CHATML
TOOL_NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + CHATML


@pytest.mark.parametrize(
    ("template", "row", "options", "refused", "told"),
    [
        (FIRST_CALL, {"messages": TWO_CALLS}, LAST, True, ["tool_calls.name", "calls.arguments"]),
        (NAMES, {"messages": TWO_CALLS}, LAST, True, ["tool_calls.arguments"]),
        # in a prompt, what is read of a call is not learnt
        (NAMES, {"messages": [*TWO_CALLS, ASK, REPLY]}, LAST, False, ["tool_calls.arguments"]),
        (FIRST_TOOL, {"messages": [ASK, REPLY], "tools": TWO_TOOLS}, {}, False, ["tools.name"]),
        (
            TOOL_NAMES,
            {"messages": [ASK, REPLY], "tools": json.dumps(TWO_TOOLS)},
            {},
            False,
            ["tools.description", "tools.parameters"],
        ),
        *[
            (TOOL_TYPES, {"messages": [ASK, REPLY], "tools": [tool]}, {}, False, ["tools.param"])
            for more in ({"required": ["x"]}, {"additionalProperties": False}, {"minProperties": 1})
            for tool in [{"name": "f", "parameters": {**SCHEMA, **more}}]
        ],
        # turns as text, as a .csv has them
        (
            CHATML,
            {"messages": json.dumps([ASK, {**REPLY, "reasoning_content": "VALUE"}])},
            {},
            True,
            ["reasoning_content"],
        ),
    ],
)
def test_what_is_lost_of_calls_and_tools_is_named_by_its_field(
    template: str,
    row: dict[str, Any],
    options: dict[str, Any],
    refused: bool,
    told: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = supervised([row], chat_template=template, **options)
    if refused:
        text = refusal(data)
    else:
        data.setup("fit")
        text = caplog.text
    assert all(name in text for name in told)


@pytest.mark.parametrize(
    "content",
    [
        "m.content[:5]",
        "m.content | truncate(12)",
        "m.content | striptags",
        "m.content.splitlines()[0]",
        "m.content.split()[0]",
        "m.content.replace('SECRET', '')",
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_contents_that_a_template_shortens(content: str, role: str) -> None:
    chat = [turn("system", "sys"), turn("user", "ask"), turn("assistant", "reply")]
    number = ["system", "user", "assistant"].index(role)
    chat[number]["content"] = "some <b>SECRET</b>\nlines of text"
    template = each_turn(f"{{{{ {content} if m.role == '{role}' else m.content }}}}")
    told = refusal(supervised([{"messages": chat}], chat_template=template))
    assert f"the exact text of `content` of turns of the {role}" in told


@pytest.mark.parametrize(
    "content",
    ["{{ m.content | trim }}", "{{ m.content | tojson }}", "{{ {'said': m.content} }}"],
)
def test_contents_that_are_written_in_another_form_are_whole(content: str) -> None:
    chat = [turn("user", " a 'quote'\n"), turn("assistant", "\"é\" and 'more'\n")]
    supervised([{"messages": chat}], chat_template=each_turn(content), **LAST).setup("fit")


@pytest.mark.parametrize("content", ["m.content | upper", "m.content.lower().split() | join(' ')"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_contents_may_change_in_case_and_white_space(content: str, role: str) -> None:
    chat = [turn("user", "An ask\nin lines"), turn("assistant", "Some Reply\nin lines")]
    template = each_turn(f"{{{{ {content} if m.role == '{role}' else m.content }}}}")
    supervised([{"messages": chat}], chat_template=template).setup("fit")
    cut = template.replace("m.content ", "m.content[:9] ").replace("m.content.l", "m.content[:9].l")
    assert "the exact text" in refusal(supervised([{"messages": chat}], chat_template=cut))


def test_columns_that_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "a question of some length", "completion": "reply"}
    cut = each_turn("{{ m.content[:5] }}")
    supervised([row], chat_template=cut, as_chat=True).setup("fit")
    assert "the exact text of column `prompt`" in caplog.text
    row = {"prompt": "ask", "completion": "an answer that is long"}
    told = refusal(supervised([row], chat_template=cut, as_chat=True))
    assert "the exact text of column `completion`" in told


# what they leave out depends on other turns, or on values
FICKLE = {
    "last result": "{% for m in messages %}{% if m.role != 'tool' or loop.last or "
    "messages[loop.index0 + 1].role != 'tool' %}"
    + ROLE
    + "{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}"
    "{% endfor %}" + OPEN,
    "one system turn": "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    + ROLE
    + "{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + OPEN,
    "thoughts of long answers": each_turn(
        more="{% if m.content | length > 4 %}{{ m.reasoning_content or '' }}{% endif %}" + CALLS
    ),
    "some answers": "{% for m in messages %}{% if m.content != 'skip' %}"
    + ROLE
    + "{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + OPEN,
    "first words": each_turn("{{ m.content[:6] }}", CALLS),
    "first call": FIRST_CALL,
    "names": NAMES,
}


def fickle_row(dice: random.Random) -> dict[str, Any]:
    """Return a chat in which turns repeat, and values differ in length and in what they are."""
    chat = [turn("system", f"s{n}") for n in range(dice.choice([0, 0, 1, 2]))]
    for _ in range(dice.randint(1, 2)):
        chat.append(turn("user", f"q{dice.randint(0, 99)}"))
        if dice.random() < 0.4:
            chat.append(turn("assistant", "c", tool_calls=dice.choice([[CALL], [CALL, SECOND]])))
            results = range(dice.randint(1, 3))
            chat += [turn("tool", f"r{dice.randint(0, 99)}") for _ in results]
        thought = {"reasoning_content": f"t{dice.randint(0, 99)}"} if dice.random() < 0.5 else {}
        chat.append(turn("assistant", dice.choice(["no", "skip", "long one", "short"]), **thought))
    return {"messages": chat}


def usable(rows: list[dict[str, Any]], **options: Any) -> list[int]:
    """Return the numbers of the rows that can be used."""
    data = supervised(rows, max_bad_fraction=1.0, loss_on="completion", **options)
    try:
        data.setup("fit")
    except BadDataError:  # none
        return []
    return [int(batch.places[0].rpartition(":")[2]) - 1 for batch in data.train_dataloader()]


@pytest.mark.parametrize("name", FICKLE)
def test_no_row_decides_what_becomes_of_another(name: str) -> None:
    dice = random.Random(0)
    rows = [fickle_row(dice) for _ in range(80)]
    alone = [bool(usable([row], chat_template=FICKLE[name])) for row in rows]
    assert any(alone)
    assert not all(alone)
    for _ in range(2):
        order = dice.sample(range(len(rows)), len(rows))
        together = usable([rows[number] for number in order], chat_template=FICKLE[name])
        assert together == [place for place, number in enumerate(order) if alone[number]]


def some_row(dice: random.Random) -> dict[str, Any]:
    """Return a chat with some of the fields, in some turns."""
    keys = [{"reasoning_content": "r"}, {"tool_calls": [CALL]}, {"name": "n"}, {"weight": 1}, {}]
    contents = ["said", THOUGHT, "<think>\n</think>said"]
    chat = [turn("system", "s")] if dice.random() < 0.3 else []
    for _ in range(dice.randint(1, 3)):
        words = turn("user", f"ask {dice.random()}", **dice.choice(keys[2:]))
        chat += [words, turn("assistant", dice.choice(contents), **dice.choice(keys))]
    columns = [{"tools": [TOOL]}, {"system": "s"}, {"id": 1}, {}, {}]
    return {"messages": chat, **dice.choice(columns)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_of_one_structure_fare_as_each_of_them_alone(name: str) -> None:
    dice = random.Random(0)
    rows = [some_row(dice) for _ in range(150)]
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "loss_on": "completion"}
    alone = []
    for row in rows:
        try:
            supervised([row], **options).setup("fit")
            alone.append(True)
        except BadDataError:
            alone.append(False)
    together = supervised(rows, max_bad_fraction=1.0, **options)
    together.setup("fit")
    good = [int(batch.places[0].rpartition(":")[2]) - 1 for batch in together.train_dataloader()]
    assert good == [number for number, usable in enumerate(alone) if usable]
