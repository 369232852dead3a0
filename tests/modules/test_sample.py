"""`module.sample`: responses with tokens, log-probabilities and scores, beside a run or none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.environments import Episodes
from lrlhf.modules import PPO, RLOO, Sampled
from lrlhf.rewards import RewardError, Rewards
from lrlhf.run import run_seed, sample_seeds
from tests.modules.policy_runs import assert_same, fit, letters, weights
from tests.vlms import build_vlm, picture

Build = Callable[..., RLOO | PPO]
CHAT = [{"role": "user", "content": "say a"}]
SEEN = [{"prompt": "say a", "answer": "a"}, {"prompt": "say bb", "answer": "b"}]


def counts_answer(completions: Sequence[str], answer: Sequence[str]) -> list[float | None]:
    """How often the answer is in a completion; None for an empty one."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.count(wanted)) if text else None for text, wanted in pairs]


def breaks(completions: Sequence[str]) -> list[float]:
    raise RuntimeError(f"of the user's own reward, {len(completions)}")


def as_texts(sampled: Any) -> Any:
    return [as_texts(one) for one in sampled] if isinstance(sampled, list) else str(sampled)


def test_no_two_responses_of_a_run_share_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [
        seed
        for run in (0, 1)
        for step in range(3)
        for prompt in range(3)
        for seed in sample_seeds(run, step, prompt, count=2)
    ]
    assert len(seeds) == len({*seeds}) == 36
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert (run_seed(None), run_seed(0)) == (5, 0)


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_log_probabilities_are_those_of_a_forward_pass(
    build: Build, tokenizer: PreTrainedTokenizerBase, kind: type[RLOO | PPO]
) -> None:
    module = build(kind=kind)
    sampled = module.sample("say a", n=3, temperature=0.7, max_new_tokens=8, seed=3)
    before = tokenizer("say a")["input_ids"]
    for one in sampled:
        row = torch.tensor([[*before, *one.token_ids]])
        with torch.no_grad():
            logits = module.policy(input_ids=row).logits[0].double()
        steps = [
            torch.log_softmax(logits[len(before) + at - 1] / 0.7, dim=-1)[token].item()
            for at, token in enumerate(one.token_ids)
        ]
        assert one.logprobs == pytest.approx(steps, abs=1e-5)
        assert one.logprob == pytest.approx(sum(steps), abs=1e-4)
        assert "".join(one.tokens) == tokenizer.decode(one.token_ids)
        assert len(one.tokens) == len(one.token_ids)
        ended = one.token_ids[-1] == tokenizer.eos_token_id
        assert one.finish_reason == ("stop" if ended else "length")
        assert (one.score, one.rewards) == (None, {})
    assert len({one.text for one in sampled}) > 1


def test_texts_and_forms_are_those_of_generate(build: Build) -> None:
    module = build()
    for asked in ("say a", CHAT, SEEN, ["say a", CHAT], []):
        for n in (1, 2):
            options: dict[str, Any] = {"n": n, "seed": 5, "max_new_tokens": 5}
            texts, sampled = module.generate(asked, **options), module.sample(asked, **options)
            assert as_texts(sampled) == texts
    assert module.sample([CHAT])[0].prompt == tuple(CHAT)


def test_scores_are_those_of_the_rewards_on_request(build: Build) -> None:
    rewards = Rewards([counts_answer, letters], weights=[1.0, 0.5], optional=["counts_answer"])
    module = build(rewards=rewards)
    groups = module.sample(SEEN, n=4, scored=True, seed=1)
    alone = module.sample(SEEN, n=4, scored=True, seed=1, batch_size=1)
    for one, other in zip(itertools.chain(*alone), itertools.chain(*groups), strict=True):
        assert (one.text, one.rewards) == (other.text, other.rewards)
    for row, group in zip(SEEN, groups, strict=True):
        for one in group:
            (share,) = letters([one.text])
            assert one.rewards["letters"] == pytest.approx(share)
            count = one.text.count(row["answer"]) if one.text else None
            assert one.rewards["counts_answer"] == count
            assert one.score == pytest.approx((count or 0) + 0.5 * share)
    with pytest.raises(RewardError, match="answer"):
        module.sample("say a", scored=True)  # there is no such column


def test_a_reward_that_breaks_counts_nothing_towards_the_end_of_the_run(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = Rewards([breaks, letters], max_failures=2)
    module = build(rewards=rewards)
    for _ in range(4):
        assert module.sample("say a", scored=True).score is None
    assert "of the user's own reward" in caplog.text
    assert not rewards._failures.counts
    rewards._failures.counts["letters"] = 0.5
    module.sample("say a", scored=True)
    assert rewards._failures.counts == {"letters": 0.5}  # nor towards its forgiveness


def test_a_run_is_the_same_whether_or_not_it_is_asked(
    build: Build, prompts: Path, tmp_path: Path
) -> None:
    class Asks(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.policy.model.layers[0].train()
            before = [part.training for part in pl_module.modules()], torch.get_rng_state()
            state = random.getstate()
            steps.append(pl_module.sample(SEEN, n=2, scored=True)[0][0].rewards["step_of"])
            assert [part.training for part in pl_module.modules()] == before[0]
            assert torch.equal(torch.get_rng_state(), before[1])
            assert random.getstate() == state

    def step_of(step: Sequence[int]) -> list[float]:
        return [float(one) for one in step]

    steps: list[Any] = []
    runs = []
    for callbacks in ([Asks()], []):
        module = build(rewards=Rewards({"letters": letters, "step_of": step_of}, [1.0, 0.0]))
        fit(module, prompts, tmp_path, callbacks=callbacks)
        runs.append(weights(module))
    assert_same(*runs)
    assert steps == [1.0, 2.0]


def test_what_is_shown_fits_a_notebook(build: Build) -> None:
    one = Sampled(
        prompt="2 + 2 =",
        text=" 4",
        score=1.0,
        finish_reason="stop",
        token_ids=(5, 2),
        tokens=(" 4", "<end>"),
        logprobs=(-0.5, -0.25),
    )
    assert str(one) == " 4"
    expected = "Sampled(' 4', score=1, tokens=2, logprob=-0.75, finish_reason='stop')"
    assert repr(one) == expected
    long = Sampled(
        prompt="a", text="b" * 500, finish_reason="length",
        token_ids=(), tokens=(), logprobs=(),
    )  # fmt: skip
    assert len(repr(long)) < 300
    table = pd.DataFrame(build().sample("say a", n=3, scored=True))
    assert list(table["prompt"]) == ["say a"] * 3
    assert table["score"].notna().all()


def test_episodes_are_answered_with_single_turns_and_their_rewards_refused(build: Build) -> None:
    def of_episodes(episodes: Sequence[Any]) -> list[float]:
        return [float(one.turns) for one in episodes]

    def calls(text: str) -> str:
        """Return a text.

        Args:
            text: Any.
        """
        return text

    module = build(reward=of_episodes, episodes=Episodes(tools=[calls]))
    assert isinstance(module.sample("say a"), Sampled)
    with pytest.raises(ValueError, match="of_episodes reads episodes"):
        module.sample("say a", scored=True)


def test_rewards_see_the_images_of_a_policy_that_sees() -> None:
    def sizes(images: Sequence[Any]) -> list[float]:
        return [float(shown[0].width) for shown in images]

    seeing = build_vlm("qwen2_vl")
    module = RLOO(
        seeing.model, Rewards([sizes]),
        tokenizer=seeing.tokenizer, processor=seeing.processor.processor,
    )  # fmt: skip
    image = picture(1)
    one = module.sample("what is it?", images=image, scored=True, max_new_tokens=4)
    assert one.score == image.width
    assert len(one.logprobs) == len(one.token_ids) <= 4
