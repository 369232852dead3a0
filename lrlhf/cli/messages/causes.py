"""Whether an error is about what the user wrote."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lrlhf.cli.messages.errors import UserError
from lrlhf.guard import TrainingDivergedError
from lrlhf.rewards import RewardError
from lrlhf.rewards.function import MissingColumnError

_PATHS = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    FileExistsError,
    PermissionError,
)
"""About a path that does not fit; other errors of the system are about the machine."""

_NO_INPUT = (RewardError, TrainingDivergedError)
"""What a run comes to, although they are `ValueError`s."""


class Progress(L.Callback):
    """Knows how far a run has come, and so whose errors are whose."""

    def __init__(self) -> None:
        self._batches = 0
        """Begun; of any stage."""
        self._trained = False

    def blames_user(self, error: Exception) -> bool:
        """Tell whether an error that ended the run is about the config or what it names."""
        if self._trained:
            return isinstance(error, MissingColumnError)
        if isinstance(error, _PATHS) and self._batches:
            return False
        return _is_about_input(error)

    def on_train_batch_start(self, *_: Any) -> None:
        self._batches += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self._trained = True

    def on_validation_batch_start(self, *_: Any) -> None:
        self._batches += 1

    def on_test_batch_start(self, *_: Any) -> None:
        self._batches += 1

    def on_predict_batch_start(self, *_: Any) -> None:
        self._batches += 1


@contextlib.contextmanager
def blaming_user() -> Iterator[None]:
    """Hold errors of the body that are about the input for the user's.

    Raises:
        UserError: There was one.
    """
    try:
        yield
    except Exception as error:
        if _is_about_input(error):
            raise UserError from error
        raise


def _is_about_input(error: Exception) -> bool:
    if isinstance(error, _NO_INPUT) and not isinstance(error, MissingColumnError):
        return False
    if isinstance(error, ValueError) and raised_in(error).startswith("lightning."):
        return True
    kinds = (ValueError, ImportError, MisconfigurationException)
    return isinstance(error, _PATHS) or (isinstance(error, kinds) and explains_itself(error))


def explains_itself(error: BaseException) -> bool:
    """Whether the message of an error during a run is for the user."""
    if isinstance(error, OSError | MisconfigurationException):
        return True
    modules = [type(error).__module__]
    if isinstance(error, ValueError | ImportError):
        modules.append(raised_in(error))
    return any(name.startswith("lrlhf.") for name in modules)


def raised_in(error: BaseException) -> str:
    """Name of the module whose code raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", ""))
