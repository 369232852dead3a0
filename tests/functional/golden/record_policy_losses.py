"""Records ``policy_losses.json``: losses, advantages and masks of TRL's and verl's own functions.

Run in an environment of its own with TRL 1.16.0 and verl 0.9.1 (``omegaconf``, ``tensordict``)::

    python tests/functional/golden/record_policy_losses.py

Inputs are random, three responses to each of two prompts, the fifth response without tokens.
"""

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from trl import GRPOTrainer
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

ROWS, WIDTH, SIZE = 6, 7, 3
LENGTHS = [7, 3, 5, 6, 0, 2]
GROUPS = np.array([0, 0, 0, 1, 1, 1])


def inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, ROWS, WIDTH, generator=generator)
    old = -draw().abs() - 0.05
    return {
        "old_logprobs": old,
        "logprobs": (old + 0.4 * draw()).clamp(max=-0.01),
        "ref_logprobs": (old + 0.3 * draw()).clamp(max=-0.01),
        "sampling_logprobs": (old + 0.2 * draw()).clamp(max=-0.01),
        "advantages": torch.randn(ROWS, generator=generator),
        "mask": (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).float(),
    }


def of_trl(given: dict[str, Tensor], **options: Any) -> Tensor:
    """The loss of `GRPOTrainer` on one micro-batch that is all of the batch."""
    args = SimpleNamespace(
        use_bias_correction_kl=options.get("use_bias_correction_kl", False),
        delta=None,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        **{
            "vespo_k_pos": 2.0,
            "vespo_lambda_pos": 3.0,
            "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0,
        },
    )
    accelerator = SimpleNamespace(
        gather=lambda value: value, reduce=lambda value, reduction: value, num_processes=1
    )
    model = SimpleNamespace(training=False)
    trainer = SimpleNamespace(
        model=model,
        args=args,
        accelerator=accelerator,
        loss_type=options["loss_type"],
        beta=options.get("beta", 0.0),
        off_policy_mask_threshold=options.get("off_policy_mask_threshold"),
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        epsilon_low=0.2,
        epsilon_high=0.2,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            given["logprobs"],
            torch.zeros(ROWS, WIDTH),
            None,
        ),
    )
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_logprobs"],
        "ref_per_token_logps": given["ref_logprobs"],
        "sampling_per_token_logps": given["sampling_logprobs"],
        "num_items_in_batch": given["mask"].sum(),
    }
    return GRPOTrainer._compute_loss(trainer, model, batch)


def of_verl(given: dict[str, Tensor], name: str, mode: str, **policy_loss: Any) -> Tensor:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=20.0,
    )
    for key, value in policy_loss.items():
        object.__setattr__(config.policy_loss, key, value)
    advantages = given["advantages"][:, None] * given["mask"]
    return core_algos.get_policy_loss_fn(name)(
        given["old_logprobs"],
        given["logprobs"],
        advantages,
        given["mask"],
        loss_agg_mode=mode,
        config=config,
    )[0]


def with_gradient(function: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    given = {**given, "logprobs": given["logprobs"].clone().requires_grad_()}
    loss = function(given, **options)
    loss.backward()
    gradient = given["logprobs"].grad
    return {"loss": float(loss), "gradient": gradient.tolist()}


def advantages_of_verl(seed: int, name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, generator=generator)
    mask = (torch.arange(WIDTH) < torch.tensor([7, 3, 5, 6, 4, 2])[:, None]).float()
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[:, 0] = scores
    found, _ = core_algos.get_adv_estimator_fn(name)(
        rewards, mask, index=GROUPS, config=OmegaConf.create({})
    )
    return {"scores": scores.tolist(), "mask": mask.tolist(), "advantages": found.tolist()}


def rejected(given: dict[str, Tensor], criterion: str, bounds: str) -> list[Any]:
    log_ratio = given["old_logprobs"] - given["sampling_logprobs"]
    kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        log_ratio, given["mask"], rollout_rs=criterion, rollout_rs_threshold=bounds
    )
    return kept.tolist()


CRITERIA = {
    **dict.fromkeys(("token_k1", "seq_sum_k1", "seq_mean_k1"), "0.9_1.1"),
    **dict.fromkeys(("token_k2", "token_k3", "seq_mean_k2", "seq_mean_k3"), "0.02"),
    **dict.fromkeys(("seq_sum_k2", "seq_sum_k3", "seq_max_k2", "seq_max_k3"), "0.1"),
}
LOSSES = {
    "sapo": partial(of_trl, loss_type="sapo"),
    "luspo": partial(of_trl, loss_type="luspo", importance_sampling_level="sequence"),
    "vespo": partial(of_trl, loss_type="vespo"),
    "sapo_verl": partial(of_verl, name="sapo", mode="seq-mean-token-mean"),
    "bnpo": partial(of_trl, loss_type="bnpo"),
    "unbiased_kl": partial(of_trl, loss_type="grpo", beta=0.3, use_bias_correction_kl=True),
    "off_policy_mask": partial(of_trl, loss_type="grpo", off_policy_mask_threshold=0.02),
    "dppo_tv": partial(of_verl, name="dppo_tv", mode="token-mean"),
    "dppo_kl": partial(of_verl, name="dppo_kl", mode="token-mean"),
    # so many that all candidates are taken, which leaves nothing to chance
    "clip_cov": partial(
        of_verl,
        name="clip_cov",
        mode="token-mean",
        clip_cov_ratio=1.0,
        clip_cov_lb=0.2,
        clip_cov_ub=5.0,
    ),
    "kl_cov": partial(of_verl, name="kl_cov", mode="token-mean", kl_cov_ratio=0.2, ppo_kl_coef=1.0),
}


def main() -> None:
    cases = []
    for seed in range(3):
        given = inputs(seed)
        cases.append(
            {
                "inputs": {name: value.tolist() for name, value in given.items()},
                "losses": {name: with_gradient(call, given) for name, call in LOSSES.items()},
                "accepted": {
                    name: rejected(given, name, bounds) for name, bounds in CRITERIA.items()
                },
            }
        )
    estimators = {
        name: [advantages_of_verl(seed, name) for seed in range(3)] for name in ("opo", "gpg")
    }
    record = {
        "source": "TRL 1.16.0, GRPOTrainer._compute_loss; verl 0.9.1, verl.trainer.ppo",
        "cases": cases,
        "criteria": CRITERIA,
        "estimators": estimators,
    }
    path = Path(__file__).parent / "policy_losses.json"
    path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
