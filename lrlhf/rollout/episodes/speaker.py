"""The policy's side of episodes: its turns, generated for many episodes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.environments.settings import Episodes
from lrlhf.rollout.engines.engine import RolloutEngine, pad_token_id
from lrlhf.rollout.episodes.play import Play
from lrlhf.rollout.responses import (
    Response,
    assemble_rollout,
    in_contexts,
    responses_of,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import turn_text
from lrlhf.types import PromptBatch, Rollout


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
