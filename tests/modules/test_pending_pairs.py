"""A row of a reward model is over all pairs since the one before, across a resume too."""

import torch
from lrlhf.modules.pairs.pending_pairs import pending_pairs, take_up_pairs
from torch import Tensor

from lrlhf.modules.metrics.reward_metrics import RewardMetrics


def batch(seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    scores0, scores1, losses = torch.randn(3, 4, 2).unbind()
    labels = torch.tensor([[1.0, -1.0], [0.0, 1.0], [torch.nan, 1.0], [-1.0, -1.0]])
    return scores0, scores1, losses, labels, torch.randint(1, 9, (4, 2))


def test_pairs_before_and_after_a_resume_are_summed_up_together() -> None:
    whole, killed, resumed = (RewardMetrics(["a", "b"], [1.0, 2.0]) for _ in range(3))
    for seed in range(3):
        whole.update(*batch(seed))
    for seed in range(2):
        killed.update(*batch(seed))
    take_up_pairs(resumed, pending_pairs(killed))
    resumed.update(*batch(2))
    assert resumed.compute().metrics == whole.compute().metrics
    assert whole.compute().metrics["loss"] != killed.compute().metrics["loss"]


def test_where_nothing_was_pending_nothing_comes_back() -> None:
    resumed = RewardMetrics(["a"], [1.0])
    take_up_pairs(resumed, pending_pairs(RewardMetrics(["a"], [1.0])))
    assert not resumed.pairs
    take_up_pairs(resumed, ())  # a checkpoint from before this was kept
    assert not resumed.pairs
    assert not resumed.update_called


def test_a_run_on_other_ranks_gives_all_to_the_first() -> None:
    parts = []
    for seed in range(2):
        metrics = RewardMetrics(["a", "b"], [1.0, 1.0])
        metrics.update(*batch(seed))
        parts += pending_pairs(metrics)
    alone = RewardMetrics(["a", "b"], [1.0, 1.0])
    take_up_pairs(alone, parts)
    assert torch.cat(alone.pairs).shape == (8, 2, 4)
