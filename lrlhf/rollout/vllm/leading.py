"""One rank leads the server that all ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.vllm_base import EngineStartError

ResultT = TypeVar("ResultT")


def leads() -> bool:
    """Whether this process starts, feeds and ends the server."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def led(act: Callable[[], ResultT]) -> ResultT:
    """Act on rank 0 only; what comes of it, also an error, comes to every rank."""
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if leads():
        try:
            outcome[0] = act()
        except Exception as raised:  # noqa: BLE001  raised again once every rank knows of it
            error = raised
            # not itself: what it holds may not survive the way to another process
            fails = isinstance(error, EngineFailure)
            outcome[1] = (EngineFailure if fails else EngineStartError)(str(error))
    if distributed.is_initialized():
        distributed.broadcast_object_list(outcome, src=0)
    value, told = outcome
    if told is not None:
        raise error or told
    result: ResultT = value
    return result


def check_gpus(transport: str, taken: list[str | None]) -> None:
    """Refuse a transport that the GPUs of workers and ranks cannot take; all ranks call it.

    Args:
        transport: ``gloo``, ``nccl`` or ``ipc``.
        taken: Which GPU each worker of the server has; None: none.

    Raises:
        EngineStartError: It cannot.
    """
    ranks: list[str | None] = [None]
    if torch.cuda.is_available():
        ranks = [str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]
    if distributed.is_initialized():
        own, ranks = ranks[0], [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own)
    if transport == "ipc" and not set(taken) <= set(ranks):
        raise EngineStartError(
            "engine.transport is ipc, and the server computes on a GPU that no rank of the trainer "
            "has: set engine.visible_devices to GPUs of the server's own, for nccl, or "
            "CUDA_VISIBLE_DEVICES of the run to the trainer's"
        )
    if transport == "nccl" and ranks[0] in taken:
        raise EngineStartError(
            "engine.transport is nccl, which cannot connect a GPU with itself, and the server "
            "computes on that of rank 0: set engine.visible_devices to other GPUs, or "
            "engine.transport: ipc"
        )
