"""What an algorithm samples beside the responses: ReMax's greedy response, end to end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import ReplayDataModule
from lrlhf.modules import RLOO, Advantage, DynamicSampling, Reference
from tests.modules.policy_runs import Run, letters


@pytest.fixture
def remax(build: Any) -> Callable[..., RLOO]:
    options = {"algorithm": "remax", "reference": Reference(kl_coef=0.0)}
    return lambda **changes: build(**(options | changes))


def assert_advantages(run: Run, expected: list[float]) -> None:
    """Compare with the same value for every token of a response."""
    wanted = torch.tensor(expected)[:, None] * run.experience.response_mask
    torch.testing.assert_close(run.experience.advantages, wanted)


def greedy_score(model, tokenizer, experience, row: int) -> float:
    """Generate greedily, token by token, with whole passes through the model."""
    is_prompt = experience.attention_mask[row] & ~experience.response_mask[row]
    ids = experience.input_ids[row][is_prompt]
    start = len(ids)
    for _ in range(6):
        token = model(ids[None]).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None]])
        if int(token) == tokenizer.eos_token_id:
            break
    return letters([tokenizer.decode(ids[start:], skip_special_tokens=True)])[0]


def test_the_baseline_is_the_score_of_the_greedy_response(
    remax, train, language_model, tokenizer, tmp_path
) -> None:
    log = RolloutLog(dirpath=tmp_path / "stored", save_tensors=True)
    run = train(remax(), callbacks=[log])
    assert len(run.experience) == 16  # greedy responses are not trained on
    greedy = [greedy_score(language_model, tokenizer, run.experience, row) for row in range(16)]
    assert [record["extra_values"]["greedy"] for record in run.records] == pytest.approx(greedy)
    assert len({*greedy}) > 1
    scores = run.experience.scores.tolist()
    assert_advantages(run, [score - own for score, own in zip(scores, greedy, strict=True)])
    # a stored rollout brings its greedy scores
    data = ReplayDataModule(tmp_path / "stored" / "rollouts", shuffle=False)
    again = train(remax(), data=data)
    torch.testing.assert_close(again.experience.advantages, run.experience.advantages)


def test_groups_that_are_sampled_in_rounds_keep_their_own_greedy_score(remax, train) -> None:
    run = train(remax(dynamic_sampling=DynamicSampling(prompts=2)))
    expected = [
        0.0 if record["padding"] else record["score"] - record["extra_values"]["greedy"]
        for record in run.records
    ]
    assert_advantages(run, expected)


@pytest.mark.parametrize("mode", ["std", "mean_std"])
def test_the_greedy_score_is_scaled_and_clipped_like_the_others(remax, train, mode: Any) -> None:
    run = train(remax(advantage=Advantage(scale_rewards=mode, reward_clip_range=(-1.0, 2.0))))
    scores = run.experience.scores
    shift = float(scores.mean()) if mode == "mean_std" else 0.0

    def scaled(value: float) -> float:
        return min(max((value - shift) / float(scores.std()), -1.0), 2.0)

    expected = [
        scaled(record["score"]) - scaled(record["extra_values"]["greedy"]) for record in run.records
    ]
    assert_advantages(run, expected)


def test_a_greedy_response_that_nothing_scores_leaves_its_rows_out(remax, train) -> None:
    def moody(completions: list[str]) -> list[float | None]:
        values: list[float | None] = list(letters(completions))
        if len(completions) == 4:  # the greedy ones: a quarter of them has no score
            values[1] = None
        return values

    run = train(remax(reward=moody, advantage=Advantage(normalize=True)))
    assert run.experience.counted.tolist() == [True] * 4 + [False] * 4 + [True] * 8
    assert not run.experience.loss_mask[4:8].any()
    assert (run.experience.advantages[4:8] == 0).all()
