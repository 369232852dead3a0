import pytest

from lrlhf.environments import detect_format

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
