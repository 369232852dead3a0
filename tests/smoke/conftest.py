"""The log as it was, after a command has sent it to the terminal."""

import logging
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.models import ScoreModel


@pytest.fixture
def _own_log() -> Iterator[None]:
    logger = logging.getLogger("lrlhf")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before


@pytest.fixture(scope="session")
def reward_folder(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: str,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """A reward model of the tiny language model, as an export leaves it."""
    folder = tmp_path_factory.mktemp("tiny-reward")
    ScoreModel(source=model_folder).load().save_pretrained(folder, tokenizer)
    return str(folder)
