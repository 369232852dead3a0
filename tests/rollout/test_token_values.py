"""Expected values are written out by hand: bytes of UTF-8, and numbers put into the tensors."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import RolloutLog
from lrlhf.rollout.records import plain_json, token_values
from lrlhf.rollout.texts import token_texts
from lrlhf.types import Experience
from tests.callbacks import fakes
from tests.callbacks.fakes import ToyPolicy, batches, trainer


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """One token per byte."""
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_letter_of_several_tokens_stands_at_the_last_of_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    # a, the two bytes of the umlaut, the four of the face
    assert token_texts(tokenizer, [], ids_of(tokenizer, "aä😀")) == [
        *("a", "", "ä"),
        *("", "", "", "😀"),
    ]


def test_bytes_that_never_become_a_letter_are_shown_and_stop_nothing(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    first, second, third = ids_of(tokenizer, "€")
    (letter,) = ids_of(tokenizer, "b")
    assert token_texts(tokenizer, [], [first, letter]) == ["", "\ufffdb"]
    assert token_texts(tokenizer, [], [letter, first]) == ["b", "\ufffd"]
    assert token_texts(tokenizer, [], [first, second, first, second, third]) == [
        *("", "", "", ""),
        "\ufffd€",
    ]
    many = token_texts(tokenizer, [], [second] * 40)
    assert "".join(many) == "\ufffd" * 40
    assert sum(map(bool, many)) == 3  # 16, 16 and 8


def test_what_came_before_and_special_tokens_are_told_apart(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    before = ids_of(tokenizer, "x" * 30)
    end = tokenizer.eos_token_id
    assert token_texts(tokenizer, before, [*ids_of(tokenizer, "y"), end]) == ["y", "<|endoftext|>"]


def experience(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Experience:
    """A prompt of two tokens, three sampled ones, one given in between, and two of padding."""
    ids = [*ids_of(tokenizer, "q?ab>c"), 0, 0]
    mask = torch.tensor([[False, False, True, True, False, True, False, False]])
    made = Experience(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.tensor([[True] * 6 + [False] * 2]),
        response_mask=mask,
        sampling_logprobs=torch.tensor([[0.0, 0.0, -0.5, -0.123456, 0.0, -2.0, 0.0, 0.0]]),
        group_ids=torch.zeros(1, dtype=torch.long),
        truncated=torch.tensor([False]),
        scores=torch.zeros(1),
        advantages=torch.tensor([[0.0, 0.0, 1.0, 1.5, 0.0, float("nan"), 0.0, 0.0]]),
        loss_mask=mask,
        counted=torch.tensor([True]),
    )
    return replace(made, **changes)


def test_the_values_stand_at_their_tokens_and_given_ones_have_none(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    told = token_values(experience(tokenizer), 0, ids_of(tokenizer, "ab>c"), tokenizer)
    assert told == {
        "texts": ["a", "b", ">", "c"],
        "advantage": [1.0, 1.5, None, None],
        "engine_logprob": [-0.5, -0.1235, None, -2.0],
    }


def test_what_the_update_has_further_is_told_too(tokenizer: PreTrainedTokenizerBase) -> None:
    def filled(value: float) -> torch.Tensor:
        return torch.full((1, 8), value)

    rich = experience(
        tokenizer,
        old_logprobs=filled(-1.0),
        ref_logprobs=filled(-2.0),
        entropy=filled(3.0),
        values=filled(4.0),
        importance_weights=filled(5.0),
        kept_mass=filled(1.0),
    )
    told = token_values(rich, 0, ids_of(tokenizer, "ab>c"), tokenizer)
    names = {"logprob": -1.0, "ref_logprob": -2.0, "entropy": 3.0, "value": 4.0, "weight": 5.0}
    assert {name: told[name] for name in names} == {
        name: [value, value, None, value] for name, value in names.items()
    }
    # an earlier policy sampled it: the policy's own count
    replayed = replace(rich, policy_logprobs=filled(-1.5))
    assert token_values(replayed, 0, [1, 1, 1, 1], tokenizer)["logprob"][0] == -1.5


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("asked", "expected"), [(0, []), (1, [0]), (2, [0, 2]), (9, [0, 1, 2, 3])])
def test_as_many_responses_as_asked_have_token_values_evenly_spread(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    asked: int,
    expected: list[int],
) -> None:
    rows = torch.zeros(4, dtype=torch.long)
    monkeypatch.setattr(fakes, "experience", lambda: experience(tokenizer).select(rows))
    policy = ToyPolicy(records_per_step=4)
    policy.tokenizer = tokenizer
    log = RolloutLog(print_every=None, token_values=asked)
    trainer(tmp_path, log).fit(policy, batches(1))
    written = lines(tmp_path)
    assert [row for row, line in enumerate(written) if "tokens" in line] == expected
    for row in expected:
        # the toy's records have two tokens: the last two of the row
        assert written[row]["tokens"]["engine_logprob"] == [None, -2.0]


def test_a_number_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="token_values is -1; it must be at least 0"):
        RolloutLog(token_values=-1)


def test_arrays_of_columns_are_written_whole_or_said_to_be_large() -> None:
    column = {"page": np.arange(3), "score": np.float32(0.5), "ids": torch.tensor([[1, 2]])}
    assert plain_json(column) == {"page": [0, 1, 2], "score": 0.5, "ids": [[1, 2]]}
    assert plain_json(np.zeros((32, 64, 3), np.uint8)) == "uint8 [32, 64, 3]"
    assert plain_json(np.array([math.nan, 1.0])) == [None, 1.0]
