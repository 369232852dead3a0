"""Configs of small runs on a CPU that write nothing unless they are asked to."""

from collections.abc import Mapping
from typing import Any

_DATA = {
    "SFT": "SupervisedDataModule",
    "RewardModel": "PreferenceDataModule",
    "DPO": "PreferenceDataModule",
    "KTO": "UnpairedPreferenceDataModule",
}


def experiment(
    module: str,
    options: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    reward: str = "",
    **trainer: Any,
) -> dict[str, Any]:
    """Config of ``fit``.

    Args:
        module: Class name; `SFT` gets texts, `RewardModel` and `DPO` get pairs, others prompts,
            rewards and 2 generations.
        options: Of the module.
        data: Of the data module.
        reward: Import path of the reward function.
        trainer: Of the trainer, beside what keeps it quiet.
    """
    data_module = _DATA.get(module, "PromptDataModule")
    if module not in _DATA:
        rewards = {"class_path": "Rewards", "init_args": {"functions": [reward]}}
        sampling = {"max_new_tokens": 3}
        options = {"rewards": rewards, "num_generations": 2, "sampling": sampling, **options}
    return {
        "seed_everything": 3,
        "model": {"class_path": module, "init_args": options},
        "data": {"class_path": data_module, "init_args": data},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 1,
            "max_epochs": -1,
            "logger": False,
            "default_callbacks": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **trainer,
        },
    }
