"""How a command says why it ends; needs neither torch nor Lightning."""

from __future__ import annotations

import sys
import traceback

from lrlhf.secrets import safe


def say_error(error: BaseException, text: str, *, status: int, show: bool) -> int:
    """Write why a command ends, with ``show`` the traceback before it, and return ``status``."""
    if show:
        sys.stderr.write(safe("".join(traceback.format_exception(error))))
    told = "; ".join([text, *getattr(error, "__notes__", ())])
    sys.stderr.write(f"error: {safe(told)}\n")
    return status
