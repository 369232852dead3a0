"""What truncated sampling of vLLM left, against a plain pass of the policy."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import Sampling, SyncedEngine, VLLMEngine, VLLMServerEngine
from tests.vllm.models import LONG, prompts_of

SAMPLINGS = [
    Sampling(max_new_tokens=8, top_k=5, temperature=0.8, keep_mask=True),
    Sampling(max_new_tokens=8, top_k=1, keep_mask=True),
    Sampling(max_new_tokens=8, top_k=200, top_p=0.7, keep_mask=True),
    Sampling(max_new_tokens=8, top_k=100, min_p=0.4, temperature=1.5, keep_mask=True),
    Sampling(max_new_tokens=8, top_k=250, top_p=0.9, min_new_tokens=3, keep_mask=True),
]


def assert_renormalised(
    engine: SyncedEngine,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
) -> None:
    prompts = prompts_of(LONG, "short", tokenizer=tokenizer)
    rollout = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
    mask = rollout.sampling_mask
    assert mask is not None
    sizes = mask.sizes[rollout.response_mask]
    assert 1 <= int(sizes.min()) <= int(sizes.max()) <= sampling.top_k
    if sampling.top_p == 1 and sampling.min_p == 0 and sampling.min_new_tokens == 0:
        assert set(sizes.tolist()) == {sampling.top_k}
    with torch.no_grad():
        own = sequence_logprobs(policy, rollout, temperature=sampling.temperature)
    torch.testing.assert_close(own, rollout.sampling_logprobs, rtol=0, atol=1e-4)
    # each set holds the most probable ids, as a plain pass has them
    start = 0
    for row, length in enumerate(rollout.lengths.tolist()):
        with torch.no_grad():
            logits = policy(rollout.input_ids[row : row + 1, :length]).logits[0]
        for column in range(length):
            size = int(mask.sizes[row, column])
            ids = mask.ids[start : start + size].long()
            start += size
            if size and sampling.min_new_tokens == 0:
                least = logits[column - 1, ids].min()
                assert int((logits[column - 1] > least + 1e-4).sum()) < size


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_engine_in_the_process(
    engine: VLLMEngine,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
) -> None:
    assert_renormalised(engine, policy, tokenizer, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_server(
    server: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> None:
    policy = server._policy
    assert isinstance(policy, PreTrainedModel)
    server.push(0)
    assert_renormalised(server, policy.eval(), tokenizer, sampling)
