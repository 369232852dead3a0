"""The verdict of a language model as a reward."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple

from lrlhf.rewards.function import (
    Completion,
    CopiesStartAfresh,
    LogExtra,
    LogMetric,
    NoSiblingsError,
    PartialValues,
    RewardError,
    check_positive,
    column_of,
    completion_text,
)
from lrlhf.rewards.judge.judge_client import Desk, Reply, ReplyCache, encode_request
from lrlhf.rewards.judge.verdicts import (
    ABSOLUTE,
    LETTERS,
    LISTWISE,
    SYSTEM,
    FormName,
    JudgeTemplate,
    choice_scores,
    prompt_text,
    read_ranking,
    read_rating,
    verdict_form,
    verdict_of,
)
from lrlhf.rewards.remote.remote_http import Exchange, RequestRefusedError, ServiceError
from lrlhf.rewards.remote.remote_protocols import in_base64, png_file
from lrlhf.rewards.remote.remote_services import Service, read_models, served_model
from lrlhf.rewards.remote.service_client import (
    DEFAULT_TOKEN_ENV,
    ServiceClient,
    ServicesDownError,
    ServiceSettings,
)
from lrlhf.rewards.reward_values import shorten
from lrlhf.types import Prompt

REFERENCE = -1
"""Stands for the reference answer among the numbers of responses."""

Mode = Literal["absolute", "pairwise", "listwise"]
Order = tuple[int, ...]
"""Numbers of responses, in the order in which the judge is shown them."""
Scores = Mapping[Order, tuple[float, ...] | None]
"""What a verdict says of each response that was shown, from 0 to 1; None: there is no verdict."""


class Comparison(NamedTuple):
    """Responses that are judged together, in one order or in several that must not matter."""

    orders: tuple[Order, ...]

    def values(self, scores: Scores) -> dict[int, float]:
        """Return the mean of the orders for each response; none if a verdict is missing.

        With one order alone, a judge that likes what stands first would be believed.
        """
        said = [scores[order] for order in self.orders]
        if any(entry is None for entry in said):
            return {}
        by_row = [dict(zip(order, scores[order] or (), strict=True)) for order in self.orders]
        return {row: fmean(entry[row] for entry in by_row) for row in by_row[0]}

    def agreement(self, scores: Scores) -> float | None:
        """Return the share of pairs that all orders say the same of; None: nothing to compare."""
        said = [scores[order] for order in self.orders]
        if len(said) < 2 or any(entry is None for entry in said):
            return None
        by_row = [dict(zip(order, scores[order] or (), strict=True)) for order in self.orders]
        same = [
            len({_sign(entry[one] - entry[other]) for entry in by_row}) == 1
            for one, other in combinations(by_row[0], 2)
        ]
        return fmean(same)


def _sign(value: float) -> float:
    return math.copysign(1.0, value) if value else 0.0


def _both_ways(*rows: int) -> Comparison:
    return Comparison((rows, rows[::-1]))


def alone(rows: Sequence[int]) -> Iterator[Comparison]:
    """Yield each response by itself."""
    return (Comparison(((row,),)) for row in rows)


def with_reference(rows: Sequence[int]) -> Iterator[Comparison]:
    """Yield each response with the reference answer."""
    return (_both_ways(row, REFERENCE) for row in rows)


def in_pairs(rows: Sequence[int], opponents: int | None = None) -> Iterator[Comparison]:
    """Yield the pairs of a group; none of a single response.

    Args:
        rows: The group.
        opponents: How many each response meets, an even number; None: all others. The responses
            stand in a ring, and each meets its neighbours on both sides.
    """
    if opponents is None or opponents >= len(rows) - 1:
        yield from (_both_ways(*pair) for pair in combinations(rows, 2))
        return
    for step in range(1, opponents // 2 + 1):
        for place, row in enumerate(rows):
            yield _both_ways(row, rows[(place + step) % len(rows)])


def all_together(rows: Sequence[int]) -> Iterator[Comparison]:
    """Yield the group as a whole; nothing of a single response."""
    if len(rows) < 2:
        return
    if len(rows) > len(LETTERS):
        raise RewardError(
            f"mode listwise shows a judge {len(LETTERS)} responses at most, and a prompt has "
            f"{len(rows)}; take mode pairwise with opponents"
        )
    yield _both_ways(*rows)


def check_groups(groups: Sequence[Sequence[int]], mode: Mode) -> None:
    """Refuse a batch in which no response has another to be compared with.

    Where some have, the others go without a value: a sibling may have failed.

    Raises:
        NoSiblingsError: Each group has a single response.
    """
    if groups and all(len(group) < 2 for group in groups):
        raise NoSiblingsError(
            f"mode {mode} compares the responses to a prompt, and here no prompt has two: take "
            "mode absolute, or pairwise with reference_column. In an evaluation it needs several "
            "samples (model.evaluation.num_samples) at temperatures above 0; they are taken in "
            "rounds of model.num_generations, and none of the rounds may be of one"
        )


def comparisons_of(
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
        return alone
    if mode == "listwise":
        return all_together
    if reference_column is not None:
        return with_reference
    return partial(in_pairs, opponents=opponents)


class Question(NamedTuple):
    """What the judge is asked once, and where the answer belongs."""

    comparison: Comparison
    order: Order
    sample: int

    @property
    def about(self) -> int:
        """The number of a response to the prompt in question."""
        return next(row for row in self.order if row != REFERENCE)


@dataclass
class Verdict:
    """The last reply to a question, and what it says."""

    scores: tuple[float, ...] | None
    reply: Reply | None
    """None: there is none."""


def scores_by_comparison(
    questions: Sequence[Question], found: Mapping[Question, Verdict]
) -> Iterator[tuple[Comparison, Scores]]:
    """Yield each comparison with what its orders say, the mean of those samples that say it."""
    said: dict[Comparison, dict[Order, list[tuple[float, ...]]]] = {}
    for question in questions:
        orders = said.setdefault(question.comparison, {})
        samples = orders.setdefault(question.order, [])
        if (scores := found[question].scores) is not None:
            samples.append(scores)
    for comparison, orders in said.items():
        yield (
            comparison,
            {
                order: tuple(map(fmean, zip(*samples, strict=True))) or None
                for order, samples in orders.items()
            },
        )


def values_of(
    questions: Sequence[Question], found: Mapping[Question, Verdict], count: int
) -> list[float | None]:
    """Return the mean over its comparisons for each response."""
    collected: defaultdict[int, list[float]] = defaultdict(list)
    for comparison, scores in scores_by_comparison(questions, found):
        for row, value in comparison.values(scores).items():
            collected[row].append(value)
    return [fmean(collected[row]) if collected[row] else None for row in range(count)]


def notes_of(
    questions: Sequence[Question], found: Mapping[Question, Verdict], count: int
) -> list[list[str]]:
    """Return what the judge wrote of each response; of comparisons, with the letter that it had."""
    notes: list[list[str]] = [[] for _ in range(count)]
    for question in questions:
        reply = found[question].reply
        for letter, row in zip(LETTERS, question.order, strict=False):
            if row != REFERENCE and reply is not None:
                named = f"as {letter}: " if len(question.order) > 1 else ""
                notes[row].append(f"{named}{reply.text}")
    return notes


def qualities(questions: Sequence[Question], found: Mapping[Question, Verdict]) -> dict[str, float]:
    """Return how good a judge's verdicts are, as far as there is something to tell.

    ``malformed_fraction`` is the share of replies without a verdict, ``order_agreement`` the share
    of comparisons that all orders say the same of.
    """
    told = {}
    if replied := [verdict for verdict in found.values() if verdict.reply is not None]:
        told["malformed_fraction"] = fmean(verdict.scores is None for verdict in replied)
    agreed = [
        share
        for comparison, scores in scores_by_comparison(questions, found)
        if (share := comparison.agreement(scores)) is not None
    ]
    if agreed:
        told["order_agreement"] = fmean(agreed)
    return told


_TEMPLATES = {"absolute": ABSOLUTE, "listwise": LISTWISE}


@dataclass(frozen=True)
class Batch:
    """What is to be judged, one entry per response in each."""

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    shown: Sequence[Sequence[Any] | None]
    """Stands for what each prompt shows, as JSON can say it."""
    columns: Mapping[str, Sequence[Any]]
    references: Sequence[str | None] | None
    """Answers to compare with; None in them: there is none."""

    def groups(self) -> list[list[int]]:
        """Return the numbers of the responses that have the same to answer."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for row in range(len(self.completions)):
            columns = {name: values[row] for name, values in self.columns.items()}
            reference = self.references and self.references[row]
            same = (self.prompts[row], self.shown[row], columns, reference)
            found[json.dumps(same, default=str, sort_keys=True)].append(row)
        return [*found.values()]

    def is_comparable(self, group: Sequence[int]) -> bool:
        """Whether there is a reference answer, where there is to be one."""
        return self.references is None or self.references[group[0]] is not None

    def text(self, row: int, of: int) -> str:
        """Return a response, or the reference answer to the prompt of another."""
        if row == REFERENCE and self.references is not None:
            return self.references[of] or ""
        return self.completions[row]


class Asker:
    """Writes the questions to a judge and reads its replies; options as in `JudgeReward`.

    Raises:
        ValueError: The template is none, or the options do not go together.
    """

    def __init__(
        self,
        mode: Mode,
        form: FormName,
        *,
        template: str | None,
        rubric: str | None,
        opponents: int | None,
        reference_column: str | None,
        samples: int,
        scale: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        self._form = verdict_form(form)
        if form != "line" and mode != "pairwise":
            raise ValueError(f"form {form} is for mode: pairwise")
        self._mode, self._samples = mode, samples
        self._template = JudgeTemplate(template or _TEMPLATES.get(mode, self._form.template))
        self._rubric, self._reference = rubric, reference_column
        self._compare = comparisons_of(mode, opponents, reference_column)
        self.compares_responses = mode != "absolute" and reference_column is None
        """Whether responses are shown with others to the same prompt."""
        self._low, self._high = scale
        if not self._low < self._high:
            raise ValueError(f"scale is {[*scale]}; give the worst rating, then the best")

    def batch(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        shown: Sequence[Sequence[Any] | None],
        columns: Mapping[str, Any],
        clean: Callable[[str], str] = str,
    ) -> Batch:
        """Gather what the questions are made of.

        Args:
            prompts: One per response, as all that follows.
            completions: The responses.
            shown: See `Batch`.
            columns: Of the data.
            clean: Takes out of responses and reference answers what the judge must not read.

        Raises:
            RewardError: A column is missing, or a reference answer is no text.
        """
        return Batch(
            prompts,
            [clean(completion_text(completion)) for completion in completions],
            shown,
            {name: column_of(columns, name, setting="template") for name in self._template.columns},
            self._references(columns, clean),
        )

    def _references(
        self, columns: Mapping[str, Any], clean: Callable[[str], str]
    ) -> list[str | None] | None:
        if (name := self._reference) is None:
            return None
        given = column_of(columns, name, setting="reference_column")
        texts = (clean(_reference_text(one, name)) for one in given)
        return [text if text.strip() else None for text in texts]

    def questions(self, batch: Batch) -> list[Question]:
        """Return all that is asked of a batch.

        Raises:
            RewardError: No group has enough responses to compare, or one has too many.
        """
        groups = batch.groups()
        if self.compares_responses:
            check_groups(groups, self._mode)
        return [
            Question(comparison, order, sample)
            for group in groups
            if batch.is_comparable(group)
            for comparison in self._compare(group)
            for order in comparison.orders
            for sample in range(self._samples)
        ]

    def text(self, batch: Batch, question: Question) -> str:
        """Return the text of a question."""
        own = question.about
        return self._template.render(
            prompt=prompt_text(batch.prompts[own]),
            responses=[batch.text(row, own) for row in question.order],
            rubric=self._rubric,
            shown="Response",
            low=f"{self._low:g}",
            high=f"{self._high:g}",
            **{name: values[own] for name, values in batch.columns.items()},
        )

    def read(self, question: Question, reply: Reply | None) -> Verdict:
        """Return what a reply says; one that was cut off says nothing."""
        if reply is None or not reply.finished:
            return Verdict(None, reply)
        if self._mode == "pairwise":
            return Verdict(choice_scores(self._form.read(reply.text)), reply)
        verdict = verdict_of(reply.text)
        if verdict is None:
            return Verdict(None, reply)
        if self._mode == "absolute":
            return Verdict(read_rating(verdict, self._low, self._high), reply)
        return Verdict(read_ranking(verdict, len(question.order)), reply)


def _reference_text(reference: Any, column: str) -> str:
    """Return a reference answer as text; of a chat, what the assistant says; empty: none."""
    if reference is None or isinstance(reference, str):
        return reference or ""
    if isinstance(reference, Sequence) and all(isinstance(turn, Mapping) for turn in reference):
        return completion_text(reference)
    raise RewardError(
        f"reference_column: an entry of column {column!r} is {shorten(reference)} "
        f"({type(reference).__name__}); give a text, or the turns of a chat"
    )


def columns_asked(options: Mapping[str, Any]) -> Iterable[str]:
    """Return the columns that a judge with these options needs."""
    # built-in templates need none
    template = options.get("template") or ABSOLUTE
    reference = options.get("reference_column")
    return [*JudgeTemplate(template).columns, *([reference] if reference else [])]


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
