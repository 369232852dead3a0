"""What the two engines of vLLM share: options, and how a response is read."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.models import skeleton_of
from lrlhf.rollout.engines.policy_weights import LARGEST_RANK, AdapterWeights
from lrlhf.rollout.engines.synced_engine import PROBE_RESPONSE, EngineFailure, SyncedEngine
from lrlhf.rollout.responses import Response
from lrlhf.rollout.vllm.support import EXTENSION, check_version, is_cpu
from lrlhf.vllm_worker.extension import LORA_UPDATES

logger = logging.getLogger(__name__)

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]

# the smallest block that vLLM's CPU attention takes: prompts below it would never be shared
_CPU_BLOCK = 32
_CPU_CACHE_GIB = 1.0


class EngineStartError(RuntimeError):
    """An engine did not start; says what to change."""


class VLLMBase(SyncedEngine):
    """Options of `VLLMEngine` and `VLLMServerEngine`.

    Args:
        dtype: What the engine computes in. "auto": bfloat16 on a GPU, float32 on a CPU.
        max_model_len: Tokens of the longest prompt and response together, at most the model's own
            limit, which None stands for; the cache must have room for one such sequence.
        kv_cache_gib: Memory for keys and values. None: on a GPU what ``gpu_memory_utilization``
            leaves, on a CPU 1 GiB.
        gpu_memory_utilization: Share of a GPU's memory for weights, keys and values. None: 0.3
            inside the training process, 0.9 in a server.
        max_num_seqs: Responses that are computed at the same time.
        enforce_eager: Compile nothing. None: on a GPU compile, on a CPU, where it takes over a
            minute at every start, do not.
        lora: How a policy with a LoRA adapter is pushed. ``adapter``: its frozen weights once, and
            then the adapter alone, which vLLM adds as it computes. ``merged``: all weights with the
            adapter in them, every time. "auto": adapter, if it is plain LoRA on linear layers of
            the decoder and nothing else is trained; else, and on a CPU, where vLLM computes slowly
            with adapters, merged, and the log says why.
        options: Further engine arguments of vLLM by name, such as ``{seed: 1}``.
        max_restarts: How often in a row a call may start the engine anew before it gives up.
    """

    default_gpu_memory_utilization: float

    def __init__(  # noqa: PLR0913  each is an option of the config
        self,
        *,
        dtype: EngineDtype = "auto",
        max_model_len: int | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int = 256,
        enforce_eager: bool | None = None,
        lora: Literal["auto", "adapter", "merged"] = "auto",
        options: dict[str, Any] | None = None,
        max_restarts: int = 2,
    ) -> None:
        super().__init__(max_restarts=max_restarts)
        if lora not in ("auto", "adapter", "merged"):
            raise ValueError(f"engine.lora is {lora!r}; take auto, adapter or merged")
        for name, value in (
            ("max_model_len", max_model_len),
            ("kv_cache_gib", kv_cache_gib),
            ("max_num_seqs", max_num_seqs),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"engine.{name} is {value}; it must be above 0")
        if max_model_len is not None and max_model_len <= PROBE_RESPONSE:
            raise ValueError(
                f"engine.max_model_len is {max_model_len}; the probe of the weights alone needs "
                f"{PROBE_RESPONSE + 1} tokens"
            )
        if gpu_memory_utilization is None:
            gpu_memory_utilization = self.default_gpu_memory_utilization
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"engine.gpu_memory_utilization is {gpu_memory_utilization}; it must lie in (0, 1]"
            )
        self.engine_dtype = dtype
        self.wanted_model_len = max_model_len
        self.kv_cache_gib = kv_cache_gib
        self.gpu_memory_utilization = gpu_memory_utilization
        self.max_num_seqs = max_num_seqs
        self.enforce_eager = enforce_eager
        self.lora = lora
        self.options = dict(options or {})
        self._adapter: AdapterWeights | None = None
        self._adapter_apart: AdapterWeights | None = None
        """The adapter, where the running engine adds it itself; None: it is merged, if any."""
        self._has_base = False
        """Whether the running engine has the weights that an adapter is added to."""
        self._described: dict[str, Any] = {}
        self._folder: Path | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the running engine keeps its weights in."""
        found: torch.dtype = getattr(torch, self._described["dtype"])
        return found

    @property
    def context_length(self) -> int | None:
        return self.max_model_len if self._described else None

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and response together."""
        return int(self._described["max_model_len"])

    # ------------------------------------------------------------------ adapters

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        new = policy is not getattr(self, "_policy", None)
        super().attach(policy, tokenizer, processor)
        if new:
            self._adapter = self._adapter_to_push(policy)

    def outdate(self) -> None:
        super().outdate()
        # frozen weights change only where others are read into the policy
        self._has_base = False

    def _adapter_to_push(self, policy: nn.Module) -> AdapterWeights | None:
        if self.lora == "merged" or (self.lora == "auto" and not isinstance(policy, PeftModel)):
            return None
        if self.lora == "auto" and is_cpu():
            self._merge_instead("vLLM computes several times slower with adapters on a CPU")
            return None
        try:
            return AdapterWeights(self._weights)
        except ValueError as error:
            self._merge_instead(str(error))
            return None

    def _merge_instead(self, reason: str) -> None:
        if self.lora == "adapter":
            raise EngineStartError(
                f"engine.lora is adapter, and vLLM cannot be given the policy's: {reason}; take "
                "engine.lora: merged, or auto"
            )
        logger.info("the policy's LoRA adapter is merged in every push: %s", reason)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self._adapter_apart is None:
            return super()._tensors()
        adapter = self._adapter_apart.tensors(self.dtype)
        if self._has_base:
            return adapter
        return chain(adapter, self._weights.tensors(self.dtype, adapters=False))

    def _push_once(self, version: int) -> None:
        super()._push_once(version)
        self._has_base = self._adapter_apart is not None

    # ------------------------------------------------------------------ start

    def _launch_arguments(self) -> dict[str, Any]:
        """Engine arguments by vLLM's names; the weights come with the first push."""
        config = self._weights.model.config.get_text_config()
        dtype, cache_gib = self.engine_dtype, self.kv_cache_gib
        if is_cpu() and config.to_dict().get("num_experts_per_tok"):
            raise self._start_error(
                "its CPU kernels for mixtures of experts go on computing with old weights after a "
                "push; take lrlhf.rollout.TransformersEngine"
            )
        if dtype == "auto":
            dtype = "float32" if is_cpu() else "bfloat16"
        arguments: dict[str, Any] = {
            "model": str(self._model_folder()),
            "dtype": dtype,
            "load_format": "dummy",
            "worker_extension_cls": EXTENSION,
            # of the distribution that was sampled from: divided by the temperature, cut tokens out
            "logprobs_mode": "processed_logprobs",
            # else defaults of the checkpoint's generation config would be mixed in
            "generation_config": "vllm",
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": is_cpu() if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": True,
        }
        if self._adapter is not None:
            arguments |= {"enable_lora": True, "max_lora_rank": vllm_rank(self._adapter.rank)}
        if is_cpu():
            arguments["block_size"] = _CPU_BLOCK
            # vLLM winds back the random numbers of a response whose prompt is cut in two, which
            # those of a CPU cannot be, and dies
            arguments["enable_chunked_prefill"] = False
            cache_gib = cache_gib or _CPU_CACHE_GIB
        else:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        if cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
        if self.wanted_model_len is not None:
            own = getattr(config, "max_position_embeddings", None)
            arguments["max_model_len"] = min(self.wanted_model_len, own or self.wanted_model_len)
        return {**arguments, **self.options}

    def _model_folder(self) -> Path:
        """Write what vLLM builds the architecture from: all but the weights."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lrlhf-vllm-"))
            skeleton = skeleton_of(self._weights.model)
            skeleton.config.architectures = [type(skeleton).__name__]
            skeleton.config.save_pretrained(self._folder)
            self._tokenizer.save_pretrained(self._folder)
            if self._processor is not None:
                self._processor.save(self._folder)
        return self._folder

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _check_description(self, described: dict[str, Any]) -> None:
        check_version(described["vllm"])
        if described["logprobs_mode"] != "processed_logprobs":
            raise EngineStartError(
                f"vLLM runs with logprobs_mode {described['logprobs_mode']!r}, whose "
                "log-probabilities are not those of the sampling distribution; start it with "
                "processed_logprobs"
            )
        self._described = described
        self._has_base, self._adapter_apart = False, self._adapter
        if self._adapter is not None and described["max_lora_rank"] < self._adapter.rank:
            self._merge_instead(
                f"its rank is {self._adapter.rank}, and the running vLLM takes adapters of at most "
                f"{described['max_lora_rank']} (enable_lora, max_lora_rank, {LORA_UPDATES})"
            )
            self._adapter_apart = None

    def _start_error(self, reason: str) -> EngineStartError:
        """Turn vLLM's complaint into what to change."""
        if "does not support LoRA" in reason:
            reason += " (set engine.lora: merged)"
        advice, share = "", f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}"
        if "cache" in reason:
            own = is_cpu() or self.kv_cache_gib
            advice = (
                f" ({f'engine.kv_cache_gib is {self.kv_cache_gib}' if own else share}, "
                f"engine.max_model_len is {self.wanted_model_len}: raise the first or lower the "
                "second)"
            )
        elif "memory" in reason.lower():
            advice = f" ({share}: lower it, or free memory of the GPU)"
        return EngineStartError(f"vLLM did not start: {reason}{advice}")


def vllm_rank(rank: int) -> int:
    """Return the smallest rank that vLLM makes room for, and that an adapter fits into."""
    return min(one for one in (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK) if one >= rank)


def check_transport(engine: str, transport: str, possible: Sequence[str]) -> None:
    """Refuse a way for weights that an engine does not have.

    Raises:
        ValueError: It is none of ``possible``, or there is no GPU for it.
    """
    if transport not in possible:
        raise ValueError(
            f"engine.transport is {transport!r}, which {engine} cannot do: take one of "
            f"{', '.join(possible)}"
        )
    if transport in ("nccl", "ipc") and is_cpu():
        raise ValueError(
            f"engine.transport is {transport!r}, which needs a GPU, and there is none: take gloo, "
            "or auto"
        )


def read_response(
    token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None
) -> Response:
    """Turn vLLM's answer into a response.

    Args:
        token_ids: The end-of-sequence token included.
        logprobs: One per token.
        finish_reason: ``stop`` or ``length``.

    Raises:
        EngineFailure: The response was broken off, or is not whole.
    """
    if finish_reason not in ("stop", "length") or len(token_ids) != len(logprobs):
        raise EngineFailure(
            f"vLLM broke a response off: {len(token_ids)} tokens, {len(logprobs)} "
            f"log-probabilities, finish reason {finish_reason!r}"
        )
    return Response.sampled(
        torch.tensor(token_ids, dtype=torch.long),
        torch.tensor(logprobs, dtype=torch.float32),
        truncated=finish_reason == "length",
    )
