"""The guard of a reward model, and of what is shown images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode

from lrlhf.guard.dump import read_dump, read_state
from lrlhf.modules import Guard, OptimizerConfig, RewardModel, TrainingDivergedError, replay_dump
from lrlhf.types import PreferenceBatch
from tests.modules.reward_runs import INF, NAN, ONE_HEAD, fit_pairs, flat_weights
from tests.modules.test_vision_training import ask, policy, questions  # noqa: F401  fixtures
from tests.vlms import build_vlm


def nan_gradient(chosen: Tensor, rejected: Tensor) -> Tensor:
    """A finite loss, 0, whose gradient is infinity times zero."""
    return ((chosen - rejected) * 0).abs().sqrt()


@pytest.mark.parametrize("cause", ["loss", "gradient"])
def test_what_is_not_finite_leaves_out_the_step(cause, reward_model, collate, tmp_path) -> None:
    options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=0.1, weight_decay=0.5)}
    if cause == "gradient":
        options["loss"] = f"{__name__}.nan_gradient"
    module = reward_model(guard=Guard(dump=0), **options)
    before = flat_weights(module)
    batch = collate(ONE_HEAD[:2], margin=[INF if cause == "loss" else 0.0, NAN])
    run = fit_pairs(module, [batch], tmp_path)
    assert torch.equal(flat_weights(module), before)
    assert module.step_guard.kinds == {cause: 1}
    assert run.callback_metrics["train/skipped_steps"] == 1


def test_one_bad_micro_batch_skips_the_whole_step_and_training_goes_on(
    reward_model, collate, tmp_path
) -> None:
    module, clean = reward_model(), reward_model()
    good = collate(ONE_HEAD[4:8])
    bad = collate(ONE_HEAD[:2], margin=[INF, 0.0])
    fit_pairs(module, [bad, good, good, good], tmp_path, accumulate_grad_batches=2)
    fit_pairs(clean, [good, good], tmp_path, accumulate_grad_batches=2)
    assert module.step_guard.skipped == 1
    torch.testing.assert_close(flat_weights(module), flat_weights(clean))


def test_the_quota_and_its_window_survive_a_resume(reward_model, collate, tmp_path) -> None:
    bad = collate(ONE_HEAD[:2], margin=[INF, 0.0])
    guard = Guard(max_skipped=1, window=2, dump=0)
    run = fit_pairs(reward_model(guard=guard), [bad], tmp_path)
    run.save_checkpoint(tmp_path / "one.ckpt")
    again, options = reward_model(guard=guard), {"max_epochs": 2, "ckpt": tmp_path / "one.ckpt"}
    with pytest.raises(TrainingDivergedError, match=r"2 optimizer steps .* within 2 steps"):
        fit_pairs(again, [bad], tmp_path, **options)


def test_a_dump_repeats_all_micro_batches_of_a_step(reward_model, collate, tmp_path) -> None:
    def build() -> RewardModel:
        module: RewardModel = reward_model()
        mlp = module.network.get_submodule("scorer.backbone.layers.0.mlp")
        mlp.register_forward_hook(lambda part, _, out: dropout(out, 0.5, part.training))
        return module

    good = collate([("abc", "de", [1.0]), ("f", "gh", [1.0])], margin=[0.0, NAN])
    bad = collate([("ij", "klm", [1.0]), ("no", "p", [1.0])], margin=[NAN, INF])
    module = build()
    fit_pairs(module, [good, good, good, bad], tmp_path, accumulate_grad_batches=2)
    (dump,) = (tmp_path / "dumps").iterdir()
    assert dump.name == "step_000002"  # the first step, of good pairs, was taken
    state = read_state(dump)["state_dict"]
    for name, value in module.network.state_dict(prefix="network.").items():
        assert torch.equal(value, state[name])
    (anomaly,) = read_dump(dump).anomalies
    assert anomaly.kind == "loss"
    assert "the margin of pair 3 is inf, which begins 'no'" in anomaly.text
    then = [json.loads(line) for line in (dump / "records.jsonl").read_text().splitlines()]
    again = replay_dump(build(), dump)
    assert again.reproduced
    rows = again.ranks[0].rows
    assert [row["candidate0"] for row in rows] == ["abc", "f", "ij", "no"]
    assert [row["info"]["row"] for row in rows] == [0, 1, 0, 1]
    # with the same dropout
    assert [row["scores0"] for row in rows] == [row["scores0"] for row in then]


class CopiesToHost(TorchFunctionMode, L.Callback):
    """Counts the entries of tensors that come to the CPU while a batch is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[int] = []
        self.computing = False
        """The network itself asks where its rows end."""
        self.kept: list[PreferenceBatch] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = [*args[1:], *(kwargs or {}).values()]
        moved = func is Tensor.to and any(str(place) == "cpu" for place in places)
        if not self.computing and (moved or func in (Tensor.cpu, Tensor.numpy, Tensor.tolist)):
            self.entries.append(args[0].numel())
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self.__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.kept += [one.batch for one in pl_module._step.micro_batches]

    def on_train_batch_end(self, *_: Any) -> None:
        self.__exit__(None, None, None)


def test_a_healthy_step_copies_nothing_to_the_host(reward_model, collate, tmp_path) -> None:
    hosts = [collate(ONE_HEAD[:5]), collate(ONE_HEAD[5:])]
    # as if they were copies on a device
    batches = [
        replace(collate(rows), host=host)
        for rows, host in zip((ONE_HEAD[:5], ONE_HEAD[5:]), hosts, strict=True)
    ]
    module, seen = reward_model(), CopiesToHost()
    for register, computing in (
        (module.network.register_forward_pre_hook, True),
        (module.network.register_forward_hook, False),
    ):
        register(lambda *_, computing=computing: setattr(seen, "computing", computing))
    count = module._costs

    def costs() -> Any:  # reads the batches in main memory, see below
        seen.computing = True
        counted = count()
        seen.computing = False
        return counted

    module._costs = costs
    fit_pairs(module, batches, tmp_path, accumulate_grad_batches=2, callbacks=[seen])
    # the very tensors in main memory, no copies of them, and nothing that lies on the device
    assert [one.candidate0.input_ids.data_ptr() for one in seen.kept] == [
        host.candidate0.input_ids.data_ptr() for host in hosts
    ]
    assert module._step.micro_batches == []
    # numbers of the mean, the norm and the logs
    assert max(seen.entries) <= 2


def test_what_was_shown_is_shown_again(ask, tmp_path: Path) -> None:  # noqa: F811
    vlm = build_vlm("qwen2_vl")
    module = policy(vlm)
    weight = next(p for name, p in vlm.model.named_parameters() if "visual" in name)
    weight.register_hook(lambda gradient: gradient * NAN)
    ask(module, batch_size=4)
    (dump,) = (tmp_path / "dumps").iterdir()
    again = replay_dump(module, dump)
    assert again.reproduced
    assert len(again.ranks[0].gradients) == 1
