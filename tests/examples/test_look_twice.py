"""Pages of examples/look_twice.py cannot be answered at one look, and training learns to look."""

from collections import Counter
from pathlib import Path

import look_twice
import numpy as np
import pytest
from PIL import Image

ROWS = [*look_twice.Pages(400).rows()]


def test_a_thumbnail_says_where_to_look_and_not_what_is_there() -> None:
    shown = {tuple(look_twice.drawn(row["page"])[1]) for row in ROWS}
    assert len(shown) == 32  # two colours, and any pattern on either side
    for row in ROWS[:100]:
        pixels, names, tile = look_twice.drawn(row["page"])
        assert row["answer"] == names[tile]
        thumbnail = row["prompt"][0]["content"][0]["image"]
        assert thumbnail.shape == (16, 32, 3)
        for side in range(2):
            crop = np.asarray(look_twice.crop(pixels, side))
            np.testing.assert_array_equal(crop, pixels[:, 32 * side : 32 * (side + 1)])
            half = thumbnail[:, 16 * side : 16 * (side + 1)]
            assert np.ptp(half.reshape(-1, 3), axis=0).tolist() == [0, 0, 0]
        # red asks about the left one, blue about the right one
        assert (thumbnail[..., 0] > thumbnail[..., 2]).all() == (tile == 0)
    most = Counter(row["answer"] for row in ROWS).most_common(1)[0][1]
    assert most / len(ROWS) < 0.2  # an eighth


def test_nothing_is_left_of_a_blind_page_but_its_answer() -> None:
    rows = [*look_twice.Pages(50, blind=True).rows()]
    assert [row["answer"] for row in rows] == [row["answer"] for row in ROWS[:50]]
    assert len({row["prompt"][0]["content"][0]["image"].tobytes() for row in rows}) == 1
    environment = look_twice.LookTwice()
    for row in rows:
        environment.reset(row["page"])
        assert {environment.crop(tile).tobytes() for tile in range(2)} == {
            Image.new("RGB", (32, 32), (128, 128, 128)).tobytes()
        }


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_policy_learns_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["look_twice", "--seed", "1"])
    look_twice.main()
    metrics = (tmp_path / "runs/look_twice_1/transformers/metrics.csv").read_text().splitlines()
    column = metrics[0].split(",").index("eval/score")
    scores = [row.split(",")[column] for row in metrics[1:]]
    assert float([score for score in scores if score][-1]) > 0.9  # cropping any tile: 0.625
