"""An RLOO update beside k processes that never wait, with each number of threads.

A scheduler that shares cores fairly gives a process of t threads t parts of k + t. What a step
takes beyond that is waiting: every product ends when its last thread ends, and a thread that has to
wait for a core holds up the others. lrlhf itself does not adapt the number of threads to the load:
sums would be split in other places, and a resumed run would not have the same bits.

    python -m benchmarks.busy_machine [--busy 0 1 2 4] [--threads 1 2] [--policy PASSIVE ACTIVE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.growth import BASE

HERE = Path(__file__).resolve().parent
_POINT = json.dumps(BASE)


def main() -> None:
    """Print a table of seconds, and of times what the same work takes on the idle machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--policy", nargs="+", default=["PASSIVE"], help="OMP_WAIT_POLICY")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    _say("| busy processes | threads | waiting threads | seconds | times idle | times its share |")
    _say("|---:|---:|---|---:|---:|---:|")
    for policy in options.policy:
        idle: dict[int, float] = {}
        for busy in options.busy:
            for threads in options.threads:
                with _busy(busy):
                    seconds = _step(threads, policy, options.steps)
                idle.setdefault(threads, seconds)
                slower = seconds / idle[threads]
                share = max(1.0, (busy + threads) / cores)
                _say(
                    f"| {busy} | {threads} | {policy.lower()} | {seconds:.2f} | {slower:.1f} "
                    f"| {slower / share:.2f} |"
                )


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _step(threads: int, policy: str, steps: int) -> float:
    done = subprocess.run(
        [*(sys.executable, "-m", "benchmarks.growth", "--steps", str(steps)), "--point", _POINT],
        cwd=HERE.parent,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1])[0])


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
