"""A config that works, in an empty folder, and the terminal as it was afterwards."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFIG = """\
model:
  class_path: ToyModule
  init_args:
    policy:
      source: tiny
    lr: 0.1
data:
  class_path: ToyData
  init_args:
    train: prompts.jsonl
trainer:
  max_steps: 1
  accelerator: cpu
  callbacks:
    - class_path: ModelCheckpoint
      init_args:
        dirpath: checkpoints
        save_last: true
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
"""


@pytest.fixture(autouse=True)
def _own_folder_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LRLHF_DEBUG", raising=False)
    logger = logging.getLogger("lrlhf")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(CONFIG)
    return path
