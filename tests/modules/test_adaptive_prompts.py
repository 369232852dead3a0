"""Policies whose prompts are drawn by what earlier responses have scored."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import AdaptivePrompts, PromptDataModule
from lrlhf.datamodules.adaptive import AdaptiveLoader
from lrlhf.modules import DynamicSampling
from tests.modules.policy_runs import Run, assert_same, letters
from tests.modules.test_rollout_queue import SaveAfter, asked
from tests.rollout.copy_engine import CopyEngine

HALF_LIFE = 3.0


def starts_with_letter(completions: Sequence[str]) -> list[float]:
    return [float(text[:1].isascii() and text[:1].isalpha()) for text in completions]


def data(path: Path, **options: Any) -> PromptDataModule:
    sampler = AdaptivePrompts(half_life=HALF_LIFE, **options)
    return PromptDataModule(str(path), batch_size=4, prompt_sampler=sampler)


def loader_of(run: Run) -> AdaptiveLoader[Any, Any]:
    loader = run.trainer.train_dataloader
    assert isinstance(loader, AdaptiveLoader)
    return loader


def counted(records: Sequence[Sequence[dict[str, Any]]]) -> dict[str, tuple[float, float]]:
    """Successes and failures of each prompt, from the records of a run."""
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for age, rows in enumerate(reversed(records)):
        for row in rows:
            (right if row["score"] == 1 else wrong)[row["prompt"]] += 0.5 ** (age / HALF_LIFE)
    return {prompt: (right[prompt], wrong[prompt]) for prompt in right | wrong}


def test_the_posteriors_are_what_the_responses_scored(build, train, prompts) -> None:
    run = train(build(reward=starts_with_letter), steps=6, data=data(prompts))
    loader, expected = loader_of(run), counted(run.watcher.records)
    assert len(expected) < 16  # some were drawn twice before all had come once
    for row, letter in enumerate("abcdefghijklmnop"):
        own = tuple(loader.pool.counts[:, row].tolist())
        assert own == pytest.approx(expected.get(f"say {letter}", (0.0, 0.0)))
    assert run.logged["prompts/unseen"] == 16 - len(expected)
    rates = [(0.5 + right) / (1 + right + wrong) for right, wrong in expected.values()]
    assert run.logged["prompts/success_rate"] == pytest.approx(sum(rates) / len(rates))
    assert 1 < run.logged["prompts/effective"] <= 16


def test_prompts_that_dynamic_sampling_did_not_reach_are_not_counted(build, train, prompts) -> None:
    groups: list[int] = []

    def second_differs(completions: Sequence[str]) -> list[float]:
        groups.append(len(completions))
        return [float(len(groups) == 2 and row % 2 == 0) for row in range(len(completions))]

    module = build(reward=second_differs, dynamic_sampling=DynamicSampling(prompts=1))
    pool = loader_of(train(module, data=data(prompts))).pool
    assert groups == [4, 4]
    counts = {(float(right), float(wrong)) for right, wrong in pool.counts.T}
    # one all wrong, one half right, and fourteen without a response
    assert counts == {(0.0, 4.0), (2.0, 2.0), (0.0, 0.0)}
    assert int((pool.counts.sum(dim=0) > 0).sum()) == 2


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_draws_the_same_prompts(
    build, train, prompts, tmp_path, ahead: int, stop: int
) -> None:
    checkpoint = tmp_path / "middle.ckpt"

    def run(*callbacks: Any, **options: Any) -> Run:
        engine = CopyEngine(concurrent=True) if ahead else None
        pushes = [VLLMWeightSync(probe_every=0)] if ahead else []
        module = build(
            reward=starts_with_letter, engine=engine, max_staleness=ahead, num_generations=2, seed=5
        )
        result: Run = train(
            module, steps=7, data=data(prompts), callbacks=[*pushes, *callbacks], **options
        )
        return result

    whole = run(SaveAfter(stop, checkpoint))
    rest = run(ckpt_path=str(checkpoint))
    assert asked(rest) == asked(whole)[stop:]
    assert_same(whole.after, rest.after)
    assert torch.equal(loader_of(rest).pool.counts, loader_of(whole).pool.counts)
    in_order = [f"say {letter}" for letter in "abcdefghijklmnop"]
    epoch = [prompt for batch in asked(whole)[:4] for prompt in batch]
    assert {*epoch} < {*in_order}


def test_scores_between_right_and_wrong_stop_the_run(build, train, prompts) -> None:
    with pytest.raises(ValueError, match=r"set data\.prompt_sampler\.threshold"):
        train(build(reward=letters), data=data(prompts))
    run = train(build(reward=letters), data=data(prompts, threshold=0.3))
    rewarded = [record["score"] for record in run.records]
    assert float(loader_of(run).pool.counts[0].sum()) == sum(score >= 0.3 for score in rewarded) > 0
