"""Anomalies leave steps out, are counted and dumped, and a dump repeats what happened."""

import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lrlhf.guard.batch_files import pack, unpack
from lrlhf.guard.random_state import random_state, restore_random_state
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.guard.anomalies import IterationSums, RunningLength, judge, measure
from lrlhf.guard.dump import NotADumpError, read_dump, read_state
from lrlhf.modules import (
    PPO,
    RLOO,
    Advantage,
    Critic,
    Guard,
    OptimizerConfig,
    Reference,
    TrainingDivergedError,
    Update,
    replay_dump,
)
from lrlhf.modules.policy.objective import as_experience
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutListener, Sampling
from lrlhf.types import Experience, Rollout
from tests.modules.policy_runs import fit, letters, weights

NAN = float("nan")


def build(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: type[RLOO | PPO] = RLOO,
    **options: Any,
) -> RLOO | PPO:
    settings: dict[str, Any] = {
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": OptimizerConfig(lr=1e-2),
        "reference": Reference(kl_coef=0.05),
        "seed": 3,
    }
    return kind(model, Rewards([letters]), tokenizer=tokenizer, **(settings | options))


class Meddler(RolloutListener, L.Callback):
    """Changes what an iteration is trained on, or the model, just before its update."""

    def __init__(self, meddle: Any, step: int = 0) -> None:
        self.meddle, self.step = meddle, step

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                self.meddle(module, experience)


def dump_of(folder: Path) -> Path:
    (found,) = (folder / "dumps").iterdir()
    return found


def assert_nothing_moved(module: RLOO | PPO, dump: Path) -> None:
    """The run ended with the weights and moments that the step found."""
    state = read_state(dump)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state["state_dict"][name], rtol=0, atol=0, equal_nan=True)
    optimizers = module.trainer.optimizers
    for optimizer, stored in zip(optimizers, state["optimizer_states"], strict=True):
        now = optimizer.state_dict()["state"]
        assert now.keys() == stored["state"].keys()
        for index, moments in now.items():
            for name, value in moments.items():
                assert torch.equal(value, stored["state"][index][name])


def test_a_weight_that_is_not_finite_is_found_and_named(
    language_model, tokenizer, prompts, tmp_path, caplog
) -> None:
    def poison(module: RLOO | PPO, _: Experience) -> None:
        module.policy.model.layers[1].mlp.down_proj.weight[0, 0] = NAN  # type: ignore[union-attr]

    module = build(language_model, tokenizer)
    with caplog.at_level(logging.WARNING, logger="lrlhf"):
        trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[Meddler(poison)])
    dump = dump_of(tmp_path)
    assert dump.name == "step_000000"
    assert_nothing_moved(module, dump)
    assert not trainer.optimizers[0].state
    assert trainer.logged_metrics["train/skipped_steps"] == 1
    assert trainer.logged_metrics["guard/loss"] == 1
    (anomaly,) = read_dump(dump).anomalies
    assert anomaly.kind == "loss"
    assert "first in the policy's log-probabilities of row" in anomaly.text
    assert "whose prompt is 'say " in anomaly.text
    (message,) = [record.getMessage() for record in caplog.records if "left out" in record.message]
    assert f"lrlhf replay {dump}" in message
    again = replay_dump(build(language_model, tokenizer), dump)
    assert again.reproduced
    assert again.weights == ("policy.model.layers.1.mlp.down_proj.weight",)
    assert again.ranks[0].first_module == "policy.model.layers.1.mlp.down_proj"
    assert again.ranks[0].gradients
    assert len(again.ranks[0].rows) == 8


def test_a_healthy_model_does_not_reproduce_what_a_broken_gradient_did(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer)
    weight = language_model.model.layers[0].mlp.down_proj.weight
    hook = weight.register_hook(lambda gradient: gradient * NAN)
    fit(module, prompts, tmp_path, steps=1)
    dump = dump_of(tmp_path)
    assert_nothing_moved(module, dump)
    assert [one.kind for one in read_dump(dump).anomalies] == ["gradient"]
    broken = replay_dump(module, dump)
    assert broken.reproduced
    assert broken.ranks[0].gradients == ("policy.model.layers.0.mlp.down_proj.weight",)
    assert broken.ranks[0].first_module == ""
    hook.remove()
    assert not replay_dump(module, dump).reproduced


@pytest.mark.parametrize("loss", ["token_clip", "sequence_clip"])
def test_a_ratio_explosion_leaves_out_the_step_and_its_replay_measures_the_same(
    loss: str, language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model,
        tokenizer,
        optimizer=OptimizerConfig(lr=0.1),
        update=Update(loss=loss, num_iterations=2),
        guard=Guard(max_ratio=1.5),
    )
    before = weights(module)
    fit(module, prompts, tmp_path, steps=1)
    dump = dump_of(tmp_path)
    assert_nothing_moved(module, dump)
    assert any(not torch.equal(before[name], value) for name, value in weights(module).items())
    assert module.skipped_steps == 1
    (then,) = read_dump(dump).anomalies
    assert then.kind == "ratio"
    assert then.value is not None
    assert then.value > math.log(1.5)
    again = replay_dump(module, dump)
    assert again.reproduced
    assert again.found[0].value == then.value
    assert max(row["log_ratio"] for row in again.ranks[0].rows) == then.value


def test_default_limits_let_a_fast_learner_pass(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model,
        tokenizer,
        update=Update(loss="token_clip", num_iterations=4, minibatch_size=4),
    )
    fit(module, prompts, tmp_path, steps=3)
    assert module.skipped_steps == 0
    assert not (tmp_path / "dumps").exists()


def test_a_kl_explosion_leaves_out_the_iteration(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    def depart(module: RLOO | PPO, experience: Experience) -> None:
        head = module.policy.model.layers[0].mlp.down_proj.weight  # type: ignore[union-attr]
        head.mul_(-3)
        del experience

    module = build(language_model, tokenizer, guard=Guard(max_kl=0.5))
    before_update: list[dict[str, Any]] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            before_update.append(weights(pl_module))

    fit(module, prompts, tmp_path, steps=2, callbacks=[Meddler(depart), Keep()])
    assert module.step_guard.kinds == {"kl": 1}
    assert module.skipped_steps == 1
    dump = dump_of(tmp_path)
    assert dump.name == "step_000001"
    assert_nothing_moved(module, dump)
    for name, value in before_update[1].items():
        assert torch.equal(value, module.state_dict()[name])
    (then,) = read_dump(dump).anomalies
    again = replay_dump(module, dump)
    assert again.reproduced
    assert again.found[0].value == then.value
    total = sum(row["kl"] for row in again.ranks[0].rows)
    assert total / 8 == pytest.approx(then.value)


def test_a_length_explosion_leaves_out_the_iteration(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, guard=Guard(max_length_factor=2.0))
    module.step_guard.lengths.load_state_dict({"iterations": 5, "mean": 1.5})
    before = weights(module)
    fit(module, prompts, tmp_path, steps=1)
    assert module.step_guard.kinds == {"length": 1}
    assert module.step_guard.lengths.mean == 1.5  # what is left out is no example
    for name, value in weights(module).items():
        assert torch.equal(value, before[name])
    assert replay_dump(module, dump_of(tmp_path)).reproduced


def test_an_infinite_score_leaves_out_the_iteration(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer)
    collect = module._collector.collect

    def collect_infinite(*args: Any, **options: Any) -> Any:
        collected = collect(*args, **options)
        collected.rewards.scores[3] = float("inf")
        return collected

    module._collector.collect = collect_infinite  # type: ignore[method-assign]
    before = weights(module)
    fit(module, prompts, tmp_path, steps=1)
    for name, value in weights(module).items():
        assert torch.equal(value, before[name])
    dump = dump_of(tmp_path)
    texts = {one.kind: one.text for one in read_dump(dump).anomalies}
    assert "first in the scores of row 3" in texts["scores"]
    assert replay_dump(module, dump).reproduced


def test_ppo_dumps_what_its_critic_stumbled_over(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    def poison(module: RLOO | PPO, experience: Experience) -> None:
        assert experience.returns is not None
        assert isinstance(module, PPO)
        assert module.value_head is not None
        next(module.value_head.parameters()).fill_(NAN)

    module = build(
        language_model,
        tokenizer,
        PPO,
        critic=Critic(),
        advantage=Advantage(estimator="gae"),
        update=Update(loss="token_clip", num_minibatches=1),
    )
    fit(module, prompts, tmp_path, steps=1, callbacks=[Meddler(poison)])
    assert module.skipped_steps == 1
    dump = dump_of(tmp_path)
    assert_nothing_moved(module, dump)
    assert read_dump(dump).ranks[0].stage == "joint"
    again = replay_dump(module, dump)
    assert again.reproduced
    assert again.ranks[0].first_module.startswith("value_head")


def test_the_quota_names_the_kinds_and_survives_a_resume(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    def broken(model: PreTrainedModel) -> RLOO | PPO:
        return build(model, tokenizer, guard=Guard(max_skipped=2, dump=1))

    language_model.model.layers[0].mlp.down_proj.weight.register_hook(lambda g: g * NAN)
    first = broken(language_model)
    trainer = fit(first, prompts, tmp_path, steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert len(list((tmp_path / "dumps").iterdir())) == 1
    again = broken(language_model)
    with pytest.raises(TrainingDivergedError, match=r"3 optimizer steps .*gradient 3.*is 2"):
        fit(again, prompts, tmp_path, steps=4, ckpt_path=str(tmp_path / "two.ckpt"))
    assert len(list((tmp_path / "dumps").iterdir())) == 1


def test_a_full_disk_ends_the_dump_and_not_the_run(
    language_model, tokenizer, prompts, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    language_model.model.layers[0].mlp.down_proj.weight.register_hook(lambda g: g * NAN)
    module = build(language_model, tokenizer)
    with caplog.at_level(logging.WARNING, logger="lrlhf"):
        trainer = fit(module, prompts, tmp_path, steps=1)
    assert trainer.global_step == 1
    assert list((tmp_path / "dumps").iterdir()) == []
    assert "could not be written" in caplog.text
    assert "0 MiB left" in caplog.text


def test_what_is_no_dump_says_so(language_model, tokenizer, tmp_path) -> None:
    module = build(language_model, tokenizer)
    with pytest.raises(NotADumpError, match="there is no such folder"):
        replay_dump(module, tmp_path / "nowhere")
    (tmp_path / "anomaly.json").write_text('{"format": "another"}')
    with pytest.raises(NotADumpError, match="its format is 'another'"):
        replay_dump(module, tmp_path)


# ---- parts


def experience(rows: int = 2, **changes: Any) -> Experience:
    """Three prompt and two response tokens per row; everything 0."""
    shape = (rows, 5)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, 3:] = True
    rollout = Rollout(
        input_ids=torch.arange(5).expand(shape).contiguous(),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        response_mask=mask,
        sampling_logprobs=torch.zeros(shape),
        group_ids=torch.zeros(rows, dtype=torch.long),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )
    zeros = torch.zeros(shape)
    made = as_experience(
        rollout, scores=torch.zeros(rows), old_logprobs=zeros, ref_logprobs=zeros.clone()
    )
    return replace(made, **changes)


def filled(value: float, *, column: int = 3) -> torch.Tensor:
    tensor = torch.zeros(2, 5)
    tensor[1, column] = value
    return tensor


def kinds(batch: Experience, guard: Guard = Guard(), mean_length: float | None = None) -> set[str]:  # noqa: B008
    lengths = RunningLength()
    if mean_length is not None:
        lengths.load_state_dict({"iterations": 5, "mean": mean_length})
    sums = IterationSums(*measure(batch, replayed=False).tolist())
    return {one.kind for one in judge(sums, guard, lengths)}


def test_each_measurement_finds_its_own_kind_and_no_other() -> None:
    assert kinds(experience()) == set()
    assert kinds(experience(scores=torch.tensor([0.0, NAN]))) == set()  # cannot be scored
    assert kinds(experience(scores=torch.tensor([0.0, -math.inf]))) == {"scores"}
    assert kinds(experience(old_logprobs=filled(-math.inf))) == {"logprobs"}
    assert kinds(experience(ref_logprobs=filled(NAN))) == {"logprobs"}
    assert kinds(experience(ref_logprobs=filled(NAN, column=0))) == set()  # of the prompt
    assert kinds(experience(advantages=filled(NAN))) == {"advantages"}
    assert kinds(experience(values=filled(math.inf))) == {"values"}
    apart = experience(ref_logprobs=filled(-6.0))  # 6 nats over 2 responses
    assert kinds(apart, Guard(max_kl=3.1)) == set()
    assert kinds(apart, Guard(max_kl=2.9)) == {"kl"}
    other = experience(sampling_logprobs=filled(-4.0))  # 4 nats over 4 tokens
    assert kinds(other, Guard(max_mismatch=1.1)) == set()
    assert kinds(other, Guard(max_mismatch=0.9)) == {"mismatch"}
    long = Guard(max_length_factor=2.0)
    assert kinds(experience(), long) == set()  # too early to say
    assert kinds(experience(), long, mean_length=1.1) == set()
    assert kinds(experience(), long, mean_length=0.9) == {"length"}


def test_a_running_length_is_a_mean_that_forgets() -> None:
    lengths = RunningLength()
    for length in (2.0, 4.0, 6.0):
        lengths.update(length)
    assert lengths.mean == pytest.approx(4.0)
    for _ in range(60):
        lengths.update(100.0)
    assert lengths.mean == pytest.approx(100.0, rel=0.01)


def test_a_batch_is_the_same_after_a_file(tmp_path) -> None:
    batch = experience(advantages=filled(NAN))
    torch.save(pack(batch), tmp_path / "batch.pt")
    again = unpack(torch.load(tmp_path / "batch.pt", weights_only=True))
    assert isinstance(again, Experience)
    torch.testing.assert_close(again.advantages, batch.advantages, equal_nan=True)
    assert torch.equal(again.response_mask, batch.response_mask)
    assert again.values is None
    with pytest.raises(ValueError, match=r"'os\.system'"):
        unpack({"kind": "os.system", "fields": {}})


def test_random_numbers_go_on_from_a_file(tmp_path) -> None:
    import random  # noqa: PLC0415  its own test's business

    import numpy as np  # noqa: PLC0415

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    torch.save(random_state(torch.device("cpu")), tmp_path / "state.pt")
    first = draw()
    assert draw() != first
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    restore_random_state(state, torch.device("cpu"))
    assert draw() == first


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"max_ratio": 1.0}, "guard.max_ratio is 1.0; it must be above 1"),
        ({"max_kl": 0.0}, "guard.max_kl"),
        ({"max_length_factor": 0.5}, "guard.max_length_factor"),
        ({"max_mismatch": -1.0}, "guard.max_mismatch"),
        ({"max_skipped": -1}, "guard.max_skipped"),
        ({"window": 0}, "guard.window"),
        ({"dump": -1}, "guard.dump"),
    ],
)
def test_a_limit_out_of_range_names_itself(settings: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        Guard(**settings)


def test_two_quotas_that_differ_are_refused(language_model, tokenizer) -> None:
    with pytest.raises(ValueError, match=r"max_skipped_steps is 5 and guard.max_skipped is 3"):
        build(
            language_model,
            tokenizer,
            guard=Guard(max_skipped=3),
            update=Update(max_skipped_steps=5),
        )
