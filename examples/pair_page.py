"""Pairs of images as a reward model judged them, on one page for people: a callback of one's own.

    lrlhf fit --config lrlhf:reward_vl --data.train pairs.jsonl

It reads what a reward model's validation returns, and a config names it by its class path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from PIL import Image, ImageDraw, ImageOps

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.eval_jsonl import is_evaluation
from lrlhf.callbacks.output_files import atomic_write, hold_output_folder, output_folder
from lrlhf.callbacks.reports.curves import picture
from lrlhf.run.seeding import model_step
from lrlhf.types import PreferenceBatch

_RIGHT, _WRONG, _OPEN = "#3a8a4d", "#b3261e", "#555555"
_COLUMNS = 4
_SIDE, _GAP, _LINE = 160, 8, 14
"""Pixels of a picture, between two of them, and of a line of text."""
_BEST = {1.0: "left", -1.0: "right", 0.0: "equal"}


_Pair = tuple[Image.Image, Image.Image, list[tuple[str, str]]]
"""The pictures side by side, and text and colour of each line below them."""


class PairPage(KeepsArguments, L.Callback):
    """Draws pairs of images or videos of each evaluation to ``eval_pairs_{step}.png``.

    Below each pair stands, for every head, what people prefer and both scores: green where the
    scores agree with them, red where not. The first image, or the first frame of a video, stands
    for each candidate. Pairs of texts are left out. Rank zero draws its own pairs.

    Args:
        dirpath: Folder of the pages; None: the run folder.
        pairs: Pairs on a page, the first ones of the validation set.
    """

    def __init__(self, dirpath: str | Path | None = None, pairs: int = 24) -> None:
        if pairs < 1:
            raise ValueError(f"PairPage pairs is {pairs}; it must be at least 1")
        self.dirpath = dirpath
        self.pairs = pairs
        self._pairs: list[_Pair] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        hold_output_folder(trainer, self.dirpath, stage)

    def on_validation_start(self, *_: Any) -> None:
        self._pairs = []

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(batch, PreferenceBatch) or not trainer.is_global_zero:
            return
        media = zip(batch.candidate0.media or (), batch.candidate1.media or (), strict=True)
        rows = zip(media, outputs["records"], batch.labels.tolist(), strict=False)
        for (left, right), record, labels in rows:
            if left is not None and right is not None and len(self._pairs) < self.pairs:
                self._pairs.append((picture(left), picture(right), _lines(record, labels)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._pairs and is_evaluation(trainer):
            name = f"eval_pairs_{model_step(trainer)}.png"
            draw_pairs(output_folder(trainer, self.dirpath) / name, self._pairs)


def draw_pairs(path: Path, pairs: Sequence[_Pair]) -> None:
    """Write a PNG with the pairs side by side, and what is told of each below it."""
    columns = min(_COLUMNS, len(pairs))
    width = 2 * (_SIDE + _GAP) + _GAP
    height = _SIDE + 2 * _GAP + _LINE * max(len(lines) for _, _, lines in pairs)
    size = (columns * width, math.ceil(len(pairs) / columns) * height)
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    for index, (first, second, lines) in enumerate(pairs):
        row, column = divmod(index, columns)
        left, top = column * width + _GAP, row * height + _GAP
        for one, x in ((first, left), (second, left + _SIDE + _GAP)):
            shown = ImageOps.pad(one.convert("RGB"), (_SIDE, _SIDE), color="white")
            page.paste(shown, (x, top))
        for number, (text, colour) in enumerate(lines):
            draw.text((left, top + _SIDE + _LINE * number), text, fill=colour, font_size=11)
    with atomic_write(path) as handle:
        page.save(handle, format="PNG")


def _lines(record: Mapping[str, Any], labels: Sequence[float]) -> list[tuple[str, str]]:
    lines = []
    heads = zip(record["scores0"].items(), record["scores1"].values(), labels, strict=True)
    for (head, first), second, label in heads:
        best = _BEST.get(label, "not labelled")
        right = (first - second) * label > 0
        colour = _OPEN if label not in (1.0, -1.0) else _RIGHT if right else _WRONG
        lines.append((f"{head}: {best}   {first:.2f} | {second:.2f}", colour))
    return lines
