"""What a vLLM server answers to a request for tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.responses import Response
from lrlhf.rollout.vllm.vllm_base import read_response

_NO_NUMBER = -9999.0
"""What vLLM writes for a log-probability that is NaN or infinite, as JSON has neither."""


class Logprob(msgspec.Struct):
    """Of one token."""

    logprob: float


class Logprobs(msgspec.Struct):
    """Of all tokens."""

    content: list[Logprob]


class Span(msgspec.Struct):
    """Tokens that weights of one version sampled."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """One response."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str | None
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct):
    """The fields that are read; all others are skipped without being built."""

    choices: list[Choice]
    prompt_token_ids: list[int]


_DECODER = msgspec.json.Decoder(Answer)


def read_answer(content: bytes, prompt: Sequence[int]) -> tuple[Response, list[Span]]:
    """Read a response, and which weights sampled it.

    Args:
        content: JSON.
        prompt: What the server was asked to go on from.

    Raises:
        EngineFailure: The answer is broken, or one to something else.
    """
    try:
        answer = _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise EngineFailure(f"the vLLM server's answer cannot be read ({error})") from error
    if answer.prompt_token_ids != list(prompt):
        raise EngineFailure("vLLM answered another prompt than the one it was given")
    (choice,) = answer.choices
    found = [one.logprob for one in choice.logprobs.content]
    logprobs = [math.nan if one <= _NO_NUMBER else one for one in found]
    response = read_response(choice.token_ids, logprobs, choice.finish_reason)
    if not choice.token_ids:
        raise EngineFailure("vLLM answered without a token")
    spans, end = choice.weight_versions or [], 0
    for span in spans:
        if span.start != end:
            break
        end = span.end
    if end != len(choice.token_ids):
        raise EngineFailure("vLLM does not say of every token which weights sampled it")
    return response, spans


def with_versions(response: Response, spans: Sequence[Span], known: Mapping[str, int]) -> Response:
    """Say of a response which weights sampled it.

    Args:
        response: Of one turn.
        spans: By the server's names of versions.
        known: Training iterations behind the weights of each name.

    Raises:
        EngineFailure: The weights of a version did not come from here.
    """
    versions = []
    for span in spans:
        if span.version not in known:
            raise EngineFailure("the vLLM server has other weights than it was given here")
        versions += [known[span.version]] * (span.end - span.start)
    if len(set(versions)) > 1:
        (whole,) = response.segments
        mixed = replace(whole, versions=torch.tensor(versions, dtype=torch.long))
        response = replace(response, segments=(mixed,))
    return replace(response, weight_version=min(versions))
