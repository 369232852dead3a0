"""An engine whose responses are episodes: turns of the policy, answered by an environment."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.background import EventLoop, in_background
from lrlhf.environments.session import EnvironmentFailure, EpisodeSession, Reaction, Session
from lrlhf.environments.settings import Episodes, resolve
from lrlhf.environments.tool_calls import ToolCallFormat, detect_format, tool_call_format
from lrlhf.media import MediaProcessor
from lrlhf.rollout.engines.engine import (
    EngineWrapper,
    RendersChat,
    RolloutEngine,
    check_seeds,
    pad_token_id,
)
from lrlhf.rollout.engines.synced_engine import EngineFailure, may_recover, without_recovery
from lrlhf.rollout.episodes.dialogue import Prompting
from lrlhf.rollout.episodes.play import Play
from lrlhf.rollout.responses import (
    Response,
    assemble_rollout,
    in_contexts,
    left_padded,
    prompt_token_ids,
    responses_of,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import turn_text
from lrlhf.types import PromptBatch, Rollout

if TYPE_CHECKING:
    from lrlhf.environments.agents import ChatEndpoint


class Speaker:
    """Generates turns with an engine.

    Args:
        engine: That of the policy.
        tokenizer: The policy's.
        contexts: The prompt of each episode.
        sampling: How tokens are sampled; its ``max_new_tokens`` is the length of an episode.
        episodes: The limits of turns.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        contexts: PromptBatch,
        sampling: Sampling,
        episodes: Episodes,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._contexts = contexts
        self._sampling = sampling
        self._turn_limit = episodes.max_turn_tokens or sampling.max_new_tokens

    def begin(self, plays: Sequence[Play], num_generations: int) -> None:
        """Generate the first turn of all episodes, each prompt computed once where it is one.

        Args:
            plays: Those of one prompt consecutive.
            num_generations: Episodes behind each.
        """
        asked, copies = self._contexts, 1
        firsts = plays[::num_generations]
        if all(
            play.prompt_ids == firsts[play.number // num_generations].prompt_ids for play in plays
        ):
            asked = self._contexts.select(torch.tensor([play.number for play in firsts]))
            copies = num_generations
        lefts = [self._left(play) for play in plays]
        # siblings share a prompt, and what is too much for one of them is cut off
        room = [max(lefts[start : start + copies]) for start in range(0, len(plays), copies)]
        asked = replace(asked, room=torch.tensor(room, device=asked.input_ids.device))
        sampling = self._sampling.at_most(max(room))
        seeds = [play.seed for play in plays]
        rollout = self._engine.generate(asked, sampling, num_generations=copies, seeds=seeds)
        self._add(plays, responses_of(rollout, asked))

    def go_on(self, plays: Sequence[Play]) -> None:
        """Generate the next turn of some episodes.

        With none it generates a token all the same, as ranks that share weights or an engine have
        to generate together.
        """
        if not plays:
            first = self._contexts.select(torch.tensor([0]))
            self._engine.generate(first, self._sampling.at_most(1), num_generations=1, seeds=[0])
            return
        limits = [self._left(play) for play in plays]
        rows = self._contexts.select(torch.tensor([play.number for play in plays]))
        device = rows.input_ids.device
        asked = in_contexts(rows, [torch.tensor(play.context, device=device) for play in plays])
        asked = replace(asked, room=torch.tensor(limits, device=device))
        rollout = self._engine.generate(
            asked,
            self._sampling.at_most(max(limits)),
            num_generations=1,
            seeds=[_seed_of_turn(play.seed, play.turns) for play in plays],
        )
        self._add(plays, responses_of(rollout, asked))

    def rollout(self, plays: Sequence[Play], num_generations: int) -> Rollout:
        """Put the episodes into a batch."""
        rollout = assemble_rollout(
            self._contexts,
            [play.whole for play in plays],
            num_generations=1,
            pad_id=pad_token_id(self._tokenizer),
        )
        starts = torch.tensor([len(play.prompt_ids) for play in plays])
        rewards = None
        if any(play.session.gives_rewards for play in plays):
            rewards = torch.zeros_like(rollout.sampling_logprobs)
            for row, (play, start) in enumerate(zip(plays, starts.tolist(), strict=True)):
                for end, reward in zip(play.ends, play.rewards, strict=True):
                    rewards[row, start + end - 1] += 0.0 if play.failure else reward
        return replace(
            rollout,
            group_ids=rollout.group_ids // num_generations,
            prompt_lengths=starts.to(rollout.input_ids.device),
            turn_rewards=rewards,
        )

    def _left(self, play: Play) -> int:
        """Return how many tokens a turn may have, at least one."""
        limits = [self._turn_limit, self._sampling.max_new_tokens - play.used]
        if play.turn_limit is not None:
            limits.append(play.turn_limit)
        if self._engine.context_length is not None:
            limits.append(self._engine.context_length - len(play.context))
        return max(1, min(limits))

    def _add(self, plays: Sequence[Play], turns: Sequence[Response]) -> None:
        for play, turn in zip(plays, turns, strict=True):
            before = play.context if isinstance(play.prompt, str) else []
            kept = turn.cut(self._left(play))
            stops = () if kept.truncated else self._sampling.stop
            stops = () if self._sampling.stop_in_text else stops
            ids = kept.token_ids.tolist()
            play.wrote(kept, turn_text(self._tokenizer, before, ids, stops))
            if kept.truncated and play.used >= self._sampling.max_new_tokens:
                play.cut_off("length")


def _seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of a further turn: random numbers of its own, the same after a resume."""
    return int(np.random.SeedSequence([seed, turn]).generate_state(1)[0])


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_STALLED = 30.0
"""Seconds after which an event loop that does not answer counts as blocked."""


class EpisodeEngine(EngineWrapper):
    """Plays episodes with another engine's turns.

    The token ids of the policy's turns are the engine's own. What is said between them is tokenised
    once, and is given to the policy without a gradient. An environment that raises, hangs or
    answers nonsense leaves its episode without a score; the others go on.

    Args:
        engine: Generates the turns.
        episodes: What is played, and its limits.

    Raises:
        ValueError: The environment, a tool or the format of calls cannot be found.
    """

    def __init__(self, engine: RolloutEngine, episodes: Episodes) -> None:
        super().__init__(engine)
        if episodes.wait_for == "any" and not engine.capabilities.concurrent:
            raise ValueError(
                f"episodes.wait_for is any, and {type(engine).__name__} generates in the training "
                "process, one batch after the other: drop wait_for, or take "
                "lrlhf.rollout.VLLMServerEngine"
            )
        self.episodes = episodes
        make, tools, agent = resolve(episodes)
        self._endpoint: ChatEndpoint | None = None
        self._new_session: Callable[..., EpisodeSession] = partial(Session, make, tools)
        if agent is not None:
            agents = import_module("lrlhf.environments.agents")  # which need an extra
            self._endpoint = agents.ChatEndpoint()
            self._new_session = partial(agents.AgentSession, agent, self._endpoint)
        self._loop = EventLoop("environments")
        self._open: set[EpisodeSession] = set()
        self._closing: list[Future[None]] = []
        _close_at_exit(self)

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        super().attach(policy, tokenizer, processor)
        self._read_calls = _call_format(self.episodes, tokenizer)
        self._prompting = Prompting(self.episodes, tokenizer, None)

    def use_chat(self, chat: RendersChat) -> None:
        self._prompting = Prompting(self.episodes, self.tokenizer, chat)
        super().use_chat(chat)

    def close(self) -> None:
        """Close the environments that are still open, and the engine."""
        self.close_environments()
        if self._endpoint is not None:
            self._endpoint.close()
        super().close()

    def close_environments(self) -> None:
        """Close the environments that are still open."""
        for session in [*self._open]:
            self._release(session)
        self._finish_closing()

    # ------------------------------------------------------------------ episodes

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        """Play ``num_generations`` episodes behind each prompt; see `RolloutEngine.generate`.

        Returns:
            A rollout with ``episodes``, whose environments are open until they are released.
        """
        check_seeds(seeds, prompts, num_generations)
        self._prompting.check(prompts)
        self._finish_closing()
        sessions = [self._session() for _ in seeds]
        self._open.update(sessions)
        try:
            plays = self._begin(prompts, sessions, seeds, sampling.max_new_tokens)
            speaker = Speaker(
                self.engine, self.tokenizer, _contexts(prompts, plays), sampling, self.episodes
            )
            with self.engine.conversation():
                speaker.begin(plays, num_generations)
                self._go_on(plays, speaker)
            self._judge(plays)
        except BaseException:
            for session in sessions:
                self._release(session)
            self._finish_closing()
            raise
        rollout = speaker.rollout(plays, num_generations)
        episodes = [play.episode(partial(self._release, play.session)) for play in plays]
        return replace(rollout, episodes=tuple(episodes))

    def _begin(
        self,
        prompts: PromptBatch,
        sessions: Sequence[EpisodeSession],
        seeds: Sequence[int],
        limit: int,
    ) -> list[Play]:
        """Open an environment for each response; those of one prompt get one seed."""
        ids = [own.tolist() for own in prompt_token_ids(prompts)]
        plays, opening, num_generations = [], {}, len(seeds) // len(prompts)
        for number, (session, seed) in enumerate(zip(sessions, seeds, strict=True)):
            group = number // num_generations
            row = {"seed": seeds[group * num_generations], **prompts.columns[group]}
            play = Play(number, prompts.prompts[group], ids[group], row, session, seed, limit)
            plays.append(play)
            opening[self._loop.submit(session.open({**row, "prompt": play.prompt}))] = play
        for future in self._wait(opening, ALL_COMPLETED):
            play = opening[future]
            shown = self._result(play, future)
            if play.failure:
                continue
            if shown is None and prompts.media is not None:
                continue  # the processor has counted out what it shows
            self._prompting.begin(play, shown, self.engine.context_length)
        return plays

    def _go_on(self, plays: Sequence[Play], speaker: Speaker) -> None:
        """Let environments and policy take turns until every episode is over."""
        in_step = torch.distributed.is_initialized() and may_recover()
        answering = self._ask(plays)
        if in_step or self._waits_for_all:
            while _on_any_rank(bool(answering), in_step=in_step):
                ready = self._ready(answering, self._wait(answering, ALL_COMPLETED))
                if _on_any_rank(bool(ready), in_step=in_step):
                    speaker.go_on(ready)
                answering = self._ask(ready)
            return
        speaking: dict[Future[None], list[Play]] = {}
        while answering or speaking:
            done = self._wait([*answering, *speaking], FIRST_COMPLETED)
            if ready := self._ready(answering, done):
                speaking[in_background(partial(_speak, speaker, ready), name="turns")] = ready
            for future in [one for one in speaking if one.done()]:
                answering |= self._ask(self._spoken(future, speaking, speaker))

    def _ready(
        self, answering: dict[Future[Reaction], Play], done: Collection[Future[Any]]
    ) -> list[Play]:
        """Take what environments have answered, and return who goes on."""
        answered = [(answering.pop(one), one) for one in [*answering] if one in done]
        answered.sort(key=lambda each: each[0].number)  # not as they came: batches are to be alike
        return [play for play, one in answered if self._takes(play, one)]

    def _spoken(
        self, future: Future[None], speaking: dict[Future[None], list[Play]], speaker: Speaker
    ) -> list[Play]:
        """Return who has spoken; a failed engine may recover once nobody else is using it.

        Raises:
            EngineFailure: It failed again, or may not recover now.
        """
        plays = speaking.pop(future)
        try:
            future.result()
        except EngineFailure:
            wait(speaking)
            if not may_recover():
                raise
            speaker.go_on(plays)
        return plays

    def _takes(self, play: Play, answer: Future[Reaction]) -> bool:
        """Add what an environment answered; tells whether the policy goes on."""
        reaction = self._result(play, answer)
        if reaction is None:
            return False
        play.heard(reaction)
        if play.finish_reason is not None:
            return False
        if play.turns == self.episodes.max_turns:
            play.cut_off("max_turns")
            return False
        return self._prompting.go_on(play, reaction, self.engine.context_length)

    def _judge(self, plays: Sequence[Play]) -> None:
        """Ask for the reward of the whole."""
        judging = {
            self._loop.submit(play.session.outcome()): play for play in plays if not play.failure
        }
        for future in self._wait(judging, ALL_COMPLETED):
            reward = self._result(judging[future], future)
            if reward is not None:
                judging[future].rewards[-1] += reward

    # ------------------------------------------------------------------ environments

    def _session(self) -> EpisodeSession:
        limits = {"timeout": self.episodes.timeout, "reset_timeout": self.episodes.reset_timeout}
        return self._new_session(self._read_calls, **limits)

    def _ask(self, plays: Iterable[Play]) -> dict[Future[Reaction], Play]:
        """Give the environments the last turns of those who go on."""
        return {
            self._loop.submit(play.session.react(*play.last_turn, play.last_tokens)): play
            for play in plays
            if play.finish_reason is None
        }

    def _result(self, play: Play, future: Future[ResultT]) -> ResultT | None:
        """Return what an environment answered; None: it failed, and so does its episode."""
        if not future.done():
            play.fail(
                "an async function keeps the event loop from going on: await what it waits for "
                "(as with AsyncOpenAI), or make it a plain function"
            )
            return None
        try:
            return future.result()
        except EnvironmentFailure as failure:
            play.fail(str(failure))
        except (Exception, CancelledError) as error:  # noqa: BLE001  it is the environment's
            play.fail(f"{type(error).__name__}: {error}")
        return None

    def _wait(self, futures: Iterable[Future[Any]], return_when: str) -> Collection[Future[Any]]:
        """Wait for answers, and for none that never come.

        Returns:
            Those that are done; all, if the event loop is blocked.
        """
        futures = [*futures]
        while True:
            done, rest = wait(futures, timeout=self.episodes.timeout, return_when=return_when)
            if not rest or (done and return_when == FIRST_COMPLETED):
                return done
            if not self._loop.answers(_STALLED):
                self._loop = EventLoop("environments")
                return futures

    @property
    def _waits_for_all(self) -> bool:
        if self.episodes.wait_for is not None:
            return self.episodes.wait_for == "all"
        return not self.capabilities.concurrent

    def _release(self, session: EpisodeSession) -> None:
        """Begin to close an environment."""
        if session in self._open:
            self._open.remove(session)
            self._closing.append(self._loop.submit(session.close()))

    def _finish_closing(self) -> None:
        closing, self._closing = self._closing, []
        wait(closing, timeout=self.episodes.timeout + _STALLED)
        ended = [one for one in closing if one.done() and not one.cancelled()]
        failures = [one.exception() for one in ended if one.exception() is not None]
        if failures:
            logger.warning("%d environments could not be closed: %s", len(failures), failures[0])


def _call_format(episodes: Episodes, tokenizer: PreTrainedTokenizerBase) -> ToolCallFormat:
    """Return what finds calls: what was chosen, else what the chat template writes, else JSON."""
    detected = detect_format(str(tokenizer.chat_template or ""))
    return tool_call_format(episodes.tool_calls or detected or "hermes")


def _contexts(prompts: PromptBatch, plays: Sequence[Play]) -> PromptBatch:
    """Return a prompt for each response, with what its environment shows at the start."""
    device, copies = prompts.input_ids.device, len(plays) // len(prompts)
    rows = prompts.select(torch.arange(len(plays)) // copies)
    own = [torch.tensor(play.prompt_ids, device=device) for play in plays]
    before = prompt_token_ids(rows)
    if all(torch.equal(one, other) for one, other in zip(own, before, strict=True)):
        return rows
    if any(media is not None for media in rows.media or ()):
        raise ValueError(
            "the environment or its tools add to the prompts, and some prompts show images or "
            "videos: put what it shows at the start into the data, and the tools' descriptions "
            "into data.tools"
        )
    input_ids, mask = left_padded(own)
    changed = tuple(play.prompt for play in plays)
    return replace(rows, input_ids=input_ids, attention_mask=mask, prompts=changed)


def _close_at_exit(engine: EpisodeEngine) -> None:
    """After an error nobody else closes what is open."""
    alive = weakref.ref(engine)

    def close() -> None:
        if (found := alive()) is not None:
            found.close_environments()

    atexit.register(close)


def _speak(speaker: Speaker, plays: Sequence[Play]) -> None:
    """Generate turns beside others: an engine that fails is recovered when nobody uses it."""
    with without_recovery():
        speaker.go_on(plays)


def _on_any_rank(condition: bool, *, in_step: bool) -> bool:
    if not in_step:
        return condition
    conditions: list[bool] = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(conditions, condition)
    return any(conditions)
