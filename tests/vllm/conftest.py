"""Engines are started once per module: a start takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import VLLMEngine
from tests.vllm.models import build_policy

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # vLLM's own imports warn in many ways
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            # a server imports vLLM three times: half a minute, or several on a busy machine
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture
def policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return build_policy(tokenizer)


@pytest.fixture(scope="module")
def started() -> Iterator[VLLMEngine]:
    """An engine that any tied policy of `build_policy` can be pushed into."""
    engine = VLLMEngine(max_model_len=128, kv_cache_gib=0.05)
    yield engine
    engine.close()
