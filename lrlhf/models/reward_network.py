"""Reward networks: token sequences in, one score per named head out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models.backbone import allow_packing
from lrlhf.models.heads import HeadConfig, HeadKind, Pooling, ValueHead, plain_model
from lrlhf.models.loading.deferred_weights import device_for_new, reading, waits
from lrlhf.models.loading.export import merged_state_dict, save_model
from lrlhf.models.loading.model_sources import resolve_source
from lrlhf.models.loading.pretrained import DType, PretrainedSpec
from lrlhf.models.loading.reward_files import load_backbone, load_scorer, save_scorer
from lrlhf.models.modes import evaluating, trial
from lrlhf.models.scorers import HeadedBackbone, Scorer
from lrlhf.models.sharding import device_of
from lrlhf.models.token_logprobs import sequence_values
from lrlhf.options.conversion import settings
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


@settings
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
        config = trained.config if isinstance(trained, HeadedBackbone) else HeadConfig()
        config = replace(config, pad_token_id=None)  # it stays as it is
        if config != self.head_config():
            raise ValueError(
                f"source {self.source!r} is a reward model with {config}, and the configuration "
                f"asks for {self.head_config()}. Make them equal to train on, or start from the "
                "model below it."
            )


_HEAD_WEIGHTS = "value_head.safetensors"


class ValueNetwork(nn.Module):
    """A backbone and a head: the value of the state in which each response token is chosen.

    Args:
        backbone: A causal model without its output head, as ``AutoModel`` loads it.
        head: From hidden states to values.

    Raises:
        ValueError: The backbone lets a token see what follows it.
    """

    def __init__(self, backbone: PreTrainedModel | PeftModel, head: ValueHead) -> None:
        super().__init__()
        check_causal(plain_model(backbone), "its values would know the future")
        allow_packing(backbone)
        self.backbone = backbone
        self.head = head

    def forward(self, batch: SequenceBatch) -> Float[Tensor, "B T"]:
        """Compute values aligned with the tokens, see :func:`lrlhf.models.sequence_values`."""
        return sequence_values(self.backbone, self.head, batch)

    def save_pretrained(
        self, folder: str | Path | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Write a folder that `ValueModel` loads; adapters are merged.

        Args:
            folder: Created where it does not exist; None: see `save_model`.
            tokenizer: Written beside the weights.
        """
        save_model(self.backbone, folder, tokenizer)
        head = merged_state_dict(self.head)
        if folder is None:
            return
        weights = {name: value.contiguous() for name, value in head.items()}
        save_file(weights, Path(folder) / _HEAD_WEIGHTS, metadata={"format": "pt"})


@settings
@dataclass(frozen=True, kw_only=True, repr=False)
class ValueModel(PretrainedSpec):
    """A critic: the body of a language model, of a trained reward model, or an exported critic.

    It reads the policy's token ids, so it needs the policy's tokenizer.
    """

    head: HeadKind = "linear"
    """``mlp``: linear, norm, SiLU, linear."""
    reward_head: str | None = None
    """Which head of a reward model the values start from; needed only if it has several."""

    def load(self) -> ValueNetwork:
        """Load the network, ready for training.

        From a reward model it takes body and head, so that the value of the last state starts as
        the reward; a new head is relative, see `ValueHead`.

        Raises:
            ValueError: The source leads to no model, an option does not fit it, the reward model
                reads another layer than the last or pools over tokens, or the backbone is not
                causal.
        """
        reward = load_scorer(self, trainable=True)
        if isinstance(reward, HeadedBackbone):
            return ValueNetwork(reward.backbone, self._head_of(reward))
        body = load_backbone(self, trainable=True)
        path = Path(resolve_source(self.source)) / _HEAD_WEIGHTS
        if not path.is_file():
            return ValueNetwork(body, new_value_head(body, self.head))
        return ValueNetwork(body, self._stored_head(body, path))

    def _head_of(self, reward: HeadedBackbone) -> ValueHead:
        if reward.config.layer != -1:
            raise ValueError(
                f"source {self.source!r} is a reward model that reads block {reward.config.layer}; "
                "a critic reads the last hidden state: start it from the model below"
            )
        only = reward.head_names[0] if len(reward.head_names) == 1 else None
        name = self.reward_head or only
        if name not in reward.head_names:
            raise ValueError(
                f"reward_head is {self.reward_head!r}, and the reward model {self.source!r} has "
                f"{', '.join(reward.head_names)}: choose one of them"
            )
        if reward.config.head != self.head:
            raise ValueError(
                f"head is {self.head!r}, but the reward model {self.source!r} has heads of kind "
                f"{reward.config.head!r}: make them equal"
            )
        if reward.config.pooling != "last":
            raise ValueError(
                f"source {self.source!r} is a reward model with pooling: {reward.config.pooling}, "
                "whose head reads an average over a whole text, but a critic reads one state per "
                "token, on which that head means nothing: train the reward model with pooling: "
                "last, or start the critic from the language model below"
            )
        head = new_value_head(reward.backbone, self.head, relative=False)
        head.copy_reward(reward.heads[name])  # type: ignore[arg-type]
        return head

    def _stored_head(self, body: PreTrainedModel | PeftModel, path: Path) -> ValueHead:
        weights = load_file(path)
        head = new_value_head(body, self.head, relative="scale" in weights)
        own = head.state_dict()
        if weights.keys() != own.keys() or any(weights[k].shape != own[k].shape for k in own):
            raise ValueError(f"{path} holds no head of kind {self.head!r} for this backbone")
        head.load_state_dict(weights)
        head.is_new = False  # its unit is known, and its steps are those of trained weights
        return head


def new_value_head(
    model: PreTrainedModel | PeftModel, kind: HeadKind, *, relative: bool = True
) -> ValueHead:
    """Build a value head that reads a model's hidden states."""
    plain = plain_model(model)
    size = int(plain.config.get_text_config().hidden_size)
    return ValueHead(size, HeadConfig(head=kind).head, relative=relative).to(device_for_new(plain))


@torch.no_grad()
@trial()
def check_causal(model: PreTrainedModel, otherwise: str) -> None:
    """Compare the first state of two texts that differ in the last token only.

    Args:
        model: With its weights, or it is looked at once they are read.
        otherwise: What would be wrong if it were not causal.

    Raises:
        ValueError: It lets a token see what follows it.
    """
    if waits(model, partial(check_causal, otherwise=otherwise)):
        return
    if model.device.type == "meta":  # a plan of a run's memory: there is nothing to compare
        return
    tokens = torch.tensor([[1, 1], [1, 2]], device=device_of(model))
    with evaluating(model):
        output = model.base_model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    hidden = output.last_hidden_state.float()
    if (hidden[0, 0] - hidden[1, 0]).abs().max() > 1e-2 * hidden.abs().max():
        raise ValueError(
            f"{type(model).__name__} lets a token see what follows it, so {otherwise}: this "
            "needs a causal model"
        )
