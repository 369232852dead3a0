"""Scalar heads on a backbone's hidden states: pooling by mask, projection, bounded scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lrlhf.functional.linear_logprobs import LinearHead
from lrlhf.models.loading.deferred_weights import waits
from lrlhf.models.media_inputs import ruled_out_ids
from lrlhf.models.modes import evaluating, trial
from lrlhf.models.sharding import device_of, is_split
from lrlhf.torch_internals import forward_hooks

Pooling = Literal["last", "mean", "attention"]
HeadKind = Literal["linear", "mlp"]

_ATTENTION_VIEWS = 4
"""Weighted averages that attention pooling takes side by side, as far as the size divides."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Everything that decides a reward network's scores besides its weights."""

    names: tuple[str, ...] = ("reward",)
    pooling: Pooling = "last"
    layer: int = -1
    """-1: the last hidden state, final norm included; k: what block k returns, counted from 1."""
    head: HeadKind = "linear"
    learn_scale: bool = False
    scale_max: float = 100.0
    """A learnt scale stays within ``(1 / scale_max, scale_max)``."""
    pad_token_id: int | None = None
    """With ``last`` pooling the last token that has another id is read, as the classifiers of
    ``transformers`` do with that of their config. None: the last token, whichever it is."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("heads: at least one name is needed.")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"heads: {', '.join(self.names)} names a head twice.")
        for name in self.names:
            if not name.isidentifier():
                raise ValueError(f"heads: {name!r} must be letters, digits and underscores.")
        for key, value, allowed in (
            ("pooling", self.pooling, ("last", "mean", "attention")),
            ("head", self.head, ("linear", "mlp")),
        ):
            if value not in allowed:
                raise ValueError(f"{key}: {value!r} is none of {', '.join(allowed)}.")
        if self.scale_max <= 1.0:
            raise ValueError(f"scale_max: {self.scale_max} must be above 1.")


class RewardHead(nn.Module):
    """One named score: pools a sequence, projects it, scales it, in its own weights' precision."""

    def __init__(self, size: int, config: HeadConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.attention = AttentionPool(size, generator) if config.pooling == "attention" else None
        self.projection = _projection(size, config.head, generator)
        self.scale = BoundedScale(config.scale_max) if config.learn_scale else None

    def forward(
        self, hidden: Float[Tensor, "B T H"], attention_mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, " B"]:
        """Score rows whose attended tokens come first.

        Args:
            hidden: Hidden states; what lies outside the mask has no influence.
            attention_mask: True on real tokens, at least one a row.
        """
        dtype = next(self.projection.parameters()).dtype
        if self.attention is not None:
            pooled = self.attention(hidden.to(dtype), attention_mask)
        elif self.pooling == "mean":
            pooled = mean_pool(hidden.to(dtype), attention_mask)
        else:
            pooled = last_pool(hidden, attention_mask).to(dtype)
        # a copy: FSDP2 warns of modules that return views
        score: Tensor = self.projection(pooled).squeeze(-1).clone()
        return score if self.scale is None else score * self.scale()


class ValueHead(nn.Module):
    """One number per hidden state, in its own weights' precision.

    A head that starts from a reward model reads and writes as that does. A new one is relative:

        V(h) = scale · f(h / rms(h)) + shift      with f = 0 at the start

    so that one learning rate fits backbones of any norm and scores of any unit.

    Args:
        size: Of a hidden state.
        kind: ``linear``, or ``mlp``: linear, norm, SiLU, linear.
        relative: Whether it is of the second kind. ``scale`` and ``shift`` are 1 and 0 until
            `measure_in`.
    """

    def __init__(self, size: int, kind: HeadKind, *, relative: bool = False) -> None:
        super().__init__()
        self.is_new = relative
        """Whether it has yet to learn: its unit follows the scores, and it takes larger steps."""
        generator = torch.Generator().manual_seed(torch.initial_seed())
        self.projection = _projection(size, kind, generator)
        nn.init.zeros_(self.output.weight)
        # unlike a reward, a value is compared with a number: a constant does not cancel out
        self.bias = nn.Parameter(torch.zeros(1))  # an axis, so that it can be split
        self.scale: Tensor | None
        self.shift: Tensor | None
        self.register_buffer("scale", torch.ones(1) if relative else None)
        self.register_buffer("shift", torch.zeros(1) if relative else None)

    def measure_in(self, scale: float, shift: float) -> None:
        """Set unit and origin of the values; its weights stay as they are.

        Reference:
            van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714, "ART" without "POP"; Yu et
            al. 2022, https://arxiv.org/abs/2103.01955, §5.1
        """
        assert self.scale is not None
        assert self.shift is not None
        self.scale.fill_(scale)
        self.shift.fill_(shift)

    @property
    def output(self) -> nn.Linear:
        """The last layer."""
        last = self.projection if isinstance(self.projection, nn.Linear) else self.projection[-1]  # type: ignore[index]
        assert isinstance(last, nn.Linear)
        return last

    def copy_reward(self, reward: RewardHead) -> None:
        """Start from the weights of a reward head of the same kind, its scale multiplied in."""
        self.projection.load_state_dict(reward.projection.state_dict())
        if reward.scale is not None:
            with torch.no_grad():
                self.output.weight.mul_(reward.scale())

    def forward(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N"]:
        """Compute the values, in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(self.bias.dtype)
            if self.scale is None or self.shift is None:
                values: Tensor = self.projection(hidden).squeeze(-1) + self.bias
                return values
            direction = F.rms_norm(hidden, (hidden.shape[-1],), eps=1e-6)
            relative: Tensor = self.projection(direction).squeeze(-1) + self.bias
            return relative * self.scale + self.shift


def last_pool(
    hidden: Float[Tensor, "B T H"], attention_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B H"]:
    """Take the last attended token, by its index: a padding id may also be a real token."""
    rows, columns = (torch.arange(size, device=hidden.device) for size in hidden.shape[:2])
    return hidden[rows, (columns * attention_mask).amax(dim=1)]


def mean_pool(
    hidden: Float[Tensor, "B T H"], attention_mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B H"]:
    """Average the attended tokens."""
    masked = hidden.masked_fill(~attention_mask.unsqueeze(-1), 0.0)
    return masked.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)


class AttentionPool(nn.Module):
    """Learnt weighted averages over the attended tokens, one for each slice of the features.

    It starts as the plain mean: the weights' logits are zero.
    """

    def __init__(self, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.views = math.gcd(size, _ATTENTION_VIEWS)
        self.logits = _linear(size, self.views, generator, std=0.0)
        self.values = _linear(size, size, generator, std=size**-0.5)

    def forward(
        self, hidden: Float[Tensor, "B T H"], attention_mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B H"]:
        """Pool each sequence; padding gets exactly no weight."""
        hidden = hidden.masked_fill(~attention_mask.unsqueeze(-1), 0.0)
        logits = self.logits(hidden).masked_fill(~attention_mask.unsqueeze(-1), -math.inf)
        values = self.values(hidden).unflatten(-1, (self.views, -1))
        return torch.einsum("btv,btvd->bvd", logits.softmax(dim=1), values).flatten(1)


class BoundedScale(nn.Module):
    """A learnt positive factor that cannot run away: exp(b · tanh(s / b)), b = log(maximum).

    It starts at 1, moves like exp(s) near it, and stays within (1 / maximum, maximum) for any s.
    Training and evaluation use the same factor.
    """

    def __init__(self, maximum: float) -> None:
        super().__init__()
        self.bound = math.log(maximum)
        self.log_scale = nn.Parameter(torch.zeros(1))  # an axis, so that it can be split

    def forward(self) -> Float[Tensor, " 1"]:
        return torch.exp(self.bound * torch.tanh(self.log_scale / self.bound))


class RMSNormedSiLU(nn.RMSNorm):
    """Root-mean-square norm with learnt gains, then SiLU."""

    def forward(self, x: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H"]:
        """Normalise and gate."""
        return F.silu(super().forward(x))


def _projection(size: int, kind: HeadKind, generator: torch.Generator) -> nn.Module:
    # https://arxiv.org/abs/2009.01325 starts a reward head at this width, and without bias: a
    # constant cancels out between the two scores of a pair
    output = _linear(size, 1, generator, std=(size + 1) ** -0.5)
    if kind == "linear":
        return output
    return nn.Sequential(
        _linear(size, size, generator, std=size**-0.5), RMSNormedSiLU(size, eps=1e-6), output
    )


def _linear(inputs: int, outputs: int, generator: torch.Generator, *, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")
    nn.init.normal_(layer.weight, std=std, generator=generator)
    return layer


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
        watched = any(forward_hooks(layer))
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
