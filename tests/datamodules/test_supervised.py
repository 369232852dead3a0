"""`SupervisedDataModule`: what of each row the loss is on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lrlhf.datamodules import BadDataError, SupervisedDataModule, supervised
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import tokenize_spans
from lrlhf.datamodules.rows.collate import moved_mask
from lrlhf.types import SupervisedBatch
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer
from tests.datamodules.conftest import TOKENIZER, Rows, vlm

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else "
    "message['content'][:1] }}",
)
"""Shows answers whole only while they are the last, as templates do with what a model thought."""
LEADING = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TURNS = [
    turn("system", "be kind"),
    turn("user", "hi"),
    turn("assistant", "héllo"),
    turn("user", "more"),
    turn("assistant", "bye"),
]
CHAT = {"messages": TURNS}


def load(*rows: Any, folder: Path | None = None, **options: Any) -> SupervisedDataModule:
    source = Rows(rows, folder=folder)
    data = SupervisedDataModule(
        source, **{"tokenizer": TOKENIZER, "batch_size": len(rows), "shuffle": False, **options}
    )
    data.setup("fit")
    return data


def batch_of(*rows: Any, **options: Any) -> SupervisedBatch:
    (batch,) = load(*rows, **options).train_dataloader()
    return batch


def read(batch: SupervisedBatch, row: int = 0, tokenizer: Any = TOKENIZER) -> tuple[str, str]:
    """What a row says, and what of it the loss is on."""
    whole, learnt = (
        str(tokenizer.decode(batch.input_ids[row, mask[row]]))
        for mask in (batch.attention_mask, batch.response_mask)
    )
    return whole, learnt


def refused(*rows: Any, **options: Any) -> str:
    with pytest.raises(BadDataError) as error:
        load(*rows, **options)
    return str(error.value)


# ---- what is learnt

MARKS = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ENDS_TURNS = byte_tokenizer(MARKS, "<|im_end|>")
NEXT_MARK = byte_tokenizer(["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"], "<|end|>")
CLOSES_EARLY = MARKED.replace(
    "{{ message['content'] }}<|im_end|>{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %} <|im_end|>",
)
BY_NEXT_MARK = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_END = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
NO_END_MARKED = NO_END.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)


@pytest.mark.parametrize(
    ("tokenizer", "template", "stops", "learnt"),
    [
        (ENDS_TURNS, CHAT_TEMPLATE, None, "a<|im_end|>\nb<|im_end|>\n"),
        (ENDS_TURNS, CLOSES_EARLY, None, "a <|im_end|>b <|im_end|>"),
        (TOKENIZER, NO_END, None, "a\n\nb\n\n<|endoftext|>"),
        # (a line break behind a block is the block's)
        (TOKENIZER, NO_END_MARKED, None, "ab\n<|endoftext|>"),
        # the mark of the next turn is learnt where generation stops at it, and where it does not
        # the assistant's words alone
        (NEXT_MARK, BY_NEXT_MARK, [1, 2], "a<|user|>b<|end|>"),
        (NEXT_MARK, BY_NEXT_MARK, None, "ab<|end|>"),
        # generation is to stop at what ends turns
        (TOKENIZER, CHAT_TEMPLATE, None, "a<|im_end|>\nb<|im_end|>\n"),
    ],
    ids=["whole", "closes early", "none", "none marked", "next mark", "no mark", "another"],
)
def test_where_generation_stops_is_learnt(
    tokenizer: Any,
    template: str,
    stops: list[int] | None,
    learnt: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"end_token_ids": stops}
    monkeypatch.setattr(supervised, "of_module", lambda _, name: own.get(name))
    turns = [turn("user", "1"), turn("assistant", "a"), turn("user", "2"), turn("assistant", "b")]
    options = {"tokenizer": tokenizer, "chat_template": template}
    assert read(batch_of({"messages": turns}, **options), tokenizer=tokenizer)[1] == learnt
    row = {"prompt": turns[:3], "completion": turns[3:]}
    assert read(batch_of(row, **options), tokenizer=tokenizer)[1] in (
        learnt[learnt.index("b") :],
        f"{learnt[learnt.index('b') :]}\n",
    )


def test_an_end_that_does_not_stop_generation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    data = load(CHAT)
    assert "answers end with '<|im_end|>', and generation stops at '<|endoftext|>'" in caplog.text
    assert data.learnt_ends == {TOKENIZER.convert_tokens_to_ids("<|im_end|>")}
    caplog.clear()
    load(CHAT, tokenizer=ENDS_TURNS, chat_template=CHAT_TEMPLATE)
    assert "generation" not in caplog.text


@pytest.mark.parametrize("marked", [True, False])
def test_chats_that_never_end_are_refused(marked: bool) -> None:
    tokenizer: Any = byte_tokenizer(["<|pad|>", "<|end|>"], "<|end|>")
    template = NO_END_MARKED.replace("\n\n", " END\n") if marked else NO_END
    if not marked:
        tokenizer.eos_token = None
    turns = [turn("user", "1"), turn("assistant", "a")]
    message = refused({"messages": turns}, tokenizer=tokenizer, chat_template=template)
    assert "no end of a turn" in message
    assert ("'<|end|>'" if marked else "there is no such token") in message


HEADED_BY_QUESTIONS = CHAT_TEMPLATE.replace(
    "{% if add_generation_prompt %}",
    "{% if add_generation_prompt and messages[-1].role == 'user' %}",
)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, HEADED_BY_QUESTIONS, MARKED])
def test_two_answers_in_a_row_learn_no_header(template: str) -> None:
    turns = [turn("user", "1"), turn("assistant", "a"), turn("assistant", "b")]
    end = "<|im_end|>" if template == MARKED else "<|im_end|>\n"
    chat, own = {"messages": turns}, {"chat_template": template}
    assert read(batch_of(chat, **own))[1] == f"a{end}b{end}"
    last = f"b{end}"
    assert read(batch_of(chat, **own, loss_on="completion"))[1] == last
    prefix = {"prompt": turns[:2], "completion": turns[2:]}
    assert read(batch_of(prefix, **own))[1] == last
    both = {"prompt": turns[:1], "completion": turns[1:]}
    assert read(batch_of(both, **own))[1] == f"a{end}{last}"
    mixed = {"prompt": turns[:1], "completion": [*turns[1:], turn("user", "2"), turns[2]]}
    header = "<|im_start|>{}\n"
    asked = f"{header.format('user')}2{end}{header.format('assistant')}"
    assert read(batch_of(mixed, **own))[1] == f"a{end}{last}{asked}{last}"


def test_plain_text_is_learnt_but_for_its_first_token() -> None:
    assert read(batch_of({"text": "abc"})) == ("abc<|endoftext|>", "bc<|endoftext|>")


def test_text_that_ends_already_gets_no_second_end() -> None:
    assert read(batch_of({"text": "ab<|endoftext|>"}))[0] == "ab<|endoftext|>"


def test_completions_of_plain_prompts() -> None:
    row = {"prompt": "1+1=", "completion": "2"}
    assert read(batch_of(row)) == ("1+1=2<|endoftext|>", "2<|endoftext|>")
    assert read(batch_of(row, loss_on="all"))[1] == "+1=2<|endoftext|>"
    renamed = {"question": "1+1=", "answer": "2"}
    options = {"prompt_column": "question", "completion_column": "answer"}
    assert read(batch_of(renamed, **options))[1] == "2<|endoftext|>"
    assert read(batch_of({"prompt": "", "completion": "abc"}))[1] == "bc<|endoftext|>"


def test_completions_as_chat() -> None:
    row = {"prompt": "1+1?", "completion": "2"}
    chat = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    for options in ({}, {"loss_on": "assistant"}, {"loss_on": "completion"}):
        assert read(batch_of(row, as_chat=True, **options)) == (chat, "2<|im_end|>\n")
    system = "<|im_start|>system\nadd<|im_end|>\n"
    told = batch_of(row, as_chat=True, system_prompt="add")
    assert read(told) == (system + chat, "2<|im_end|>\n")
    turns = {"prompt": [turn("user", "1+1?")], "completion": [turn("assistant", "2")]}
    assert read(batch_of(turns)) == (chat, "2<|im_end|>\n")


def test_a_completion_of_several_turns_counts_as_a_whole() -> None:
    row = {"prompt": TURNS[:2], "completion": TURNS[2:]}
    expected = "héllo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nbye"
    assert read(batch_of(row))[1] == expected + "<|im_end|>\n"
    # of the whole conversation the assistant's turns alone
    assert read(batch_of(row, loss_on="assistant"))[1] == "héllo<|im_end|>\nbye<|im_end|>\n"


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_turns_of_the_assistant(column: str) -> None:
    batch = batch_of({column: TURNS})
    assert read(batch)[1] == "héllo<|im_end|>\nbye<|im_end|>\n"
    # é is two tokens of one character
    assert int(batch.response_mask.sum()) == len("héllobye") + 1 + 2 * len("?\n")


def test_the_last_turn_alone() -> None:
    assert read(batch_of(CHAT, loss_on="completion"))[1] == "bye<|im_end|>\n"


def test_all_of_a_chat() -> None:
    whole, learnt = read(batch_of(CHAT, loss_on="all"))
    assert whole == f"<|im_start|>{learnt}"


def test_marks_of_the_template_say_what_the_assistant_writes() -> None:
    # unlike turns that are found by what they add, these end before the line break
    batch = batch_of(CHAT, chat_template=MARKED)
    assert read(batch)[1] == "héllo<|im_end|>bye<|im_end|>"
    encoded = TOKENIZER.apply_chat_template(
        TURNS, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    assert batch.input_ids[0].tolist() == encoded["input_ids"]
    assert batch.response_mask[0].long().tolist() == encoded["assistant_masks"]


def test_turns_of_tools_are_given() -> None:
    turns = [*TURNS[:3], turn("tool", "42"), turn("assistant", "so 42")]
    assert read(batch_of({"messages": turns}))[1] == "héllo<|im_end|>\nso 42<|im_end|>\n"


def test_kinds_of_rows_may_be_mixed() -> None:
    batch = batch_of(CHAT, {"prompt": "a", "completion": "b"}, {"text": "cd"})
    learnt = [read(batch, row)[1] for row in range(3)]
    assert learnt == ["héllo<|im_end|>\nbye<|im_end|>\n", "b<|endoftext|>", "d<|endoftext|>"]
    assert batch.places == ("rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3")
    assert not (batch.response_mask & ~batch.attention_mask).any()


def test_a_token_that_spans_prompt_and_turn_is_learnt() -> None:
    ids, mask = tokenize_spans(TOKENIZER, ["héllo"], [[(1, 2)]])[0]
    assert [bool(one) for one in mask] == [False, True, True, False, False, False]
    assert len(ids) == 6


# ---- splits


def test_rows_with_one_prompt_stay_in_one_split() -> None:
    rows = [
        {"messages": [turn("user", f"q{number // 4}"), turn("assistant", str(number))]}
        for number in range(40)
    ]
    data = load(*rows, val_fraction=0.3, batch_size=1)
    train, held = (
        {read(batch)[0].split("<|im_end|>")[0] for batch in loader}
        for loader in (data.train_dataloader(), data.val_dataloader())
    )
    assert train
    assert held
    assert not train & held


# ---- bad rows


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"story": "x"}, {}, "no column messages, prompt and completion, or text"),
        ({"completion": "x"}, {}, "no column 'prompt'"),
        ({"text": "x"}, {"loss_on": "completion"}, "column 'text' is a whole text"),
        ({"prompt": "a", "completion": "b"}, {"loss_on": "assistant"}, "as_chat: true"),
        ({"messages": TURNS[:2]}, {}, "no turn is the assistant's"),
        ({"messages": TURNS[:4]}, {"loss_on": "completion"}, "last turn is not the assistant's"),
        ({"messages": TURNS[2:]}, {}, "turn 1 has no turn of another role before it"),
        ({"messages": "hi"}, {}, "column 'messages' should be a list of messages"),
        ({"text": ""}, {}, "column 'text' is empty"),
        (CHAT, {"chat_template": FORGETFUL}, "turn 3 becomes another text where further turns"),
        (CHAT, {"chat_template": LEADING}, "turn 3 does not begin with the prompt that leads"),
        ({"text": "abcdef"}, {"max_tokens": 3}, "it has 7 tokens, max_tokens=3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_rows_say_what_is_wrong(row: Any, options: dict[str, Any], message: str) -> None:
    told = refused(row, **options)
    assert message in told
    assert "rows.jsonl:1" in told


def test_unclear_turns_say_what_to_do() -> None:
    told = refused(CHAT, chat_template=FORGETFUL)
    assert "{% generation %}" in told
    assert "`loss_on`" in told
    # where the last turn alone is learnt, all is clear
    learnt = read(batch_of(CHAT, chat_template=FORGETFUL, loss_on="completion"))[1]
    assert learnt == "bye<|im_end|>\n"


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(
        ValueError, match="loss_on: expected null or one of all, completion, assistant, got 'turns'"
    ):
        load(CHAT, loss_on="turns")


def test_a_text_of_one_token_has_nothing_to_learn() -> None:
    assert "there is no token to train on" in refused({"text": "<|endoftext|>"})


# ---- images


@pytest.fixture
def picture(tmp_path: Path) -> str:
    """Of two tokens."""
    Image.new("L", (56, 28), 100).save(tmp_path / "a.png")
    return "a.png"


def test_images_are_shown_and_not_learnt(picture: str, tmp_path: Path, vlm_folder: str) -> None:
    shown = [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]
    more = [{"type": "text", "text": "and"}, {"type": "image", "image": picture}]
    row = {
        "messages": [
            turn("user", shown),
            turn("assistant", "a cat"),
            turn("user", more),
            turn("assistant", "a dog"),
        ]
    }
    options = {"tokenizer": vlm_folder, "folder": tmp_path}
    batch = batch_of(row, **options)
    assert batch.media is not None
    assert batch.media[0] is not None
    assert batch.media[0].tokens == {"image": 4}
    tokenizer = vlm().tokenizer
    assert read(batch, tokenizer=tokenizer)[1] == "a cat<|im_end|>\na dog<|im_end|>\n"
    whole, learnt = read(batch_of(row, **options, loss_on="all"), tokenizer=tokenizer)
    assert learnt == whole.removeprefix("<|im_start|>").replace("<|image_pad|>", "")
    last = batch_of(row, **options, loss_on="completion")
    assert read(last, tokenizer=tokenizer)[1] == "a dog<|im_end|>\n"


def test_images_of_columns_and_text_rows_in_one_batch(
    picture: str, tmp_path: Path, vlm_folder: str
) -> None:
    asked = {"prompt": [turn("user", "what?")], "completion": "a cat", "image": picture}
    batch = batch_of(asked, {"text": "plain"}, tokenizer=vlm_folder, folder=tmp_path)
    assert batch.media is not None
    assert [one is not None for one in batch.media] == [True, False]
    assert read(batch, tokenizer=vlm().tokenizer)[1] == "a cat<|im_end|>\n"
    assert bool((batch.response_mask & (batch.input_ids == 0)).sum() == 0)


MARK, A, B, NEW = 9, 1, 2, 3


def moved(short: list[int], learnt: list[int], long: list[int]) -> list[int]:
    mask = moved_mask(
        np.array(short, np.int32), np.array(learnt, bool), np.array(long, np.int32), [MARK]
    )
    return np.nonzero(mask)[0].tolist()


def test_a_mask_is_found_again_behind_images() -> None:
    # the image became three tokens, then something new
    assert moved([A, MARK, B, A], [0, 0, 0, 1], [A, MARK, MARK, MARK, NEW, B, A]) == [6]
    # between two images
    long = [A, MARK, MARK, B, B, A, MARK, A]
    assert moved([A, MARK, B, B, A, MARK, A], [0, 0, 1, 1, 0, 0, 1], long) == [3, 4, 7]


@pytest.mark.parametrize(
    "long",
    [
        [A, MARK, B, MARK, B, MARK, A],  # which of the two B
        [A, MARK, MARK, B, MARK],  # the last A is missing
        [B, MARK, B, MARK, A],  # another beginning
    ],
)
def test_a_mask_whose_place_is_not_clear_is_refused(long: list[int]) -> None:
    with pytest.raises(BadRow, match="is not clear"):
        moved([A, MARK, B, MARK, A], [0, 0, 1, 0, 0], long)


def test_the_collated_batch_moves_and_selects() -> None:
    batch = batch_of({"text": "abc"}, {"text": "defg"})
    second = batch.select(torch.tensor([1]))
    assert read(second)[0] == "defg<|endoftext|>"
    assert second.places == ("rows.jsonl:2",)
    assert type(batch.to("cpu").rows).__name__ == "SequenceBatch"
