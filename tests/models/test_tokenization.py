from pathlib import Path

import pytest
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import eos_token_ids, load_tokenizer
from tests.conftest import build_tokenizer


def test_without_a_padding_token_the_end_token_pads_and_a_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bare = build_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with caplog.at_level("INFO", logger="lrlhf.models"):
        loaded = load_tokenizer(str(tmp_path))
    assert (loaded.pad_token, loaded.padding_side) == ("<|endoftext|>", "right")
    assert "padding with '<|endoftext|>'" in caplog.text
    bare.eos_token = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a pad_token nor an eos_token"):
        load_tokenizer(str(tmp_path))


def test_end_ids_are_those_of_generation_config_config_and_tokenizer(
    language_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    language_model.generation_config = GenerationConfig(eos_token_id=[3, 40])
    language_model.config.eos_token_id = 50
    assert eos_token_ids(language_model, tokenizer) == {3, 40, 50, tokenizer.eos_token_id}


def test_end_ids_that_are_no_tokens_are_an_error(language_model: PreTrainedModel) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    language_model.generation_config.eos_token_id = None
    language_model.config.eos_token_id = 99_999
    with pytest.raises(ValueError, match=r"declare \[99999\]"):
        eos_token_ids(language_model, tokenizer)
