"""How modules run: in train or eval mode, compiled or as they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import nn

_trying: ContextVar[bool] = ContextVar("trying", default=False)


class ModelRefusalError(RuntimeError):
    """A model's code does not take inputs that it was not written for."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise `ModelRefusalError` for what a model's code raises; lack of memory is no refusal."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelRefusalError(f"{type(error).__name__}: {error}") from error


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
