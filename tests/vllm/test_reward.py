"""Reward models that a vLLM server scores are those of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)

from lrlhf.datamodules import PromptDataModule
from lrlhf.models import ScoreModel
from lrlhf.modules import RLOO
from lrlhf.rewards import LearnedReward, RewardResult, Rewards, VLLMReward
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import Watcher, fit, sgd
from tests.vllm.models import build_policy
from tests.vllm.serving import serving

pytestmark = pytest.mark.exhaustive

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
CHAT = ({"role": "user", "content": "Say something nice."},)
PROMPTS = ["2 + 2 =", "Say something nice:", "x", CHAT, CHAT]
TEXTS = [
    " 4",
    " you look well today" * 4,
    "",
    [{"role": "assistant", "content": "Hello."}],
    [
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Hello."},
    ],
]


@pytest.fixture(scope="module", params=["from RewardModel", "of two labels"])
def folder(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = build_language_model(tokenizer, **SIZES)
    torch.manual_seed(3)
    if request.param == "of two labels":
        model.config.num_labels = 2
        classifier = LlamaForSequenceClassification(model.config)
        torch.nn.init.normal_(classifier.score.weight, std=1.0)
        classifier.save_pretrained(folder)
    else:
        model.save_pretrained(folder / "body")
        tokenizer.save_pretrained(folder / "body")
        network = ScoreModel(source=str(folder / "body"), heads=["reward"]).load()
        for weight in network.scorer.heads.parameters():
            torch.nn.init.normal_(weight, std=1.0)
        network.save_pretrained(folder, tokenizer)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(folder, "--runner", "pooling", "--max-model-len", "128") as url:
        yield url


def score(reward: Any) -> RewardResult:
    rewards = Rewards([reward], max_unscorable_fraction=1.0)
    return rewards.score(PROMPTS, TEXTS, [[1]] * len(TEXTS), [{}] * len(TEXTS))


def test_scores_are_those_of_transformers(
    url: str, folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    label = None if model.config.num_labels == 1 else 1
    expected = []
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        if isinstance(prompt, str):
            ids = [*tokenizer(prompt + text)["input_ids"], tokenizer.eos_token_id]
        else:
            ids = tokenizer.apply_chat_template([*prompt, *text], return_dict=True)["input_ids"]
        with torch.no_grad():
            expected.append(float(model(input_ids=torch.tensor([ids])).logits[0, label or 0]))
    result = score(VLLMReward(url, label=label, batch_size=2))
    assert_close(result.scores, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert result.scores.std() > 0.1
    if label is not None:
        return
    assert_close(score(LearnedReward(str(folder))).scores, result.scores, rtol=1e-4, atol=1e-4)
    _runs(url, tokenizer, tmp_path)


def _runs(url: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Train on it; one response in a run may be longer than the server takes."""
    watcher = Watcher()
    module = RLOO(
        build_policy(tokenizer),
        Rewards([VLLMReward(url)]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=8),
        optimizer=sgd(0.05),
    )
    rows = [{"prompt": f"write {number}"} for number in range(4)]
    fit(
        module,
        folder,
        folder / "run",
        steps=2,
        callbacks=[watcher],
        data=PromptDataModule(rows, batch_size=2),
        limit_val_batches=0,
    )
    assert len(watcher.experiences) == 2
    assert all(one.scores.isfinite().all() for one in watcher.experiences)


@pytest.mark.parametrize("length", [127, 128])
def test_the_longest_text_that_is_sent_is_taken(url: str, folder: Path, length: int) -> None:
    labels = AutoConfig.from_pretrained(folder).num_labels
    reward = VLLMReward(url, label=None if labels == 1 else 1)
    rewards = Rewards([reward], max_unscorable_fraction=1.0)
    # one token a letter, and the end
    texts = ["a" * (length - 2), "a" * 128]
    result = rewards.score(["x", "x"], texts, [[1]] * 2, [{}] * 2)
    assert result.scores.isnan().tolist() == [False, True]
    assert result.metrics["vllm/too_long"] == 0.5
