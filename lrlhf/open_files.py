"""How many files, and so connections, this process may have open."""

from __future__ import annotations

import resource
from typing import Final

_MOST_FILES: Final = 65_536


def allow_connections() -> None:
    """Have the system allow as many as it may, for hundreds of connections at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
