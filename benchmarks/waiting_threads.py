"""What threads that spin while they wait cost and save, alone and beside another process.

    python benchmarks/waiting_threads.py --threads 2

OpenMP reads its settings when it is loaded, so each setting has a process of its own. They take
turns with an update (forward and backward pass of layers with the shapes of SmolLM2-135M) and with
the steps of a generation: alone, beside a process that keeps one core busy, and beside a twin that
takes updates with as many threads under the same setting. Shown are the shortest, the median and
the longest of the seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time

SETTINGS = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    **{
        f"spin {count}": {"GOMP_SPINCOUNT": str(count)}
        for count in (1000, 10_000, 30_000, 60_000, 100_000)
    },
}
NEIGHBOURS = ("alone", "one busy thread", "a twin")
WORKS = ("update", "generate")
WIDTH, INNER, HEADS = 576, 1536, 9


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--measured", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured:
        answer(options)
        return
    times = measure(options)
    for work, neighbour in itertools.product(WORKS, NEIGHBOURS):
        print(f"{work}, {neighbour}:")  # noqa: T201
        for setting in options.settings:
            found = times[setting, neighbour, work]
            shown = (min(found), statistics.median(found), max(found))
            print(f"  {setting:<12}" + "".join(f"{s:8.3f} s" for s in shown))  # noqa: T201


def measure(options: argparse.Namespace) -> dict[tuple[str, str, str], list[float]]:
    """Have all settings take turns."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    busy.send_signal(signal.SIGSTOP)
    workers = {name: start(name, options) for name in options.settings}
    twins = {name: int(read(worker)) for name, worker in workers.items()}
    times: dict[tuple[str, str, str], list[float]] = {}
    try:
        for turn in range(-1, options.rounds):
            first = turn % len(options.settings)
            names = options.settings[first:] + options.settings[:first]
            for neighbour, name in itertools.product(NEIGHBOURS, names):
                beside = {"one busy thread": busy.pid, "a twin": twins[name]}.get(neighbour)
                for work, seconds in beside_another(workers[name], beside).items():
                    if turn >= 0:  # the first one warms up
                        times.setdefault((name, neighbour, work), []).append(seconds)
    finally:
        for pid in (busy.pid, *twins.values()):
            os.kill(pid, signal.SIGKILL)
        for worker in workers.values():
            worker.kill()
    return times


def beside_another(worker: subprocess.Popen[str], other: int | None) -> dict[str, float]:
    """Measure a process while another one goes on, which is stopped before and after."""
    if other is not None:
        os.kill(other, signal.SIGCONT)
    times = {}
    for work in WORKS:
        assert worker.stdin is not None
        worker.stdin.write(f"{work}\n")
        worker.stdin.flush()
        times[work] = float(read(worker))
    if other is not None:
        os.kill(other, signal.SIGSTOP)
    return times


def start(setting: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start this script with a setting."""
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, __file__, "--measured"]
    command += ["--threads", str(options.threads), "--layers", str(options.layers)]
    return subprocess.Popen(
        command,
        env=environment | SETTINGS[setting],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read(worker: subprocess.Popen[str]) -> str:
    """Read a line."""
    assert worker.stdout is not None
    return worker.stdout.readline()


def answer(options: argparse.Namespace) -> None:
    """Do the work that lines of the standard input name, and print its seconds."""
    import torch  # noqa: PLC0415  the process that compares has no threads of its own

    twin = os.fork()  # before there are threads
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shapes = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER))
    layers = [
        [torch.randn(shape).mul_(0.02).requires_grad_() for shape in shapes]
        for _ in range(options.layers)
    ]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for mix, out, up, down in layers:
            q, k, v = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for part in (torch.rms_norm(x, (WIDTH,)) @ mix.T).chunk(3, -1)
            )
            read = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + read.transpose(1, 2).flatten(2) @ out.T
            gate, value = (torch.rms_norm(x, (WIDTH,)) @ up.T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * value) @ down.T
        return x

    rows, tokens = torch.randn(4, 64, WIDTH), torch.randn(4, 1, WIDTH)

    def update() -> None:
        forward(rows).square().mean().backward()

    @torch.no_grad()
    def generate() -> None:
        for _ in range(16):
            forward(tokens)

    if not twin:
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            update()
    print(twin, flush=True)  # noqa: T201
    works = {"update": update, "generate": generate}
    for line in sys.stdin:
        began = time.perf_counter()
        works[line.strip()]()
        print(time.perf_counter() - began, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
