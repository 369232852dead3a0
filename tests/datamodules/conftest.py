"""Small files of rows, and a module that only remembers what it was fed."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

WriteRows = Callable[..., str]


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write rows as JSON lines; a row that is text is written as it is."""

    def write(rows: Iterable[Mapping[str, Any] | str], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


def numbered_prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {number}", "number": number} for number in range(count)]


class Remembers(L.LightningModule):
    """Manual optimization; keeps the row numbers of every train and validation batch."""

    def __init__(self, *, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.validated: list[list[int]] = []
        self.ask_for_steps = ask_for_steps

    def training_step(self, batch: Any, index: int) -> None:
        self.optimizers().step()
        self.seen.append([columns["number"] for columns in batch.columns])

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append([columns["number"] for columns in batch.columns])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)
