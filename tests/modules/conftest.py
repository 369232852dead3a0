"""Prompts that every run of a policy module can answer; reward models, and pairs for them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.models import ScoreModel
from lrlhf.modules import RewardModel
from lrlhf.types import PreferenceBatch, SequenceBatch
from tests.modules.reward_runs import SGD


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [f'{{"prompt": "say {word}", "answer": "{word}"}}' for word in "abcdefghijklmnop"]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def reward_model(model_folder: str) -> Callable[..., RewardModel]:
    """Builds one, the same every time."""

    def build(heads: Sequence[str] = ("reward",), **options: Any) -> RewardModel:
        L.seed_everything(3, verbose=False)
        options.setdefault("optimizer", SGD)
        return RewardModel(ScoreModel(source=model_folder, heads=list(heads)), **options)

    return build


@pytest.fixture
def collate(tokenizer: PreTrainedTokenizerBase) -> Callable[..., PreferenceBatch]:
    """Makes a batch of texts and labels."""

    def sequences(texts: Sequence[str], length: int) -> SequenceBatch:
        encoded = tokenizer(
            list(texts), padding="max_length", max_length=length, return_tensors="pt"
        )
        mask = encoded["attention_mask"].bool()
        return SequenceBatch(
            input_ids=encoded["input_ids"], attention_mask=mask, response_mask=mask
        )

    def collate(
        rows: Sequence[tuple[str, str, Sequence[float]]],
        margin: Sequence[float] | None = None,
        padding: tuple[int, int] = (0, 0),
    ) -> PreferenceBatch:
        texts0, texts1, labels = zip(*rows, strict=True)
        return PreferenceBatch(
            candidate0=sequences(texts0, max(map(len, texts0)) + padding[0]),
            candidate1=sequences(texts1, max(map(len, texts1)) + padding[1]),
            labels=torch.tensor(labels),
            margin=None if margin is None else torch.tensor(margin),
            info=tuple({"row": index} for index in range(len(rows))),
        )

    return collate
