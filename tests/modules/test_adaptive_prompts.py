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
        own = (float(loader.pool.successes[row]), float(loader.pool.failures[row]))
        assert own == pytest.approx(expected.get(f"say {letter}", (0.0, 0.0)))
    assert run.logged["prompts/unseen"] == 16 - len(expected)
    rates = [(0.5 + right) / (1 + right + wrong) for right, wrong in expected.values()]
    assert run.logged["prompts/success_rate"] == pytest.approx(sum(rates) / len(rates))
    assert 1 < run.logged["prompts/effective"] <= 16


def test_prompts_that_dynamic_sampling_did_not_reach_are_not_counted(build, train, prompts) -> None:
    module = build(
        reward=starts_with_letter, dynamic_sampling=DynamicSampling(prompts=1), num_generations=8
    )
    answered = 0
    collect = module.sampler._collector.collect

    def counting(batch: Any, *args: Any, **options: Any) -> Any:
        nonlocal answered
        answered += len(batch)
        return collect(batch, *args, **options)

    module.sampler._collector.collect = counting
    own = data(prompts)
    run = train(module, steps=1, data=own)
    pool = loader_of(run).pool
    assert answered == int((pool.successes + pool.failures > 0).sum()) < 4
    assert float((pool.successes + pool.failures).sum()) == 8 * answered


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
    for name in ("successes", "failures"):
        assert torch.equal(
            getattr(loader_of(rest).pool, name), getattr(loader_of(whole).pool, name)
        )
    in_order = [f"say {letter}" for letter in "abcdefghijklmnop"]
    epoch = [prompt for batch in asked(whole)[:4] for prompt in batch]
    assert {*epoch} < {*in_order}


def test_scores_between_right_and_wrong_stop_the_run(build, train, prompts) -> None:
    with pytest.raises(ValueError, match=r"set data\.prompt_sampler\.threshold"):
        train(build(reward=letters), data=data(prompts))
    run = train(build(reward=letters), data=data(prompts, threshold=0.3))
    rewarded = [record["score"] for record in run.records]
    assert float(loader_of(run).pool.successes.sum()) == sum(score >= 0.3 for score in rewarded) > 0
