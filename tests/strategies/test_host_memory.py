"""Memory that one pass has freed serves the next one without the system's help."""

import os
import subprocess
import sys

import pytest

PASSES = """
import resource
from lrlhf.strategies import keep_host_memory
import torch
print(keep_host_memory())
blocks = lambda: [torch.zeros(2_000_000) for _ in range(25)]  # 200 MB in blocks of 8 MB
for _ in range(4):  # glibc learns from the first ones
    blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def passes(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and the pages that a later pass had to ask for."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told = subprocess.run(
        [sys.executable, "-c", PASSES],
        env={**plain, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, pages = told.stdout.split()[-2:]
    return kept, int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_memory_is_kept_unless_the_user_has_said_otherwise() -> None:
    pages = 200_000_000 // 4096
    kept, asked = passes()
    assert kept == "True"
    assert asked < pages / 10
    # the default of glibc, said aloud
    kept, asked = passes(MALLOC_TRIM_THRESHOLD_=str(2**26))
    assert kept == "False"
    assert asked > pages / 2
