"""Groups are sampled until enough of them differ, whatever the width of a round."""

import torch

from lrlhf.rewards import RewardResult
from lrlhf.rollout import Collected, collect_different, extra_values_of, groups_differ
from lrlhf.rollout.dynamic_sampling import merge_collected
from lrlhf.types import PromptBatch, Rollout

NAN = float("nan")


def prompts(count: int) -> PromptBatch:
    return PromptBatch(
        input_ids=torch.arange(count)[:, None],
        attention_mask=torch.ones(count, 1, dtype=torch.bool),
        prompts=tuple(f"p{index}" for index in range(count)),
        columns=tuple({} for _ in range(count)),
    )


def sampled(part: PromptBatch, scores: list[list[float]], width: int) -> Collected:
    """Two responses to each prompt; their tokens are the prompt's number."""
    rows = 2 * len(part)
    ids = part.input_ids.repeat_interleave(2, 0).expand(rows, width)
    flat = torch.tensor([score for group in scores for score in group])
    rollout = Rollout(
        input_ids=ids,
        attention_mask=torch.ones(rows, width, dtype=torch.bool),
        response_mask=torch.ones(rows, width, dtype=torch.bool),
        sampling_logprobs=torch.full((rows, width), -1.0),
        group_ids=torch.arange(len(part)).repeat_interleave(2),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )
    result = RewardResult(
        scores=flat,
        per_function=flat[:, None],
        names=("reward",),
        metrics={"reward/m": float(width)},
        extras={"note": [f"{name}" for name in part.prompts for _ in range(2)]},
        failures=[],
    )
    records = [{"group": row // 2, "prompt": part.prompts[row // 2]} for row in range(rows)]
    extra = {"greedy": part.input_ids[:, 0].repeat_interleave(2).float() - 1}
    return Collected(rollout, result, records).with_extra_values(extra)


SCORES = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.5, 0.25], [NAN, 1.0]]


def collect(count: int, wanted: int, **options):
    rounds = []

    def sample(part: PromptBatch, first: int) -> Collected:
        rounds.append((first, len(part)))
        chosen = [SCORES[index] for index in part.input_ids[:, 0].tolist()]
        return sampled(part, chosen, width=2 + len(rounds))

    found = collect_different(
        prompts(count),
        sample,
        count=wanted,
        num_generations=2,
        any_rank=options.get("any_rank", lambda value: value),
    )
    return found, rounds


def test_rounds_go_on_until_enough_groups_differ() -> None:
    found, rounds = collect(6, 2)
    # the first round finds one, the second (2 and 3) the other, the third is not needed
    assert rounds == [(0, 2), (2, 2)]
    assert found.used == 4
    assert [record["prompt"] for record in found.collected.records] == ["p1", "p1", "p3", "p3"]
    assert found.collected.rollout.input_ids[:, 0].tolist() == [1, 1, 3, 3]
    assert not found.padding_rows.any()
    assert found.collected.extra_values["greedy"].tolist() == [0, 0, 2, 2]
    assert found.everything.extra_values["greedy"].tolist() == [-1, -1, 0, 0, 1, 1, 2, 2]
    rollout = found.collected.rollout
    assert rollout.input_ids.shape == (4, 4)  # three columns in the first round, four after
    assert rollout.attention_mask.sum(dim=1).tolist() == [3, 3, 4, 4]
    assert rollout.sampling_logprobs[0].tolist() == [-1, -1, -1, 0]
    assert rollout.group_ids.unique().numel() == 2


def test_extra_values_come_back_from_the_records() -> None:
    collected = collect(6, 2)[0].collected
    values = torch.tensor([0.5, NAN, 1.0, 2.0])
    collected = collected.with_extra_values({"other": values})
    read = extra_values_of(collected.records)
    assert list(read) == list(collected.extra_values) == ["greedy", "other"]
    assert read["greedy"].tolist() == [0, 0, 2, 2]
    torch.testing.assert_close(read["other"], values, equal_nan=True)
    assert extra_values_of([{"group": 0}]) == {}


def test_a_batch_that_ends_early_is_filled_up() -> None:
    found, rounds = collect(3, 2)
    assert rounds == [(0, 2), (2, 1)]
    assert [record["prompt"] for record in found.collected.records] == ["p1", "p1", "p0", "p0"]
    assert found.padding_rows.tolist() == [False, False, True, True]
    assert found.collected.rewards.extras["note"] == ["p1", "p1", "p0", "p0"]


def test_a_rank_that_has_enough_draws_on_while_another_has_not() -> None:
    found, rounds = collect(6, 1, any_rank=lambda value: True)
    assert len(rounds) == 6
    assert len(found.collected.records) == 2
    assert found.collected.records[0]["prompt"] == "p1"


def test_a_group_differs_if_two_scorable_scores_do() -> None:
    flat = torch.tensor([score for group in SCORES for score in group])
    assert groups_differ(flat, 2).tolist() == [False, True, False, True, True, False]
    assert groups_differ(torch.tensor([NAN, NAN, 1.0, NAN, 1.0, 2.0]), 3).tolist() == [False, True]
    several = torch.tensor([[1.0, NAN], [1.0, 3.0], [2.0, 5.0], [2.0, 6.0], [7.0, 0.0], [8.0, 0.0]])
    assert groups_differ(several, 2).tolist() == [False, True, True]
    assert groups_differ(several[:0], 2).tolist() == groups_differ(flat[:0], 2).tolist() == []


def test_metrics_of_rounds_are_weighted_by_their_responses() -> None:
    merged = merge_collected(
        [sampled(prompts(3), SCORES[:3], width=2), sampled(prompts(1), SCORES[:1], width=6)]
    )
    assert merged.rewards.metrics == {"reward/m": (6 * 2 + 2 * 6) / 8}
    assert [record["group"] for record in merged.records] == [0, 0, 1, 1, 2, 2, 3, 3]
