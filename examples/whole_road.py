"""The whole road: supervised start, reward model, PPO, DPO, comparison.

    python examples/whole_road.py

It writes film reviews that people rated into runs/road/data, and runs the commands of
docs/whole_road.md one after another, which end with runs/road/compare.html. A training whose result
is there already is not repeated.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import yaml
from sentiment_ratings import RatedText, VaderRatings, member, source_distribution

sys.path.append(str(Path(__file__).with_suffix("")))
from reviews import write_files

ROAD = Path("runs/road")
LEXICON = "vaderSentiment-3.3.2/vaderSentiment/vader_lexicon.txt"
SFT, PPO, DPO = (str(ROAD / name / "export" / "final") for name in ("sft", "ppo", "dpo"))


class Step(NamedTuple):
    """A command of ``lrlhf``."""

    command: str
    config: str
    """File in the folder of the configs, without its suffix."""
    arguments: tuple[str, ...] = ()
    result: Path | None = None
    """What makes the step superfluous if it is there."""


def _training(name: str) -> Step:
    return Step("fit", name, result=ROAD / name / "export" / "final")


def _comparison(config: str, sides: tuple[str, ...], page: str, *more: str) -> Step:
    where = ("--html", str(ROAD / page), "--output", str(ROAD / "compared" / config))
    return Step("compare", config, (*sides, *more, *where))


def steps(base: str) -> tuple[Step, ...]:
    """Return the road from a model; what is written last is its end."""
    return (
        _training("sft"),
        _comparison("sft", (base, SFT), "likelihood.html"),
        _training("reward"),
        _training("ppo"),
        _training("dpo"),
        _comparison("ppo", (base, PPO, DPO), "compare.html", "--against", SFT),
    )


def main() -> None:
    """Write the data, run the steps, say how long each took."""
    options = _arguments()
    if not (ROAD / "data").exists():
        write_whole_data(options.archive)
    times: list[tuple[str, float]] = []
    for step in steps(_base(options.configs)):
        if step.result is not None and step.result.exists():
            _say(f"\n{step.result} is there; remove it to train again")
            continue
        start = time.monotonic()
        _run(step, options.configs)
        times.append((f"{step.command} {step.config}", time.monotonic() - start))
    _say("\n" + "\n".join(f"{name:14} {seconds / 60:5.1f} min" for name, seconds in times))
    _say(f"{'in all':14} {sum(seconds for _, seconds in times) / 60:5.1f} min")
    _say(f"open {ROAD / 'compare.html'}")


def write_whole_data(archive: Path | None) -> None:
    """Write the data beside its place, where no half of it is taken for all of it."""
    half = ROAD / "data.part"
    shutil.rmtree(half, ignore_errors=True)  # of a run that was broken off
    write_data(archive, half)
    half.rename(ROAD / "data")


def write_data(archive: Path | None, folder: Path) -> None:
    """Write what the configs read, from the source distribution of vaderSentiment."""
    content = source_distribution(None if archive is None else str(archive))
    kept = folder / "reviews.tar.gz"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(content)
    source = VaderRatings(low=0.0, high=1e-9, min_chars=40, max_chars=160, archive=str(kept))
    reviews = {one.text: one.rating for one in source.texts() if isinstance(one, RatedText)}
    shuffled = sorted(reviews.items())
    random.Random(0).shuffle(shuffled)
    words = (line.split("\t")[:2] for line in member(content, LEXICON).decode().splitlines())
    write_files(shuffled, "\n".join("\t".join(word) for word in words), kept.parent)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archive", type=Path, help="the package's source distribution")
    parser.add_argument(
        "--configs",
        type=Path,
        nargs="+",
        default=[Path(__file__).with_suffix("")],
        help="folders of configs; of files with the same name later ones win, key by key",
    )
    return parser.parse_args()


def _files(folders: list[Path], name: str) -> list[Path]:
    files = [folder / f"{name}.yaml" for folder in folders]
    return [path for path in files if path.exists()]


def _base(folders: list[Path]) -> str:
    """Return what step 1 begins with."""
    base = ""
    for path in _files(folders, "sft"):
        model = yaml.safe_load(path.read_text(encoding="utf-8")).get("model", {})
        base = model.get("init_args", {}).get("policy", {}).get("source", base)
    return base


def _run(step: Step, folders: list[Path]) -> None:
    configs = [word for path in _files(folders, step.config) for word in ("--config", str(path))]
    arguments = ["lrlhf", step.command, *step.arguments, *configs]
    _say(f"\n$ {shlex.join(arguments)}")
    ended = subprocess.run([sys.executable, "-m", *arguments], check=False)
    if ended.returncode:
        sys.exit(ended.returncode)  # it has said why


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  before what the next command prints


if __name__ == "__main__":
    main()
