"""What RLOO and PPO make of settings that are left out: the same from Python as from YAML."""

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lrlhf.modules import PPO, RLOO, Advantage, Update
from lrlhf.rewards import Rewards
from tests.modules.policy_runs import letters

LETTERS = "tests.modules.policy_runs.letters"
GROUPS = {"advantage": Advantage, "update": Update}


def from_yaml(kind: type[RLOO | PPO], folder: Path, options: dict[str, Any]) -> RLOO | PPO:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "model")
    rewards = {"class_path": "lrlhf.rewards.Rewards", "init_args": {"functions": [LETTERS]}}
    config = parser.parse_object({"model": {"policy": str(folder), "rewards": rewards, **options}})
    module: RLOO | PPO = parser.instantiate(config).model
    return module


def meaning(module: RLOO | PPO) -> Any:
    return module.advantage, module.update, module.update.function


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
    ],
)
def test_settings_mean_the_same_from_python_and_from_yaml(
    model_folder, kind: type[RLOO | PPO], options: dict[str, Any]
) -> None:
    groups: dict[str, Any] = {name: GROUPS[name](**given) for name, given in options.items()}
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
    assert (module.update.loss, module.update.function.aggregate) == expected


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
    assert module.update == Update(loss="cispo", **options)
