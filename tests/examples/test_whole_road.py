"""The whole road with tiny models, and the files that it begins with."""

import hashlib
import json
import random
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentiment_ratings
import yaml

from lrlhf.cli import run
from tests.examples.test_sources import packed

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "whole_road.py"
GOOD = ("brilliant", "a joy", "wonderful", "so funny", "moving", "great fun")
BAD = ("dreadful", "a bore", "terrible", "so dull", "empty", "a waste")
LEXICON = "good\t1.9\t0.9\t[2, 1]\njoy\t2.8\t0.7\t[3]\nbore\t-1.0\t0.4\t[-1]\n"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source distribution with 120 ratings, the better ones first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LRLHF_CACHE", str(tmp_path / "cache"))
    draw = random.Random(0)
    lines = []
    for number in range(120):
        word, rating = (draw.choice(GOOD), 2.5) if number < 60 else (draw.choice(BAD), -2.5)
        lines.append(f"{number}\t{rating}\tThe film number {number} was {word} to all of us")
    ratings = "\n".join([*lines, lines[0]]).encode()  # one of them twice
    names = sentiment_ratings.FILES.values()
    inner = packed({f"{sentiment_ratings.INNER_FOLDER}/{name}": ratings for name in names})
    lexicon = "vaderSentiment-3.3.2/vaderSentiment/vader_lexicon.txt"
    path = tmp_path / "sdist.tar.gz"
    path.write_bytes(packed({sentiment_ratings.OUTER_MEMBER: inner, lexicon: LEXICON.encode()}))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(sentiment_ratings, "SHA256", digest)
    return path


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the script, and the commands of lrlhf within this process."""

    def command(words: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert words[:3] == [sys.executable, "-m", "lrlhf"]
        return subprocess.CompletedProcess(words, run(words[3:]))

    def main(*arguments: str) -> None:
        monkeypatch.setattr(subprocess, "run", command)
        monkeypatch.setattr(sys, "argv", ["whole_road.py", *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return main


def overlay(folder: Path, model: str) -> Path:
    """What makes each step small."""
    lora = {"r": 2, "alpha": 4}
    short = {"max_steps": 2, "val_check_interval": 2, "enable_progress_bar": False}
    parts: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "sft": ({"policy": {"source": model, "lora": lora}}, {"batch_size": 4}),
        "reward": ({"model": {"source": model}}, {"batch_size": 4}),
        "ppo": (
            {"policy": {"lora": lora}, "sampling": {"max_new_tokens": 8}},
            {"batch_size": 4},
        ),
        "dpo": ({"policy": {"lora": lora}}, {"batch_size": 4}),
    }
    folder.mkdir()
    for name, (options, data) in parts.items():
        config = {"model": {"init_args": options}, "data": {"init_args": data}, "trainer": short}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def rows(name: str) -> list[dict[str, Any]]:
    lines = Path("runs/road/data", f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def whole(row: dict[str, Any], answer: str) -> str:
    return str(row["prompt"] + row[answer]).removeprefix("Film review: ")


@pytest.mark.slow
@pytest.mark.usefixtures("archive")
@pytest.mark.filterwarnings("ignore")  # Lightning's advice about runs this small
def test_the_road_ends_with_a_comparison_of_all_models(
    archive: Path,
    main: Callable[..., None],
    model_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = overlay(tmp_path / "small", model_folder)
    flags = ("--archive", str(archive), "--configs", str(SCRIPT.with_suffix("")), str(small))

    main(*flags)

    page = Path("runs/road/compare.html").read_text()
    for what in ("rewards/valence", "rewards/different_words", "95 %"):
        assert what in page
    assert "mean_logprob" in Path("runs/road/likelihood.html").read_text()
    said = capsys.readouterr().out
    shown = [line for line in said.splitlines() if line.startswith("$ ")]
    commands = [shlex.split(line)[2] for line in shown]
    assert commands == ["fit", "compare", "fit", "fit", "fit", "compare"]
    assert "open runs/road/compare.html" in said
    # each policy has learnt something other than the one that it began with
    for name in ("ppo", "dpo"):
        (config,) = Path(f"runs/road/{name}").glob("config.yaml")
        policy = yaml.safe_load(config.read_text())["model"]["init_args"]["policy"]
        assert policy["source"] == "runs/road/sft/export/final"

    main(*flags)

    assert "runs/road/dpo/export/final is there; remove it" in capsys.readouterr().out


def test_no_review_is_in_two_files(archive: Path) -> None:
    write = runpy.run_path(str(SCRIPT))["write_data"]
    write(archive, Path("runs/road/data"))
    texts = [whole(row, "completion") for row in rows("texts")]
    pairs = [whole(row, name) for row in rows("pairs") for name in ("chosen", "rejected")]
    held = [whole(row, "completion") for row in rows("texts_val")]
    prompts = [row["prompt"] for row in rows("prompts")]
    assert min(map(len, (texts, pairs, held, prompts))) > 5
    assert len({*texts, *pairs, *held}) == len(texts) + len(pairs) + len(held)
    # an opening tells the film, so it tells the review
    openings = {"Film review: " + " ".join(text.split()[:4]) for text in (*texts, *held, *pairs)}
    assert not openings & set(prompts)
    for row in rows("pairs"):
        assert any(word in row["chosen"] for word in GOOD)
        assert any(word in row["rejected"] for word in BAD)
    lexicon = Path("runs/road/data/lexicon.tsv").read_text()
    assert lexicon.splitlines() == ["good\t1.9", "joy\t2.8", "bore\t-1.0"]
    before = texts
    write(archive, Path("runs/road/data"))
    assert [whole(row, "completion") for row in rows("texts")] == before


def test_measures_of_texts(tmp_path: Path) -> None:
    reviews = runpy.run_path(str(EXAMPLES / "whole_road" / "reviews.py"))
    (tmp_path / "lexicon.tsv").write_text("good\t1.5\nbad\t-2.5\n")
    valence = reviews["Valence"](str(tmp_path / "lexicon.tsv"))
    # two of four words are good and one is bad
    assert valence(["Good, so GOOD... bad!", "", "so so"]) == [0.125, 0.0, 0.0]
    assert reviews["DifferentWords"]()(["Good, so GOOD... bad!", ""]) == [0.75, 0.0]


def test_a_step_that_fails_ends_the_road_with_its_status(
    archive: Path, main: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = overlay(tmp_path / "small", str(tmp_path / "no_model"))
    with pytest.raises(SystemExit) as ended:
        main("--archive", str(archive), "--configs", str(SCRIPT.with_suffix("")), str(small))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out.count("$ lrlhf") == 1
    assert "no_model" in said.err


@pytest.mark.usefixtures("archive")
def test_data_of_which_half_was_written_are_written_again(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    road = runpy.run_path(str(SCRIPT))
    write, names = road["write_whole_data"], road["write_whole_data"].__globals__
    whole_files = names["write_files"]

    def broken_off(*_: object) -> None:
        Path("runs/road/data.part/texts.jsonl").write_text("{}")
        Path("runs/road/data.part/old.jsonl").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setitem(names, "write_files", broken_off)
    with pytest.raises(KeyboardInterrupt):
        write(archive)
    assert not Path("runs/road/data").exists()
    monkeypatch.setitem(names, "write_files", whole_files)
    write(archive)
    assert len(rows("texts")) > 5
    assert not Path("runs/road/data/old.jsonl").exists()
    assert not Path("runs/road/data.part").exists()
