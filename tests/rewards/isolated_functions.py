"""Reward functions that behave badly on purpose; nothing heavy is imported here."""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil


def lengths(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def brightness(images: Sequence[Sequence[Any]]) -> list[float]:
    """Mean brightness of the images in order, as the digits of a number in base 256."""
    return [
        sum(
            256 ** (len(shown) - 1 - place) * fmean(image.convert("L").tobytes())
            for place, image in enumerate(shown)
        )
        for shown in images
    ]


def doubled_values(rewards: dict[str, list[float]]) -> list[float]:
    return [2 * value for value in rewards["numbers"]]


def about(
    completions: Sequence[str], answer: Sequence[Any], log_metric: Any, log_extra: Any
) -> Any:
    log_metric("half", 0.5)
    log_extra("shown", [f"{text}:{value}" for text, value in zip(completions, answer, strict=True)])
    return [float(value) for value in answer]


def logs_wrongly(completions: Sequence[str], log_metric: Any, log_extra: Any) -> list[float]:
    """Log what cannot be logged, and go on."""
    for log, name, value in [
        (log_metric, "nan", float("nan")),
        (log_metric, "too large", 1e39),
        (log_extra, "too few", ["a"] * (len(completions) - 1)),
    ]:
        try:
            log(name, value)
        except ValueError as error:
            log_extra(name, [str(error)] * len(completions))
    return lengths(completions)


async def halves(completions: Sequence[str]) -> list[float]:
    await asyncio.sleep(0)
    return [0.5] * len(completions)


class Scaled:
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [self.factor * len(text) for text in completions]


def surroundings(completions: Sequence[str], log_extra: Any) -> list[float]:
    seen = {"cwd": str(Path.cwd()), "env": dict(os.environ), "pid": os.getpid()}
    log_extra("seen", [seen] * len(completions))
    return [0.0] * len(completions)


def returns(completions: Sequence[str]) -> Any:
    """Return what the first completion names."""
    return {"an object": [object(), 1.0], "short": [1.0], "huge": [1.0] * 10**6}[completions[0]]


# what a single completion does to its process


def _loop() -> None:
    while True:
        pass


def _eat() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(2**26))


def _print() -> None:
    sys.stdout.write('{"values": [9.0]}\n' * 1000)
    sys.stderr.write("to the errors")
    os.write(1, b"\n{}\n" * 100_000)


def _asker() -> int:
    """Process id of who asks: the parent is its guard."""
    return psutil.Process(os.getppid()).ppid()


def _abandon() -> None:
    """Leave a grandchild behind, then hang."""
    sleeping = f"import time; time.sleep(20)  # of {_asker()}"
    subprocess.Popen([sys.executable, "-c", sleeping])
    _loop()


def _hide() -> None:
    """Leave a daemon behind: in a session of its own, and nobody's child; then hang."""
    sleeping = f"import time; time.sleep(20)  # of {_asker()}"
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", sleeping], start_new_session=True)
        os._exit(0)
    os.wait()
    _loop()


def _spoil_replies() -> None:
    """Write into every pipe that there is."""
    for end in range(3, 256):
        try:
            os.write(end, b'{"values": "mine"}\n')
        except OSError:
            continue


ACTS = {
    "loop": _loop,
    "eat": _eat,
    "segfault": lambda: ctypes.string_at(0),
    "sys.exit": lambda: sys.exit(3),
    "print": _print,
    "abandon": _abandon,
    "hide": _hide,
    "spoil": _spoil_replies,
    "close": lambda: os.closerange(0, 256),
    "kill group": lambda: os.killpg(0, 9),
}


def acting(completions: Sequence[str]) -> list[float]:
    """Do what a completion names, and score the others by their length."""
    for text in completions:
        if text in ACTS:
            ACTS[text]()
    return lengths(completions)


def forks(completions: Sequence[str]) -> list[float]:
    """Come back twice, once in a fork."""
    os.fork()
    return lengths(completions)


def answers_twice(completions: Sequence[str]) -> list[float]:
    """Answer once more than the library does, as if it were the reply to the next request."""
    scores = {"values": [99.0] * len(completions), "metrics": [], "extras": {}, "number": 1}
    os.write(int(sys.argv[2]), f"{json.dumps(scores)}\n".encode())
    time.sleep(2)
    return lengths(completions)


def slow_together(completions: Sequence[str]) -> list[float]:
    time.sleep(0.4 * (len(completions) - 1))
    return lengths(completions)


def cut_off(truncated: Sequence[bool]) -> list[float]:
    return [float(one) for one in truncated]


def how_far(step: Sequence[int], max_steps: Sequence[int]) -> list[float]:
    """Share of the run that is done."""
    return [now / last for now, last in zip(step, max_steps, strict=True)]
