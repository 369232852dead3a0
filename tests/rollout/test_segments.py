"""Responses in turns: the policy is shown what it is given, and trained on what it wrote."""

import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.models import allow_packing, sequence_logprobs
from lrlhf.modules import RLOO, Reference, Update
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.rewards import Rewards, completion_segments
from lrlhf.rollout import (
    Collector,
    EngineWrapper,
    Response,
    RolloutEngine,
    Sampling,
    Segment,
    TransformersEngine,
    assemble_rollout,
    continued_prompts,
    response_ids,
    responses_of,
    trim,
)
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import PromptBatch, Rollout, SamplingMask
from tests.modules.policy_runs import Watcher, fit, letters, weights
from tests.rollout.copy_engine import CopyEngine

HINT = " Sure? "


class AsksAgain(EngineWrapper):
    """What a user writes: a fixed text after each response, then one more turn of the policy."""

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        first = self.engine.generate(
            prompts, sampling, num_generations=num_generations, seeds=seeds
        )
        hint = torch.tensor(self.tokenizer(HINT, add_special_tokens=False).input_ids)
        asked = [response.with_tokens(hint) for response in responses_of(first, prompts)]
        turn = continued_prompts(prompts, asked)
        second = self.engine.generate(
            turn, sampling, num_generations=1, seeds=[seed + 1 for seed in seeds]
        )
        return assemble_rollout(
            prompts,
            [
                before.followed_by(after)
                for before, after in zip(asked, responses_of(second, turn), strict=True)
            ],
            num_generations=num_generations,
            pad_id=self.tokenizer.pad_token_id,
        )


def sampled(*ids: int, logprob: float = -1.0, **options: Any) -> Response:
    options = {"truncated": False} | options
    return Response.sampled(torch.tensor(ids), torch.full((len(ids),), logprob), **options)


PROMPTS = token_prompts([[10, 11], [12]])
TURNS = [
    sampled(1, 2).with_tokens(torch.tensor([7, 8, 9])).followed_by(sampled(3, truncated=True)),
    replace(sampled(4), segments=(Segment(token_ids=torch.tensor([6])), *sampled(4).segments)),
]


def turns() -> Rollout:
    return assemble_rollout(PROMPTS, TURNS, num_generations=1, pad_id=0)


def test_given_tokens_are_seen_and_not_trained_on() -> None:
    rollout = turns()
    assert rollout.input_ids.tolist() == [[10, 11, 1, 2, 7, 8, 9, 3], [12, 6, 4, 0, 0, 0, 0, 0]]
    assert rollout.attention_mask.tolist() == [[True] * 8, [True] * 3 + [False] * 5]
    assert rollout.response_mask.long().tolist() == [
        [0, 0, 1, 1, 0, 0, 0, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
    ]
    assert torch.equal(rollout.sampling_logprobs, -rollout.response_mask.float())
    assert rollout.truncated.tolist() == [True, False]
    assert rollout.kept_mass is None
    assert rollout.weight_version is None


def test_a_rollout_can_be_taken_apart_and_put_together_again() -> None:
    mass = torch.tensor([0.5, 0.25])
    cut = Response.sampled(
        torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), truncated=True, kept_mass=mass
    )
    responses = [replace(one, weight_version=3) for one in (*TURNS, cut, sampled(9))]
    whole = assemble_rollout(PROMPTS, responses, num_generations=2, pad_id=0)
    assert whole.kept_mass is not None
    assert whole.kept_mass[2].tolist() == [1.0, 0.5, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0]
    again = assemble_rollout(PROMPTS, responses_of(whole, PROMPTS), num_generations=2, pad_id=0)
    for name in Rollout.__dataclass_fields__:
        first, second = getattr(whole, name), getattr(again, name)
        assert (first is None and second is None) or torch.equal(first, second), name
    assert response_ids(whole, PROMPTS, given=True) == [[1, 2, 7, 8, 9, 3], [6, 4], [5, 6], [9]]
    assert response_ids(whole, PROMPTS) == [[1, 2, 3], [4], [5, 6], [9]]


def mask(*sets: list[int]) -> SamplingMask:
    sizes = torch.tensor([[len(each) for each in sets]], dtype=torch.int32)
    return SamplingMask(sizes=sizes, ids=torch.tensor([id_ for each in sets for id_ in each]))


def masked(ids: list[int], *sets: list[int]) -> Response:
    return Response.sampled(
        torch.tensor(ids), torch.zeros(len(ids)), truncated=False, mask=mask(*sets)
    )


def test_masks_of_turns_are_put_together_taken_apart_selected_and_cut() -> None:
    first = masked([1, 2], [1, 9], []).with_tokens(torch.tensor([7, 8]))
    first = first.followed_by(masked([3], [3, 4, 5]))
    second = masked([5, 6, 4], [5], [6, 2], [4, 1]).cut(2)
    rollout = assemble_rollout(PROMPTS, [first, second], num_generations=1, pad_id=0)
    assert rollout.sampling_mask is not None
    assert rollout.sampling_mask.sizes.tolist() == [[0, 0, 2, 0, 0, 0, 3], [0, 1, 2, 0, 0, 0, 0]]
    assert rollout.sampling_mask.ids.tolist() == [1, 9, 3, 4, 5, 5, 6, 2]
    turned = rollout.select(torch.tensor([1, 0, 1])).sampling_mask
    assert turned is not None
    assert turned.ids.tolist() == [5, 6, 2, 1, 9, 3, 4, 5, 5, 6, 2]
    short = trim(rollout.select(torch.tensor([1]))).sampling_mask
    assert short is not None
    assert (short.sizes.tolist(), short.ids.tolist()) == ([[0, 1, 2]], [5, 6, 2])
    again = assemble_rollout(PROMPTS, responses_of(rollout, PROMPTS), num_generations=1, pad_id=0)
    assert again.sampling_mask is not None
    assert torch.equal(again.sampling_mask.sizes, rollout.sampling_mask.sizes)
    assert torch.equal(again.sampling_mask.ids, rollout.sampling_mask.ids)


def test_a_turn_without_a_mask_among_others_is_refused() -> None:
    turns = masked([1], [1]).followed_by(sampled(2))
    with pytest.raises(ValueError, match="only some of the sampled segments have a mask"):
        assemble_rollout(PROMPTS, [turns, turns], num_generations=1, pad_id=0)


def test_turns_of_other_weights_count_as_the_oldest() -> None:
    newer, older = (replace(sampled(1), weight_version=version) for version in (4, 2))
    assert newer.followed_by(older).weight_version == 2
    with pytest.raises(ValueError, match="1 of 2 responses have a weight_version"):
        assemble_rollout(PROMPTS, [newer, sampled(1)], num_generations=1, pad_id=0)


def test_each_turn_keeps_the_versions_that_sampled_it() -> None:
    first, second = (replace(sampled(1, 2), weight_version=version) for version in (2, 3))
    (segment,) = sampled(4, 5, 6).segments
    mixed = replace(segment, versions=torch.tensor([3, 4, 4]))
    third = Response(segments=(mixed,), truncated=False, weight_version=3)
    whole = first.with_tokens(torch.tensor([7])).followed_by(second).followed_by(third)
    prompts = token_prompts([[8, 9]])
    rollout = assemble_rollout(prompts, [whole], num_generations=1, pad_id=0)
    assert rollout.weight_version is not None
    assert rollout.token_versions is not None
    assert rollout.weight_version.tolist() == [2]
    counted = rollout.token_versions[rollout.response_mask]
    assert counted.tolist() == [2, 2, 3, 3, 3, 4, 4]


def test_a_further_turn_is_asked_for_with_all_that_was_said() -> None:
    turn = continued_prompts(PROMPTS, TURNS)
    pairs = zip(turn.input_ids, turn.attention_mask, strict=True)
    rows = [ids[mask].tolist() for ids, mask in pairs]
    assert rows == [[10, 11, 1, 2, 7, 8, 9, 3], [12, 6, 4]]
    assert turn.attention_mask[:, -1].all()  # left-padded


@pytest.mark.parametrize("packed", [False, True])
def test_logprobs_behind_given_tokens_are_those_of_the_whole_sequence(
    language_model: PreTrainedModel, packed: bool
) -> None:
    if packed:
        assert allow_packing(language_model)
    prompts = token_prompts([[10, 11, 12, 13], [12, 14]])
    responses = [
        *TURNS,
        sampled(1, 2, 5).with_tokens(torch.tensor([7])).followed_by(sampled(3, 3)),
        sampled(8),
    ]
    rollout = assemble_rollout(prompts, responses, num_generations=2, pad_id=0)
    with torch.no_grad():
        logprobs = sequence_logprobs(language_model, rollout)
        for row in range(4):
            ids = rollout.input_ids[row][rollout.attention_mask[row]]
            expected = language_model(ids[None]).logits[0, :-1].log_softmax(-1)
            expected = expected.gather(1, ids[1:, None])[:, 0]
            own = logprobs[row, 1 : len(ids)]
            mask = rollout.response_mask[row, 1 : len(ids)]
            torch.testing.assert_close(own[mask], expected[mask], rtol=0, atol=1e-5)
            assert (logprobs[row, ~rollout.response_mask[row]] == 0).all()
    (gradient,) = torch.autograd.grad(
        sequence_logprobs(language_model, rollout)[~rollout.response_mask].sum(),
        language_model.get_parameter("model.norm.weight"),
        allow_unused=True,
    )
    assert gradient is None or not gradient.any()


def collected(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, stop: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], list[Any]]:
    """What the rewards and the records make of "yes#", a given " no# ", and "so#"."""

    def ids(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)

    parts = [ids("yes#"), ids(" no# "), ids("so#")]
    response = Response.sampled(parts[0], torch.zeros(len(parts[0])), truncated=False)
    response = response.with_tokens(parts[1]).followed_by(
        Response.sampled(parts[2], torch.zeros(len(parts[2])), truncated=False)
    )
    one_turn = Response.sampled(parts[2], torch.zeros(len(parts[2])), truncated=False)
    prompts = replace(token_prompts([ids("why").tolist()]), prompts=(prompt,))
    seen: list[Any] = []
    said: list[list[int]] = []

    def reads(completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
        seen.extend(completions)
        said.extend(completion_ids)
        return [0.0] * len(completions)

    rollout = assemble_rollout(
        prompts, [response, one_turn, response.with_tokens(parts[1])], num_generations=3, pad_id=0
    )
    collector = Collector(TransformersEngine(), Rewards([reads]), tokenizer)
    result = collector.score(prompts, rollout, Sampling(stop=stop), step=0, phase=nullcontext)
    own = torch.cat([parts[0], parts[2]]).tolist()
    assert said == [own, parts[2].tolist(), own]
    whole = [torch.cat(parts), parts[2], torch.cat([*parts, parts[1]])]
    assert [one["token_ids"] for one in result.records] == [ids.tolist() for ids in whole]
    return result.records, seen


@pytest.mark.parametrize("chat", [False, True])
def test_rewards_and_records_see_the_segments(
    tokenizer: PreTrainedTokenizerBase, chat: bool
) -> None:
    prompt = ({"role": "user", "content": "why"},) if chat else "why"
    records, seen = collected(tokenizer, prompt, stop=("#",))
    # the stop string that ended the response is cut; those before it are part of the text
    texts = ["yes# no# so", "so", "yes# no# so# no# "]
    assert [record["completion"] for record in records] == texts
    assert seen == [[{"role": "assistant", "content": t}] for t in texts] if chat else texts
    assert completion_segments(seen[0]) == seen[0].segments
    assert list(seen[0].segments) == [("yes#", True), (" no# ", False), ("so", True)]
    assert records[0]["segments"] == [
        {"sampled": True, "text": "yes#"},
        {"sampled": False, "text": " no# "},
        {"sampled": True, "text": "so"},
    ]
    assert "segments" not in records[1]
    assert [record["length"] for record in records] == [7, 3, 7]
    assert completion_segments("plain") == (("plain", True),)
    # a process that has no such class gets plain text
    for completion in seen:
        assert type(pickle.loads(pickle.dumps(completion))) is (list if chat else str)


@pytest.mark.parametrize("wrapped", [TransformersEngine, CopyEngine])
def test_a_users_wrapper_trains_with_rloo(
    language_model, tokenizer, tmp_path, wrapped: type[RolloutEngine]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefgh"))
    watcher = Watcher()
    module = RLOO(
        language_model,
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=AsksAgain(wrapped()),
        num_generations=2,
        sampling=Sampling(max_new_tokens=5),
        reference=Reference(kl_coef=0.1),
        update=Update(minibatch_size=4),
        optimizer=OptimizerConfig(lr=1e-2),
        seed=1,
    )
    before = weights(module.policy)
    sync = [VLLMWeightSync(probe_every=1)] if wrapped is CopyEngine else []
    trainer = fit(module, path, tmp_path, steps=2, callbacks=[watcher, *sync])
    assert float(trainer.logged_metrics["mismatch/max"]) < 1e-4
    for records, experience in zip(watcher.records, watcher.experiences, strict=True):
        for row, record in enumerate(records):
            wrote = [one["sampled"] for one in record["segments"]]
            assert wrote == [True, False, True]
            assert record["segments"][1]["text"] == HINT
            assert HINT in record["completion"]
            mask = experience.response_mask[row]
            assert record["length"] == int(mask.sum()) == len(record["token_ids"]) - len(HINT)
            assert (experience.advantages[row][~mask] == 0).all()
    assert any(
        not torch.equal(before[name], value) for name, value in weights(module.policy).items()
    )


def one(*ids: int, truncated: bool = False) -> Response:
    tokens = torch.tensor(ids)
    return Response.sampled(tokens, -tokens.float(), truncated=truncated)


def test_a_response_is_cut_with_all_that_belongs_to_its_tokens() -> None:
    whole = one(5, 6, 7)
    assert whole.cut(3) is whole
    cut = whole.cut(2)
    assert cut.truncated
    (segment,) = cut.segments
    assert segment.logprobs is not None
    assert (segment.token_ids.tolist(), segment.logprobs.tolist()) == ([5, 6], [-5, -6])


def test_a_rollout_has_so_many_responses_behind_each_prompt() -> None:
    prompts = token_prompts([[1, 2], [3]])
    responses = [one(10), one(11), one(12), one(13, 14, truncated=True)]
    rollout = assemble_rollout(prompts, responses, num_generations=2, pad_id=0)
    assert rollout.input_ids.tolist() == [[1, 2, 10], [1, 2, 11], [3, 12, 0], [3, 13, 14]]
    assert rollout.group_ids is not None
    assert rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert rollout.truncated.tolist() == [False, False, False, True]
    with pytest.raises(ValueError, match="returned 3 responses to 2 prompts; 4 were requested"):
        assemble_rollout(prompts, responses[:3], num_generations=2, pad_id=0)


def test_a_limit_shortens_and_only_what_cuts_tokens_off_truncates() -> None:
    sampling = Sampling(max_new_tokens=8, min_new_tokens=5)
    short = sampling.at_most(3)
    assert (short.max_new_tokens, short.min_new_tokens) == (3, 3)
    assert sampling.at_most(20) == sampling
    cutting = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_new_tokens": 1}]
    assert all(Sampling(**options).truncates for options in cutting)
    assert not Sampling(temperature=0.5, presence_penalty=1.0).truncates
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert all(Sampling(**{name: 0.5}).penalizes for name in penalties)
    assert not Sampling(top_k=5).penalizes
