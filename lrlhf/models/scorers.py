"""The two kinds of network behind a reward: our heads on a backbone, and a stock classifier."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models.backbone import HiddenStates, allow_packing, hidden_states
from lrlhf.models.heads import HeadConfig, RewardHead, plain_model
from lrlhf.models.loading.deferred_weights import device_for_new, standing_in
from lrlhf.models.media_inputs import media_modules
from lrlhf.models.modes import trial
from lrlhf.models.packed.packing import compact
from lrlhf.models.sharding import device_of
from lrlhf.types import SequenceBatch


class Scorer(nn.Module, ABC):
    """Scores whole rows."""

    head_names: tuple[str, ...]

    @property
    @abstractmethod
    def plain(self) -> PreTrainedModel:
        """The network below the heads, without adapters around it."""

    @abstractmethod
    def forward(self, batch: SequenceBatch) -> Float[Tensor, "B H"]:
        """Return one column per head."""


class StockClassifier(Scorer):
    """A ``transformers`` sequence classifier with one output, run as its class defines it."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        self.head_names = ("reward",)

    @property
    def plain(self) -> PreTrainedModel:
        return plain_model(self.model)

    def forward(self, batch: SequenceBatch) -> Float[Tensor, "B H"]:
        if any(entry is not None for entry in batch.media or ()):
            raise ValueError(
                f"{type(self.plain).__name__} scores text only; a reward model for "
                "images or videos is trained by lrlhf.modules.RewardModel from a vision-language "
                "model"
            )
        ids, mask, *_ = compact(batch.input_ids, batch.attention_mask)
        config = self.plain.config.get_text_config()
        pad = config.pad_token_id
        if pad is not None and pad >= 0 and config.to_dict().get("summary_type") != "last":
            # the class may find the end of a row by the padding of its config
            ids = ids.masked_fill(~mask, pad)
            return self.model(input_ids=ids, attention_mask=mask.long()).logits  # type: ignore[no-any-return]
        # it scores the last token of a row, padding or not
        rows = [row[own][None] for row, own in zip(ids, mask, strict=True)]
        return torch.cat([self.model(input_ids=row).logits for row in rows])


class HeadedBackbone(Scorer):
    """Named heads on one layer of a backbone.

    Parameters that cannot influence that layer (those above it, an unused pooler) are frozen:
    under DDP every trainable parameter must receive a gradient.
    """

    def __init__(self, backbone: PreTrainedModel | PeftModel, config: HeadConfig) -> None:
        """Put new heads on a backbone.

        The heads' weights are drawn from the seed that torch was last given, not from its stream
        of random numbers, so they are the same however much the loading before it has drawn.

        Args:
            backbone: What ``AutoModel`` loads, decoder or encoder, with or without LoRA.
            config: Names and kind of the heads, pooling and layer.

        Raises:
            ValueError: The backbone has no such layer, or is an encoder-decoder.
        """
        super().__init__()
        plain = plain_model(backbone)
        if plain.config.is_encoder_decoder:
            raise ValueError(f"{type(plain).__name__} is an encoder-decoder: no reward backbone.")
        self.config = config
        self.head_names = config.names
        self.backbone = backbone
        allow_packing(plain)
        self._check_layer()
        size = int(plain.config.get_text_config().hidden_size)
        generator = torch.Generator().manual_seed(torch.initial_seed())
        self.heads = nn.ModuleDict(
            {name: RewardHead(size, config, generator) for name in config.names}
        ).to(device_for_new(plain))
        with standing_in(plain):  # what depends on what is known without the weights
            self._freeze_unused()

    @property
    def plain(self) -> PreTrainedModel:
        return plain_model(self.backbone)

    def forward(self, batch: SequenceBatch) -> Float[Tensor, "B H"]:
        hidden = self.hidden_states(batch)
        states, mask = hidden.unpacked(), hidden.rows.attention_mask
        if self.config.pad_token_id is not None:
            mask = mask & (hidden.rows.input_ids != self.config.pad_token_id)
        with torch.autocast(states.device.type, enabled=False):
            scores = [self.heads[name](states, mask) for name in self.head_names]
            return torch.stack(scores, dim=1)

    def hidden_states(self, batch: SequenceBatch) -> HiddenStates:
        """Run the backbone as far as the layer that the heads read."""
        return hidden_states(self.plain, batch, layer=self._block)

    @property
    def _block(self) -> nn.Module | None:
        """The block whose output the heads read; None: the last, behind the final norm.

        In the ``hidden_states`` of ``transformers``, index 0 is the embeddings and the last entry
        has gone through the final norm already.
        """
        layer = self.config.layer
        return None if layer == -1 else blocks_of(self.plain)[layer - 1]

    def _check_layer(self) -> None:
        plain, layer = self.plain, self.config.layer
        if layer == -1:
            return
        blocks = blocks_of(plain)
        if not blocks:
            raise ValueError(f"layer: the blocks of {type(plain).__name__} were not found; use -1.")
        if not 1 <= layer <= len(blocks):
            raise ValueError(
                f"layer: {layer} is not there. Use 1 to {len(blocks)} for what that block of "
                f"{type(plain).__name__} returns, or -1 for the last hidden state."
            )

    @trial()
    def _freeze_unused(self) -> None:
        plain = self.plain
        blocks = blocks_of(plain)
        used = blocks if self.config.layer == -1 else blocks[: self.config.layer]
        # an expert that two tokens do not reach is used all the same, so blocks are not probed
        known = {id(weight) for weight in used.parameters()}
        known |= {id(weight) for weight in plain.get_input_embeddings().parameters()}
        # the probe is text: what looks at images is not reached, and used all the same
        seeing = media_modules(plain)
        known |= {id(weight) for part in seeing for weight in part.parameters()}
        if seeing:
            # such as the mark of a line's end between the patches of LLaVA-OneVision
            known |= {id(weight) for weight in plain.base_model.parameters(recurse=False)}
        doubtful = [w for w in plain.parameters() if w.requires_grad and id(w) not in known]
        if not blocks or not doubtful:
            return
        if plain.device.type == "meta":  # nothing can be probed; above a block nothing is used
            for weight in doubtful if self.config.layer != -1 else ():
                weight.requires_grad_(False)
            return
        tokens = torch.zeros((1, 2), dtype=torch.long, device=device_of(plain))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        probe = SequenceBatch(input_ids=tokens, attention_mask=mask, response_mask=mask)
        with torch.enable_grad():
            hidden = self.hidden_states(probe).states.sum()
        gradients = (
            torch.autograd.grad(hidden, doubtful, allow_unused=True)
            if hidden.requires_grad
            else [None] * len(doubtful)
        )
        for weight, gradient in zip(doubtful, gradients, strict=True):
            if gradient is None:
                weight.requires_grad_(False)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """Find the list of transformer blocks of the text model; empty where there is none."""
    text_model: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    count = int(model.config.get_text_config().num_hidden_layers)
    for module in text_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return nn.ModuleList()
