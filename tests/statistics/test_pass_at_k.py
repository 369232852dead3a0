"""pass@k and maj@k against counting, and by hand."""

import itertools
import random
from fractions import Fraction

import pytest

from lrlhf.statistics.repeated_samples import majority_score, pass_at_k


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int) -> None:
    for right in range(samples + 1):
        answers = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(answers, k))
            share = Fraction(sum(map(any, subsets)), len(subsets))
            assert pass_at_k(samples, right, k) == pytest.approx(float(share), abs=1e-14)


def test_many_samples_are_no_trouble() -> None:
    # 1 - (9 900 · 9 899 · …) / …: C(9900, 1000) / C(10000, 1000), from logarithms of factorials
    assert pass_at_k(10_000, 0, 1000) == 0.0
    assert pass_at_k(10_000, 1, 1000) == pytest.approx(0.1)  # one in ten subsets holds it
    assert pass_at_k(10_000, 9_999, 2) == 1.0
    assert 0.99997 < pass_at_k(10_000, 100, 1000) < 1.0


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 2, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1)])
def test_what_cannot_be_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k of \d answers"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        ("4 4 5", [1, 1, 0], 1.0),
        ("5 5 4", [0, 0, 1], 0.0),
        ("4 5", [1, 0], 0.5),  # one of the two is drawn
        ("4 4 5 5 6", [1, 1, 0, 0, 1], 0.5),
        ("4 4 5", [1.0, 0.5, 0.0], 0.75),  # equal answers of different form
        ("- - 5", [0, 0, 1], 1.0),  # who says nothing has no vote
        ("- -", [1, 1], 0.0),
        ("1 2 3", [0, 0, 1], 1 / 3),
    ],
)
def test_the_most_frequent_answer_counts(
    answers: str, scores: list[float], expected: float
) -> None:
    said = [None if answer == "-" else answer for answer in answers.split()]
    assert majority_score(said, scores) == pytest.approx(expected)
    pairs = list(zip(said, scores, strict=True))
    for seed in range(5):
        random.Random(seed).shuffle(pairs)
        mixed = [list(column) for column in zip(*pairs, strict=True)]
        assert majority_score(*mixed) == majority_score(said, scores)
