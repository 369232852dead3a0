"""From a language model's last hidden states to its logits, as the model itself does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.functional.linear_logprobs import LinearHead
from lrlhf.models.loading.unread import waits
from lrlhf.models.media_inputs import ruled_out_ids
from lrlhf.models.modes import evaluating, trial
from lrlhf.models.sharding import device_of, is_split


def plain_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the ``transformers`` model; LoRA layers sit inside it and stay as they are.

    Raises:
        ValueError: The adapters are virtual tokens, which live outside the model.
    """
    if not isinstance(model, PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError("Prompt-learning adapters are not supported; use LoRA.")
    return cast(PreTrainedModel, model.get_base_model())


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model whose last hidden state its output head reads, if it has one."""
    body: Any = model.base_model
    if body is model and model.get_output_embeddings() is not None:
        # Llama 4's text model, whose body goes by another name than its class says
        body = next(part for part in model.children() if isinstance(part, PreTrainedModel))
    return cast(PreTrainedModel, body)


def is_tied(model: PreTrainedModel) -> bool:
    """Tell whether the output head and the embedding of a model are one weight."""
    # some families, which never tie them, lack the field
    return bool(model.config.get_text_config().to_dict().get("tie_word_embeddings"))


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """The output projection, and what some families do to its result."""

    projection: nn.Module
    """Hidden states to raw logits, adapters included."""
    multiplier: float = 1.0
    """Logits are multiplied by it (Cohere, Granite, Falcon-H1, HyperCLOVA, MiniCPM3)."""
    softcap: float | None = None
    """Then bounded to ``softcap · tanh(logits / softcap)`` (Gemma)."""
    ruled_out: tuple[int, ...] = ()
    """Tokens that are never said, whatever their logits: placeholders of images and videos."""

    def __call__(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
        """Compute logits, scaled and capped in at least float32, -inf where they are ruled out."""
        logits = self._scaled(self.projection(hidden))
        if not self.ruled_out:
            return logits
        return logits.index_fill(-1, torch.tensor(self.ruled_out, device=logits.device), -torch.inf)

    def fastest(self) -> LinearHead | OutputHead:
        """Return what :func:`~lrlhf.functional.logprobs.token_logprobs` computes fastest with.

        That is the weight, where the head is a plain product with it. A layer that holds it split,
        adapted or quantized, or has hooks, must be called, and then this head is returned. To be
        asked anew for each pass, where the layer is called: a split weight is whole only there.
        """
        layer = self.projection
        # a subclass is a layer that does something else with the weight
        if not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear:
            return self
        watched = layer._forward_hooks or layer._forward_pre_hooks
        if watched or layer.bias is not None or self.softcap is not None or is_split(layer.weight):
            return self
        return LinearHead(weight=layer.weight, multiplier=self.multiplier, ruled_out=self.ruled_out)

    def _scaled(self, logits: Float[Tensor, "*N V"]) -> Float[Tensor, "*N V"]:
        if self.multiplier == 1.0 and self.softcap is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.multiplier
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


def output_head(model: PreTrainedModel) -> OutputHead:
    """Build the head of a causal language model from its config.

    Raises:
        ValueError: The model has no output projection.
    """
    projection = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if projection is None:
        raise ValueError(f"{type(model).__name__} has no output head: it is no language model.")
    text = model.config.get_text_config()
    config: dict[str, Any] = text.to_dict()
    if config["model_type"] == "minicpm3":  # follows from others, and is not among the fields
        config["logits_scaling"] = text.logits_scaling
    softcap = config.get("final_logit_softcapping") or config.get("logits_soft_cap")
    return OutputHead(
        projection=projection,
        multiplier=_multiplier(config),
        softcap=softcap,
        ruled_out=ruled_out_ids(model.config),
    )


def _multiplier(config: dict[str, Any]) -> float:
    family = str(config["model_type"])
    scaling = config.get("logits_scaling") or 1.0
    if family.startswith("hyperclovax"):
        return float(scaling)
    if family.startswith("cohere"):  # MPT has a field of this name too, and ignores it
        return float(config.get("logit_scale") or 1.0)
    scaling *= config.get("logits_mup_width_multiplier") or 1.0
    multiplier = config.get("lm_head_multiplier") or config.get("output_multiplier") or 1.0
    return float(multiplier) / float(scaling)


@trial()
@torch.no_grad()
def check_output_head(model: PreTrainedModel | PeftModel) -> None:
    """Compare the model's logits for two tokens with those of :func:`output_head`.

    Log-probabilities are computed from the hidden states of padded rows, never from whole logits. A
    family that scales its logits in some new way, or reads the padding behind a row, would give
    wrong ones silently; here it is refused.

    Raises:
        ValueError: The logits differ.
    """
    plain = plain_model(model)
    if waits(plain, check_output_head):
        return
    # of two ids at most one is the padding id, whose embedding may be all zero
    device = device_of(plain)
    tokens = torch.tensor([[1, 2]], device=device)
    padded = torch.tensor([[1, 2, 1]], device=device)
    seen = torch.tensor([[1, 1, 0]], device=device)
    with evaluating(plain):
        expected = plain(input_ids=tokens, use_cache=False).logits.float()
        body = body_of(plain)(input_ids=padded, attention_mask=seen, use_cache=False)
    states = body.last_hidden_state[:, :2]
    head = output_head(plain)
    actual = replace(head, ruled_out=())(states).float()
    tolerance = 2e-2 * expected.abs().max()  # bfloat16 rounds the two orders of work differently
    if actual.shape != expected.shape or (actual - expected).abs().max() > tolerance:
        raise ValueError(
            f"{type(plain).__name__} computes its logits from the hidden states in a way that is "
            "not known here, or reads the padding behind a row, so log-probabilities would be "
            "wrong. This model family is not supported."
        )
