"""A reward network as a configuration describes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lrlhf.models.heads import HeadConfig, HeadKind, Pooling
from lrlhf.models.loading.pretrained import PretrainedSpec
from lrlhf.models.loading.reward_files import load_backbone, load_scorer
from lrlhf.models.reward_network import RewardNetwork
from lrlhf.models.scorers import HeadedBackbone, Scorer


@dataclass(frozen=True, kw_only=True)
class ScoreModel(PretrainedSpec):
    """A pretrained body with scalar heads; a trained reward model goes on with its own heads."""

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

    def load(self) -> RewardNetwork:
        """Load the network, ready for training, its backbone in eval mode as it comes.

        Raises:
            ValueError: The source leads to no model, an option does not fit it, or it is a reward
                model with other heads than these.
        """
        trained = load_scorer(self, trainable=True)
        if trained is not None:
            self._check_same_heads(trained)
            return RewardNetwork(trained)
        backbone = load_backbone(self, trainable=True)
        return RewardNetwork(HeadedBackbone(backbone, self.head_config()))

    def _check_same_heads(self, trained: Scorer) -> None:
        found = trained.config if isinstance(trained, HeadedBackbone) else HeadConfig()
        if found != self.head_config():
            raise ValueError(
                f"source {self.source!r} is a reward model with {found}, and the configuration "
                f"asks for {self.head_config()}. Make them equal to train on, or start from the "
                "model below it."
            )
