"""Rollouts with vLLM inside the training process."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import secrets
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from lrlhf.rollout.engines.engine import Capabilities
from lrlhf.rollout.engines.synced_engine import EngineFailure, Request
from lrlhf.rollout.responses import Response
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.vllm.rank_group import RankGroup, check_group_size
from lrlhf.rollout.vllm.vllm_base import (
    RANK_WORKER,
    VLLMBase,
    check_positive,
    import_vllm,
    is_cpu,
    media_argument,
    read_response,
    response_arguments,
    sampling_arguments,
)
from lrlhf.vllm_worker.fingerprint import Fingerprinted


class VLLMEngine(VLLMBase):
    """vLLM inside the training processes, on the same devices; one engine per rank, or per several.

    Args:
        tensor_parallel_size: Consecutive ranks that share an engine, which the model is split over.
            They generate together, so all have to call equally often.
        sleep: Release the engine's GPU memory while the policy is updated.
        inexact_video: Whether to accept videos, which vLLM computes otherwise than ``transformers``
            (other positions or features; log-probabilities of random tiny models differed by 0.001
            to 0.2 nats, where those of images agree to 1e-6).
        transport: Transport of weights: tensors of this process, for both values.
        engine: The other arguments of `VLLMBase`.
    """

    default_gpu_memory_utilization = 0.3
    _alone: ClassVar[int] = 0
    """Running engines of this process without a process group of the trainer."""

    def __init__(
        self,
        *,
        tensor_parallel_size: int = 1,
        sleep: bool = False,
        inexact_video: bool = False,
        transport: Literal["auto", "inproc"] = "auto",
        **engine: Any,
    ) -> None:
        super().__init__(**engine)
        check_positive(tensor_parallel_size=tensor_parallel_size)
        for option, instead in (
            ("tensor_parallel_size", "set engine.tensor_parallel_size instead"),
            ("data_parallel_size", "drop it, as further ranks have further engines anyway"),
            ("pipeline_parallel_size", "drop it, and set engine.tensor_parallel_size"),
        ):
            if int(self.options.get(option) or 1) > 1:
                raise ValueError(
                    f"engine.options.{option} is above 1, and vLLM inside the training processes "
                    f"runs on their ranks, not on processes that it starts: {instead}"
                )
        self.tensor_parallel_size = tensor_parallel_size
        self.inexact_video = inexact_video
        if sleep and is_cpu():
            raise ValueError("engine.sleep gives GPU memory back, and there is no GPU: drop it")
        self.sleeps = sleep
        self._asleep = False
        self._llm: Any = None
        self._lora_request: Any = None
        self._in_trainers_group = False
        self._broken = False
        self._left_others = False
        """Whether this rank left a step of vLLM in which others may wait for it."""

    @property
    def capabilities(self) -> Capabilities:
        ranks = self.tensor_parallel_size
        return replace(super().capabilities, structured=True, ranks_together=ranks)

    def _start(self) -> None:
        if self._in_trainers_group:
            if self._broken:
                raise self._start_error(
                    "an engine inside a training of several processes cannot be started a second "
                    "time; VLLMServerEngine can"
                )
            # it could not be ended when it was closed, and the policy may have changed since
            self._check_description(self._described)
            return
        grouped = torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size() if grouped else 1
        single = ranks == 1
        check_group_size(self.tensor_parallel_size, ranks)
        device = self._device
        # vLLM in one process takes the first visible GPU
        if device.type == "cuda" and single and device.index:
            raise self._start_error(
                f"the policy is on {device}, and vLLM would take the first GPU: choose the GPU "
                f"with CUDA_VISIBLE_DEVICES={device.index} and trainer.devices: 1"
            )
        # other ranks may wait for this one in vLLM, whatever fails here
        self._left_others = not single
        vllm = import_vllm()
        arguments = {**self._launch_arguments(), "enable_sleep_mode": self.sleeps}
        # without a process group vLLM creates one, which further engines share
        self._in_trainers_group = grouped and VLLMEngine._alone == 0
        if self._in_trainers_group and not single:
            arguments["distributed_executor_backend"] = "external_launcher"
            arguments["tensor_parallel_size"] = self.tensor_parallel_size
            if self.tensor_parallel_size > 1 and is_cpu():
                arguments["worker_cls"] = RANK_WORKER
        elif self.tensor_parallel_size > 1:
            raise self._start_error(
                "the ranks cannot share an engine while one runs that was started before they were "
                "a group: close that one first"
            )
        with _isolated():
            try:
                self._llm = vllm.LLM(**arguments)
            # AssertionError: an earlier engine has split these ranks otherwise
            except (ValueError, RuntimeError, AssertionError) as error:
                raise self._start_error(str(error)) from error
        self._left_others = False
        if not grouped:
            # Lightning takes vLLM's own process group for a training of several processes
            warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
        if not self._in_trainers_group:
            VLLMEngine._alone += 1
        self._check_description(self._llm.collective_rpc("lrlhf_describe")[0])

    def _stop(self) -> None:
        self._remove_folder()
        self._asleep = False
        if self._in_trainers_group or self._llm is None:
            # its end would destroy the trainer's process group
            return
        self._llm = None
        VLLMEngine._alone -= 1
        if VLLMEngine._alone == 0:
            state = importlib.import_module("vllm.distributed.parallel_state")
            state.cleanup_dist_env_and_memory()

    def sleep(self) -> None:
        """Release GPU memory, if ``sleep`` is on, until the next push; weights are discarded."""
        if self.sleeps and self._running and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep, self._version, self._has_base = True, None, False

    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        with self._failing("a push of weights"):
            if self._asleep:
                # release memory that PyTorch caches after the update
                torch.cuda.empty_cache()
                self._llm.wake_up(tags=["weights"])
            arrived: list[dict[str, str]] = self._llm.collective_rpc("lrlhf_load", args=(tensors,))
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
            self._lora_request = None
            if self._adapter_apart is not None:
                self._load_adapter(self._adapter_apart.settings)
            self._asleep = False
        self._reset_caches()
        return arrived

    def _load_adapter(self, settings: str) -> None:
        """Use the adapter that was sent for further requests."""
        token = secrets.token_hex(16)
        folder = self._llm.collective_rpc("lrlhf_write_adapter", args=(token, settings))[0]
        request = importlib.import_module("vllm.lora.request").LoRARequest
        # under a new number, as a known one would not be read again
        self._lora_request = request(token, self._turn, folder)
        self._llm.llm_engine.add_lora(self._lora_request)
        self._llm.collective_rpc("lrlhf_remove_adapter", args=(token,))

    def _reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineFailure("vLLM did not reset its prefix cache: requests are still running")
        self._llm.llm_engine.reset_encoder_cache()

    # ------------------------------------------------------------------ ranks that share an engine

    @property
    def _shared(self) -> bool:
        return self.tensor_parallel_size > 1 and torch.distributed.is_initialized()

    @property
    def _acts_with_ranks(self) -> bool:
        return self._shared or super()._acts_with_ranks

    def _worst_of_ranks(self, status: int) -> int:
        # the others wait in vLLM: an exchange would never end
        return 2 if self._left_others else super()._worst_of_ranks(status)

    def _check_requests(self, requests: Sequence[Request]) -> None:
        """Check requests, on all ranks that share an engine before any of them starts."""
        refusal: ValueError | None = None
        try:
            super()._check_requests(requests)
            videos = any(request.media and request.media.videos for request in requests)
            if videos and not self.inexact_video:
                raise ValueError(
                    "a prompt shows a video, which vLLM computes otherwise than transformers: take "
                    "lrlhf.rollout.TransformersEngine, or accept responses of a slightly different "
                    "policy with engine.inexact_video: true (mismatch/* tells how different)"
                )
        except ValueError as error:
            refusal = error
        refused = self._shared and self._worst_of_ranks(0 if refusal is None else 2) > 0
        if refusal is not None:
            raise refusal
        if refused:
            raise EngineFailure("the prompts of another rank were refused")

    # ------------------------------------------------------------------ responses

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        answers = self._answers(requests, sampling)
        for request, answer in zip(requests, answers, strict=True):
            if list(answer.prompt_token_ids) != request.prompt_ids:
                raise EngineFailure(
                    "vLLM answered another prompt than the one it was given: "
                    f"{len(answer.prompt_token_ids)} tokens instead of {len(request.prompt_ids)}"
                )
        responses = []
        for output in (answer.outputs[0] for answer in answers):
            steps = zip(output.logprobs, output.token_ids, strict=True)
            logprobs = [step[token].logprob for step, token in steps]
            largest = None
            if sampling.keep_mask and sampling.top_k:
                largest = [
                    {key: of.logprob for key, of in step.items()} for step in output.logprobs
                ]
            responses.append(
                read_response(output.token_ids, logprobs, output.finish_reason, largest)
            )
        return responses

    def _answers(self, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
        """Return vLLM's outputs; ranks that share an engine generate their requests together."""
        group = RankGroup() if self._shared else None
        gathered = [(requests, sampling)]
        if group is not None:
            gathered = group.gather((requests, sampling))
        prompts = [
            {"prompt_token_ids": request.short_ids, **media_argument(request.media)}
            for own, _ in gathered
            for request in own
        ]
        parameters = [each for own in gathered for each in self._parameters(*own)]
        # responses have seeds of their own, but vLLM also uses the global stream
        forked = torch.random.fork_rng(_current_devices())
        with self._failing("generation", together=True):
            with forked, torch.inference_mode():
                answers: list[Any] = self._llm.generate(
                    prompts, parameters, use_tqdm=False, lora_request=self._lora_request
                )
            sampled = [answer.outputs[0].token_ids for answer in answers]
            if group is not None and not group.agrees(sampled):
                raise EngineFailure("ranks that share an engine sampled other tokens")
        if group is None:
            return answers
        first = sum(len(own) for own, _ in gathered[: group.rank])
        return answers[first : first + len(requests)]

    def _parameters(self, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
        vllm = import_vllm()
        shared = sampling_arguments(sampling, self._weights.model, self._tokenizer)
        if sampling.structured is not None:
            structured = vllm.sampling_params.StructuredOutputsParams(**sampling.structured)
            shared["structured_outputs"] = structured
        return [vllm.SamplingParams(**response_arguments(each, shared)) for each in requests]

    @contextlib.contextmanager
    def _failing(self, what: str, *, together: bool = False) -> Iterator[None]:
        """Convert all errors inside vLLM to an `EngineFailure`.

        After an exception in a step its scheduler keeps the request, and the next call would wait
        forever, so the engine is never usable. Other ranks stay in a step that they take
        ``together`` with this one.
        """
        try:
            yield
        except Exception as error:
            self._broken = True
            self._left_others = together and self._shared
            reason = f"{type(error).__name__}: {error}"
            raise EngineFailure(f"vLLM failed in {what} ({reason})") from error


def _current_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Undo vLLM's changes of the process at start-up.

    It seeds the random number generators, sets environment variables that later child processes
    and Lightning would read, and replaces ``torch.set_num_threads``.
    """
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    if torch.distributed.is_initialized():
        # variables of a launcher, which Lightning does not set completely
        os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
        if torch.cuda.is_available():
            # the rank's own GPU, which may have another number
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
        os.environ.setdefault("LOCAL_RANK", str(torch.distributed.get_node_local_rank(0)))
    numpy_state, python_state = np.random.get_state(), random.getstate()
    devices = _current_devices()
    # in this process, which can pass tensors to the engine
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for device in devices:
            torch.cuda.set_device(device)
        torch.set_num_threads = set_num_threads
        # vLLM reads its own variables later
        for name in os.environ.keys() - environment.keys():
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(
            {name: value for name, value in environment.items() if not name.startswith("VLLM_")}
        )
