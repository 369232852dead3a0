"""Rows laid out as public data sets have them: what is learnt of each, as text.

The rows are made up; the columns are those that the cards of the data sets describe.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lrlhf.datamodules import BadDataError, PreferenceDataModule, SupervisedDataModule
from tests.datamodules.conftest import TOKENIZER
from tests.datamodules.test_same_rows import TEXTS_ONLY, read

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Looks it up.", "parameters": CITY}
SHOWN = json.dumps(WEATHER) + "\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

SUPERVISED: list[Any] = [
    pytest.param(
        {
            "system": "Be brief.",
            "tools": json.dumps([WEATHER]),
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
        },
        {},
        SHOWN + "<system>Be brief.</>\n<user>hi</>\n<assistant>yo</>\n",
        "yo</>\n",
        id="ShareGPT with system and tools",
    ),
    pytest.param(
        {
            "id": "1",
            "tools": json.dumps([WEATHER]),
            "conversations": [
                {"from": "system", "value": "Call functions.", "weight": None},
                {"from": "human", "value": "weather in Oslo?"},
                {"from": "gpt", "value": CALL},
                {"from": "tool", "value": '<tool_response>\n{"degrees": 3}\n</tool_response>'},
                {"from": "gpt", "value": "3 degrees."},
            ],
        },
        {},
        SHOWN + f"<system>Call functions.</>\n<user>weather in Oslo?</>\n<assistant>{CALL}</>\n"
        '<tool><tool_response>\n{"degrees": 3}\n</tool_response></>\n<assistant>3 degrees.</>\n',
        f"{CALL}</>\n3 degrees.</>\n",
        id="Hermes tool calls",
    ),
    pytest.param(
        {
            "problem": "2+2?",
            "messages": [
                {"role": "user", "content": "2+2?", "info": {"source": "x", "id": None}},
                {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\n4", "info": None},
            ],
        },
        {},
        "<user>2+2?</>\n<assistant><think>\n2 and 2\n</think>\n\n4</>\n",
        "<think>\n2 and 2\n</think>\n\n4</>\n",
        id="distillation of R1",
    ),
    pytest.param(
        {
            "id": 0,
            "query": "weather in Oslo?",
            "tools": json.dumps([WEATHER]),
            "answers": '[{"name": "weather", "arguments": {"city": "Oslo"}}]',
        },
        {"prompt_column": "query", "completion_column": "answers", "as_chat": True},
        SHOWN + "<user>weather in Oslo?</>\n"
        '<assistant>[{"name": "weather", "arguments": {"city": "Oslo"}}]</>\n',
        '[{"name": "weather", "arguments": {"city": "Oslo"}}]</>\n',
        id="xLAM",
    ),
    pytest.param(
        {
            "tools": json.dumps([WEATHER]),
            "conversations": [
                {"from": "human", "value": "weather in Oslo?"},
                {
                    "from": "function_call",
                    "value": '{"name": "weather", "arguments": {"city": "Oslo"}}',
                },
                {"from": "observation", "value": '{"degrees": 3}'},
                {"from": "gpt", "value": "3 degrees."},
            ],
        },
        {},
        SHOWN + '<user>weather in Oslo?</>\n<assistant>[weather {"city": "Oslo"}]</>\n'
        '<tool>{"degrees": 3}</>\n<assistant>3 degrees.</>\n',
        '[weather {"city": "Oslo"}]</>\n3 degrees.</>\n',
        id="APIGen",
    ),
    pytest.param(
        {
            "messages": [
                {"role": "user", "content": "weather in Oslo?"},
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                },
            ],
            "tools": [json.dumps({"type": "function", "function": WEATHER})],
        },
        {},
        json.dumps({"type": "function", "function": WEATHER}) + "\n"
        '<user>weather in Oslo?</>\n<assistant>[weather {"city": "Oslo"}]</>\n',
        '[weather {"city": "Oslo"}]</>\n',
        id="OpenAI's older calls, tools as texts",
    ),
    pytest.param(
        {"messages": {"role": ["user", "assistant"], "content": ["hi", "yo"]}},
        {},
        "<user>hi</>\n<assistant>yo</>\n",
        "yo</>\n",
        id="structs of lists, as old versions of datasets keep lists of structs",
    ),
]
REFUSED: list[Any] = [
    pytest.param(
        {"source": "s", "conversation": [{"input": "hi", "output": "yo"}]},
        {},
        r"no column messages.*\(columns: conversation, source\)",
        id="Capybara",
    ),
    pytest.param(
        {"source": "s", "conversation": [{"input": "hi", "output": "yo"}]},
        {"messages_column": "conversation"},
        r"a message of column 'conversation' has no role: \{'input'",
        id="Capybara, named",
    ),
    pytest.param(
        {"system": "SYSTEM: You have functions.", "chat": "USER: hi\n\n\nASSISTANT: yo"},
        {},
        r"no column messages.*\(columns: chat, system\)[\s\S]*`text_column`",
        id="Glaive tool calls",
    ),
    pytest.param(
        {"instruction": "Say.", "inputs": "?", "image_base64_str": ["aGk="], "outputs": "yo"},
        {},
        r"\(columns: image_base64_str, inputs, instruction, outputs\)[\s\S]*`completion_column`",
        id="M3IT",
    ),
]


@pytest.mark.parametrize(("row", "options", "whole", "said"), SUPERVISED)
def test_what_a_layout_means_is_learnt(
    row: dict[str, Any], options: dict[str, Any], whole: str, said: str
) -> None:
    data = SupervisedDataModule(
        [row], tokenizer=TOKENIZER, chat_template=TEXTS_ONLY, batch_size=1, **options
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert read(batch.input_ids[0]) == whole
    assert read(batch.input_ids[0][batch.response_mask[0]]) == said


@pytest.mark.parametrize(("row", "options", "message"), REFUSED)
def test_a_layout_that_is_not_known_is_named_with_what_to_do(
    row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    data = SupervisedDataModule(
        [row], tokenizer=TOKENIZER, chat_template=TEXTS_ONLY, batch_size=1, **options
    )
    with pytest.raises(BadDataError, match=message):
        data.setup("fit")


def test_pairs_of_ultrafeedback_have_their_prompt_once() -> None:
    prompt = {"role": "user", "content": "2+2?"}
    row = {
        "prompt": "2+2?",
        "prompt_id": "x",
        "chosen": [prompt, {"role": "assistant", "content": "4"}],
        "rejected": [prompt, {"role": "assistant", "content": "5"}],
        "messages": [prompt, {"role": "assistant", "content": "4"}],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    }
    data = PreferenceDataModule(
        [row],
        tokenizer=TOKENIZER,
        chat_template=TEXTS_ONLY,
        batch_size=1,
        score_columns=["score_chosen", "score_rejected"],
    )
    data.setup("fit")
    (batch,) = data.train_dataloader()
    texts = [read(side.input_ids[0]) for side in (batch.candidate0, batch.candidate1)]
    assert texts == [f"<user>2+2?</>\n<assistant>{answer}</>\n" for answer in "45"]
    assert batch.margin is not None
    assert batch.margin.tolist() == [5.5]


def test_ranks_of_nectar_are_no_pairs_yet() -> None:
    answers = [{"answer": f"a{rank}", "model": "m", "rank": rank} for rank in (1.0, 2.0)]
    row = {"prompt": "\n\nHuman: hi \n\nAssistant: ", "answers": answers, "turns": 1}
    data = PreferenceDataModule([row], tokenizer=TOKENIZER, batch_size=1)
    with pytest.raises(
        BadDataError, match=r"no column 'chosen'.*\(columns: answers, prompt, turns"
    ):
        data.setup("fit")


def test_the_picture_of_llava_stands_where_its_mark_stands(tmp_path: Path, vlm_folder: str) -> None:
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    row = {
        "id": "1",
        "image": str(tmp_path / "a.png"),
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A square."},
        ],
    }
    data = SupervisedDataModule([row], tokenizer=vlm_folder, batch_size=1)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    whole = data.tokenizer.decode(batch.input_ids[0])
    said = data.tokenizer.decode(batch.input_ids[0][batch.response_mask[0]])
    assert said.startswith("A square.")
    assert "<image>" not in whole
    assert "What is it?" in whole
    assert batch.media is not None
