from pathlib import Path
from typing import Any

import pytest

from lrlhf.datamodules import BadDataError, PromptDataModule
from lrlhf.datamodules.datasets.pretraining import PretrainingStream, PretrainingTexts
from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.datamodules.text import Reader
from lrlhf.types import PromptBatch, SequenceBatch
from tests.datamodules.conftest import (
    TOKENIZER,
    Remembers,
    Rows,
    numbered_prompts,
    resumes_alike,
    trainer,
)


def load(texts: Any, **options: Any) -> PromptDataModule:
    data = PromptDataModule(
        Rows(numbered_prompts(6)),
        tokenizer=TOKENIZER,
        **{"batch_size": 1, "pretraining": texts, **options},
    )
    data.prepare_data()
    data.setup("fit")
    return data


def texts_of(batch: PromptBatch) -> list[str]:
    texts = batch.pretraining
    assert texts is not None
    return [
        str(TOKENIZER.decode(ids[mask]))
        for ids, mask in zip(texts.input_ids, texts.attention_mask, strict=True)
    ]


def numbered_texts(count: int) -> Rows:
    return Rows({"text": f"text {number}"} for number in range(count))


def test_texts_are_right_padded_and_trained_on_from_the_second_token() -> None:
    rows = Rows([{"text": "ab"}, {"text": "abcd", "other": 1}])  # one token per byte
    data = load(rows, pretraining_batch_size=2)
    texts = next(iter(data.train_dataloader())).pretraining
    assert texts is not None
    short, long = texts.lengths.argsort().tolist()
    a, b, c, d = TOKENIZER("abcd")["input_ids"]
    assert texts.input_ids[long].tolist() == [a, b, c, d]
    assert texts.input_ids[short].tolist() == [a, b, *[TOKENIZER.pad_token_id] * 2]
    assert texts.attention_mask[short].tolist() == [True, True, False, False]
    assert texts.response_mask[short].tolist() == [False, True, False, False]
    assert texts.response_mask[long].tolist() == [False, True, True, True]


def test_dialogues_are_rendered_whole() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    batch = next(iter(load(Rows([{"conversations": turns}])).train_dataloader()))
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    assert texts_of(batch) == [whole]
    assert batch.pretraining is not None
    assert batch.pretraining.response_mask[0].tolist() == [
        False,
        *[True] * (batch.pretraining.response_mask.shape[1] - 1),
    ]


def test_texts_too_long_or_too_short_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = Rows([{"text": "12345"}, {"text": "123456"}, {"text": "1"}])
    data = load(rows, pretraining_max_tokens=5, max_bad_fraction=0.7)
    assert [texts_of(batch) for batch in data.train_dataloader()] == [["12345"]] * 6
    assert "2 of 3 rows of the pretraining data" in caplog.text
    assert "rows.jsonl:2: it has 6 tokens, pretraining_max_tokens=5" in caplog.text
    assert "rows.jsonl:3: a text of one token" in caplog.text
    with pytest.raises(BadDataError, match="raise pretraining_max_tokens, or cut the texts"):
        load(rows, pretraining_max_tokens=5)


def stream(
    texts: int,
    batch_size: int,
    *,
    seed: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008  frozen
) -> PretrainingStream:
    settings = PretrainingTexts(
        numbered_texts(texts), "text", batch_size, max_tokens=20, max_bad_fraction=0.0, seed=seed
    )
    return settings.stream(Reader(TOKENIZER, ChatFormat(TOKENIZER), MediaReader()), ranks)


def rows_of(batch: SequenceBatch) -> list[tuple[int, ...]]:
    return [
        tuple(ids[mask].tolist())
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]


def test_every_text_comes_once_before_any_comes_again_over_all_ranks() -> None:
    ranks = [stream(7, 2, ranks=Ranks(rank, 2)) for rank in (0, 1)]
    seen = [row for number in range(7) for rank in ranks for row in rows_of(rank.texts(number))]
    # 7 batches of 2 texts on 2 ranks are 28 texts: 4 epochs of 7, across the edges of batches
    epochs = [seen[start : start + 7] for start in range(0, 28, 7)]
    assert [len(set(epoch)) for epoch in epochs] == [7, 7, 7, 7]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_texts_of_a_batch_depend_on_seed_and_number_only() -> None:
    forwards, backwards, other = stream(7, 2), stream(7, 2), stream(7, 2, seed=1)
    expected = [rows_of(forwards.texts(number)) for number in range(12)]
    assert [rows_of(backwards.texts(number)) for number in reversed(range(12))] == expected[::-1]
    assert [rows_of(other.texts(number)) for number in range(12)] != expected
    with pytest.raises(ValueError, match=r"takes 8 texts .* there are 7: .* to 3 or less"):
        stream(7, 4, ranks=Ranks(0, 2))


def test_prompts_and_texts_of_equal_number_do_not_go_in_step() -> None:
    rows = Rows({"prompt": f"{number:03}", "text": f"{number:03}"} for number in range(40))
    data = PromptDataModule(rows, tokenizer=TOKENIZER, batch_size=1, pretraining=rows)
    data.setup("fit")
    pairs = [(batch.prompts[0], texts_of(batch)[0]) for batch in data.train_dataloader()]
    # two independent permutations of 40 agree in one place on average
    assert sum(prompt == text for prompt, text in pairs) < 8


class RemembersTexts(Remembers):
    """Keeps the texts of every train batch."""

    def training_step(self, batch: PromptBatch, index: int) -> None:
        self.optimizers().step()
        assert batch.pretraining is not None
        self.seen.append(batch.pretraining.input_ids.tolist())


def beside(**options: Any) -> PromptDataModule:
    return PromptDataModule(
        Rows(numbered_prompts(8)),
        tokenizer=TOKENIZER,
        **{"batch_size": 2, "pretraining": numbered_texts(7), **options},
    )


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_goes_on_with_the_same_texts(tmp_path: Path) -> None:
    def data() -> PromptDataModule:
        return beside(pretraining_batch_size=3)

    whole = resumes_alike(tmp_path, RemembersTexts, data, (1, 4, 7))
    assert len({str(texts) for texts in whole.seen}) == len(whole.seen) == 12


def test_overfitted_batches_keep_their_texts() -> None:
    module = RemembersTexts()
    trainer(overfit_batches=2, max_epochs=2).fit(module, datamodule=beside())
    assert module.seen[0] != module.seen[1]
    assert module.seen[2:] == module.seen[:2]
