"""Whether reward models can read prompts that are chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lrlhf.datamodules.rows.collate import PromptRow
from lrlhf.models import load_tokenizer
from lrlhf.planning.checks.data_rows import LookedAt
from lrlhf.planning.checks.mistake import MistakeError
from lrlhf.planning.config_entries import is_a, is_ours, options_of
from lrlhf.rewards import LearnedReward, ProcessReward
from lrlhf.rewards.learned import no_template
from lrlhf.rollout import GenerativeReward


def check_reward_templates(model: Any, seen: LookedAt) -> None:
    """Refuse a reward model that is to read chats and has no chat template.

    Of the reward model only the tokenizer is loaded.
    """
    rewards = options_of(model).get("rewards")
    if not is_ours(rewards):
        return
    functions = options_of(rewards).get("functions") or []
    rows = [row for split in seen.splits for row in split.rows]
    chats = any(isinstance(row, PromptRow) and not isinstance(row.prompt, str) for row in rows)
    for entry in functions.values() if isinstance(functions, Mapping) else functions:
        if is_a(entry, GenerativeReward):
            _check(entry, "its questions are chats", open_turn=True)
        elif chats and (is_a(entry, LearnedReward) or is_a(entry, ProcessReward)):
            _check(entry, "the prompts are chats", open_turn=is_a(entry, ProcessReward))


def _check(entry: Any, reason: str, *, open_turn: bool) -> None:
    options = options_of(entry)
    if options.get("chat_template") is not None:
        return
    source = options["source"]
    tokenizer = load_tokenizer(
        options.get("tokenizer") or source,
        trust_remote_code=bool(options.get("trust_remote_code")),
    )
    if tokenizer.chat_template is None:
        raise MistakeError(
            ("model", "rewards", "functions", "source"),
            f"{reason}, and {no_template(tokenizer, source, open_turn)}",
            value=source,
        )
