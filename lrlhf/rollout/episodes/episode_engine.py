"""Multi-turn rollouts (episodes): turns of the policy alternate with an environment's reactions."""

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
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.background import EventLoop, in_background
from lrlhf.environments.session import EnvironmentFailure, EpisodeSession, Reaction, Session
from lrlhf.environments.settings import Episodes, resolve
from lrlhf.environments.tool_calls import detect_format, tool_call_format
from lrlhf.media import MediaOptions, MediaProcessor
from lrlhf.media.parts import with_images
from lrlhf.rollout.engines.engine import (
    EngineWrapper,
    RendersChat,
    RolloutEngine,
    check_seeds,
    gather_ranks,
    pad_token_id,
)
from lrlhf.rollout.engines.synced_engine import EngineFailure, may_recover, without_recovery
from lrlhf.rollout.episodes.dialogue import ContextUpdater, encoded_once
from lrlhf.rollout.episodes.episode_state import ContextTokens, EpisodeState
from lrlhf.rollout.responses import assemble_rollout, left_padded, prompt_token_ids, responses_of
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import turn_text
from lrlhf.types import Media, PromptBatch, Rollout

if TYPE_CHECKING:
    from lrlhf.environments.agents import ChatEndpoint


logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
BatchT = TypeVar("BatchT", PromptBatch, Rollout)

_STALLED = 30.0
"""Seconds until an unresponsive event loop counts as blocked."""


class EpisodeEngine(EngineWrapper):
    """Runs episodes with turns of another engine.

    The token ids of the policy's turns are the engine's. Observations between them are tokenised
    once, and get no gradient. If an environment raises, hangs or returns an invalid value, its
    episode has no score; the others continue.

    Args:
        engine: Generates the turns.
        episodes: Environment and limits.

    Raises:
        ValueError: The environment, a tool or the format of calls does not exist.
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
            agents = import_module("lrlhf.environments.agents")  # requires an extra
            self._endpoint = agents.ChatEndpoint()
            self._new_session = partial(agents.AgentSession, agent, self._endpoint)
        self._loop = EventLoop("environments")
        self._open: set[EpisodeSession] = set()
        self._closing: list[Future[None]] = []
        alive = weakref.ref(self)

        def close() -> None:  # after an error nothing else closes environments
            if (engine := alive()) is not None:
                engine.close_environments()

        atexit.register(close)

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        super().attach(policy, tokenizer, processor)
        detected = detect_format(str(tokenizer.chat_template or ""))
        self._call_format = tool_call_format(self.episodes.tool_calls or detected or "hermes")
        self._processor = processor
        self.use_chat(None)

    def use_chat(self, chat: RendersChat | None, media: MediaOptions = MediaOptions()) -> None:  # noqa: B008  frozen
        self._contexts = ContextUpdater(self.episodes, self.tokenizer, chat, self._processor)
        self._media = None if self._processor is None else media
        if self._endpoint is not None:
            self._endpoint.media = self._media
        if chat is not None:
            super().use_chat(chat, media)

    def close(self) -> None:
        """Close all environments and the engine."""
        self.close_environments()
        if self._endpoint is not None:
            self._endpoint.close()
        super().close()

    def close_environments(self) -> None:
        for session in [*self._open]:
            self._release(session)
        self._finish_closing()

    # ------------------------------------------------------------------ episodes

    @encoded_once()
    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        """Run ``num_generations`` episodes for each prompt; see `RolloutEngine.generate`.

        Returns:
            A rollout with ``episodes``, whose environments are open until they are released.
        """
        check_seeds(seeds, prompts, num_generations)
        self._contexts.check(prompts)
        self._finish_closing()
        options: dict[str, Any] = {
            "timeout": self.episodes.timeout,
            "reset_timeout": self.episodes.reset_timeout,
        }
        if self._endpoint is None:
            options["media"] = self._media
        sessions = [self._new_session(self._call_format, **options) for _ in seeds]
        self._open.update(sessions)
        try:
            states = self._begin(prompts, sessions, seeds, sampling.max_new_tokens)
            generator = TurnGenerator(
                self.engine, self.tokenizer, _prompts(prompts, states), sampling, self.episodes
            )
            with self.engine.conversation():
                generator.first_turns(states, num_generations)
                self._alternate(states, generator)
            self._add_outcomes(states)
        except BaseException:
            for session in sessions:
                self._release(session)
            self._finish_closing()
            raise
        rollout = generator.rollout(states, num_generations)
        episodes = [state.episode(partial(self._release, state.session)) for state in states]
        return replace(rollout, episodes=tuple(episodes))

    def _begin(
        self,
        prompts: PromptBatch,
        sessions: Sequence[EpisodeSession],
        seeds: Sequence[int],
        limit: int,
    ) -> list[EpisodeState]:
        """Open an environment for each response, with one seed per prompt."""
        ids = [own.tolist() for own in prompt_token_ids(prompts)]
        media = prompts.media or (None,) * len(prompts)
        states, opening, num_generations = [], {}, len(seeds) // len(prompts)
        for number, (session, seed) in enumerate(zip(sessions, seeds, strict=True)):
            group = number // num_generations
            row = {"seed": seeds[group * num_generations], **prompts.columns[group]}
            prompt, own, shown = prompts.prompts[group], ids[group], media[group]
            images = () if shown is None else shown.images
            if images and not isinstance(prompt, str):
                prompt = with_images(prompt, images)
            tokens = ContextTokens(own, () if shown is None else ((0, len(own), shown),))
            state = EpisodeState(number, prompt, tokens, row, session, seed, limit, images=images)
            states.append(state)
            columns = {**row, "prompt": prompts.prompts[group]}
            if self._media is not None:
                # the policy, the rewards and the group's other episodes have the originals
                columns |= {"images": [image.copy() for image in images]}
            opening[self._loop.submit(session.open(columns))] = state
        for future in self._wait(opening, ALL_COMPLETED):
            state = opening[future]
            observation = self._result(state, future)
            if state.failure:
                continue
            self._contexts.begin(state, observation, self.engine.context_length)
        return states

    def _alternate(self, states: Sequence[EpisodeState], generator: TurnGenerator) -> None:
        """Alternate turns of policy and environments until every episode has ended."""
        in_step = torch.distributed.is_initialized() and may_recover()
        wait_for_all = in_step or (
            not self.capabilities.concurrent
            if self.episodes.wait_for is None
            else self.episodes.wait_for == "all"
        )
        exchange: Callable[[bool], list[bool]] = gather_ranks if in_step else lambda own: [own]
        reacting = self._react(states)
        if wait_for_all:
            while any(exchange(bool(reacting))):
                ready = self._ready(reacting, self._wait(reacting, ALL_COMPLETED))
                if any(exchange(bool(ready))):
                    generator.next_turns(ready)
                reacting = self._react(ready)
            return

        def generate(ready: Sequence[EpisodeState]) -> None:
            with without_recovery():  # other threads use the engine
                generator.next_turns(ready)

        generating: dict[Future[None], list[EpisodeState]] = {}
        while reacting or generating:
            done = self._wait([*reacting, *generating], FIRST_COMPLETED)
            if ready := self._ready(reacting, done):
                generating[in_background(partial(generate, ready), name="turns")] = ready
            for future in [each for each in generating if each.done()]:
                ready = generating.pop(future)
                try:
                    future.result()
                except EngineFailure:
                    # it may recover once no other thread uses it
                    wait(generating)
                    if not may_recover():
                        raise
                    generator.next_turns(ready)
                reacting |= self._react(ready)

    def _react(self, states: Iterable[EpisodeState]) -> dict[Future[Reaction], EpisodeState]:
        """Pass the last turns of running episodes to their environments."""
        return {
            self._loop.submit(state.session.react(*state.last_turn, state.last_tokens)): state
            for state in states
            if state.finish_reason is None
        }

    def _ready(
        self, reacting: dict[Future[Reaction], EpisodeState], done: Collection[Future[Any]]
    ) -> list[EpisodeState]:
        """Add finished reactions to their episodes, and return those that continue."""
        finished = [(reacting.pop(each), each) for each in [*reacting] if each in done]
        # in the order of rows, for reproducible batches
        finished.sort(key=lambda each: each[0].number)
        return [state for state, future in finished if self._continues(state, future)]

    def _continues(self, state: EpisodeState, future: Future[Reaction]) -> bool:
        reaction = self._result(state, future)
        if reaction is None:
            return False
        state.add_reaction(reaction)
        if state.finish_reason is not None:
            return False
        if state.turns == self.episodes.max_turns:
            state.truncate("max_turns")
            return False
        return self._contexts.extend(state, reaction, self.engine.context_length)

    def _add_outcomes(self, states: Sequence[EpisodeState]) -> None:
        outcomes = {
            self._loop.submit(state.session.outcome()): state
            for state in states
            if not state.failure
        }
        for future in self._wait(outcomes, ALL_COMPLETED):
            reward = self._result(outcomes[future], future)
            if reward is not None:
                outcomes[future].rewards[-1] += reward

    # ------------------------------------------------------------------ environments

    def _result(self, state: EpisodeState, future: Future[ResultT]) -> ResultT | None:
        """Return the result of an environment; None: it failed, and so does its episode."""
        if not future.done():
            state.fail(
                "an async function keeps the event loop from going on: await what it waits for "
                "(as with AsyncOpenAI), or make it a plain function"
            )
            return None
        try:
            return future.result()
        except EnvironmentFailure as failure:
            state.fail(str(failure))
        except (Exception, CancelledError) as error:  # noqa: BLE001  it is the environment's
            state.fail(f"{type(error).__name__}: {error}")
        return None

    def _wait(self, futures: Iterable[Future[Any]], return_when: str) -> Collection[Future[Any]]:
        """Wait for futures, unless the event loop is blocked; then return all of them."""
        futures = [*futures]
        while True:
            done, pending = wait(futures, timeout=self.episodes.timeout, return_when=return_when)
            if not pending or (done and return_when == FIRST_COMPLETED):
                return done
            if not self._loop.answers(_STALLED):
                self._loop = EventLoop("environments")
                return futures

    def _release(self, session: EpisodeSession) -> None:
        """Start to close an environment."""
        if session in self._open:
            self._open.remove(session)
            self._closing.append(self._loop.submit(session.close()))

    def _finish_closing(self) -> None:
        closing, self._closing = self._closing, []
        wait(closing, timeout=self.episodes.timeout + _STALLED)
        ended = [future for future in closing if future.done() and not future.cancelled()]
        failures = [future.exception() for future in ended if future.exception() is not None]
        if failures:
            logger.warning("%d environments could not be closed: %s", len(failures), failures[0])


class TurnGenerator:
    """Generates turns with an engine; ``max_new_tokens`` of the sampling limits an episode."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        prompts: PromptBatch,
        sampling: Sampling,
        episodes: Episodes,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._sampling = sampling
        self._turn_limit = episodes.max_turn_tokens or sampling.max_new_tokens

    def first_turns(self, states: Sequence[EpisodeState], num_generations: int) -> None:
        """Generate the first turn of all episodes; equal prompts of a group are computed once."""
        prompts, copies = self._prompts, 1
        firsts = states[::num_generations]
        if all(
            state.prompt_tokens == firsts[state.number // num_generations].prompt_tokens
            for state in states
        ):
            prompts = self._prompts.select(torch.tensor([state.number for state in firsts]))
            copies = num_generations
        limits = [self._limit(state) for state in states]
        # responses to one prompt share a limit, and are truncated to their own
        room = [max(limits[start : start + copies]) for start in range(0, len(states), copies)]
        self._generate(states, prompts, room, [state.seed for state in states], copies)

    def next_turns(self, states: Sequence[EpisodeState]) -> None:
        """Generate the next turn of some episodes.

        Without any it generates one token, as ranks that share weights or an engine have to
        generate together.
        """
        if not states:
            first = self._prompts.select(torch.tensor([0]))
            self._engine.generate(first, self._sampling.at_most(1), num_generations=1, seeds=[0])
            return
        rows = self._prompts.select(torch.tensor([state.number for state in states]))
        device = rows.input_ids.device
        tokens = [each.context_tokens for each in states]
        contexts = [torch.tensor(each.ids, device=device) for each in tokens]
        prompts = _in_contexts(rows, contexts, [each.row_media for each in tokens])
        # random numbers of its own for each turn, the same after a resume
        sequences = [np.random.SeedSequence([state.seed, state.turns]) for state in states]
        seeds = [int(sequence.generate_state(1)[0]) for sequence in sequences]
        self._generate(states, prompts, [self._limit(state) for state in states], seeds, 1)

    def _generate(
        self,
        states: Sequence[EpisodeState],
        prompts: PromptBatch,
        room: Sequence[int],
        seeds: Sequence[int],
        copies: int,
    ) -> None:
        """Generate ``copies`` turns per prompt, of at most ``room`` tokens, for the episodes."""
        prompts = replace(prompts, room=torch.tensor(room, device=prompts.input_ids.device))
        sampling = self._sampling.at_most(max(room))
        rollout = self._engine.generate(prompts, sampling, num_generations=copies, seeds=seeds)
        for state, response in zip(states, responses_of(rollout, prompts), strict=True):
            before = state.context if isinstance(state.prompt, str) else []
            turn = response.cut(self._limit(state))
            ended = not turn.truncated and not sampling.stop_in_text
            stops = sampling.stop if ended else ()
            text = turn_text(self._tokenizer, before, turn.token_ids.tolist(), stops)
            state.add_turn(turn, text)
            if turn.truncated and state.used >= self._sampling.max_new_tokens:
                state.truncate("length")

    def _limit(self, state: EpisodeState) -> int:
        """Return the most tokens of the next turn, at least one."""
        limits = [self._turn_limit, self._sampling.max_new_tokens - state.used]
        if state.turn_limit is not None:
            limits.append(state.turn_limit)
        if self._engine.context_length is not None:
            limits.append(self._engine.context_length - len(state.context))
        return max(1, min(limits))

    def rollout(self, states: Sequence[EpisodeState], num_generations: int) -> Rollout:
        """Return the batch of finished episodes."""
        rollout = assemble_rollout(
            self._prompts,
            [state.final_response for state in states],
            num_generations=1,
            pad_id=pad_token_id(self._tokenizer),
        )
        rollout = _showing(rollout, [state.row_media for state in states])
        starts = torch.tensor([len(state.prompt_ids) for state in states])
        rewards = None
        if any(state.session.has_rewards for state in states):
            rewards = torch.zeros_like(rollout.sampling_logprobs)
            for row, (state, start) in enumerate(zip(states, starts.tolist(), strict=True)):
                for end, reward in zip(state.ends, state.rewards, strict=True):
                    rewards[row, start + end - 1] += 0.0 if state.failure else reward
        return replace(
            rollout,
            group_ids=rollout.group_ids // num_generations,
            prompt_lengths=starts.to(rollout.input_ids.device),
            turn_rewards=rewards,
        )


def _prompts(prompts: PromptBatch, states: Sequence[EpisodeState]) -> PromptBatch:
    """Return the prompt of each episode, with the first observation of its environment."""
    device, copies = prompts.input_ids.device, len(states) // len(prompts)
    rows = prompts.select(torch.arange(len(states)) // copies)
    own = [torch.tensor(state.prompt_ids, device=device) for state in states]
    before, shown = prompt_token_ids(rows), rows.media or (None,) * len(rows)
    # other images of the same size have the same tokens
    same_media = all(s.prompt_tokens.row_media is one for s, one in zip(states, shown, strict=True))
    if same_media and all(torch.equal(*pair) for pair in zip(own, before, strict=True)):
        return rows
    changed = tuple(state.prompt for state in states)
    media = [state.prompt_tokens.row_media for state in states]
    return replace(_in_contexts(rows, own, media), prompts=changed)


def _in_contexts(
    rows: PromptBatch, contexts: Sequence[Tensor], media: Sequence[Media | None]
) -> PromptBatch:
    """Return prompts with other tokens, `[L]` each, and other media."""
    input_ids, mask = left_padded(contexts)
    return _showing(replace(rows, input_ids=input_ids, attention_mask=mask), media)


def _showing(batch: BatchT, media: Sequence[Media | None]) -> BatchT:
    """Return a batch with the media of its rows, on its device."""
    if all(entry is None for entry in media):
        return replace(batch, media=None)
    return replace(batch, media=(*media,)).to(batch.input_ids.device)
