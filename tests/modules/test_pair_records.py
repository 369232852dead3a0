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


def _batch(tokenizer: PreTrainedTokenizerBase, **options: Any) -> PreferenceBatch:
    data = PreferenceDataModule([ROW], batch_size=1, tokenizer=tokenizer, **options)
    data.prepare_data()
    data.setup("fit")
    batch: PreferenceBatch = next(iter(data.train_dataloader()))
    return batch


def _texts(batch: PreferenceBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    scores = PairScores(torch.zeros(1, 1), torch.zeros(1, 1))
    (record,) = score_records(scores, batch, ["score"], tokenizer)
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


def test_chats_are_read_off_the_tokens(uncased: PreTrainedTokenizerBase) -> None:
    batch = _batch(uncased, as_chat=True)
    assert batch.said == (None,)
    assert "what should i do?" in _texts(batch, uncased)[0]
