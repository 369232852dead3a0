"""Prompts that every run of a policy module can answer."""

from pathlib import Path

import pytest


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [f'{{"prompt": "say {word}", "answer": "{word}"}}' for word in "abcdefghijklmnop"]
    path.write_text("\n".join(lines))
    return path
