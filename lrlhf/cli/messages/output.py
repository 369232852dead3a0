"""What the terminal shows: our own progress, and little of what other libraries say."""

from __future__ import annotations

import logging
import sys
import warnings

from huggingface_hub.utils.tqdm import enable_progress_bars
from lightning.fabric.utilities.rank_zero import rank_zero_only
from transformers.utils import logging as transformers_logging

from lrlhf.secrets import safe

_NOISE = (
    *("💡 Tip", "GPU available: False", "TPU available", "HPU available", "Seed set to"),
    *("Setting accelerator to CPU", "`Trainer("),
)


class _DropNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NOISE)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def configure_output(*, debug: bool) -> None:
    """Send our log messages of the first rank to stderr and quieten the rest.

    With ``debug`` other libraries are left alone, and our debug messages of every rank are shown.
    """
    handler = logging.StreamHandler(sys.stderr)
    # which file says it, matters to who looks for a bug in it
    shown = "%(asctime)s %(name)s: %(message)s" if debug else "%(asctime)s %(message)s"
    handler.setFormatter(_SafeFormatter(shown, "%H:%M:%S"))
    ours = logging.getLogger("lrlhf")
    ours.handlers = [handler]
    first = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # Lightning puts it there
    quiet = logging.INFO if first else logging.ERROR
    ours.setLevel(logging.DEBUG if debug else quiet)
    if not debug:
        _quieten_others()


def _quieten_others() -> None:
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_DropNoise())
    # it writes to standard output, where a printed config is to be nothing else
    logging.getLogger("DeepSpeed").addFilter(_DropNoise())
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    enable_progress_bars()  # the line above also hides downloads, which a person waits for
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # rows are tokenised once, so no workers are needed; modules choose their models' modes
    for message in (".*does not have many workers", r"Found \d+ module\(s\) in eval mode"):
        warnings.filterwarnings("ignore", message=message)
