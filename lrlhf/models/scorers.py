"""The two kinds of network behind a reward: our heads on a backbone, and a stock classifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models.heads import HeadConfig, RewardHead
from lrlhf.models.media_inputs import backbone_inputs, media_modules
from lrlhf.models.output_head import plain_model
from lrlhf.types import Media


class Scorer(nn.Module, ABC):
    """Scores rows whose attended tokens come first."""

    head_names: tuple[str, ...]

    @property
    @abstractmethod
    def plain(self) -> PreTrainedModel:
        """The network below the heads, without adapters around it."""

    @abstractmethod
    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        media: Sequence[Media | None] | None = None,
    ) -> Float[Tensor, "B H"]:
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

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        media: Sequence[Media | None] | None = None,
    ) -> Float[Tensor, "B H"]:
        if any(entry is not None for entry in media or ()):
            raise ValueError(
                f"{type(self.plain).__name__} scores text only; a reward model for "
                "images or videos is trained by lrlhf.modules.RewardModel from a vision-language "
                "model"
            )
        output = self.model(input_ids=input_ids, attention_mask=attention_mask.long())
        return output.logits  # type: ignore[no-any-return]


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
        self._check_layer()
        size = int(plain.config.get_text_config().hidden_size)
        generator = torch.Generator().manual_seed(torch.initial_seed())
        self.heads = nn.ModuleDict(
            {name: RewardHead(size, config, generator) for name in config.names}
        ).to(plain.device)
        self._freeze_unused()

    @property
    def plain(self) -> PreTrainedModel:
        return plain_model(self.backbone)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        media: Sequence[Media | None] | None = None,
    ) -> Float[Tensor, "B H"]:
        hidden = self.hidden_states(input_ids, attention_mask, media)
        with torch.autocast(hidden.device.type, enabled=False):
            scores = [self.heads[name](hidden, attention_mask) for name in self.head_names]
            return torch.stack(scores, dim=1)

    def hidden_states(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        media: Sequence[Media | None] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Run the backbone and return the output of the configured layer.

        A block's output is taken at the block. In the ``hidden_states`` of ``transformers``,
        index 0 is the embeddings and the last entry has gone through the final norm already.
        """
        plain = self.plain
        inputs = backbone_inputs(plain, input_ids, attention_mask, media)
        if self.config.layer == -1:
            return plain(**inputs).last_hidden_state  # type: ignore[no-any-return]
        captured: list[Tensor] = []
        block = blocks_of(plain)[self.config.layer - 1]
        handle = block.register_forward_hook(
            lambda _block, _inputs, output: captured.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        try:
            plain(**inputs)
        finally:
            handle.remove()
        return captured[0]

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
        tokens = torch.zeros((1, 2), dtype=torch.long, device=plain.device)
        with torch.enable_grad():
            hidden = self.hidden_states(tokens, torch.ones_like(tokens, dtype=torch.bool)).sum()
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
