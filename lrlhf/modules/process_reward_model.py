"""Process reward models: how probable it is that each step of an answer is correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import harmonic_mean
from typing import Any, ClassVar, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.functional.masking import last_tokens
from lrlhf.guard.anomalies import Guard, shown
from lrlhf.models import (
    STEP_SEPARATOR,
    StepModel,
    check_mergeable,
    evaluating,
    fit_padding,
    plain_model,
    prepare_step_model,
    step_logits,
)
from lrlhf.modules.checks import refuse_other_batch
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.row_module import RowModule, RowOutputs
from lrlhf.rewards import ProcessReward
from lrlhf.rollout.records import origin
from lrlhf.run.quiet_output import quiet
from lrlhf.types import Prompt, StepBatch

_METRICS = (
    *("loss", "accuracy", "auroc"),
    *("first_error_accuracy", "no_error_accuracy", "first_error_f1"),
)
_HALF = 0.5
"""A step counts as correct above it."""


class ProcessRewardModel(RowModule[StepBatch]):
    """Trains a model that judges every step of an answer, on answers with labelled steps.

    One training step is one optimizer step. Its loss is the cross-entropy of "correct" against
    "wrong", mean over all labelled steps of its rows, of all ranks: no padding, packing, split into
    micro-batches or share of a rank changes it. With the log-odds z of a step, which are read at
    the last token behind it, and its label y, 1, 0 or between:

        L = Σ_steps [ -y log σ(z) - (1 - y) log(1 - σ(z)) ] / steps

    Args:
        model: What to train: a hub id, a folder, ``package:<module>``, a `StepModel` that says how
            to load it (LoRA, precision, frozen parts), or a token classifier with two classes that
            is already built (then pass ``tokenizer``). A language model gets a new classifier.
        tokenizer: For a model that is already built.
        step_separator: Text behind each step, which is where the model judges it. It is kept in the
            exported config. None: as the model was trained, a newline for a new one.
        last_step_only: Train on the last labelled step of each row alone, for data whose rows
            repeat the steps before it. Evaluations measure all steps.
        micro_batch_tokens: Tokens of one forward pass as they are computed, padding included.
            Memory, not results, depends on it. "auto": on a GPU as many as fit, which the first
            steps find out, elsewhere as None; None: all rows of a batch at once.
        optimizer: AdamW and its schedule; 1e-5 where it names no ``lr``, and 3 % of the steps are
            warm-up unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about given rows.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range, or the model cannot judge steps.

    Reference:
        Uesato et al. 2022, https://arxiv.org/abs/2211.14275; Lightman et al. 2023,
        https://arxiv.org/abs/2305.20050
    """

    eval_metric: ClassVar[str] = "eval/accuracy"
    stage: ClassVar[str] = "steps"
    data_module: ClassVar[str] = "StepwiseDataModule"
    default_lr: ClassVar[float] = 1e-5
    output_name: ClassVar[str] = "the log-odds of steps"

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        model: str | StepModel | PreTrainedModel | PeftModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        step_separator: str | None = None,
        last_step_only: bool = False,
        micro_batch_tokens: int | Literal["auto"] | None = "auto",
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(
            micro_batch_tokens=micro_batch_tokens,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            guard=guard,
            seed=seed,
        )
        if step_separator == "":
            raise ValueError("step_separator is empty; it must be text behind each step")
        self.last_step_only = last_step_only
        loaded = _load(model, tokenizer)
        self.model = loaded.model
        self.set_model(loaded)
        config = plain_model(self.model).config
        known = getattr(config, "step_separator", STEP_SEPARATOR)
        self.step_separator = known if step_separator is None else step_separator
        config.step_separator = self.step_separator
        self._step_scores: dict[str, list[Tensor]] = {}
        """`[N, 2]`, probability and label of the steps so far, by prefix."""

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"reward": self.model}

    def score(
        self, prompts: Prompt | Sequence[Prompt], steps: Sequence[Any], *, batch_size: int = 8
    ) -> Any:
        """Return the probability of every step to be correct, as the model is now.

        Args:
            prompts: Text or a chat; with several answers, a list with one for each.
            steps: Of an answer, a list of texts; of several answers, a list of lists.
            batch_size: Answers that are scored at the same time.

        Returns:
            A list of numbers for one answer, a list of lists for several; None in the place of an
            answer that is too long for the model.

        Example:
            >>> module.score("What is 2 + 3 + 4?", ["2 + 3 = 5", "5 + 4 = 10"])
            [0.97, 0.04]
        """
        alone = not steps or isinstance(steps[0], str)
        answers: list[Sequence[str]] = [steps] if alone else list(steps)
        rows: Any = [prompts] if alone else prompts
        if len(rows) != len(answers):
            raise ValueError(f"there are {len(rows)} prompts and {len(answers)} answers")
        reward = ProcessReward.of_model(self.model, self.tokenizer, batch_size=batch_size)
        with evaluating(self.model):
            values = reward.judge(rows, answers)
        return values[0] if alone else values

    # ---- its rows

    def rows_of(self, batch: StepBatch, it: Iteration, *, training: bool) -> StepBatch:
        """Return the rows, trained on the steps that are asked for."""
        refuse_other_batch(self, batch, StepBatch, self.data_module)
        if not training or not self.last_step_only:
            return batch
        return replace(batch, response_mask=last_tokens(batch.response_mask))

    def outputs_of(self, rows: StepBatch) -> RowOutputs:
        """Compute the log-odds of every step."""
        logits = step_logits(self.model, replace(rows, response_mask=rows.step_ends))
        labels = rows.labels.to(logits)
        losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        right = (logits > 0) == (labels > _HALF)
        return RowOutputs(logits, losses, {"accuracy": right.to(logits)})

    def records_of(self, rows: StepBatch, places: tuple[str, ...] | None) -> list[dict[str, Any]]:
        """Describe prompt and steps of each row in JSON types."""
        return [
            {**origin(place), **self._record_of(rows, row)}
            for row, place in enumerate(places or ("",) * len(rows))
        ]

    def _record_of(self, rows: StepBatch, row: int) -> dict[str, Any]:
        ids, begin = rows.input_ids[row].tolist(), int(rows.starts[row])
        record: dict[str, Any] = {"prompt": str(self.tokenizer.decode(ids[:begin])), "steps": []}
        for end in rows.step_ends[row].nonzero().flatten().tolist():
            text = str(self.tokenizer.decode(ids[begin : end + 1]))
            labelled = bool(rows.response_mask[row, end])
            label = float(rows.labels[row, end]) if labelled else None
            record["steps"].append({"text": text, "label": label})
            begin = end + 1
        return record

    # ---- evaluation

    def tell(
        self,
        outputs: RowOutputs,
        rows: StepBatch,
        records: list[dict[str, Any]],
        prefixes: set[str],
    ) -> None:
        """Add the probability of every step, and measure which error is the first."""
        probabilities = outputs.outputs.sigmoid()
        for row, record in enumerate(records):
            steps, own = record["steps"], probabilities[row, rows.step_ends[row]]
            for step, value in zip(steps, own, strict=True):
                step["probability"] = shown(value)
            labels = [step["label"] for step in steps]
            record |= _first_errors(labels, own.tolist())
            for prefix in prefixes if "first_error" in record else ():
                name = "no_error" if record["first_error"] is None else "first_error"
                hit = record["first_error"] == record["found_error"]
                self._evaluated.add(f"{prefix}{name}_accuracy", float(hit), 1.0)
        certain = rows.response_mask & ((rows.labels == 0) | (rows.labels == 1))
        certain_steps = torch.stack(
            [probabilities[certain], rows.labels[certain].to(probabilities)], 1
        )
        for prefix in prefixes:
            self._step_scores.setdefault(prefix, []).append(certain_steps.cpu())

    def metric_names(self) -> list[str]:
        return list(_METRICS)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._step_scores = {}

    def evaluation_values(self) -> dict[str, float]:
        """Return the means, and what is measured on all steps at once."""
        steps = {prefix: torch.cat(parts) for prefix, parts in self._step_scores.items()}
        return super().evaluation_values() | self.roc_areas(steps)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Add the harmonic mean of the accuracies of answers with an error and of those without.

        Reference:
            Zheng et al. 2024 (ProcessBench), https://arxiv.org/abs/2412.06559, §3.2
        """
        values = dict(means)
        for prefix in self.prefixes():
            names = [f"{prefix}{name}_error_accuracy" for name in ("first", "no")]
            if all(name in means for name in names):
                values[f"{prefix}first_error_f1"] = harmonic_mean([means[name] for name in names])
        return values


def _first_errors(labels: Sequence[float | None], scores: Sequence[float]) -> dict[str, int | None]:
    """Return the first step that is wrong, and the first that was found to be; None: there is none.

    Nothing is returned of an answer whose first wrong step is not known.
    """
    wrong = next((i for i, one in enumerate(labels) if one is not None and one <= _HALF), None)
    if None in labels[:wrong]:
        return {}
    first = next((i for i, one in enumerate(scores) if not one > _HALF), None)
    return {"first_error": wrong, "found_error": first}


@quiet()
def _load(
    model: str | StepModel | PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedPolicy:
    """Load a model, unless it is loaded already."""
    if isinstance(model, str):
        model = StepModel(source=model)
    if isinstance(model, StepModel):
        return LoadedPolicy(model.load(), tokenizer or model.load_tokenizer(), None)
    if tokenizer is None:
        raise ValueError("model is already built: pass its tokenizer too")
    fit_padding(tokenizer, model)
    check_mergeable(model)
    prepare_step_model(model)
    return LoadedPolicy(model, tokenizer, None)
