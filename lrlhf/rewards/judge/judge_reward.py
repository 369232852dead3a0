"""The verdict of a language model as a reward, through an endpoint of OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from lrlhf.rewards.function import (
    Completion,
    LogExtra,
    LogMetric,
    PartialValues,
    RewardError,
    check_positive,
    images_of_prompt,
)
from lrlhf.rewards.judge.comparisons import (
    Batch,
    JudgePrompts,
    JudgeRequest,
    Mode,
    Reply,
    Verdict,
    judge_columns,
    reply_texts,
    response_values,
    verdict_metrics,
)
from lrlhf.rewards.judge.verdicts import SYSTEM, FormName
from lrlhf.rewards.remote.remote_reward import in_base64, png_file
from lrlhf.rewards.remote.service_client import (
    Calls,
    Exchange,
    RequestRefusedError,
    Service,
    ServiceError,
    ServiceReward,
    ServicesDownError,
    gather,
    read_models,
    served_model,
)
from lrlhf.types import Prompt

_REQUEST = {"temperature": 0.0, "max_tokens": 1024}


class JudgeReward(ServiceReward):
    """The verdict of a judge, a language model behind OpenAI's chat completions (LLM as a judge).

    The endpoint is any server of that protocol, such as vLLM's (the run's own included, where it
    has a fixed address) or a hosted one. Values are from 0 (worst) to 1 (best):

    - ``absolute``: the position of a response's rating on the scale;
    - ``pairwise``: the share of the other responses to the prompt that it is better than, or with
      ``reference_column`` whether it is better than the reference answer. Each pair is shown in
      both orders, as judges favour the first (Zheng et al. 2023, arXiv:2306.05685): a response
      that wins in one order only has won half;
    - ``listwise``: the same share, from a ranking of all responses to the prompt, shown forwards
      and backwards.

    A verdict must be the last line of the reply, in the requested format and with nothing else. A
    reply without one gives no value, and neither does a comparison that lacks it in one of its
    orders; a response without any verdict has no value.

    The policy writes what the judge reads, and may learn to manipulate it. Look at the responses
    with high values (the column ``judge`` of the log), and evaluate by other means too.

    Args:
        urls: Address of the endpoint with its version, such as ``http://127.0.0.1:8000/v1``, or
            several that serve the same model.
        model: Its name there; null: the one that is served.
        mode: ``absolute``, ``pairwise`` or ``listwise``.
        form: Format of a verdict on two: ``line`` (reasoning, then a last line ``Verdict: A``),
            ``direct`` (that line alone), or ``answer``
            (``<think>…</think><answer>Response 1 is better</answer>``). For a model that was
            trained on `VerdictTasks`, take their form, rubric and system prompt.
        rubric: Criteria, in words.
        template: Jinja2 text of the judge's prompt in place of the built-in one, which may use
            ``prompt``, ``responses`` (a list), ``letters``, ``rubric``, ``low``, ``high``, and
            columns of the data. It must request a last line ``Verdict: …`` with a number of the
            scale; with ``A``, ``B`` or ``tie``; or with a ranking such as ``B > A = C``.
        system: System prompt; empty: none.
        scale: Worst and best rating of ``absolute``.
        opponents: How many others each response meets in ``pairwise``, an even number; null: all.
        reference_column: Column of the answer that ``pairwise`` compares with instead.
        samples: Replies to each question; the mean counts. Above 1 the judge needs a temperature
            above 0.
        attempts: Attempts at a question until there is a verdict; as with ``samples``.
        request: Further fields of the requests, such as ``{temperature: 0.7, top_p: 0.9}``; a field
            that is null is not sent. Default: temperature 0, max_tokens 1024.
        seed: Of the first sample, sent where a question is repeated. For questions that are sent
            once, ``request`` may have a seed.
        show_images: Send the judge the images of the prompt.
        cache: SQLite file of replies: no request is sent twice, so that a resumed run gets the same
            verdicts and pays once. The key of a reply is the addresses, the model's name and the
            request, which do not identify the weights: leave it off where the judge changes under
            its name, such as the run's own policy.
        cache_version: A name for the judge, which replaces the addresses in the key of a reply:
            replies stay valid when it moves, and a new name requests new ones for new weights.
        prices: Of a million tokens, ``{prompt: …, completion: …}``, to log the cost.
        timeout: Seconds for one request.
        max_concurrency: Requests under way at a time.
        service: Other options of the requests, see `ServiceReward`; the token is the key of the
            endpoint.
    """

    _not_copied = ("_client", "_served")

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return judge_columns(options)

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        urls: str | list[str],
        model: str | None = None,
        mode: Mode = "absolute",
        form: FormName = "line",
        rubric: str | None = None,
        template: str | None = None,
        system: str = SYSTEM,
        scale: tuple[float, float] = (1.0, 10.0),
        opponents: int | None = None,
        reference_column: str | None = None,
        samples: int = 1,
        attempts: int = 1,
        request: dict[str, Any] | None = None,
        seed: int = 0,
        show_images: bool = True,
        cache: str | None = None,
        cache_version: str | None = None,
        prices: dict[str, float] | None = None,
        timeout: float = 300.0,
        max_concurrency: int = 32,
        **service: Any,
    ) -> None:
        super().__init__(urls, timeout=timeout, max_concurrency=max_concurrency, **service)
        check_positive(samples=samples, attempts=attempts)
        self._prompts = JudgePrompts(
            mode,
            form,
            template=template,
            rubric=rubric,
            opponents=opponents,
            reference_column=reference_column,
            samples=samples,
            scale=scale,
        )
        self.compares_responses = self._prompts.compares_responses
        self._model, self._system = model, system
        self._samples, self._attempts, self._seed = samples, attempts, seed
        fields = {**_REQUEST, **(request or {})}
        self._request = {name: value for name, value in fields.items() if value is not None}
        if samples * attempts > 1 and self._request.get("temperature") == 0:
            raise ValueError(
                "samples and attempts above 1 repeat a question, and at temperature 0 the judge "
                "repeats its reply: give request: {temperature: 0.7}"
            )
        if samples * attempts > 1 and "seed" in self._request:
            raise ValueError(
                "request has a seed, and with samples or attempts above 1 each question needs "
                "several: give the first one as the option seed"
            )
        if cache_version is not None and cache is None:
            raise ValueError("cache_version is for replies that are kept: give cache, a file")
        if unknown := {*(prices or {})} - {"prompt", "completion"}:
            raise ValueError(f"prices are of prompt and completion, not of {sorted(unknown)}")
        self._prices = prices or {}
        self._show_images = show_images
        addresses = " ".join(sorted(self._settings.addresses))
        self._cache = ReplyCache(cache, judge=cache_version or addresses)
        self._start_afresh()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._served = ""

    def prepare(self) -> None:
        """Wait until the endpoint answers; once it did, do nothing.

        Raises:
            RewardError: It does not within ``startup_timeout``, does not serve the model, several
                serve different ones, or the key cannot be read.
        """
        if self._served:
            return
        served: dict[str, str] = {}

        async def probe(exchange: Exchange, service: Service) -> str:
            try:
                models = read_models(await exchange.send(f"{service.url}/models"))
            except ServiceError as error:
                return f"{service.url}: {error}"
            except RequestRefusedError as error:
                if self._model is None or error.status != 404:
                    raise
                models = {self._model: {}}  # not every endpoint lists them
            served[service.url] = served_model(service.url, models, self._model)
            return ""

        self._client.wait_until_ready(probe)
        if len({*served.values()}) > 1:
            listed = "; ".join(f"{url} has {model}" for url, model in served.items())
            raise RewardError(
                f"urls serve different models, so that verdicts would depend on who answers: "
                f"{listed}. Set model to one that all have, or make each a reward of its own"
            )
        self._served = next(iter(served.values()))

    async def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        log_extra: LogExtra,
        images: Sequence[Sequence[Any]] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        audios: Sequence[Sequence[Any]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if any(videos or ()) or any(audios or ()):
            raise RewardError("a judge cannot be shown videos or audio")
        batch = await asyncio.to_thread(self._batch, prompts, completions, images, columns)
        questions = self._prompts.questions(batch)
        verdicts: dict[JudgeRequest, Verdict] = {}
        async with self._client.calls() as calls:
            client = JudgeClient(calls, self._cache)
            for attempt in range(self._attempts):
                missing = [each for each in questions if not attempt or not verdicts[each].scores]
                if not missing:
                    break
                bodies = await asyncio.to_thread(self._bodies, batch, missing, attempt)
                replies = await client.replies([*bodies.values()])
                for question in missing:
                    reply = replies.get(bodies[question])
                    # an earlier reply without a verdict is worth more than none
                    if reply is not None or question not in verdicts:
                        verdicts[question] = self._prompts.read(question, reply)
        metrics = verdict_metrics(questions, verdicts) | client.counts()
        if self._prices:
            tokens = {"prompt": client.prompt_tokens, "completion": client.completion_tokens}
            cost = sum(price * tokens[name] for name, price in self._prices.items())
            metrics["cost"] = cost / 1e6
        for name, value in metrics.items():
            log_metric(f"judge/{name}", value)
        log_extra("judge", reply_texts(questions, verdicts, len(completions)))
        values = response_values(questions, verdicts, len(completions))
        return self._with_failures(values, client, verdicts)

    def _batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        images: Sequence[Sequence[Any]] | None,
        columns: Mapping[str, Any],
    ) -> Batch:
        shown: Sequence[Sequence[str] | None] = [None] * len(completions)
        if images and self._show_images:
            if self._prompts.compares_responses:  # which need not show the same in their turns
                images = [*map(images_of_prompt, completions, images)]
            shown = in_base64(images, png_file)
        return self._prompts.batch(prompts, completions, shown, columns)

    def _bodies(
        self, batch: Batch, questions: Sequence[JudgeRequest], attempt: int
    ) -> dict[JudgeRequest, bytes]:
        """Return the requests; the same bytes for the same question, which the cache relies on."""
        bodies = {}
        for question in questions:
            text = self._prompts.text(batch, question)
            images = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
                for image in batch.shown[question.about] or ()
            ]
            content = [*images, {"type": "text", "text": text}] if images else text
            system = [{"role": "system", "content": self._system}] if self._system else []
            messages = [*system, {"role": "user", "content": content}]
            body = {"model": self._model or self._served, "messages": messages, **self._request}
            if self._samples * self._attempts > 1:
                body["seed"] = self._seed + question.sample + attempt * self._samples
            bodies[question] = json.dumps(body, sort_keys=True, allow_nan=False).encode()
        return bodies

    def _with_failures(
        self,
        values: list[float | None],
        client: JudgeClient,
        verdicts: Mapping[JudgeRequest, Verdict],
    ) -> list[float | None]:
        """Report questions without a reply in any attempt."""
        unanswered = [each for each, verdict in verdicts.items() if verdict.reply is None]
        if not unanswered:
            return values
        reason = client.refusal or self._client.services.last_errors()
        failure = f"{len(unanswered)} questions to the judge have no answer: {reason}"
        if len(unanswered) == len(verdicts):
            raise ServicesDownError(failure)
        concerned = {row for question in unanswered for row in question.order}
        failed = sum(value is None and row in concerned for row, value in enumerate(values))
        return PartialValues(values, failure, failed)


_ABOUT_THE_REQUEST = (400, 413, 422)
"""Refusals that other requests need not meet, such as of a text that is too long."""


class JudgeClient:
    """The requests of one call, answered by the cache or by the endpoint.

    Args:
        calls: To the endpoint.
        cache: Of replies.
    """

    def __init__(self, calls: Calls, cache: ReplyCache) -> None:
        self._calls, self._cache = calls, cache
        self._sent = self._cached = self._unanswered = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.refusal = ""
        self._unsaved: dict[bytes, Reply] = {}
        self._saving = asyncio.Lock()

    async def replies(self, requests: Iterable[bytes]) -> dict[bytes, Reply]:
        """Return the replies, as far as there are any; equal requests are sent once."""
        requests = list(dict.fromkeys(requests))
        cached = await asyncio.to_thread(self._cache.find, requests)
        sent = [request for request in requests if request not in cached]
        try:
            replies = await gather([self._send(request) for request in sent])
        finally:
            await asyncio.to_thread(self._cache.add, self._unsaved)
        new = {
            request: reply
            for request, reply in zip(sent, replies, strict=True)
            if reply is not None
        }
        self._cached += len(cached)
        self._sent += len(sent)
        self._unanswered += len(sent) - len(new)
        self.prompt_tokens += sum(reply.prompt_tokens for reply in new.values())
        self.completion_tokens += sum(reply.completion_tokens for reply in new.values())
        return cached | new

    async def _send(self, request: bytes) -> Reply | None:
        try:
            reply = await self._calls.send(
                "{}/chat/completions".format, lambda: request, _read_completion
            )
        except RequestRefusedError as error:
            if error.status not in _ABOUT_THE_REQUEST:
                raise
            self.refusal = str(error)
            return None
        if reply is not None:  # saved at once, as it is paid for: what follows may fail
            self._unsaved[request] = reply
            async with self._saving:  # with those that came while others were written
                unsaved = dict(self._unsaved)
                await asyncio.to_thread(self._cache.add, unsaved)
                for saved in unsaved:
                    del self._unsaved[saved]
        return reply

    def counts(self) -> dict[str, float]:
        """Return the metrics of the requests."""
        counts: dict[str, float] = {
            "requests": self._sent,
            "cached": self._cached,
            "failures": self._unanswered,
            "retries": self._calls.retries,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self._calls.latencies:
            counts["latency_s"] = fmean(self._calls.latencies)
        return counts


def _read_completion(reply: Mapping[str, Any]) -> Reply:
    """Read a chat completion.

    Raises:
        ServiceError: It is none.
    """
    try:
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (LookupError, TypeError) as error:
        raise ServiceError("the reply is no chat completion") from error
    if text is not None and not isinstance(text, str):
        raise ServiceError(f"the content of the reply is a JSON {type(text).__name__}, no text")
    usage = reply.get("usage")
    counts = [
        usage.get(name) if isinstance(usage, Mapping) else 0
        for name in ("prompt_tokens", "completion_tokens")
    ]
    tokens = [count if isinstance(count, int) and count > 0 else 0 for count in counts]
    return Reply(text or "", reason == "stop", *tokens)


_LOCK_TIMEOUT_S = 60.0
"""While other processes write."""


class ReplyCache:
    """A file of replies by their request, which several processes may share.

    Args:
        path: An SQLite database, created where there is none. None: nothing is stored.
        judge: Part of the key; replies of others are not found.
    """

    def __init__(self, path: str | None, judge: str) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._judge = judge

    def find(self, requests: Sequence[bytes]) -> dict[bytes, Reply]:
        """Return the stored replies."""
        if self._path is None:
            return {}
        query = "SELECT text, finished FROM replies WHERE request = ?"
        with self._open(self._path) as database:
            rows = (
                (each, database.execute(query, (self._key(each),)).fetchone()) for each in requests
            )
            return {each: Reply(row[0], finished=bool(row[1])) for each, row in rows if row}

    def add(self, replies: Mapping[bytes, Reply]) -> None:
        if self._path is None or not replies:
            return
        with self._open(self._path) as database:
            database.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)",
                [(self._key(each), reply.text, reply.finished) for each, reply in replies.items()],
            )

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S)) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS replies "
                    "(request BLOB PRIMARY KEY, text TEXT NOT NULL, finished INTEGER NOT NULL)"
                )
                yield database
        except (sqlite3.Error, OSError) as error:
            raise RewardError(f"cache: {path} cannot be used: {error}") from error

    def _key(self, request: bytes) -> bytes:
        return hashlib.sha256(self._judge.encode() + b"\n" + request).digest()
