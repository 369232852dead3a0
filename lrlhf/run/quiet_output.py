"""What other libraries say while we work, and how our own log messages look."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from transformers.utils import logging as transformers_logging

from lrlhf.secrets import safe

_NOISE = (
    *("💡 Tip", "GPU available: False", "TPU available", "HPU available", "Seed set to"),
    *("Setting accelerator to CPU", "`Trainer("),
)
_OF_RANK = re.compile(r"^\[rank: \d+\] ")
"""What Lightning puts before messages of several processes."""
_NOISY = ("lightning", "lightning.fabric", "lightning.pytorch")
_DEEPSPEED = "DeepSpeed"
# rows are tokenised once, so no workers are needed; modules choose their models' modes
_NEEDLESS = (
    *(".*does not have many workers", r"Found \d+ module\(s\) in eval mode"),
    "You defined a `validation_step` but have no `val_dataloader`",
)
_OTHERS = r"(lightning|torch|torchmetrics|transformers|peft|datasets|huggingface_hub)\b"


class DropNoise(logging.Filter):
    """Lets through what a user of this library can do something about."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _OF_RANK.sub("", record.getMessage()).startswith(_NOISE)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def our_handler(*, debug: bool = False) -> logging.Handler:
    """Return what writes our log messages to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    # which file says it, matters to who looks for a bug in it
    shown = "%(asctime)s %(name)s: %(message)s" if debug else "%(asctime)s %(message)s"
    handler.setFormatter(_SafeFormatter(shown, "%H:%M:%S"))
    return handler


def our_level() -> int:
    """Return from which level on this rank logs."""
    first = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # Lightning puts it there
    return logging.INFO if first else logging.ERROR


def noisy_handlers() -> list[logging.Handler]:
    """Return where Lightning's remarks come out."""
    return [handler for name in _NOISY for handler in logging.getLogger(name).handlers]


def ignore_needless_warnings() -> None:
    """Ignore warnings that are about nothing a user of this library can choose."""
    for message in _NEEDLESS:
        warnings.filterwarnings("ignore", message=message)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, and not those of downloads."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    downloads = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if not downloads:
            disable_progress_bars()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep other libraries' remarks out of a notebook or script, and show our log messages.

    All of it is undone at the end. Warnings and log messages of the user's own code come through.
    Where our logger is set up already, as by the command line or by the user, and where
    ``LRLHF_DEBUG`` is set, nothing changes.
    """
    package_logger = logging.getLogger("lrlhf")
    debugs = os.environ.get("LRLHF_DEBUG", "") not in {"", "0"}
    if debugs or package_logger.handlers or package_logger.level != logging.NOTSET:
        yield
        return
    noise, handler = DropNoise(), our_handler()
    noisy: list[logging.Filterer] = [*noisy_handlers(), logging.getLogger(_DEEPSPEED)]
    shown_already = package_logger.hasHandlers()
    try:
        for noisy_logger in noisy:
            noisy_logger.addFilter(noise)
        if not shown_already:
            package_logger.addHandler(handler)
        package_logger.setLevel(our_level())
        with warnings.catch_warnings(), _without_bars():
            ignore_needless_warnings()
            for category in (FutureWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", category=category, module=_OTHERS)
            yield
    finally:
        for each in noisy:
            each.removeFilter(noise)
        package_logger.removeHandler(handler)
        package_logger.setLevel(logging.NOTSET)
