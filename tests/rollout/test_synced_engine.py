import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import EngineFailure, Response, Sampling, WeightSyncError
from lrlhf.rollout.engines.policy_weights import PolicyWeights
from lrlhf.rollout.engines.synced_engine import Request, without_recovery
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import PromptBatch, Rollout
from tests.conftest import build_language_model
from tests.rollout.copy_engine import CopyEngine

NORM = "model.norm.weight"
SAMPLING = Sampling(max_new_tokens=8)
SEEDS = list(range(6))


@pytest.fixture
def prompts(tokenizer: PreTrainedTokenizerBase) -> PromptBatch:
    return token_prompts([tokenizer(text)["input_ids"] for text in ("hi", "good morning", "x")])


def attached(policy: nn.Module, tokenizer: PreTrainedTokenizerBase, **options: Any) -> CopyEngine:
    engine = CopyEngine(**options)
    engine.attach(policy, tokenizer)
    return engine


def generate(engine: CopyEngine, prompts: PromptBatch, **options: Any) -> Rollout:
    return engine.generate(prompts, SAMPLING, num_generations=2, seeds=SEEDS, **options)


@torch.no_grad()
def train(policy: nn.Module, *, by: float = 0.05) -> None:
    """Move every weight, as an update would."""
    for parameter in policy.parameters():
        parameter.add_(by * torch.randn_like(parameter))


def assert_same(first: Rollout, second: Rollout) -> None:
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.response_mask, second.response_mask)
    assert torch.equal(first.sampling_logprobs, second.sampling_logprobs)


def test_another_policy_makes_the_weights_unknown(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(4)
    engine.attach(language_model, tokenizer)
    assert engine.version == 4
    other = build_language_model(tokenizer, seed=1)
    engine.attach(other, tokenizer)
    assert engine.version is None
    assert not engine.started  # it had the architecture of the other one
    engine.push(0)
    assert torch.equal(engine.pushed[-1][NORM], other.get_parameter(NORM))
    assert engine.probe().mean < 1e-4


def test_a_push_within_inference_mode_can_be_followed_by_one_outside(
    language_model, tokenizer, prompts
) -> None:
    # as in a validation that comes before the first training step
    engine = attached(language_model, tokenizer)
    with torch.inference_mode():
        engine.push(0)
        inside = generate(engine, prompts)
        gap = engine.probe()
    assert gap.mean < 1e-4
    assert_same(inside, generate(engine, prompts))
    train(language_model)
    engine.push(1)
    assert engine.probe().mean < 1e-4


def test_a_push_puts_the_weights_together_once(language_model, tokenizer, monkeypatch) -> None:
    # with split weights or adapters that is a gather or a product for each of them
    engine = attached(language_model, tokenizer)
    read: list[str] = []
    tensors = PolicyWeights.tensors

    def counted(self: PolicyWeights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(self, dtype):
            read.append(name)
            yield name, tensor

    monkeypatch.setattr(PolicyWeights, "tensors", counted)
    engine.push(0)
    assert len(read) == len(set(read)) == len(dict(language_model.named_parameters()))


def test_every_push_looks_at_other_words_of_large_weights(
    language_model, tokenizer, monkeypatch
) -> None:
    engine = attached(language_model, tokenizer)
    turns: list[int] = []
    send = engine._send
    monkeypatch.setattr(
        engine, "_send", lambda tensors: turns.append(tensors.turn) or send(tensors)
    )
    for version in (10, 17, 24, 31, 38, 45, 52):  # versions that come seven apart
        engine.push(version)
    assert {turn % 7 for turn in turns} == set(range(7))


def test_without_recovery_the_first_failure_is_told(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer, fail={"respond": [1]})
    engine.push(0)
    with pytest.raises(EngineFailure, match="respond number 1 failed"), without_recovery():
        generate(engine, prompts)
    assert engine.restarts == 0
    # the next push finds an engine that is gone, and starts it again
    engine.push(1)
    assert engine.restarts == 1
    assert engine.probe().mean < 1e-4


def test_a_failure_on_another_rank_starts_the_engine_here_too_if_that_can_help(
    language_model, tokenizer, prompts, monkeypatch
) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    expected = generate(engine, prompts)
    elsewhere = iter([1, 0, 0, 2])  # the second is asked once the engine has started
    monkeypatch.setattr(engine, "_worst_of_ranks", lambda here: max(here, next(elsewhere)))
    assert_same(expected, generate(engine, prompts))
    assert (engine.restarts, engine.calls["start"]) == (1, 2)
    with pytest.raises(EngineFailure, match="on another rank, which cannot be mended"):
        generate(engine, prompts)
    assert engine.restarts == 1


def test_a_prompt_without_room_for_its_response_names_the_options(
    language_model, tokenizer, prompts
) -> None:
    # "good morning" has 12 tokens, one per byte
    engine = attached(language_model, tokenizer, max_model_len=19)
    engine.push(0)
    with pytest.raises(
        ValueError,
        match=r"12 tokens and sampling\.max_new_tokens is 8, .* 19 \(engine\.max_model_len\): "
        r"raise it to 20, or set data\.max_prompt_tokens",
    ):
        generate(engine, prompts)
    roomy = attached(language_model, tokenizer, max_model_len=20)
    roomy.push(0)
    assert len(generate(roomy, prompts)) == 6


@pytest.mark.parametrize(
    ("typical", "place", "size"),
    [
        # a token that went to another expert hides nothing; a response that other weights
        # sampled, as the only one with an image, shows
        (0.0, (slice(None), 0), 5.0),
        (0.2, (2, slice(None)), 0.2),
    ],
)
def test_a_probe_tells_other_weights_from_rounding(
    language_model, tokenizer, monkeypatch, typical: float, place: Any, size: float
) -> None:
    added = torch.zeros(4, 8)
    added[place] = size
    engine = attached(language_model, tokenizer)
    engine.push(0)
    respond = engine._respond

    def disturbed(requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Say other log-probabilities than it draws with."""
        responses = respond(requests, sampling)
        for response, more in zip(responses, added, strict=True):
            logprobs = response.segments[0].logprobs
            assert logprobs is not None
            logprobs += more[: len(logprobs)]
        return responses

    monkeypatch.setattr(engine, "_respond", disturbed)
    gap = engine.probe()
    assert gap.mean == pytest.approx(float(added.mean()), rel=1e-3)
    assert gap.typical == pytest.approx(typical, abs=1e-4)
    assert not gap.low_precision


@pytest.mark.parametrize("fault", ["drop", "stale", "worker"])
def test_a_wrong_weight_is_named(
    language_model, tokenizer, prompts, monkeypatch, fault: str
) -> None:
    engine = attached(language_model, tokenizer, **({} if fault == "worker" else {fault: NORM}))
    send = engine._send
    if fault == "worker":  # the second of two has another weight
        two = lambda weights: [*(one := send(weights)), {**one[0], NORM: "0"}]  # noqa: E731
        monkeypatch.setattr(engine, "_send", two)
    if fault == "stale":
        engine.push(0)
        with torch.no_grad():  # the smallest change there is
            weight = language_model.get_parameter(NORM)
            weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    told = "was not given the weight" if fault == "drop" else "other values of the weight"
    with pytest.raises(WeightSyncError, match=f"{told} {NORM}"):
        engine.push(1)
    assert engine.version is None
    assert (engine.calls["start"], engine.restarts) == (1, 0)  # it would not help
    with pytest.raises(WeightSyncError, match=r"CopyEngine was given no weights: add .*VLLMWeight"):
        generate(engine, prompts)


@pytest.mark.parametrize(
    "fail", [{"start": [1]}, {"send": [1]}, {"respond": [1], "start": [2]}, {"respond": [1]}]
)
def test_failures_are_mended_and_change_no_response(
    language_model, tokenizer, prompts, caplog, fail: dict[str, list[int]]
) -> None:
    healthy = attached(language_model, tokenizer)
    healthy.push(2)
    engine = attached(language_model, tokenizer, fail=fail)
    language_model.train()
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        engine.push(2)
        rollout = generate(engine, prompts)
    assert_same(generate(healthy, prompts), rollout)
    assert rollout.weight_version is not None
    assert rollout.weight_version.tolist() == [2] * 6
    assert engine.version == 2
    assert engine.restarts == len(fail)
    assert "failed; starting the engine again" in caplog.text
    assert engine.probe().mean < 1e-4
    assert language_model.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("call", "max_restarts"), [("send", 0), ("respond", 2)])
def test_an_engine_that_goes_on_failing_ends_the_call(
    language_model, tokenizer, prompts, call: str, max_restarts: int
) -> None:
    engine = attached(language_model, tokenizer, fail={call: range(99)}, max_restarts=max_restarts)
    message = rf"{call} number {max_restarts + 1} failed, after {max_restarts} restarts"

    def use() -> None:
        engine.push(0)
        generate(engine, prompts)

    with pytest.raises(EngineFailure, match=message):
        use()
    assert engine.calls["start"] == max_restarts + 1
    assert engine.version is None
    assert not engine.started


def test_probes_ask_the_same_long_prompts_without_special_tokens(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer, max_model_len=30)
    engine.push(0)
    engine.probe()
    engine.probe()
    first, second = (draw.prompts for draw in engine.draws)
    assert first == second
    assert [len(ids) for ids in first] == [22] * 4  # with room for the responses
    assert not {0, 1, 2, 3} & {token for ids in first for token in ids}
