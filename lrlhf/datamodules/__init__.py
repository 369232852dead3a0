"""Data modules for texts, prompts, preference pairs and stored rollouts, and what they read."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.datamodules.adaptive import AdaptivePrompts
    from lrlhf.datamodules.core import RowDataModule, RowKind
    from lrlhf.datamodules.datasets.tasks import ReasoningGym
    from lrlhf.datamodules.datasets.verdict_tasks import VerdictTasks
    from lrlhf.datamodules.loading.loader import EvalLoader, TrainLoader
    from lrlhf.datamodules.loading.sources import (
        FileSource,
        HubSource,
        MemorySource,
        Source,
        Weighted,
    )
    from lrlhf.datamodules.loading.validation import ValidationSet
    from lrlhf.datamodules.preferences import PreferenceDataModule
    from lrlhf.datamodules.prompts import PromptDataModule
    from lrlhf.datamodules.replay import ReplayDataModule
    from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
    from lrlhf.datamodules.stepwise import StepwiseDataModule
    from lrlhf.datamodules.supervised import SupervisedDataModule
    from lrlhf.datamodules.text import TextDataModule
    from lrlhf.datamodules.unpaired import UnpairedPreferenceDataModule
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "AdaptivePrompts",
    "BadDataError",
    "BadRow",
    "EvalLoader",
    "FileSource",
    "HubSource",
    "MemorySource",
    "PreferenceDataModule",
    "PromptDataModule",
    "ReasoningGym",
    "ReplayDataModule",
    "RowDataModule",
    "RowKind",
    "Source",
    "StepwiseDataModule",
    "SupervisedDataModule",
    "TextDataModule",
    "TrainLoader",
    "UnpairedPreferenceDataModule",
    "ValidationSet",
    "VerdictTasks",
    "Weighted",
]
