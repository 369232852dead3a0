"""The reward model by lrlhf and by TRL, on the same token ids in the same order."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from exclusive_clock import ExclusiveClock
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, SequentialSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from trl_measure import Laps, Memory, Run, import_trl, save_weights
from trl_models import write_classifier
from trl_rloo import lightning_trainer, save_initial, shared_trl_options

from lrlhf.models import ScoreModel
from lrlhf.modules import RewardModel
from lrlhf.modules.metrics.reward_metrics import win_rate
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.types import PreferenceBatch, SequenceBatch

PHASES = ("update", "rest")

Pair = dict[str, list[int]]
"""Token ids of ``chosen_ids`` and ``rejected_ids``, the names that TRL reads."""


# ------------------------------------------------------------------ what both are given


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write the classifier with its new head, and the pairs of training and test.

    Raises:
        ValueError: The file has too few pairs that fit.
    """
    tokenizer = write_classifier(options.model, folder / "model", options.seed)
    pairs = read_pairs(options.data, tokenizer, options.max_length)
    wanted = (options.warm_up + options.steps) * options.batch_size
    if len(pairs) <= options.held_out:
        raise ValueError(
            f"{options.data} has {len(pairs)} pairs of at most {options.max_length} tokens, and "
            f"--held-out takes {options.held_out}: none is left to train on"
        )
    rest, test = pairs[options.held_out :], pairs[: options.held_out]
    order = random.Random(options.seed)
    train: list[Pair] = []
    while len(train) < wanted:
        train += order.sample(rest, len(rest))
    text = json.dumps({"train": train[:wanted], "test": test})
    (folder / "pairs.json").write_text(text, encoding="utf-8")


def read_pairs(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Pair]:
    """Tokenise every pair once: text, then the end-of-sequence token; longer ones are left out."""

    def ids(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    pairs: list[Pair] = []
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            prompt = row.get("prompt", "")
            pair = {f"{side}_ids": ids(prompt + row[side]) for side in ("chosen", "rejected")}
            if max(map(len, pair.values())) <= max_length:
                pairs.append(pair)
    return pairs


def _load(folder: Path) -> tuple[list[Pair], list[Pair], PreTrainedTokenizerBase]:
    pairs = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "model")
    return pairs["train"], pairs["test"], tokenizer


def _step_tokens(train: Sequence[Pair], batch_size: int) -> list[int]:
    return [
        sum(len(ids) for pair in rows for ids in pair.values())
        for rows in _chunks(train, batch_size)
    ]


# ------------------------------------------------------------------ lrlhf


class LrlhfSteps(L.Callback):
    """Notes what lrlhf logs of every step."""

    def __init__(self, laps: Laps, tokens: Sequence[int], clock: ExclusiveClock) -> None:
        self._laps = laps
        self._tokens = iter(tokens)
        self._clock = clock

    def on_train_batch_start(self, *_: object) -> None:
        """Begin the step itself."""
        self._clock.enter("update")

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Close the step."""
        self._clock.leave()
        found = trainer.callback_metrics
        logged = {"loss": float(found["train/loss"]), "grad_norm": float(found["train/grad_norm"])}
        phases = self._clock.take()
        phases.pop("rest", None)
        self._laps.end(logged, phases, next(self._tokens))


def run_lrlhf(options: argparse.Namespace, folder: Path) -> Run:
    """Train with lrlhf."""
    run = Run("lrlhf")
    train, test, tokenizer = _load(folder)
    pad_id = int(tokenizer.pad_token_id)
    network = ScoreModel(source=str(folder / "model")).load()
    memory = Memory(network)
    module = RewardModel(
        network,
        tokenizer=tokenizer,
        optimizer=OptimizerConfig(lr=options.lr, fused=True),
        seed=options.seed,
    )
    dataset: Any = train  # a list will do
    loader: DataLoader[PreferenceBatch] = DataLoader(
        dataset,
        batch_size=options.batch_size,
        collate_fn=lambda rows: preference_batch(rows, pad_id),
    )
    steps = LrlhfSteps(
        Laps(run, options.warm_up),
        _step_tokens(train, options.batch_size),
        ExclusiveClock("rest", whole={"update"}),
    )
    lightning_trainer(options, folder, [steps], options.clip).fit(module, loader)
    run.memory = memory.peak()
    _measure_accuracy(run, lambda batch: network(batch), network, test, options, pad_id)
    # the same format as the other system's, whatever the network looks like while it is trained
    network.save_pretrained(folder / "trained", tokenizer)
    exported = AutoModelForSequenceClassification.from_pretrained(
        folder / "trained", dtype=torch.float32
    )
    save_weights(exported, folder / "lrlhf.pt")
    return run


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


# ------------------------------------------------------------------ TRL


def run_trl(options: argparse.Namespace, folder: Path) -> Run:
    """Train with TRL, told to do what lrlhf does where its defaults differ."""
    trl, run = import_trl(), Run("trl")
    datasets = importlib.import_module("datasets")
    train, test, tokenizer = _load(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", dtype=torch.float32
    )
    save_initial(model, folder)
    memory = Memory(model)

    class InOrder(trl.RewardTrainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

    trainer = InOrder(
        model=model,
        args=trl.RewardConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=options.batch_size,
            max_length=options.max_length,
            **shared_trl_options(options),
        ),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(list(train)),
    )
    trainer.add_callback(
        _trl_steps(Laps(run, options.warm_up), _step_tokens(train, options.batch_size))
    )
    trainer.train()
    run.memory = memory.peak()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    run.steps = [{name: entry[name] for name in ("loss", "grad_norm")} for entry in logged]

    def score(batch: SequenceBatch) -> Tensor:
        logits: Tensor = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
        ).logits
        return logits

    _measure_accuracy(run, score, model, test, options, int(tokenizer.pad_token_id))
    save_weights(model, folder / "trl.pt")
    return run


def _trl_steps(laps: Laps, tokens: Sequence[int]) -> Any:
    """Return a callback that closes every step."""
    transformers = importlib.import_module("transformers")
    clock, counts = ExclusiveClock("rest", whole={"update"}), iter(tokens)

    class Steps(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.enter("update")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.leave()
            phases = clock.take()
            phases.pop("rest", None)
            laps.end({}, phases, next(counts))

    return Steps()


# ------------------------------------------------------------------ the measure, one for both


@torch.no_grad()
def _measure_accuracy(
    run: Run,
    score: Callable[[SequenceBatch], Tensor],
    model: torch.nn.Module,
    test: Sequence[Pair],
    options: argparse.Namespace,
    pad_id: int,
) -> None:
    """Fill in the held-out accuracy; equal scores are half right."""
    if not test:
        return
    model.eval()
    device = next(model.parameters()).device
    gaps = []
    for rows in _chunks(test, options.batch_size):
        batch = preference_batch(rows, pad_id).to(device)
        gaps.append((score(batch.candidate0) - score(batch.candidate1)).float().flatten().cpu())
    run.accuracy = float(win_rate(torch.cat(gaps)))
    run.pairs = len(test)


def _chunks(rows: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
