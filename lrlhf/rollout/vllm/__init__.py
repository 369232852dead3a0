"""Rollouts with vLLM, inside the training process or in a server beside it."""

from lrlhf.rollout.vllm.engine import VLLMEngine
from lrlhf.rollout.vllm.server import VLLMServerEngine

__all__ = ["VLLMEngine", "VLLMServerEngine"]
