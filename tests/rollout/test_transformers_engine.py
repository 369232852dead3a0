"""The engine draws from the policy, stops where it should, and says with which probability."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import sequence_logprobs
from lrlhf.rollout import Sampling, TransformersEngine
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


def test_greedy_responses_are_those_of_repeated_argmax(language_model, tokenizer) -> None:
    rollout = generate(language_model, tokenizer, Sampling(temperature=0.0, max_new_tokens=6))
    for text, response in zip(TEXTS, responses(rollout), strict=True):
        ids = tokenizer(text)["input_ids"]
        for token in response:
            logits = language_model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids = [*ids, token]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_policy_at_the_sampling_temperature(
    language_model, tokenizer, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, max_new_tokens=7)
    rollout = generate(language_model, tokenizer, sampling, num_generations=3)
    for row in range(len(rollout)):
        length = int(rollout.lengths[row])
        logits = language_model(input_ids=rollout.input_ids[row : row + 1, :length]).logits[0]
        expected = (logits / temperature).log_softmax(-1)
        for column in range(length):
            if rollout.response_mask[row, column]:
                token = rollout.input_ids[row, column]
                torch.testing.assert_close(
                    rollout.sampling_logprobs[row, column],
                    expected[column - 1, token],
                    rtol=1e-4,
                    atol=1e-5,
                )
            else:
                assert rollout.sampling_logprobs[row, column] == 0


def test_a_response_depends_on_its_seed_and_not_on_its_neighbours(
    language_model, tokenizer
) -> None:
    sampling = Sampling(max_new_tokens=8)
    together = generate(language_model, tokenizer, sampling, seeds=[11, 12, 13])
    for index, text in enumerate(TEXTS):
        alone = generate(language_model, tokenizer, sampling, texts=(text,), seeds=[11 + index])
        assert responses(alone)[0] == responses(together)[index]


def test_neither_splitting_the_batch_nor_sharing_prompts_changes_a_response(
    language_model, tokenizer
) -> None:
    sampling = Sampling(max_new_tokens=8)
    whole = generate(language_model, tokenizer, sampling, num_generations=4)
    for engine in (
        TransformersEngine(max_batch_size=5),
        TransformersEngine(share_prompts=False),
        TransformersEngine(max_batch_size=4),
    ):
        other = generate(language_model, tokenizer, sampling, num_generations=4, engine=engine)
        assert responses(other) == responses(whole)
        torch.testing.assert_close(
            other.sampling_logprobs, whole.sampling_logprobs, atol=1e-4, rtol=1e-4
        )
    assert whole.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_first_tokens_follow_the_policys_distribution(language_model, tokenizer) -> None:
    size = 3000
    rollout = generate(
        language_model,
        tokenizer,
        Sampling(max_new_tokens=1),
        texts=("b",),
        num_generations=size,
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
    free = generate(language_model, tokenizer, Sampling(max_new_tokens=12), texts=("b e",))
    text = tokenizer.decode(responses(free)[0])
    # half a character of several bytes decodes to a mark that no string matches
    character = next(c for c in text[1:] if c.isascii() and c.isprintable())
    stopped = generate(
        language_model,
        tokenizer,
        Sampling(max_new_tokens=12, stop=(character,)),
        texts=("b e",),
    )
    got = tokenizer.decode(responses(stopped)[0])
    assert got == text[: text.index(character) + 1]
    assert not bool(stopped.truncated[0])
    inside_prompt = generate(
        language_model, tokenizer, Sampling(max_new_tokens=3, stop=("b e",)), texts=("b e",)
    )
    assert len(responses(inside_prompt)[0]) == 3


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


def test_what_cannot_be_is_refused_by_name(language_model, tokenizer) -> None:
    for options, culprit in (
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"stop": ("",)}, "stop"),
    ):
        with pytest.raises(ValueError, match=f"sampling.{culprit}"):
            Sampling(**options)
    engine = TransformersEngine(max_batch_size=3)
    with pytest.raises(ValueError, match=r"max_batch_size is 3, .* nearest value is 4"):
        generate(language_model, tokenizer, Sampling(), num_generations=4, engine=engine)


# ------------------------------------------------------------------ shared prompts


@torch.no_grad()
def gap(model: PreTrainedModel, rollout: Rollout) -> float:
    """Largest distance of the engine's log-probabilities from those of each row by itself."""
    largest = 0.0
    for row in range(len(rollout)):
        ids = rollout.input_ids[row][rollout.attention_mask[row]][None]
        own = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = own.gather(1, ids[0, 1:, None])[:, 0]
        sampled = rollout.sampling_logprobs[row][rollout.attention_mask[row]][1:]
        response = rollout.response_mask[row][rollout.attention_mask[row]][1:]
        largest = max(largest, float((own - sampled)[response].abs().max()))
    return largest


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        *(
            pytest.param(family, marks=pytest.mark.exhaustive)
            for family in ("lfm2", "jamba", "bamba", "falcon_h1", "qwen3_5_text", "zaya")
        ),
    ],
)
def test_hybrid_models_share_prompts(tokenizer, family: str, caplog) -> None:
    model = tiny_model(family)
    calls = []

    def note(_model: torch.nn.Module, _args: object, inputs: dict[str, torch.Tensor]) -> None:
        if "input_ids" in inputs:  # else a forward pass of training
            calls.append(inputs["input_ids"].shape)

    model.register_forward_pre_hook(note, with_kwargs=True)
    engine = TransformersEngine()
    generate(model, tokenizer, Sampling(max_new_tokens=1), num_generations=3, engine=engine)
    calls.clear()
    rollout = generate(
        model, tokenizer, Sampling(max_new_tokens=5), num_generations=3, engine=engine
    )
    assert calls[0][0] == len(TEXTS)
    assert [shape[1] for shape in calls[1:]] == [1] * 5
    assert gap(model, rollout) < 1e-4
    assert [record for record in caplog.records if record.name.startswith("lrlhf")] == []


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
