"""Reward models from preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.guard import Guard
from lrlhf.media import MediaProcessor
from lrlhf.models import RewardNetwork, ScoreModel, fit_padding
from lrlhf.modules.checks import refuse_idle_encoder
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.pairs.pair_losses import PairObjective, resolve_losses
from lrlhf.modules.pairs.pair_module import PairModule, PairOutputs
from lrlhf.modules.pairs.pair_step import PairScores, concatenate, pad_id_of
from lrlhf.modules.pairs.score import score
from lrlhf.run.quiet_output import quiet
from lrlhf.types import PreferenceBatch, SequenceBatch


class RewardModel(PairModule):
    """Trains scalar scores on pairs of answers, with one head per named aspect.

    The loss of an optimizer step is the mean over all of its pairs, of all micro-batches and
    ranks, of the summed losses of each pair's labels. A label that is missing adds nothing. A step
    whose loss or gradient is not finite is left out on all ranks.

    Args:
        model: What to train: a hub id, a folder, ``package:<module>``, a `ScoreModel` that says how
            to load it, or a `RewardNetwork` that is already built (then pass ``tokenizer``).
        tokenizer: For a network that is already built.
        processor: For a vision-language network that is already built; as ``AutoProcessor`` loads
            it.
        loss: ``bradley_terry``, ``log_exp``, ``hps``, the dotted path of a function from chosen and
            rejected scores to losses, or a mix of these: a weight for each.
        margin: By how much the chosen score should lead; a pair's own margin replaces it.
        tie_weight: Weight of abs(score gap) of pairs labelled as equal, beside a preference's loss.
        head_weights: Weight of each head in the loss, 1 where none is given.
        center_coef: Strength of (chosen + rejected)², which keeps scores around 0; try 0.01.
        label_smoothing: Assumed share of wrong labels.
        optimizer: AdamW and its schedule, counted in optimizer steps; 3 % of them are warm-up
            unless ``warmup_steps`` says otherwise.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
            ``trainer.gradient_clip_val`` takes its place where that is set.
        guard: When an optimizer step is left out, and when to give up; of the limits only those
            of loss and gradient are about a reward model.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.

    Raises:
        ValueError: An option is out of its range, or names a head that does not exist.
    """

    train_metric: ClassVar[str] = "reward_model/accuracy"
    stage: ClassVar[str] = "reward"
    default_lr: ClassVar[float] = 1e-5

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        model: str | ScoreModel | RewardNetwork,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        processor: ProcessorMixin | None = None,
        loss: str | dict[str, float] = "bradley_terry",
        margin: float = 0.0,
        tie_weight: float = 0.01,
        head_weights: dict[str, float] | None = None,
        center_coef: float = 0.0,
        label_smoothing: float = 0.0,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        objective = PairObjective(
            losses=resolve_losses(loss),
            margin=margin,
            tie_weight=tie_weight,
            center_coef=center_coef,
            label_smoothing=label_smoothing,
        )
        super().__init__(
            objective, optimizer=optimizer, max_grad_norm=max_grad_norm, guard=guard, seed=seed
        )
        self.network, self.tokenizer, self.processor = load_reward_model(
            model, tokenizer, processor
        )
        names = self.network.head_names
        self.set_heads(names, _weights(names, head_weights))

    # ---- what callbacks and data modules ask for

    def trainable_models(self) -> dict[str, nn.Module]:
        """Return what receives gradients, by role."""
        return {"reward": self.network}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the network and its tokenizer into ``folder``."""
        if self.processor is not None and folder is not None:
            self.processor.save(folder)
        # last: its tokenizer may pad otherwise than that of the processor
        self.network.save_pretrained(folder, self.tokenizer)

    score = score

    def summary(self) -> dict[str, str]:
        """Say what is trained, and on which heads."""
        return {**super().summary(), "heads": ", ".join(self.head_names)}

    # ---- training

    def on_fit_start(self) -> None:
        refuse_idle_encoder(self.trainer, self.network.scorer.plain, self.processor)
        super().on_fit_start()

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Score every row; returns [B, H] in the order of ``head_names``."""
        scores: Tensor = self.network(batch)
        return scores

    @staticmethod
    def train_name(metric: str) -> str:
        return f"reward_model/{metric}"

    def outputs_of(self, batch: PreferenceBatch) -> PairOutputs:
        """Score both candidates in one forward pass."""
        both = concatenate(batch.candidate0, batch.candidate1, pad_id=pad_id_of(self.tokenizer))
        return PairOutputs(PairScores(*self(both).split(len(batch))))


def _weights(head_names: Sequence[str], weights: Mapping[str, float] | None) -> list[float]:
    weights = weights or {}
    for name in weights:
        if name not in head_names:
            raise ValueError(
                f"head_weights names the head {name!r}; the heads are {', '.join(head_names)}"
            )
    return [float(weights.get(name, 1.0)) for name in head_names]


@quiet()
def load_reward_model(
    model: object, tokenizer: PreTrainedTokenizerBase | None, processor: ProcessorMixin | None
) -> tuple[RewardNetwork, PreTrainedTokenizerBase, MediaProcessor | None]:
    """Return a network, its tokenizer, and for a vision-language network its processor.

    Args:
        model: A network, a `ScoreModel`, or a source; a reward model there keeps its heads.
        tokenizer: None: the one that comes with the source.
        processor: None: the one that comes with the source, if any.

    Raises:
        ValueError: It is nothing of the kind, or a network without a tokenizer.
    """
    if isinstance(model, RewardNetwork):
        if tokenizer is None:
            raise ValueError("model is already built: pass its tokenizer too")
        network = model
    else:
        spec = _as_spec(model)
        # who names a source alone has not chosen heads: a reward model has its own
        network = spec.load(any_heads=isinstance(model, str))
        tokenizer = tokenizer or spec.load_tokenizer()
        processor = processor or spec.load_processor()
    fit_padding(tokenizer, network)
    return network, tokenizer, MediaProcessor.for_model(processor, network.config)


def _as_spec(model: object) -> ScoreModel:
    if isinstance(model, str):
        return ScoreModel(source=model)
    if isinstance(model, ScoreModel):
        return model
    raise ValueError(
        f"model is a {type(model).__name__}, expected a source, a ScoreModel or a RewardNetwork"
    )
