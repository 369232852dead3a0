"""What modules that learn from the tokens of given rows have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.core import set_names
from lrlhf.functional.masking import masked_sum
from lrlhf.guard.anomalies import Guard, prompt_text
from lrlhf.guard.dump import StepBundle
from lrlhf.guard.dump_replay import ReplayedStep
from lrlhf.media import MediaProcessor
from lrlhf.modules.base import SingleModelModule, SteppedOptimizer
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.update import OptimizerStep, plan_micro_batches
from lrlhf.rollout import trim
from lrlhf.rollout.records import origin
from lrlhf.run import Collectives
from lrlhf.types import SequenceBatch, TextBatch

RowsT = TypeVar("RowsT", bound=SequenceBatch)
BatchT = TypeVar("BatchT", bound=SequenceBatch)


class RowOutputs(NamedTuple):
    """What a model makes of rows."""

    outputs: Tensor
    """`[B, T]`, what the losses are computed from."""
    losses: Tensor
    """`[B, T]`, of every token."""
    values: Mapping[str, Tensor] = {}
    """`[B, T]` each, by the names that their means over the trained tokens are logged under."""
    router_loss: Tensor | None = None
    """Of a mixture of experts; None: there is none."""


class RowModule(SingleModelModule, Generic[RowsT]):
    """Trains a model whose loss is a mean over trained tokens, or answers, of given rows.

    One training step is one optimizer step. Its loss is the mean over all trained tokens of its
    rows, of all ranks: no padding, packing, split into micro-batches or share of a rank changes it.
    A subclass calls `set_model`, and defines ``trainable_models`` and the abstract methods.

    Args:
        micro_batch_tokens: Tokens of one forward pass.
        optimizer: AdamW and its schedule.
        max_grad_norm: Clip the gradient to this norm.
        guard: When an optimizer step is left out.
        seed: Seeds dropout.
        router_loss_coef: Weight of the load-balancing loss of a mixture of experts.
    """

    train_metric: ClassVar[str] = "train/loss"
    stage: ClassVar[str]
    """What dumps call the step."""
    output_name: ClassVar[str]
    """What messages call the model's outputs."""
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None

    def __init__(
        self,
        *,
        micro_batch_tokens: int | Literal["auto"] | None,
        optimizer: OptimizerConfig,
        max_grad_norm: float,
        guard: Guard,
        seed: int | None,
        router_loss_coef: float = 0.0,
    ) -> None:
        super().__init__(optimizer=optimizer, max_grad_norm=max_grad_norm, guard=guard, seed=seed)
        if isinstance(micro_batch_tokens, int) and micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens is {micro_batch_tokens}; it must be 1 or more")
        if router_loss_coef < 0:
            raise ValueError(f"router_loss_coef is {router_loss_coef}; it must be 0 or more")
        self.micro_batch_tokens = micro_batch_tokens
        self.router_loss_coef = router_loss_coef
        self.stateful["token_budget"] = self.token_budget
        self._evaluated = MetricSums()

    def set_model(self, loaded: LoadedPolicy) -> None:
        """Take what is trained, and what reads for it."""
        self._loaded = loaded
        _, self.tokenizer, self.processor = loaded

    # ---- what a subclass says of its rows

    @abstractmethod
    def rows_of(self, batch: Any, it: Iteration, *, training: bool) -> RowsT:
        """Return the rows of a batch; ``response_mask`` is what is trained on, or measured."""

    @abstractmethod
    def outputs_of(self, rows: RowsT) -> RowOutputs:
        """Run the model over rows."""

    def counted(self, rows: RowsT) -> Tensor:
        """Return the mask `[B, T]` of the entries of `RowOutputs` that means are taken over."""
        return rows.response_mask

    def records_of(self, rows: RowsT, places: tuple[str, ...] | None) -> list[dict[str, Any]]:
        """Describe each row in JSON types: its prompt, what is learnt, and how long that is."""
        return [
            {
                **origin(place),
                "prompt": prompt_text(rows, row, self.tokenizer),
                "completion": str(
                    self.tokenizer.decode(rows.input_ids[row, rows.response_mask[row]].tolist())
                ),
                "tokens": int(rows.response_mask[row].sum()),
            }
            for row, place in enumerate(places or ("",) * len(rows))
        ]

    @abstractmethod
    def tell(
        self, outputs: RowOutputs, rows: RowsT, records: list[dict[str, Any]], prefixes: set[str]
    ) -> None:
        """Add what was found of evaluated rows to their records."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """Return the names of all metrics that evaluations may log."""

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Add to the means by name what follows from them."""
        return means

    # ---- what callbacks and strategies ask for

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the model, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        self._loaded.save(folder)

    @property
    def _model(self) -> nn.Module:
        (model,) = self.trainable_models().values()
        return model

    # ---- training

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor | None:
        it = Iteration(self)
        it.metrics.add("train/lr", self.optimizer_of(0).param_groups[0]["lr"], 1.0)
        with it.phase("update"):
            self._take(self.rows_of(batch, it, training=True), it, batch.places)
        self.advance_schedule(0)
        self.token_budget.update(it.ranks.least)
        it.measure_costs(float(batch.attention_mask.sum()))
        for name, count in self.step_guard.metrics().items():
            it.metrics.add(name, count, 1.0)
        values = self.derived(it.metrics.reduce(it.ranks, it.device))
        for name, value in values.items():
            self.log(name, value, prog_bar=name == self.train_metric, batch_size=len(batch))
        return torch.tensor(values["train/loss"]) if "train/loss" in values else None

    def _take(self, part: RowsT, it: Iteration, places: tuple[str, ...] | None = None) -> None:
        """Take an optimizer step, unless there is nothing to learn from."""
        self._model.train()
        masks = (self.counted(part), part.response_mask)
        sums = torch.stack([mask.sum().float() for mask in masks]).to(it.device)
        total, tokens = it.ranks.sum(sums)
        it.metrics.add("train/tokens", tokens, 1.0)
        # a step without a gradient would still move the weights by the optimizer's momentum
        if not total:
            return

        step = OptimizerStep(
            part,
            it,
            [SteppedOptimizer(0, "train", self.max_grad_norm)],
            stage=self.stage,
            models=[self._loaded.model],
            tokenizer=self.tokenizer,
            max_tokens=self.micro_batch_tokens,
            shared=False,
            describe=lambda rows, _: self.records_of(rows, places),
        )
        for micro in step:
            outputs = self.outputs_of(micro)
            step.watch.outputs[self.output_name] = outputs.outputs.detach()
            mask = self.counted(micro)
            self._measure(outputs, micro, it.metrics, "train/")
            loss = masked_sum(outputs.losses, mask) / total
            if outputs.router_loss is not None:
                it.metrics.add("train/router_loss", outputs.router_loss, step.share)
                loss = loss + self.router_loss_coef * mask.sum() / total * outputs.router_loss
            step.backward(loss)

    def _measure(self, outputs: RowOutputs, rows: RowsT, metrics: MetricSums, prefix: str) -> None:
        """Add to the means over tokens whose names begin with ``prefix``."""
        mask = self.counted(rows)
        for name, values in {"loss": outputs.losses, **outputs.values}.items():
            metrics.add(f"{prefix}{name}", masked_sum(values.detach(), mask), mask.sum())

    # ---- the guard

    @property
    def step_names(self) -> tuple[str, ...]:
        """Stages whose steps `replay_step` knows."""
        return (self.stage,)

    def replay_step(self, bundle: StepBundle) -> ReplayedStep:
        """Replay the step of a dump, see `lrlhf.guard.dump_replay.Replayable`."""
        part: Any = bundle.batches["part"]
        self._take(part, Iteration(self, seeds=bundle.seeds[0]))
        return ReplayedStep(self.records_of(part, None))

    # ---- evaluation

    def validation_step(
        self, batch: TextBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        del batch_idx
        named = set_names(self.trainer)[dataloader_idx]
        return {"records": self._evaluate(batch, {"", f"{named}/" if named else ""})}

    test_step = validation_step

    def predict_step(
        self, batch: TextBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, Any]]:
        """Return a line for each row, as evaluations write them."""
        del batch_idx, dataloader_idx
        return self._evaluate(batch, set())

    def _evaluate(self, batch: TextBatch, prefixes: set[str]) -> list[dict[str, Any]]:
        """Add rows to the metrics; returns a line for each."""
        it = Iteration(self)
        part = self.rows_of(batch, it, training=False)
        records = self.records_of(part, batch.places)
        for rows, micro in self.micro_batches(part, it):
            outputs = self.outputs_of(micro)
            for prefix in prefixes:
                self._measure(outputs, micro, self._evaluated, prefix)
            self.tell(outputs, micro, [records[row] for row in rows.tolist()], prefixes)
        return records

    def micro_batches(self, part: BatchT, it: Iteration) -> Iterator[tuple[Tensor, BatchT]]:
        """Cut rows into micro-batches on the device, each with the indices of its rows."""
        for micro_batch in plan_micro_batches(
            part, [self._loaded.model], it, max_tokens=self.micro_batch_tokens, shared=False
        ):
            yield micro_batch.rows, trim(part.select(micro_batch.rows)).to(it.device)

    def on_validation_epoch_start(self) -> None:
        self._evaluated = MetricSums()  # of one that was broken off

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("eval")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def evaluation_values(self) -> dict[str, float]:
        """Return what the rows of all ranks were measured to be, by name."""
        return self.derived(self._evaluated.reduce(Collectives(self.trainer), self.device))

    def _log_evaluation(self, stage: str) -> None:
        values = {f"{stage}/{name}": value for name, value in self.evaluation_values().items()}
        # equal on all ranks already; sync_dist says so to Lightning
        self.log_dict(values, batch_size=1, sync_dist=True)

    def roc_areas(self, own: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ``auroc`` by prefix where it is defined; all ranks call.

        Args:
            own: By prefix `[N, 2]`, score and label, 1 or 0, of what this rank has evaluated.
        """
        values = {}
        for prefix in self.prefixes():
            parts = Collectives(self.trainer).gather(own.get(prefix, torch.empty(0, 2)).cpu())
            scores, labels = torch.cat(parts).unbind(dim=1)
            if labels.any() and not labels.all():
                # loads every metric of torchmetrics, which takes a second
                metrics = import_module("torchmetrics.functional.classification")
                values[f"{prefix}auroc"] = float(metrics.binary_auroc(scores, labels.long()))
        return values

    def prefixes(self) -> list[str]:
        """Return what names of metrics begin with: nothing, or the name of a validation set."""
        return ["", *(f"{name}/" for name in set_names(self.trainer) if name)]

    def evaluation_names(self) -> set[str]:
        """Return the names of all metrics that evaluations may log."""
        names = self.metric_names()
        return {f"eval/{prefix}{name}" for prefix in self.prefixes() for name in names}
