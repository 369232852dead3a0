"""Parent process of the guard of a Ray worker's program, see `guarded_program.py`.

A script:

    python guard_parent.py WORKER GUARD GRACE COMMAND...

WORKER is the process id of the parent. It ends when the parent is gone, or with the guard's status.
A guard that is killed could end nothing: what it leaves is ended here.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence

_LOOK_SECONDS = 0.2


def main(worker: int, guard: str, rest: Sequence[str]) -> int:
    """Start the guard, for which this process is the one to look at, and wait."""
    guarding = runpy.run_path(guard)  # by its path, as `lrlhf.apps.cluster.guarded_program` says
    guarding["adopt_orphans"]()
    started = subprocess.Popen([sys.executable, "-P", guard, str(os.getpid()), *rest])
    while (code := started.poll()) is None:
        if os.getppid() != worker:
            return 1  # which the guard notices
        time.sleep(_LOOK_SECONDS)
    if code >= 0:
        return code
    guarding["end_descendants"](float(rest[0]))
    return 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
