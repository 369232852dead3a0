"""Every picture is of one grey level, which tells whose it is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lrlhf.datamodules import BadDataError, PromptDataModule
from lrlhf.modules import RLOO, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.types import Media, PromptBatch, SequenceBatch
from tests.datamodules.conftest import Rows, vlm
from tests.modules.policy_runs import fit
from tests.vlms import build_vlm, never_said

SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


Loads = Callable[..., PromptDataModule]


def grey(folder: Path, number: int, *, tokens: int = 2) -> str:
    """A picture of the grey level ``10 number``; returns its name."""
    name = f"{number}.png"
    Image.new("L", (28 * tokens, 28), 10 * number).save(folder / name)
    return name


def asks(text: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    if not before:
        return [{"role": "user", "content": text}]
    return [{"role": "user", "content": [*before, {"type": "text", "text": text}]}]


@pytest.fixture
def load(tmp_path: Path, vlm_folder: str) -> Loads:
    """Load rows beside the pictures."""

    def read(*rows: Any, **options: Any) -> PromptDataModule:
        data = PromptDataModule(
            Rows(rows, folder=tmp_path), **{"batch_size": 1, "tokenizer": vlm_folder, **options}
        )
        data.prepare_data()
        data.setup("fit")
        return data

    return read


def batches(data: PromptDataModule) -> list[PromptBatch]:
    return list(data.train_dataloader())


def level(media: Media) -> int:
    return int(np.asarray(media.images[0])[0, 0, 0]) // 10


def read(batch: PromptBatch | SequenceBatch, row: int) -> str:
    """The text of a row without its padding."""
    ids = batch.input_ids[row][batch.attention_mask[row]]
    return str(vlm().tokenizer.decode(ids))


def asked(text: str, tokens: int) -> str:
    shown = SHOWN.replace("<|image_pad|>", "<|image_pad|>" * tokens) if tokens else ""
    return f"<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n"


def mixed_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """By turns: a part with its path, a column and no part, a bare part and a column, text."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        name = grey(folder, number, tokens=1 + number % 3)
        text = f"what {number}?"
        spellings = [
            {"prompt": asks(text, {"type": "image", "path": name})},
            {"prompt": asks(text), "image": name},
            {"prompt": asks(text, {"type": "image"}), "images": [name]},
            {"prompt": asks(text)},
        ]
        rows.append({**spellings[number % 4], "number": number})
    return rows


def check_rows(batch: PromptBatch) -> list[int]:
    """Look at each row's text, tokens and picture; returns the row numbers."""
    placeholder = vlm().processor.placeholders["image"]
    numbers = [columns["number"] for columns in batch.columns]
    assert batch.media is not None or all(number % 4 == 3 for number in numbers)
    for row, number in enumerate(numbers):
        media = batch.media[row] if batch.media is not None else None
        tokens = 0 if number % 4 == 3 else 1 + number % 3
        assert read(batch, row) == asked(f"what {number}?", tokens)
        if number % 4 == 3:
            assert media is None
            continue
        assert media is not None
        assert level(media) == number
        assert media.tokens == {"image": tokens}
        assert int((batch.input_ids[row] == placeholder).sum()) == tokens
        # patches of 14 x 14 pixels, four of which make a token
        assert media.tensors["image_grid_thw"].tolist() == [[1, 2, 2 * tokens]]
        assert len(media.tensors["pixel_values"]) == 4 * tokens
        short = vlm().tokenizer(asked(f"what {number}?", 1), add_special_tokens=False)["input_ids"]
        assert list(media.prompt_ids) == short
        assert [Path(name).name for name in media.names] == [f"{number}.png"]
        assert not {"image", "images"} & batch.columns[row].keys()
    return numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_has_its_own_picture_after_shuffling(
    tmp_path: Path, load: Loads, workers: int
) -> None:
    rows = mixed_rows(tmp_path, 24)
    data = load(*rows, batch_size=4, num_workers=workers, seed=3)
    seen = [check_rows(batch) for batch in batches(data)]
    order = [number for numbers in seen for number in numbers]
    assert sorted(order) == list(range(24))
    assert order != list(range(24))
    assert [check_rows(batch) for batch in batches(data)] != seen  # the second epoch


def test_the_same_question_about_another_picture_is_no_duplicate(
    tmp_path: Path, load: Loads
) -> None:
    rows = [
        {"prompt": asks("what?"), "image": grey(tmp_path, number), "number": number}
        for number in (1, 2, 1)
    ]
    rows.append({"prompt": asks("what?"), "number": 9})
    data = load(*rows, deduplicate=True)
    assert sorted(batch.columns[0]["number"] for batch in batches(data)) == [1, 2, 9]


# as a placeholder with nothing behind it, which stops the forward pass
@pytest.mark.parametrize("as_messages", [True, False])
def test_a_placeholder_in_the_text_of_a_row_without_media_is_a_bad_row(
    load: Loads, as_messages: bool
) -> None:
    text = "what does <|image_pad|> mean?"
    rows = [{"prompt": asks(text) if as_messages else text}, {"prompt": "fine"}]
    with pytest.raises(BadDataError, match="placeholder count"):
        load(*rows, split_special_tokens=False)


def length(completions: Sequence[str]) -> list[float]:
    return [len(text) / 10 for text in completions]


def test_placeholders_do_not_reach_the_loss_of_a_text(tmp_path: Path) -> None:
    own = build_vlm("qwen2_vl")
    text = f"{SHOWN}grey"
    picture = Image.open(tmp_path / grey(tmp_path, 5)).convert("RGB")
    inputs = own.processor.processor(text=[text], images=[picture], return_tensors="pt")
    with torch.no_grad():
        logits = own.model(**inputs).logits[0]
    logits[:, never_said(own)] = -torch.inf
    # the last four tokens; a mark and two placeholders come before them, and are no more said than
    # the first token is
    said = logits[-5:-1].log_softmax(-1).gather(1, inputs["input_ids"][0, -4:, None])
    texts = Rows([{"text": text, "image": "5.png"}] * 2, folder=tmp_path)
    data = PromptDataModule(
        Rows([{"prompt": "hi"}, {"prompt": "ho"}]),
        batch_size=2,
        pretraining=texts,
        pretraining_batch_size=2,
    )
    module = RLOO(
        own.model,
        Rewards([length]),
        tokenizer=own.tokenizer,
        processor=own.processor.processor,
        num_generations=2,
        sampling=Sampling(max_new_tokens=3),
        update=Update(pretraining_coef=1.0),
    )
    trainer = fit(module, Path("-"), tmp_path, steps=1, data=data)
    found = float(trainer.logged_metrics["policy/pretraining_loss"])
    assert found == pytest.approx(-float(said.mean()), rel=1e-4)


def test_a_plain_prompt_shows_its_picture_at_the_mark(load: Loads, tmp_path: Path) -> None:
    row = {"prompt": "what is <image>?", "image": grey(tmp_path, 3)}
    (batch,) = batches(load(row))
    assert batch.prompts == (f"what is {SHOWN}?",)  # as the policy reads it
    assert level(batch.media[0]) == 3
    assert batch.media[0].tokens == {"image": 2}
