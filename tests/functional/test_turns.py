"""Credit of turns: by hand, by plain loops over lists, and what must not matter."""

from typing import Any

import pytest
import torch

from lrlhf.functional import (
    ESTIMATORS,
    discounted_returns,
    observation_numbers,
    shape_rewards,
    spread_over_turns,
    token_rewards,
    turn_ends,
    turn_numbers,
    turn_sums,
)
from tests.functional.turn_rows import (
    NAN,
    ROWS,
    SCORES,
    Turn,
    assert_rows,
    ends_by_token,
    gae_by_sums,
    inputs_of,
    mt_grpo_by_loops,
    rewards_by_token,
    rloo_turn_by_loops,
    sampled,
)

# ---- turns


def test_turns_are_numbered_and_their_ends_found() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 1, 1, 0, 0, 0], [0] * 8]).bool()
    assert turn_numbers(mask).tolist() == [
        [-1, 0, 0, -1, -1, 1, -1, 2],
        [0, -1, 1, 1, 1, -1, -1, -1],
        [-1] * 8,
    ]
    assert turn_ends(mask).long().tolist() == [
        [0, 0, 1, 0, 0, 1, 0, 1],
        [1, 0, 0, 0, 1, 0, 0, 0],
        [0] * 8,
    ]


def test_sums_of_turns_come_back_to_their_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    x = torch.tensor([[NAN, 1, 2, NAN, 4], [8, NAN, NAN, NAN, NAN], [NAN] * 5])
    numbers = turn_numbers(mask)
    sums = turn_sums(x, numbers)
    assert sums.nan_to_num(nan=-1.0).tolist() == [[3, 4], [8, -1], [-1, -1]]
    assert spread_over_turns(sums, numbers).tolist() == [
        [0, 3, 3, 0, 4],
        [8, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    nothing = torch.full((2, 3), -1)
    assert turn_sums(torch.ones(2, 3), nothing).isnan().tolist() == [[True], [True]]


def test_turns_are_rewarded_at_their_ends_and_the_rest_of_the_score_on_the_last_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 0, 0]]).bool()
    kl = torch.tensor([[9, 1, 0, 9, 2, 0], [1, 1, 9, 1, 9, 9]]).float()
    turn_rewards = torch.tensor([[7, 0, 1, 7, 0, 0.5], [0, 2, 7, 3, 7, 7]])
    # 4 - 1.5 and -1 - 5 are left for the last token
    rewards = shape_rewards(
        torch.tensor([4.0, -1.0]), kl, mask, kl_coef=0.5, turn_rewards=turn_rewards
    )
    assert rewards.tolist() == [[0, -0.5, 1, 0, -1, 3], [-0.5, 1.5, 0, -3.5, 0, 0]]
    # an unscorable row has earned nothing
    rewards = shape_rewards(
        torch.tensor([NAN, -1.0]), kl, mask, kl_coef=0.5, turn_rewards=turn_rewards
    )
    assert rewards[0].tolist() == [0, -0.5, 0, 0, -1, 0]


# ---- estimators by loops


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.5, 0.8), (0.9, 1.0), (0.9, 0.0)])
def test_gae_discounts_and_trusts_the_critic_once_per_step(
    gamma: float, lam: float, turns: bool
) -> None:
    cut_off = [True, False, False, True, False, False]
    inputs = inputs_of(ROWS, SCORES, bootstrap_mask=torch.tensor(cut_off))
    options = {"gamma": gamma, "lam": lam, "discount": "turn" if turns else "token"}
    advantages = ESTIMATORS["gae"].function(inputs, **options)
    expected = [
        gae_by_sums(row, score, gamma=gamma, lam=lam, turns=turns, cut_off=cut)
        for row, score, cut in zip(ROWS, SCORES, cut_off, strict=True)
    ]
    assert_rows(advantages, inputs, expected)


def test_gae_over_two_turns_by_hand() -> None:
    row = [Turn([0, 0], [1, 2], 4), Turn([0], [8], 0)]
    inputs = inputs_of([row], [6.0], num_generations=1)
    # rewards 0, 4 | 2; errors of one step 0 + 2 - 1 = 1, 4 + ½ · 8 - 2 = 6, 2 - 8 = -6;
    # ½ · ½ of what follows a turn, all of what follows inside one
    advantages = ESTIMATORS["gae"].function(inputs, gamma=0.5, lam=0.5, discount="turn")
    assert sampled(advantages, inputs) == [[1 + 4.5, 6 - 1.5, -6]]
    # cut off: the last return goes on with ½ · 8
    cut = inputs._replace(bootstrap_mask=torch.tensor([True]))
    advantages = ESTIMATORS["gae"].function(cut, gamma=0.5, lam=0.5, discount="turn")
    assert sampled(advantages, cut) == [[1 + 5.5, 6 - 0.5, -2]]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus"])
@pytest.mark.parametrize("turns", [True, False])
def test_rewards_to_go_are_those_of_the_turns(name: str, turns: bool) -> None:
    inputs = inputs_of(ROWS, SCORES)
    gamma = 0.5
    discount = "turn" if turns else "token"
    advantages = ESTIMATORS[name].function(inputs, gamma=gamma, discount=discount)
    expected = []
    for row, score in zip(ROWS, SCORES, strict=True):
        rewards, steps = rewards_by_token(row, score), ends_by_token(row)
        to_go = [0.0]
        for reward, end in zip(reversed(rewards), reversed(steps), strict=True):
            to_go.append(reward + (gamma if end or not turns else 1.0) * to_go[-1])
        expected.append(to_go[:0:-1])
    assert_rows(advantages, inputs, expected)


def test_without_discount_and_values_gae_is_the_reward_to_go() -> None:
    inputs = inputs_of(ROWS, SCORES)
    nothing = inputs._replace(values=torch.zeros_like(inputs.kl))
    advantages = ESTIMATORS["gae"].function(nothing, gamma=1.0, lam=1.0, discount="turn")
    mask = inputs.response_mask
    to_go = discounted_returns(token_rewards(inputs.scores, inputs), mask)
    torch.testing.assert_close(advantages, to_go)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_rloo_turn_compares_returns_of_the_same_turn(gamma: float) -> None:
    inputs = inputs_of(ROWS, SCORES)
    advantages = ESTIMATORS["rloo_turn"].function(inputs, gamma=gamma)
    assert_rows(advantages, inputs, rloo_turn_by_loops(ROWS, SCORES, gamma))


def test_rloo_turn_by_hand() -> None:
    rows = [[Turn([0], [0], 1), Turn([0, 0], [0, 0], 0)], [Turn([0], [0], 3)], [Turn([0], [0], 0)]]
    inputs = inputs_of(rows, [5.0, 3.0, 1.0])
    # returns 5, 4 | 3 | 1; the second turn has nobody to be compared with
    expected = [[5 - 2, 0, 0], [3 - 3], [1 - 4]]
    assert sampled(ESTIMATORS["rloo_turn"].function(inputs), inputs) == expected


@pytest.mark.parametrize(("coef", "eps"), [(1.0, 1e-4), (0.3, 0.5)])
def test_mt_grpo_adds_the_turn_to_the_outcome(coef: float, eps: float) -> None:
    inputs = inputs_of(ROWS, SCORES)
    advantages = ESTIMATORS["mt_grpo"].function(inputs, turn_coef=coef, eps=eps)
    assert_rows(advantages, inputs, mt_grpo_by_loops(ROWS, SCORES, coef, eps))


def test_mt_grpo_of_two_turns_is_that_of_the_paper() -> None:
    rows = [
        [Turn([0], [0], turn), Turn([0], [0], outcome)]
        for turn, outcome in ((1, 4), (0, 2), (-1, 0))
    ]
    inputs = inputs_of(rows, [5.0, 2.0, -1.0])
    # deviations 1 of the turns and 2 of the outcomes: z-scores 1, 0, -1 of both
    advantages = ESTIMATORS["mt_grpo"].function(inputs, turn_coef=0.5, eps=0.0)
    assert sampled(advantages, inputs) == [[1.5, 1], [0, 0], [-1.5, -1]]


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown discount 'turns'.*did you mean 'turn'"):
        ESTIMATORS["gae"].function(inputs_of(ROWS, SCORES), discount="turns")


# ---- what must not matter

TURN_ESTIMATORS = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {"gamma": 0.9, "lam": 0.8, "discount": "turn"}),
        ("gae", {"gamma": 0.9, "lam": 0.8}),
        ("reinforce", {"gamma": 0.9, "discount": "turn"}),
        ("rloo_turn", {"gamma": 0.9}),
        ("mt_grpo", {"turn_coef": 0.7}),
    ],
)


@TURN_ESTIMATORS
def test_padding_and_what_the_environment_says_do_not_matter(
    name: str, options: dict[str, Any]
) -> None:
    estimate = ESTIMATORS[name].function
    cut = torch.tensor([True, False, True, False, False, False])
    short = inputs_of(ROWS, SCORES, gap=1, padding=0, bootstrap_mask=cut)
    expected = sampled(estimate(short, **options), short)
    for layout in ({"gap": 5, "padding": 0}, {"gap": 1, "padding": 4}):
        inputs = inputs_of(ROWS, SCORES, **layout, bootstrap_mask=cut)
        assert sampled(estimate(inputs, **options), inputs) == expected


@TURN_ESTIMATORS
def test_the_order_of_siblings_does_not_matter(name: str, options: dict[str, Any]) -> None:
    estimate, order = ESTIMATORS[name].function, [2, 0, 1, 5, 4, 3]
    inputs = inputs_of(ROWS, SCORES)
    mixed = inputs_of([ROWS[i] for i in order], [SCORES[i] for i in order])
    expected = sampled(estimate(inputs, **options), inputs)
    found = sampled(estimate(mixed, **options), mixed)
    for line, row in zip(found, order, strict=True):
        assert line == pytest.approx(expected[row], abs=1e-12)


@TURN_ESTIMATORS
def test_an_unscorable_row_and_its_turns_are_left_out(name: str, options: dict[str, Any]) -> None:
    estimate = ESTIMATORS[name].function
    inputs = inputs_of(ROWS[:3], [4.0, NAN, 1.0])
    kept = inputs_of([ROWS[0], ROWS[2]], [4.0, 1.0], num_generations=2)
    found = sampled(estimate(inputs, **options), inputs)
    assert found[1] == [0, 0, 0]
    assert [found[0], found[2]] == sampled(estimate(kept, **options), kept)
    outside = inputs_of(ROWS[:3], [4.0, 9.0, 1.0], baseline_mask=torch.tensor([True, False, True]))
    assert sampled(estimate(outside, **options), outside) == found


@TURN_ESTIMATORS
def test_no_gradient_reaches_what_turns_earned(name: str, options: dict[str, Any]) -> None:
    inputs = inputs_of(ROWS, SCORES)
    assert inputs.turn_rewards is not None
    inputs = inputs._replace(turn_rewards=inputs.turn_rewards.requires_grad_())
    assert not ESTIMATORS[name].function(inputs, **options).requires_grad


@pytest.mark.parametrize(("name", "whole"), [("rloo_turn", "rloo"), ("mt_grpo", "grpo")])
@pytest.mark.parametrize("rewarded", [True, False])
def test_with_one_turn_the_advantages_are_those_of_whole_responses(
    name: str, whole: str, rewarded: bool
) -> None:
    rows = [row[:1] for row in ROWS]
    inputs = inputs_of(rows, SCORES)
    if not rewarded:
        inputs = inputs._replace(turn_rewards=None)
    expected = ESTIMATORS[whole].function(inputs)
    torch.testing.assert_close(ESTIMATORS[name].function(inputs), expected)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_only_who_says_so_reads_the_rewards_of_turns(name: str) -> None:
    columns = {"greedy": torch.zeros(6).double(), "weight/all": torch.ones(6).double()}
    inputs = inputs_of(ROWS, SCORES)
    inputs = inputs._replace(rows={**columns, "reward/all": inputs.scores})
    estimator = ESTIMATORS[name]
    without = estimator.function(inputs._replace(turn_rewards=None))
    assert estimator.uses_turn_rewards != torch.equal(estimator.function(inputs), without)
    # tokens of one response differ by more than KL where turns are compared
    quiet = inputs._replace(turn_rewards=None, kl_coef=0.0, values=torch.zeros_like(inputs.kl))
    by_token = sampled(estimator.function(quiet), inputs)[0]
    if estimator.per_turn and name != "mt_grpo":  # which compares the rewards of turns alone
        assert len(set(by_token)) > 1
    elif not estimator.uses_values:
        assert by_token == pytest.approx([by_token[0]] * 6)


def test_observations_are_numbered_by_their_tokens() -> None:
    rows = ["78 1* 5 2* 78 3*", "78 44* 5 9*", "6 1* 5 1*"]
    ids: list[list[int]] = []
    own: list[list[bool]] = []
    for row in rows:
        parts = [(char, part.endswith("*")) for part in row.split() for char in part.strip("*")]
        ids.append([int(char) for char, _ in parts] + [7] * (8 - len(parts)))
        own.append([taken for _, taken in parts] + [False] * (8 - len(parts)))
    attention = torch.arange(8) < torch.tensor([[8], [6], [4]])
    # read: 7 8, then 5, then 7 8 again; 7 8, then 5; 6, then 5
    numbers = observation_numbers(torch.tensor(ids), attention, torch.tensor(own))
    assert numbers.tolist() == [[0, 1, 0], [0, 1, -1], [2, 1, -1]]


def test_gigpo_compares_the_turns_behind_equal_observations() -> None:
    rows = [[Turn([0], [0], 1), Turn([0, 0], [0, 0], 0), Turn([0], [0], 0)], [Turn([0], [0], 0)]]
    inputs = inputs_of(rows, [3.0, 1.0], num_generations=2)
    inputs = inputs._replace(observations=torch.tensor([[5, 6, 5], [5, -1, -1]]))
    # returns at γ = ½: 1.5, 1, 2 of the first and 1 of the second; behind 5 stand 1.5, 2 and 1
    z = 2**-0.5
    found = ESTIMATORS["gigpo"].function(inputs, gamma=0.5, eps=0.0)
    assert_rows(found, inputs, [[z, z, z, z + 1], [-z - 1]])
    with pytest.raises(ValueError, match="gigpo"):
        ESTIMATORS["gigpo"].function(inputs._replace(observations=None))
