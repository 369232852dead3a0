"""What happens on rank zero is told to every rank."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from lrlhf.run.collectives import from_rank_zero


class Unreadable(Exception):  # noqa: N818  the name says what it is to another process
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


def outcomes(error: Exception) -> list[Exception]:
    """What each of two ranks raises where rank zero's function raises an error."""
    sent: list[bytes] = []

    def send(value: Any) -> Any:
        sent.append(pickle.dumps(value))
        return value

    def fail() -> None:
        raise error

    raised = []
    for first, broadcast in ((True, send), (False, lambda _: pickle.loads(sent[0]))):
        strategy: Any = SimpleNamespace(is_global_zero=first, broadcast=broadcast)
        with pytest.raises(Exception) as caught:  # noqa: PT011  compared by the test
            from_rank_zero(strategy, fail)
        raised.append(caught.value)
    return raised


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(28, "no space"), OSError, "[Errno 28] no space"),
        (KeyError("state"), KeyError, "'state'"),
        (Unreadable("x.ckpt", 3), RuntimeError, "Unreadable: x.ckpt:3"),
        (RuntimeError(lambda: None), RuntimeError, "RuntimeError: <function "),
    ],
)
def test_every_rank_raises_what_rank_zero_met(
    error: Exception, kind: type[Exception], text: str
) -> None:
    first, second = outcomes(error)
    assert first is error
    assert type(second) is kind
    assert str(second).startswith(text)
