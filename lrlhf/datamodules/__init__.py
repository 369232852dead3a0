"""Data modules for prompts, preference pairs and stored rollouts, and what they read."""

from lrlhf.datamodules.bad_rows import BadDataError, BadRow
from lrlhf.datamodules.collate import PreferenceCollator, PromptCollator
from lrlhf.datamodules.loader import EvalLoader, TrainLoader
from lrlhf.datamodules.media_pairs import MediaPairs
from lrlhf.datamodules.pictures import Digits, DistortedPhotos
from lrlhf.datamodules.preferences import PreferenceDataModule
from lrlhf.datamodules.prompts import PromptDataModule
from lrlhf.datamodules.ratings import RatedFile, RatedPairs, RatedText, pairs_from_ratings
from lrlhf.datamodules.replay import ReplayDataModule
from lrlhf.datamodules.sources import FileSource, HubSource, Source, Weighted
from lrlhf.datamodules.tasks import ReasoningGym
from lrlhf.datamodules.vader import VaderRatings

__all__ = [
    "BadDataError",
    "BadRow",
    "Digits",
    "DistortedPhotos",
    "EvalLoader",
    "FileSource",
    "HubSource",
    "MediaPairs",
    "PreferenceCollator",
    "PreferenceDataModule",
    "PromptCollator",
    "PromptDataModule",
    "RatedFile",
    "RatedPairs",
    "RatedText",
    "ReasoningGym",
    "ReplayDataModule",
    "Source",
    "TrainLoader",
    "VaderRatings",
    "Weighted",
    "pairs_from_ratings",
]
