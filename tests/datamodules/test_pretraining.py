from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import BadDataError, PromptDataModule, Weighted
from lrlhf.datamodules.datasets.pretraining import PretrainingStream, PretrainingTexts
from lrlhf.datamodules.loading.attached import Reader
from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.types import PromptBatch, SequenceBatch
from tests.conftest import build_tokenizer
from tests.datamodules.conftest import Remembers, WriteRows, numbered_prompts


def load(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, rows: Any, **options: Any
) -> PromptDataModule:
    texts = write_rows(rows, name="texts.jsonl") if rows is not None else None
    data = PromptDataModule(
        write_rows(numbered_prompts(6), name="prompts.jsonl"),
        tokenizer=tokenizer,
        **{"batch_size": 1, "pretraining": texts, **options},
    )
    data.prepare_data()
    data.setup("fit")
    return data


def texts_of(batch: PromptBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    texts = batch.pretraining
    assert texts is not None
    return [
        str(tokenizer.decode(ids[mask]))
        for ids, mask in zip(texts.input_ids, texts.attention_mask, strict=True)
    ]


def numbered_texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"text {number}"} for number in range(count)]


def test_texts_are_right_padded_and_trained_on_from_the_second_token(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = load(
        write_rows,
        tokenizer,
        [{"text": "ab"}, {"text": "abcd", "other": 1}],  # one token per byte
        pretraining_batch_size=2,
    )
    texts = next(iter(data.train_dataloader())).pretraining
    assert texts is not None
    short, long = texts.lengths.argsort().tolist()
    a, b, c, d = tokenizer("abcd")["input_ids"]
    assert texts.input_ids[long].tolist() == [a, b, c, d]
    assert texts.input_ids[short].tolist() == [a, b, *[tokenizer.pad_token_id] * 2]
    assert texts.attention_mask[short].tolist() == [True, True, False, False]
    assert texts.response_mask[short].tolist() == [False, True, False, False]
    assert texts.response_mask[long].tolist() == [False, True, True, True]


def test_without_texts_batches_carry_none(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = load(write_rows, tokenizer, None)
    assert all(batch.pretraining is None for batch in data.train_dataloader())


def test_train_batches_carry_as_many_texts_as_prompts_and_validation_none(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = load(write_rows, tokenizer, numbered_texts(9), batch_size=2, val_size=2)
    assert [len(texts_of(batch, tokenizer)) for batch in data.train_dataloader()] == [2, 2]
    assert [batch.pretraining for batch in data.val_dataloader()] == [None]


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    ],
    ids=["messages", "conversations"],
)
def test_dialogues_are_rendered_whole(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]
) -> None:
    data = load(write_rows, tokenizer, [row])
    batch = next(iter(data.train_dataloader()))
    assert texts_of(batch, tokenizer) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    ]
    assert batch.pretraining is not None
    assert batch.pretraining.response_mask[0].tolist()[0] is False
    assert batch.pretraining.response_mask[0, 1:].all()


def test_a_named_column_must_be_there(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"body": "this", "text": "not this"}]
    data = load(write_rows, tokenizer, rows, pretraining_column="body")
    assert texts_of(next(iter(data.train_dataloader())), tokenizer) == ["this"]
    dialogue = [{"messages": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(BadDataError, match=r"(?s)no column 'body'.*in `pretraining_column`"):
        load(write_rows, tokenizer, dialogue, pretraining_column="body")


def test_texts_too_long_or_too_short_are_left_out_and_counted(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "12345"}, {"text": "123456"}, {"text": "1"}]
    data = load(write_rows, tokenizer, rows, pretraining_max_tokens=5, max_bad_fraction=0.7)
    seen = [texts_of(batch, tokenizer) for batch in data.train_dataloader()]
    assert seen == [["12345"]] * 6
    assert "2 of 3 rows of the pretraining data" in caplog.text
    assert "texts.jsonl:2: the text has 6 tokens, pretraining_max_tokens=5" in caplog.text
    assert "texts.jsonl:3: a text of one token" in caplog.text
    with pytest.raises(BadDataError, match="raise pretraining_max_tokens"):
        load(write_rows, tokenizer, rows, pretraining_max_tokens=5)


def stream(
    write_rows: WriteRows, texts: int, batch_size: int, *, seed: int = 0, ranks: Ranks | None = None
) -> PretrainingStream:
    source = write_rows(numbered_texts(texts), name="texts.jsonl")
    settings = PretrainingTexts(
        source, "text", batch_size, max_tokens=20, max_bad_fraction=0.0, seed=seed
    )
    tokenizer = build_tokenizer()
    reader = Reader(tokenizer, ChatFormat(tokenizer), MediaReader())
    return settings.stream(reader, ranks or Ranks())


def rows_of(batch: SequenceBatch) -> list[tuple[int, ...]]:
    return [
        tuple(ids[mask].tolist())
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]


def test_every_text_comes_once_before_any_comes_again_over_all_ranks(
    write_rows: WriteRows,
) -> None:
    ranks = [stream(write_rows, 7, 2, ranks=Ranks(rank, 2)) for rank in (0, 1)]
    seen = [row for number in range(7) for rank in ranks for row in rows_of(rank.texts(number))]
    # 7 batches of 2 texts on 2 ranks are 28 texts: 4 epochs of 7, across the edges of batches
    epochs = [seen[start : start + 7] for start in range(0, 28, 7)]
    assert [len(set(epoch)) for epoch in epochs] == [7, 7, 7, 7]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_texts_of_a_batch_depend_on_seed_and_number_only(write_rows: WriteRows) -> None:
    forwards = stream(write_rows, 7, 2)
    expected = [rows_of(forwards.texts(number)) for number in range(12)]
    other_way = stream(write_rows, 7, 2)
    assert [rows_of(other_way.texts(number)) for number in reversed(range(12))] == expected[::-1]
    other_seed = stream(write_rows, 7, 2, seed=1)
    assert [rows_of(other_seed.texts(number)) for number in range(12)] != expected


def test_prompts_and_texts_of_equal_number_do_not_go_in_step(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": f"{number:03}", "text": f"{number:03}"} for number in range(40)]
    path = write_rows(rows)
    data = PromptDataModule(path, tokenizer=tokenizer, batch_size=1, pretraining=path)
    data.setup("fit")
    pairs = [(batch.prompts[0], texts_of(batch, tokenizer)[0]) for batch in data.train_dataloader()]
    # two independent permutations of 40 agree in one place on average
    assert sum(prompt == text for prompt, text in pairs) < 8


def test_weighted_sources_share_an_epoch(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    one = write_rows([{"text": f"one {number}"} for number in range(3)], name="one.jsonl")
    two = write_rows([{"text": f"two {number}"} for number in range(3)], name="two.jsonl")
    sources = [Weighted(one, 2.0), Weighted(two, 1.0)]
    data = load(write_rows, tokenizer, None, pretraining=sources)
    seen = [texts_of(batch, tokenizer)[0] for batch in data.train_dataloader()]
    # an epoch is 6 texts long, two thirds of them are of the first source
    assert sum(text.startswith("one") for text in seen) == 4


class RemembersTexts(Remembers):
    """Also keeps the texts of every train batch."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[list[int]]] = []

    def training_step(self, batch: PromptBatch, index: int) -> None:
        super().training_step(batch, index)
        assert batch.pretraining is not None
        self.texts.append(batch.pretraining.input_ids.tolist())


def run(module: L.LightningModule, data: PromptDataModule, **options: Any) -> None:
    ckpt_path = options.pop("ckpt_path", None)
    L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_checkpointing="callbacks" in options,
        **{"max_epochs": 3, **options},
    ).fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_goes_on_with_the_same_texts(
    tmp_path: Path, write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    def data() -> PromptDataModule:
        return PromptDataModule(
            write_rows(numbered_prompts(8), name="prompts.jsonl"),
            tokenizer=tokenizer,
            batch_size=2,
            pretraining=write_rows(numbered_texts(7), name="texts.jsonl"),
            pretraining_batch_size=3,
        )

    saving = ModelCheckpoint(
        tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1
    )
    whole = RemembersTexts()
    run(whole, data(), callbacks=[saving])
    assert len(whole.texts) == 12
    assert len({str(texts) for texts in whole.texts}) == 12
    for stop in (1, 4, 7):
        resumed = RemembersTexts()
        run(resumed, data(), ckpt_path=str(tmp_path / "saved" / f"step={stop}.ckpt"))
        assert resumed.texts == whole.texts[stop:], f"stopped after batch {stop}"


def test_overfitted_batches_keep_their_texts(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    module = RemembersTexts()
    data = PromptDataModule(
        write_rows(numbered_prompts(8), name="prompts.jsonl"),
        tokenizer=tokenizer,
        batch_size=2,
        pretraining=write_rows(numbered_texts(7), name="texts.jsonl"),
    )
    run(module, data, overfit_batches=2, max_epochs=2)
    assert module.texts[0] != module.texts[1]
    assert module.texts[2:] == module.texts[:2]


def test_fewer_texts_than_a_step_takes_are_refused(write_rows: WriteRows) -> None:
    with pytest.raises(ValueError, match=r"takes 8 texts .* there are 7: .* to 3 or less"):
        stream(write_rows, 7, 4, ranks=Ranks(0, 2))


@pytest.mark.parametrize("options", [{"pretraining_batch_size": 0}, {"pretraining_max_tokens": 1}])
def test_impossible_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        PromptDataModule("train.jsonl", pretraining="texts.jsonl", **options)


def test_the_texts_move_with_the_batch(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    batch = next(iter(load(write_rows, tokenizer, numbered_texts(3)).train_dataloader()))
    moved = batch.to(torch.device("meta"))
    assert moved.pretraining is not None
    assert moved.pretraining.input_ids.device.type == "meta"
