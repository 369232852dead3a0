"""Engines are started once for all tests: a start takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.process_guard import descendants
from lrlhf.rollout import VLLMEngine, VLLMServerEngine
from tests.vllm.models import build_policy, guard_of, new_server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # vLLM's own imports warn in many ways
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            # without lanes a server imports vLLM three times: minutes on a busy machine
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="session")
def _first(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return build_policy(tokenizer)


@pytest.fixture
def policy(_first: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The same object for all tests, so that no engine has to start for another architecture."""
    before = {name: value.clone() for name, value in _first.state_dict().items()}
    ends = _first.generation_config.eos_token_id
    yield _first.eval()
    _first.load_state_dict(before)
    _first.requires_grad_(True).zero_grad()
    _first.generation_config.eos_token_id = ends


@pytest.fixture(scope="session")
def _started() -> Iterator[VLLMEngine]:
    engine = VLLMEngine(max_model_len=128, kv_cache_gib=0.05)
    yield engine
    engine.close()


@pytest.fixture
def engine(
    _started: VLLMEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> VLLMEngine:
    """Started once, with the weights of `policy`."""
    _started.attach(policy, tokenizer)
    _started.push(0)
    return _started


@pytest.fixture(scope="session")
def server(
    tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServerEngine]:
    engine = new_server(tmp_path_factory.mktemp("server"))
    engine.attach(build_policy(tokenizer), tokenizer)
    engine.push(0)
    yield engine
    processes = descendants(guard_of(engine))
    assert len(processes) > 1
    engine.close()
    assert not [process for process in processes if process.is_running()]
