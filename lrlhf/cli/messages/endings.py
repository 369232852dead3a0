"""Ends a command with one clear message and an exit status, whatever was raised."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lrlhf.cli.config_files import ConfigFile, folders_of_own_code
from lrlhf.cli.messages.causes import explains_itself, raised_in
from lrlhf.cli.messages.errors import ConfigError, UserError, ValidationError
from lrlhf.cli.messages.locations import Complaint, locate, locate_refusal, read_complaint
from lrlhf.cli.messages.terminal import say_error as _end
from lrlhf.planning.checks.mistake import MistakeError, RefusedError
from lrlhf.run.supervision.signals import Terminated, checkpoint_to_continue


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
            return _end_late(error, files, arguments, debug=debug)
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


def located(sentence: str, place: str, key: str) -> str:
    """Put place and key before a sentence, as far as they are known."""
    return ": ".join(part for part in (place, key, sentence) if part)


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


def _end_late(
    error: UserError, files: Sequence[ConfigFile], arguments: Sequence[str], *, debug: bool
) -> int:
    """End because of what the user wrote, which only came up in the run."""
    cause = error.__cause__
    assert cause is not None
    text = str(cause).strip()
    place = locate_refusal(text.partition("\n")[0], [], files, arguments)
    text = located(text, *place) + _searched(text, files)
    return _end(cause, text, status=2, show=debug)


def _is_about_arguments(error: BaseException) -> bool:
    if isinstance(error, TypeError):  # the call itself failed, nothing inside the constructor
        return raised_in(error).startswith("jsonargparse.")
    return isinstance(error, ValueError | OSError | ImportError | MisconfigurationException)


def _end_unexpected(error: BaseException) -> int:
    text = f"unexpected {type(error).__name__}: {error}"
    return _end(error, text, status=1, show=True)
