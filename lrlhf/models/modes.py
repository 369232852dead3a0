"""How modules run: in train or eval mode, compiled or as they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import nn

_trying: ContextVar[bool] = ContextVar("trying", default=False)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and each of its modules back into the mode it was in."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Run modules as they are written: nothing is compiled for what is computed once."""
    token = _trying.set(True)
    try:
        yield
    finally:
        _trying.reset(token)


def in_trial() -> bool:
    """Tell whether this thread runs modules as they are written, see `trial`."""
    return _trying.get()
