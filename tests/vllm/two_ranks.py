"""A short run of RLOO on one or two processes, as a program: vLLM and a fork do not go together.

python -m tests.vllm.two_ranks FOLDER ENGINE [lora|whole [STRATEGY]], ENGINE being vllm, vllm_shared
(one for both), vllm_server or vllm_replicas
"""

import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lrlhf.modules import RLOO, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine, VLLMServerEngine
from tests.conftest import build_tokenizer
from tests.distributed.strategy_runs import train
from tests.modules.policy_runs import letters
from tests.vllm.models import build_policy


def main(folder: Path, engine: str, weights: str = "whole", strategy: str | None = None) -> None:
    tokenizer = build_tokenizer()
    policy: nn.Module = build_policy(tokenizer)
    if weights == "lora":
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
        policy = get_peft_model(policy, config)
    kind = VLLMEngine if engine in ("vllm", "vllm_shared") else VLLMServerEngine
    further = {"vllm_replicas": {"replicas": 2}, "vllm_shared": {"tensor_parallel_size": 2}}
    module = RLOO(
        policy,
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=kind(
            max_model_len=128,
            kv_cache_gib=0.05,
            lora="adapter" if weights == "lora" else "auto",
            **further.get(engine, {}),
        ),
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        reference=Reference(kl_coef=0.01),
        optimizer=OptimizerConfig(lr=1e-2, optimizer_class="torch.optim.SGD"),
        seed=1,
    )
    train(module, folder / "run", strategy=strategy, start_method="popen")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), *sys.argv[2:])
