"""Rollouts with vLLM, inside the training process or in a server beside it."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.rollout.vllm.inprocess_engine import VLLMEngine
    from lrlhf.rollout.vllm.server_engine import VLLMServerEngine
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["VLLMEngine", "VLLMServerEngine"]
