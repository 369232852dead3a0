"""What RLOO and PPO make of settings that are left out: the same from Python as from YAML."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lrlhf.functional import ALGORITHMS
from lrlhf.modules import PPO, RLOO, Advantage, Reference, Update
from lrlhf.modules.policy.policy_settings import assemble_algorithm
from lrlhf.rewards import Rewards
from tests.modules.policy_runs import letters

LETTERS = "tests.modules.policy_runs.letters"
GROUPS = {"advantage": Advantage, "update": Update}


MINE = replace(ALGORITHMS["grpo"], name="mine", kl_in="reward", kl_coef=0.5)


def from_yaml(kind: type[RLOO | PPO], folder: Path, options: dict[str, Any]) -> RLOO | PPO:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "model")
    rewards = {"class_path": "lrlhf.rewards.Rewards", "init_args": {"functions": [LETTERS]}}
    config = parser.parse_object({"model": {"policy": str(folder), "rewards": rewards, **options}})
    module: RLOO | PPO = parser.instantiate(config).model
    return module


def meaning(module: RLOO | PPO) -> Any:
    return module.settings


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PPO, {}),
        (PPO, {"update": {"loss": "token_clip"}}),
        (PPO, {"update": {"loss": "dr_grpo", "entropy_coef": 0.1}}),
        (PPO, {"update": {"high_entropy_fraction": 0.5}}),
        (PPO, {"advantage": {"scale_rewards": "std", "options": {"lam": 1.0}}}),
        (RLOO, {}),
        (RLOO, {"advantage": {"estimator": "grpo"}}),
        (RLOO, {"algorithm": "dapo"}),
        (PPO, {"algorithm": f"{__name__}.MINE", "critic": None}),
    ],
)
def test_settings_mean_the_same_from_python_and_from_yaml(
    model_folder, kind: type[RLOO | PPO], options: dict[str, Any]
) -> None:
    groups: dict[str, Any] = {
        name: GROUPS[name](**given) if name in GROUPS else given for name, given in options.items()
    }
    from_python = kind(str(model_folder), Rewards([letters]), **groups)
    assert meaning(from_python) == meaning(from_yaml(kind, model_folder, options))


@pytest.mark.parametrize(
    ("kind", "estimator", "update", "expected"),
    [
        (RLOO, None, {}, ("sequence_clip", "sequence_mean")),
        (RLOO, "rloo", {"loss": "token_clip"}, ("token_clip", "sequence_mean")),
        (RLOO, "grpo", {}, ("token_clip", "sequence_mean")),
        (RLOO, "grpo", {"aggregate": "constant"}, ("token_clip", "constant")),
        (RLOO, "dr_grpo", {}, ("dr_grpo", "constant")),
        (RLOO, "dr_grpo", {"loss": "sequence_clip"}, ("sequence_clip", "sequence_mean")),
        (RLOO, "cpgd", {}, ("cpgd", "sequence_mean")),
        (RLOO, "reinforce_baseline", {}, ("token_clip", "token_mean")),
        (PPO, None, {}, ("token_clip", "token_mean")),
        (PPO, None, {"loss": "token_clip"}, ("token_clip", "token_mean")),
        (PPO, None, {"loss": "token_clip", "aggregate": "constant"}, ("token_clip", "constant")),
        (PPO, None, {"loss": "dr_grpo"}, ("dr_grpo", "constant")),
        (PPO, "grpo", {}, ("token_clip", "sequence_mean")),
        (PPO, "rloo", {}, ("sequence_clip", "sequence_mean")),
    ],
)
def test_the_loss_is_that_of_the_estimators_paper_unless_it_is_named(
    language_model,
    tokenizer,
    kind: type[RLOO | PPO],
    estimator: str | None,
    update: dict[str, Any],
    expected: tuple[str, str],
) -> None:
    critic = {"critic": None} if kind is PPO and estimator else {}
    advantage = {} if estimator is None else {"advantage": Advantage(estimator=estimator)}
    module = kind(
        language_model,
        Rewards([letters]),
        tokenizer=tokenizer,
        update=Update(**update),
        **advantage,
        **critic,
    )
    loss = module.settings.algorithm.loss
    assert (loss.name, loss.aggregate) == expected


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"aggregate": "token_mean"}, "'sequence_clip' has one value per response"),
        ({"high_entropy_fraction": 0.5}, "update.high_entropy_fraction is about tokens"),
        ({"options": {"ratio_max": 2.0}}, r"update\.options \(loss sequence_clip\) 'ratio_max'"),
    ],
)
def test_options_are_checked_against_the_loss_that_is_chosen(
    language_model, tokenizer, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        RLOO(language_model, Rewards([letters]), tokenizer=tokenizer, update=Update(**options))
    grpo = Advantage(estimator="grpo")
    fitting = Update(loss="cispo", **options)
    module = RLOO(
        language_model, Rewards([letters]), tokenizer=tokenizer, advantage=grpo, update=fitting
    )
    assert module.settings.algorithm.loss.name == "cispo"


@pytest.mark.parametrize(
    ("options", "placement", "coef"),
    [
        ({"algorithm": "grpo"}, "loss", 0.05),
        ({"algorithm": "dapo"}, "loss", 0.0),
        ({"algorithm": "dapo", "reference": Reference(kl_coef=0.1)}, "loss", 0.1),
        ({"algorithm": "grpo", "reference": Reference(placement="reward")}, "reward", 0.05),
        ({"algorithm": "rloo", "advantage": Advantage(estimator="grpo")}, "reward", 0.05),
        ({"advantage": Advantage(estimator="tests.functional.test_estimators.mine")}, "loss", 0.05),
        ({"algorithm": MINE}, "reward", 0.5),
    ],
)
def test_where_the_penalty_goes_and_how_strong_it_is(
    language_model, tokenizer, options: dict[str, Any], placement: str, coef: float
) -> None:
    module = RLOO(language_model, Rewards([letters]), tokenizer=tokenizer, **options)
    assert module.settings.algorithm.kl_in == placement
    assert module.settings.kl_coef == module.kl_coef == coef
    assert (module.parts.reference is None) == (coef == 0)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (
            {
                "advantage": Advantage(estimator="tests.functional.test_estimators.mine"),
                "reference": Reference(placement="reward"),
            },
            r"not known to subtract inputs\.kl",
        ),
        ({"algorithm": "gae"}, r"use lrlhf\.modules\.PPO"),
        ({"algorithm": "remax", "rollout_ahead": 1}, "samples greedy beside the responses"),
        ({"algorithm": "grop"}, "did you mean 'grpo'"),
        ({"reference": Reference(kl_estimator="k1", placement="loss")}, "would add noise"),
    ],
)
def test_combinations_that_lose_a_term_are_refused(
    language_model, tokenizer, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        RLOO(language_model, Rewards([letters]), tokenizer=tokenizer, **options)


@pytest.mark.parametrize(
    ("algorithm", "estimator", "beside"),
    [("rloo", "remax", {"greedy": {"temperature": 0.0}}), ("remax", "grpo", {})],
)
def test_what_is_sampled_beside_follows_the_advantages(
    algorithm: str, estimator: str, beside: dict[str, Any]
) -> None:
    given = Advantage(estimator=estimator)
    chosen = assemble_algorithm(algorithm, default="rloo", advantage=given, update=Update())
    assert chosen.beside == beside
