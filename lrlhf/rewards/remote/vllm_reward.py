"""Reward models that vLLM serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lrlhf.models import load_config, load_tokenizer, placeholder_ids
from lrlhf.rewards.function import Completion, LogMetric, PartialValues, RewardError, check_positive
from lrlhf.rewards.learned import SpecialTokens, as_text, full_text, text_ids
from lrlhf.rewards.remote.service_client import (
    Calls,
    Exchange,
    Service,
    ServiceError,
    ServiceReward,
    read_models,
    served_model,
)
from lrlhf.rewards.reward_values import finite_number, shorten
from lrlhf.types import Prompt


class VLLMReward(ServiceReward):
    """The score of a reward model that vLLM serves with its pooling runner.

    The server is started with ``vllm serve MODEL --runner pooling``, where the model is a sequence
    classifier: a folder that ``RewardModel`` has written, or any other one. Prompts and responses
    become tokens here, as with `LearnedReward`, so that both give the same scores, up to rounding:
    what the model returns before any sigmoid or softmax. Responses that are too long for the model
    get no score, and ``rewards/vllm/too_long`` counts them; nothing is cut. Vision-language models
    are refused: take `LearnedReward`.

    Failures of the servers are treated as `RemoteReward` treats those of its services.

    Args:
        urls: Address of the server, such as ``http://127.0.0.1:8000``, or several that serve the
            same model.
        model: Its name there; null: the one that is served.
        label: Which of the model's outputs counts, from 0; needed only if it has several.
        tokenizer: Source of the tokenizer; null: what the server was started with, which must be a
            folder of this machine too, or a hub id.
        chat_template: Jinja text for prompts that are chats; null: the tokenizer's.
        max_tokens: Longest prompt and response together, if the server has no lower limit.
        batch_size: Responses per request.
        trust_remote_code: Run Python code that comes with the tokenizer.
        special_tokens: As of `LearnedReward`.
        service: Options of the requests, see `ServiceReward`; the token is the key of the server.
    """

    _not_copied = ("_client", "_models", "_loaded_tokenizer")

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        urls: str | list[str],
        model: str | None = None,
        label: int | None = None,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        max_tokens: int | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
        special_tokens: SpecialTokens = "with_eos",
        **service: Any,
    ) -> None:
        super().__init__(urls, **service)
        check_positive(batch_size=batch_size, max_tokens=max_tokens)
        if label is not None and label < 0:
            raise ValueError(f"label is {label}; the model's outputs are numbered from 0")
        self._model, self._label = model, label
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._max_tokens, self._batch_size = max_tokens, batch_size
        self._trust_remote_code = trust_remote_code
        self._special_tokens = special_tokens
        self._start_afresh()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._models: dict[str, Mapping[str, Any]] = {}
        """What each server reports of the model, by its address."""
        self._loaded_tokenizer: PreTrainedTokenizerBase | None = None

    def prepare(self) -> None:
        """Wait until a server answers, and load the tokenizer; once it is loaded, do nothing.

        Raises:
            RewardError: None does within ``startup_timeout``, or does not serve the model; the key
                cannot be read; there is no tokenizer, or the model reads images.
        """
        self._ready()

    def _ready(self) -> PreTrainedTokenizerBase:
        if self._loaded_tokenizer is None:
            self._client.wait_until_ready(self._probe)
            self._loaded_tokenizer = self._load_tokenizer()
        return self._loaded_tokenizer

    async def _probe(self, exchange: Exchange, service: Service) -> str:
        """Return what is wrong with a server; empty: nothing."""
        try:
            models = read_models(await exchange.send(_address(service.url, "v1/models")))
        except ServiceError as error:
            return f"{service.url}: {error}"
        name = served_model(service.url, models, self._model)
        self._models[service.url] = models[name]
        service.note_version({"model": name})
        return ""

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        card = next(iter(self._models.values()))
        source = self._tokenizer or str(card.get("root") or card["id"])
        try:
            tokenizer = load_tokenizer(source, trust_remote_code=self._trust_remote_code)
            config = load_config(source, trust_remote_code=self._trust_remote_code)
        except ValueError as error:
            raise RewardError(
                f"the tokenizer of the served reward model cannot be loaded: {error}; give the "
                "model's folder or hub id with tokenizer"
            ) from error
        if placeholder_ids(config):
            raise RewardError(
                f"{source!r} is a vision-language model, and only tokens are sent: take "
                "LearnedReward for it"
            )
        return tokenizer

    async def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        **columns: Any,
    ) -> list[float | None]:
        rows = await asyncio.to_thread(self._rows, prompts, completions)
        limits = [self._max_tokens, *(card.get("max_model_len") for card in self._models.values())]
        limit = min((limit for limit in limits if limit is not None), default=None)
        long = [limit is not None and len(ids) > limit for ids in rows]
        log_metric("vllm/too_long", sum(long) / max(1, len(rows)))
        # rows of one length go together, as a server waits for the longest of a request
        sent = sorted(
            (row for row, ids in enumerate(rows) if ids and not long[row]),
            key=lambda row: len(rows[row]),
        )
        starts = range(0, len(sent), self._batch_size)
        parts = [[rows[row] for row in sent[at : at + self._batch_size]] for at in starts]
        results = await self._client.scores(
            [(part, len(part)) for part in parts], self._score, log_metric, name="vllm"
        )
        scores: list[float | None] = [None] * len(rows)
        for row, score in zip(sent, results, strict=True):
            scores[row] = score
        if isinstance(results, PartialValues):
            return PartialValues(scores, results.failure, results.failed)
        return scores

    def _rows(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[list[int]]:
        """Return the tokens of each prompt with its response."""
        tokenizer = self._ready()
        source, rows = str(tokenizer.name_or_path), []
        for prompt, completion in zip(prompts, completions, strict=True):
            chat = not isinstance(prompt, str)
            if not isinstance(prompt, str):
                prompt = tuple(as_text(turn) for turn in prompt)
            text = full_text(tokenizer, self._chat_template, prompt, completion, source=source)
            rows.append(text_ids(tokenizer, text, chat=chat, special_tokens=self._special_tokens))
        return rows

    async def _score(self, calls: Calls, part: Sequence[Sequence[int]]) -> list[float] | None:
        """Return the scores of a part; None: no server returned any."""
        model = next(iter(self._models.values()))["id"]
        body = {"model": model, "input": part, "use_activation": False}
        return await calls.send(
            partial(_address, page="classify"),
            json.dumps(body).encode,
            partial(self._read, count=len(part)),
        )

    def _read(self, reply: Mapping[str, Any], count: int) -> list[float]:
        """Return the scores of a reply.

        Raises:
            ServiceError: It is no classification of so many texts.
            RewardError: The model has no such output, or several and none was chosen.
        """
        try:
            entries = sorted(reply["data"], key=lambda entry: entry["index"])
            outputs = [[*entry["probs"]] for entry in entries]
        except (LookupError, TypeError) as error:
            raise ServiceError("the reply is no classification") from error
        if [entry["index"] for entry in entries] != [*range(count)]:
            raise ServiceError(f"the reply has {len(entries)} entries for {count} responses")
        scores = []
        for values in outputs:
            if self._label is None and len(values) != 1:
                raise RewardError(
                    f"the served model gives {len(values)} numbers for a response: choose one with "
                    f"label, from 0 to {len(values) - 1}"
                )
            label = self._label or 0
            if label >= len(values):
                raise RewardError(
                    f"label is {label}, and the served model gives {len(values)} number(s) for a "
                    f"response; set it to one from 0 to {len(values) - 1}"
                )
            if (score := finite_number(values[label])) is None:
                raise ServiceError(f"the score {shorten(values)} is no finite float32 number")
            scores.append(score)
        return scores


def _address(url: str, page: str) -> str:
    """Return a page of a server whose address may be given with the version of OpenAI's pages."""
    return f"{url.removesuffix('/v1')}/{page}"
