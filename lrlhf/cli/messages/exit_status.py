"""Ends a command with one clear message and an exit status, whatever was raised."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
from huggingface_hub.utils.tqdm import enable_progress_bars
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from transformers.utils import logging as transformers_logging

from lrlhf.cli.config_files import ConfigFile, folders_of_own_code
from lrlhf.cli.messages.locations import locate, locate_refusal
from lrlhf.guard import TrainingDivergedError
from lrlhf.options.complaints import Complaint, read_complaint
from lrlhf.options.errors import ConfigError, MistakeError, RefusedError, UserError, ValidationError
from lrlhf.options.errors import say_error as _end
from lrlhf.rewards import RewardError
from lrlhf.rewards.function import MissingColumnError
from lrlhf.run import quiet_output
from lrlhf.run.supervision.signals import Terminated, checkpoint_to_continue

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
    """Progress of a run, which decides whether an error is the user's."""

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


def how_to_continue(trainer: L.Trainer) -> str:
    """Name the checkpoint from which a run that ended early goes on; empty: it has saved none."""
    path = checkpoint_to_continue(trainer)
    return "" if path is None else f"--ckpt_path last continues from {path}"


def end(
    error: BaseException, files: Sequence[ConfigFile], arguments: Sequence[str], *, debug: bool
) -> int:
    """Say what ended a command, with ``debug`` by a traceback too, and return the exit status."""
    match error:
        case ConfigError() | MistakeError():
            return _end(error, _described(error, files, arguments), status=2, show=debug)
        case RefusedError():
            return _end_refused(error, files, arguments, debug=debug)
        case UserError():
            cause = error.__cause__
            assert cause is not None
            text = str(cause).strip()
            location = locate_refusal(text.partition("\n")[0], [], files, arguments)
            text = located(text, *location) + _searched(text, files)
            return _end(cause, text, status=2, show=debug)
        # the second is what Lightning makes of an interrupt
        case (
            Terminated(interrupted=True)
            | SystemExit(__context__=KeyboardInterrupt())
            | KeyboardInterrupt()
        ):
            return _end(error, "interrupted", status=130, show=debug)
        case SIGTERMException():
            return _end(error, "terminated", status=143, show=debug)
        case SystemExit():
            return error.code if isinstance(error.code, int) else 0
    if explains_itself(error):
        return _end(error, str(error), status=1, show=debug)
    return _end_unexpected(error)


def _described(
    error: ConfigError | MistakeError, files: Sequence[ConfigFile], arguments: Sequence[str]
) -> str:
    """Say file, line, dotted key and what is wrong there, as far as the message does not."""
    if isinstance(error, MistakeError):
        complaint = Complaint(path=error.key, sentence=str(error), value=error.value)
        return located(str(error), *locate(complaint, files, arguments))
    if not isinstance(error, ValidationError):
        return str(error)
    # a missing group is reported as `fit.model`, one that is there as `model`
    complaint = read_complaint(str(error).replace(f" {arguments[0]}.", " "))
    text = located(str(complaint), *locate(complaint, files, arguments))
    text += _searched(text, files)
    return text if files else f"{text} (a YAML file is given with --config)"


def _searched(text: str, files: Sequence[ConfigFile]) -> str:
    """Say where a module was looked for that was not found."""
    if "No module named" not in text:
        return ""
    folders = ", ".join(folders_of_own_code(files))
    return f"; looked for it in the installed packages and in {folders}"


def located(sentence: str, location: str, key: str) -> str:
    """Put place and key before a sentence, as far as they are known."""
    return ": ".join(part for part in (location, key, sentence) if part)


def _end_refused(
    error: RefusedError, files: Sequence[ConfigFile], arguments: Sequence[str], *, debug: bool
) -> int:
    """End because a constructor raised, which jsonargparse reports as a failed validation."""
    report = error.__cause__
    assert report is not None
    sentence = str(read_complaint(str(report)))
    origin: BaseException | None = report
    while origin is not None and " ".join(str(origin).split()) != sentence:
        origin = origin.__cause__
    if origin is not None and not _is_about_arguments(origin):
        return _end_unexpected(origin)
    frames = [] if origin is None else [one for one, _ in traceback.walk_tb(origin.__traceback__)]
    # the innermost first
    classes = [
        type(frame.f_locals["self"]).__name__
        for frame in reversed(frames)
        if frame.f_code.co_name in {"__init__", "__post_init__"}
    ]
    text = located(sentence, *locate_refusal(sentence, classes, files, arguments))
    text += _searched(text, files)
    return _end(error, text, status=2, show=debug)


def _is_about_arguments(error: BaseException) -> bool:
    if isinstance(error, TypeError):  # the call itself failed, nothing inside the constructor
        return raised_in(error).startswith("jsonargparse.")
    return isinstance(error, ValueError | OSError | ImportError | MisconfigurationException)


def _end_unexpected(error: BaseException) -> int:
    text = f"unexpected {type(error).__name__}: {error}"
    return _end(error, text, status=1, show=True)


def configure_output(*, debug: bool) -> None:
    """Send our log messages of the first rank to stderr and quieten the rest.

    With ``debug`` other libraries are left alone, and our debug messages of every rank are shown.
    """
    package_logger = logging.getLogger("lrlhf")
    package_logger.handlers = [quiet_output.our_handler(debug=debug)]
    package_logger.setLevel(logging.DEBUG if debug else quiet_output.our_level())
    if not debug:
        _quieten_others()


def _quieten_others() -> None:
    for handler in quiet_output.noisy_handlers():
        handler.addFilter(quiet_output.DropNoise())
    # it writes to standard output, where a printed config is to be nothing else
    logging.getLogger("DeepSpeed").addFilter(quiet_output.DropNoise())
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    enable_progress_bars()  # the line above also hides downloads, which a person waits for
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    quiet_output.ignore_needless_warnings()
