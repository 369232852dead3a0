"""The sources that configs take from examples/."""

import hashlib
import io
import itertools
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentiment_ratings
from pictures import HELD_OUT, LEVELS, Digits, DistortedPhotos, distorted
from PIL import Image
from sentiment_ratings import VaderRatings
from skimage.metrics import structural_similarity
from sklearn.datasets import load_digits

from lrlhf.datamodules import BadDataError, BadRow


def test_the_label_says_which_of_two_is_less_distorted() -> None:
    rows = list(DistortedPhotos(pairs=60, pixels=32, ties=0.3).rows())
    for row in rows:
        first, second = row["level_0"], row["level_1"]
        expected = "A" if first < second else "B" if second < first else "C"
        assert row["fidelity"] == expected
        assert row.get("sharpness") == (expected if row["kind"] in ("blur", "jpeg") else None)
        assert row["image_0"].shape == row["image_1"].shape == (32, 32, 3)
    assert {row["fidelity"] for row in rows} == {*"ABC"}
    assert not {row["photo"] for row in rows} & {*HELD_OUT}
    held = DistortedPhotos("validation", pairs=9).rows()
    assert {row["photo"] for row in held} <= {*HELD_OUT}
    # a pair does not depend on how many there are
    (alone,) = DistortedPhotos(pairs=1, pixels=32, ties=0.3).rows()
    assert (alone["image_0"] == rows[0]["image_0"]).all()


def test_each_level_leaves_less_of_the_picture() -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (16, 16, 3), dtype=np.uint8)
    smooth = Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC)
    for kind in LEVELS:
        levels = [distorted(smooth, kind, level, np.random.default_rng(0)) for level in range(5)]
        likeness = [
            structural_similarity(np.asarray(smooth), level, channel_axis=2) for level in levels
        ]
        assert likeness[0] == 1.0
        assert all(more > less for more, less in itertools.pairwise(likeness))


def test_digits_are_asked_about_with_their_picture() -> None:
    train, held = list(Digits().rows()), list(Digits("validation").rows())
    assert (len(train), len(held)) == (1500, 297)
    data = load_digits()
    known: dict[bytes, set[str]] = {}
    for pixels, target in zip(data.images, data.target, strict=True):
        shown = (pixels / 16 * 255).round().astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)
        known.setdefault(shown.tobytes(), set()).add(str(target))
    assert all(row["answer"] in known[row["image"].tobytes()] for row in train[:50] + held[:50])
    (row,) = Digits(size=1, pixels=32, answered=True, question="which?").rows()
    asked, answer = row["messages"]
    assert asked["content"] == [{"type": "image"}, {"type": "text", "text": "which?"}]
    assert answer == {"role": "assistant", "content": train[0]["answer"]}


@pytest.mark.parametrize(
    ("source", "options", "culprit"),
    [
        (DistortedPhotos, {"kinds": ["fog"]}, "choose from blur, noise, jpeg, contrast"),
        (DistortedPhotos, {"held_out": ["dog"]}, "choose some of"),
        (DistortedPhotos, {"ties": 2.0}, "ties=2.0"),
        (Digits, {"pixels": 12}, "pixels=12"),
        (VaderRatings, {"domains": ["movies"]}, "domains="),
        (VaderRatings, {"low": 2.0, "high": 1.0}, "low=2.0"),
    ],
)
def test_options_that_make_no_rows_are_refused(source: Any, options: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        source(**options)


RATINGS = (
    "1\t2.5\tthis film was a joy to watch\n"
    "2\t-2.5\tthis film was a bore to watch\n"
    "3\t0.5\tthis film was somewhere in between\n"
    "4\t3.0\ttoo short\n"
    "5\t-3.0\t" + "too long " * 30 + "\n"
    "no tabs here\n"
)


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source distribution of the same make-up, with members that want to get out of it."""
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path / "cache"))
    names = sentiment_ratings.FILES.values()
    files = {f"hutto_ICWSM_2014/{name}": RATINGS.encode() for name in names}
    inner = packed({**files, "../../escaped.txt": b"x"})
    path = tmp_path / "sdist.tar.gz"
    path.write_bytes(packed({sentiment_ratings.OUTER_MEMBER: inner, "../escaped.txt": b"x"}))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(sentiment_ratings, "SHA256", digest)
    return path


def test_vader_pairs_clearly_positive_with_clearly_negative_texts(
    sdist: Path, tmp_path: Path
) -> None:
    bad, row = VaderRatings(archive=str(sdist), margin_scale=0.1).rows()
    assert isinstance(bad, BadRow)
    assert row["chosen"] == "this film was a joy to watch"
    assert row["rejected"] == "this film was a bore to watch"
    assert row["margin"] == pytest.approx(0.5)
    files = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(files) == sorted(sentiment_ratings.FILES.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "sdist.tar.gz"]


def test_vader_is_downloaded_once_and_must_be_the_known_file(
    sdist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[bytes] = [b"another file", sdist.read_bytes()]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if served:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "vaderSentiment-3.3.2.tar.gz").write_bytes(served.pop(0))
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BadDataError, match="not the known"):
        VaderRatings().prepare()
    VaderRatings().prepare()
    assert len(list(VaderRatings().rows())) == 2  # a third download would fail
    monkeypatch.setenv("LRLHF_CACHE", str(sdist.parent / "other"))
    with pytest.raises(BadDataError, match=r"No matching distribution.*give the .tar.gz"):
        VaderRatings().prepare()
