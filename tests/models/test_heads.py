import math

import pytest
import torch
from torch.testing import assert_close

from lrlhf.models.heads import (
    AttentionPool,
    BoundedScale,
    HeadConfig,
    RewardHead,
    last_pool,
    mean_pool,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


HIDDEN = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]], [[4.0, 0.0], [7.0, 7.0], [8.0, 8.0]]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_last_pooling_takes_the_last_attended_token() -> None:
    assert last_pool(HIDDEN, MASK).tolist() == [[3.0, 6.0], [4.0, 0.0]]


def test_mean_and_attention_pooling_ignore_even_nan_padding() -> None:
    broken = HIDDEN.masked_fill(~MASK.unsqueeze(-1), math.nan)
    # the first row: half of 1 + 3, and half of 2 + 6
    assert mean_pool(broken, MASK).tolist() == [[2.0, 4.0], [4.0, 0.0]]
    assert AttentionPool(2, generator())(broken, MASK).isfinite().all()


def test_attention_pooling_weights_each_slice_of_the_features_by_its_own_logits() -> None:
    pool = AttentionPool(2, generator())
    assert pool.views == 2
    with torch.no_grad():
        pool.values.weight.copy_(torch.eye(2))
        pool.logits.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    # first feature: logits 1 and 3, so the second token weighs e² times the first
    weight = math.exp(2) / (1 + math.exp(2))
    expected = [1 * (1 - weight) + 3 * weight, (2 + 6) / 2]
    assert_close(pool(HIDDEN, MASK)[0], torch.tensor(expected))


def test_the_scale_starts_at_one_and_stays_within_its_bounds() -> None:
    scale = BoundedScale(10.0)
    assert scale().item() == 1.0
    for value, bound in ((1e6, 10.0), (-1e6, 0.1)):
        scale.log_scale.data.fill_(value)
        assert scale().item() == pytest.approx(bound)


def test_the_scale_multiplies_the_score_in_training_and_evaluation_alike() -> None:
    plain = RewardHead(2, HeadConfig(), generator())
    scaled = RewardHead(2, HeadConfig(learn_scale=True, scale_max=10.0), generator())
    with torch.no_grad():
        scaled.scale.log_scale.fill_(1e6)
    expected = plain(HIDDEN, MASK) * 10.0
    assert_close(scaled.train()(HIDDEN, MASK), expected)
    assert_close(scaled.eval()(HIDDEN, MASK), expected)


def test_an_mlp_head_is_linear_norm_silu_linear() -> None:
    head = RewardHead(2, HeadConfig(head="mlp"), generator())
    first, _, second = head.projection
    with torch.no_grad():
        first.weight.copy_(torch.eye(2))
        second.weight.copy_(torch.tensor([[1.0, -1.0]]))
    # last token (3, 6): root mean square sqrt(22.5), then silu(x) = x / (1 + e^-x), difference
    a, b = 3 / math.sqrt(22.5), 6 / math.sqrt(22.5)
    expected = a / (1 + math.exp(-a)) - b / (1 + math.exp(-b))
    assert head(HIDDEN, MASK)[0].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ()}, "at least one name"),
        ({"names": ("a", "a")}, "names a head twice"),
        ({"names": ("a.b",)}, "'a.b' must be letters"),
        ({"pooling": "max"}, "pooling: 'max' is none of last, mean, attention"),
        ({"head": "deep"}, "head: 'deep' is none of linear, mlp"),
        ({"scale_max": 1.0}, "scale_max: 1.0 must be above 1"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadConfig(**options)
