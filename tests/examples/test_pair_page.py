"""The page of pairs that a reward model judged."""

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from pair_page import PairPage, _lines
from PIL import Image
from torch.utils.data import DataLoader

from lrlhf.callbacks.reports.curves import picture
from lrlhf.media import Audio
from lrlhf.types import Media, PreferenceBatch, SequenceBatch
from tests.callbacks.fakes import trainer


def candidates(*levels: int | None) -> SequenceBatch:
    """Each with a picture of one grey level, or none."""
    ids = torch.zeros(len(levels), 2, dtype=torch.long)
    mask = torch.ones_like(ids, dtype=torch.bool)
    pictures = [
        None if level is None else Image.new("RGB", (24, 24), (level,) * 3) for level in levels
    ]
    media = tuple(
        picture and Media(tensors={}, tokens={"image": 1}, images=(picture,))
        for picture in pictures
    )
    return SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask, media=media)


class Judge(L.LightningModule):
    def validation_step(self, given: PreferenceBatch, batch_idx: int) -> dict[str, object]:
        record = {"info": {}, "scores0": {"good": 1.0}, "scores1": {"good": 0.25}}
        return {"records": [record] * len(given)}


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*batch_size")
def test_a_page_holds_the_first_pairs_of_the_validation_set(tmp_path: Path) -> None:
    batch = PreferenceBatch(
        candidate0=candidates(10, None, 30),
        candidate1=candidates(240, None, 220),
        labels=torch.tensor([[1.0]] * 3),
        info=({},) * 3,
    )
    loader = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    trainer(tmp_path, PairPage(pairs=3)).validate(Judge(), loader, verbose=False)
    drawn = np.asarray(Image.open(tmp_path / "eval_pairs_0.png").convert("L"))
    for level in (10, 240, 30, 220):
        # each picture is a large area of its one grey level
        assert (drawn == level).sum() > 5000


def test_sounds_are_drawn_as_waveforms() -> None:
    samples = np.concatenate([np.zeros(4000), 0.25 * np.ones(4000), -0.5 * np.ones(4000)])
    audio = Audio(samples.astype(np.float32), 16_000)
    shown = picture(Media(tensors={}, tokens={"audio": 6}, audios=(audio,)))
    drawn = np.asarray(shown.convert("L"))
    height, width = drawn.shape
    # the middle of each third: silence in the middle, then above it, then at the very bottom
    heights = [np.flatnonzero(drawn[:, place * width // 6] < 128) / height for place in (1, 3, 5)]
    for found, expected in zip(heights, (0.5, 0.25, 1.0), strict=True):
        assert found.mean() == pytest.approx(expected, abs=0.02)


def test_scores_are_green_where_people_agree_and_red_where_not() -> None:
    record = {
        "scores0": {"a": 2.0, "b": 2.0, "c": 2.0, "d": 2.0, "e": 2.0},
        "scores1": {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 2.0},
    }
    lines = _lines(record, [1.0, -1.0, 0.0, float("nan"), 1.0])
    right, wrong, tie, missing, undecided = (colour for _, colour in lines)
    assert len({right, wrong, tie}) == 3
    assert missing == tie
    assert undecided == wrong
    for (text, _), best in zip(lines, ("left", "right", "equal", "not labelled"), strict=False):
        assert text.partition(": ")[2] == f"{best}   2.00 | 1.00"


def test_a_page_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="PairPage pairs is 0; it must be at least 1"):
        PairPage(pairs=0)
