"""Whole runs in which a program asks the policy through the OpenAI client."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from lrlhf.environments import Episodes
from lrlhf.modules import RLOO
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import Watcher
from tests.modules.test_episode_runs import build, records_of, run

ROWS = [
    {"prompt": [{"role": "user", "content": f"of row {n}"}], "letter": letter}
    for n, letter in enumerate("aZm5gT;k")
]


def letters(base_url: str, api_key: str, model: str, letter: str) -> float:
    """Asks twice; pays the share of characters that come before the row's letter."""
    messages: list[Any] = [{"role": "user", "content": f"write before {letter}"}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=6)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    written = "".join(message.content for message in messages[1::2])
    return sum(c < letter for c in written) / max(len(written), 1)


def trained(language_model: Any, tokenizer: Any, folder: Path) -> tuple[RLOO, Watcher]:
    options = {"episodes": Episodes(agent=letters), "sampling": Sampling(max_new_tokens=120)}
    module = build(RLOO, copy.deepcopy(language_model), tokenizer, **options)
    assert isinstance(module, RLOO)
    return module, run(module, folder, ROWS)


def test_an_agent_trains_the_policy_the_same_in_every_run(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    threads = set(threading.enumerate())
    module, watcher = trained(language_model, tokenizer, tmp_path / "one")
    before, after = language_model.parameters(), module.policy.parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    for record in records_of(tmp_path / "one"):
        assert (record["turns"], record["finish_reason"]) == (2, "stop"), record
        said = record["episode"]
        assert [message["role"] for message in said] == ["assistant", "user", "assistant"]
        written = said[0]["content"] + said[2]["content"]
        letter = record["columns"]["letter"]
        paid = sum(c < letter for c in written) / max(len(written), 1)
        assert record["turn_rewards"] == [0.0, pytest.approx(paid)]
        assert f"write before {letter}" in str(record["prompt"])
    experience = watcher.experiences[0]
    assert not (experience.loss_mask & ~experience.response_mask).any()

    again, other = trained(language_model, tokenizer, tmp_path / "two")
    for old, new in zip(module.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(old, new)
    for one, two in zip(watcher.experiences, other.experiences, strict=True):
        assert torch.equal(one.input_ids, two.input_ids)
    new = set(threading.enumerate()) - threads
    assert "agents" not in {thread.name for thread in new}
