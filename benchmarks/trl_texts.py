"""Reward models, DPO and SFT by lrlhf and by TRL, on the same token ids in the same order."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from exclusive_clock import ExclusiveClock
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from trl_measure import Laps, Memory, Run, import_trl, save_weights
from trl_models import write_classifier, write_language_model
from trl_rloo import (
    lightning_trainer,
    lrlhf_policy,
    optimizer_config,
    save_initial,
    shared_trl_options,
)

from lrlhf.models import ScoreModel
from lrlhf.modules import DPO, SFT, RewardModel
from lrlhf.modules.metrics.reward_metrics import win_rate
from lrlhf.types import PreferenceBatch, SequenceBatch, SupervisedBatch

PHASES = ("update", "rest")

Row = dict[str, list[int]]
"""Token ids under the names that TRL reads."""


# ------------------------------------------------------------------ what both are given


class Kind(NamedTuple):
    """What distinguishes the three commands."""

    write_model: Callable[[str, Path, int], PreTrainedTokenizerBase]
    read: Callable[[dict[str, Any], PreTrainedTokenizerBase], Row]
    """The token ids of one line of the data."""
    build: Callable[[argparse.Namespace, Path, PreTrainedTokenizerBase], L.LightningModule]
    collate: Callable[[Sequence[Row], int], Any]
    trl_names: tuple[str, str]
    """Trainer and arguments."""
    load_in_trl: Any
    lengths: Callable[[Row], list[int]]
    """Tokens of the sequences of a row."""


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write the model, and the rows of training and test.

    Raises:
        ValueError: The file has too few rows that fit.
    """
    kind = KINDS[options.command]
    tokenizer = kind.write_model(options.model, folder / "model", options.seed)
    rows = read_rows(options.data, kind, tokenizer, options.max_length)
    wanted = (options.warm_up + options.steps) * options.batch_size
    if len(rows) <= options.held_out:
        raise ValueError(
            f"{options.data} has {len(rows)} rows of at most {options.max_length} tokens, and "
            f"--held-out takes {options.held_out}: none is left to train on"
        )
    rest, test = rows[options.held_out :], rows[: options.held_out]
    order = random.Random(options.seed)
    train: list[Row] = []
    while len(train) < wanted:
        train += order.sample(rest, len(rest))
    text = json.dumps({"train": train[:wanted], "test": test})
    (folder / "rows.json").write_text(text, encoding="utf-8")


def read_rows(
    path: Path, kind: Kind, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[Row]:
    """Tokenise every line once; longer rows are left out."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        rows = [kind.read(json.loads(line), tokenizer) for line in lines]
    return [row for row in rows if max(kind.lengths(row)) <= max_length]


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def _pair(line: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Row:
    prompt = line.get("prompt", "")
    return {f"{side}_ids": _ids(prompt + line[side], tokenizer) for side in ("chosen", "rejected")}


def _pair_with_prompt(line: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Row:
    """Split a pair where its two conversations part, unless the data does."""
    prompt, chosen, rejected = line.get("prompt", ""), line["chosen"], line["rejected"]
    if not prompt:
        cut = next(
            (at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    return {
        "prompt_ids": tokenizer(prompt)["input_ids"],
        "chosen_ids": _ids(chosen, tokenizer),
        "rejected_ids": _ids(rejected, tokenizer),
    }


def _completion(line: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Row:
    prompt = tokenizer(line["question"] + "\n")["input_ids"]
    answer = _ids(line["answer"], tokenizer)
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def _load(folder: Path) -> tuple[list[Row], list[Row], PreTrainedTokenizerBase]:
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "model")
    return rows["train"], rows["test"], tokenizer


def _step_tokens(kind: Kind, train: Sequence[Row], batch_size: int) -> list[int]:
    return [sum(sum(kind.lengths(row)) for row in rows) for rows in _chunks(train, batch_size)]


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
    run, kind = Run("lrlhf"), KINDS[options.command]
    train, test, tokenizer = _load(folder)
    pad_id = int(tokenizer.pad_token_id)
    module = kind.build(options, folder, tokenizer)
    network: Any = module.network if options.command == "reward" else module.policy
    if options.command != "reward":
        save_initial(network, folder)
    memory = Memory(network)
    dataset: Any = train  # a list will do
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=options.batch_size,
        collate_fn=lambda rows: kind.collate(rows, pad_id),
    )
    steps = LrlhfSteps(
        Laps(run, options.warm_up),
        _step_tokens(kind, train, options.batch_size),
        ExclusiveClock("rest", whole={"update"}),
    )
    lightning_trainer(options, folder, [steps]).fit(module, loader)
    run.memory = memory.peak()
    if options.command != "reward":
        save_weights(network, folder / "lrlhf.pt")
        return run
    _measure_accuracy(run, network, network, test, options, pad_id)
    # the same format as the other system's, whatever the network looks like while it is trained
    network.save_pretrained(folder / "trained", tokenizer)
    exported = AutoModelForSequenceClassification.from_pretrained(
        folder / "trained", dtype=torch.float32
    )
    save_weights(exported, folder / "lrlhf.pt")
    return run


def _shared(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the options of all three modules."""
    return {
        "tokenizer": tokenizer,
        "optimizer": optimizer_config(options),
        "max_grad_norm": options.clip,
        "seed": options.seed,
    }


def _reward_model(
    options: argparse.Namespace, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> RewardModel:
    return RewardModel(
        ScoreModel(
            source=str(folder / "model"), gradient_checkpointing=options.lrlhf_checkpointing
        ).load(),
        **_shared(options, tokenizer),
    )


def _dpo(options: argparse.Namespace, folder: Path, tokenizer: PreTrainedTokenizerBase) -> DPO:
    return DPO(
        lrlhf_policy(options, folder),
        beta=options.beta,
        **_shared(options, tokenizer),
    )


def _sft(options: argparse.Namespace, folder: Path, tokenizer: PreTrainedTokenizerBase) -> SFT:
    return SFT(
        lrlhf_policy(options, folder),
        **_shared(options, tokenizer),
    )


def preference_batch(rows: Sequence[Row], pad_id: int) -> PreferenceBatch:
    """Collate pairs of which the first is the better one."""
    prompts = [row.get("prompt_ids", []) for row in rows]
    chosen, rejected = (
        sequence_batch(
            [[*prompt, *row[f"{side}_ids"]] for prompt, row in zip(prompts, rows, strict=True)],
            list(map(len, prompts)),
            pad_id,
        )
        for side in ("chosen", "rejected")
    )
    return PreferenceBatch(
        candidate0=chosen,
        candidate1=rejected,
        labels=torch.ones(len(rows), 1),
        info=tuple({} for _ in rows),
    )


def sequence_batch(rows: Sequence[list[int]], prompts: Sequence[int], pad_id: int) -> SequenceBatch:
    """Pad rows at the right; of each the first ``prompts`` tokens are given."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    positions = torch.arange(ids.shape[1])
    mask = positions < torch.tensor([len(row) for row in rows])[:, None]
    return SequenceBatch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=mask & (positions >= torch.tensor(prompts)[:, None]),
    )


def supervised_batch(rows: Sequence[Row], pad_id: int) -> SupervisedBatch:
    """Collate prompts with their completions."""
    prompts = [row["labels"].count(-100) for row in rows]
    batch = sequence_batch([row["input_ids"] for row in rows], prompts, pad_id)
    return SupervisedBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        response_mask=batch.response_mask,
    )


KINDS = {
    "reward": Kind(
        write_classifier,
        _pair,
        _reward_model,
        preference_batch,
        ("RewardTrainer", "RewardConfig"),
        AutoModelForSequenceClassification,
        lambda row: [len(ids) for ids in row.values()],
    ),
    "dpo": Kind(
        write_language_model,
        _pair_with_prompt,
        _dpo,
        preference_batch,
        ("DPOTrainer", "DPOConfig"),
        AutoModelForCausalLM,
        lambda row: [
            len(row["prompt_ids"]) + len(row[f"{side}_ids"]) for side in ("chosen", "rejected")
        ],
    ),
    "sft": Kind(
        write_language_model,
        _completion,
        _sft,
        supervised_batch,
        ("SFTTrainer", "SFTConfig"),
        AutoModelForCausalLM,
        lambda row: [len(row["input_ids"])],
    ),
}


# ------------------------------------------------------------------ TRL


def run_trl(options: argparse.Namespace, folder: Path) -> Run:
    """Train with TRL, told to do what lrlhf does where its defaults differ."""
    trl, run, kind = import_trl(), Run("trl"), KINDS[options.command]
    datasets = importlib.import_module("datasets")
    train, test, tokenizer = _load(folder)
    model = kind.load_in_trl.from_pretrained(folder / "model", dtype=torch.float32)
    save_initial(model, folder)
    memory = Memory(model)
    trainer_name, arguments_name = kind.trl_names

    class InOrder(getattr(trl, trainer_name)):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # of token ids

    beta = {"beta": options.beta} if options.command == "dpo" else {}
    trainer = InOrder(
        model=model,
        args=getattr(trl, arguments_name)(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=options.batch_size,
            max_length=options.max_length,
            **beta,
            **shared_trl_options(options),
        ),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(list(train)),
    )
    trainer.add_callback(
        _trl_steps(Laps(run, options.warm_up), _step_tokens(kind, train, options.batch_size))
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

    if options.command == "reward":
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
    model: nn.Module,
    test: Sequence[Row],
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


def _chunks(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
