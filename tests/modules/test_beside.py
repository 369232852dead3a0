"""What an algorithm samples beside the responses: ReMax's greedy response, end to end."""

import copy

import pytest
import torch

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import ReplayDataModule
from lrlhf.modules import RLOO, Advantage, DynamicSampling, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import Watcher, fit, letters
from tests.modules.test_rloo import build


def greedy_score(model, tokenizer, experience, row: int) -> float:
    """Generate greedily, token by token, with whole passes through the model."""
    prompt = experience.input_ids[row][
        experience.attention_mask[row] & ~experience.response_mask[row]
    ]
    ids = prompt.clone()
    for _ in range(6):
        token = int(model(ids[None]).logits[0, -1].argmax())
        ids = torch.cat([ids, torch.tensor([token])])
        if token == tokenizer.eos_token_id:
            break
    text = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    return letters([text])[0]


def test_the_baseline_is_the_score_of_the_greedy_response(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    start = copy.deepcopy(language_model).eval()
    watcher = Watcher()
    module = build(language_model, tokenizer, algorithm="remax", reference=Reference(kl_coef=0.0))
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    (experience,), (records,) = watcher.experiences, watcher.records
    assert len(experience) == 16  # greedy responses are not trained on
    greedy = [greedy_score(start, tokenizer, experience, row) for row in range(16)]
    assert [record["beside"]["greedy"] for record in records] == pytest.approx(greedy)
    assert len({*greedy}) > 1
    for row in range(16):
        advantage = experience.advantages[row, experience.response_mask[row]]
        expected = float(experience.scores[row]) - greedy[row]
        torch.testing.assert_close(advantage, torch.full_like(advantage, expected))


def test_a_stored_rollout_brings_its_greedy_scores(
    tokenizer, language_model, prompts, tmp_path
) -> None:
    options = {"algorithm": "remax", "update": Update(num_minibatches=2)}
    first, second = Watcher(), Watcher()
    log = RolloutLog(dirpath=tmp_path / "stored", save_tensors=True)
    fit(
        build(copy.deepcopy(language_model), tokenizer, **options),
        prompts,
        tmp_path,
        steps=1,
        callbacks=[first, log],
    )
    again = build(copy.deepcopy(language_model), tokenizer, **options)
    fit(
        again,
        prompts,
        tmp_path,
        steps=1,
        callbacks=[second],
        data=ReplayDataModule(tmp_path / "stored" / "rollouts", shuffle=False),
    )
    torch.testing.assert_close(second.experiences[0].advantages, first.experiences[0].advantages)


def test_groups_that_are_sampled_in_rounds_keep_their_own_greedy_score(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    watcher = Watcher()
    module = build(
        language_model,
        tokenizer,
        algorithm="remax",
        advantage=Advantage(),
        reference=Reference(kl_coef=0.0),
        dynamic_sampling=DynamicSampling(prompts=2),
    )
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    (experience,), (records,) = watcher.experiences, watcher.records
    for row, record in enumerate(records):
        advantage = experience.advantages[row, experience.response_mask[row]]
        expected = 0.0 if record["filler"] else record["score"] - record["beside"]["greedy"]
        torch.testing.assert_close(advantage, torch.full_like(advantage, expected))


def test_the_greedy_score_is_scaled_and_clipped_like_the_others(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    watcher = Watcher()
    module = build(
        language_model,
        tokenizer,
        algorithm="remax",
        advantage=Advantage(scale_rewards="std", reward_clip_range=(-1.0, 2.0)),
        reference=Reference(kl_coef=0.0),
    )
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    (experience,), (records,) = watcher.experiences, watcher.records
    deviation = float(experience.scores.std())
    for row, record in enumerate(records):
        score, greedy = (
            min(max(value / deviation, -1.0), 2.0)
            for value in (record["score"], record["beside"]["greedy"])
        )
        advantage = experience.advantages[row, experience.response_mask[row]]
        torch.testing.assert_close(advantage, torch.full_like(advantage, score - greedy))


def test_a_greedy_response_that_nothing_scores_leaves_its_rows_out(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    calls: list[int] = []

    def moody(completions: list[str]) -> list[float | None]:
        calls.append(len(completions))
        values: list[float | None] = list(letters(completions))
        if len(completions) == 4:  # the greedy ones: a quarter of them has no score
            values[1] = None
        return values

    watcher = Watcher()
    module = RLOO(
        language_model,
        Rewards([moody]),
        tokenizer=tokenizer,
        algorithm="remax",
        num_generations=4,
        sampling=Sampling(max_new_tokens=6),
        advantage=Advantage(normalize=True),
    )
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher], limit_val_batches=0)
    (experience,) = watcher.experiences
    assert 4 in calls
    assert experience.counted.tolist() == [True] * 4 + [False] * 4 + [True] * 8
    assert not experience.loss_mask[4:8].any()
    assert (experience.advantages[4:8] == 0).all()
