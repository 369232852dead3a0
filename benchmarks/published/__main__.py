"""The command: runs what has not been run, judges every claim, prints the table and draws."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import benchmarks.published as package
from benchmarks.published.studies import STUDIES, Run, Study
from benchmarks.published.verdicts import Finding, Measures, judge

CHOOSING_SEEDS = (101, 102)
"""Of the runs that learning rates are chosen by; none of them is reported."""
Runs = dict[str, list[Measures]]


class FinishedRuns:
    """Runs that have been made, as the lines of a file: none is made twice.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.known[row["key"]] = row
        self.seconds = 0.0
        """Of all runs that were asked for, whenever they were made."""

    def measures(self, run: Run, seed: int) -> Measures:
        """Return what a run has shown; make it unless the same settings and seed were run."""
        key = json.dumps([type(run).__name__, asdict(run), seed], sort_keys=True)
        if key not in self.known:
            started = time.process_time()
            measures = run(seed)
            row = {"key": key, "seconds": time.process_time() - started, "measures": measures}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self.known[key] = row
            _say(f"{key} {row['seconds']:.1f} s", sys.stderr)
        self.seconds += self.known[key]["seconds"]
        measured: Measures = self.known[key]["measures"]
        return measured


def with_rates(study: Study, finished: FinishedRuns, seeds: Sequence[int]) -> dict[str, Run]:
    """Return the variants, each with the learning rate that is best on these seeds."""
    best: dict[str, float] = {}
    for name, run in study.variants.items():
        if study.rates and study.rate_of.get(name, name) == name:
            scores = {
                rate: sum(
                    finished.measures(replace(run, lr=rate), seed)[study.chosen_by]
                    for seed in seeds
                )
                for rate in study.rates
            }
            best[name] = max(scores, key=lambda rate: scores[rate])
    return {
        name: replace(run, lr=best[study.rate_of.get(name, name)]) if study.rates else run
        for name, run in study.variants.items()
    }


def table(findings: Mapping[str, Sequence[Finding]], seconds: Mapping[str, float]) -> str:
    """Return the claims and their verdicts as a table in Markdown."""
    lines = [
        "| claim | paper | ours: effect and 95 % interval | verdict | seeds | core minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name, judged in findings.items():
        for number, (claim, one) in enumerate(zip(STUDIES[name].claims, judged, strict=True)):
            ours = f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f}) {claim.unit}"
            spent = f"{seconds[name] / 60:.1f}" if number == 0 else ""
            source = STUDIES[name].paper if number == 0 else ""
            text = f"{source}: {claim.text}" if source else claim.text
            cells = [text, claim.paper, ours, one.verdict, str(len(one.effects)), spent]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rate_table(chosen: Mapping[str, Mapping[str, Run]]) -> str:
    """Return the learning rates that were chosen, as a table in Markdown."""
    lines = ["| study | learning rates to choose from | chosen |", "|---|---|---|"]
    for name, variants in chosen.items():
        study = STUDIES[name]
        if study.rates:
            own = [one for one in variants if study.rate_of.get(one, one) == one]
            ends = (min(study.rates), max(study.rates))
            picked = "; ".join(
                f"{one}: {variants[one].lr:g}{' (an end)' * (variants[one].lr in ends)}"
                for one in own
            )
            lines.append(f"| {name} | {', '.join(f'{r:g}' for r in study.rates)} | {picked} |")
    return "\n".join(lines)


def draw(runs: Mapping[str, Runs], path: Path) -> None:
    """Draw a panel for each study."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        (13, 3.3 * -(-len(runs) // 3)), layout="constrained"
    )
    panels = figure.subplots(-(-len(runs) // 3), 3, squeeze=False).flat
    for name, panel in zip(runs, panels, strict=False):
        STUDIES[name].draw(panel, runs[name])
        panel.set_title(name)
        panel.grid(alpha=0.3)
    for panel in [*panels]:
        panel.axis("off")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what has not been run, and report."""
    parser = argparse.ArgumentParser(description=(package.__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*STUDIES], default=[*STUDIES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--work", type=Path, default=Path("runs/published"))
    parser.add_argument("--out", type=Path, default=Path("docs/published.png"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    finished = FinishedRuns(asked.work / "runs.jsonl")
    runs: dict[str, Runs] = {}
    chosen: dict[str, dict[str, Run]] = {}
    seconds: dict[str, float] = {}
    for name in asked.only:
        before = finished.seconds
        chosen[name] = with_rates(STUDIES[name], finished, CHOOSING_SEEDS)
        runs[name] = {variant: [] for variant in chosen[name]}
        for seed in asked.seeds[: STUDIES[name].most_seeds]:
            for variant, run in chosen[name].items():
                runs[name][variant].append(finished.measures(run, seed))
        seconds[name] = finished.seconds - before
    findings = {
        name: [
            judge(
                claim,
                [dict(zip(own, seed, strict=True)) for seed in zip(*own.values(), strict=True)],
            )
            for claim in STUDIES[name].claims
        ]
        for name, own in runs.items()
    }
    _say(table(findings, seconds))
    _say("\n" + rate_table(chosen))
    draw(runs, asked.out)
    if asked.json:
        report = {
            name: {
                "claims": [
                    {"text": claim.text} | one._asdict()
                    for claim, one in zip(STUDIES[name].claims, findings[name], strict=True)
                ],
                "settings": {variant: asdict(run) for variant, run in chosen[name].items()},
                "runs": runs[name],
                "seconds": seconds[name],
            }
            for name in runs
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


def _say(text: str, stream: Any = None) -> None:
    print(text, file=stream or sys.stdout, flush=True)


if __name__ == "__main__":
    main()
