"""What RLOO and PPO make of settings that are left out or impossible, from Python and from YAML."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lrlhf.functional import ALGORITHMS, POLICY_LOSSES
from lrlhf.models import CausalLM, LoRA, ValueModel
from lrlhf.modules import (
    PPO,
    RLOO,
    Advantage,
    Critic,
    DynamicSampling,
    ImportanceSampling,
    Reference,
    Update,
)
from lrlhf.modules.policy.settings import assemble_algorithm
from lrlhf.modules.policy_module import PolicyModule, PolicyOptions
from lrlhf.rewards import JudgeReward, Rewards
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import letters
from tests.modules.test_policy_objective import assembled

LETTERS = "tests.modules.policy_runs.letters"
GROUPS = {"advantage": Advantage, "update": Update}
OWN = "tests.functional.test_estimators.mine"
MINE = replace(ALGORITHMS["grpo"], name="mine", kl_in="reward", kl_coef=0.5)


def from_yaml(kind: type[RLOO | PPO], folder: Path, options: dict[str, Any]) -> RLOO | PPO:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "model")
    rewards = {"class_path": "lrlhf.rewards.Rewards", "init_args": {"functions": [LETTERS]}}
    config = parser.parse_object({"model": {"policy": str(folder), "rewards": rewards, **options}})
    module: RLOO | PPO = parser.instantiate(config).model
    return module


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PPO, {}),
        (PPO, {"update": {"loss": "dr_grpo", "entropy_coef": 0.1}}),
        (PPO, {"update": {"high_entropy_fraction": 0.5}}),
        (PPO, {"advantage": {"scale_rewards": "std", "options": {"lam": 1.0}}}),
        (PPO, {"algorithm": f"{__name__}.MINE", "critic": None}),
        (RLOO, {}),
        (RLOO, {"advantage": {"estimator": "grpo"}}),
        (RLOO, {"algorithm": "dapo"}),
    ],
)
def test_settings_mean_the_same_from_python_and_from_yaml(
    model_folder, kind: type[RLOO | PPO], options: dict[str, Any]
) -> None:
    groups: dict[str, Any] = {
        name: GROUPS[name](**given) if name in GROUPS else given for name, given in options.items()
    }
    from_python = kind(str(model_folder), Rewards([letters]), **groups)
    assert from_python.settings == from_yaml(kind, model_folder, options).settings


@pytest.mark.parametrize(
    ("default", "estimator", "update", "expected"),
    [
        ("rloo", None, {}, ("sequence_clip", "sequence_mean")),
        ("rloo", "rloo", {"loss": "token_clip"}, ("token_clip", "sequence_mean")),
        ("rloo", "grpo", {}, ("token_clip", "sequence_mean")),
        ("rloo", "grpo", {"aggregate": "constant"}, ("token_clip", "constant")),
        ("rloo", "dr_grpo", {}, ("dr_grpo", "constant")),
        ("rloo", "dr_grpo", {"loss": "sequence_clip"}, ("sequence_clip", "sequence_mean")),
        ("rloo", "cpgd", {}, ("cpgd", "sequence_mean")),
        ("rloo", "reinforce_baseline", {}, ("token_clip", "token_mean")),
        ("ppo", None, {}, ("token_clip", "token_mean")),
        ("ppo", None, {"loss": "token_clip", "aggregate": "constant"}, ("token_clip", "constant")),
        ("ppo", None, {"loss": "dr_grpo"}, ("dr_grpo", "constant")),
        ("ppo", "rloo", {}, ("sequence_clip", "sequence_mean")),
    ],
)
def test_the_loss_is_that_of_the_estimators_paper_unless_it_is_named(
    default: str, estimator: str | None, update: dict[str, Any], expected: tuple[str, str]
) -> None:
    advantage = Advantage() if estimator is None else Advantage(estimator=estimator)
    chosen = assemble_algorithm(None, default=default, advantage=advantage, update=Update(**update))
    assert (chosen.loss.name, chosen.loss.aggregate) == expected


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"aggregate": "token_mean"}, "'sequence_clip' has one value per response"),
        ({"high_entropy_fraction": 0.5}, "update.high_entropy_fraction is about tokens"),
        ({"options": {"ratio_max": 2.0}}, r"update\.options \(loss sequence_clip\) 'ratio_max'"),
    ],
)
def test_options_are_checked_against_the_loss_that_is_chosen(
    build, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(update=Update(**options))
    module = build(advantage=Advantage(estimator="grpo"), update=Update(loss="cispo", **options))
    loss = module.settings.algorithm.loss
    assert loss.name == "cispo"
    assert options.get("options", {}).items() <= loss.options.items()


@pytest.mark.parametrize(
    ("options", "placement", "coef"),
    [
        ({"algorithm": "grpo"}, "loss", 0.05),
        ({"algorithm": "dapo"}, "loss", 0.0),
        ({"algorithm": "dapo", "reference": Reference(kl_coef=0.1)}, "loss", 0.1),
        ({"algorithm": "grpo", "reference": Reference(placement="reward")}, "reward", 0.05),
        ({"algorithm": "rloo", "advantage": Advantage(estimator="grpo")}, "reward", 0.05),
        ({"advantage": Advantage(estimator=OWN)}, "loss", 0.05),
        ({"algorithm": MINE}, "reward", 0.5),
    ],
)
def test_where_the_penalty_goes_and_how_strong_it_is(
    build, options: dict[str, Any], placement: str, coef: float
) -> None:
    module = build(**({"reference": Reference()} | options))
    assert module.settings.algorithm.kl_in == placement
    assert module.settings.kl_coef == module.kl_coef == coef
    assert (module.reference is None) == (coef == 0)


@pytest.mark.parametrize(
    ("algorithm", "estimator", "extra"),
    [("rloo", "remax", {"greedy": {"temperature": 0.0}}), ("remax", "grpo", {})],
)
def test_extra_samples_follow_the_advantages(
    algorithm: str, estimator: str, extra: dict[str, Any]
) -> None:
    given = Advantage(estimator=estimator)
    chosen = assemble_algorithm(algorithm, default="rloo", advantage=given, update=Update())
    assert chosen.extra_samples == extra


@pytest.mark.parametrize(
    ("kind", "options", "culprit"),
    [
        (RLOO, {"num_generations": 1}, "num_generations is 1; the nearest value is 2"),
        (RLOO, {"sampling": Sampling(temperature=0.0)}, "sampling.temperature"),
        (
            RLOO,
            {"advantage": Advantage(estimator="reinforce"), "update": Update(loss="gspo")},
            "update.loss",
        ),
        (
            RLOO,
            {
                "advantage": Advantage(estimator="reinforce", options={"gamma": 0.9}),
                "update": Update(loss="gspo"),
                "reference": Reference(kl_coef=0.0),
            },
            "gamma below 1",
        ),
        (
            RLOO,
            {"advantage": Advantage(estimator="grpo"), "reference": Reference(kl_estimator="k1")},
            "kl_estimator is k1 and the penalty is in the loss.*would add noise",
        ),
        (
            RLOO,
            {"advantage": Advantage(estimator=OWN), "reference": Reference(placement="reward")},
            r"not known to subtract inputs\.kl",
        ),
        (RLOO, {"advantage": Advantage(estimator="gae")}, r"use lrlhf\.modules\.PPO"),
        (
            RLOO,
            {"algorithm": "remax", "max_staleness": 1},
            "samples greedy beside them with",
        ),
        (RLOO, {"algorithm": "grop"}, "did you mean 'grpo'"),
        (PPO, {"critic": None}, "needs a critic, and critic is null"),
        (PPO, {"advantage": Advantage(estimator="rloo")}, "set critic: null"),
        (PPO, {"update": Update(loss="sequence_clip")}, "gives one per token"),
        (RLOO, {"algorithm": "rloo_turn", "update": Update(loss="gspo")}, "gives one per turn"),
        (RLOO, {"advantage": Advantage(truncated="bootstrap")}, "'rloo' uses no values: take ppo"),
        (PPO, {"update": Update(router_loss_coef=0.1)}, "router_loss_coef"),
        (
            PPO,
            {"num_generations": 1, "dynamic_sampling": DynamicSampling(prompts=1)},
            "nearest value",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    build, kind: type[RLOO | PPO], options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(kind=kind, **({"reference": Reference()} | options))


def test_an_adapter_refuses_a_reference_that_moves(build, model_folder) -> None:
    spec = CausalLM(source=model_folder, lora=LoRA(r=4, alpha=8))
    with pytest.raises(ValueError, match=r"reference\.sync_every"):
        build(spec, reference=Reference(sync_every=2))


@pytest.mark.parametrize(("kind", "algorithm"), [(RLOO, "reinforce"), (PPO, "ppo")])
def test_a_reward_that_compares_responses_wants_several(
    kind: type[RLOO | PPO], algorithm: str, build: Callable[..., Any]
) -> None:
    def make(num_generations: int, **judge: Any) -> Any:
        rewards = Rewards({"wise": JudgeReward("http://127.0.0.1:1/v1", **judge)})
        return build(
            kind=kind, rewards=rewards, algorithm=algorithm, num_generations=num_generations
        )

    for mode in ("pairwise", "listwise"):
        with pytest.raises(ValueError, match="num_generations is 1, and the reward 'wise' comp"):
            make(1, mode=mode)
        make(2, mode=mode)
    make(1)
    make(1, mode="pairwise", reference_column="gold")


def test_a_judge_of_several_responses_is_not_asked_about_lone_ones(
    build: Callable[..., Any],
) -> None:
    judge = {"wise": JudgeReward("http://127.0.0.1:1/v1", mode="pairwise")}
    with pytest.raises(
        ValueError, match=r"each prompt \(greedy\) scored alone, and the reward 'wi"
    ):
        build(rewards=Rewards(judge), algorithm="remax", num_generations=2)


@pytest.mark.parametrize(
    ("make", "options", "culprit"),
    [
        (Critic, {"value_clip_range": 0.0}, "value_clip_range"),
        (Critic, {"max_grad_norm": 0.0}, "max_grad_norm"),
        (Critic, {"freeze_steps": -1}, "freeze_steps"),
        (Critic, {"model": "x", "backbone_coef": 0.5}, "backbone_coef"),
        (Critic, {"model": ValueModel(source="x"), "head": "mlp"}, "critic.head"),
        (Update, {"high_entropy_fraction": 0.0, "loss": "dapo"}, "high_entropy_fraction"),
        (Update, {"pretraining_coef": -1.0}, "pretraining_coef"),
        (Update, {"entropy_coef": -0.1}, "entropy_coef"),
        (Update, {"num_iterations": 0}, "update.num_iterations"),
        (Update, {"micro_batch_tokens": 0}, "update.micro_batch_tokens"),
        (Update, {"max_grad_norm": 0.0}, "update.max_grad_norm"),
        (Advantage, {"clip": 0.0}, "advantage.clip"),
        (Advantage, {"reward_clip_range": (1.0, -1.0)}, "reward_clip_range"),
        (DynamicSampling, {"prompts": 0}, "dynamic_sampling.prompts"),
        (Reference, {"kl_coef": -0.1}, "reference.kl_coef"),
        (Reference, {"sync_every": 0}, "reference.sync_every"),
        (Reference, {"kl_coef": 0.0, "sync_every": 2}, "reference.sync_every"),
        (Reference, {"mixup": 0.0}, "reference.mixup"),
        (ImportanceSampling, {"mode": "token_trunc"}, "did you mean 'token_truncate'"),
        (ImportanceSampling, {"mode": "none", "high": 2.0}, r"high is 2.0, but mode 'none'"),
        (ImportanceSampling, {"mode": "token_truncate", "low": 0.5}, r"sampling\.low is 0.5"),
        (ImportanceSampling, {"mode": "token_mask", "low": 1.5}, r"sampling\.low is 1.5"),
        (ImportanceSampling, {"mode": "token_mask", "low": -0.5}, r"sampling\.low is -0.5"),
        (ImportanceSampling, {"mode": "token_mask", "high": 0.5}, r"sampling\.high is 0.5"),
        (ImportanceSampling, {"mode": "token_mask", "high": math.nan}, r"sampling\.high is nan"),
    ],
)
def test_a_setting_out_of_range_names_itself(
    make: Callable[..., Any], options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        make(**options)


@pytest.mark.parametrize(
    ("advantage", "update", "culprit"),
    [
        ({"estimator": "rlo"}, {}, "rloo"),
        ({"estimator": "no.such.function"}, {}, "no.such.function"),
        ({"estimator": "rloo", "options": {"gamma": 0.9}}, {}, "advantage.options"),
        ({}, {"loss": "sequence_clp"}, "sequence_clip"),
        ({}, {"loss": "dapo", "options": {"clip_hgih": 0.3}}, "clip_high"),
        ({}, {"loss": "cpgd", "options": {"clip_low": 0.3}}, "update.options"),
    ],
)
def test_names_and_options_of_an_algorithm_are_checked(
    advantage: dict[str, Any], update: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        assembled(Advantage(**advantage), Update(**update))


def test_type_checkers_see_the_options_that_ppo_passes_on() -> None:
    written = inspect.signature(PolicyModule).parameters
    types = {name: kind.__forward_arg__ for name, kind in PolicyOptions.__annotations__.items()}
    assert {name: one.annotation for name, one in written.items() if name in types} == types
    assert [*written] == ["policy", "rewards", *types]
    assert [*inspect.signature(PPO).parameters] == [*written, "critic"]
    documented = [f"    {name}: " for name in written]
    assert all(line in (module.__doc__ or "") for module in (RLOO, PPO) for line in documented)


def test_the_help_of_the_loss_names_every_loss() -> None:
    help_text = inspect.getdoc(Update) or ""
    listed = help_text.split("POLICY_LOSSES` (")[1].split(")")[0]
    assert sorted(listed.replace("\n", " ").replace(",", " ").split()) == sorted(POLICY_LOSSES)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"algorithm": "pass_at_k", "num_generations": 2}, "k is 2; it must be .* below"),
        (
            {"algorithm": "pass_at_k", "advantage": Advantage(options={"k": 1.0})},
            "k is 1.0; it must be a whole number",
        ),
        ({"algorithm": "dppo", "update": Update(options={"divergence": "tvv"})}, "tvv"),
        ({"algorithm": "clip_cov", "update": Update(options={"fraction": 7.0})}, "fraction"),
        ({"algorithm": "kl_cov", "update": Update(options={"old_kl_coef": -1.0})}, "old_kl_coef"),
        ({"reference": Reference(kl_estimator="unbiased")}, "unbiased, which weighs a gradient"),
    ],
)
def test_what_a_new_algorithm_cannot_do_is_refused_before_a_rollout(
    build, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(**options)


def test_a_lam_beside_one_that_depends_on_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length_alpha: null"):
        assemble_algorithm(
            "vapo", default="ppo", advantage=Advantage(options={"lam": 0.5}), update=Update()
        )
