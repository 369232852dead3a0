"""The prompts with which an engine finds out what may be generated together."""

import pytest

from lrlhf.rollout.engines.transformers_engine import trial_prompts
from tests.conftest import build_language_model, build_tokenizer


@pytest.mark.parametrize("tokens", [3, 6, 8, 9, 260])
def test_there_are_three_lengths_however_few_tokens_there_are(tokens: int) -> None:
    model = build_language_model(build_tokenizer(), vocab_size=tokens)
    prompts = trial_prompts(model)
    assert prompts.attention_mask.sum(dim=1).tolist() == [6, 3, 1]
    assert int(prompts.input_ids.max()) < tokens
