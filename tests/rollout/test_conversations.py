"""Turns that go on from what is in the cache are those of a computation from the beginning."""

from contextlib import nullcontext

import pytest
import torch
from transformers import PreTrainedModel

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import (
    Response,
    Sampling,
    TransformersEngine,
    assemble_rollout,
    continued_prompts,
    responses_of,
)
from lrlhf.rollout.responses import token_prompts
from tests.conftest import build_language_model, build_tokenizer

TOKENIZER = build_tokenizer()
SAMPLING = Sampling(max_new_tokens=12, stop=("a", "e", "1"))


def conversation(
    model: PreTrainedModel,
    *,
    keeps: bool,
    drop: tuple[int, ...] = (),
    max_batch_size: int | None = None,
) -> tuple[list[Response], list[int]]:
    """Three turns behind two prompts, three times; some conversations end early.

    Returns:
        The responses, and how many columns went through the model at the beginning of each call.
    """
    engine = TransformersEngine(max_batch_size)
    engine.attach(model, TOKENIZER)
    prompts = token_prompts([[10, 11, 12, 13, 14], [20, 21]])
    columns: list[int] = []
    with engine.conversation() if keeps else nullcontext():
        rollout = engine.generate(prompts, SAMPLING, num_generations=3, seeds=range(6))
        responses = responses_of(rollout, prompts)
        rows = list(range(6))
        hook = model.model.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _, args, kwargs: columns.append(
                (kwargs.get("input_ids") if kwargs.get("input_ids") is not None else args[0]).shape[
                    1
                ]
            ),
            with_kwargs=True,
        )
        for turn in (1, 2):
            rows = [row for row in rows if not (turn == 2 and row in drop)]
            given = [
                responses[row].with_tokens(torch.tensor([30 + row] * (1 + row % 3))) for row in rows
            ]
            every = prompts.select(torch.tensor([row // 3 for row in rows]))
            asked = continued_prompts(every, given)
            rollout = engine.generate(
                asked, SAMPLING, num_generations=1, seeds=[100 * turn + row for row in rows]
            )
            for row, before, after in zip(rows, given, responses_of(rollout, asked), strict=True):
                responses[row] = before.followed_by(after)
        hook.remove()
    return responses, columns


@pytest.mark.parametrize("drop", [(), (0,), (1, 2, 5), (0, 1, 2, 3, 4)])
def test_the_same_turns_with_less_work(drop: tuple[int, ...]) -> None:
    model = build_language_model(TOKENIZER)
    expected, all_columns = conversation(model, keeps=False, drop=drop)
    found, columns = conversation(model, keeps=True, drop=drop)
    assert len({len(one.token_ids) for one in expected}) > 2  # the responses differ in length
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        for first, second in zip(one.segments, other.segments, strict=True):
            if first.logprobs is not None:
                assert second.logprobs is not None
                torch.testing.assert_close(first.logprobs, second.logprobs, rtol=0, atol=1e-5)
    # only what is new goes through the model: at most the last token of a turn and three given ones
    assert max(columns) <= 4
    assert max(all_columns) > 10


def test_they_have_the_policys_probabilities() -> None:
    model = build_language_model(TOKENIZER)
    responses, _ = conversation(model, keeps=True)
    prompts = token_prompts([[10, 11, 12, 13, 14], [20, 21]])
    rollout = assemble_rollout(prompts, responses, num_generations=3, pad_id=0)
    with torch.no_grad():
        own = sequence_logprobs(model, rollout)
    mask = rollout.response_mask
    torch.testing.assert_close(own[mask], rollout.sampling_logprobs[mask], rtol=0, atol=1e-5)


def test_other_prompts_and_small_batches_are_computed_as_ever() -> None:
    model = build_language_model(TOKENIZER)
    expected, _ = conversation(model, keeps=False)
    found, _ = conversation(model, keeps=True, max_batch_size=3)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    engine = TransformersEngine()
    engine.attach(model, TOKENIZER)
    one, other = token_prompts([[10, 11, 12]]), token_prompts([[40, 41, 42, 43]])
    with engine.conversation():
        engine.generate(one, SAMPLING, num_generations=2, seeds=[0, 1])
        second = engine.generate(other, SAMPLING, num_generations=2, seeds=[0, 1])
    again = engine.generate(other, SAMPLING, num_generations=2, seeds=[0, 1])
    assert torch.equal(second.input_ids, again.input_ids)


def test_a_sliding_window_is_computed_again() -> None:
    from transformers import MistralConfig, MistralForCausalLM  # noqa: PLC0415

    config = MistralConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        pad_token_id=0,
        eos_token_id=TOKENIZER.eos_token_id,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = MistralForCausalLM(config).eval()
    expected, _ = conversation(model, keeps=False)
    found, columns = conversation(model, keeps=True)
    assert max(columns) > 10
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_prompt_that_begins_with_another_is_a_conversation_of_its_own() -> None:
    engine = TransformersEngine(max_batch_size=2)
    engine.attach(build_language_model(TOKENIZER), TOKENIZER)
    prompts = token_prompts([[15, 16, 17], [15, 16, 17, 18]])
    alone = engine.generate(prompts, SAMPLING, num_generations=2, seeds=range(4))
    with engine.conversation():
        found = engine.generate(prompts, SAMPLING, num_generations=2, seeds=range(4))
    assert torch.equal(alone.input_ids, found.input_ids)
