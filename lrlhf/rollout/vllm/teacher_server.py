"""Log-probabilities of a teacher model in a vLLM server, for distillation."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.types import SequenceBatch, TeacherTokens
from lrlhf.vllm_worker.model_access import TOKEN_VARIABLE

_ATTEMPTS = 4
_TOKENS_AT_ONCE = 8192
_TIMEOUT_S = 600.0


class TeacherServer:
    """Client of a teacher, which returns log-probabilities of responses.

    The server returns the sampled token and the most likely ones at each position, at temperature
    1. Its weights never change.

    Args:
        url: URL of the server, without a path; its token is the environment's ``VLLM_API_KEY``.
        requests: Number of concurrent requests.
    """

    def __init__(self, url: str, *, requests: int = 32) -> None:
        self.url = url
        self._client: ServerClient | None = None
        """None: closed."""
        self._requests = requests
        self._model = ""

    def check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the server's vocabulary with the policy's.

        Raises:
            ValueError: An id of the policy decodes to another text, or the server fails.
        """
        self._model = str(self._request("GET", "/v1/models")["data"][0]["id"])
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

    def ask(self, rollout: SequenceBatch, *, num_ids: int, vocabulary: int) -> TeacherTokens:
        """Return the teacher's log-probabilities of the response tokens.

        Args:
            rollout: Rows without media and forks.
            num_ids: Number K of most likely ids at each position.
            vocabulary: Size of the policy's vocabulary.

        Raises:
            ValueError: The rollout has media or forks, the server fails or refuses, or returns ids
                outside of the policy's vocabulary.
        """
        if rollout.media is not None or rollout.forks is not None:
            what = "images or videos" if rollout.media is not None else "rewritten histories"
            raise ValueError(
                f"teacher.server reads tokens only, and the responses have {what}: load the "
                "teacher in the process with teacher.model"
            )
        masks = rollout.attention_mask.cpu()
        rows = [
            ids[mask].tolist() for ids, mask in zip(rollout.input_ids.cpu(), masks, strict=True)
        ]
        self._opened()  # once, not in each of the threads
        with ThreadPoolExecutor(self._requests) as pool:
            results = list(pool.map(lambda ids: self._logprobs(ids, num_ids), rows))
        shape = rollout.input_ids.shape
        chosen = torch.zeros(shape)
        ids = torch.zeros(*shape, num_ids, dtype=torch.long)
        logprobs = torch.zeros(*shape, num_ids)
        response = rollout.response_mask.cpu()
        for row, (own, result) in enumerate(zip(rows, results, strict=True)):
            columns = masks[row].nonzero()[:, 0].tolist()
            for column, token, known in zip(columns, own, result, strict=True):
                if known is None or not response[row, column]:
                    continue
                # the sampled token comes on top of the most likely ones
                values = {int(key): float(value["logprob"]) for key, value in known.items()}
                top = sorted(values, key=lambda key: (-values[key], key))[:num_ids]
                chosen[row, column] = values[token]
                ids[row, column] = torch.tensor(top)
                logprobs[row, column] = torch.tensor([values[key] for key in top])
        if int(ids.max()) >= vocabulary:
            raise ValueError(
                f"teacher.server {self.url} answers with id {int(ids.max())}, and the policy has "
                f"{vocabulary}: serve a teacher with the policy's vocabulary"
            )
        tokens = TeacherTokens(logprobs=chosen, top_ids=ids, top_logprobs=logprobs)
        return tokens.to(rollout.input_ids.device)

    def close(self) -> None:
        """Close all connections; the next request opens them again."""
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
        choice = self._request("POST", "/v1/completions", body)["choices"][0]
        logprobs = list(choice["prompt_logprobs"])
        if len(logprobs) != len(ids):
            raise ValueError(
                f"teacher.server {self.url} answered about {len(logprobs)} tokens of {len(ids)}: "
                "is it a vLLM server?"
            )
        return logprobs

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
        return str(self._request("POST", "/detokenize", body)["prompt"])

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request, with retries."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._opened().request(method, path, body, timeout=_TIMEOUT_S)
            except EngineFailure as error:
                if attempt == _ATTEMPTS - 1:
                    raise ValueError(f"teacher.server {self.url}: {error}") from error
                time.sleep(2.0**attempt)
            except (ValueError, PermissionError) as error:
                raise ValueError(f"teacher.server {self.url}: {error}") from error
        raise AssertionError("the last attempt returns or raises")
