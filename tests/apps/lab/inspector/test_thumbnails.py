"""Which images of records are put into a page."""

import os
from pathlib import Path

import pytest
from PIL import Image

from lrlhf.apps.lab.inspector import write_inspector
from lrlhf.apps.lab.inspector.inspector import Thumbnails
from lrlhf.apps.lab.run_files import RunFiles
from tests.apps.lab.inspector.runs import write_lines


def picture(path: Path, format: str = "PNG") -> str:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(path, format)
    return str(path)


def test_only_images_in_the_folders_are_embedded(tmp_path: Path) -> None:
    inside, outside = picture(tmp_path / "run" / "a.png"), picture(tmp_path / "home" / "b.png")
    link = tmp_path / "run" / "link.png"
    link.symlink_to(outside)
    up = str(tmp_path / "run" / ".." / "home" / "b.png")
    drawn = picture(tmp_path / "run" / "c.png", "EPS")
    fifo = tmp_path / "run" / "fifo.png"
    os.mkfifo(fifo)
    thumbnails = Thumbnails(1_000_000, [tmp_path / "run"])
    thumbnails.add([inside, outside, str(link), up, drawn, str(fifo), "no file", "x\0y"])
    assert [*thumbnails.uris] == [inside]
    assert thumbnails.outside == 3
    assert [*Thumbnails(0, []).uris] == []


def test_a_page_embeds_what_lies_in_media_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    named = [picture(tmp_path / folder / "a.png") for folder in ("data", "sets", "home")]
    write_lines(
        run / "rollouts.jsonl",
        [{"step": 1, "prompt": "p", "completion": "c", "score": 1.0, "media": named}],
    )
    (run / "config.yaml").write_text(
        f"data: {{init_args: {{media: {{root: {tmp_path / 'data'}}}, "
        f"train: [{{init_args: {{media_root: {tmp_path / 'sets'}}}}}]}}}}\n"
    )
    assert RunFiles(run).media == [tmp_path / "data", tmp_path / "sets"]
    told = write_inspector([run], tmp_path / "page.html")
    assert "1 image files lie neither in the folder of a run nor in its media.root" in told
    # from elsewhere the run may be a stranger's: its config names no folder of this machine
    monkeypatch.chdir(run)
    assert RunFiles(run).media == []
    told = write_inspector([run], tmp_path / "page.html")
    assert "3 image files lie" in told
    told = write_inspector([run], tmp_path / "page.html", media_root=tmp_path)
    assert "image files lie" not in told
