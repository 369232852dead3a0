"""``lrlhf compare``: is one run better than another, by how much, or is it the seed?"""

from __future__ import annotations

import argparse
import glob
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lrlhf.apps.lab.run_files import check_output, write_json
from lrlhf.cli.command_parser import command_parser
from lrlhf.cli.model_evaluation import CHECKPOINT, evaluate_models
from lrlhf.options.errors import ConfigError

_MOST_SIDES = 26
"""Letters that they are called by."""
_EPILOG = """\
A RUN is the folder of a run with eval_scores_<step>.jsonl. In quotes it may be a pattern
('runs/a_seed*'), whose folders are the seeds of one side. The first RUN, or --against, is what the
others are compared with. With --config a RUN may also be a model or a checkpoint, and each is first
evaluated on the validation set of that config.

examples:
  lrlhf compare runs/a runs/b
  lrlhf compare --a runs/a_seed* --b runs/b_seed* --html compare.html
  lrlhf compare runs/b runs/c --against runs/a --by metadata.level
  lrlhf compare runs/a/export/final my-org/my-model --config lrlhf:quickstart
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser(
        "compare", "Compare evaluations of the same prompts: differences with intervals.", _EPILOG
    )
    add = parser.add_argument
    seeds: dict[str, Any] = {"metavar": "RUN", "nargs": "+", "action": "extend"}
    add("runs", metavar="RUN", nargs="*", help="one side each")
    add("--a", "--against", help="seeds of the side that the others are compared with", **seeds)
    add("--b", help="seeds of another side", **seeds)
    add("--step", default="last", help="evaluation: last (default), best or a number")
    add(
        "--metric",
        help="what is decided by; default: score, of pairs accuracy, of given texts mean_logprob",
    )
    add(
        "--by",
        metavar="COLUMN",
        action="append",
        default=[],
        help="also compare for each value of a column of the rows; may be given again",
    )
    add(
        "--match",
        choices=("auto", "row", "text"),
        default="auto",
        help="the same prompt is the same row, or the same text; default: row where the texts are "
        "the same too, else text",
    )
    add(
        "--difference",
        metavar="D",
        type=_difference,
        nargs="+",
        default=[],
        help="say what it takes to see such differences of the metric, such as 0.02",
    )
    add("--json", metavar="FILE", help="write everything as JSON")
    add("--html", metavar="FILE", help="write a page")
    add(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="evaluate models on the validation set of this config; may be given again",
    )
    add(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("runs/compare"),
        help="with --config: folder of the evaluations; default: runs/compare",
    )
    return parser


def compare(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A run, a file or an option cannot be used.
    """
    options = parser().parse_args(arguments)
    if options.step not in {"last", "best"} and not options.step.isdecimal():
        raise ConfigError(f"step is '{options.step}'; give last, best or a number")
    for name in ("json", "html"):
        check_output(name, getattr(options, name))
    # not at the top: help needs none of it
    from lrlhf.apps.lab.compare import as_json, compare_runs, print_report, write_comparison  # noqa: PLC0415

    named = _sides(options)
    if options.config:
        folders = evaluate_models(named, options.config, options.output)
    else:
        folders = {name: [Path(run) for run in runs] for name, runs in named.items()}
    try:
        report = compare_runs(
            folders,
            step=options.step,
            metric=options.metric,
            by=options.by,
            how=options.match,
            differences=options.difference,
        )
        print_report(report, Console(file=sys.stdout, highlight=False), step=options.step)
        if options.json is not None:
            write_json(options.json, as_json(report, step=options.step))
        if options.html is not None:
            write_comparison(report, options.html, step=options.step)
    except KeyError as error:  # whose text is in quotes
        raise ConfigError(str(error.args[0])) from error
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _sides(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the runs of each side by its name, the one that others are compared with first.

    Raises:
        ConfigError: There are less than two or too many, a pattern fits nothing, or a run is a
            file, or there twice.
    """
    folders = [side for side in (options.a, options.b, *([each] for each in options.runs)) if side]
    if not 2 <= len(folders) <= _MOST_SIDES:
        raise ConfigError(
            f"lrlhf compare needs two sides, up to {_MOST_SIDES}: lrlhf compare RUN_A RUN_B, or "
            "with several seeds --a RUN ... --b RUN ..."
        )
    sides = [(", ".join(side), _expanded(side, models=bool(options.config))) for side in folders]
    seen: set[Path] = set()
    for run in (run for _, side in sides for run in side):
        if Path(run).resolve() in seen:
            raise ConfigError(f"{run} is given twice; a run is one seed of one side")
        seen.add(Path(run).resolve())
    return dict(sides)


def _expanded(patterns: Sequence[str], *, models: bool) -> list[str]:
    runs: list[str] = []
    for pattern in patterns:
        if Path(pattern).exists() or not glob.has_magic(pattern):
            if Path(pattern).is_file() and not _can_be_run(pattern, models=models):
                raise ConfigError(
                    f"{pattern} is a file; a run is a folder, such as {Path(pattern).parent}"
                )
            runs.append(pattern)
            continue
        # Path.glob refuses absolute patterns
        there = sorted(glob.glob(pattern))  # noqa: PTH207
        fitting = [each for each in there if _can_be_run(each, models=models)]
        if not fitting:
            only = " but files, and a run is a folder" if there else ""
            raise ConfigError(f"nothing fits {pattern}{only}")
        runs += fitting
    return runs


def _can_be_run(path: str, *, models: bool) -> bool:
    """Whether it is a folder or, where models are evaluated, a checkpoint."""
    return Path(path).is_dir() or (models and Path(path).suffix == CHECKPOINT)


def _difference(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no difference above 0")
    return value
