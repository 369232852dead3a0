"""A short run of RLOO on one or two processes, as a program: vLLM and a fork do not go together.

python -m tests.vllm.two_ranks FOLDER vllm|vllm_server RANKS
"""

import sys
import warnings
from pathlib import Path

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.modules import RLOO, OptimizerConfig
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine, VLLMServerEngine
from tests.conftest import build_tokenizer
from tests.equivalence.test_ranks import trained
from tests.modules.policy_runs import letters
from tests.vllm.models import build_policy


def main(folder: Path, engine: str, ranks: int) -> None:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefghijklmnop"))
    tokenizer = build_tokenizer()
    kind = VLLMEngine if engine == "vllm" else VLLMServerEngine
    module = RLOO(
        build_policy(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=kind(max_model_len=128, kv_cache_gib=0.05),
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        optimizer=OptimizerConfig(lr=1e-2, optimizer_class="torch.optim.SGD"),
        seed=1,
    )
    trained(module, prompts, folder / "run", ranks, [VLLMWeightSync(probe_every=1)])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
