"""A short run of RLOO on one or two processes, as a program: vLLM and a fork do not go together.

python -m tests.vllm.two_ranks FOLDER vllm|vllm_server RANKS
"""

import os
import sys
import warnings
from pathlib import Path

import lightning as L

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO, OptimizerConfig
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine, VLLMServerEngine
from tests.conftest import build_tokenizer
from tests.equivalence.test_ranks import SaveAtEnd
from tests.modules.policy_runs import letters
from tests.vllm.models import build_policy


def main(folder: Path, engine: str, ranks: int) -> None:
    folder.mkdir()
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
    settings = {"strategy": "ddp_fork"} if ranks > 1 else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_steps=3,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[SaveAtEnd(folder), VLLMWeightSync(probe_every=1)],
        **settings,
    )
    trainer.fit(module, datamodule=PromptDataModule(train=str(prompts), batch_size=8 // ranks))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
