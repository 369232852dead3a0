"""A teacher that a vLLM server of its own holds, and what it says of given tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.types import Rollout, TeacherTokens
from lrlhf.vllm_worker.model_access import TOKEN_VARIABLE

_ATTEMPTS = 4
_TOKENS_AT_ONCE = 8192
_TIMEOUT_S = 600.0


class TeacherServer:
    """Asks a vLLM server for the log-probabilities of responses.

    A server gives the sampled token and its best ones at each position, at temperature 1. Its
    weights never change.

    Args:
        url: Of the server, without a path; its token is the environment's ``VLLM_API_KEY``.
        requests: Responses that are asked about at once.
    """

    def __init__(self, url: str, *, requests: int = 32) -> None:
        self.url = url
        self._client: ServerClient | None = None
        """None: nothing has been asked since it was closed."""
        self._requests = requests
        self._model = ""

    def check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a server that reads token ids otherwise than the policy.

        Raises:
            ValueError: It decodes an id of the policy to another text, or cannot be asked.
        """
        self._model = str(self._ask("GET", "/v1/models")["data"][0]["id"])
        ids = sorted(tokenizer.get_vocab().values())
        for start in range(0, len(ids), _TOKENS_AT_ONCE):
            part = ids[start : start + _TOKENS_AT_ONCE]
            if (first := self._first_difference(part, tokenizer)) is not None:
                raise ValueError(
                    f"teacher.server {self.url} has another tokenizer than the policy: id {first} "
                    f"is {self._decoded([first])!r} to the teacher ({self._model}) and "
                    f"{tokenizer.decode([first])!r} to the policy. Serve a teacher of the policy's "
                    "family, or train on the teacher's responses with SFT"
                )

    def ask(self, rollout: Rollout, *, num_ids: int, vocabulary: int) -> TeacherTokens:
        """Return what the teacher says of the response tokens.

        Args:
            rollout: Texts without media, each token behind its left neighbour.
            num_ids: Best ids at each position, K.
            vocabulary: Ids that the policy has.

        Raises:
            ValueError: The rollout shows something, the server cannot be asked, refuses, or
                answers with ids that the policy has not.
        """
        if rollout.media is not None or rollout.forks is not None:
            what = "images or videos" if rollout.media is not None else "rewritten histories"
            raise ValueError(
                f"teacher.server reads tokens only, and the responses have {what}: load the "
                "teacher in the process with teacher.model"
            )
        rows = [ids[seen].tolist() for ids, seen in zip(*_cpu(rollout), strict=True)]
        self._opened()  # once, not in each of the threads
        with ThreadPoolExecutor(self._requests) as pool:
            answers = list(pool.map(lambda ids: self._logprobs(ids, num_ids), rows))
        shape = rollout.input_ids.shape
        chosen = torch.zeros(shape)
        ids = torch.zeros(*shape, num_ids, dtype=torch.long)
        logprobs = torch.zeros(*shape, num_ids)
        response = rollout.response_mask.cpu()
        for row, (own, answer) in enumerate(zip(rows, answers, strict=True)):
            columns = rollout.attention_mask[row].cpu().nonzero()[:, 0].tolist()
            for column, token, known in zip(columns, own, answer, strict=True):
                if known is None or not response[row, column]:
                    continue
                best = _best(known, num_ids)
                chosen[row, column] = known[str(token)]["logprob"]
                ids[row, column] = torch.tensor([one for one, _ in best])
                logprobs[row, column] = torch.tensor([value for _, value in best])
        if int(ids.max()) >= vocabulary:
            raise ValueError(
                f"teacher.server {self.url} answers with id {int(ids.max())}, and the policy has "
                f"{vocabulary}: serve a teacher with the policy's vocabulary"
            )
        kept = TeacherTokens(logprobs=chosen, top_ids=ids, top_logprobs=logprobs)
        return kept.to(rollout.input_ids.device)

    def close(self) -> None:
        """Break off what is still open; the next question opens it again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _opened(self) -> ServerClient:
        if self._client is None:
            self._client = ServerClient(self.url, os.environ.get(TOKEN_VARIABLE) or "none")
        return self._client

    def _logprobs(self, ids: Sequence[int], num_ids: int) -> list[dict[str, Any] | None]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": num_ids,
        }
        found = self._ask("POST", "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        if len(found) != len(ids):
            raise ValueError(
                f"teacher.server {self.url} answered about {len(found)} tokens of {len(ids)}: is "
                "it a vLLM server?"
            )
        return list(found)

    def _first_difference(
        self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
    ) -> int | None:
        if self._decoded(ids) == tokenizer.decode(list(ids)):
            return None
        if len(ids) == 1:
            return ids[0]
        half = len(ids) // 2
        parts = (self._first_difference(part, tokenizer) for part in (ids[:half], ids[half:]))
        return next((first for first in parts if first is not None), ids[0])

    def _decoded(self, ids: Sequence[int]) -> str:
        body = {"model": self._model, "tokens": list(ids)}
        return str(self._ask("POST", "/detokenize", body)["prompt"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask, and again where the server was away for a moment."""
        for attempt in range(_ATTEMPTS):
            try:
                if method == "GET":
                    return self._opened().get(path, timeout=_TIMEOUT_S)
                return self._opened().post(path, body, timeout=_TIMEOUT_S)
            except EngineFailure as error:
                if attempt == _ATTEMPTS - 1:
                    raise ValueError(f"teacher.server {self.url}: {error}") from error
                time.sleep(2.0**attempt)
            except (ValueError, PermissionError) as error:
                raise ValueError(f"teacher.server {self.url}: {error}") from error
        raise AssertionError("the last attempt returns or raises")


def _cpu(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    return rollout.input_ids.cpu(), rollout.attention_mask.cpu()


def _best(known: Mapping[str, Mapping[str, Any]], num_ids: int) -> list[tuple[int, float]]:
    """Return the best ids and their log-probabilities; the sampled one may come on top of them."""
    ranked = sorted(known.items(), key=lambda one: (-one[1]["logprob"], int(one[0])))
    return [(int(token), float(one["logprob"])) for token, one in ranked[:num_ids]]
