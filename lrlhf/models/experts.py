"""Mixtures of experts: the loss that keeps their load even."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.models.heads import plain_model
from lrlhf.models.sharding import class_of


def load_balancing_loss(
    model: PreTrainedModel,
    router_logits: tuple[Tensor, ...],
    attention_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Compute the auxiliary loss of a mixture of experts as the model's own code does.

    ``router_logits`` are those of every layer with experts; padding is not routed on purpose, so it
    does not count.

    Reference:
        Fedus et al. 2021 (Switch Transformers), eq. 4, https://arxiv.org/abs/2101.03961
    """
    check_has_experts(model)
    function: Any = _family_loss(model)
    loss: Tensor = function(
        router_logits,
        router_logits[0].shape[-1],
        _text_config(model)["num_experts_per_tok"],
        attention_mask.long(),
    )
    return loss


def has_experts(model: PreTrainedModel | PeftModel) -> bool:
    """Tell whether layers of a model choose experts for every token."""
    return bool(_text_config(plain_model(model)).get("num_experts_per_tok"))


def check_has_experts(model: PreTrainedModel | PeftModel) -> None:
    """Raise `ValueError` for a model without experts, or of a family without such a loss."""
    model = plain_model(model)
    if _family_loss(model) is None or not has_experts(model):
        raise ValueError(
            f"update.router_loss_coef is set, but {type(model).__name__} has no experts whose load "
            "could be balanced; set it to 0"
        )


def _family_loss(model: PreTrainedModel) -> Callable[..., Tensor] | None:
    return vars(sys.modules[class_of(model).__module__]).get("load_balancing_loss_func")


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config().to_dict()
