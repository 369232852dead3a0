"""The verdict of a language model as a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from lrlhf.rewards.function import (
    Completion,
    CopiesStartAfresh,
    LogExtra,
    LogMetric,
    PartialValues,
    RewardError,
    check_positive,
)
from lrlhf.rewards.judge.asking import Asker, Batch, columns_asked
from lrlhf.rewards.judge.chat_endpoint import encode_request
from lrlhf.rewards.judge.comparisons import Mode
from lrlhf.rewards.judge.desk import Desk
from lrlhf.rewards.judge.forms import FormName
from lrlhf.rewards.judge.questions import Question, Verdict, notes_of, qualities, values_of
from lrlhf.rewards.judge.reply_cache import ReplyCache
from lrlhf.rewards.judge.templates import SYSTEM
from lrlhf.rewards.remote.remote_http import Exchange, RequestRefusedError, ServiceError
from lrlhf.rewards.remote.remote_protocols import in_base64, png_file
from lrlhf.rewards.remote.remote_services import Service
from lrlhf.rewards.remote.served_models import read_models, served_model
from lrlhf.rewards.remote.service_client import ServiceClient, ServicesDownError, ServiceSettings
from lrlhf.rewards.remote.service_token import DEFAULT_TOKEN_ENV
from lrlhf.types import Prompt

_REQUEST = {"temperature": 0.0, "max_tokens": 1024}


class JudgeReward(CopiesStartAfresh):
    """What a language model thinks of the responses, asked through OpenAI's chat completions.

    The endpoint is any server that speaks them, such as vLLM's (the run's own included, where it
    has a fixed address) or a hosted one. Values are from 0 (worst) to 1 (best):

    - ``absolute``: where the rating of a response lies on the scale;
    - ``pairwise``: the share of the other responses to the prompt that it is better than, or with
      ``reference_column`` whether it is better than the reference answer. Each pair is asked in
      both orders, as judges favour what stands first (Zheng et al. 2023, arXiv:2306.05685): a
      response that wins in one order only has won half;
    - ``listwise``: the same share, from an order of all responses to the prompt, asked for forwards
      and backwards.

    A verdict must be the last line of the reply, and say what it was asked for and no more. A
    reply without one gives no value, and neither does a comparison that lacks it in one of its
    orders; a response that no verdict is about has no value.

    What the judge reads was written by the policy, which may learn to talk it into a good verdict.
    Look at what it likes (the column ``judge`` of the logged responses), and judge by other means
    too.

    Args:
        urls: Address of the endpoint with its version, such as ``http://127.0.0.1:8000/v1``, or
            several that serve the same model.
        model: Its name there; null: the one that is served.
        mode: ``absolute``, ``pairwise`` or ``listwise``.
        form: How a verdict on two is asked for and given: ``line`` (reasoning, then a last line
            ``Verdict: A``), ``direct`` (that line alone), or ``answer``
            (``<think>…</think><answer>Response 1 is better</answer>``). With the form, the rubric
            and the system prompt of a `VerdictTasks` a model is asked what it was trained on.
        rubric: What counts, in words.
        template: Jinja2 text of the question in place of the built-in one, which may use
            ``prompt``, ``responses`` (a list), ``letters``, ``rubric``, ``low``, ``high``, and
            columns of the data. It must ask for a last line ``Verdict: …`` with a number of the
            scale; with ``A``, ``B`` or ``tie``; or with an order such as ``B > A = C``.
        system: System prompt; empty: none.
        scale: Worst and best rating of ``absolute``.
        opponents: How many others each response meets in ``pairwise``, an even number; null: all.
        reference_column: Column of the answer that ``pairwise`` compares with instead.
        samples: How often each question is asked; the mean counts. Above 1 the judge needs a
            temperature above 0.
        attempts: How often a question is asked until there is a verdict; as with ``samples``.
        request: Further fields of the requests, such as ``{temperature: 0.7, top_p: 0.9}``; a field
            that is null is not sent. Default: temperature 0, max_tokens 1024.
        seed: Of the first sample, sent where a question is asked more than once. For questions that
            are asked once, ``request`` may have a seed.
        show_images: Show the judge the images of the prompt.
        cache: SQLite file of replies: what was asked once is not asked again, so that a run that is
            resumed gets the same verdicts and pays once. A reply is found by the addresses, the
            model's name and the request, which do not tell weights apart: keep it off where the
            judge changes under its name, such as the run's own policy.
        cache_version: A name for the judge, by which replies are found in place of the addresses:
            they stay known when it moves, and another name asks anew when its weights are others.
        prices: Of a million tokens, ``{prompt: …, completion: …}``, to log the cost.
        token_env: Environment variable that holds the key of the endpoint.
        token_file: File that holds it, instead.
        timeout: Seconds for one request.
        total_timeout: Seconds for all requests of one call together. null: no limit.
        retries: How often a request is sent again after a failure of the endpoint.
        max_concurrency: Requests under way at a time.
        startup_timeout: Seconds that the endpoint may take to come up when the run starts.
        verify: As of `RemoteReward`.
        max_wait: As of `RemoteReward`.
    """

    ends_by_itself: ClassVar[bool] = True
    none_is_missing: ClassVar[bool] = True
    _not_copied = ("_client", "_served")

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return columns_asked(options)

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
        token_env: str = DEFAULT_TOKEN_ENV,
        token_file: str | None = None,
        timeout: float = 300.0,
        total_timeout: float | None = 1800.0,
        retries: int = 4,
        max_concurrency: int = 32,
        startup_timeout: float = 60.0,
        verify: bool | str = True,
        max_wait: float | None = 0.0,
    ) -> None:
        self._settings = ServiceSettings(
            urls=urls,
            token_env=token_env,
            token_file=token_file,
            timeout=timeout,
            total_timeout=total_timeout,
            retries=retries,
            max_concurrency=max_concurrency,
            startup_timeout=startup_timeout,
            max_wait=max_wait,
            verify=verify,
        )
        check_positive(samples=samples, attempts=attempts)
        self._asker = Asker(
            mode,
            form,
            template=template,
            rubric=rubric,
            opponents=opponents,
            reference_column=reference_column,
            samples=samples,
            scale=scale,
        )
        self.compares_responses = self._asker.compares_responses
        self._model, self._system = model, system
        self._samples, self._attempts, self._seed = samples, attempts, seed
        given = {**_REQUEST, **(request or {})}
        self._request = {name: value for name, value in given.items() if value is not None}
        if samples * attempts > 1 and self._request.get("temperature") == 0:
            raise ValueError(
                "samples and attempts above 1 ask the same question again, and at temperature 0 "
                "the judge says the same again: give request: {temperature: 0.7}"
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
        self._client = ServiceClient(self._settings)
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
        self._client.meet(partial(self._greet, served))
        if len({*served.values()}) > 1:
            said = "; ".join(f"{url} has {model}" for url, model in served.items())
            raise RewardError(
                f"urls serve different models, so that verdicts would depend on who answers: "
                f"{said}. Set model to one that all have, or make each a reward of its own"
            )
        self._served = next(iter(served.values()))

    async def _greet(self, served: dict[str, str], exchange: Exchange, service: Service) -> str:
        """Add which model an endpoint serves, or return what is wrong with it."""
        try:
            models = read_models(await exchange.ask(f"{service.url}/models"))
        except ServiceError as error:
            return f"{service.url}: {error}"
        except RequestRefusedError as error:
            if self._model is None or error.status != 404:
                raise
            models = {self._model: {}}  # not every endpoint lists them
        served[service.url] = served_model(service.url, models, self._model)
        return ""

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
        questions = self._asker.questions(batch)
        found: dict[Question, Verdict] = {}
        async with self._client.calls() as calls:
            desk = Desk(calls, self._cache)
            for attempt in range(self._attempts):
                missing = [one for one in questions if attempt == 0 or found[one].scores is None]
                if not missing:
                    break
                bodies = await asyncio.to_thread(self._bodies, batch, missing, attempt)
                replies = await desk.ask([*bodies.values()])
                for one in missing:
                    reply = replies.get(bodies[one])
                    # an earlier reply without a verdict tells more than none
                    if reply is not None or one not in found:
                        found[one] = self._asker.read(one, reply)
        values = values_of(questions, found, len(completions))
        self._log(log_metric, desk, questions, found)
        log_extra("judge", notes_of(questions, found, len(completions)))
        return self._with_failures(values, desk, found)

    def _batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        images: Sequence[Sequence[Any]] | None,
        columns: Mapping[str, Any],
    ) -> Batch:
        shown: Sequence[Sequence[str] | None] = [None] * len(completions)
        if images and self._show_images:
            shown = in_base64(images, png_file)
        return self._asker.batch(prompts, completions, shown, columns)

    def _bodies(
        self, batch: Batch, questions: Sequence[Question], attempt: int
    ) -> dict[Question, bytes]:
        return {question: self._body(batch, question, attempt) for question in questions}

    def _body(self, batch: Batch, question: Question, attempt: int) -> bytes:
        text = self._asker.text(batch, question)
        options = dict(self._request)
        if self._samples * self._attempts > 1:
            options["seed"] = self._seed + question.sample + attempt * self._samples
        model = self._model or self._served
        shown = batch.shown[question.about] or ()
        return encode_request(model, self._system, text, shown, options)

    def _log(
        self,
        log_metric: LogMetric,
        desk: Desk,
        questions: Sequence[Question],
        found: Mapping[Question, Verdict],
    ) -> None:
        for name, value in qualities(questions, found).items():
            log_metric(f"judge/{name}", value)
        for name, value in desk.counts().items():
            log_metric(f"judge/{name}", value)
        if self._prices:
            paid = {"prompt": desk.prompt_tokens, "completion": desk.completion_tokens}
            cost = sum(price * paid[name] for name, price in self._prices.items()) / 1e6
            log_metric("judge/cost", cost)

    def _with_failures(
        self, values: list[float | None], desk: Desk, found: Mapping[Question, Verdict]
    ) -> list[float | None]:
        """Report questions that no attempt has got a reply to."""
        unanswered = [one for one, verdict in found.items() if verdict.reply is None]
        if not unanswered:
            return values
        complaint = desk.refusal or self._client.services.complaints()
        failure = f"{len(unanswered)} questions to the judge have no answer: {complaint}"
        if len(unanswered) == len(found):
            raise ServicesDownError(failure)
        asked_about = {row for question in unanswered for row in question.order}
        failed = sum(value is None and row in asked_about for row, value in enumerate(values))
        return PartialValues(values, failure, failed)
