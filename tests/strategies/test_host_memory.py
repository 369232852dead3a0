"""Memory that one pass has freed serves the next one without the system's help."""

import os
import platform
import sys
from pathlib import Path

import pytest

from tests.forked import run

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PASSES = """
import resource
import sys
from pathlib import Path
from lrlhf.run import keep_host_memory, return_host_memory
import torch
import lightning, transformers  # as in a run
count, size = map(int, sys.argv[1:])
blocks = lambda: [torch.zeros(size) for _ in range(count)]
asked = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
held = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
def later():
    for _ in range(4):  # glibc learns from the first ones
        blocks()
    before = asked()
    blocks()
    return asked() - before
empty = held()
kept = keep_host_memory()
pages, full = later(), held() - empty
return_host_memory()
print(kept, pages, full, held() - empty)
"""
BLOCKS = [(25, 2_000_000), (2, 25_000_000)]
"""How many, and of how many float32: 200 MB, below and above what glibc leaves to the system."""
BYTES = 200_000_000
PAGES = BYTES // 4096
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only"),
]


def passes(blocks: tuple[int, int], **environment: str) -> list[int]:
    """What `PASSES` prints."""
    names = [name for name in os.environ if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    plain = {name: os.environ[name] for name in names}
    command = [sys.executable, "-c", PASSES, *map(str, blocks)]
    ended = run(command, env={**plain, **environment}, capture_output=True, text=True, check=True)
    kept, *numbers = ended.stdout.splitlines()[-1].split()
    return [kept == "True", *map(int, numbers)]


@pytest.mark.parametrize("blocks", BLOCKS)
def test_memory_is_kept_and_then_given_back(blocks: tuple[int, int]) -> None:
    kept, pages, full, left = passes(blocks)
    assert kept
    assert pages < PAGES / 10
    assert full > BYTES * 0.9
    assert left < BYTES / 4


@pytest.mark.skipif(
    HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text(),
    reason="the system gives pages of 2 MB",
)
def test_a_setting_of_the_user_wins() -> None:
    # it is the default, so glibc gives large blocks to the system, and asks for them again
    kept, pages, *_ = passes(BLOCKS[1], MALLOC_PERTURB_="0")
    assert not kept
    assert pages > PAGES / 2
