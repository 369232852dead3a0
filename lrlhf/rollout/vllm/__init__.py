"""Rollouts with vLLM, inside the training process or in a server beside it."""

from lrlhf.rollout.vllm.inprocess_engine import VLLMEngine
from lrlhf.rollout.vllm.server_engine import VLLMServerEngine

__all__ = ["VLLMEngine", "VLLMServerEngine"]
