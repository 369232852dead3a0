"""Policy losses by hand, their gradients, and what must not matter to them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lrlhf.functional import (
    aggregate,
    cispo_policy_loss,
    clip_fractions,
    clipped_policy_loss,
    cpgd_policy_loss,
    divergence_masked_policy_loss,
    geometric_mean_policy_loss,
    high_entropy_mask,
    importance_weighted_policy_loss,
    policy_metrics,
    sequence_clipped_policy_loss,
    sequence_ratio,
    soft_gate_policy_loss,
)

NAN = float("nan")
Loss = Callable[..., Tensor]
TOKEN_LOSSES: list[Loss] = [
    clipped_policy_loss,
    cispo_policy_loss,
    cpgd_policy_loss,
    importance_weighted_policy_loss,
    soft_gate_policy_loss,
    divergence_masked_policy_loss,
]
SEQUENCE_LOSSES: list[Loss] = [sequence_clipped_policy_loss, geometric_mean_policy_loss]
EVERY_TOKEN_LOSS = pytest.mark.parametrize("loss", TOKEN_LOSSES)


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def with_ratios(*ratios: float) -> tuple[Tensor, Tensor]:
    """New and old log-probabilities of the given ratios; the old are log ½."""
    old = torch.full((1, len(ratios)), math.log(0.5), dtype=torch.float64)
    return (old + row(*ratios).log()).requires_grad_(), old


def gradient(loss: Tensor, logprobs: Tensor) -> list[float]:
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    return slope.flatten().tolist()


ALL4 = torch.ones(1, 4, dtype=torch.bool)


def test_the_clipped_loss_takes_the_worse_of_both() -> None:
    logprobs, old = with_ratios(1.5, 1.5, 0.5, 0.5)
    loss = clipped_policy_loss(logprobs, old, row(2, -2, 2, -2), ALL4, clip_low=0.2, clip_high=0.3)
    # by hand, minus the smaller of: 3 and 2.6; -3 and -2.6; 1 and 1.6; -1 and -1.6
    assert loss.tolist()[0] == pytest.approx([-2.6, 3, -1, 1.6])
    # clipped at the first and last; else -ρA
    assert gradient(loss, logprobs) == pytest.approx([0, 3, -1, 0])


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    logprobs, old = with_ratios(5, 5, 2, 0.5)
    loss = clipped_policy_loss(logprobs, old, row(-2, 2, -2, -2), ALL4, dual_clip=3.0)
    # ρ = 5 would cost 10, the bound is 3 · 2; the good token and the small ratios are left alone
    assert loss.tolist()[0] == pytest.approx([6, -2.4, 4, 1.6])
    assert gradient(loss, logprobs) == pytest.approx([0, 0, 4, 0])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    logprobs, old = with_ratios(1.5, 4, 0.5, 4)
    loss = cispo_policy_loss(logprobs, old, row(2, 2, 2, -1), ALL4, ratio_max=3.0)
    expected = [
        -1.5 * 2 * math.log(0.75),
        -3 * 2 * math.log(2),
        -0.5 * 2 * math.log(0.25),
        3 * math.log(2),
    ]
    assert loss.tolist()[0] == pytest.approx(expected)
    assert gradient(loss, logprobs) == pytest.approx([-3, -6, -1, 3])


def test_cpgd_clips_log_probabilities() -> None:
    logprobs, old = with_ratios(1.5, 1.5, 0.5, 0.5)
    loss = cpgd_policy_loss(logprobs, old, row(2, -2, 2, -2), ALL4, clip_range=0.25)
    # good tokens: at most old + log 1.25; bad ones: at least old + log 0.75
    expected = [-2 * math.log(0.625), 2 * math.log(0.75), -2 * math.log(0.25), 2 * math.log(0.375)]
    assert loss.tolist()[0] == pytest.approx(expected)
    assert gradient(loss, logprobs) == pytest.approx([0, 2, -2, 0])


def test_cpgd_pulls_back_to_the_old_policy_with_a_bounded_slope() -> None:
    logprobs, old = with_ratios(1.5, 0.5, 9.0, 1.0)
    nothing = row(0, 0, 0, 0)
    loss = cpgd_policy_loss(logprobs, old, nothing, ALL4, drift_coef=2.0, drift_clip=3.0)
    # α (ρ - 1 - log ρ), with the slope α min(ρ - 1, 3)
    expected = [2 * (ratio - 1 - math.log(ratio)) for ratio in (1.5, 0.5, 9.0, 1.0)]
    assert loss.tolist()[0] == pytest.approx(expected)
    assert gradient(loss, logprobs) == pytest.approx([1, -1, 6, 0])


def test_the_tokens_with_the_highest_entropy_are_kept() -> None:
    entropy = torch.tensor([[9, 1, 3, 2, 4], [9, 2, 2, 9, 9], [0, 0, 0, 0, 0]], dtype=torch.float32)
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    kept = high_entropy_mask(entropy, mask, fraction=0.5)
    # half of four, half of two (the first of equal ones), and nothing where nothing is
    assert kept.long().tolist() == [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    # 2.8 and 1.4 tokens are rounded down
    assert torch.equal(high_entropy_mask(entropy, mask, fraction=0.7), kept)
    assert torch.equal(high_entropy_mask(entropy, mask, fraction=1.0), mask)
    one = high_entropy_mask(entropy, mask, fraction=0.01)
    assert one.sum(dim=1).tolist() == [1, 1, 0]
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match="fraction"):
            high_entropy_mask(entropy, mask, fraction=fraction)


@pytest.mark.parametrize("length_normalized", [False, True])
def test_the_sequence_loss_has_one_ratio_per_response(length_normalized: bool) -> None:
    logprobs, old = with_ratios(1.5, 0.8, 7, 1.5)
    mask = torch.tensor([[True, True, False, True]])
    # 1.5 · 0.8 · 1.5 = 1.8, or its geometric mean
    expected = 1.8 ** (1 / 3) if length_normalized else 1.8

    def loss(advantage: float, mask: Tensor = mask, **options: float) -> Tensor:
        return sequence_clipped_policy_loss(
            logprobs, old, row(advantage)[0], mask, length_normalized=length_normalized, **options
        )

    ratio = sequence_ratio(logprobs, old, mask, length_normalized=length_normalized)
    assert ratio.item() == pytest.approx(expected)
    assert loss(-2).tolist() == pytest.approx([2 * expected])
    slope = 2 * expected / (3 if length_normalized else 1)
    assert gradient(loss(-2), logprobs) == pytest.approx([slope, slope, 0, slope])
    assert loss(2, clip_low=0.1, clip_high=0.1).tolist() == pytest.approx([-2.2])
    assert loss(2, clip_high=0.15).tolist() == pytest.approx([-2.3])
    # a response without tokens has ratio 1, and no gradient
    assert loss(2, ~ALL4).tolist() == [-2]
    assert gradient(loss(2, ~ALL4), logprobs) == [0, 0, 0, 0]


def test_the_geometric_mean_clips_each_token() -> None:
    logprobs, old = with_ratios(3, 0.25, 7, 1.5)
    mask = torch.tensor([[True, True, False, True]])

    def loss(advantage: float, mask: Tensor = mask) -> Tensor:
        return geometric_mean_policy_loss(
            logprobs, old, row(advantage)[0], mask, clip_low=0.5, clip_high=1.0
        )

    # a good response: ratios of at most 2, (2 · ¼ · 3/2)^⅓; the first token has no gradient
    good = (2 * 0.25 * 1.5) ** (1 / 3)
    assert loss(2).tolist() == pytest.approx([-2 * good])
    assert gradient(loss(2), logprobs) == pytest.approx([0, -2 * good / 3, 0, -2 * good / 3])
    # a bad one: of at least ½, (3 · ½ · 3/2)^⅓; the second token has none
    bad = (3 * 0.5 * 1.5) ** (1 / 3)
    assert loss(-1).tolist() == pytest.approx([bad])
    assert gradient(loss(-1), logprobs) == pytest.approx([bad / 3, 0, 0, bad / 3])
    # a response without tokens has ratio 1, and one without an advantage teaches nothing
    assert loss(2, ~ALL4).tolist() == [-2]
    assert gradient(loss(2, ~ALL4), logprobs) == gradient(loss(0), logprobs) == [0, 0, 0, 0]


def test_the_geometric_mean_of_unclipped_ratios_is_that_of_gspo() -> None:
    logprobs, old = with_ratios(1.5, 0.8, 7, 1.5)
    mask = torch.tensor([[True, True, False, True]])
    # (1.5 · 0.8 · 1.5)^⅓
    wide = geometric_mean_policy_loss(logprobs, old, row(-2)[0], mask, clip_low=1.0, clip_high=99.0)
    assert wide.tolist() == pytest.approx([2 * 1.8 ** (1 / 3)])


@pytest.mark.parametrize("outside", [NAN, math.inf, -math.inf])
def test_the_geometric_mean_reads_nothing_outside_the_mask(outside: float) -> None:
    mask = torch.tensor([[False, True, True, False]])
    logprobs, old = with_ratios(1, 1.1, 0.9, 1)
    dirty = torch.where(mask, logprobs.detach(), outside).requires_grad_()
    advantages = row(2)[0].requires_grad_()
    loss = geometric_mean_policy_loss(dirty, torch.where(mask, old, outside), advantages, mask)
    assert loss.tolist() == pytest.approx([-2 * 0.99**0.5])
    assert gradient(loss, dirty) == pytest.approx([0, -(0.99**0.5), -(0.99**0.5), 0])


@pytest.mark.parametrize("loss", SEQUENCE_LOSSES)
def test_a_loss_of_whole_responses_trains_nothing_but_the_policy(loss: Loss) -> None:
    logprobs, old = with_ratios(1, 1, 1, 1)
    old.requires_grad_()
    advantages = row(2)[0].requires_grad_()
    loss(logprobs, old, advantages, ALL4).sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


@EVERY_TOKEN_LOSS
def test_on_policy_the_gradient_is_the_plain_one_and_reaches_nothing_else(loss: Loss) -> None:
    logprobs, old = with_ratios(1, 1, 1, 1)
    old.requires_grad_()
    advantages = row(2, -3, 0, 1).requires_grad_()
    loss(logprobs, old, advantages, ALL4).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx([-2, 3, 0, -1])
    assert old.grad is None
    assert advantages.grad is None


@EVERY_TOKEN_LOSS
@pytest.mark.parametrize("outside", [NAN, math.inf, -math.inf])
def test_what_the_mask_hides_reaches_neither_loss_nor_gradient(loss: Loss, outside: float) -> None:
    mask = torch.tensor([[False, True, True, False]])
    logprobs, old = with_ratios(1, 1.1, 0.9, 1)
    clean = loss(logprobs, old, row(0, 2, -1, 0), mask)
    dirty_logprobs = torch.where(mask, logprobs.detach(), outside).requires_grad_()
    hidden = torch.where(mask, old, outside)
    dirty = loss(dirty_logprobs, hidden, row(outside, 2, -1, outside), mask)
    assert torch.equal(dirty, clean)
    assert (dirty[~mask] == 0).all()
    assert gradient(dirty, dirty_logprobs) == gradient(clean, logprobs)


@pytest.mark.parametrize("loss", [*TOKEN_LOSSES, *SEQUENCE_LOSSES])
@pytest.mark.parametrize("gap", [300.0, -300.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_wild_token_leaves_loss_and_gradient_finite(
    loss: Loss, gap: float, advantage: float
) -> None:
    logprobs = torch.tensor([[gap]], requires_grad=True)
    advantages = torch.full((1,) if loss in SEQUENCE_LOSSES else (1, 1), advantage)
    value = loss(logprobs, torch.zeros(1, 1), advantages, ALL4[:, :1])
    assert value.isfinite().all()
    assert math.isfinite(gradient(value, logprobs)[0])


def test_the_bound_on_log_ratios_is_twenty() -> None:
    mask = ALL4[:, :2]
    for gap, bounded in ((10.0, 20.0), (9.0, 18.0), (-30.0, -20.0)):
        logprobs = torch.full((1, 2), gap, dtype=torch.float64)
        ratio = sequence_ratio(logprobs, torch.zeros_like(logprobs), mask)
        assert ratio.item() == pytest.approx(math.exp(bounded))


@pytest.mark.parametrize(
    ("loss", "options", "culprit"),
    [
        (clipped_policy_loss, {"clip_low": -0.1}, "clip_low"),
        (clipped_policy_loss, {"clip_low": 1.1}, "clip_low"),
        (clipped_policy_loss, {"clip_high": -0.1}, "clip_high"),
        (clipped_policy_loss, {"dual_clip": 1.0}, "dual_clip"),
        (cispo_policy_loss, {"ratio_max": 0.0}, "ratio_max"),
        (cpgd_policy_loss, {"clip_range": 0.0}, "clip_range"),
        (cpgd_policy_loss, {"clip_range": 1.0}, "clip_range"),
        (cpgd_policy_loss, {"drift_coef": -1.0}, "drift_coef"),
        (cpgd_policy_loss, {"drift_coef": 1.0, "drift_clip": 0.0}, "drift_clip"),
        (geometric_mean_policy_loss, {"clip_low": -0.1}, "clip_low"),
        (geometric_mean_policy_loss, {"clip_low": 1.1}, "clip_low"),
        (geometric_mean_policy_loss, {"clip_high": -0.1}, "clip_high"),
        (soft_gate_policy_loss, {"tau_negative": 0.0}, "tau_negative"),
        (divergence_masked_policy_loss, {"low": 0.0}, "low"),
        (divergence_masked_policy_loss, {"divergence": "js"}, "js"),
    ],
)
def test_impossible_bounds_are_refused(loss: Loss, options: dict[str, float], culprit: str) -> None:
    logprobs, old = with_ratios(1, 1, 1, 1)
    advantages = row(1)[0] if loss in SEQUENCE_LOSSES else row(1, 1, 1, 1)
    with pytest.raises(ValueError, match=culprit):
        loss(logprobs, old, advantages, ALL4, **options)


LOSS = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN], [NAN, NAN, NAN]])
COUNTS = ~LOSS.isnan()


@pytest.mark.parametrize(
    ("mode", "total", "own"),
    # 2 + 5 + 0 by 3 rows; 1 + 3 + 5 by 3 tokens; 9 by 3 rows · width 3
    [("sequence_mean", 7, 3), ("sequence_sum", 9, 3), ("token_mean", 9, 3), ("constant", 9, 9)],
)
def test_aggregation_by_hand(mode: str, total: float, own: float) -> None:
    assert aggregate(LOSS, COUNTS, mode=mode).item() == pytest.approx(total / own)
    for divisor in (6.0, torch.tensor(6), torch.tensor(6.0)):
        given = aggregate(LOSS, COUNTS, mode=mode, denominator=divisor)
        assert given.item() == pytest.approx(total / 6)
    # rows without tokens cost nothing
    for nothing in (None, 0.0, torch.tensor(0)):
        empty = torch.zeros_like(COUNTS)
        assert aggregate(LOSS, empty, mode=mode, denominator=nothing).item() == 0
        assert aggregate(LOSS[:0], COUNTS[:0], mode=mode, denominator=nothing).item() == 0


@pytest.mark.parametrize(
    ("mode", "denominator"),
    [("sequence_mean", 5.0), ("sequence_sum", 5.0), ("token_mean", 13.0), ("constant", 35.0)],
)
def test_micro_batches_add_up_to_the_batch(mode: str, denominator: float) -> None:
    mask = torch.arange(7) < torch.tensor([3, 1, 0, 7, 2])[:, None]
    loss = torch.randn(5, 7, dtype=torch.float64)
    shares = [
        aggregate(loss[part], mask[part], mode=mode, denominator=denominator)
        for part in ([0, 3], [4], [1, 2])
    ]
    torch.testing.assert_close(sum(shares), aggregate(loss, mask, mode=mode))


CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def test_metrics_by_hand() -> None:
    logprobs, old = with_ratios(1.5, 0.5, 1.25, 100)
    mask = torch.tensor([[True, True, True, False]])
    metrics = policy_metrics(logprobs, old, mask, **CLIP)
    k3 = [ratio - 1 - math.log(ratio) for ratio in (1.5, 0.5, 1.25)]
    assert metrics.approx_kl.item() == pytest.approx(sum(k3) / 3)
    assert metrics.clip_fraction.item() == pytest.approx(2 / 3)
    assert metrics.ratio_max.item() == pytest.approx(1.5)
    assert not metrics.approx_kl.requires_grad
    # padding, whose ratio is 1, is no ratio
    fallen = policy_metrics(*with_ratios(0.5, 0.9, 1, 1), mask & (mask.cumsum(1) < 3), **CLIP)
    assert fallen.ratio_max.item() == pytest.approx(0.9)


def test_clip_fractions_count_where_the_gradient_is_gone() -> None:
    # below: two bad ones and a good one; above: three good ones and a bad one
    ratio = torch.tensor([0.5, 0.7, 0.5, 1.5, 1.6, 1.6, 1.5, 1.0, 0.1])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    mask = torch.arange(9) < 8
    fractions = clip_fractions(ratio, advantages, mask, clip_low=0.2, clip_high=0.4)
    assert fractions.low.item() == 2 / 8
    assert fractions.high.item() == 3 / 8
