"""Reward networks: token sequences in, one score per named head out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lrlhf.models.heads import HeadConfig, HeadKind, Pooling
from lrlhf.models.loading.deferred_weights import reading
from lrlhf.models.loading.pretrained import DType, PretrainedSpec
from lrlhf.models.loading.reward_files import load_backbone, load_scorer, save_scorer
from lrlhf.models.scorers import HeadedBackbone, Scorer
from lrlhf.types import SequenceBatch


class RewardNetwork(nn.Module):
    """Scores whole sequences.

    A score depends on the row's attended tokens only: not on padding, its side or its id, nor on
    the other rows. Every row needs at least one attended token. A sequence classifier of others
    scores as in ``transformers``: a decoder reads the last token that is not the padding of its
    config, so a text that ends in that token is read without its end.
    """

    def __init__(self, scorer: Scorer) -> None:
        """Wrap a scorer; ``ScoreModel.load`` and ``from_pretrained`` build it."""
        super().__init__()
        self.scorer = scorer

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the scores, in the order of the columns."""
        return self.scorer.head_names

    @property
    def config(self) -> PreTrainedConfig:
        """Of the network behind the heads."""
        return self.scorer.plain.config

    def forward(self, batch: SequenceBatch) -> Float[Tensor, "B H"]:
        """Score every row.

        Args:
            batch: Padded on either side, with or without media; ``response_mask`` is not read.

        Returns:
            Float32 scores, one column per head in the order of ``head_names``.
        """
        scores: Tensor = self.scorer(batch)
        return scores.float()

    def save_pretrained(
        self, folder: str | Path | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write a folder that :meth:`from_pretrained` loads with exactly the same scores.

        Adapters are merged. One linear head on the last token of a decoder is written so that
        ``AutoModelForSequenceClassification.from_pretrained(folder)`` gives the same scores too.
        Where the padding token may end a text, the tokenizer in the folder pads with another, for
        which the embedding gets a row if it has none left. Other networks come with the backbone
        in its own format.

        Args:
            folder: Created where it does not exist; None: see `save_model`.
            tokenizer: Written beside the weights.
        """
        save_scorer(self.scorer, None if folder is None else Path(folder), tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: DType = "auto",
        attn_implementation: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> RewardNetwork:
        """Load a trained reward model, frozen and in eval mode.

        Args:
            source: Folder written by ``save_pretrained``, or any sequence classifier with one
                label: a folder, a hub id or ``package:<module>[/<path>]``.
            dtype: Of the backbone; ``auto`` is as stored. The heads are float32.
            attn_implementation: As in ``from_pretrained`` of ``transformers``.
            revision: Branch, tag or commit of a hub id.
            trust_remote_code: Run Python code that comes with the model.

        Raises:
            ValueError: The source leads to no reward model.
        """
        spec = PretrainedSpec(
            source=str(source),
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        with reading(later=False):  # it is not split: processes score different numbers of rows
            scorer = load_scorer(spec, trainable=False)
        if scorer is None:
            raise ValueError(
                f"source {str(source)!r} is no reward model: it has neither reward_head.json nor "
                "a sequence classifier with one label. Train one from it with "
                "lrlhf.modules.RewardModel."
            )
        return cls(scorer).eval()


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoreModel(PretrainedSpec):
    """A pretrained backbone with scalar heads; a trained reward model keeps its own heads."""

    heads: list[str] = field(default_factory=lambda: ["reward"])
    """One score each; a preference data set labels them by these names."""
    pooling: Pooling = "last"
    """Which tokens a head reads: the ``last``, the ``mean``, or a learnt ``attention`` over all."""
    layer: int = -1
    """-1: the last hidden state, final norm included; k: what block k returns, counted from 1."""
    head: HeadKind = "linear"
    """``mlp``: linear, norm, SiLU, linear."""
    learn_scale: bool = False
    """Learn one positive factor per head, the same in training and evaluation."""
    scale_max: float = 100.0
    """The factor stays within ``(1 / scale_max, scale_max)``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head_config()  # its checks belong to the moment the YAML is read

    def head_config(self) -> HeadConfig:
        """Return what decides the scores besides the weights."""
        return HeadConfig(
            names=tuple(self.heads),
            pooling=self.pooling,
            layer=self.layer,
            head=self.head,
            learn_scale=self.learn_scale,
            scale_max=self.scale_max,
        )

    def load(self, *, any_heads: bool = False) -> RewardNetwork:
        """Load the network, ready for training, its backbone in eval mode as it comes.

        Args:
            any_heads: A reward model may have other heads than these, and keeps its own.

        Raises:
            ValueError: The source leads to no model, an option does not fit it, or it is a reward
                model with other heads than these.
        """
        trained = load_scorer(self, trainable=True)
        if trained is not None:
            if not any_heads:
                self._check_same_heads(trained)
            return RewardNetwork(trained)
        backbone = load_backbone(self, trainable=True)
        return RewardNetwork(HeadedBackbone(backbone, self.head_config()))

    def _check_same_heads(self, trained: Scorer) -> None:
        found = trained.config if isinstance(trained, HeadedBackbone) else HeadConfig()
        found = replace(found, pad_token_id=None)  # it stays as it is
        if found != self.head_config():
            raise ValueError(
                f"source {self.source!r} is a reward model with {found}, and the configuration "
                f"asks for {self.head_config()}. Make them equal to train on, or start from the "
                "model below it."
            )
