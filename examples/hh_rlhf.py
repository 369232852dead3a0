"""The tutorial in one command: a reward model on preference pairs, then PPO against it.

    python examples/hh_rlhf.py pairs.jsonl.gz --seeds 0 1 2

It runs `lrlhf fit` with configs/reward_hh.yaml once and with configs/ppo_text.yaml per seed
(further flags go to these), and draws the curves of all seeds into runs/hh_curves.png. See
docs/tutorial.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lrlhf.callbacks.reports.curves import Curve, draw_panels

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
REWARD = Path("runs/reward_hh/export/final")
PANELS = (
    "rollout/score",
    "eval/score",
    "kl/sequence",
    "kl/coef",
    "rollout/response_length",
    "rewards/repetition/mean",
    "value/explained_variance",
    "policy/entropy",
    "policy/grad_norm",
)


def main() -> None:
    """Train, compare, draw."""
    options = _arguments()
    start = time.monotonic()
    if not options.draw:
        if REWARD.exists():
            _say(f"uses the reward model that is there, {REWARD}; remove it to train a new one")
        else:
            _fit("reward_hh.yaml", options.pairs, [])
    for seed in [] if options.draw else options.seeds:
        reward = f"--model.rewards.functions.preference.source={REWARD.resolve()}"
        flags = [f"--seed_everything={seed}", reward, *options.flags]
        _fit("ppo_text.yaml", options.pairs, flags, folder=_folder(seed))
    runs = {f"seed {seed}": _curves(_folder(seed) / "runs/ppo_text") for seed in options.seeds}
    draw_panels(Path("runs/hh_curves.png"), runs, targets={"kl/sequence": options.target})
    _say(_table(runs))
    minutes = round((time.monotonic() - start) / 60)
    plural = "" if minutes == 1 else "s"
    _say(f"{minutes} minute{plural}; curves of all seeds: runs/hh_curves.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=Path, help="preference pairs, as in HH-RLHF")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draw", action="store_true", help="only draw what was trained before")
    parser.add_argument("--target", type=float, default=1.5, help="the config's, to be drawn")
    options, options.flags = parser.parse_known_args()
    return options


def _folder(seed: int) -> Path:
    """Where a seed's run puts its own ``runs/ppo_text``."""
    return Path(f"runs/hh_seed_{seed}")


def _fit(config: str, pairs: Path, flags: list[str], *, folder: Path = Path()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folder != Path():
        _say(f"in {folder}:")  # the paths that the run prints start there
    command = [sys.executable, "-m", "lrlhf", "fit", f"--config={CONFIGS / config}"]
    command += [f"--data.train={pairs.resolve()}", *flags]
    ended = subprocess.run(command, check=False, cwd=folder)
    if ended.returncode:
        sys.exit(ended.returncode)  # it has said why


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  before what the next run prints


def _curves(folder: Path) -> list[Curve]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    curves = []
    for name in PANELS:
        known = [row for row in rows if row.get(name)]
        steps = [int(row["step"]) for row in known]
        values = [float(row[name]) for row in known]
        if name == "eval/score":
            # loggers do not see the evaluation before training
            steps, values = [0, *steps], [_start(folder), *values]
        curves.append(Curve(name, steps, values))
    return curves


def _start(folder: Path) -> float:
    """Mean score of the untrained policy's answers."""
    lines = (folder / "eval_scores_0.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.fmean(json.loads(line)["score"] for line in lines)


def _table(runs: dict[str, list[Curve]]) -> str:
    lines = [f"{'':12}" + "".join(f"{name:>26}" for name in PANELS[:4])]
    for run, curves in runs.items():
        cells = [f"{curve.values[0]:.3f} -> {curve.values[-1]:.3f}" for curve in curves[:4]]
        lines.append(f"{run:12}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
