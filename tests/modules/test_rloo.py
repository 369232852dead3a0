"""RLOO end to end on a model of 27,000 parameters: learning, export, and what must not matter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import peft
import pytest
import torch
from torch import Tensor, nn

from lrlhf.datamodules import PromptDataModule
from lrlhf.functional import ALGORITHMS
from lrlhf.models import CausalLM, LoRA, sequence_logprobs
from lrlhf.modules import Guard, Reference, Update
from lrlhf.modules.policy import iteration, score
from lrlhf.rewards import IsolatedReward, Rewards
from lrlhf.rollout import (
    Collector,
    EngineWrapper,
    Response,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    assemble_rollout,
)
from lrlhf.types import PromptBatch, Rollout
from tests.conftest import build_language_model
from tests.modules.policy_runs import SkewedEngine, assert_same, letters, moved, sgd

LOGGED = """
train/loss rollout/score rollout/score_std rollout/response_length rollout/truncated_fraction
rollout/zero_variance_groups rewards/letters/mean rewards/letters/std policy/loss policy/approx_kl
policy/clip_fraction policy/ratio_max policy/grad_norm kl/reference kl/sequence kl/coef
mismatch/mean mismatch/max mismatch/kl perf/generate_s perf/reward_s perf/logprob_s perf/update_s
perf/tokens_per_s perf/generate_tokens_per_s perf/update_tokens_per_s perf/memory_gib
perf/padding_fraction perf/idle_share eval/score
"""


def test_a_notebook_builds_and_trains_two_iterations_without_yaml(build, train) -> None:
    run = train(build(), steps=2, val_check_interval=1, limit_val_batches=1)
    assert run.trainer.global_step == 2
    assert moved(run.before, run.after)
    assert set(LOGGED.split()) <= (run.trainer.callback_metrics | run.logged).keys()
    phases = [phase for phase in run.watcher.phases if phase]
    first_update = phases.index("update")
    assert phases[first_update - 3 : first_update] == ["generate", "reward", "logprob"]
    assert len(run.records) == 16
    assert run.records[0]["score"] == pytest.approx(letters([run.records[0]["completion"]])[0])
    assert run.records[0]["columns"]["answer"] in "abcdefghijklmnop"


def test_the_utilisation_of_a_gpu_counts_what_the_update_computes(
    build, train, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def training_flops(model: nn.Module, tokens: float, pairs: float) -> float:
        del model
        passes.append((tokens, pairs))
        return 6e9

    monkeypatch.setattr(iteration, "peak_flops", lambda device: 2e12)
    monkeypatch.setattr(iteration, "training_flops", training_flops)
    run = train(build(update=Update(num_iterations=2)))
    seconds = run.logged["perf/update_s"]
    # two epochs, each of which is one step
    assert len(passes) == 2
    assert run.logged["perf/mfu"] == pytest.approx(2 * 6e9 / 2e12 / seconds)
    tokens = passes[0][0] + passes[1][0]
    assert run.logged["perf/update_tokens_per_s"] == pytest.approx(tokens / seconds)
    # each of the 4 prompts once for its 4 responses, without padding
    lengths = sum(record["length"] for record in run.records)
    prompts = sum(len(record["prompt"]) for record in run.records[::4])
    assert passes[0][0] == prompts + lengths


def test_idle_is_what_is_neither_log_probabilities_nor_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(iteration, "time", SimpleNamespace(perf_counter=lambda: now))
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module = SimpleNamespace(trainer=trainer, device=torch.device("cpu"), global_step=0)

    def logged(**phases: float) -> dict[str, float]:
        nonlocal now
        it = iteration.Iteration(module)
        now += 1  # in no phase
        for name, seconds in phases.items():
            with it.phase(name):
                now += seconds
        it.measure_costs(0.0)
        return it.metrics.reduce(it.ranks, it.device)

    # 20 seconds, 8 of them in the trainer's models
    found = logged(sync=2.0, generate=7.0, reward=2.0, logprob=3.0, update=5.0)
    assert found["perf/idle_share"] == pytest.approx(12 / 20)
    # stored rollouts, or rows
    assert "perf/idle_share" not in logged(logprob=3.0, update=5.0)


def test_lengths_and_clipping_are_logged_in_detail(build, train) -> None:
    run = train(build(update=Update(num_iterations=2), optimizer=sgd(3.0)))
    lengths = [record["length"] for record in run.records]
    ended = [record["length"] for record in run.records if record["finish_reason"] == "stop"]
    for name, values in {"response_length": lengths, "terminated_length": ended}.items():
        keys = [f"rollout/{name}{end}" for end in ("", "_min", "_max")]
        if not values:
            assert not run.logged.keys() & set(keys)
            continue
        expected = [sum(values) / len(values), min(values), max(values)]
        assert [run.logged[key] for key in keys] == pytest.approx(expected)
    low, high = (run.logged[f"policy/clip_fraction_{end}"] for end in ("low", "high"))
    assert 0 < low + high <= run.logged["policy/clip_fraction"] + 1e-6


def test_rewards_that_ask_for_it_know_how_far_the_run_is(build, train) -> None:
    seen: list[tuple[set[int], set[int | None]]] = []

    def paced(completions: list[str], step: list[int], max_steps: list[int | None]) -> list[float]:
        seen.append((set(step), set(max_steps)))
        assert len(step) == len(max_steps) == len(completions)
        return letters(completions)

    isolated = IsolatedReward("tests.rewards.isolated_functions.how_far", workers=2)
    rewards = Rewards({"paced": paced, "how_far": isolated}, weights=[1.0, 0.0])
    evaluated = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    run = train(build(rewards=rewards), steps=2, **evaluated)
    # twice in training, and an evaluation of the model with two steps behind it
    assert seen == [({1}, {2}), ({2}, {2}), ({2}, {2})]
    told = [record for records in run.watcher.records for record in records]
    shares = {record["step"]: record["rewards"]["how_far"] for record in told}
    assert shares == {1: 0.5, 2: 1.0}
    assert "step" not in run.records[0]["columns"]


def test_rewards_that_ask_for_it_know_which_responses_were_cut_off(build, tokenizer) -> None:
    def cut(truncated: list[bool]) -> list[float]:
        return [float(one) for one in truncated]

    isolated = IsolatedReward("tests.rewards.isolated_functions.cut_off", workers=2)
    module = build(rewards=Rewards({"cut": cut, "cut_off": isolated}))
    answers = [
        Response.sampled(torch.tensor([7]), torch.zeros(1), truncated=one)
        for one in (True, False, False, True)
    ]
    prompts = prompts_of({}, {})
    rollout = assemble_rollout(prompts, answers, num_generations=2, pad_id=0)
    collector = Collector(module.engine, module.rewards, tokenizer)
    found = collector.score(prompts, rollout, Sampling(), step=3, phase=contextlib.nullcontext)
    module.rewards.close()
    assert found.rewards.per_function.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    assert found.records[0]["columns"] == {}


def prompts_of(*columns: dict[str, Any]) -> PromptBatch:
    ids = torch.tensor([[5, 6]] * len(columns))
    return PromptBatch(
        input_ids=ids,
        attention_mask=ids > 0,
        prompts=("ab",) * len(columns),
        columns=columns,
    )


def test_penalties_are_for_evaluations(build, train) -> None:
    penalized = Sampling(max_new_tokens=6, frequency_penalty=1.0)
    with pytest.raises(ValueError, match="frequency_penalty makes responses come from another"):
        build(sampling=penalized, allow_truncated_sampling=True)
    evaluated = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    run = train(build(eval_sampling=penalized), **evaluated)
    assert math.isfinite(run.trainer.callback_metrics["eval/score"])


def test_formats_are_for_evaluations_by_engines_that_hold_responses_to_them(build, train) -> None:
    held = Sampling(max_new_tokens=6, structured={"regex": "[a-z]+"})
    with pytest.raises(ValueError, match=r"sampling\.structured rules tokens out"):
        build(sampling=held, allow_truncated_sampling=True)
    with pytest.raises(ValueError, match=r"eval_sampling\.structured: TransformersEngine holds no"):
        train(build(eval_sampling=held))
    for wrong in ({"regexp": "[a-z]+"}, {"regex": None}, {}):
        with pytest.raises(ValueError, match="must have one of choice, grammar, json, regex"):
            Sampling(structured=wrong)


def test_columns_of_the_data_go_before_those_of_the_run(build, tokenizer) -> None:
    seen: list[Any] = []

    def reads(completions: list[str], step: list[str]) -> list[float]:
        seen.extend(step)
        return [0.0] * len(completions)

    module = build(reward=reads)
    prompts = prompts_of({"step": "the data's"})
    answer = Response.sampled(torch.tensor([7]), torch.zeros(1), truncated=True)
    rollout = assemble_rollout(prompts, [answer], num_generations=1, pad_id=0)
    collector = Collector(module.engine, module.rewards, tokenizer)
    collector.score(prompts, rollout, Sampling(), step=3, phase=contextlib.nullcontext)
    assert seen == ["the data's"]


def test_the_reference_of_a_policy_that_starts_from_adapters_has_them_too(
    build, train, tokenizer
) -> None:
    policy = peft.get_peft_model(
        build_language_model(tokenizer),
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    bare = {name: p for name, p in policy.named_parameters() if "lora_B" in name}
    for weight in bare.values():
        torch.nn.init.normal_(weight, std=0.5)
    # an engine that is not exact: the policy's own log-probabilities are computed like those
    options = {"engine": SkewedEngine(spread=0.01), "update": Update(num_iterations=2)}
    run = train(build(policy, optimizer=sgd(1.0), **options), steps=2)
    first, second = run.watcher.experiences
    torch.testing.assert_close(first.ref_logprobs, first.old_logprobs, rtol=0, atol=0)
    assert not torch.equal(second.ref_logprobs, second.old_logprobs)


def test_stored_adapters_are_trained_further_beside_what_they_were(
    build, train, model_folder: str, tokenizer, tmp_path: Path
) -> None:
    trained = peft.get_peft_model(
        build_language_model(tokenizer),
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    trained.save_pretrained(tmp_path / "adapters")
    policy = CausalLM(source=model_folder, lora=LoRA(source=str(tmp_path / "adapters")))
    options = {"engine": SkewedEngine(spread=0.01), "update": Update(num_iterations=2)}
    run = train(build(policy, optimizer=sgd(1.0), **options), steps=2)
    first, second = run.watcher.experiences
    expected = sequence_logprobs(trained.eval(), first).detach()
    torch.testing.assert_close(first.ref_logprobs, expected)
    torch.testing.assert_close(first.old_logprobs, expected)
    later = sequence_logprobs(trained, second).detach()
    torch.testing.assert_close(second.ref_logprobs, later)
    assert not torch.allclose(second.old_logprobs, later)


@pytest.mark.parametrize(("lora", "budget"), [(None, 60), (LoRA(r=4, alpha=8), None)])
def test_packed_rows_train_as_padded_ones(
    build, train, model_folder, lora: LoRA | None, budget: int | None
) -> None:
    runs = []
    for attention in ("sdpa", "eager"):  # rows are packed, or padded
        L.seed_everything(5, verbose=False)  # of the adapters
        policy = CausalLM(source=model_folder, attn_implementation=attention, lora=lora)
        update = Update(micro_batch_tokens=budget, minibatch_size=8)
        runs.append(train(build(policy, update=update, optimizer=sgd(1e-2)), steps=2))
    packed, padded = runs
    assert_same(packed.after, padded.after, rtol=1e-4, atol=1e-6)
    assert packed.logged.keys() == padded.logged.keys()
    for name, value in packed.logged.items():
        if "perf/" not in name:
            assert padded.logged[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert packed.logged["perf/padding_fraction"] == 0
    assert packed.logged["perf/shared_fraction"] > 0.2
    assert padded.logged["perf/shared_fraction"] == 0


def test_what_an_exact_engine_sampled_with_is_not_computed_again(build, train, monkeypatch) -> None:
    passes: list[int] = []
    original = score.sequence_outputs

    def counting(*args: Any, **options: Any) -> Any:
        passes.append(1)
        return original(*args, **options)

    monkeypatch.setattr(score, "sequence_outputs", counting)
    runs = []
    for exact, needed in ((True, 0), (False, 2)):
        passes.clear()
        engine = SkewedEngine(spread=0.0, exact=exact)
        module = build(engine=engine, update=Update(minibatch_size=8), optimizer=sgd(1e-2))
        runs.append(train(module, steps=2))
        assert len(passes) == needed
        # how far engine and trainer are apart is measured all the same
        assert 0 < runs[-1].logged["mismatch/max"] < 1e-4
    assert_same(runs[0].after, runs[1].after, rtol=1e-3, atol=1e-5)
    for name in ("kl/reference", "policy/approx_kl", "train/loss"):
        first, second = (run.logged[name] for run in runs)
        assert first == pytest.approx(second, rel=1e-2, abs=1e-5), name


def test_an_engine_that_only_says_it_is_exact_is_found_out(build, train) -> None:
    wrong = SkewedEngine(spread=0.0, shift=-0.5, exact=True)
    run = train(build(engine=wrong, guard=Guard(max_mismatch=0.4)))
    assert run.logged["mismatch/max"] == pytest.approx(0.5, abs=1e-3)
    assert run.module.skipped_steps == 1
    assert_same(run.before, run.after)


def test_validation_in_between_does_not_change_the_run(build, train) -> None:
    without, between = (
        train(build(), steps=3, **options)
        for options in ({}, {"limit_val_batches": 2, "val_check_interval": 1})
    )
    assert_same(without.after, between.after)


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"ppo", "vapo", "distillation"}))
def test_every_algorithm_trains(build, train, algorithm: str) -> None:
    update = Update(entropy_coef=0.01, minibatch_size=8, num_iterations=2)
    run = train(build(algorithm=algorithm, update=update))
    assert math.isfinite(run.logged["train/loss"])
    assert "policy/entropy" in run.logged
    assert moved(run.before, run.after)


@pytest.mark.parametrize(
    ("options", "dtype", "precision", "culprit"),
    [
        ({"update": Update(minibatch_size=6)}, "float32", "32-true", r"16 responses.* 4 and 8"),
        ({"update": Update(pretraining_coef=0.1)}, "float32", "32-true", "set both, or neither"),
        ({"reference": Reference(kl_coef=0.0)}, "float32", "32-true", r"reference\.kl_coef"),
        ({}, "float32", "bf16-true", "bf16-mixed"),
        ({}, "bfloat16", "32-true", "dtype: float32"),
    ],
)
def test_what_shows_when_a_run_begins_is_refused(
    build, train, model_folder, options: Any, dtype: Any, precision: str, culprit: str
) -> None:
    module = build(CausalLM(source=model_folder, dtype=dtype), **options)
    module.kl_coef = 0.1
    with pytest.raises(ValueError, match=culprit):
        train(module, precision=precision)


def test_an_engine_for_several_processes_is_refused_in_a_run_of_one(build, train) -> None:
    engine = VLLMEngine(tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"size is 2, and the number of training processes is 1:"):
        train(build(engine=engine))


def test_the_seed_is_that_of_seed_everything_unless_it_is_given(build) -> None:
    L.seed_everything(7, verbose=False)
    assert build().seed == 7
    assert build(seed=3).seed == 3


def test_resuming_with_another_kl_coefficient_takes_the_new_one(build) -> None:
    module = build()
    module.kl_coef = 0.2  # as a controller would have moved it
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    for configured, expected in ((0.05, 0.2), (0.01, 0.01)):
        resumed = build(reference=Reference(kl_coef=configured))
        resumed.on_load_checkpoint(checkpoint)
        assert resumed.kl_coef == expected


def test_truncated_sampling_is_allowed_when_asked_for_and_its_mass_is_logged(build, train) -> None:
    sampling = Sampling(max_new_tokens=4, top_k=50)
    run = train(build(sampling=sampling, allow_truncated_sampling=True))
    assert 0 < run.logged["rollout/kept_mass"] < 1


PROMPTS = [{"prompt": f"say {letter}"} for letter in "abcd"]


class SeededByPrompt(EngineWrapper):
    """Draws the same responses to a prompt wherever it stands among others."""

    def generate(
        self, prompts: PromptBatch, *args: Any, seeds: Sequence[int], **options: Any
    ) -> Rollout:
        copies = len(seeds) // len(prompts)
        own = (prompts.input_ids * prompts.attention_mask).sum(dim=1).tolist()
        seeds = [100 * number + copy for number in own for copy in range(copies)]
        return super().generate(prompts, *args, seeds=seeds, **options)


def test_two_rollouts_before_one_update_are_one_batch_of_their_prompts(build, train) -> None:
    def change(rows: list[dict[str, str]], **update: Any) -> dict[str, Tensor]:
        """What one step of gradient descent adds to the weights."""
        module = build(
            engine=SeededByPrompt(TransformersEngine()),
            reference=Reference(kl_coef=0.05),
            optimizer=sgd(1.0),
            update=Update(max_grad_norm=math.inf, **update),
            seed=1,
        )
        data = PromptDataModule(rows, batch_size=len(rows), shuffle=False)
        run = train(module, data=data)
        assert len(run.experience) == 4 * len(rows)
        return {name: new - run.before[name] for name, new in run.after.items()}

    first, second = change(PROMPTS[:2]), change(PROMPTS[2:])
    # of a buffer with both: the gradient of the mean over all of its responses
    for together in (change(PROMPTS), change(PROMPTS, offload=True, micro_batch_tokens=40)):
        for name, value in together.items():
            expected = (first[name] + second[name]) / 2
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-6, msg=name)
    assert any((first[name] - second[name]).abs().max() > 1e-4 for name in first)
