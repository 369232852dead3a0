"""Bad images are planted among good ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import soundfile
from PIL import Image

from lrlhf.apps.lab.audit import audit
from lrlhf.datamodules import PromptDataModule
from lrlhf.media import MediaOptions
from tests.datamodules.conftest import Rows, vlm
from tests.hearing import RATE, build_hearing, tone


def picture(folder: Path, name: str, size: tuple[int, int], level: int) -> str:
    Image.new("1" if max(size) > 1000 else "L", size, level).save(folder / name)
    return name


def test_images_that_are_missing_damaged_tiny_or_huge_are_found(tmp_path: Path) -> None:
    (tmp_path / "damaged.png").write_bytes(b"no image")
    images = {
        "good": picture(tmp_path, "good.png", (56, 28), 1),
        "other": picture(tmp_path, "other.png", (56, 28), 2),
        "missing": "missing.png",
        "damaged": "damaged.png",
        "tiny": picture(tmp_path, "tiny.png", (100, 15), 3),
        "huge": picture(tmp_path, "huge.png", (5000, 5001), 1),
    }
    names = list(images)
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": "What is in this picture?"}], "image": image}
        for image in images.values()
    ]
    data = PromptDataModule(
        Rows(rows, "rows.jsonl", folder=tmp_path), media=MediaOptions(check="files")
    )
    beside = SimpleNamespace(tokenizer=vlm().tokenizer, processor=vlm().processor)

    found = audit(data, beside)

    # the same question about another picture is no duplicate
    said = {
        finding.name: {names[int(row.place.rpartition(":")[2]) - 1] for row in finding.rows}
        for finding in found.findings
    }
    assert said == {
        "bad media": {"missing", "damaged"},
        "tiny images": {"tiny"},
        "huge images": {"huge"},
    }
    (tiny,) = [one for one in found.findings if one.name == "tiny images"]
    assert tiny.rows[0].detail.endswith("tiny.png: 100 x 15")
    assert (tiny.count, tiny.of) == (1, 6)


def test_a_missing_video_is_found(tmp_path: Path) -> None:
    frames = [picture(tmp_path, f"{at}.png", (56, 28), at) for at in range(4)]
    rows = [
        {"prompt": [{"role": "user", "content": "What happens?"}], "video": video}
        for video in (frames, "missing.mp4")
    ]
    assert bad_rows(rows, vlm(), tmp_path) == {2: "missing.mp4"}


def test_a_damaged_sound_is_found(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "good.wav", tone(440), RATE)
    whole = (tmp_path / "good.wav").read_bytes()
    (tmp_path / "damaged.wav").write_bytes(b"RIFX" + whole[4:])
    rows = [
        {"prompt": [{"role": "user", "content": "Which tone is it?"}], "audio": name}
        for name in ("good.wav", "damaged.wav", "gone.wav")
    ]
    found = bad_rows(rows, build_hearing(), tmp_path)
    assert found == {2: "damaged.wav", 3: "gone.wav"}


def bad_rows(rows: list[dict[str, Any]], model: Any, folder: Path) -> dict[int, str]:
    """Audit rows, and return which files are bad by the number of the row."""
    data = PromptDataModule(
        Rows(rows, "rows.jsonl", folder=folder), media=MediaOptions(check="files")
    )
    beside = SimpleNamespace(tokenizer=model.tokenizer, processor=model.processor)
    (finding,) = audit(data, beside).findings
    assert finding.name == "bad media"
    names = ("missing.mp4", "damaged.wav", "gone.wav")
    return {
        int(row.place.rpartition(":")[2]): next(name for name in names if name in row.detail)
        for row in finding.rows
    }
