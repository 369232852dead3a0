import hashlib
import importlib.metadata
import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import (
    BadDataError,
    PreferenceDataModule,
    RatedFile,
    RatedText,
    VaderRatings,
    pairs_from_ratings,
)
from lrlhf.datamodules.datasets import vader
from tests.datamodules.conftest import WriteRows

TEXTS = [RatedText(number / 10, f"text {number}") for number in range(100)]


def texts_of(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row[side] for row in rows for side in ("chosen", "rejected"))


def test_the_better_rated_text_of_a_pair_is_chosen_and_the_gap_is_kept() -> None:
    ratings = {rated.text: rated.rating for rated in TEXTS}
    rows = pairs_from_ratings(TEXTS, min_gap=2.0, seed=0)
    assert len(rows) > 30
    assert all(ratings[row["chosen"]] - ratings[row["rejected"]] >= 2.0 - 1e-9 for row in rows)
    assert all(row["chosen_rating"] == ratings[row["chosen"]] for row in rows)
    assert all(row["prompt"] == "" and "margin" not in row for row in rows)


@pytest.mark.parametrize("uses", [1, 3])
def test_a_text_is_part_of_a_bounded_number_of_pairs(uses: int) -> None:
    rows = pairs_from_ratings(TEXTS, min_gap=0.5, seed=0, uses_per_text=uses)
    counts = texts_of(rows)
    assert max(counts.values()) == uses
    assert len({(row["chosen"], row["rejected"]) for row in rows}) == len(rows)


def test_two_clearly_parted_kinds_give_as_many_pairs_as_the_smaller_has_texts() -> None:
    texts = [RatedText(2.0, f"good {n}") for n in range(7)]
    texts += [RatedText(-2.0, f"bad {n}") for n in range(4)]
    rows = pairs_from_ratings(texts, min_gap=3.0, seed=0)
    assert len(rows) == 4
    assert all(row["chosen"].startswith("good") for row in rows)
    assert {row["rejected"] for row in rows} == {f"bad {n}" for n in range(4)}


def test_margins_are_the_scaled_gap() -> None:
    (row,) = pairs_from_ratings(
        [RatedText(1.5, "good"), RatedText(-0.5, "bad")], min_gap=1.0, seed=0, margin_scale=0.25
    )
    assert row["margin"] == 0.5  # 0.25 * (1.5 + 0.5)


def test_the_number_of_pairs_can_be_bounded_and_the_seed_draws_them() -> None:
    rows = pairs_from_ratings(TEXTS, min_gap=1.0, seed=0, max_pairs=5)
    assert len(rows) == 5
    assert rows == pairs_from_ratings(TEXTS, min_gap=1.0, seed=0, max_pairs=5)
    assert rows != pairs_from_ratings(TEXTS, min_gap=1.0, seed=1, max_pairs=5)


def test_equal_texts_count_once_with_their_first_rating() -> None:
    texts = [RatedText(2.0, "same"), RatedText(-2.0, "same"), RatedText(0.0, "other")]
    (row,) = pairs_from_ratings(texts, min_gap=1.0, seed=0, uses_per_text=2)
    assert (row["chosen"], row["rejected"]) == ("same", "other")


def test_a_gap_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="min_gap=0"):
        pairs_from_ratings(TEXTS, min_gap=0.0, seed=0)


def rated_file(write_rows: WriteRows, **options: Any) -> RatedFile:
    rows = [{"text": rated.text, "rating": rated.rating} for rated in TEXTS]
    return RatedFile(write_rows(rows, "rated.jsonl"), **options)


def test_train_and_validation_parts_share_no_text(write_rows: WriteRows) -> None:
    sides = [
        texts_of(
            list(rated_file(write_rows, part=part, validation_fraction=0.3, uses_per_text=3).rows())
        )  # type: ignore[arg-type]
        for part in ("train", "validation")
    ]
    assert sides[0].keys().isdisjoint(sides[1].keys())
    assert len(sides[0]) > 50
    assert 10 < len(sides[1]) <= 30


def test_held_out_pairs_share_no_text_with_the_train_pairs(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = PreferenceDataModule(
        rated_file(write_rows), tokenizer=tokenizer, batch_size=1, val_fraction=0.2
    )
    data.setup("fit")
    sides = []
    for loader in (data.train_dataloader(), data.val_dataloader()):
        ratings = [batch.info[0] for batch in loader]
        sides.append({row[f"{side}_rating"] for row in ratings for side in ("chosen", "rejected")})
    assert sides[0].isdisjoint(sides[1])  # each rating belongs to one text only
    assert len(sides[1]) > 5


def test_ratings_that_make_no_pair_are_named(write_rows: WriteRows) -> None:
    with pytest.raises(BadDataError, match=r"rated.jsonl: no two of its 100 texts make a pair"):
        list(rated_file(write_rows, min_gap=50.0).rows())


def test_a_row_without_rating_is_counted(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"text": "a", "rating": 1}, {"text": "b", "rating": 3}, {"text": "c"}])
    data = PreferenceDataModule(RatedFile(path), tokenizer=tokenizer)
    with pytest.raises(BadDataError, match=r"1 of 2 rows[\s\S]*no rating"):
        data.setup("fit")


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members.items():
            add(tar, name, content)
    return stream.getvalue()


RATINGS = (
    "1\t2.5\tthis film was a joy to watch\n"
    "2\t-2.5\tthis film was a bore to watch\n"
    "3\t0.5\tthis film was somewhere in between\n"
    "4\t3.0\ttoo short\n"
    "5\t-3.0\t" + "too long " * 30 + "\n"
)


@pytest.fixture
def sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source distribution of the same make-up, with members that want to get out of it."""
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path / "cache"))
    files = {f"hutto_ICWSM_2014/{name}": RATINGS.encode() for name in vader._FILES.values()}
    inner = packed({**files, "../../escaped.txt": b"x", "/lrlhf-escaped.txt": b"x"})
    path = tmp_path / "sdist.tar.gz"
    path.write_bytes(packed({vader._OUTER_MEMBER: inner, "../escaped.txt": b"x"}))
    return path


def test_vader_pairs_clearly_positive_with_clearly_negative_texts(sdist: Path) -> None:
    (row,) = VaderRatings(archive=str(sdist), margin_scale=0.1).rows()
    assert isinstance(row, dict)
    assert row["chosen"] == "this film was a joy to watch"
    assert row["rejected"] == "this film was a bore to watch"
    assert row["margin"] == pytest.approx(0.5)


def test_vader_keeps_the_files_it_needs_and_nothing_else(sdist: Path, tmp_path: Path) -> None:
    VaderRatings(archive=str(sdist)).prepare()
    files = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert files == sorted(vader._FILES.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "sdist.tar.gz"]
    assert not Path("/lrlhf-escaped.txt").exists()


def test_vader_takes_the_texts_of_all_domains(sdist: Path, tmp_path: Path) -> None:
    VaderRatings(archive=str(sdist)).prepare()
    (folder,) = (tmp_path / "cache" / "data").iterdir()
    (folder / vader._FILES["tweets"]).write_text(
        "1\t2.5\tsuch a lovely morning, friends\n2\t-2.5\tsuch a horrid morning, friends\n"
    )
    pairs = list(VaderRatings(["movie", "tweets"], archive=str(sdist)).rows())
    assert len(pairs) == 2


def test_vader_counts_lines_that_are_no_rating(
    sdist: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    VaderRatings(archive=str(sdist)).prepare()
    (folder,) = (tmp_path / "cache" / "data").iterdir()
    (folder / vader._FILES["movie"]).write_text(RATINGS + "no tabs here\n")
    data = PreferenceDataModule(VaderRatings(archive=str(sdist)), tokenizer=tokenizer)
    with pytest.raises(BadDataError, match="'no tabs here'"):
        data.setup("fit")


def test_vader_names_an_archive_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadDataError, match="there is no file archive="):
        VaderRatings(archive=str(tmp_path / "nothing.tar.gz")).prepare()


def test_vader_names_an_archive_that_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path / "cache"))
    other = tmp_path / "other.tar.gz"
    other.write_bytes(packed({"a.txt": b"a"}))
    with pytest.raises(BadDataError, match="cannot be read from the source distribution"):
        VaderRatings(archive=str(other)).prepare()


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if content is not None:
            folder = Path(command[command.index("--dest") + 1])
            (folder / "vaderSentiment-3.3.2.tar.gz").write_bytes(content)
        return subprocess.CompletedProcess(command, int(content is None), "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_vader_downloads_once(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = sdist.read_bytes()
    monkeypatch.setattr(vader, "_SDIST_SHA256", hashlib.sha256(content).hexdigest())
    fake_pip(monkeypatch, content)
    assert len(list(VaderRatings().rows())) == 1
    fake_pip(monkeypatch, None)  # a second download would fail
    assert len(list(VaderRatings().rows())) == 1


def test_vader_does_not_look_for_pip_as_a_module(
    sdist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setuptools, once it sees that, gives the standard library's distutils to all that ask."""

    class Guard:
        def find_spec(self, name: str, *_: Any) -> None:
            assert name != "pip"

    content = sdist.read_bytes()
    monkeypatch.setattr(vader, "_SDIST_SHA256", hashlib.sha256(content).hexdigest())
    fake_pip(monkeypatch, content)
    monkeypatch.setattr(sys, "meta_path", [Guard(), *sys.meta_path])
    assert len(list(VaderRatings().rows())) == 1


def test_vader_without_pip_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(()))
    with pytest.raises(BadDataError, match=r"which this environment lacks: run .* -m ensurepip"):
        list(VaderRatings().rows())


def test_vader_says_what_to_do_where_nothing_can_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path))
    fake_pip(monkeypatch, None, "ERROR: No matching distribution found")
    with pytest.raises(BadDataError, match=r"No matching distribution.*give the .tar.gz file as"):
        VaderRatings().prepare()


def test_vader_refuses_a_file_that_is_not_the_known_one(
    sdist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, sdist.read_bytes())
    with pytest.raises(BadDataError, match="not the known"):
        VaderRatings().prepare()


@pytest.mark.parametrize(
    "options", [{"domains": ["movies"]}, {"domains": []}, {"low": 2.0, "high": 1.0}]
)
def test_vader_refuses_impossible_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"domains=|low="):
        VaderRatings(**options)


@pytest.mark.slow
def test_vader_really_gives_the_pairs_of_the_movie_reviews() -> None:
    try:
        rows = list(VaderRatings(["movie"]).rows())
    except BadDataError as error:
        pytest.skip(f"no package index in reach: {error}")
    # 2,855 texts above 1.5 and 2,744 below -1.5, one of the latter twice
    assert len(rows) == 2743
