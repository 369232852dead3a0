"""Rows name files of their data set, and no others."""

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lrlhf.datamodules.loading.sources import HubSource
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaError, MediaOptions
from lrlhf.media.decode import check_image, read_image, read_video
from lrlhf.media.path_safety import FOREIGN, local_path
from tests.datamodules.conftest import vlm

PROCESSOR = vlm().processor


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder, beside a picture that is nobody's business."""
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for path in (folder / "images" / "a.png", tmp_path / "private.png"):
        Image.new("RGB", (2, 2)).save(path)
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    (folder / "inner.png").symlink_to(folder / "images" / "a.png")
    (folder / "out").symlink_to(tmp_path)
    return folder


LINKS_OUT = ["link.png", "out/private.png"]
LEADING_OUT = [
    "../private.png",
    "images/../../private.png",
    "../data/../private.png",
    "nothing/../../private.png",
    "file:../private.png",
]


@pytest.mark.parametrize("named", LEADING_OUT)
@pytest.mark.parametrize("rooted", [False, True])
def test_a_relative_path_that_leads_out_is_refused(data: Path, named: str, rooted: bool) -> None:
    with pytest.raises(BadRow, match="file outside the data") as raised:
        local_path(named, data, root=data if rooted else None)
    assert repr(named) in raised.value.detail
    assert str(data.parent / "private.png") in raised.value.detail
    assert "media.root" in raised.value.remedy


@pytest.mark.parametrize("named", LINKS_OUT)
def test_links_out_of_the_folder_are_followed_where_the_user_named_it(
    data: Path, named: str
) -> None:
    with pytest.raises(BadRow, match="file outside the data") as raised:
        local_path(named, data, root=None)
    assert "media.root" in raised.value.remedy
    assert local_path(named, data, root=data) == str(data / named)


def test_what_stays_inside_is_read_also_where_the_folder_is_a_link(data: Path) -> None:
    for named in ("images/a.png", "./images/../images/a.png", "inner.png"):
        assert Path(local_path(named, data, root=None)).samefile(data / "images" / "a.png")
    alias = data.parent / "alias"
    alias.symlink_to(data)
    assert local_path("images/a.png", alias, root=None) == str(alias / "images" / "a.png")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_absolute_path_is_free_unless_there_is_a_root(data: Path, scheme: str) -> None:
    private = data.parent / "private.png"
    assert local_path(f"{scheme}{private}", data, root=None) == str(private)
    assert local_path(f"{scheme}{private}", data, root=data.parent) == str(private)
    with pytest.raises(BadRow, match="file outside the data"):
        local_path(f"{scheme}{private}", data, root=data)


@pytest.mark.parametrize("named", ["/etc/passwd", "file:///etc/passwd", "~/x.png", "a.png"])
def test_rows_of_the_hub_name_no_files_unless_there_is_a_root(data: Path, named: str) -> None:
    assert HubSource("someone/pictures").folder == FOREIGN
    with pytest.raises(BadRow, match="a row of a hub data set names the file"):
        local_path(named, FOREIGN, root=None)
    assert local_path("images/a.png", FOREIGN, root=data) == str(data / "images" / "a.png")


def test_links_within_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--someone--pictures"
    snapshot = repository / "snapshots" / "0123abcd" / "images"
    blobs = repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "77").touch()
    (snapshot / "a.png").symlink_to("../../../blobs/77")
    (snapshot / "b.png").symlink_to("../../../../outside.png")
    assert local_path("images/a.png", snapshot.parent, root=None) == str(snapshot / "a.png")
    with pytest.raises(BadRow, match="file outside the data"):
        local_path("images/b.png", snapshot.parent, root=None)


def test_odd_names_are_names_or_missing_files(data: Path) -> None:
    for named in ("~nobody-of-this-name/a.png", "a" * 5000):
        assert local_path(named, data, root=None) == str(data / named)
    with pytest.raises(BadRow, match="missing file"):
        local_path("a\0b.png", data, root=None)


@pytest.mark.parametrize(
    "row",
    [
        {"image": "../private.png"},
        {"images": ["images/a.png", {"path": "link.png"}]},
        {"video": "../private.png"},
        {"videos": [["images/a.png", "../private.png"]]},
    ],
)
def test_columns_are_held_in(data: Path, row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match="file outside the data"):
        MediaReader(PROCESSOR).of_columns(row, data)


def bomb(width: int, height: int) -> bytes:
    """A PNG of some bytes that says it has so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


# Pillow warns of the first, and refuses the second itself
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("side", "reason"), [(10_000, "image too large"), (60_000, "broken image")]
)
def test_a_small_file_that_would_fill_the_memory_is_refused(side: int, reason: str) -> None:
    options = MediaOptions()
    for read in (check_image, lambda value: read_image(value, options)):
        with pytest.raises(MediaError) as raised:
            read(bomb(side, side))
        assert raised.value.reason == reason
    with pytest.raises(MediaError):
        read_video(bomb(side, side), options)
