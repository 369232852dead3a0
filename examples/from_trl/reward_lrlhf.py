"""A reward model with lrlhf, as RewardTrainer trains one: it learns which sums are right."""

import sys

from lrlhf import Trainer
from lrlhf.datamodules import PreferenceDataModule
from lrlhf.modules import OptimizerConfig, RewardModel

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"

pairs = [
    {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"}
    for a in range(1, 10)
    for b in range(1, 10)
]

if __name__ == "__main__":
    module = RewardModel(MODEL, optimizer=OptimizerConfig(lr=1e-4), seed=1)
    data = PreferenceDataModule(train=pairs, val_size=16, batch_size=16)
    trainer = Trainer(max_steps=20, default_root_dir="runs/reward_lrlhf")
    trainer.fit(module, data)
