"""Supervised fine-tuning on texts, prompts with completions, and conversations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.functional.names import import_function
from lrlhf.functional.supervised import TOKEN_LOSSES, TokenLoss
from lrlhf.guard.anomalies import Guard, shown
from lrlhf.models import CausalLM, loss_tokens, packs, plain_model, sequence_outputs
from lrlhf.modules.checks import refuse_other_batch
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicyModule, load_policy
from lrlhf.modules.row_module import RowModule, RowOutputs
from lrlhf.types import SequenceBatch, SupervisedBatch

_METRICS = ("loss", "mean_logprob", "perplexity", "token_accuracy", "entropy")


class SFT(LoadedPolicyModule, RowModule[SequenceBatch]):
    """Trains a language model on given texts, with images where it reads them.

    One training step is one optimizer step. Its loss is the mean over all trained tokens of its
    rows, of all ranks: no padding, packing, split into micro-batches or share of a rank changes it.

        L = Σ_b Σ_t m[b,t] ℓ(log π(y[b,t] | y[b,<t])) / Σ_b Σ_t m[b,t]

    The mask m is the data's, see `lrlhf.datamodules.SupervisedDataModule`. Wherever a check at
    load time shows that it is exact, rows go through the model one after another without padding,
    each with positions and attention of its own.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, a `CausalLM` that says
            how to load it (LoRA, precision, frozen parts), or a model that is already built (then
            pass ``tokenizer``).
        tokenizer: For a policy that is already built.
        processor: For a vision-language policy that is already built; as ``AutoProcessor`` loads
            it.
        loss: Of a token: ``nll``, ``dft`` (dynamic fine-tuning), or the dotted path of a function
            from log-probabilities and mask, `[B, T]`, to losses `[B, T]`.
        micro_batch_tokens: Tokens of one forward pass as they are computed, padding included.
            Memory, not results, depends on it. "auto": on a GPU as many as fit, which the first
            steps find out, elsewhere as None; None: all rows of a batch at once.
        require_packing: Refuse a model whose rows have to be padded.
        log_entropy: Log the mean entropy of the next-token distributions, which takes a second
            buffer of logits.
        router_loss_coef: Weight of the load-balancing loss of a mixture of experts.
        optimizer: AdamW and its schedule; 2e-5 where it names no ``lr``, and 3 % of the steps are
            warm-up unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
        logprob_chunk: Tokens whose logits may exist at the same time; those of a pass that has more
            are computed again in the backward pass.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about given texts.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range.
    """

    eval_metric: ClassVar[str] = "eval/mean_logprob"
    stage: ClassVar[str] = "supervised"
    data_module: ClassVar[str] = "SupervisedDataModule"
    default_lr: ClassVar[float] = 2e-5
    output_name: ClassVar[str] = "the log-probabilities"

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: str = "nll",
        micro_batch_tokens: int | Literal["auto"] | None = "auto",
        require_packing: bool = False,
        log_entropy: bool = False,
        router_loss_coef: float = 0.0,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        logprob_chunk: int = 1024,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(
            micro_batch_tokens=micro_batch_tokens,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            guard=guard,
            seed=seed,
            router_loss_coef=router_loss_coef,
        )
        if logprob_chunk < 1:
            raise ValueError(f"logprob_chunk is {logprob_chunk}; it must be 1 or more")
        self.token_loss: TokenLoss = TOKEN_LOSSES.get(loss) or import_function(
            "loss", loss, TOKEN_LOSSES
        )
        self.require_packing = require_packing
        self.log_entropy, self.logprob_chunk = log_entropy, logprob_chunk
        self.set_model(load_policy(policy, tokenizer, processor))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.require_packing and not packs(plain_model(self.policy)):
            raise ValueError(
                f"require_packing is set, and {type(plain_model(self.policy)).__name__} cannot "
                "compute rows without padding (the log says why): take another model or "
                "attn_implementation, or leave require_packing out"
            )

    # ---- its rows

    def rows_of(self, batch: SupervisedBatch, it: Iteration, *, training: bool) -> SequenceBatch:
        """Return the rows, trained on what the model can say."""
        refuse_other_batch(self, batch, SupervisedBatch, self.data_module)
        rows = batch.rows
        return replace(rows, response_mask=loss_tokens(self.policy, rows))

    def outputs_of(self, rows: SequenceBatch) -> RowOutputs:
        """Compute the log-probability of every trained token."""
        out = sequence_outputs(
            self.policy,
            rows,
            chunk_size=self.logprob_chunk,
            entropy=self.log_entropy,
            router_loss=self.router_loss_coef > 0 and self.training,
        )
        values = {"mean_logprob": out.logprobs, "token_accuracy": out.is_top.float()}
        if out.entropy is not None:
            values["entropy"] = out.entropy
        losses = self.token_loss(out.logprobs, rows.response_mask)
        return RowOutputs(out.logprobs, losses, values, out.router_loss)

    def tell(
        self,
        outputs: RowOutputs,
        rows: SequenceBatch,
        records: list[dict[str, Any]],
        prefixes: set[str],
    ) -> None:
        """Add the log-probability of what is trained on."""
        del rows, prefixes
        for record, logprob in zip(records, outputs.outputs.sum(dim=1), strict=True):
            record["logprob"] = shown(logprob)

    def metric_names(self) -> list[str]:
        return [name for name in _METRICS if self.log_entropy or name != "entropy"]

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return _named(means)


def _named(means: dict[str, float]) -> dict[str, float]:
    """Add the perplexity to each mean log-probability."""
    named = dict(means)
    for name, value in means.items():
        if name.endswith("mean_logprob"):
            # a model that knows nothing of a token is no reason to stop
            perplexity = math.exp(-value) if value > -700 else math.inf
            named[name.replace("mean_logprob", "perplexity")] = perplexity
    return named
