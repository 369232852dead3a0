"""How long fuzzing goes on, and what may come out of it.

The same cases are drawn every time, so that a failure of the pipeline is one of the change that it
belongs to. ``LRLHF_FUZZ_EXAMPLES=5000`` draws so many, and others each time.
"""

import os
import traceback
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

Test = TypeVar("Test", bound=Callable[..., None])

_WANTED = os.environ.get("LRLHF_FUZZ_EXAMPLES", "")


def fuzzing(examples: int) -> Callable[[Test], Test]:
    """Run a test on ``examples`` drawn cases, or on as many as the environment asks for."""
    return settings(
        max_examples=int(_WANTED) if _WANTED else examples,
        derandomize=not _WANTED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def assert_told(error: BaseException, *culprits: str) -> None:
    """An error that the command line shows as one line: raised by this library, with a culprit."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = str(frames[-1].f_globals.get("__name__", ""))
    assert isinstance(error, ValueError), f"{error!r} from {where}"
    ours = type(error).__module__.startswith("lrlhf.") or where.startswith("lrlhf.")
    assert ours, f"{error!r} from {where}"
    assert any(culprit in str(error) for culprit in culprits), str(error)
