import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lrlhf.datamodules import BadDataError, PromptDataModule, Weighted
from lrlhf.datamodules.rows.collate import PromptRow, collate_prompts
from lrlhf.types import PromptBatch
from tests.conftest import build_tokenizer
from tests.datamodules.conftest import TOKENIZER, Rows, WriteRows, numbered_prompts


def load(train: Any, **options: Any) -> PromptDataModule:
    data = PromptDataModule(train, **{"batch_size": 1, "tokenizer": TOKENIZER, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def first(*rows: Any, **options: Any) -> PromptBatch:
    return next(iter(load(Rows(rows), **options).train_dataloader()))


def text_of(batch: PromptBatch, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> str:
    return str(tokenizer.decode(batch.input_ids[0][batch.attention_mask[0]]))


def numbers(batches: Iterable[PromptBatch]) -> list[int]:
    return [columns["number"] for batch in batches for columns in batch.columns]


def turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


HI, HELLO = turn("user", "hi"), turn("assistant", "hello")
KIND, OWN = turn("system", "kind"), (turn("system", "own"), HI)
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
OPEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
HH = {
    "chosen": "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: why?\n\nAssistant: Because.",
    "rejected": "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: why?\n\nAssistant: Because not.",
    "answer": 3,
}
HH_PROMPT = "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: why?\n\nAssistant:"
HH_TURNS = (HI, turn("assistant", "Hello."), turn("user", "why?"))
EXPRESSION = {"metadata": {"expression": "4 - 1"}, "question": "?"}


@pytest.mark.parametrize(
    ("row", "options", "prompt", "columns"),
    [
        (
            {"prompt": "2 + 2 =", "answer": "4", "extra": {"a": [1]}},
            {},
            "2 + 2 =",
            {"answer": "4", "extra": {"a": [1]}},
        ),
        ({"q": "why", "prompt": "no"}, {"prompt_column": "q"}, "why", {"prompt": "no"}),
        (
            EXPRESSION,
            {"prompt_template": "5 + 3 = 8\n{{ metadata.expression }} ="},
            "5 + 3 = 8\n4 - 1 =",
            EXPRESSION,
        ),
        ({"prompt": [HI]}, {}, (HI,), {}),
        ({"messages": [HI, HELLO]}, {}, (HI,), {"reference": "hello"}),
        ({"conversations": SHAREGPT}, {}, (HI,), {"reference": "hello"}),
        (HH, {}, HH_PROMPT, {"answer": 3, "reference": "Because."}),
        (HH, {"hh_as_chat": True}, HH_TURNS, {"answer": 3, "reference": "Because."}),
        ({"chosen": [HI, HELLO], "rejected": [HI, HI]}, {}, (HI,), {"reference": "hello"}),
        ({"prompt": "hi"}, {"as_chat": True, "system_prompt": "kind"}, (KIND, HI), {}),
        ({"prompt": [turn("system", "own"), HI]}, {"system_prompt": "kind"}, OWN, {}),
    ],
)
def test_the_prompt_and_the_columns_of_a_row(
    row: Any, options: dict[str, Any], prompt: Any, columns: Any
) -> None:
    batch = first(row, **options)
    assert batch.prompts == (prompt,)
    assert batch.columns == (columns,)
    if isinstance(prompt, str):
        assert text_of(batch) == prompt
    else:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in prompt]
        assert text_of(batch) == "".join(turns) + "<|im_start|>assistant\n"


def test_a_prompt_that_ends_with_the_assistant_is_continued() -> None:
    assert text_of(first({"prompt": [HI, turn("assistant", "Well,")]})) == OPEN + "Well,"


def test_a_template_of_the_data_cannot_reach_into_python() -> None:
    template = "{{ question.__class__.__mro__ }}"
    with pytest.raises(BadDataError, match=r"SecurityError: access to attribute '__class__'"):
        first({"question": "x"}, prompt_template=template)


def test_a_chat_template_can_be_a_file(write_rows: WriteRows) -> None:
    template = write_rows(["{{ messages[0].content }}!"], name="chat.jinja")
    assert text_of(first({"prompt": [HI]}, chat_template=template)) == "hi!"
    with pytest.raises(ValueError, match=r"chat_template 'chatml.jinja' is neither a file"):
        first({"prompt": "hi"}, chat_template="chatml.jinja")


def test_column_patterns_cut_columns_down_or_make_new_ones() -> None:
    row = {"prompt": "p", "answer": "6 * 12 is\n#### 72 "}
    patterns = {"answer": r"####\s*(.+)"}
    assert first(row, column_patterns=patterns).columns[0]["answer"] == "72"
    columns = first(row, column_patterns={"answer -> gold": r"\d+ \* \d+"}).columns[0]
    assert columns == {"gold": "6 * 12", "answer": row["answer"]}


def test_long_prompts_are_left_out_and_counted_never_cut(caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows([{"prompt": "12345"}, {"prompt": "123456"}])  # one token per byte
    data = load(rows, max_prompt_tokens=5, max_bad_fraction=0.5)
    assert [batch.prompts for batch in data.train_dataloader()] == [("12345",)]
    for said in ("1 of 2 rows", "too long", "rows.jsonl:2: it has 6 tokens"):
        assert said in caplog.text


def with_bos_and_eos(*, eos: bool) -> PreTrainedTokenizerFast:
    """A word tokenizer that puts <s> before every text and perhaps </s> after it."""
    vocabulary = {word: index for index, word in enumerate(["<s>", "</s>", "<pad>", "a", "b"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "<s>{% for m in messages %} {{ m.content }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("prompt", ["a b", "<s> a b", [turn("user", "a b")]])
def test_a_prompt_has_one_bos_and_no_eos(prompt: Any, eos: bool) -> None:
    assert first({"prompt": prompt}, tokenizer=with_bos_and_eos(eos=eos)).input_ids.tolist() == [
        [0, 3, 4]
    ]


def test_batches_are_padded_at_the_left() -> None:
    rows = [
        PromptRow(input_ids=np.array([7, 8], np.int32), prompt="a", columns={"n": 0}),
        PromptRow(input_ids=np.array([9], np.int32), prompt="b", columns={"n": 1}),
    ]
    batch = collate_prompts(rows, pad_token_id=7)  # a pad id that is also a real token
    assert batch.input_ids.tolist() == [[7, 8], [7, 9]]
    assert batch.attention_mask.tolist() == [[True, True], [False, True]]
    assert batch.input_ids.dtype == torch.long
    assert batch.prompts == ("a", "b")
    assert batch.columns == ({"n": 0}, {"n": 1})


def test_rows_with_equal_prompts_are_in_one_split() -> None:
    rows = [{"prompt": f"p{number % 10}", "number": number} for number in range(40)]
    data = load(Rows(rows), val_fraction=0.3)
    train = {batch.prompts[0] for _ in range(2) for batch in data.train_dataloader()}
    val = [batch.prompts[0] for batch in data.val_dataloader()]
    assert len(val) == 12  # 0.3 * 40, three prompts of four rows
    assert train.isdisjoint(val)
    assert len(train | set(val)) == 10


def test_validation_data_of_its_own_is_kept_whole_and_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    val = Rows(numbered_prompts(9)[4:])
    data = load(Rows(numbered_prompts(6)), val=val, val_batch_size=2)
    assert numbers(data.val_dataloader()) == [4, 5, 6, 7, 8]
    assert len(data.val_dataloader()) == 3
    assert "2 of 5 validation rows share a prompt" in caplog.text
    with pytest.raises(ValueError, match="val: validation takes every row once"):
        load(val, val=[Weighted(val, 1.0)])


@pytest.mark.parametrize(
    ("options", "expected"), [({}, False), ({"val_size": 1}, True), ({"val": "x.jsonl"}, True)]
)
def test_lightning_sees_a_validation_loader_where_there_is_data(
    options: dict[str, Any], expected: bool
) -> None:
    assert is_overridden("val_dataloader", PromptDataModule("x.jsonl", **options)) is expected


def test_deduplicate_keeps_the_first_of_equal_prompts() -> None:
    rows = Rows({"prompt": f"p{number % 3}", "number": number} for number in range(9))
    assert sorted(numbers(load(rows, deduplicate=True).train_dataloader())) == [0, 1, 2]
    assert len(load(rows).train_dataloader()) == 9


def test_a_mixture_gives_each_source_its_share_and_its_columns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small, large = Rows(numbered_prompts(4), "small"), Rows(numbered_prompts(20)[4:], "large")
    with caplog.at_level(logging.INFO, "lrlhf"):
        data = load([Weighted(small, 1.0, {"level": "easy"}), Weighted(large, 3.0)])
        data.train_dataloader()
    assert caplog.messages[-1] == (
        "an epoch is mixed from small (4 rows: 25.0% of it, 1.25 passes), "
        "large (16 rows: 75.0% of it, 0.94 passes)"
    )
    # 20 rows: 5 places for the four small ones, 15 for the sixteen large ones
    batches = list(data.train_dataloader())
    assert sum(batch.columns[0].get("level") == "easy" for batch in batches) == 5
    assert sum(number < 4 for number in numbers(batches)) == 5


def test_a_tokenizer_can_be_named_by_its_folder_and_there_must_be_one(model_folder: str) -> None:
    data = load(Rows([{"prompt": "hi"}]), tokenizer=model_folder)
    assert text_of(next(iter(data.train_dataloader())), data.tokenizer) == "hi"
    with pytest.raises(ValueError, match="the data module has no tokenizer"):
        load(Rows([{"prompt": "hi"}]), tokenizer=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_batch_size": 0}, "val_batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"val_size": 1, "val_fraction": 0.1}, "val_size"),
        ({"val_size": -1}, "val_size"),
        ({"column_patterns": {"answer": "("}}, "no regular expression"),
        ({"column_patterns": {"answer ->": "x"}}, "column -> new column"),
        ({"prompt_template": "{{ question"}, "prompt_template is no jinja2 template"),
        ({"pretraining": "x.jsonl", "pretraining_batch_size": 0}, "pretraining_batch_size=0"),
        ({"pretraining": "x.jsonl", "pretraining_max_tokens": 1}, "pretraining_max_tokens=1"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptDataModule("train.jsonl", **options)


def test_rows_are_tokenised_many_at_a_time() -> None:
    calls: list[int] = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: list[str], **options: Any) -> Any:
            calls.append(len(text))
            return super().__call__(text, **options)

    counting = build_tokenizer()
    counting.__class__ = Counting
    load(Rows({"prompt": str(number)} for number in range(3000)), tokenizer=counting)
    assert sum(calls) >= 3000
    assert len(calls) < 10
