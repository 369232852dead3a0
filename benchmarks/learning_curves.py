"""Learning curves of SFT and DPO on real texts, several seeds each.

The steps `sft` and `dpo` of the whole road with other seeds, of LoRA's first weights and of the
order of the data. DPO goes on from one export of SFT. Every evaluation reads the same held-out
texts or pairs; what is shown is the mean over the seeds, with its 95 % interval (Student's).

    python examples/whole_road.py                  # or only its data and its step sft
    python -m benchmarks.learning_curves [--seeds 1 2 3] [--steps 30] [--every 10]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from lrlhf.apps.lab.compare.evaluations import read_evaluation
from lrlhf.statistics import mean_interval

CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "whole_road"
METRICS = {"sft": ("mean_logprob",), "dpo": ("accuracy", "margin")}


def main() -> None:
    """Train what is not there, and print the table."""
    options = _arguments()
    steps = range(0, options.steps + 1, options.every)
    _say(["run", "held-out metric", *(f"step {one}" for one in steps)])
    _say(["---"] * (len(steps) + 2))
    for name, metrics in METRICS.items():
        folders = [options.folder / f"{name}_seed_{seed}" for seed in options.seeds]
        for folder, seed in zip(folders, options.seeds, strict=True):
            if not (folder / f"eval_scores_{options.steps}.jsonl").exists():
                _train(name, folder, seed, options)
        for metric in metrics:
            _say([name, metric, *(_cell(folders, step, metric) for step in steps)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--every", type=int, default=10, help="steps from one evaluation to the next"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/curves"))
    return parser.parse_args()


def _train(name: str, folder: Path, seed: int, options: argparse.Namespace) -> None:
    flags = {
        "seed_everything": seed,
        "data.seed": seed,
        "trainer.default_root_dir": folder,
        "trainer.max_steps": options.steps,
        "trainer.val_check_interval": options.every,
        "trainer.num_sanity_val_steps": -1,
    }
    command = [sys.executable, "-m", "lrlhf", "fit", f"--config={CONFIGS / name}.yaml"]
    command += [f"--{option}={value}" for option, value in flags.items()]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _cell(folders: list[Path], step: int, metric: str) -> str:
    means = [read_evaluation(folder, str(step), metric).mean(metric) for folder in folders]
    mean, low, high, _ = mean_interval(means)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" if low < high else f"{mean:.3f}"


def _say(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
