"""A larger batch of prompts is what a buffer over several rollouts would be."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import Reference, Update
from lrlhf.rollout import EngineWrapper, TransformersEngine
from lrlhf.types import PromptBatch, Rollout
from tests.modules.policy_runs import sgd

PROMPTS = [{"prompt": f"say {letter}"} for letter in "abcd"]


class SeededByPrompt(EngineWrapper):
    """Draws the same responses to a prompt wherever it stands among others."""

    def generate(
        self, prompts: PromptBatch, *args: Any, seeds: Sequence[int], **options: Any
    ) -> Rollout:
        copies = len(seeds) // len(prompts)
        own = (prompts.input_ids * prompts.attention_mask).sum(dim=1).tolist()
        seeds = [100 * number + copy for number in own for copy in range(copies)]
        return super().generate(prompts, *args, seeds=seeds, **options)


def test_two_rollouts_before_one_update_are_one_batch_of_their_prompts(build, train) -> None:
    def change(rows: list[dict[str, str]], **update: Any) -> dict[str, Tensor]:
        """What one step of gradient descent adds to the weights."""
        module = build(
            engine=SeededByPrompt(TransformersEngine()),
            reference=Reference(kl_coef=0.05),
            optimizer=sgd(1.0),
            update=Update(max_grad_norm=math.inf, **update),
            seed=1,
        )
        data = PromptDataModule(rows, batch_size=len(rows), shuffle=False)
        run = train(module, data=data)
        assert len(run.experience) == 4 * len(rows)
        return {name: new - run.before[name] for name, new in run.after.items()}

    first, second = change(PROMPTS[:2]), change(PROMPTS[2:])
    # of a buffer with both: the gradient of the mean over all of its responses
    for together in (change(PROMPTS), change(PROMPTS, offload=True, micro_batch_tokens=40)):
        for name, value in together.items():
            expected = (first[name] + second[name]) / 2
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-7, msg=name)
    assert any((first[name] - second[name]).abs().max() > 1e-4 for name in first)
