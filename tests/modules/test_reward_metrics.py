"""Expected values by hand, or from a slower search."""

import math

import pytest
import torch
from torch import Tensor

from lrlhf.modules.metrics.reward_metrics import (
    HeadPairs,
    RewardMetrics,
    calibration_error,
    fit_tie_threshold,
    head_metrics,
    measurements_of,
    pearson,
    three_way_accuracy,
)
from lrlhf.run import Collectives
from tests.modules.policy_runs import one_process

NAN = float("nan")


def head(
    scores0: list[float],
    scores1: list[float],
    labels: list[float],
    lengths: list[list[float]] | None = None,
    prompts: list[int] | None = None,
) -> HeadPairs:
    count = len(labels)
    return HeadPairs(
        torch.tensor(scores0),
        torch.tensor(scores1),
        torch.tensor(labels),
        torch.arange(1.0, count + 1),
        torch.tensor(lengths or [[1.0, 1.0]] * count),
        torch.arange(count) if prompts is None else torch.tensor(prompts),
    )


def test_metrics_of_one_head_by_hand() -> None:
    # gaps chosen - rejected: 2, -1 (label -1: 3 - 4), 0, and a tie with |gap| 0.5, one unlabelled
    metrics = head_metrics(
        head(
            [3.0, 4.0, 1.0, 0.5, 9.0],
            [1.0, 3.0, 1.0, 0.0, 9.0],
            [1.0, -1.0, 1.0, 0.0, NAN],
            [[5.0, 2.0], [2.0, 7.0], [3.0, 3.0], [1.0, 1.0], [1.0, 1.0]],
        )
    )
    expected = {
        "pairs": 3,
        "accuracy": (1 + 0 + 0.5) / 3,
        "margin": (2 - 1 + 0) / 3,
        "chosen_mean": (3 + 3 + 1) / 3,
        "rejected_mean": (1 + 4 + 1) / 3,
        "score_ties": 1 / 3,
        "tie_gap": 0.5,
        # labelled rows are 1..4, so their losses are 1, 2, 3, 4
        "loss": 2.5,
        # all ten scores: 3 4 1 .5 9 1 3 1 0 9, of squares 9 16 1 .25 81 1 9 1 0 81
        "score_mean": 3.15,
        "score_min": 0.0,
        "score_max": 9.0,
        "score_std": math.sqrt(19.925 - 3.15**2),
        # chosen longer (5 > 2), chosen longer (label -1: 7 > 2), equal
        "longer_wins": 2.5 / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    bare = head_metrics(head([1.0, 2.0], [0.0, 0.0], [NAN, NAN]))
    assert {"accuracy", "margin", "loss", "length_correlation"}.isdisjoint(bare)


def test_the_interval_of_an_accuracy_counts_the_pairs_of_a_prompt_together() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662, 0 of 20 gives 0 to 0.1611
    for right, count, expected in ((81, 263, (0.2553, 0.3662)), (0, 20, (0.0, 0.1611))):
        gaps = [1.0] * right + [-1.0] * (count - right)
        alone = head_metrics(head(gaps, [0.0] * count, [1.0] * count))
        ends = alone["accuracy_low"], alone["accuracy_high"]
        assert ends == pytest.approx(expected, abs=5e-5)
    # 20 prompts of 5 pairs each that are all wrong are 20 observations
    many = head([-1.0] * 100, [0.0] * 100, [1.0] * 100, prompts=[row // 5 for row in range(100)])
    found = head_metrics(many)
    assert (found["accuracy_high"], found["pairs"]) == (pytest.approx(0.1611, abs=5e-5), 100)


def test_calibration_error_by_hand() -> None:
    gap = math.log(3)  # sigma = 3/4: three wins for one loss
    assert calibration_error(torch.tensor([gap, gap, gap, -gap])) == pytest.approx(0, abs=1e-6)
    # sigma(2.1972) = 0.9 in all four pairs, of which half are won: off by 0.4 in either order
    gap = math.log(9)
    assert calibration_error(torch.tensor([gap, gap, -gap, -gap])) == pytest.approx(0.4, abs=1e-5)
    assert calibration_error(torch.tensor([NAN, 1.0])).isnan()


def test_no_metric_depends_on_which_candidate_is_first() -> None:
    scores0, scores1, labels = [0.3, 2.0, -1.0], [0.1, 2.5, 1.5], [1.0, 1.0, -1.0]
    swapped = head(scores1, scores0, [-label for label in labels])
    assert head_metrics(head(scores0, scores1, labels)) == pytest.approx(head_metrics(swapped))


def test_pearson_by_hand() -> None:
    # centred x: -1 0 1, y: -1 1 0: 1 / sqrt(2 * 2)
    found = pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0, 1.0]))
    assert found == pytest.approx(0.5)
    assert pearson(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0])) is None


def test_three_way_accuracy_by_hand() -> None:
    pairs = head([1.0, 0.2, 0.1, 5.0], [0.0, 0.0, 0.2, 0.0], [1.0, 0.0, 1.0, NAN])
    # below 0.5 the second and third are ties: first and second right, third wrong
    assert three_way_accuracy(pairs, 0.5) == pytest.approx(2 / 3)
    # no ties: first right, second wrong, third wrong (candidate 1 scored higher)
    assert three_way_accuracy(pairs, 0.0) == pytest.approx(1 / 3)
    assert fit_tie_threshold(head([1.0], [0.0], [1.0])) is None


def test_a_gap_at_the_threshold_is_no_tie_and_all_may_be_ties() -> None:
    pairs = head([0.5, 0.0], [0.0, 2.0], [1.0, 0.0])
    assert three_way_accuracy(pairs, 0.5) == 0.5
    assert three_way_accuracy(pairs, 0.6) == 0.0
    # gaps of ½ and 2, both labelled ties: the threshold lies above both
    found = fit_tie_threshold(head([0.5, 0.0], [0.0, 2.0], [0.0, 0.0]))
    assert found is not None
    assert found > 2.0
    # their signs do not cancel
    gap = head_metrics(head([0.5, 0.0], [0.0, 2.0], [0.0, 0.0]))["tie_gap"]
    assert gap == pytest.approx(1.25)


def test_the_tie_threshold_is_the_best_of_an_exhaustive_search() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        gaps = torch.randn(30, generator=generator)
        labels = torch.randint(-1, 2, (30,), generator=generator).float()
        gaps = torch.where(labels == 0, gaps * 0.4, gaps + labels)
        pairs = head(gaps.tolist(), [0.0] * 30, labels.tolist())
        found = fit_tie_threshold(pairs)
        assert found is not None
        grid = torch.linspace(0, 6, 1000).tolist()
        best = max(three_way_accuracy(pairs, threshold) for threshold in grid)
        assert three_way_accuracy(pairs, found) >= best - 1e-6


def test_several_heads_are_pooled_and_listed() -> None:
    metrics = RewardMetrics(("helpful", "short"), (1.0, 3.0))
    scores0 = torch.tensor([[1.0, 0.0], [1.0, 5.0]])
    scores1 = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    losses = torch.tensor([[0.5, 0.25], [1.5, 0.0]])
    labels = torch.tensor([[1.0, 1.0], [1.0, NAN]])
    metrics.update(scores0, scores1, losses, labels, torch.ones(2, 2))
    values = metrics.compute().metrics
    # the weighted sum over labels, mean over the two pairs: (0.5 + 3 * 0.25 + 1.5) / 2
    expected = {"accuracy/helpful": 0.5, "accuracy/short": 0.0, "accuracy": 1 / 3}
    expected |= {"loss": 1.375, "loss/helpful": 1.0}
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def batch(seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    scores0, scores1, losses = torch.randn(3, 4, 2).unbind()
    labels = torch.tensor([[1.0, -1.0], [0.0, 1.0], [torch.nan, 1.0], [-1.0, -1.0]])
    return scores0, scores1, losses, labels, torch.randint(1, 9, (4, 2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_that_were_seen_before_a_resume_count(ranks: int) -> None:
    whole, resumed = (RewardMetrics(["a", "b"], [1.0, 2.0]) for _ in range(2))
    killed = [RewardMetrics(["a", "b"], [1.0, 2.0]) for _ in range(ranks)]
    for seed in range(3):
        whole.update(*batch(seed))
    for seed in range(2):
        killed[seed % ranks].update(*batch(seed))
    resumed.update(*batch(7))  # of a fit before
    # of more ranks than there are now the first takes all
    resumed.resume([one.seen() for one in killed], one_process())
    resumed.update(*batch(2))
    assert resumed.compute().metrics == pytest.approx(whole.compute().metrics)
    resumed.resume([{}], one_process())
    assert resumed.seen() == {}
    resumed.update_with_nothing()
    assert resumed.compute().metrics == {}


def test_every_rank_resumes_with_its_own_pairs() -> None:
    class Rank(Collectives):
        world_size, rank = 2, 1

    class OfFour(Collectives):
        world_size, rank = 4, 1

    killed = [RewardMetrics(["a", "b"], [1.0, 2.0]) for _ in range(2)]
    for seed, metrics in enumerate(killed):
        metrics.update(*batch(seed))
    seen = [one.seen() for one in killed]
    resumed = RewardMetrics(["a", "b"], [1.0, 2.0])
    resumed.resume(seen, Rank(one_process().trainer))
    torch.testing.assert_close(resumed.seen()["pairs"], seen[1]["pairs"], equal_nan=True)
    # of another number of ranks the first takes all
    resumed.resume(seen, OfFour(one_process().trainer))
    assert resumed.seen() == {}


def test_pairs_without_a_prompt_are_apart() -> None:
    scores = torch.tensor([[2.0]] * 30)
    labels = torch.tensor([[1.0], [-1.0]] * 15)
    alone, apart = RewardMetrics(["a"], [1.0]), RewardMetrics(["a"], [1.0])
    alone.update(scores, 0 * scores, scores, labels, torch.ones(30, 2))
    own = torch.arange(30)
    apart.update(scores, 0 * scores, scores, labels, torch.ones(30, 2), prompts=own)
    found = alone.compute().metrics
    assert found == pytest.approx(apart.compute().metrics)
    assert found["accuracy_high"] < 0.7


@pytest.mark.parametrize("name", ["pairs", "accuracy", "accuracy_low", "quality"])
def test_sets_and_heads_may_be_called_as_metrics_are(name: str) -> None:
    ends = {"accuracy": 0.5, "accuracy_low": 0.2, "accuracy_high": 0.8, "pairs": 6}
    values = {f"{metric}/{name}": value for metric, value in ends.items()}
    found = measurements_of({"loss": 0.7, f"margin/{name}": 2.0, **values}, f"eval/{name}/")
    nan = pytest.approx(NAN, nan_ok=True)
    assert [one[:5] for one in found] == [
        (f"eval/{name}/loss", 0.7, nan, nan, 0),
        (f"eval/{name}/margin/{name}", 2.0, nan, nan, 0),
        (f"eval/{name}/accuracy/{name}", 0.5, 0.2, 0.8, 6),
    ]
    (alone,) = measurements_of(ends, f"eval/{name}/")
    assert alone[:5] == (f"eval/{name}/accuracy", 0.5, 0.2, 0.8, 6)
