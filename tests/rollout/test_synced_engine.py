import copy
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import (
    EngineFailure,
    ProbeGap,
    Response,
    Sampling,
    TransformersEngine,
    WeightSyncError,
)
from lrlhf.rollout.engines.policy_weights import PolicyWeights
from lrlhf.rollout.engines.synced_engine import Request, without_recovery
from lrlhf.types import PromptBatch, Rollout
from tests.conftest import build_language_model
from tests.rollout.copy_engine import CopyEngine, prompt_batch

NORM = "model.norm.weight"
SAMPLING = Sampling(max_new_tokens=8)
SEEDS = list(range(6))


@pytest.fixture
def prompts(tokenizer: PreTrainedTokenizerBase) -> PromptBatch:
    return prompt_batch([tokenizer(text)["input_ids"] for text in ("hi", "good morning", "x")])


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


# ------------------------------------------------------------------ versions


def test_without_weights_nothing_is_drawn(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer)
    with pytest.raises(WeightSyncError, match=r"CopyEngine was given no weights: add .*VLLMWeight"):
        generate(engine, prompts)
    assert not engine.started


def test_a_push_before_attach_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"CopyEngine\.attach has not been called"):
        CopyEngine().push(0)


def test_responses_are_those_of_the_policy(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer)
    report = engine.push(version=3)
    assert (report.version, report.restarts) == (3, 0)
    assert report.seconds > 0
    rollout = generate(engine, prompts)
    own = TransformersEngine()
    own.attach(language_model, tokenizer)
    expected = own.generate(prompts, SAMPLING, num_generations=2, seeds=SEEDS)
    assert torch.equal(rollout.input_ids, expected.input_ids)
    assert torch.equal(rollout.group_ids, expected.group_ids)
    assert torch.equal(rollout.truncated, expected.truncated)
    torch.testing.assert_close(rollout.sampling_logprobs, expected.sampling_logprobs)
    assert rollout.weight_version is not None
    assert rollout.weight_version.tolist() == [3] * 6


def test_responses_come_from_the_pushed_weights_until_the_next_push(
    language_model, tokenizer, prompts
) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    before = generate(engine, prompts)
    train(language_model)
    still = generate(engine, prompts)
    assert_same(before, still)
    assert still.weight_version is not None
    assert still.weight_version.tolist() == [0] * 6
    engine.push(1)
    after = generate(engine, prompts)
    assert after.weight_version is not None
    assert after.weight_version.tolist() == [1] * 6
    assert not torch.equal(after.input_ids, before.input_ids)


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


def test_a_closed_engine_starts_again_with_the_next_push(
    language_model, tokenizer, prompts
) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    first = generate(engine, prompts)
    engine.close()
    engine.close()
    assert engine.version is None
    assert not engine.started
    with pytest.raises(WeightSyncError, match="no weights"):
        generate(engine, prompts)
    engine.push(0)
    assert_same(first, generate(engine, prompts))


def test_weights_arrive_in_the_type_of_the_engine(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer, dtype=torch.bfloat16)
    engine.push(0)
    for name, tensor in engine.pushed[0].items():
        assert torch.equal(tensor, language_model.get_parameter(name).bfloat16()), name
    # 8 bits of precision round log-probabilities, by less than the tolerance for it
    assert 1e-4 < engine.probe().mean < 0.2


def test_a_lora_policy_draws_from_its_merged_weights(language_model, tokenizer, prompts) -> None:
    base = copy.deepcopy(language_model)
    policy = get_peft_model(language_model, LoraConfig(r=2, init_lora_weights=False))
    engine = attached(policy, tokenizer)
    engine.push(0)
    merged = copy.deepcopy(policy).merge_and_unload()
    for model, same in ((merged, True), (base, False)):
        own = TransformersEngine()
        own.attach(model, tokenizer)
        expected = own.generate(prompts, SAMPLING, num_generations=2, seeds=SEEDS)
        rollout = generate(engine, prompts)
        assert torch.equal(rollout.input_ids, expected.input_ids) == same
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


def test_a_restart_within_inference_mode_can_be_followed_by_a_push_outside(
    language_model, tokenizer, prompts
) -> None:
    engine = attached(language_model, tokenizer, fail={"respond": [1]})
    engine.push(0)
    with torch.inference_mode():
        generate(engine, prompts)
    engine.push(1)
    assert engine.version == 1


# ------------------------------------------------------------------ checks


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_a_weight_that_did_not_arrive_is_named(language_model, tokenizer, prompts, name) -> None:
    engine = attached(language_model, tokenizer, drop=name)
    with pytest.raises(WeightSyncError, match=f"was not given the weight {name}"):
        engine.push(0)
    assert engine.version is None
    with pytest.raises(WeightSyncError, match="no weights"):
        generate(engine, prompts)


def test_an_older_weight_is_named(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer, stale=NORM)
    engine.push(0)
    with torch.no_grad():
        # the smallest change there is
        weight = language_model.get_parameter(NORM)
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    with pytest.raises(WeightSyncError, match=rf"other values of the weight {NORM}"):
        engine.push(1)


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


def test_every_worker_is_checked(language_model, tokenizer, monkeypatch) -> None:
    engine = attached(language_model, tokenizer)
    send = engine._send

    def two_workers(tensors: Any) -> list[dict[str, str]]:
        (arrived,) = send(tensors)
        return [arrived, arrived | {NORM: "0"}]

    monkeypatch.setattr(engine, "_send", two_workers)
    with pytest.raises(WeightSyncError, match=f"other values of the weight {NORM}"):
        engine.push(0)


def test_a_wrong_weight_is_no_reason_to_start_again(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer, drop=NORM)
    with pytest.raises(WeightSyncError):
        engine.push(0)
    assert (engine.calls["start"], engine.restarts) == (1, 0)


def test_a_probe_of_equal_weights_finds_no_gap(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    gap = engine.probe()
    # float32 keeps about 7 digits
    assert 0 <= gap.mean <= gap.max < 1e-4


def test_a_probe_measures_the_distance_to_the_policy(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    older = copy.deepcopy(language_model)
    train(language_model)
    gap = engine.probe()
    # the same again, by hand: log-softmax of whole logits of both models
    prompts = engine.draws[-1].prompts
    own = TransformersEngine()
    own.attach(older, tokenizer)
    rollout = own.generate(
        prompt_batch(prompts), Sampling(max_new_tokens=8), num_generations=1, seeds=range(4)
    )
    values = []
    for model in (older, language_model):
        with torch.no_grad():
            logits = model(rollout.input_ids, attention_mask=rollout.attention_mask.long()).logits
        chosen = rollout.input_ids[:, 1:, None]
        values.append(logits.log_softmax(-1)[:, :-1].gather(2, chosen)[..., 0])
    gaps = (values[0] - values[1]).abs()[rollout.response_mask[:, 1:]]
    assert gap.mean == pytest.approx(float(gaps.mean()), rel=1e-3)
    assert gap.max == pytest.approx(float(gaps.max()), rel=1e-3)
    assert gap.mean > 1e-2


def _moved(response: Response, by: torch.Tensor) -> Response:
    (segment,) = response.segments
    assert segment.logprobs is not None
    moved = segment.logprobs + by[: len(segment.logprobs)]
    return Response.sampled(segment.token_ids, moved, truncated=response.truncated)


class Disturbed(CopyEngine):
    """Says other log-probabilities than it draws with: `[responses, tokens]` are added to them."""

    def __init__(self, added: torch.Tensor) -> None:
        super().__init__()
        self.added = added

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        return [
            _moved(response, added)
            for response, added in zip(
                super()._respond(requests, sampling), self.added, strict=True
            )
        ]


def disturbed(
    policy: nn.Module, tokenizer: PreTrainedTokenizerBase, added: torch.Tensor
) -> ProbeGap:
    engine = Disturbed(added)
    engine.attach(policy, tokenizer)
    engine.push(0)
    return engine.probe()


def test_a_token_that_went_to_another_expert_hides_nothing(language_model, tokenizer) -> None:
    added = torch.zeros(4, 8)
    added[:, 0] = 5.0
    gap = disturbed(language_model, tokenizer, added)
    # one token of eight
    assert gap.mean == pytest.approx(5 / 8, rel=1e-3)
    assert gap.typical < 1e-4


def test_a_single_response_that_other_weights_drew_shows(language_model, tokenizer) -> None:
    added = torch.zeros(4, 8)
    added[2] = 0.2  # as of the only prompt with an image
    gap = disturbed(language_model, tokenizer, added)
    assert gap.mean == pytest.approx(0.2 / 4, rel=1e-3)
    assert gap.typical == pytest.approx(0.2, rel=1e-3)


def test_a_probe_shows_states_that_older_weights_left_in_a_cache(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer, keep_caches=True)
    engine.push(0)
    assert engine.probe().mean < 1e-4
    train(language_model)
    engine.push(1)
    assert engine.probe().mean > 1e-2


def test_a_push_resets_the_caches(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    engine.probe()
    train(language_model)
    engine.push(1)
    assert engine.calls["reset_caches"] == 2
    assert engine.probe().mean < 1e-4


def test_probes_ask_the_same_long_prompts_without_special_tokens(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    engine.probe()
    engine.probe()
    first, second = (draw.prompts for draw in engine.draws)
    assert first == second
    assert len(first) > 1
    assert all(len(ids) > 64 for ids in first)  # two blocks of 32 tokens
    assert not {0, 1, 2, 3} & {token for ids in first for token in ids}


def test_probes_leave_room_for_their_response(language_model, tokenizer) -> None:
    engine = attached(language_model, tokenizer, max_model_len=30)
    engine.push(0)
    assert engine.probe().mean < 1e-4
    assert {len(ids) for ids in engine.draws[0].prompts} == {22}  # 30 less 8


def test_a_probe_leaves_the_policy_in_training_mode_and_its_random_numbers(
    language_model, tokenizer
) -> None:
    engine = attached(language_model, tokenizer)
    language_model.train()
    language_model.model.norm.eval()
    state = torch.get_rng_state()
    engine.push(0)
    engine.probe()
    assert torch.equal(torch.get_rng_state(), state)
    assert language_model.training
    assert not language_model.model.norm.training


# ------------------------------------------------------------------ recovery


def test_a_failed_call_draws_the_same_responses_after_a_restart(
    language_model, tokenizer, prompts, caplog
) -> None:
    healthy = attached(language_model, tokenizer)
    healthy.push(2)
    expected = generate(healthy, prompts)
    engine = attached(language_model, tokenizer, fail={"respond": [1]})
    engine.push(2)
    with caplog.at_level(logging.WARNING):
        rollout = generate(engine, prompts)
    assert_same(expected, rollout)
    assert rollout.weight_version is not None
    assert rollout.weight_version.tolist() == [2] * 6
    assert engine.version == 2
    assert (engine.restarts, engine.calls["start"], engine.calls["send"]) == (1, 2, 2)
    assert "respond number 1 failed; starting the engine again" in caplog.text


@pytest.mark.parametrize("call", ["start", "send"])
def test_a_push_that_fails_is_made_again_on_a_new_engine(
    language_model, tokenizer, call: str
) -> None:
    engine = attached(language_model, tokenizer, fail={call: [1]})
    report = engine.push(5)
    assert (report.version, report.restarts) == (5, 1)
    assert engine.version == 5
    assert engine.calls["start"] == 2
    assert engine.probe().mean < 1e-4


@pytest.mark.parametrize("call", ["start", "send"])
def test_an_engine_that_fails_again_during_recovery_gets_another_chance(
    language_model, tokenizer, prompts, call: str
) -> None:
    engine = attached(language_model, tokenizer, fail={"respond": [1], call: [2]})
    engine.push(0)
    rollout = generate(engine, prompts)
    assert engine.restarts == 2
    assert rollout.weight_version is not None
    assert rollout.weight_version.tolist() == [0] * 6
    assert engine.probe().mean < 1e-4


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
@pytest.mark.parametrize("call", ["start", "send"])
def test_a_push_gives_up_after_max_restarts(
    language_model, tokenizer, call: str, max_restarts: int
) -> None:
    engine = attached(language_model, tokenizer, fail={call: range(99)}, max_restarts=max_restarts)
    with pytest.raises(
        EngineFailure,
        match=rf"{call} number {max_restarts + 1} failed, after {max_restarts} restarts "
        r"\(engine\.max_restarts\)",
    ):
        engine.push(0)
    assert engine.calls["start"] == max_restarts + 1
    assert engine.version is None
    assert not engine.started


def test_a_call_gives_up_after_max_restarts(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer, fail={"respond": range(99)}, max_restarts=2)
    engine.push(0)
    with pytest.raises(EngineFailure, match="respond number 3 failed, after 2 restarts"):
        generate(engine, prompts)
    assert engine.calls["respond"] == 3
    assert not engine.started


def test_failures_are_counted_anew_in_every_call(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer, fail={"respond": [1, 3, 5]}, max_restarts=1)
    engine.push(0)
    for _ in range(3):
        generate(engine, prompts)
    assert engine.restarts == 3


def test_without_recovery_the_first_failure_is_told(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer, fail={"respond": [1]})
    engine.push(0)
    with pytest.raises(EngineFailure, match="respond number 1 failed"), without_recovery():
        generate(engine, prompts)
    assert engine.restarts == 0
    # the next push finds an engine that is gone, and starts it again
    assert engine.push(1).restarts == 1
    assert engine.probe().mean < 1e-4


def test_a_failure_on_another_rank_starts_the_engine_here_too(
    language_model, tokenizer, prompts, monkeypatch
) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    expected = generate(engine, prompts)
    elsewhere = iter([1, 0])
    monkeypatch.setattr(engine, "_worst_of_ranks", lambda here: max(here, next(elsewhere)))
    assert_same(expected, generate(engine, prompts))
    assert (engine.restarts, engine.calls["start"]) == (1, 2)


def test_an_error_that_no_restart_mends_ends_the_call_on_every_rank(
    language_model, tokenizer, prompts, monkeypatch
) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    monkeypatch.setattr(engine, "_worst_of_ranks", lambda here: 2)
    with pytest.raises(EngineFailure, match="on another rank, which cannot be mended"):
        generate(engine, prompts)
    assert engine.restarts == 0


def test_other_errors_pass_through(language_model, tokenizer, prompts, monkeypatch) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)

    def refuse(*_: Any) -> None:
        raise ValueError("temperature 9")

    monkeypatch.setattr(engine, "_respond", refuse)
    with pytest.raises(ValueError, match="temperature 9"):
        generate(engine, prompts)
    assert engine.restarts == 0


# ------------------------------------------------------------------ arguments


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


def test_padding_is_no_part_of_a_prompt(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    generate(engine, prompts)
    texts = [tokenizer.decode(ids) for ids in engine.draws[0].prompts]
    assert texts == ["hi", "hi", "good morning", "good morning", "x", "x"]


def test_a_number_of_seeds_that_does_not_fit_is_refused(language_model, tokenizer, prompts) -> None:
    engine = attached(language_model, tokenizer)
    engine.push(0)
    with pytest.raises(ValueError, match="5 seeds for 3 prompts x 2 generations"):
        engine.generate(prompts, SAMPLING, num_generations=2, seeds=range(5))


def test_fewer_than_no_restarts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.max_restarts is -1"):
        CopyEngine(max_restarts=-1)
