"""A run whose server takes new weights while it generates for later iterations."""

import itertools
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import Watcher, fit, letters, sgd
from tests.vllm.models import build_policy, new_server

STEPS, STALENESS = 20, 2


def test_no_token_of_a_server_is_older_than_allowed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    server, watcher = new_server(tmp_path), Watcher()
    module = RLOO(
        build_policy(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=100),
        engine=server,
        max_staleness=STALENESS,
        optimizer=sgd(0.05),
    )
    rows = [{"prompt": f"write {number} "} for number in range(8)]
    fit(
        module,
        tmp_path,
        tmp_path / "run",
        steps=STEPS,
        callbacks=[watcher, VLLMWeightSync(probe_every=3)],
        data=PromptDataModule(rows, batch_size=4),
        limit_val_batches=0,
    )
    mixed = 0
    for step, experience in enumerate(watcher.experiences):
        assert experience.versions is not None
        tokens = experience.versions[experience.response_mask].tolist()
        assert max(0, step - STALENESS) <= min(tokens) <= max(tokens) <= step
        for row, mask in zip(experience.versions, experience.response_mask, strict=True):
            own = row[mask].tolist()
            # a response goes on with newer weights, never with older ones
            assert all(first <= second for first, second in itertools.pairwise(own))
            mixed += len(set(own)) > 1
    assert mixed
