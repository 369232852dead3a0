"""Anomalies of a policy leave steps out and are dumped, and a dump repeats what happened."""

import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.nn.functional import dropout

from lrlhf.guard.dump import NotADumpError, read_dump, read_state
from lrlhf.modules import PPO, RLOO, Critic, Guard, OptimizerConfig, Update, replay_dump
from lrlhf.rollout import RolloutListener
from lrlhf.types import Experience
from tests.modules.policy_runs import assert_same

NAN = float("nan")


@pytest.fixture
def make(build):
    """Builds a quick learner; options of its policy are those of `build`."""
    defaults = {"num_generations": 2, "optimizer": OptimizerConfig(lr=1e-2), "seed": 3}
    return lambda *args, **options: build(*args, **(defaults | options))


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


def assert_nothing_moved(module: RLOO | PPO, dump: Path, steps: int = 0) -> None:
    """The run ended with the weights that the step found, after so many optimizer steps."""
    state = read_state(dump)["state_dict"]
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0, equal_nan=True)
    for optimizer in module.trainer.optimizers:
        assert {int(one["step"]) for one in optimizer.state.values()} == {*[steps] * (steps > 0)}


def down_proj(module: RLOO | PPO, layer: int) -> torch.Tensor:
    return module.policy.model.layers[layer].mlp.down_proj.weight  # type: ignore[union-attr,no-any-return]


def poison_policy(module: RLOO | PPO, _: Experience) -> None:
    down_proj(module, 1)[0, 0] = NAN


def poison_critic(module: Any, _: Experience) -> None:
    next(module.value_head.parameters()).fill_(NAN)


def test_a_weight_that_is_not_finite_is_found_and_named(make, train, tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="lrlhf"):
        run = train(make(), callbacks=[Meddler(poison_policy)])
    dump = dump_of(tmp_path)
    assert dump.name == "step_000001"
    assert_nothing_moved(run.module, dump)
    assert run.logged["train/skipped_steps"] == run.logged["guard/loss"] == 1
    (anomaly,) = read_dump(dump).anomalies
    assert anomaly.kind == "loss"
    assert "first in the policy's log-probabilities of row" in anomaly.text
    assert "whose prompt is 'say " in anomaly.text
    (message,) = [record.getMessage() for record in caplog.records if "left out" in record.message]
    assert f"lrlhf replay {dump}" in message
    again = replay_dump(make(), dump)
    assert again.reproduced
    assert again.weights == ("policy.model.layers.1.mlp.down_proj.weight",)
    assert again.ranks[0].first_module == "policy.model.layers.1.mlp.down_proj"
    assert again.ranks[0].gradients
    assert len(again.ranks[0].rows) == 8


def test_a_healthy_model_does_not_reproduce_what_a_broken_gradient_did(
    make, train, tmp_path
) -> None:
    module = make()
    hook = down_proj(module, 0).register_hook(lambda gradient: gradient * NAN)
    train(module)
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
    loss: str, make, train, tmp_path
) -> None:
    module = make(
        optimizer=OptimizerConfig(lr=0.1),
        update=Update(loss=loss, num_iterations=2),
        guard=Guard(max_ratio=1.5),
    )
    if loss == "token_clip":  # with dropout, which must be that of the step again
        mlp = module.policy.model.layers[0].mlp
        mlp.register_forward_hook(lambda part, _, out: dropout(out, 0.1, part.training))
    train(module)
    dump = dump_of(tmp_path)
    if loss == "sequence_clip":
        assert_nothing_moved(module, dump, steps=1)
    (then, *_) = read_dump(dump).anomalies
    assert then.kind == "ratio"
    assert then.value is not None
    assert then.value > math.log(1.5)
    again = replay_dump(module, dump)
    assert again.reproduced
    assert again.anomalies[0].value == then.value
    assert max(row["log_ratio"] for row in again.ranks[0].rows) == then.value


def test_default_limits_let_a_fast_learner_pass(make, train, tmp_path) -> None:
    update = Update(loss="token_clip", num_iterations=4, minibatch_size=4)
    assert train(make(update=update), steps=3).module.step_guard.skipped == 0
    assert not (tmp_path / "dumps").exists()


def too_far(module: RLOO | PPO) -> None:
    down_proj(module, 0).data.mul_(-3)


def too_long(module: RLOO | PPO) -> None:
    module.step_guard.lengths.load_state_dict({"iterations": 5, "mean": 1.5})


def infinite_score(module: RLOO | PPO) -> None:
    collect = module.sampler._collector.collect

    def collect_infinite(*args: Any, **options: Any) -> Any:
        collected = collect(*args, **options)
        collected.rewards.scores[3] = float("inf")
        return collected

    module.sampler._collector.collect = collect_infinite  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "limits", "spoil"),
    [
        ("kl", {"max_kl": 0.5}, too_far),
        ("length", {"max_length_factor": 2.0}, too_long),
        ("scores", {}, infinite_score),
    ],
)
def test_what_shows_before_the_update_leaves_out_the_iteration(
    kind: str, limits: dict[str, float], spoil: Any, make, train, tmp_path
) -> None:
    module = make(guard=Guard(**limits))
    spoil(module)
    run = train(module)
    assert_same(run.before, run.after)
    assert module.step_guard.skipped == module.step_guard.kinds[kind] == 1
    assert module.step_guard.lengths.mean in (0.0, 1.5)  # what is left out is no example
    dump = dump_of(tmp_path)
    assert_nothing_moved(module, dump)
    then = {one.kind: one for one in read_dump(dump).anomalies}
    again = replay_dump(module, dump)
    assert again.reproduced
    assert {one.kind: one.value for one in again.anomalies} == {k: v.value for k, v in then.items()}
    if kind == "scores":
        assert "first in the scores of row 3" in then[kind].text
    if kind == "kl":
        assert sum(row["kl"] for row in again.ranks[0].rows) / 8 == pytest.approx(then[kind].value)


def test_ppo_dumps_what_its_critic_stumbled_over(make, train, tmp_path) -> None:
    update = Update(loss="token_clip", num_minibatches=1)
    module = make(kind=PPO, critic=Critic(), update=update)
    train(module, callbacks=[Meddler(poison_critic)])
    assert module.step_guard.skipped == 1
    dump = dump_of(tmp_path)
    assert_nothing_moved(module, dump)
    assert read_dump(dump).bundles[0].stage == "joint"
    again = replay_dump(module, dump)
    assert again.reproduced
    assert again.ranks[0].first_module.startswith("value_head")
    with pytest.raises(ValueError, match="is of a step 'joint', and RLOO has iteration, policy"):
        replay_dump(make(), dump)


def test_a_full_disk_ends_the_dump_and_not_the_run(
    make, train, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    module = make()
    down_proj(module, 0).register_hook(lambda gradient: gradient * NAN)
    with caplog.at_level(logging.WARNING, logger="lrlhf"):
        assert train(module).trainer.global_step == 1
    assert list((tmp_path / "dumps").iterdir()) == []
    assert "could not be written" in caplog.text
    assert "0 GB are free" in caplog.text


def test_what_is_no_dump_says_so(make, tmp_path) -> None:
    with pytest.raises(NotADumpError, match="there is no such folder"):
        replay_dump(make(), tmp_path / "nowhere")
    (tmp_path / "anomaly.json").write_text('{"format": "another"}')
    with pytest.raises(NotADumpError, match="its format is 'another'"):
        replay_dump(make(), tmp_path)
