"""The engine draws answers to images and videos from the policy, and from nothing else.

What is expected comes from the plain forward pass over prompt and answer, one row at a time.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.types import Rollout
from tests.conftest import build_language_model, build_tokenizer
from tests.vlms import (
    FAMILIES,
    QWEN_FAMILIES,
    Row,
    Vlm,
    build_vlm,
    never_said,
    plain_logprobs,
    prompts_of,
    row,
    rows_of,
)

SAMPLING = Sampling(temperature=1.0, max_new_tokens=5)


SHORT = ("qwen2_vl", "llava")


@pytest.fixture(
    params=[
        family if family in SHORT else pytest.param(family, marks=pytest.mark.exhaustive)
        for family in FAMILIES
    ]
)
def vlm(request: pytest.FixtureRequest) -> Vlm:
    return build_vlm(request.param)


def prompt_rows(vlm: Vlm) -> list[Row]:
    """0, 1 and 3 images, and a clip where there are any, before an answer."""
    shown = [row(vlm, answer=""), row(vlm, [0], question="and?", answer="")]
    shown.append(row(vlm, [1, 2, 3], answer=""))
    return [*shown, row(vlm, videos=[0], answer="")] if len(rows_of(vlm)) == 4 else shown


def generate(
    vlm: Vlm,
    rows: list[Row],
    sampling: Sampling = SAMPLING,
    *,
    num_generations: int = 1,
    **options: Any,
) -> Rollout:
    engine = TransformersEngine(**options)
    engine.attach(vlm.model, vlm.tokenizer, vlm.processor)
    seeds = list(range(len(rows) * num_generations))
    return engine.generate(prompts_of(rows), sampling, num_generations=num_generations, seeds=seeds)


def responses(rollout: Rollout) -> list[list[int]]:
    rows = zip(rollout.input_ids, rollout.response_mask, strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def answered(prompt: Row, response: list[int]) -> Row:
    """The row that a response makes of its prompt."""
    plain = dict(prompt.plain)
    for name, filler in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if name in plain:
            more = torch.full((1, len(response)), filler)
            plain[name] = torch.cat([plain[name], more], dim=1)
    plain["input_ids"] = torch.cat([plain["input_ids"], torch.tensor([response])], dim=1)
    ids = (*prompt.input_ids, *response)
    return replace(prompt, input_ids=ids, response=len(response), plain=plain)


@pytest.mark.parametrize("num_generations", [1, 3])
def test_log_probabilities_of_drawn_tokens_are_those_of_training_and_of_the_plain_model(
    vlm: Vlm, num_generations: int
) -> None:
    rows = prompt_rows(vlm)
    rollout = generate(vlm, rows, num_generations=num_generations)
    assert rollout.group_ids.tolist() == [i // num_generations for i in range(len(rollout))]
    assert rollout.media is not None
    for index, entry in enumerate(rollout.media):
        prompt = rows[index // num_generations]
        assert entry is prompt.media
        ids = rollout.input_ids[index, rollout.attention_mask[index]].tolist()
        assert ids == [*prompt.input_ids, *responses(rollout)[index]]
    with torch.no_grad():
        trained = sequence_logprobs(vlm.model, rollout)
    torch.testing.assert_close(rollout.sampling_logprobs, trained, rtol=0, atol=1e-5)
    for index, response in enumerate(responses(rollout)):
        row_now = answered(rows[index // num_generations], response)
        with torch.no_grad():
            plain = plain_logprobs(vlm.model, vlm, row_now)
        drawn = rollout.sampling_logprobs[index, rollout.response_mask[index]]
        torch.testing.assert_close(drawn, plain, rtol=0, atol=1e-5)


def test_probabilities_of_truncated_sampling_are_those_of_training_too(vlm: Vlm) -> None:
    sampling = Sampling(max_new_tokens=6, top_p=0.8, temperature=0.9, keep_mask=True)
    rollout = generate(vlm, prompt_rows(vlm), sampling, num_generations=2)
    assert rollout.sampling_mask is not None
    assert int(rollout.sampling_mask.sizes[rollout.response_mask].min()) > 0
    with torch.no_grad():
        trained = sequence_logprobs(vlm.model, rollout, temperature=0.9)
    torch.testing.assert_close(rollout.sampling_logprobs, trained, rtol=0, atol=1e-5)


def test_the_batch_size_changes_no_token(vlm: Vlm) -> None:
    rows = prompt_rows(vlm)
    drawn = responses(generate(vlm, rows, num_generations=3))
    assert len({tuple(response) for response in drawn}) > len(rows)
    assert responses(generate(vlm, rows, num_generations=3, max_batch_size=3)) == drawn


@pytest.mark.parametrize("num_generations", [1, 2])
def test_a_text_is_not_moved_by_the_images_of_an_earlier_prompt(num_generations: int) -> None:
    vlm, fresh = build_vlm(QWEN_FAMILIES[0]), build_vlm(QWEN_FAMILIES[0])
    texts = [row(vlm, question="one or two?", answer=""), row(vlm, question="why?", answer="")]
    alone = generate(fresh, texts, num_generations=num_generations)
    shown = [row(vlm, [2], answer=""), row(vlm, [1, 2, 3], answer="")]
    generate(vlm, shown, num_generations=num_generations)
    after = generate(vlm, texts, num_generations=num_generations)
    assert responses(after) == responses(alone)
    torch.testing.assert_close(after.sampling_logprobs, alone.sampling_logprobs, rtol=0, atol=1e-5)


def always_saying(model: nn.Module, ids: list[int]) -> None:
    """Make the output head give these tokens nearly all of the probability."""

    def raised(_module: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        more = torch.zeros(logits.shape[-1])
        more[ids] = 50.0
        return logits + more

    model.get_output_embeddings().register_forward_hook(raised)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_that_wants_to_never_says_a_placeholder(vlm: Vlm, temperature: float) -> None:
    banned = never_said(vlm)
    rows = prompt_rows(vlm)
    always_saying(vlm.model, banned)
    logits = vlm.model(**rows[0].plain).logits[0, -1]
    assert int(logits.argmax()) in banned
    rollout = generate(vlm, rows, replace(SAMPLING, temperature=temperature), num_generations=2)
    said = {token for response in responses(rollout) for token in response}
    assert said
    assert not said & set(banned)
    # 50 nats would be the placeholders'
    assert (rollout.sampling_logprobs[rollout.response_mask] > -20).all()


def test_a_text_model_answers_no_pictures() -> None:
    tokenizer = build_tokenizer()
    prompts = prompts_of([row(build_vlm("llava"), [0], answer="")])
    engine = TransformersEngine()
    engine.attach(build_language_model(tokenizer), tokenizer)
    prompts = replace(prompts, input_ids=prompts.input_ids.clamp(max=200))
    with pytest.raises(ValueError, match="is a text model: it takes no images"):
        engine.generate(prompts, SAMPLING, num_generations=1, seeds=[0])
