"""How long threads of OpenMP spin while they wait for each other; read once, when torch is loaded.

Nothing outside the standard library may be imported here, see `lrlhf.__main__`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

_SPINS: Final = "10000"
"""Less than half a millisecond. libgomp's own 300,000 hold a core for thirty times as long, which
costs nothing alone, and several times the computation where another process has work for that core;
without any spinning each wait ends with a call of the system (docs/performance.md)."""
_POLICY: Final = "OMP_WAIT_POLICY"
_COUNT: Final = "GOMP_SPINCOUNT"


def spin_briefly() -> None:
    """Have waiting threads of this process and its children leave their cores to others soon.

    A setting of the user's wins. Other libraries than GNU's (libiomp5) do not read this one.
    """
    if not {_POLICY, _COUNT} & os.environ.keys():
        os.environ[_COUNT] = _SPINS


def spin_not_at_all(environment: MutableMapping[str, str]) -> None:
    """Have waiting threads of a process that shares its cores with this one sleep.

    Args:
        environment: Of that process; a setting of the user's in it wins.
    """
    if environment.get(_COUNT) == _SPINS:
        del environment[_COUNT]  # it would win over the policy
    environment.setdefault(_POLICY, "PASSIVE")
