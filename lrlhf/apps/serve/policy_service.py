"""A policy that answers agents, many of them at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lrlhf.cli.command_parser import add_loading_options, command_parser
from lrlhf.cli.trained_policy import TrainedPolicy, load_to_talk
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.environments import detect_format, tool_call_format
from lrlhf.environments.session import TurnPrompt, TurnTokens
from lrlhf.options.errors import ConfigError
from lrlhf.rewards.learned import encoded
from lrlhf.rollout import Response, Sampling, TransformersEngine
from lrlhf.rollout.responses import responses_of, token_prompts
from lrlhf.rollout.texts import turn_text
from lrlhf.run import sample_seeds
from lrlhf.run.atomic import append_line
from lrlhf.web import log_defect

if TYPE_CHECKING:
    from lrlhf.environments.agents import PendingRequest


TOKEN_ENV = "LRLHF_POLICY_TOKEN"
_EPILOG = f"""\
Clients give the address and the token that are printed as base_url and api_key. The token is that
of the environment variable {TOKEN_ENV}, else a new one. How turns are sampled is for these options
to say, not for requests; a request may only make its answer shorter, with max_tokens.

example:
  lrlhf serve-policy runs/openai_agent --record turns.jsonl
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser(
        "serve-policy",
        "Serve a policy to agents, as OpenAI's chat completions.",
        _EPILOG,
    )
    add_loading_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8200, help="default: 8200; 0: any free one")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    parser.add_argument("--top_p", type=float, default=1.0, help="default: 1, all tokens")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="default: 512")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--batch_size", type=int, default=16, help="turns at once; default: 16")
    parser.add_argument(
        "--record",
        type=Path,
        help=".jsonl file to which every turn is added, with its time, its token ids, their "
        "log-probabilities and the user that the request names",
    )
    return parser


def serve_policy(arguments: Sequence[str]) -> None:
    """Run the command until it is interrupted.

    Raises:
        ConfigError: Nothing that generates is there, or an option cannot be used.
        KeyboardInterrupt: When the user wants it to end.
    """
    options = parser().parse_args(arguments)
    # not at the top: it brings torch, which help does without
    import_module("lrlhf.apps.serve.policy_service").serve(options)


logger = logging.getLogger(__name__)

_PATIENCE = 1.0
"""Seconds without a request after which the service looks whether it was interrupted."""
_SMALL = 16_384
"""Letters of a request that does not wait until larger ones are made into tokens."""
_PIECE = 65_536
"""Letters that are made into tokens at once to see whether a text is too long."""
_MAX_WAITING = 512
"""Questions at once, beyond which clients are told to come back."""
_FAILED = "the policy failed to answer; the server's log says why"


class Readable(NamedTuple):
    """A request and its prompt."""

    request: PendingRequest
    prompt_ids: list[int]
    room: int
    """Tokens that the answer may have."""


class _TooLongError(Exception):
    """A prompt has more tokens than the model reads."""


class PolicyService:
    """Answers requests with a policy's turns.

    Args:
        trained: The policy.
        sampling: How turns are sampled; a request may make its own shorter.
        seed: Of all turns, each of which has random numbers of its own.
        record: File to which turns are added; None: none.
    """

    def __init__(
        self, trained: TrainedPolicy, sampling: Sampling, *, seed: int = 0, record: Path | None
    ) -> None:
        # needs an extra
        self._agents = import_module("lrlhf.environments.agents")
        policy, options = trained.policy, trained.prompts
        template = options.get("chat_template")
        kwargs = options.get("chat_template_kwargs") or {}
        self._policy = policy
        self._tokenizer = policy.tokenizer
        self._chat = ChatFormat(policy.tokenizer, template, kwargs)
        written = str(self._chat.template or policy.tokenizer.chat_template or "")
        self._read_calls = tool_call_format(detect_format(written) or "hermes")
        self._sampling = sampling
        self._seed = seed
        self._record = record
        self._engine = TransformersEngine()
        self._engine.attach(*policy)
        self._limit = self._engine.context_length
        self._call_ids = self._agents.call_ids()
        self._batches = 0
        self._unrecorded = 0
        """Turns since the record could be written."""

    def read(self, request: PendingRequest) -> Readable | None:
        """Return a request with its prompt; None: it is refused, and told why, or was given up."""
        if request.future.done():
            return None
        try:
            ids = self._prompt(request.prompt)
            room = self._room(request.prompt, ids)
        except _TooLongError as problem:
            self._refuse_length(request, f"more than {problem}")
        except BadRow as problem:
            request.refuse(problem.detail)
        except ValueError as problem:
            request.refuse(str(problem))
        except Exception as error:  # noqa: BLE001  the next request may be read
            log_defect("a request could not be read:", error)
            request.refuse(_FAILED, status=500)
        else:
            if room > 0:
                return Readable(request, ids, room)
            self._refuse_length(request, f"{len(ids)}")
        return None

    def _refuse_length(self, request: PendingRequest, length: str) -> None:
        what = f"messages: they have {length} tokens, and the model reads {self._limit}"
        request.refuse(what, code="context_length_exceeded")

    def answer(self, batch: Sequence[Readable]) -> None:
        """Answer requests together; one that cannot be answered is told why."""
        batch = [each for each in batch if each.request.start()]
        try:
            if batch:
                self._answer(batch)
        except Exception as error:  # noqa: BLE001  the next requests may be answered
            log_defect(f"no answer to {len(batch)} requests:", error)
            for request, _, _ in batch:
                request.refuse(_FAILED, status=500)

    def _answer(self, batch: Sequence[Readable]) -> None:
        device = next(self._policy.model.parameters()).device
        rooms = [room for _, _, room in batch]
        prompts = token_prompts([ids for _, ids, _ in batch]).to(device)
        prompts = replace(prompts, room=torch.tensor(rooms, device=device))
        seeds = sample_seeds(self._seed, self._batches, count=len(batch))
        self._batches += 1
        rollout = self._engine.generate(
            prompts,
            self._sampling.at_most(max(rooms)),
            num_generations=1,
            seeds=seeds,
        )
        for (request, ids, room), turn in zip(batch, responses_of(rollout, prompts), strict=True):
            self._tell(request, ids, turn.cut(room))

    def _tell(self, request: PendingRequest, prompt_ids: Sequence[int], turn: Response) -> None:
        stops = () if turn.truncated else self._sampling.stop
        ids = turn.token_ids.tolist()
        text, raw = turn_text(self._tokenizer, [], ids, stops)
        read_calls = self._read_calls if request.prompt.tools else None
        message = self._agents.turn_message(text, raw, read_calls, self._call_ids)
        tokens = TurnTokens(len(prompt_ids), len(ids), cut_off=turn.truncated)
        if self._record is not None:
            (segment,) = turn.segments
            assert segment.logprobs is not None
            line = {
                "time": datetime.now(UTC).isoformat(),
                "user": request.user,
                "messages": request.prompt.messages,
                "tools": request.prompt.tools,
                "answer": message,
                "prompt_ids": prompt_ids,
                "token_ids": ids,
                "logprobs": segment.logprobs.tolist(),
                "truncated": turn.truncated,
            }
            self._write(self._record, json.dumps(line, ensure_ascii=False))
        request.answer(self._agents.ChatAnswer(message, tokens))

    def _write(self, record: Path, line: str) -> None:
        """Add a turn to the record; where that fails, it is answered without."""
        try:
            append_line(record, line)
        except OSError as error:
            self._unrecorded += 1
            if self._unrecorded == 1:
                logger.error("%s; turns are answered and not recorded until it can be", error)
            return
        if self._unrecorded:
            logger.warning("%s lacks %d turns; it is written again", record, self._unrecorded)
            self._unrecorded = 0

    def _prompt(self, prompt: TurnPrompt) -> list[int]:
        text = self._chat.render(prompt.messages, {"tools": list(prompt.tools)}, prompt=True)
        self._check_beginning(text)
        ids = encoded(self._tokenizer, text, specials=False)
        if not ids:
            raise ValueError("messages: the chat template makes nothing of them")
        return ids

    def _check_beginning(self, text: str) -> None:
        """Refuse what has too many tokens before all of it is made into tokens.

        Raises:
            _TooLongError: Its beginning has more than the model reads.
        """
        if self._limit is None or len(text) <= _PIECE:
            return
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            # a token may stand on both sides of a cut
            count += len(encoded(self._tokenizer, piece, specials=False)) - 1
            if count > self._limit:
                raise _TooLongError(count)

    def _room(self, prompt: TurnPrompt, ids: Sequence[int]) -> int:
        """Return how many tokens a turn may have; below 1: the prompt leaves no room."""
        room = min(self._sampling.max_new_tokens, prompt.max_tokens or sys.maxsize)
        if self._limit is not None:
            room = min(room, self._limit - len(ids))
        return room


def serve(options: argparse.Namespace) -> None:
    """Answer until the process is interrupted.

    Raises:
        ConfigError: Nothing that generates is there, or an option cannot be used.
    """
    if options.batch_size < 1:
        raise ConfigError(f"batch_size is {options.batch_size}; it must be 1 or more")
    desk = _Desk()
    try:
        agents: Any = import_module("lrlhf.environments.agents")
        if options.record is not None:
            options.record.open("a").close()
    except ImportError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"record: {options.record} cannot be written: {error}") from error
    endpoint = agents.ChatEndpoint(options.host, options.port)
    try:
        try:
            base_url, token = endpoint.enter(desk.take, os.environ.get(TOKEN_ENV) or None)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen at {options.host}, port {options.port}: {error}"
            ) from error
        # loading takes long: what is wrong with the options is told before
        trained, sampling = load_to_talk(options)
        service = PolicyService(trained, sampling, seed=options.seed, record=options.record)
        desk.open(service)
        shown = f"that of {TOKEN_ENV}" if os.environ.get(TOKEN_ENV) else token
        sys.stdout.write(f"base_url {base_url}\napi_key  {shown}\n")
        sys.stdout.flush()
        with _noted_interrupt() as interrupted:
            while not interrupted.is_set():
                service.answer(desk.batch(options.batch_size))
        raise KeyboardInterrupt
    finally:
        endpoint.close()


class _Desk:
    """Questions on their way: small ones are not held up by large ones, which take long to read."""

    def __init__(self) -> None:
        self._small: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        self._large: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[Readable] = queue.SimpleQueue()

    def take(self, request: PendingRequest) -> None:
        """Let a request in, also before the model is loaded.

        One too many is refused.
        """
        waiting = sum(each.qsize() for each in (self._small, self._large, self._read))
        if waiting >= _MAX_WAITING:
            request.refuse("too many requests wait: try again later", status=429)
            return
        letters = sum(len(str(message["content"])) for message in request.prompt.messages)
        (self._small if letters <= _SMALL else self._large).put(request)

    def open(self, service: PolicyService) -> None:
        """Have requests read, in threads that end with the process."""
        for waiting in (self._small, self._large):
            threading.Thread(target=self._pass_on, args=(waiting, service), daemon=True).start()

    def batch(self, most: int) -> list[Readable]:
        """Take the waiting requests, or nothing if that takes long."""
        batch: list[Readable] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._read.get(timeout=_PATIENCE))
            while len(batch) < most:
                batch.append(self._read.get_nowait())
        return batch

    def _pass_on(self, waiting: queue.SimpleQueue[PendingRequest], service: PolicyService) -> None:
        while True:
            readable = service.read(waiting.get())
            if readable is not None:
                self._read.put(readable)


@contextlib.contextmanager
def _noted_interrupt() -> Iterator[threading.Event]:
    """Tell whether SIGINT came: its exception is lost where Python ignores exceptions."""
    interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        if callable(before):
            before(number, frame)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
