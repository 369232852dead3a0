"""The verdict of a language model as a reward."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal

from lrlhf.rewards.function import (
    Completion,
    CopiesStartAfresh,
    LogExtra,
    LogMetric,
    PartialValues,
    RewardError,
    check_positive,
    column_of,
    completion_text,
)
from lrlhf.rewards.judge import comparisons, templates, verdicts
from lrlhf.rewards.judge.chat_endpoint import Reply, encode_request, read_models
from lrlhf.rewards.judge.comparisons import REFERENCE, Comparison
from lrlhf.rewards.judge.desk import Desk
from lrlhf.rewards.judge.questions import (
    Question,
    Verdict,
    notes_of,
    scores_by_comparison,
    values_of,
)
from lrlhf.rewards.judge.reply_cache import ReplyCache
from lrlhf.rewards.judge.templates import JudgeTemplate, prompt_text
from lrlhf.rewards.remote.remote_http import Exchange, RequestRefusedError, ServiceError, one_line
from lrlhf.rewards.remote.remote_protocols import in_base64, png_file
from lrlhf.rewards.remote.remote_services import Service
from lrlhf.rewards.remote.service_client import ServiceClient, ServicesDownError, ServiceSettings
from lrlhf.rewards.remote.service_token import DEFAULT_TOKEN_ENV
from lrlhf.types import Prompt

_REQUEST = {"temperature": 0.0, "max_tokens": 1024}
_SHOWN = 200

Mode = Literal["absolute", "pairwise", "listwise"]
_TEMPLATES: Mapping[Mode, str] = {
    "absolute": templates.ABSOLUTE,
    "pairwise": templates.PAIRWISE,
    "listwise": templates.LISTWISE,
}


@dataclass(frozen=True)
class _Batch:
    """What is to be judged, one entry per response in each."""

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    images: Sequence[Sequence[str] | None]
    columns: Mapping[str, Sequence[Any]]
    references: Sequence[Any] | None

    def groups(self) -> list[list[int]]:
        """Return the numbers of the responses that have the same to answer."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for row in range(len(self.completions)):
            columns = {name: values[row] for name, values in self.columns.items()}
            reference = self.references and self.references[row]
            same = (self.prompts[row], self.images[row], columns, reference)
            found[json.dumps(same, default=str, sort_keys=True)].append(row)
        return [*found.values()]

    def text(self, row: int, of: int) -> Any:
        """Return a response, or the reference answer to the prompt of another."""
        if row != REFERENCE:
            return self.completions[row]
        return self.references[of] if self.references is not None else None


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
        seed: Of the first sample, sent where a question is asked more than once.
        show_images: Show the judge the images of the prompt.
        cache: SQLite file of replies: what was asked once is not asked again, so that a run that is
            resumed gets the same verdicts and pays once.
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
    _not_copied = ("_client", "_served")

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        template = options.get("template") or _TEMPLATES[options.get("mode") or "absolute"]
        reference = options.get("reference_column")
        return [*JudgeTemplate(template).columns, *([reference] if reference else [])]

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        urls: str | list[str],
        model: str | None = None,
        mode: Mode = "absolute",
        rubric: str | None = None,
        template: str | None = None,
        system: str = templates.SYSTEM,
        scale: tuple[float, float] = (1.0, 10.0),
        opponents: int | None = None,
        reference_column: str | None = None,
        samples: int = 1,
        attempts: int = 1,
        request: dict[str, Any] | None = None,
        seed: int = 0,
        show_images: bool = True,
        cache: str | None = None,
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
        self._template = JudgeTemplate(template or _TEMPLATES[mode])
        self._model, self._rubric, self._system = model, rubric, system
        self._low, self._high = scale
        if not self._low < self._high:
            raise ValueError(f"scale is {[*scale]}; give the worst rating, then the best")
        self._reference_column = reference_column
        self._compare = _comparisons_of(mode, opponents, reference_column)
        self._mode = mode
        check_positive(samples=samples, attempts=attempts)
        self._samples, self._attempts, self._seed = samples, attempts, seed
        given = {**_REQUEST, **(request or {})}
        self._request = {name: value for name, value in given.items() if value is not None}
        if samples * attempts > 1 and self._request.get("temperature") == 0:
            raise ValueError(
                "samples and attempts above 1 ask the same question again, and at temperature 0 "
                "the judge says the same again: give request: {temperature: 0.7}"
            )
        if unknown := {*(prices or {})} - {"prompt", "completion"}:
            raise ValueError(f"prices are of prompt and completion, not of {sorted(unknown)}")
        self._prices = prices or {}
        self._show_images = show_images
        self._cache = ReplyCache(cache)
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._client = ServiceClient(self._settings)
        self._served = ""

    def prepare(self) -> None:
        """Wait until the endpoint answers; once it did, do nothing.

        Raises:
            RewardError: It does not within ``startup_timeout``, does not serve the model, or the
                key cannot be read.
        """
        if not self._served:
            self._client.meet(self._greet)

    async def _greet(self, exchange: Exchange, service: Service) -> str:
        """Return what is wrong with an endpoint; empty: nothing."""
        try:
            models = read_models(await exchange.ask(f"{service.url}/models"))
        except ServiceError as error:
            return f"{service.url}: {error}"
        except RequestRefusedError as error:
            if self._model is None or error.status != 404:
                raise
            models = [self._model]  # not every endpoint lists them
        name = self._model or (models[0] if len(models) == 1 else None)
        if name not in models:
            listed = one_line(", ".join(models), _SHOWN)
            raise RewardError(f"{service.url} serves {listed or 'no model'}; set model to one")
        self._served = name
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
        **columns: Any,
    ) -> list[float | None]:
        if any(videos or ()):
            raise RewardError("a judge cannot be shown videos")
        batch = await asyncio.to_thread(self._batch, prompts, completions, images, columns)
        questions = [
            Question(comparison, order, sample)
            for group in batch.groups()
            for comparison in self._compare(group)
            for order in comparison.orders
            for sample in range(self._samples)
        ]
        found: dict[Question, Verdict] = {}
        async with self._client.calls() as calls:
            desk = Desk(calls, self._cache)
            for attempt in range(self._attempts):
                missing = [one for one in questions if attempt == 0 or found[one].scores is None]
                bodies = await asyncio.to_thread(self._bodies, batch, missing, attempt)
                replies = await desk.ask([*bodies.values()])
                found |= {one: self._read(one, replies.get(bodies[one])) for one in missing}
        values = values_of(questions, found, len(completions))
        self._log(log_metric, desk, questions, found)
        log_extra("judge", notes_of(questions, found, len(completions)))
        return self._with_failures(values, desk)

    def _batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        images: Sequence[Sequence[Any]] | None,
        columns: Mapping[str, Any],
    ) -> _Batch:
        reference = self._reference_column
        return _Batch(
            prompts,
            [completion_text(completion) for completion in completions],
            in_base64(images, png_file)
            if images and self._show_images
            else [None] * len(completions),
            {name: column_of(columns, name, setting="template") for name in self._template.columns},
            reference and column_of(columns, reference, setting="reference_column"),
        )

    def _bodies(
        self, batch: _Batch, questions: Sequence[Question], attempt: int
    ) -> dict[Question, bytes]:
        return {question: self._body(batch, question, attempt) for question in questions}

    def _body(self, batch: _Batch, question: Question, attempt: int) -> bytes:
        own = next(row for row in question.order if row != REFERENCE)
        text = self._template.render(
            prompt=prompt_text(batch.prompts[own]),
            responses=[batch.text(row, own) for row in question.order],
            rubric=self._rubric,
            low=f"{self._low:g}",
            high=f"{self._high:g}",
            **{name: values[own] for name, values in batch.columns.items()},
        )
        options = dict(self._request)
        if self._samples * self._attempts > 1:
            options["seed"] = self._seed + question.sample + attempt * self._samples
        model = self._model or self._served
        return encode_request(model, self._system, text, batch.images[own] or (), options)

    def _read(self, question: Question, reply: Reply | None) -> Verdict:
        if reply is None or not reply.finished:
            return Verdict(None, reply)
        verdict = verdicts.verdict_of(reply.text)
        if verdict is None:
            return Verdict(None, reply)
        if self._mode == "absolute":
            return Verdict(verdicts.read_rating(verdict, self._low, self._high), reply)
        if self._mode == "pairwise":
            return Verdict(verdicts.read_choice(verdict), reply)
        return Verdict(verdicts.read_ranking(verdict, len(question.order)), reply)

    def _log(
        self,
        log_metric: LogMetric,
        desk: Desk,
        questions: Sequence[Question],
        found: Mapping[Question, Verdict],
    ) -> None:
        replied = [verdict for verdict in found.values() if verdict.reply is not None]
        if replied:
            malformed = fmean(verdict.scores is None for verdict in replied)
            log_metric("judge/malformed_fraction", malformed)
        agreed = [
            share
            for comparison, scores in scores_by_comparison(questions, found)
            if (share := comparison.agreement(scores)) is not None
        ]
        if agreed:
            log_metric("judge/order_agreement", fmean(agreed))
        for name, value in desk.counts().items():
            log_metric(f"judge/{name}", value)
        if self._prices:
            paid = {"prompt": desk.prompt_tokens, "completion": desk.completion_tokens}
            cost = sum(price * paid[name] for name, price in self._prices.items()) / 1e6
            log_metric("judge/cost", cost)

    def _with_failures(self, values: list[float | None], desk: Desk) -> list[float | None]:
        if not desk.unanswered:
            return values
        complaint = desk.refusal or self._client.services.complaints()
        failure = f"{desk.unanswered} questions to the judge have no answer: {complaint}"
        if all(value is None for value in values):
            raise ServicesDownError(failure)
        return PartialValues(values, failure)


def _comparisons_of(
    mode: Mode, opponents: int | None, reference_column: str | None
) -> Callable[[Sequence[int]], Iterator[Comparison]]:
    """Return what yields the comparisons of a group.

    Raises:
        ValueError: The options do not go together.
    """
    if mode != "pairwise" and (opponents is not None or reference_column is not None):
        raise ValueError("opponents and reference_column are for mode: pairwise")
    if opponents is not None and reference_column is not None:
        raise ValueError("with reference_column responses do not meet each other: no opponents")
    if opponents is not None and (opponents < 2 or opponents % 2):
        raise ValueError(f"opponents is {opponents}; it must be an even number above 0")
    if mode == "absolute":
        return comparisons.alone
    if mode == "listwise":
        return comparisons.all_together
    if reference_column is not None:
        return comparisons.with_reference
    return comparisons.in_pairs(opponents)
