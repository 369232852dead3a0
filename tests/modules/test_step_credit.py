"""Rewards of steps on their way from a process reward to the tokens that end the steps."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaForTokenClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lrlhf.modules import PPO, RLOO, Advantage
from lrlhf.modules.policy.experience import UNSCALED, as_experience, compute_advantages
from lrlhf.rewards import ProcessReward, RewardFunction, Rewards, StepReward, StepValues
from lrlhf.rollout import Collector, Response, Sampling, TransformersEngine, assemble_rollout
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import Rollout
from tests.conftest import build_language_model
from tests.modules.policy_runs import one_process
from tests.modules.test_policy_objective import assembled
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.test_episodes import HUNDRED, Echo, play, prompt_batch

EOS = "<|endoftext|>"


class Lines(RewardFunction):
    """Gives 1 for the first line, 2 for the second, and so on."""

    scores_steps = True

    def __call__(self, *, completions: Sequence[str], **columns: Any) -> StepValues:  # type: ignore[override]
        steps = []
        for text in completions:
            ends, end = [], 0
            for line in str(text).splitlines(keepends=True):
                end += len(line)
                ends.append(end)
            steps.append([StepReward(end, float(n)) for n, end in enumerate(ends, start=1)])
        return StepValues([sum(step.value for step in own) for own in steps], steps)


def collected(tokenizer: Any, ids: Sequence[Sequence[int]], *rewards: Any) -> Rollout:
    """Responses of these tokens to the prompt "p", scored."""
    prompts = token_prompts([tokenizer("p")["input_ids"]])
    said = [torch.tensor(own) for own in ids]
    rollout = assemble_rollout(
        prompts,
        [Response.sampled(own, torch.zeros(len(own)), truncated=False) for own in said],
        num_generations=len(said),
        pad_id=0,
    )
    given = list(rewards) or [Lines()]
    collector = Collector(TransformersEngine(), Rewards(given), tokenizer)
    return collector.score(prompts, rollout, Sampling(), step=0, phase=nullcontext).rollout


def earned(rollout: Rollout, row: int = 0) -> dict[int, float]:
    assert rollout.turn_rewards is not None
    columns = rollout.turn_rewards[row].nonzero()[:, 0].tolist()
    return {column: float(rollout.turn_rewards[row, column]) for column in columns}


def test_a_reward_stands_at_the_token_that_ends_its_step(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    texts = [f"ab\nc\nd{EOS}", f"é\nf{EOS}", "g"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    rollout = collected(tokenizer, ids)
    # p a b \n c \n d <eos>: the last step goes to the end of the response
    assert earned(rollout, 0) == {3: 1.0, 5: 2.0, 7: 3.0}
    # p é(2 bytes) \n f <eos>
    assert earned(rollout, 1) == {3: 1.0, 5: 2.0}
    assert earned(rollout, 2) == {1: 1.0}


def test_the_half_of_a_letter_does_not_complete_it(tokenizer: PreTrainedTokenizerBase) -> None:
    class Letter(Lines):
        def __call__(self, *, completions: Sequence[str], **columns: Any) -> StepValues:
            return StepValues([1.0] * len(completions), [[StepReward(1, 1.0)]] * len(completions))

    rollout = collected(tokenizer, [tokenizer("€uro")["input_ids"]], Letter())
    assert earned(rollout) == {3: 1.0}  # p and three bytes


def test_a_token_that_holds_the_end_and_more_ends_the_step() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("\n")[0][0]
    words = ["<pad>", *alphabet, f".{newline}", f".{newline}B"]
    backend = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    found = []
    for said in (["A", f".{newline}", "B", "C"], ["A", f".{newline}B", "C"]):
        prompts = token_prompts([tokenizer.convert_tokens_to_ids(["p"])])
        ids = torch.tensor(tokenizer.convert_tokens_to_ids(said))
        response = Response.sampled(ids, torch.zeros(len(ids)), truncated=False)
        rollout = assemble_rollout(prompts, [response], num_generations=1, pad_id=0)
        collector = Collector(TransformersEngine(), Rewards([Lines()]), tokenizer)
        scored = collector.score(prompts, rollout, Sampling(), step=0, phase=nullcontext)
        assert scored.records[0]["completion"] == "A.\nBC"
        found.append(earned(scored.rollout))
    assert found == [{2: 1.0, 4: 2.0}, {2: 1.0, 3: 2.0}]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[StepReward(9, 1.0)]], "a step ends after 9 characters of a response of 2: 'ab'"),
        ([[StepReward(0, 1.0)]], "a step ends after 0 characters"),
        ([[StepReward(1, float("nan"))]], "'given' gave nan for the step that ends after 1"),
        ([], "returned the steps of 0 responses and 1 values"),
    ],
)
def test_steps_that_cannot_be_credited_are_refused(
    tokenizer: PreTrainedTokenizerBase, steps: Any, message: str
) -> None:
    class Given(Lines):
        def __call__(self, **columns: Any) -> StepValues:
            return StepValues([1.0], steps)

    with pytest.raises(ValueError, match=message):
        collected(tokenizer, [tokenizer("ab")["input_ids"]], Given())


def test_turns_of_an_episode_are_paid_beside_its_environment(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    engine = ScriptedEngine(lambda text: f"{len(text)}.")
    prompts = prompt_batch("say ", word=["a"])
    rollout, episodes = play(engine, Echo, prompts)

    class Turns(Lines):
        def __call__(self, *, completions: Sequence[Any], **columns: Any) -> StepValues:
            # 6.[6.]12.[12.]20. with an end after every turn of the policy's
            ends = [[StepReward(end, 0.5) for end in (2, 9, 17)]] * len(completions)
            return StepValues([1.5] * len(completions), ends)

    rewards = Rewards(["environment_reward", Turns()], weights=[1.0, 2.0])
    collector = Collector(episodes, rewards, tokenizer)
    scored = collector.score(prompts, rollout, HUNDRED, step=0, phase=nullcontext)
    assert scored.rewards.scores.tolist() == [19.0]
    assert earned(scored.rollout) == {7: 2.0, 14: 3.0, 22: 14.0}


def test_gae_sees_each_reward_at_its_step_by_hand(tokenizer: PreTrainedTokenizerBase) -> None:
    """Rewards 1 and 2 at the ends of two steps, 1.5 more at the end, no values.

    With γ = ½ and λ = 1 advantages are the discounted sums of what is yet to come.
    """
    plain = lambda completions: [1.5] * len(completions)  # noqa: E731
    rollout = collected(tokenizer, [tokenizer(f"a\nb{EOS}")["input_ids"]], Lines(), plain)
    settings = Advantage(estimator="gae", options={"gamma": 0.5, "lam": 1.0}, normalize=False)

    def advantages(**changed: Any) -> list[float]:
        experience = as_experience(
            rollout,
            scores=torch.tensor([4.5]),
            values=torch.zeros(rollout.input_ids.shape),
        )
        chosen = Advantage(**{**vars(settings), **changed})
        found = compute_advantages(
            experience,
            algorithm=assembled(chosen),
            settings=chosen,
            reward_kl_estimator=None,
            kl_coef=0.0,
            num_generations=1,
            whiten=one_process().whiten,
            statistics=UNSCALED,
        )
        numbers: list[float] = found.advantages[0].tolist()
        return numbers

    # p a \n b <eos>: rewards 0 0 1 0 3.5; 3.5, 1.75, 1 + 0.875, 0.9375
    assert advantages() == pytest.approx([0, 0.9375, 1.875, 1.75, 3.5])
    # all of 4.5 at the end
    assert advantages(credit="response") == pytest.approx([0, 0.5625, 1.125, 2.25, 4.5])


@pytest.mark.parametrize("kind", [PPO, RLOO])
def test_a_run_with_a_process_reward(
    build: Callable[..., Any],
    train: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    kind: Any,
) -> None:
    LlamaForTokenClassification(build_language_model(tokenizer).config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = ProcessReward(str(tmp_path), aggregate="sum", split_at=" ")
    run = train(build(kind=kind, reward=reward, sampling=Sampling(max_new_tokens=40)))
    experience, records = run.experience, run.records
    placed = experience.turn_rewards
    steps = [record["extras"]["step_scores"] for record in records]
    assert max(map(len, steps)) > 1
    for row, own in enumerate(steps):
        columns = placed[row].nonzero()[:, 0]
        assert placed[row, columns].tolist() == pytest.approx(own)
        assert bool(experience.response_mask[row, columns].all())
    torch.testing.assert_close(placed.sum(dim=1), experience.scores)
    assert run.logged["rollout/score"] > 0
