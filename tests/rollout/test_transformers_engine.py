"""The engine draws from the policy, stops where it should, and says with which probability."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.rollout.engines.token_sampler import TokenSampler
from lrlhf.types import PromptBatch, Rollout
from tests.models.text_families import tiny_model

TEXTS = ("what is", "a rather longer prompt than that", "b")


def prompt_batch(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> PromptBatch:
    encoded = tokenizer(list(texts), padding=True, padding_side="left", return_tensors="pt")
    return PromptBatch(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"].bool(),
        prompts=texts,
        columns=tuple({} for _ in texts),
    )


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    texts: tuple[str, ...] = TEXTS,
    seeds: list[int] | None = None,
    num_generations: int = 1,
    engine: TransformersEngine | None = None,
) -> Rollout:
    engine = engine or TransformersEngine()
    engine.attach(model, tokenizer)
    seeds = list(range(len(texts) * num_generations)) if seeds is None else seeds
    return engine.generate(
        prompt_batch(tokenizer, texts), sampling, num_generations=num_generations, seeds=seeds
    )


def responses(rollout: Rollout) -> list[list[int]]:
    return [
        ids[mask].tolist()
        for ids, mask in zip(rollout.input_ids, rollout.response_mask, strict=True)
    ]


@torch.no_grad()
def gap(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> float:
    """Largest distance of the engine's log-probabilities from those of each row by itself."""
    largest = 0.0
    for row, length in enumerate(rollout.lengths.tolist()):
        ids = rollout.input_ids[row : row + 1, :length]
        own = (model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        own = own.gather(1, ids[0, 1:, None])[:, 0]
        counts = rollout.response_mask[row, 1:length]
        gaps = (own - rollout.sampling_logprobs[row, 1:length])[counts].abs()
        largest = max(largest, float(gaps.max()))
    return largest


def test_greedy_responses_are_those_of_repeated_argmax(language_model, tokenizer) -> None:
    rollout = generate(language_model, tokenizer, Sampling(temperature=0.0, max_new_tokens=6))
    for text, response in zip(TEXTS, responses(rollout), strict=True):
        ids = tokenizer(text)["input_ids"]
        for token in response:
            logits = language_model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids = [*ids, token]


def test_logprobs_are_those_of_the_policy_at_the_sampling_temperature(
    language_model, tokenizer
) -> None:
    sampling = Sampling(temperature=0.7, max_new_tokens=7)
    rollout = generate(language_model, tokenizer, sampling, num_generations=3)
    assert gap(language_model, rollout, 0.7) < 1e-4
    assert (rollout.sampling_logprobs[~rollout.response_mask] == 0).all()


def test_a_response_depends_on_its_seed_and_not_on_its_neighbours(
    language_model, tokenizer
) -> None:
    sampling = Sampling(max_new_tokens=8)
    whole = generate(language_model, tokenizer, sampling, num_generations=4)
    assert whole.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for size in (4, 8):
        engine = TransformersEngine(max_batch_size=size)
        other = generate(language_model, tokenizer, sampling, num_generations=4, engine=engine)
        assert responses(other) == responses(whole)
        torch.testing.assert_close(
            other.sampling_logprobs, whole.sampling_logprobs, atol=1e-4, rtol=1e-4
        )
    for seed, text in ((0, TEXTS[0]), (7, TEXTS[1])):
        alone = generate(language_model, tokenizer, sampling, texts=(text,), seeds=[seed])
        assert responses(alone)[0] == responses(whole)[seed]


def test_first_tokens_follow_the_policys_distribution(language_model, tokenizer) -> None:
    size = 3000
    rollout = generate(
        language_model, tokenizer, Sampling(max_new_tokens=1), texts=("b",), num_generations=size
    )
    counts = torch.bincount(
        torch.tensor([response[0] for response in responses(rollout)]), minlength=len(tokenizer)
    )
    ids = torch.tensor([tokenizer("b")["input_ids"]])
    expected = language_model(input_ids=ids).logits[0, -1].softmax(-1) * size
    common = expected >= 10
    chi_square = ((counts - expected)[common].square() / expected[common]).sum()
    freedom = int(common.sum())
    # mean of chi-square is its degrees of freedom, its deviation sqrt(2 k): five of them
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_every_end_of_sequence_id_ends_a_response(language_model, tokenizer) -> None:
    second = tokenizer.convert_tokens_to_ids("<|im_end|>")
    language_model.generation_config.eos_token_id = [tokenizer.eos_token_id, second]
    sampling = Sampling(max_new_tokens=40, min_new_tokens=3)
    pad, tokenizer.pad_token = tokenizer.pad_token, tokenizer.eos_token  # as many models have it
    try:
        rollout = generate(language_model, tokenizer, sampling, num_generations=30)
    finally:
        tokenizer.pad_token = pad
    ends = {tokenizer.eos_token_id, second}
    seen = set()
    for response, truncated in zip(responses(rollout), rollout.truncated.tolist(), strict=True):
        assert not ends & set(response[:-1])
        assert truncated == (response[-1] not in ends)
        assert len(response) == 40 or not truncated
        assert len(response) >= 3
        seen.add(response[-1])
    assert ends <= seen


def test_a_stop_string_ends_a_response_but_not_when_it_is_in_the_prompt(
    language_model, tokenizer
) -> None:
    def said(**options: Any) -> str:
        sampling = Sampling(max_new_tokens=12, **options)
        rollout = generate(language_model, tokenizer, sampling, texts=("b e",))
        assert bool(rollout.truncated[0]) == ("stop" not in options or "b e" in options["stop"])
        return str(tokenizer.decode(responses(rollout)[0]))

    free = said()
    # half a character of several bytes decodes to a mark that no string matches
    character = next(c for c in free[1:] if c.isascii() and c.isprintable())
    assert said(stop=(character,)) == free[: free.index(character) + 1]
    assert said(stop=("b e",)) == free


def test_truncated_sampling_reports_its_own_probabilities_and_the_mass_it_kept(
    language_model, tokenizer
) -> None:
    sampling = Sampling(max_new_tokens=1, top_k=5)
    rollout = generate(language_model, tokenizer, sampling, texts=("b",), num_generations=200)
    ids = torch.tensor([tokenizer("b")["input_ids"]])
    full = language_model(input_ids=ids).logits[0, -1].softmax(-1)
    top = full.topk(5)
    assert rollout.kept_mass is not None
    column = int(rollout.response_mask[0].long().argmax())
    for row, response in enumerate(responses(rollout)):
        assert response[0] in top.indices.tolist()
        torch.testing.assert_close(rollout.kept_mass[row, column], top.values.sum())
        torch.testing.assert_close(
            rollout.sampling_logprobs[row, column],
            (full[response[0]] / top.values.sum()).log(),
            rtol=1e-4,
            atol=1e-5,
        )


def test_a_checkpoints_own_generation_defaults_do_not_leak_in(language_model, tokenizer) -> None:
    plain = generate(language_model, tokenizer, Sampling(max_new_tokens=8))
    language_model.generation_config.repetition_penalty = 5.0
    language_model.generation_config.temperature = 0.1
    language_model.generation_config.top_k = 1
    language_model.generation_config.do_sample = True
    again = generate(language_model, tokenizer, Sampling(max_new_tokens=8))
    assert responses(again) == responses(plain)
    assert language_model.generation_config.repetition_penalty == 5.0


def test_generation_leaves_training_mode_and_autocast_cache_as_they_were(
    language_model, tokenizer
) -> None:
    language_model.train()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        rollout = generate(language_model, tokenizer, Sampling(max_new_tokens=4))
        logprobs = sequence_logprobs(language_model, rollout)
    assert language_model.training
    logprobs.sum().backward()
    gradient = language_model.model.layers[0].mlp.down_proj.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


PENALTIES = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}


def test_penalties_change_logits_as_by_hand() -> None:
    sampler = TokenSampler(
        Sampling(temperature=0.0, **PENALTIES), [0], prompt_mask=torch.tensor([[False, True]])
    )
    # the padding is token 0, the prompt 1, and token 2 was said twice
    said, logits = torch.tensor([[0, 1, 2, 2]]), torch.tensor([[4.0, 3.0, -1.0, 1.0]])
    sampler(said, logits)
    (response,) = sampler.responses(torch.tensor([[0]]), torch.tensor([1]))
    # 3 / 2; -1 · 2 - 0.5 - 2 · 0.25; what was only padding or never said stays
    penalized = torch.tensor([4.0, 1.5, -3.0, 1.0])
    assert response.segments[0].logprobs.item() == pytest.approx(
        4.0 - float(penalized.logsumexp(0)), abs=1e-6
    )
    assert logits.tolist() == [[4.0, 3.0, -1.0, 1.0]]


@pytest.mark.parametrize("name", PENALTIES)
def test_each_penalty_holds_whatever_else_is_in_the_batch(
    language_model, tokenizer, name: str
) -> None:
    sampling = Sampling(temperature=0.0, max_new_tokens=8, **{name: 1.9})
    together = responses(generate(language_model, tokenizer, sampling))
    for text, response in zip(TEXTS, together, strict=True):
        alone = generate(language_model, tokenizer, sampling, texts=(text,), seeds=[0])
        assert responses(alone) == [response]
    plain = generate(language_model, tokenizer, Sampling(temperature=0.0, max_new_tokens=8))
    assert together != responses(plain)


def test_the_repetition_penalty_is_that_of_transformers(language_model, tokenizer) -> None:
    sampling = Sampling(temperature=0.0, max_new_tokens=8, repetition_penalty=1.7)
    ((said,),) = [responses(generate(language_model, tokenizer, sampling, texts=("what is",)))]
    ids = torch.tensor([tokenizer("what is")["input_ids"]])
    own = language_model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        repetition_penalty=1.7,
        pad_token_id=0,
    )
    assert own[0, ids.shape[1] :].tolist()[: len(said)] == said


def test_what_cannot_be_is_refused_by_name(language_model, tokenizer) -> None:
    for culprit, options in (
        ("temperature", {"temperature": -1.0}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("min_new_tokens", {"min_new_tokens": 9, "max_new_tokens": 8}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": 1.0}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -2.5}),
        ("stop", {"stop": ("",)}),
    ):
        with pytest.raises(ValueError, match=f"sampling.{culprit}"):
            Sampling(**options)
    engine = TransformersEngine(max_batch_size=3)
    with pytest.raises(ValueError, match=r"max_batch_size is 3, .* nearest value is 4"):
        generate(language_model, tokenizer, Sampling(), num_generations=4, engine=engine)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mamba", "not used by the model"), ("deepseek_v4", "refuses a copied cache")],
)
def test_where_a_cache_cannot_be_copied_prompts_are_repeated_and_the_log_says_why(
    tokenizer, family: str, reason: str, caplog
) -> None:
    model, engine = tiny_model(family), TransformersEngine()
    for _ in range(2):
        rollout = generate(
            model, tokenizer, Sampling(max_new_tokens=5), num_generations=2, engine=engine
        )
        assert gap(model, rollout) < 1e-4
    ours = [record for record in caplog.records if record.name.startswith("lrlhf")]
    lines = [record.getMessage() for record in ours]
    assert len(lines) == 1
    assert "once for each of its responses" in lines[0]
    assert reason in lines[0]


def test_a_split_policy_that_leaves_no_room_is_refused_before_it_generates(
    language_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "lrlhf.rollout.engines.transformers_engine"
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)

    def gather(found: list[int], own: int) -> None:
        found[:] = [own, 10 * 2**30]  # the other has less

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=24 * 2**30))
    engine = TransformersEngine()
    engine.attach(language_model, tokenizer)  # which is whole
    monkeypatch.setattr(f"{module}.gathered_bytes", lambda _: 8 * 2**30)
    engine.attach(language_model, tokenizer)  # 0.8 of 10 GiB
    monkeypatch.setattr(f"{module}.gathered_bytes", lambda _: 8 * 2**30 + 1)
    with pytest.raises(ValueError, match=r"8\.0 GiB, and 10\.0 GiB .*VLLMServerEngine"):
        engine.attach(language_model, tokenizer)


def test_every_token_is_drawn_with_a_number_of_its_own() -> None:
    sampler = TokenSampler(
        Sampling(max_new_tokens=8), [3, 4], prompt_mask=torch.ones(2, 1, dtype=torch.bool)
    )
    ids = torch.zeros(2, 1, dtype=torch.long)
    for _ in range(8):
        chosen = sampler(ids, torch.zeros(2, 1000)).argmax(dim=1)
        ids = torch.cat([ids, chosen[:, None]], dim=1)
    # of a thousand equal tokens, sixteen times
    assert len({*ids[:, 1:].flatten().tolist()}) > 12
