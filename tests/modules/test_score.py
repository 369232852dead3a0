"""`RewardModel.score`: what is read is what the network was trained on, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.models import ScoreModel
from lrlhf.modules import RewardModel
from lrlhf.types import SequenceBatch
from tests.vlms import picture, save_vlm

Build = Callable[..., RewardModel]
CHAT = [{"role": "user", "content": "say a"}]


def by_hand(module: RewardModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[float]:
    """Scores of one text that has all of its special tokens, padding nothing."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask)
    with torch.no_grad():
        scores: list[float] = module.network(batch)[0].tolist()
    return scores


def close(first: Any, second: Any) -> None:
    torch.testing.assert_close(torch.tensor(first), torch.tensor(second))


def test_texts_and_chats_are_scored_as_in_training(
    reward_model: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    module = reward_model()
    (plain,) = by_hand(module, tokenizer, "say a: a<|endoftext|>")
    (longer,) = by_hand(module, tokenizer, "say a: bbbb<|endoftext|>")
    turns = "<|im_start|>user\nsay a<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    (chat,) = by_hand(module, tokenizer, turns)
    assert len({plain, longer, chat}) == 3
    close(module.score("say a: ", "a"), plain)
    close(module.score("say a: ", ["a", "bbbb"]), [plain, longer])
    close(module.score(CHAT, "a"), chat)
    close(module.score([CHAT, "say a: "], ["a", "bbbb"], batch_size=1), [chat, longer])


def test_a_head_is_chosen_where_there_are_several(
    reward_model: Build, tokenizer: PreTrainedTokenizerBase
) -> None:
    module = reward_model(heads=("kind", "true"))
    kind, true = by_hand(module, tokenizer, "say ab<|endoftext|>")
    close(module.score("say a", "b", head="true"), true)
    close(module.score("say a", "b", head="kind"), kind)
    with pytest.raises(ValueError, match="heads kind, true: choose one with head"):
        module.score("say a", "b")


def test_modes_weights_and_random_states_stay(reward_model: Build) -> None:
    module = reward_model()
    module.train()
    modes = [part.training for part in module.modules()]
    state = torch.get_rng_state()
    module.score("say a", "b")
    assert [part.training for part in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.requires_grad for weight in module.network.scorer.heads.parameters())


@pytest.mark.parametrize(
    ("prompts", "responses", "message"),
    [
        (["a", "b"], ["c"], "2 prompts and 1 responses"),
        ([{"question": "a"}], ["c"], r"prompt 0 \(from 0\): no column 'prompt'"),
        ([4], ["c"], "a prompt is a int"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    reward_model: Build, prompts: Any, responses: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        reward_model().score(prompts, responses)


def test_a_response_that_is_too_long_has_no_score(reward_model: Build) -> None:
    first, second = reward_model().score("a", ["b", "c" * 300])
    assert isinstance(first, float)
    assert second is None


def test_images_count_where_the_network_sees(tmp_path: Any) -> None:
    save_vlm("qwen2_vl", tmp_path)
    module = RewardModel(ScoreModel(source=str(tmp_path)))
    first, second = (module.score("what?", "a cat", images=picture(seed)) for seed in (1, 2))
    assert first != second
    images = [picture(1), picture(2)]
    both = module.score(["what?", "what?"], ["a cat", "a cat"], images=images)
    close(both, [first, second])
