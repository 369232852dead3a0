"""Routing replay (R3): tokens are trained through the experts that sampled them.

A router scores all experts for a token, and the K best compute it. The trainer rounds differently
from the engine, and its steps move the router, so it would choose others for some tokens. With the
mask I of the recorded choice and the trainer's scores s, a layer computes instead

    g_i = I_i exp(s_i) / Σ_j I_j exp(s_j),    y = Σ_i g_i E_i(x)

The gradient reaches the router through s. Only its ``topk`` is replaced: what makes weights of the
scores is the model's own code, also where that is another function than this softmax.

Reference:
    Ma et al. 2025 (Rollout Routing Replay), https://arxiv.org/abs/2510.11370
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from jaxtyping import Int
from peft import PeftModel
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lrlhf.models.heads import body_of, plain_model


class Replay:
    """The experts `[N, L, K]` of one forward pass, tokens row by row; -1: the router chooses.

    It is an argument of every layer. Activation checkpointing keeps arguments, so a micro-batch is
    recomputed with its own experts whatever ran since. It is no tensor, so nothing casts it.

    Raises:
        ValueError: The model has other numbers of routers, or of experts per token.
    """

    def __init__(self, plain: PreTrainedModel, experts: Int[Tensor, "N L K"]) -> None:
        routers, self._name = _routers(plain), type(plain).__name__
        own = (len(routers), *{router.top_k for router in routers})
        if experts.shape[1:] != own:
            raise ValueError(
                "update.replay_routing: the layers and experts per token that were recorded are "
                f"{tuple(experts.shape[1:])}, and those of {self._name} {own}: replay what the "
                "same model has sampled"
            )
        self.experts, self.waiting = experts, {*range(len(routers))}

    def check(self) -> None:
        """Raise `ValueError` if routers of the model have not asked."""
        if self.waiting:
            raise ValueError(
                f"update.replay_routing: {len(self.waiting)} layers of {self._name} take no "
                "experts from outside; set it to false"
            )


class Record:
    """The experts that a model chooses, in columns like those of its cache."""

    def __init__(self, plain: PreTrainedModel) -> None:
        self._routers, self.rows = len(_routers(plain)), 0
        self._steps: list[Int[Tensor, "R C L K"]] = []
        self._step: list[Int[Tensor, "R C K"]] = []

    @property
    def experts(self) -> Int[Tensor, "R C L K"]:
        return torch.cat(self._steps, dim=1)

    def add(self, chosen: Int[Tensor, "N K"]) -> None:
        """Note what the next router has chosen for new columns of ``rows`` rows."""
        self._step.append(chosen.to(torch.int16).view(self.rows, -1, chosen.shape[1]))
        if len(self._step) == self._routers:
            self._steps.append(torch.stack(self._step, dim=2))
            self._step = []

    def take(self, record: Record, rows: Int[Tensor, " R"]) -> None:
        """Begin with some rows of a record."""
        self._steps = [record.experts[rows]]


_replay: ContextVar[Replay | None] = ContextVar("replay", default=None)
_record: ContextVar[Record | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recording(record: Record | None) -> Iterator[None]:
    """Note in a record what routers choose; None: nowhere."""
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def repeat_record(copies: int) -> None:
    """Repeat each row of the present record, if any, as those of the cache are."""
    if (record := _record.get()) is not None:
        record.take(record, torch.arange(record.rows).repeat_interleave(copies))


def allow_replay(model: PreTrainedModel | PeftModel) -> None:
    """Let a model's layers, in place, take a `Replay`, and its routers be recorded.

    Raises:
        ValueError: It has no experts, or routers that are no modules of their own, or that LoRA
            trains a copy of.
    """
    plain = plain_model(model)
    routers = _routers(plain)
    if not routers:
        raise ValueError(
            f"update.replay_routing: {type(plain).__name__} has no experts, or none whose routers "
            "are modules of their own; set it to false"
        )
    copied = [each for each in plain.modules() if isinstance(each, AuxiliaryTrainingWrapper)]
    if any(part in routers for each in copied for part in each.modules()):
        raise ValueError(
            "update.replay_routing: there are two routers per layer; leave them out of the "
            "policy's lora.modules_to_save"
        )
    for layer in _layers(plain):
        layer.forward = MethodType(_through_layer, layer)
    for index, router in enumerate(routers):
        router.forward = MethodType(_through_router(index), router)


def _through_layer(
    layer: Any, hidden: Tensor, *args: Any, replay: Replay | None = None, **options: Any
) -> Any:
    if (record := _record.get()) is not None:
        record.rows = len(hidden)
    token = _replay.set(replay)
    try:
        return type(layer).forward(layer, hidden, *args, **options)
    finally:
        _replay.reset(token)


def _through_router(index: int) -> Callable[..., Any]:
    def forward(router: Any, *args: Any) -> Any:
        replay, record = _replay.get(), _record.get()
        if replay is None and record is None:
            return type(router).forward(router, *args)
        with _Choice(router.top_k, None if replay is None else replay.experts[:, index]) as choice:
            output = type(router).forward(router, *args)
        if len(choice.made) != 1:
            raise ValueError(
                f"update.replay_routing: {type(router).__name__} calls topk {len(choice.made)} "
                "times for its experts, not once, so they are not known; set it to false"
            )
        if replay is not None:
            replay.waiting.discard(index)
        if record is not None:
            record.add(choice.made[0])
        return output

    return forward


class _Choice(TorchFunctionMode):
    """Has a router's ``topk`` return given experts, where they are not -1, and their scores."""

    def __init__(self, top_k: int, given: Int[Tensor, "N K"] | None) -> None:
        super().__init__()
        self._top_k, self._given = top_k, given
        self.made: list[Int[Tensor, "N K"]] = []

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # groups of experts are scored and chosen too, in tensors of other shapes
        if getattr(function, "__name__", "") != "topk" or result[1].shape[1:] != (self._top_k,):
            return result
        chosen = result[1]
        if self._given is not None:
            chosen = torch.where(self._given < 0, chosen, self._given.long())
            result = torch.return_types.topk((args[0].gather(1, chosen), chosen))
        self.made.append(chosen)
        return result


def _layers(plain: PreTrainedModel) -> list[Any]:
    body: Any = body_of(plain)
    modules = body.get_decoder().modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def _routers(plain: PreTrainedModel) -> list[Any]:
    """Return the modules with weights that choose experts, in order."""
    return [
        module
        for layer in _layers(plain)
        for module in layer.modules()
        if isinstance(getattr(module, "top_k", None), int)
        and isinstance(getattr(module, "weight", None), Tensor)
    ]
