"""Process reward models: a token classifier that says whether each step of an answer is correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from lrlhf.models.backbone import allow_packing, hidden_states
from lrlhf.models.heads import plain_model
from lrlhf.models.loading.deferred_weights import waits
from lrlhf.models.loading.model_sources import load_config
from lrlhf.models.loading.pretrained import PretrainedSpec, finish_for_training, load_pretrained
from lrlhf.models.modes import evaluating, trial
from lrlhf.models.reward_network import check_causal
from lrlhf.models.sharding import device_of, within
from lrlhf.options.conversion import settings
from lrlhf.types import SequenceBatch

STEP_SEPARATOR = "\n"
"""Behind each step, of a model whose config names no other."""
_HEADS = ("score", "classifier")
"""What token classifiers call their last layer."""


@settings
@dataclass(frozen=True, kw_only=True, repr=False)
class StepModel(PretrainedSpec):
    """A process reward model: the body of a causal language model and a token classifier.

    Class 1 of its two says that the step which ends at a token is correct. It starts from a
    language model, or goes on from a token classifier of this kind, of whatever origin.
    """

    def load(self, *, trainable: bool = True) -> PreTrainedModel | PeftModel:
        """Load the model, in eval mode as ``from_pretrained`` leaves it.

        The weights of a new classifier are drawn from the seed that torch was last given.

        Args:
            trainable: False: every parameter is frozen, and there must be a classifier already.

        Raises:
            ValueError: The source leads to no model, has classes of another number, or its family
                has no token classifier that reads hidden states of a causal body.
        """
        config = load_config(self.source, **self.of_hub)
        names = config.architectures or []
        trained = any(name.endswith("ForTokenClassification") for name in names)
        if trained and config.num_labels != 2:
            raise ValueError(
                f"source {self.source!r} is a token classifier of {config.num_labels} classes; a "
                "process reward model has two, wrong and correct"
            )
        if not trained and not trainable:
            raise ValueError(
                f"source {self.source!r} is no process reward model: it is no token classifier. "
                "Train one from it with lrlhf.modules.ProcessRewardModel."
            )
        auto_class, new = AutoModelForTokenClassification, () if trained else _HEADS
        model = load_pretrained(self, auto_class, trainable=trainable, new=new)
        if not trained:
            model.config.id2label = {0: "wrong", 1: "correct"}
            model.config.label2id = {"wrong": 0, "correct": 1}
            _draw(_head(model), model)
        prepare_step_model(model)
        # PEFT trains the classifier of a SEQ_CLS model in full, and puts no adapter on it
        return finish_for_training(model, self, trainable=trainable, task_type="SEQ_CLS")


def prepare_step_model(model: PreTrainedModel | PeftModel) -> None:
    """Check that steps can be scored with a model, and let it compute packed rows where it can.

    Raises:
        ValueError: It is no causal model whose classifier reads the last hidden states.
    """
    plain = plain_model(model)
    if not type(plain).__name__.endswith("ForTokenClassification"):
        raise ValueError(
            f"{type(plain).__name__} is no process reward model: build it with "
            "AutoModelForTokenClassification, or give a source"
        )
    if getattr(plain.config, "num_labels", None) != 2:
        raise ValueError(f"{type(plain).__name__} has not two classes, wrong and correct")
    check_causal(plain, "its scores of steps would know what follows them")
    _check_classifier(plain)
    allow_packing(model)


def step_logits(model: PreTrainedModel | PeftModel, batch: SequenceBatch) -> Float[Tensor, "B T"]:
    """Compute how sure the model is of the steps that end at the tokens of ``response_mask``.

    Args:
        model: A token classifier with two classes, with or without LoRA adapters.
        batch: Tokens outside ``attention_mask`` are invisible, wherever they are.

    Returns:
        Log-odds, ``log p(correct) - log p(wrong)``, at least float32; 0 outside the mask. The
        binary cross-entropy of log-odds is the cross-entropy of the two classes.
    """
    plain = plain_model(model)

    def forward() -> Tensor:
        hidden = hidden_states(plain, batch, use_cache=False)
        rows = hidden.rows
        counts = (batch.response_mask & batch.attention_mask).gather(1, rows.order)
        # of a batch without steps one token is asked for, so that every parameter is used
        predicted = counts.clone()
        predicted[:1, :1] |= ~counts.any()
        logits = _classified(plain, hidden.of(predicted))
        odds = (logits[:, 1] - logits[:, 0]).to(torch.promote_types(logits.dtype, torch.float32))
        spread = torch.zeros(predicted.shape, dtype=odds.dtype, device=odds.device)
        spread = spread.masked_scatter(predicted, odds).masked_fill(~counts, 0)
        return torch.zeros_like(spread).scatter(1, rows.order, spread)

    return within(model, forward)


class JoinedSteps(NamedTuple):
    """A prompt and steps as a process reward model reads them."""

    input_ids: list[int]
    ends: list[int]
    """Place of the token at which each step is judged."""


def joined_steps(
    prompt: Sequence[int], steps: Sequence[Sequence[int]], separator: Sequence[int]
) -> JoinedSteps:
    """Put a separator behind every step, at whose last token the step is judged."""
    ids, ends = list(prompt), []
    for step in steps:
        ids += [*step, *separator]
        ends.append(len(ids) - 1)
    return JoinedSteps(ids, ends)


def _head(plain: PreTrainedModel) -> nn.Module:
    children = dict(plain.named_children())
    head = next((children[name] for name in _HEADS if name in children), None)
    if head is None:
        raise ValueError(f"{type(plain).__name__} has no classifier called {' or '.join(_HEADS)}")
    return head


def _draw(head: nn.Module, model: PreTrainedModel) -> None:
    """Draw the weights of a new classifier, the same however much was drawn before it."""
    assert isinstance(head, nn.Linear)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    spread = float(getattr(model.config.get_text_config(), "initializer_range", 0.02))
    head.weight.data = torch.empty(head.weight.shape, dtype=head.weight.dtype).normal_(
        std=spread, generator=generator
    )
    if head.bias is not None:
        head.bias.data = torch.zeros(head.bias.shape, dtype=head.bias.dtype)


def _classified(plain: PreTrainedModel, states: Float[Tensor, "N H"]) -> Float[Tensor, "N 2"]:
    """Return the logits of both classes, in the precision of the classifier's weights."""
    head: Any = _head(plain)
    dropout = dict(plain.named_children()).get("dropout", nn.Identity())
    with torch.autocast(states.device.type, enabled=False):
        logits: Tensor = head(dropout(states.to(next(head.parameters()).dtype)))
    return logits


@torch.no_grad()
@trial()
def _check_classifier(plain: PreTrainedModel) -> None:
    """Compare the logits that a model computes itself with those of its classifier alone."""
    if waits(plain, _check_classifier) or plain.device.type == "meta":
        return
    tokens = torch.tensor([[1, 2]], device=device_of(plain))
    with evaluating(plain):
        expected = plain(input_ids=tokens, use_cache=False).logits.float()
        body = plain.base_model(input_ids=tokens, use_cache=False)
        actual = _classified(plain, body.last_hidden_state[0]).float()
    if (actual - expected[0]).abs().max() > 2e-2 * expected.abs().max():
        raise ValueError(
            f"{type(plain).__name__} classifies tokens by more than their last hidden states, "
            "which is not known here. This model family is not supported."
        )
