"""Memory that one pass has freed serves the next one without the system's help."""

import os
import subprocess
import sys

import pytest

PASSES = """
import resource
import sys
from pathlib import Path
from lrlhf.strategies import keep_host_memory, return_host_memory
import torch
print(keep_host_memory())
count, size = map(int, sys.argv[1:])
blocks = lambda: [torch.zeros(size) for _ in range(count)]
for _ in range(4):  # glibc learns from the first ones
    blocks()
asked = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = asked()
blocks()
held = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
print(asked() - before)
full = held()
return_host_memory()
print(full - held())
"""


BLOCKS = [(25, 2_000_000), (2, 25_000_000)]
"""How many, and of how many float32: 200 MB, in what glibc manages and in what the system does."""


def passes(blocks: tuple[int, int], **environment: str) -> tuple[str, int, int]:
    """Whether memory is kept, the pages that a later pass asked for, the bytes given back."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = subprocess.run(
        [sys.executable, "-c", PASSES, *map(str, blocks)],
        env={**plain, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, pages, returned = told.stdout.split()[-3:]
    return kept, int(pages), int(returned)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
@pytest.mark.parametrize("blocks", BLOCKS)
def test_memory_is_kept_until_the_end_unless_the_user_has_said_otherwise(
    blocks: tuple[int, int],
) -> None:
    pages = 200_000_000 // 4096
    kept, asked, returned = passes(blocks)
    assert kept == "True"
    assert asked < pages / 10
    assert returned > 190_000_000
    # the default of glibc, said aloud
    kept, asked, _ = passes(blocks, MALLOC_TRIM_THRESHOLD_=str(2**26))
    assert kept == "False"
    assert asked > pages / 2
