"""What the terminal shows: our own progress, and little of what other libraries say."""

from __future__ import annotations

import logging
import warnings

from huggingface_hub.utils.tqdm import enable_progress_bars
from transformers.utils import logging as transformers_logging

from lrlhf.run.quiet_output import (
    DropNoise,
    ignore_needless_warnings,
    noisy_handlers,
    our_handler,
    our_level,
)


def configure_output(*, debug: bool) -> None:
    """Send our log messages of the first rank to stderr and quieten the rest.

    With ``debug`` other libraries are left alone, and our debug messages of every rank are shown.
    """
    ours = logging.getLogger("lrlhf")
    ours.handlers = [our_handler(debug=debug)]
    ours.setLevel(logging.DEBUG if debug else our_level())
    if not debug:
        _quieten_others()


def _quieten_others() -> None:
    for handler in noisy_handlers():
        handler.addFilter(DropNoise())
    # it writes to standard output, where a printed config is to be nothing else
    logging.getLogger("DeepSpeed").addFilter(DropNoise())
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    enable_progress_bars()  # the line above also hides downloads, which a person waits for
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    ignore_needless_warnings()
