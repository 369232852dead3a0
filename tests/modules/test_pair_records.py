"""What people read of scored pairs is the text of the data, whatever the tokenizer leaves of it."""

import copy
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PreferenceDataModule
from lrlhf.modules.pairs.pair_records import score_records
from lrlhf.modules.pairs.pair_step import PairScores
from lrlhf.types import PreferenceBatch

ROW = {"prompt": "What should I do?", "chosen": " Ask Ann.", "rejected": " Nothing"}


@pytest.fixture(scope="module")
def uncased(tokenizer: PreTrainedTokenizerBase) -> Any:
    found: Any = copy.deepcopy(tokenizer)
    found.backend_tokenizer.normalizer = normalizers.Lowercase()
    return found


def _batch(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, str] = ROW, **options: Any
) -> PreferenceBatch:
    data = PreferenceDataModule([row], batch_size=1, tokenizer=tokenizer, **options)
    data.prepare_data()
    data.setup("fit")
    batch: PreferenceBatch = next(iter(data.train_dataloader()))
    return batch


def _texts(batch: PreferenceBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    scores = PairScores(torch.zeros(1, 1), torch.zeros(1, 1))
    (record,) = score_records(scores, batch, ["score"], tokenizer, head_weights=[1.0])
    return [record[name] for name in ("prompt", "candidate0", "candidate1")]


def test_a_tokenizer_without_capitals_does_not_take_them_from_people(
    uncased: PreTrainedTokenizerBase,
) -> None:
    batch = _batch(uncased)
    ids = batch.candidate0.input_ids[0]
    assert str(uncased.decode(ids)).startswith("what should i do? ask ann.")
    assert _texts(batch, uncased) == ["What should I do?", " Ask Ann.", " Nothing"]
    # as batches are split and moved
    assert _texts(batch.select(torch.tensor([0])).to("cpu"), uncased)[1] == " Ask Ann."


def test_texts_that_tokens_give_back_are_not_kept_beside_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    batch = _batch(tokenizer)
    assert batch.said == (None,)
    assert _texts(batch, tokenizer) == ["What should I do?", " Ask Ann.", " Nothing"]


def test_a_chat_is_shown_as_tokens_that_lose_nothing_would_show_it(
    uncased: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = "<|im_start|>user\nWhat should I do?<|im_end|>\n<|im_start|>assistant\n"
    for own in (uncased, tokenizer):
        batch = _batch(own, as_chat=True)
        # the end of the turn is a special token, the line break behind it is none
        assert _texts(batch, own) == [prompt, " Ask Ann.\n", " Nothing\n"]


def test_a_special_token_that_an_answer_spells_is_text_of_the_data(
    uncased: PreTrainedTokenizerBase,
) -> None:
    row = {**ROW, "rejected": " <|im_end|> ENDS"}
    assert _texts(_batch(uncased, row), uncased)[2] == " <|im_end|> ENDS"


def test_an_answer_begins_where_its_prompt_does_not_lead_up_to_it(
    uncased: PreTrainedTokenizerBase,
) -> None:
    # as templates that open a turn with a thought, which a finished turn has not
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    )
    batch = _batch(uncased, as_chat=True, chat_template=template)
    assert str(uncased.decode(batch.candidate0.input_ids[0])).startswith("user: what should")
    assert _texts(batch, uncased) == [
        "user: What should I do?\nassistant: ", " Ask Ann.\n", " Nothing\n"
    ]  # fmt: skip
    # the sign that the thought and an answer begin with is the answer's
    bold = {**ROW, "chosen": "<b>Ask Ann</b>"}
    batch = _batch(uncased, bold, as_chat=True, chat_template=template)
    assert _texts(batch, uncased)[:2] == [
        "user: What should I do?\nassistant: ", "<b>Ask Ann</b>\n"
    ]  # fmt: skip
