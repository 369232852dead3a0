"""Every estimator on one small rollout, by hand."""

from itertools import combinations
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from lrlhf.functional import (
    ALGORITHMS,
    ESTIMATORS,
    Estimator,
    EstimatorInputs,
    resolve_algorithm,
    resolve_estimator,
)

NAN = float("nan")
GRPOS = {"bnpo", "luspo", "vespo", "sapo", "dppo", "clip_cov", "kl_cov"}
SHARED = {"dapo", "gspo", "gmpo", "cispo", "ppo", "vapo", *GRPOS}
# the others share one of these
EVERY = pytest.mark.parametrize("name", sorted({*ESTIMATORS} - SHARED))

# Two prompts with two responses each. Rows: prompt token, then up to three response tokens.
INPUTS = EstimatorInputs(
    scores=torch.tensor([3.0, 1.0, 5.0, 5.0]),
    kl=torch.tensor([[9, 1, 2, 0], [9, 1, 9, 9], [9, 2, 2, 2], [9, 0, 2, 9]], dtype=torch.float32),
    response_mask=torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]]).bool(),
    num_generations=2,
    kl_coef=0.1,
    baseline_mask=torch.ones(4, dtype=torch.bool),
    values=torch.tensor([[9, 1, 2, 0], [9, 0.4, 9, 9], [9, 1, 1, 1], [9, 4, 5, 9]]),
    rows={
        "greedy": torch.tensor([2.0, 2.0, 4.0, 4.0]),
        "reward/right": torch.tensor([20.0, 0.0, 10.0, 30.0]),
        "weight/right": torch.ones(4),
        "reward/short": torch.tensor([1.0, 1.0, 90.0, 70.0]),
        "weight/short": torch.full((4,), 0.5),
    },
    observations=torch.tensor([[0], [0], [1], [1]]),
)

HALF = 2**-0.5
BY_HAND = {
    # errors of one step 0.9 -2.2 3 | 0.5 | -0.2 -0.2 3.8 | 1 -0.2, summed with weight 0.95 a step
    "gae": [[0, 1.5175, 0.65, 3], [0, 0.5, 0, 0], [0, 3.0395, 3.41, 3.8], [0, 0.81, -0.2, 0]],
    # penalised scores 2.7, 0.9, 4.4, 4.8
    "rloo": [[0, 1.8, 1.8, 1.8], [0, -1.8, 0, 0], [0, -0.4, -0.4, -0.4], [0, 0.4, 0.4, 0]],
    "rloo_turn": [[0, 1.8, 1.8, 1.8], [0, -1.8, 0, 0], [0, -0.4, -0.4, -0.4], [0, 0.4, 0.4, 0]],
    # leave-one-out 2, -2, 0, 0; penalties to go 0.3 0.2 0 | 0.1 | 0.6 0.4 0.2 | 0.2 0.2
    "rloo_openrlhf": [[0, 1.7, 1.8, 2], [0, -2.1, 0, 0], [0, -0.6, -0.4, -0.2], [0, -0.2, -0.2, 0]],
    "reinforce": [[0, 2.7, 2.8, 3], [0, 0.9, 0, 0], [0, 4.4, 4.6, 4.8], [0, 4.8, 4.8, 0]],
    "reinforce_plus_plus": [[0, 2.7, 2.8, 3], [0, 0.9, 0, 0], [0, 4.4, 4.6, 4.8], [0, 4.8, 4.8, 0]],
    # penalised scores 2.7, 0.9, 4.4, 4.8 minus 2 and 4
    "remax": [[0, 0.7, 0.7, 0.7], [0, -1.1, 0, 0], [0, 0.4, 0.4, 0.4], [0, 0.8, 0.8, 0]],
    # group means 2 and 5
    "reinforce_baseline": [
        [0, 0.7, 0.8, 1],
        [0, -1.1, 0, 0],
        [0, -0.6, -0.4, -0.2],
        [0, -0.2, -0.2, 0],
    ],
}
WITHOUT_KL = {
    # errors of one step 1 -2 3 | 0.6 | 0 0 4 | 1 0
    "gae": [[0, 1.8075, 0.85, 3], [0, 0.6, 0, 0], [0, 3.61, 3.8, 4], [0, 1, 0, 0]],
    # ±1 over the biased deviation 1
    "cpgd": [[0, 1, 1, 1], [0, -1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "rloo": [[0, 2, 2, 2], [0, -2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "rloo_openrlhf": [[0, 2, 2, 2], [0, -2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    # ±1 over the deviation √2 + 1e-4
    "grpo": [[0, HALF, HALF, HALF], [0, -HALF, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    # z-scores ±HALF of both rewards, in the second group against each other, the second halved
    "gdpo": [
        [0, HALF, HALF, HALF],
        [0, -HALF, 0, 0],
        [0, -HALF / 2, -HALF / 2, -HALF / 2],
        [0, HALF / 2, HALF / 2, 0],
    ],
    # z-scores of the episode and of its one turn
    "gigpo": [[0, 2 * HALF, 2 * HALF, 2 * HALF], [0, -2 * HALF, 0, 0], [0] * 4, [0] * 4],
    # half of the responses teach nothing, so the others count twice
    "gpg": [[0, 2, 2, 2], [0, -2, 0, 0], [0] * 4, [0] * 4],
    # lengths 3 and 1: the baseline is (3 · 3 + 1) / 4
    "opo": [[0, 0.5, 0.5, 0.5], [0, -1.5, 0, 0], [0] * 4, [0] * 4],
    # of two responses there is one subset of two
    "pass_at_k": [[0] * 4] * 4,
    "group_norm": [[0, HALF, HALF, HALF], [0, -HALF, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    # responses of one turn
    "rloo_turn": [[0, 2, 2, 2], [0, -2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "mt_grpo": [[0, HALF, HALF, HALF], [0, -HALF, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "dr_grpo": [[0, 1, 1, 1], [0, -1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    "reinforce": [[0, 3, 3, 3], [0, 1, 0, 0], [0, 5, 5, 5], [0, 5, 5, 0]],
    "reinforce_plus_plus": [[0, 3, 3, 3], [0, 1, 0, 0], [0, 5, 5, 5], [0, 5, 5, 0]],
    "remax": [[0, 1, 1, 1], [0, -1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]],
    # the teacher's term is added afterwards
    "distillation": [[0, 0, 0, 0]] * 4,
    "reinforce_baseline": [[0, 1, 1, 1], [0, -1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
}


def estimate(name: str, inputs: EstimatorInputs, **options: Any) -> torch.Tensor:
    return ESTIMATORS[name].function(inputs, **options)


def without_kl() -> EstimatorInputs:
    return INPUTS._replace(kl=torch.zeros(4, 4))


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_advantages_with_a_penalty_by_hand(name: str) -> None:
    torch.testing.assert_close(estimate(name, INPUTS), torch.tensor(BY_HAND[name]))


@EVERY
def test_advantages_without_a_penalty_by_hand(name: str) -> None:
    expected = torch.tensor(WITHOUT_KL[name], dtype=torch.float32)
    torch.testing.assert_close(estimate(name, without_kl()), expected, rtol=1e-4, atol=1e-6)


def test_a_penalty_that_is_put_into_the_reward_of_grpo_counts() -> None:
    # penalised scores 2.7, 0.9, 4.4, 4.8: means 1.8 and 4.6
    advantages = estimate("dr_grpo", INPUTS)
    assert advantages[:, 1].tolist() == pytest.approx([0.9, -0.9, -0.2, 0.2], abs=1e-6)
    z = estimate("grpo", INPUTS, eps=0.0)
    assert z[:, 1].tolist() == pytest.approx([HALF, -HALF, -HALF, HALF])


def rows_of(inputs: EstimatorInputs, rows: list[int], **changes: Any) -> EstimatorInputs:
    """Some rows of the inputs, as one group."""
    taken = {
        name: getattr(inputs, name)[rows]
        for name in ("scores", "kl", "response_mask", "baseline_mask", "values", "observations")
    }
    columns = {name: column[rows] for name, column in inputs.rows.items()}
    return inputs._replace(**taken, rows=columns, num_generations=len(rows))._replace(**changes)


@EVERY
def test_an_unscorable_row_is_left_out_and_its_siblings_do_not_see_it(name: str) -> None:
    group = rows_of(INPUTS, [0, 1, 1, 3], scores=torch.tensor([3.0, NAN, 1.0, 7.0]))
    kept = [0, 2, 3]
    advantages = estimate(name, group)
    assert (advantages[1] == 0).all()
    torch.testing.assert_close(advantages[kept], estimate(name, rows_of(group, kept)))


@EVERY
def test_a_row_outside_the_baselines_is_treated_as_unscorable(name: str) -> None:
    kept_out = INPUTS._replace(baseline_mask=torch.tensor([True, False, True, True]))
    unscorable = INPUTS._replace(scores=torch.tensor([3.0, NAN, 5.0, 5.0]))
    assert torch.equal(estimate(name, kept_out), estimate(name, unscorable))


@EVERY
def test_no_gradient_and_nothing_outside_the_response(name: str) -> None:
    scores, kl = INPUTS.scores.clone().requires_grad_(), INPUTS.kl.clone().requires_grad_()
    values = INPUTS.values.clone().requires_grad_()
    dirty = {
        "kl": torch.where(INPUTS.response_mask, kl, NAN),
        "values": torch.where(INPUTS.response_mask, values, NAN),
    }
    advantages = estimate(name, INPUTS._replace(scores=scores, **dirty))
    assert not advantages.requires_grad
    assert torch.equal(advantages, estimate(name, INPUTS))
    assert (advantages[~INPUTS.response_mask] == 0).all()


@EVERY
def test_what_is_said_of_an_estimator_is_true(name: str) -> None:
    said = ESTIMATORS[name]
    with_kl, without = estimate(name, INPUTS), estimate(name, without_kl())
    tokens_differ = not torch.equal(with_kl[0, 1:], with_kl[0, 1:2].expand(3))
    assert said.per_token == tokens_differ
    assert said.uses_values != torch.equal(without[0, 1:], without[0, 1:2].expand(3))
    if said.uses_values:
        with pytest.raises(ValueError, match="needs the values of a critic"):
            estimate(name, INPUTS._replace(values=None))
    else:
        assert torch.equal(with_kl, estimate(name, INPUTS._replace(values=None)))
    lone = estimate(name, without_kl()._replace(num_generations=1))
    nothing = bool((without == 0).all())  # of scores, with siblings or without
    assert (said.groups or nothing) == bool((lone == 0).all())


def test_every_algorithm_is_that_of_its_paper() -> None:
    in_loss = {name for name, one in ALGORITHMS.items() if one.kl_in == "loss"}
    assert in_loss == {
        *("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "cpgd", "mt_grpo", "gdpo"),
        *GRPOS,
        *("distillation", "gigpo", "pass_at_k", "opo", "gpg"),
    }
    unpenalized = {name for name, one in ALGORITHMS.items() if one.kl_coef == 0}
    assert unpenalized == {
        *("dapo", "gmpo", "cispo", "distillation", "sapo", "dppo", "clip_cov", "kl_cov"),
        *("opo", "gpg", "vapo", "luspo", "vespo"),
    }
    whitened = {name for name, one in ALGORITHMS.items() if one.estimator.normalize == "token"}
    assert whitened == {"ppo", "vapo", "reinforce_baseline", "reinforce_plus_plus"}
    assert {name: (one.loss.name, one.loss.aggregate) for name, one in ALGORITHMS.items()} == {
        "ppo": ("token_clip", "token_mean"),  # Schulman et al. 2017, eq. 7
        "rloo": ("sequence_clip", "sequence_mean"),  # TRL
        "rloo_openrlhf": ("token_clip", "token_mean"),  # OpenRLHF
        "rloo_turn": ("token_clip", "sequence_sum"),  # on-policy the gradient of rloo
        "grpo": ("token_clip", "sequence_mean"),  # Shao et al. 2024, eq. 3
        "mt_grpo": ("token_clip", "sequence_mean"),  # GRPO's
        "gdpo": ("token_clip", "sequence_mean"),  # GRPO's
        "dr_grpo": ("dr_grpo", "constant"),  # Liu et al. 2025, §3.1
        "dapo": ("dapo", "token_mean"),  # Yu et al. 2025, eq. 8
        "gspo": ("gspo", "sequence_mean"),  # Zheng et al. 2025, eq. 5
        "gmpo": ("gmpo", "sequence_mean"),  # Zhao et al. 2025, eq. 4
        "cispo": ("cispo", "token_mean"),  # MiniMax 2025, eq. 4
        "cpgd": ("cpgd", "sequence_mean"),  # Liu et al. 2025, §4
        "reinforce": ("reinforce", "token_mean"),
        "reinforce_baseline": ("token_clip", "token_mean"),  # Hu et al. 2025
        "reinforce_plus_plus": ("token_clip", "token_mean"),
        "remax": ("remax", "sequence_sum"),  # Li et al. 2023, algorithm 1
        "distillation": ("reinforce", "token_mean"),
        "bnpo": ("token_clip", "token_mean"),  # TRL
        "sapo": ("sapo", "sequence_mean"),  # Gao et al. 2025
        "luspo": ("luspo", "sequence_mean"),  # TRL
        "vespo": ("vespo", "token_mean"),  # TRL
        "dppo": ("dppo", "token_mean"),  # verl
        "clip_cov": ("clip_cov", "token_mean"),  # verl
        "kl_cov": ("kl_cov", "token_mean"),  # verl
        "opo": ("reinforce", "token_mean"),  # verl
        "gpg": ("reinforce", "token_mean"),  # verl
        "pass_at_k": ("token_clip", "sequence_mean"),  # GRPO's
        "gigpo": ("token_clip", "sequence_mean"),  # GRPO's
        "vapo": ("dapo", "token_mean"),  # Yue et al. 2025, §4
    }


def test_a_greedy_response_without_a_score_leaves_its_rows_without_an_advantage() -> None:
    inputs = INPUTS._replace(rows={"greedy": torch.tensor([NAN, NAN, 4.0, 4.0])})
    assert (estimate("remax", inputs)[:2] == 0).all()
    assert torch.equal(estimate("remax", inputs)[2:], estimate("remax", INPUTS)[2:])


def with_rewards(
    rewards: list[list[float]], weights: list[list[float]], size: int
) -> EstimatorInputs:
    """Responses of one token; a score is the sum of what is there."""
    columns = {}
    for number, (values, weight) in enumerate(zip(rewards, weights, strict=True)):
        columns[f"reward/{number}"] = torch.tensor(values)
        columns[f"weight/{number}"] = torch.tensor(weight)
    total = torch.tensor(rewards).nansum(dim=0)
    total[torch.tensor(rewards).isnan().all(dim=0)] = NAN
    rows = len(total)
    return EstimatorInputs(
        scores=total,
        kl=torch.zeros(rows, 1),
        response_mask=torch.ones(rows, 1, dtype=torch.bool),
        num_generations=size,
        kl_coef=0.0,
        baseline_mask=torch.ones(rows, dtype=torch.bool),
        rows=columns,
    )


def test_gdpo_hears_a_small_reward_that_a_large_one_drowns() -> None:
    # of a sum, the second reward would be a thousandth
    inputs = with_rewards([[1000.0, 2000.0, 0.0, 1000.0], [1.0, 0.0, 0.0, 1.0]], [[1.0] * 4] * 2, 4)
    # deviations √(2e6/3) and √(1/3)
    large, small = (2 / 3) ** -0.5, 0.5 * 3**0.5
    expected = [small, large - small, -large - small, small]
    assert estimate("gdpo", inputs, eps=0.0)[:, 0].tolist() == pytest.approx(expected)


def test_gdpo_counts_what_a_reward_says_of_a_response_and_no_more() -> None:
    # the second reward has nothing to say of row 1, and of rows 4 to 7 only about row 6; the third
    # belongs to the second prompt's label, and row 7 has no value at all
    inputs = with_rewards(
        [
            [1.0, 3.0, 1.0, 3.0, 5.0, 5.0, 5.0, NAN],
            [2.0, NAN, 4.0, 6.0, NAN, NAN, 9.0, NAN],
            [NAN, NAN, NAN, NAN, 1.0, 2.0, 3.0, NAN],
        ],
        [[1.0] * 8, [-0.5] * 8, [NAN] * 4 + [2.0] * 4],
        4,
    )
    # means 2, 4 and 2 of those with a value; deviations √(4/3), 2 and 1
    first = 1 / (4 / 3) ** 0.5
    expected = [-first + 0.5, first, -first, first - 0.5, -2.0, 0.0, 2.0, 0.0]
    found = estimate("gdpo", inputs, eps=1e-9)[:, 0].tolist()
    assert found == pytest.approx(expected)
    order = [2, 0, 3, 1, 7, 5, 4, 6]
    mixed = rows_in_order(inputs, order)
    assert estimate("gdpo", mixed, eps=1e-9)[:, 0].tolist() == pytest.approx(
        [expected[row] for row in order]
    )


def rows_in_order(inputs: EstimatorInputs, order: list[int]) -> EstimatorInputs:
    columns = {name: column[order] for name, column in inputs.rows.items()}
    return inputs._replace(scores=inputs.scores[order], rows=columns)


@pytest.mark.parametrize("rows", [{}, {"reward/a": torch.ones(4)}, {"greedy": torch.ones(4)}])
def test_gdpo_needs_the_weights_of_the_rewards(rows: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"does not tell the rewards or their weights.*grpo"):
        estimate("gdpo", INPUTS._replace(rows=rows))


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus", "rloo_openrlhf"])
def test_gamma_discounts_towards_the_last_token(name: str) -> None:
    full, halved = (estimate(name, without_kl(), gamma=gamma)[0, 1:] for gamma in (1.0, 0.5))
    torch.testing.assert_close(halved, full * torch.tensor([0.25, 0.5, 1]))
    # score minus group mean is 1, on the third token
    assert estimate("reinforce_baseline", without_kl(), gamma=0.5)[0].tolist() == [0, 0.25, 0.5, 1]


def test_openrlhf_clips_the_advantage_not_the_score() -> None:
    advantages = estimate("rloo_openrlhf", without_kl(), advantage_clip=1.5)
    assert advantages[:2, 1].tolist() == [1.5, -1.5]
    with pytest.raises(ValueError, match="advantage_clip is 0"):
        estimate("rloo_openrlhf", INPUTS, advantage_clip=0.0)


def one_token(scores: list[float], num_generations: int) -> EstimatorInputs:
    rows = len(scores)
    return INPUTS._replace(
        scores=torch.tensor(scores),
        kl=torch.zeros(rows, 2),
        response_mask=torch.tensor([[False, True]]).expand(rows, 2),
        baseline_mask=torch.ones(rows, dtype=torch.bool),
        num_generations=num_generations,
    )


CPGD_INPUTS = one_token([3.0, 1.0, 5.0, 5.0, 0.0, 4.0, 2.0, 2.0], 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weighting": "equal"}, [1, -1, 0, 0, -2, 2, 0, 0]),
        # every group to a deviation of 1
        ({"weighting": "std"}, [1, -1, 0, 0, -1, 1, 0, 0]),
        # 8 rows, 4 of them with an advantage
        ({"weighting": "clip_filter"}, [2, -2, 0, 0, -4, 4, 0, 0]),
        ({"weighting": "clip_filter", "max_weight": 1.5}, [1.5, -1.5, 0, 0, -3, 3, 0, 0]),
    ],
)
def test_cpgd_weighs_its_groups(options: dict[str, Any], expected: list[float]) -> None:
    advantages = estimate("cpgd", CPGD_INPUTS, **options)
    assert advantages[:, 1].tolist() == pytest.approx(expected, rel=1e-5)
    assert (advantages[:, 0] == 0).all()
    # a single group has mean 3 and the biased deviation √((4 + 1 + 0 + 9) / 4)
    alone = [value / 3.5**0.5 for value in (-2, -1, 0, 3)]
    found = estimate("cpgd", one_token([1.0, 2.0, 3.0, 6.0], 4))
    assert found[:, 1].tolist() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [({"weighting": "sdt"}, "did you mean 'std'"), ({"max_weight": 0.5}, "max_weight is 0.5")],
)
def test_cpgd_refuses_impossible_options(options: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        estimate("cpgd", CPGD_INPUTS, **options)


@pytest.mark.parametrize("name", ["grpo", "mt_grpo"])
def test_eps_is_added_to_the_deviation_of_a_group(name: str) -> None:
    advantages = ESTIMATORS[name].function(INPUTS, eps=0.5)
    # penalised scores 2.7 and 0.9: 0.9 from their mean, with a deviation of 1.8 / √2
    assert advantages[:2, 1].tolist() == pytest.approx(
        [0.9 / (1.8 * HALF + 0.5), -0.9 / (1.8 * HALF + 0.5)]
    )


def test_an_estimator_takes_its_own_options() -> None:
    estimator = ESTIMATORS["reinforce"]._replace(options={"gamma": 0.5})
    # 3 at the last token, and penalties of 0.1 and 0.2 before it
    assert estimator(INPUTS)[0].tolist() == pytest.approx([0, 0.55, 1.3, 3])


def test_gae_has_its_two_ends() -> None:
    # λ = 1: return minus value; λ = 0: the error of one step
    ends = [estimate("gae", without_kl(), lam=lam)[0].tolist() for lam in (1.0, 0.0)]
    assert ends == [[0, 2, 1, 3], [0, 1, -2, 3]]
    # γ = 0.5: the last reward is worth 0.75 at the first token, whose value is 1
    assert estimate("gae", without_kl(), lam=1.0, gamma=0.5)[0, 1] == pytest.approx(-0.25)


def mine(inputs: EstimatorInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.kl)


WHITENED = Estimator(mine, normalize="sequence", groups=True)


def test_names_and_paths_resolve_and_an_unknown_name_suggests_the_nearest() -> None:
    assert resolve_estimator("grpo") is ESTIMATORS["grpo"]
    # nothing is known of a bare function: a penalty counts although this one ignores inputs.kl
    assert resolve_estimator(f"{__name__}.mine") == Estimator(mine, uses_kl=False)
    assert resolve_estimator(f"{__name__}.WHITENED") is WHITENED
    assert resolve_algorithm("gae") is ALGORITHMS["ppo"]
    with pytest.raises(ValueError, match=r"is a function, not a lrlhf\.functional\.Algorithm"):
        resolve_algorithm(f"{__name__}.mine")
    with pytest.raises(ValueError, match=r"unknown estimator 'rlo'.*did you mean 'rloo'"):
        resolve_estimator("rlo")


@pytest.mark.parametrize(("size", "k"), [(4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_counts_every_subset(size: int, k: int) -> None:
    generator = torch.Generator().manual_seed(size * k)
    scores = torch.randint(0, 4, (size,), generator=generator).double().tolist()
    best = {each: max(scores[i] for i in each) for each in combinations(range(size), k)}
    mean, std = fmean(best.values()), pstdev(best.values())
    expected = [
        (fmean(value for each, value in best.items() if row in each) - mean) / (std + 1e-6)
        for row in range(size)
    ]
    inputs = with_rewards([scores], [[1.0] * size], size)
    assert estimate("pass_at_k", inputs, k=k)[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_pass_at_k_of_right_and_wrong_is_that_of_the_paper() -> None:
    # 8 responses, 3 right, k = 4: R = 1 - C(5,4)/C(8,4) = 13/14
    mean = 13 / 14
    deviation = (mean * (1 - mean)) ** 0.5
    right, wrong = (1 - mean) / deviation, (1 - mean - 4 / 35) / deviation
    inputs = with_rewards([[1.0, 0, 0, 1, 0, 0, 1, 0]], [[1.0] * 8], 8)
    found = estimate("pass_at_k", inputs, k=4, eps=0.0)[:, 0].tolist()
    assert found == pytest.approx([right, wrong, wrong, right, wrong, wrong, right, wrong])


def test_gpg_counts_the_groups_of_all_ranks() -> None:
    inputs = INPUTS._replace(kl=torch.zeros(4, 4), sum_over_ranks=lambda counts: 3 * counts + 6)
    # 18 responses of all ranks, 12 of which teach something
    assert estimate("gpg", inputs)[:, 1].tolist() == pytest.approx([1.5, -1.5, 0, 0])


def test_vapo_takes_a_lam_by_length_and_the_outcome_for_its_critic() -> None:
    # α = 2/3: λ = 1 - 1/2 of the three tokens, 0 of the one; errors 1 -2 3 | 0.6
    options = {"length_alpha": 2 / 3, "value_lam": 1.0}
    estimator = ESTIMATORS["vapo"]._replace(options=options)
    inputs = without_kl()
    assert estimator(inputs)[:2, 1:].flatten().tolist() == pytest.approx([0.75, -0.5, 3, 0.6, 0, 0])
    # score minus value
    of_values = estimator.of_values(inputs)
    assert of_values[:2, 1:].flatten().tolist() == pytest.approx([2, 1, 3, 0.6, 0, 0])
    assert ESTIMATORS["ppo"].of_values is ESTIMATORS["ppo"]
    with pytest.raises(ValueError, match="length_alpha is 0"):
        estimate("vapo", inputs, length_alpha=0.0)
