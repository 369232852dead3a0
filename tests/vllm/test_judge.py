"""A judge that a vLLM server of its own serves, in a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO
from lrlhf.rewards import JudgeReward, Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import Watcher, fit, sgd
from tests.vllm.models import build_policy
from tests.vllm.serving import served

pytestmark = pytest.mark.exhaustive

TURNS = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def endpoint(
    tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("judge")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_language_model(tokenizer, max_position_embeddings=2048, **sizes)
    template = folder / "template.jinja"
    template.write_text(TURNS)
    with served(model, tokenizer, folder, "--chat-template", str(template)) as url:
        yield f"{url}/v1"


def judge(endpoint: str, verdict: str, **options: Any) -> JudgeReward:
    # of random weights nothing else could be had
    request = {"max_tokens": 32, "temperature": 1.0, "structured_outputs": {"regex": verdict}}
    return JudgeReward(endpoint, request=request, seed=1, **options)


def test_a_judge_scores_the_responses_of_a_run(
    endpoint: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    watcher = Watcher()
    module = RLOO(
        build_policy(tokenizer),
        Rewards(
            {
                "rating": judge(endpoint, r"Verdict: ([1-9]|10)", samples=2),
                "pairs": judge(endpoint, r"Verdict: (A|B|tie)", mode="pairwise"),
                "list": judge(endpoint, r"Verdict: [AB] (>|=) [AB]", mode="listwise", attempts=8),
            }
        ),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=8),
        optimizer=sgd(0.05),
    )
    fit(
        module,
        tmp_path,
        tmp_path / "run",
        steps=2,
        callbacks=[watcher],
        data=PromptDataModule([{"prompt": f"write {number}"} for number in range(4)], batch_size=2),
        limit_val_batches=0,
    )
    assert len(watcher.experiences) == 2
    for experience in watcher.experiences:
        # each verdict is from 0 to 1, and those of a pair add up to 1
        assert ((experience.scores >= 0) & (experience.scores <= 3)).all()


def test_what_is_no_verdict_gives_no_value(endpoint: str) -> None:
    rewards = Rewards(
        [JudgeReward(endpoint, request={"max_tokens": 16})], max_unscorable_fraction=1
    )
    result = rewards.score(["why?"] * 4, list("abcd"), [[0]] * 4, [{}] * 4)
    assert result.scores.isnan().all()
    assert result.metrics["judge/malformed_fraction"] == 1.0
    assert not result.failures
