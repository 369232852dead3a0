"""GDPO from the values of the rewards to advantages, as a run has them."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import PromptDataModule, ReplayDataModule
from lrlhf.modules import Advantage, DynamicSampling, Reference
from lrlhf.modules.policy.experience import as_experience, compute_advantages, trained_scores
from lrlhf.rewards import Rewards
from tests.modules.policy_runs import letters, one_process
from tests.modules.test_policy_objective import assembled, rollout_of

GOLDEN = Path(__file__).parents[1] / "functional" / "golden" / "trl_gdpo.json"
CASES = json.loads(GOLDEN.read_text())["gdpo"]
NAN = float("nan")
Build = Callable[..., Any]


def advantages_of(columns: dict[str, Tensor], scores: Tensor, size: int) -> Tensor:
    """`[B]`, of responses of two tokens."""
    mask = torch.ones(len(scores), 2, dtype=torch.bool)
    rollout = rollout_of(mask, torch.zeros(len(scores), dtype=torch.bool), size)
    settings = Advantage(estimator="gdpo")
    experience = compute_advantages(
        as_experience(rollout, scores=scores),
        algorithm=assembled(settings),
        settings=settings,
        reward_kl_estimator=None,
        kl_coef=0.0,
        num_generations=size,
        whiten=one_process().whiten,
        columns=columns,
    )
    assert torch.equal(experience.advantages[:, 1], experience.advantages[:, 2])
    return experience.advantages[:, 1]


def returning(values: list[float | None]) -> Any:
    def function(completions: list[str]) -> list[float | None]:
        assert len(completions) == len(values)
        return values

    return function


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_advantages_equal_trl(case: dict[str, Any]) -> None:
    names = [f"r{number}" for number in range(len(case["weights"]))]
    columns = [[*column] for column in zip(*case["rewards"], strict=True)]
    rewards = Rewards(
        {name: returning(column) for name, column in zip(names, columns, strict=True)},
        weights=case["weights"],
        optional=names,  # as TRL sums what there is
        max_unscorable_fraction=1.0,
    )
    count = len(case["rewards"])
    result = rewards.score(["p"] * count, ["c"] * count, [[1]] * count, [{}] * count)
    assert result.weights is not None
    rows = {f"reward/{name}": result.per_function[:, n] for n, name in enumerate(names)}
    rows |= {f"weight/{name}": result.weights[:, n].float() for n, name in enumerate(names)}
    found = advantages_of(rows, result.scores, case["num_generations"])
    torch.testing.assert_close(found, torch.tensor(case["advantages"]), rtol=1e-5, atol=2e-6)


def test_a_response_without_a_sibling_is_no_observation() -> None:
    # the second prompt has one response with a score: TRL would count its 0 in the batch
    rows = {"reward/r": torch.tensor([1.0, 3.0, 5.0, NAN]), "weight/r": torch.ones(4)}
    found = advantages_of(rows, torch.tensor([1.0, 3.0, 5.0, NAN]), 2)
    # z-scores ∓√½ of deviation 1, but for the 1e-4 that is added to √2 and to 1
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0], rel=3e-4)


# ---------------------------------------------------------------------- in a run


def vowels(completions: list[str]) -> list[float]:
    return [1000.0 * sum(text.count(vowel) for vowel in "aeiou") for text in completions]


def both(rewards: dict[str, list[float | None]]) -> list[float | None]:
    """Nothing where the one that it builds on was not asked."""
    return [None if one is None else one * one for one in rewards["letters"]]


def in_plain_python(records: list[dict[str, Any]], size: int) -> list[float]:
    sums = []
    for start in range(0, len(records), size):
        group = records[start : start + size]
        total = [0.0] * size
        for name in group[0]["rewards"]:
            values = [record["rewards"][name] for record in group]
            known = [value for value in values if value is not None]
            if len(known) < 2:
                continue
            mean, deviation = statistics.fmean(known), statistics.stdev(known)
            for row, value in enumerate(values):
                if value is not None:
                    weight = group[row]["weights"][name]
                    total[row] += weight * (value - mean) / (deviation + 1e-4)
        sums += total
    mean, deviation = statistics.fmean(sums), statistics.stdev(sums)
    return [(one - mean) / (deviation + 1e-4) for one in sums]


RECIPE = {"a": {"letters": 1.0, "vowels": -0.5, "both": 2.0}, "b": {"vowels": 1.0, "both": 0.0}}


def mixed() -> Rewards:
    return Rewards([letters, vowels, both], recipe=RECIPE, label_column="kind")


def rows() -> PromptDataModule:
    prompts = [{"prompt": f"say {n}", "kind": "ab"[n % 2]} for n in range(8)]
    return PromptDataModule(prompts, batch_size=2)


@pytest.mark.parametrize(
    "options", [{}, {"dynamic_sampling": DynamicSampling(prompts=2)}], ids=["plain", "dynamic"]
)
def test_recipes_and_rewards_of_rewards_go_into_the_advantages(
    build: Build, train: Any, options: dict[str, Any]
) -> None:
    module = build(rewards=mixed(), algorithm="gdpo", **options)
    watcher = train(module, steps=2, data=rows()).watcher
    for experience, records in zip(watcher.experiences, watcher.records, strict=True):
        if experience.counted.all():
            found = [line[mask].unique().item() for line, mask in zip(
                experience.advantages, experience.response_mask, strict=True)]  # fmt: skip
            assert found == pytest.approx(in_plain_python(records, 4), rel=1e-3, abs=1e-4)
        for record in records:
            values, kind = record["rewards"], record["columns"]["kind"]
            assert record["weights"] == {"letters": None, **RECIPE[kind]}
            expected = None if kind == "b" else values["letters"] ** 2
            assert values["both"] == pytest.approx(expected)
    assert any(experience.counted.all() for experience in watcher.experiences)


def test_dynamic_sampling_keeps_groups_in_which_any_reward_differs(
    build: Build, train: Any
) -> None:
    def opposite(rewards: dict[str, list[float]]) -> list[float]:
        return [-value for value in rewards["letters"]]

    for algorithm, teaches in (("gdpo", True), ("grpo", False)):
        module = build(
            rewards=Rewards([letters, opposite], weights=[2.0, 2.0]),  # which add up to 0
            algorithm=algorithm,
            dynamic_sampling=DynamicSampling(prompts=2),
        )
        experience = train(module, data=rows()).experience
        assert experience.counted.any() == teaches
    # of a reward that only is an input no difference counts
    rewards = Rewards([letters, opposite], weights={"letters": 0.0, "opposite": 1.0})
    result = rewards.score(["p"] * 2, ["ab", "1!"], [[1]] * 2, [{}] * 2)
    collected: Any = SimpleNamespace(rewards=result)
    assert trained_scores(collected, Advantage(), single=True).isnan().tolist() == [
        [True, False], [True, False]
    ]  # fmt: skip


def test_stored_rollouts_know_the_weights(build: Build, train: Any, tmp_path: Path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    run = train(build(rewards=mixed(), algorithm="gdpo"), data=rows(), callbacks=[log])
    stored = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    # whatever the rewards of this run would weigh
    again = train(build(algorithm="gdpo"), data=stored)
    first, same = run.watcher.experiences[0], again.watcher.experiences[0]
    torch.testing.assert_close(same.advantages, first.advantages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": Advantage(scale_rewards="std")}, "scale_rewards is about the sum"),
        ({"advantage": Advantage(reward_clip_range=(0, 1))}, "reward_clip_range is about the sum"),
        ({"num_generations": 1}, "'gdpo' compares the responses to one prompt"),
        ({"reference": Reference(placement="reward")}, "'gdpo' is not known to subtract"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    build: Build, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(**{"algorithm": "gdpo", **options})


def test_a_critic_has_no_place(ppo: Build) -> None:
    with pytest.raises(ValueError, match="gdpo"):
        ppo(algorithm="gdpo")
