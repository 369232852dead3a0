"""Prompts drawn by what their responses have scored."""

import logging
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta as beta_distribution
from torch import Tensor

from lrlhf.datamodules import AdaptivePrompts, PromptDataModule, Weighted
from lrlhf.datamodules.adaptive import AdaptiveLoader, PromptPool, learnability
from lrlhf.datamodules.loading.loader import EpochOrder, Ranks
from lrlhf.datamodules.loading.sources import Fetching
from tests.datamodules.conftest import TOKENIZER, Rows, numbered_prompts

ONES = torch.ones(4)


def pool(size: int = 6, **options: Any) -> PromptPool:
    sources = [("", torch.arange(size), 1.0)]
    return PromptPool(AdaptivePrompts(**options), sources, seed=3)


def as_list(rows: Sequence[Any]) -> list[int]:
    return [row.number for row in rows]


def loader(
    rows: int = 40, batch_size: int = 8, *, seed: int = 7, names: str = "ab", **options: Any
) -> AdaptiveLoader[Any, list[int]]:
    values = [
        SimpleNamespace(number=n, columns={"source": names[n % len(names)]}) for n in range(rows)
    ]
    return AdaptiveLoader(
        values,
        options.pop("order", EpochOrder([list(range(rows))], None, seed)),
        batch_size,
        fetching=Fetching(as_list),
        ranks=options.pop("ranks", Ranks()),
        accept_changed=options.pop("accept_changed", ()),
        adaptive=AdaptivePrompts(**options),
    )


def alone(value: Any) -> list[Any]:
    return [value]


def scores_of(rows: Sequence[int], step: int) -> Tensor:
    """Four responses to each prompt, whose success rates are 0, 1/4, … 1."""
    draws = [np.random.default_rng([row, step]).random(4) < (row % 5) / 4 for row in rows]
    return torch.tensor(np.array(draws)).float()


def steps(loader: AdaptiveLoader[Any, list[int]], count: int, *, ahead: int = 0) -> list[list[int]]:
    """Take so many batches, looking ahead before each is observed."""
    seen: list[list[int]] = []
    while len(seen) < count:
        for batch in loader:
            for skip in range(ahead):
                loader.upcoming(skip)
            loader.observe(scores_of(batch, len(seen)), alone)
            seen.append(batch)
            if len(seen) == count:
                break
    return seen


# ---- formulas


@pytest.mark.parametrize("target", [0.5, 0.2, 0.85])
@pytest.mark.parametrize(
    ("successes", "failures"), [(0.0, 0.0), (3.0, 5.0), (0.0, 16.5), (40.2, 1.0)]
)
def test_learnability_is_an_expectation_under_the_posterior(
    target: float, successes: float, failures: float
) -> None:
    posterior = beta_distribution(0.5 + successes, 0.5 + failures)
    up, down = 2 * target, 2 * (1 - target)
    utility = lambda p: (p / target) ** up * ((1 - p) / (1 - target)) ** down  # noqa: E731
    expected = quad(lambda p: utility(p) * posterior.pdf(p), 0, 1, points=[target])[0]
    counts = torch.tensor([[successes], [failures]], dtype=torch.float64)
    found = learnability(*counts, target=target)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    if target == 0.5:
        variance = posterior.mean() * (1 - posterior.mean()) - posterior.var()
        assert float(found) == pytest.approx(4 * variance, rel=1e-9)


def test_certain_prompts_of_the_target_rate_are_worth_one_and_are_drawn_most() -> None:
    rates = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    worth = learnability(1e7 * rates, 1e7 * (1 - rates), target=0.3)
    assert rates[worth.argmax()] == pytest.approx(0.3)
    assert float(worth.max()) == pytest.approx(1.0, abs=1e-5)


def test_the_posterior_halves_in_a_half_life() -> None:
    own = pool(half_life=4, threshold=0.5)
    own.observe({2: torch.tensor([1.0, 1.0, 0.0, math.nan])})
    for _ in range(4):
        own.observe({0: torch.tensor([0.0])})
    assert own.counts[0][2] == pytest.approx(1.0)
    assert own.counts[1][2] == pytest.approx(0.5)
    # 1 + 2^-1/4 + 2^-2/4 + 2^-3/4
    assert own.counts[1][0] == pytest.approx(1 + 0.840896415 + 0.707106781 + 0.594603558)
    expected = beta_distribution(0.5 + 1.0, 0.5 + 0.5).mean()
    assert own.success_rates[2] == pytest.approx(expected)
    assert own.success_rates[5] == 0.5


def test_draws_follow_the_probabilities_in_any_first_part() -> None:
    own = pool(4, exploration=0.25, half_life=1e9)
    own.observe({0: torch.tensor([1.0, 0.0] * 8), 1: torch.zeros(16), 2: torch.ones(16)})
    # 4 αβ / ((α + β)(α + β + 1)) of 8 of 16, and of none: 0.9444 and 0.5
    worth = np.array([4 * 8.5 * 8.5 / (17 * 18), 0.0, 0.0, 0.5])
    expected = 0.75 * worth / worth.sum() + 0.25 / 4
    assert own.probabilities().numpy() == pytest.approx(expected)
    draws = np.array([own.draw(number, 2) for number in range(20_000)])
    share = np.bincount(draws[:, 0], minlength=4) / len(draws)
    assert share == pytest.approx(expected, abs=4 * 0.5 / len(draws) ** 0.5)
    # the second of a first that was the most probable: the others in proportion
    after = np.bincount(draws[draws[:, 0] == 0, 1], minlength=4)
    rest = expected * (np.arange(4) != 0)
    assert after / after.sum() == pytest.approx(rest / rest.sum(), abs=4 * 0.5 / after.sum() ** 0.5)
    assert (draws[:, 0] != draws[:, 1]).all()


# ---- retirement


def test_solved_and_hopeless_prompts_are_retired_and_return() -> None:
    own = pool(4, half_life=10, exploration=0.1)
    own.observe({0: torch.ones(8), 1: torch.zeros(8), 2: torch.tensor([1.0, 0.0])})
    share = own.probabilities()
    # by exploration alone: 0.1 / 4
    assert share[:2].tolist() == pytest.approx([0.025, 0.025])
    assert share[2:].min() > 0.3
    assert own.metrics()["prompts/solved"] == own.metrics()["prompts/hopeless"] == 1
    # 8 of 8 count as 4 after a half-life: a mean of 4.5 / 5, the limit
    for iteration in range(12):
        own.observe({})
        assert (own.probabilities()[0] > 0.025) == (iteration >= 10), iteration
    # success of a hopeless one brings it back at once
    own.observe({1: torch.zeros(8)})
    assert own.probabilities()[1] == pytest.approx(0.025)
    own.observe({1: torch.tensor([1.0, 1.0])})
    assert own.probabilities()[1] > 0.1


def test_a_pool_that_is_all_retired_is_drawn_uniformly() -> None:
    own = pool(3)
    own.observe({row: torch.zeros(16) for row in range(3)})
    assert own.probabilities().tolist() == pytest.approx([1 / 3] * 3)
    assert own.metrics()["prompts/effective"] == pytest.approx(3)


# ---- sources


def test_sources_get_their_shares_of_the_draws() -> None:
    own = loader(400, 8, names="aaab", source_weights={"a": 1.0, "b": 3.0}, exploration=0.2)
    probabilities = own.pool.probabilities()
    of_b = torch.arange(400) % 4 == 3
    assert float(probabilities[of_b].sum()) == pytest.approx(0.75)
    # even if all of one are retired
    own.pool.observe({int(row): torch.ones(16) for row in of_b.nonzero()})
    assert float(own.pool.probabilities()[of_b].sum()) == pytest.approx(0.75)
    metrics = own.pool.metrics()
    # 16.5 of 17
    assert metrics["prompts/success_rate/b"] == pytest.approx(16.5 / 17)
    assert "prompts/success_rate/a" not in metrics  # nothing of it was answered
    assert metrics["prompts/unseen"] == 300


def test_weighted_sources_keep_their_weights() -> None:
    sources = [
        Weighted(Rows(numbered_prompts(30), "first.jsonl"), 1.0),
        Weighted(Rows(numbered_prompts(10), "second.jsonl"), 4.0),
    ]
    data = PromptDataModule(sources, tokenizer=TOKENIZER, prompt_sampler=AdaptivePrompts())
    data.setup("fit")
    made = data.train_dataloader()
    assert isinstance(made, AdaptiveLoader)
    assert float(made.pool.probabilities()[30:].sum()) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source_weights": {"a": 1.0}},
            "names a, and a train prompt has b in the column 'source'",
        ),
        (
            {"source_weights": {"a": 1.0, "b": 1.0}, "source_column": "task"},
            "names a, b, and a train prompt has None in the column 'task'",
        ),
        (
            {"source_weights": {"a": 1.0, "b": 1.0, "c": 1.0}},
            "source_weights: no train prompt is of c; drop it",
        ),
        (
            {
                "source_weights": {"a": 1.0, "b": 1.0},
                "order": EpochOrder([range(20), range(20, 40)], [1.0, 2.0], 7),
            },
            "data.train and prompt_sampler.source_weights both have weights",
        ),
    ],
)
def test_sources_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(**options)


# ---- what must not matter


@hypothesis_settings(max_examples=20, deadline=None)
@given(st.sampled_from([2, 4]), st.integers(0, 2**31), st.integers(0, 3), st.integers(1, 4))
def test_every_number_of_ranks_draws_the_same(
    world: int, seed: int, ahead: int, answered: int
) -> None:
    """Ranks answer the first prompts of their shares only, as dynamic sampling does."""
    one = loader(seed=seed)
    several = [
        loader(batch_size=8 // world, seed=seed, ranks=Ranks(r, world)) for r in range(world)
    ]
    batches = [iter(one), *map(iter, several)]
    for step in range(4):
        whole, *parts = (next(each) for each in batches)
        assert [row for part in parts for row in part] == whole
        for each in (one, *several):
            for skip in range(ahead):
                each.upcoming(skip)
        sampled = [
            dict(zip(part[:answered], scores_of(part[:answered], step), strict=True))
            for part in parts
        ]
        logged = []
        for rank, each in enumerate(several):

            def gather(own: Any, rank: int = rank, all_ranks: Any = sampled) -> list[Any]:
                assert own.keys() == all_ranks[rank].keys()
                return list(reversed(all_ranks))  # the order of the ranks does not matter either

            logged.append(each.observe(scores_of(parts[rank][:answered], step), gather))
        # a single rank that answered the same prompts
        one.pool.observe({row: group for part in sampled for row, group in part.items()})
        assert logged == [one.pool.metrics()] * world
        for each in several:
            assert torch.equal(each.pool.counts, one.pool.counts)


@given(st.permutations(range(6)))
def test_the_order_of_observations_does_not_matter(order: Sequence[int]) -> None:
    scores = {row: scores_of([row], 1)[0] for row in range(6)}
    first, second = pool(), pool()
    for each, rows in ((first, range(6)), (second, order)):
        each.observe({row: scores[row].flip(0) if each is second else scores[row] for row in rows})
    assert torch.equal(first.counts, second.counts)
    assert torch.equal(first.probabilities(), second.probabilities())


def test_batches_have_no_prompt_twice_and_their_draw_does_not_depend_on_threads() -> None:
    seen = steps(loader(), 12)
    assert all(len(set(batch)) == 8 for batch in seen)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        large = pool(200_000)
        large.observe({row: scores_of([row], 0)[0] for row in range(500)})
        expected = large.probabilities()
        torch.set_num_threads(1)
        assert torch.equal(large.probabilities(), expected)
    finally:
        torch.set_num_threads(threads)


# ---- late observations, and resuming


def test_a_batch_is_drawn_from_what_was_scored_before_it_was_first_needed() -> None:
    right_away, late = loader(), loader()
    draws: dict[str, list[list[int]]] = {"right away": steps(right_away, 4), "late": []}
    draws["late"] = steps(late, 4, ahead=1)
    # the first two of the late ones were drawn from nothing
    fresh = PromptPool(AdaptivePrompts(), [("", torch.arange(40), 1.0)], seed=7)
    assert draws["late"][:2] == [fresh.draw(0, 8), fresh.draw(1, 8)]
    assert draws["right away"][0] == fresh.draw(0, 8)
    # the third from the scores of the first alone
    fresh.observe(dict(zip(draws["late"][0], scores_of(draws["late"][0], 0), strict=True)))
    assert draws["late"][2] == fresh.draw(2, 8)
    assert draws["right away"][1] == fresh.draw(1, 8)
    assert draws["late"] != draws["right away"]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("taken", [1, 4, 5, 7])
def test_a_run_that_was_stopped_anywhere_draws_what_the_whole_run_draws(
    taken: int, ahead: int
) -> None:
    whole, stopped, resumed = loader(), loader(), loader()
    expected = steps(whole, 12, ahead=ahead)
    seen = steps(stopped, taken, ahead=ahead)
    state = stopped.state_dict()
    steps(stopped, 1, ahead=ahead)  # the state is a copy
    resumed.load_state_dict(state)
    while len(seen) < 12:
        for batch in resumed:
            for skip in range(ahead):
                resumed.upcoming(skip)
            resumed.observe(scores_of(batch, len(seen)), alone)
            seen.append(batch)
            if len(seen) == 12:
                break
    assert seen == expected
    assert torch.equal(resumed.pool.counts, whole.pool.counts)
    # the batch in hand, the one before, and those ahead
    assert len(resumed.state_dict()["prompts"]["drawn"]) <= 2 + ahead


def test_a_resume_with_other_sizes_or_rows(caplog: pytest.LogCaptureFixture) -> None:
    before = loader()
    steps(before, 2, ahead=2)
    other_size = loader(batch_size=4)
    other_size.load_state_dict(before.state_dict())
    assert torch.equal(other_size.pool.counts, before.pool.counts)
    assert len(next(iter(other_size))) == 4
    # two ranks go on with what one has drawn ahead
    halves = [loader(batch_size=4, ranks=Ranks(rank, 2)) for rank in range(2)]
    for half in halves:
        half.load_state_dict(before.state_dict())
    following = [next(iter(before)), before.upcoming()]
    first, second = ([next(iter(half)), half.upcoming()] for half in halves)
    assert [a + b for a, b in zip(first, second, strict=True)] == following
    without = {key: value for key, value in before.state_dict().items() if key != "prompts"}
    fresh = loader()
    with caplog.at_level(logging.WARNING):
        fresh.load_state_dict(without)
    assert "they start anew" in caplog.text
    assert not fresh.pool.counts.any()
    longer = loader(41, accept_changed=("rows", "data"))
    longer.load_state_dict(before.state_dict())
    assert longer.pool.counts.shape == (2, 41)
    assert not longer.pool.counts.any()


# ---- values that make no sense


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "hopeless, target and solved are 0.1, 0.0 and 0.9; they must ascend"),
        ({"hopeless": 0.6}, "must ascend"),
        ({"solved": 1.1}, "must ascend"),
        # else every prompt without a response would count as solved, or as hopeless
        ({"target": 0.2, "solved": 0.45}, "hopeless below 0.5 and solved above it"),
        ({"target": 0.8, "hopeless": 0.55}, "hopeless below 0.5 and solved above it"),
        ({"threshold": math.nan}, "threshold is nan; it must be finite"),
        ({"exploration": 0.0}, "exploration is 0.0; it must be above 0 and finite"),
        ({"exploration": 1.5}, "exploration is 1.5; it is a share"),
        ({"half_life": 0.0}, "half_life is 0.0; it must be above 0"),
        ({"half_life": math.inf}, "half_life is inf"),
        ({"source_weights": {"a": 0.0}}, "source_weights.a is 0.0; it must be above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptivePrompts(**options)


def test_scores_need_a_threshold_unless_they_are_right_or_wrong() -> None:
    plain, limited = AdaptivePrompts(), AdaptivePrompts(threshold=0.9)
    assert plain.count(torch.tensor([1.0, 0.0, math.nan, 1.0])) == (2, 1)
    for score in (0.25, -1.0, 2.0):
        with pytest.raises(
            ValueError, match=f"has score {score:g}, which is neither 0 nor 1: set data"
        ):
            plain.count(torch.tensor([1.0, score]))
    # a sum of weighted rewards may miss 1 by rounding, which the message has to show
    with pytest.raises(ValueError, match=r"has score 1\.00000012, which"):
        plain.count(torch.tensor([1 + 2**-23]))
    # 0.9 of float32 is less than 0.9
    assert limited.count(torch.tensor([0.9, 0.89, -3.0, math.nan])) == (1, 2)


def test_a_score_without_a_threshold_changes_no_posterior() -> None:
    own = pool()
    own.observe({0: ONES})
    before = own.counts.clone()
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        own.observe({0: ONES, 1: ONES / 2})
    assert torch.equal(own.counts, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": False}, "prompt_sampler draws a batch when the one before is scored"),
        ({"num_workers": 2}, "set num_workers: 0 and shuffle: true"),
        ({"prompt_sampler": {"goal": 0.5}}, "goal"),
    ],
)
def test_a_data_module_refuses_what_does_not_go_with_the_sampler(
    options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PromptDataModule(
            Rows(numbered_prompts(8)), **{"prompt_sampler": {"target": 0.4}, **options}
        )


def test_a_source_without_a_weight_is_seen_before_a_run() -> None:
    data = PromptDataModule(
        Rows(numbered_prompts(8)),
        tokenizer=TOKENIZER,
        prompt_sampler=AdaptivePrompts(source_column="number", source_weights={"0": 1.0}),
    )
    assert len(data.first_rows(None, 1)[0].rows) == 1
    with pytest.raises(ValueError, match="a train prompt has 1 in the column 'number'"):
        data.first_rows(None, 2)
