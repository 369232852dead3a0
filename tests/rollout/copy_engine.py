"""An engine with a copy of the policy, and with the faults that one elsewhere can have."""

import copy
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.rollout import (
    Capabilities,
    EngineFailure,
    Response,
    Sampling,
    SyncedEngine,
    TransformersEngine,
    responses_of,
)
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.rollout.responses import token_prompts
from lrlhf.vllm_worker.fingerprint import Fingerprinted, fingerprint


@dataclass(frozen=True)
class Draw:
    """One call that drew responses."""

    version: int | None
    greedy: bool
    prompts: list[list[int]]
    weights: dict[str, Tensor]
    """Of the copy, as it drew them."""


class CopyEngine(SyncedEngine):
    """Draws with `TransformersEngine` on a model of its own, which only `_send` changes.

    A failure breaks it until it is stopped and started, which puts NaN into every weight.

    Args:
        fail: Calls of ``_start``, ``_send`` and ``_respond``, counted from 1, that fail; by the
            name without its underscore.
        drop: A weight that never arrives.
        stale: A weight that arrives with the values it had at the first push.
        keep_caches: Go on with states that older weights computed.
        concurrent: Whether it says that it computes elsewhere.
        dtype: Of its weights.
        max_model_len: Tokens of the longest prompt and response together.
        max_restarts: See `SyncedEngine`.
    """

    def __init__(
        self,
        *,
        fail: Mapping[str, Collection[int]] | None = None,
        drop: str | None = None,
        stale: str | None = None,
        keep_caches: bool = False,
        concurrent: bool = False,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = 256,
        max_restarts: int = 2,
    ) -> None:
        super().__init__(max_restarts=max_restarts)
        self.fail = dict(fail or {})
        self.drop, self.stale, self.keep_caches = drop, stale, keep_caches
        self.concurrent = concurrent
        self.calls: Counter[str] = Counter()
        self.draws: list[Draw] = []
        self.pushed: list[dict[str, Tensor]] = []
        self._dtype, self._max_model_len = dtype, max_model_len
        self._first: dict[str, Tensor] = {}
        self._copy: PreTrainedModel | None = None
        self._cached: PreTrainedModel | None = None
        self._broken = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, concurrent=self.concurrent)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def started(self) -> bool:
        return self._copy is not None

    def _start(self) -> None:
        assert self._weights is not None
        assert not self.started, "started twice"
        with torch.random.fork_rng():
            config = copy.deepcopy(self._weights.model.config)
            self._copy = type(self._weights.model)(config).eval().to(self._dtype)
        for parameter in self._copy.parameters():
            parameter.requires_grad_(False).fill_(torch.nan)
        self._count("start")

    def _stop(self) -> None:
        self._copy = self._cached = None
        self._broken = False

    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        self._count("send")
        arrived = {}
        for name, tensor in tensors:
            first = self._first.setdefault(name, tensor.clone())
            if name != self.drop:
                arrived[name] = first if name == self.stale else tensor.clone()
        unknown = self._model.load_state_dict(arrived, strict=False).unexpected_keys
        assert not unknown, unknown
        self.pushed.append(arrived)
        self._reset_caches()
        turn = tensors.turn
        return [
            {name: str(int(fingerprint(tensor, turn=turn))) for name, tensor in arrived.items()}
        ]

    def _reset_caches(self) -> None:
        self.calls["reset_caches"] += 1
        if not self.keep_caches:
            self._cached = None

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        self._count("respond")
        if self._cached is None:
            self._cached = copy.deepcopy(self._model)
        weights = {name: value.clone() for name, value in self._cached.state_dict().items()}
        prompts = [request.prompt_ids for request in requests]
        self.draws.append(Draw(self.version, sampling.temperature == 0, prompts, weights))
        assert self._tokenizer is not None
        drawer = TransformersEngine()
        drawer.attach(self._cached, self._tokenizer)
        drawer._tried_policy = self._cached  # the trial is not what is tested with it
        asked = token_prompts(prompts)
        rollout = drawer.generate(
            asked, sampling, num_generations=1, seeds=[request.seed for request in requests]
        )
        return responses_of(rollout, asked)

    def _count(self, call: str) -> None:
        self.calls[call] += 1
        if self._broken:
            raise EngineFailure(f"{call} of an engine that is gone")
        if self.calls[call] in self.fail.get(call, ()):
            self._broken = True
            raise EngineFailure(f"{call} number {self.calls[call]} failed")

    @property
    def _model(self) -> PreTrainedModel:
        assert self._copy is not None
        return self._copy
