"""Whole runs with environments: PPO and RLOO, records, credit, replay, resume."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf import Trainer
from lrlhf.datamodules import PromptDataModule, ReplayDataModule
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.modules import PPO, RLOO, Advantage, DynamicSampling, Reference, Update
from lrlhf.rewards import RewardFunction, Rewards
from lrlhf.rewards.function import NoSiblingsError
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import Watcher, sgd


class Letters(TextEnvironment):
    """Three turns; each pays the share of its characters that come before the row's letter."""

    def reset(self, letter: str) -> str:
        self.letter = letter
        self.turns = 0
        return f"<{letter}>"

    def step(self, action: str) -> str | None:
        self.turns += 1
        self.paid = sum(c < self.letter for c in action) / max(len(action), 1)
        if self.letter == "x" and self.turns == 2:
            raise RuntimeError("x is not a letter")
        return f"({self.turns})" if self.turns < 3 else None

    def reward(self) -> float:
        return self.paid


ROWS = [{"prompt": f"write {n} ", "letter": letter} for n, letter in enumerate("aZm5gT;k")]


def build(cls: type[RLOO | PPO], language_model: Any, tokenizer: Any, **options: Any) -> RLOO | PPO:
    chosen: dict[str, Any] = {
        "tokenizer": tokenizer,
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=40),
        "episodes": Episodes(environment=Letters, max_turn_tokens=5),
        "reference": Reference(kl_coef=0.1),
        "optimizer": sgd(0.05),
    }
    rewards = options.pop("rewards", Rewards(["environment_reward"], weights=[2.0]))
    return cls(language_model, rewards, **(chosen | options))


def run(module: Any, folder: Path, rows: Sequence[Any] = ROWS, **options: Any) -> Watcher:
    watcher = Watcher()
    data = options.pop("data", None) or PromptDataModule(rows, batch_size=4)
    checkpoint = options.pop("ckpt_path", None)
    chosen: dict[str, Any] = {"max_steps": 2, "max_epochs": -1, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=[watcher],
        **(chosen | options),
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return watcher


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("cls", [RLOO, PPO])
def test_turns_are_trained_on_and_what_is_given_is_not(
    language_model: Any, tokenizer: Any, tmp_path: Path, cls: type[RLOO | PPO]
) -> None:
    before = [weight.detach().clone() for weight in language_model.parameters()]
    watcher = run(build(cls, language_model, tokenizer), tmp_path)
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before, language_model.parameters(), strict=True)
    )
    experience, records = watcher.experiences[0], records_of(tmp_path)[:8]
    assert experience.episodes is None
    assert experience.turn_rewards is not None
    for row, record in enumerate(records):
        text = record["completion"]
        assert [part["text"] for part in record["segments"] if not part["sampled"]] == [
            "(1)",
            "(2)",
        ], text
        given = ~experience.response_mask[row]
        assert not experience.loss_mask[row][given].any()
        assert not experience.advantages[row][given].any()
        # weighted as in the score
        assert record["score"] == pytest.approx(2 * sum(record["turn_rewards"]), abs=1e-5)
        assert float(experience.turn_rewards[row].sum()) == pytest.approx(record["score"], abs=1e-5)
        letter = record["columns"]["letter"]
        assert record["prompt"].endswith(f"<{letter}>")
        turns = [message["content"] for message in record["episode"][::2]]
        assert record["turn_rewards"] == [
            pytest.approx(sum(c < letter for c in turn) / max(len(turn), 1)) for turn in turns
        ]
        assert (record["turns"], record["finish_reason"]) == (3, "done")


def test_a_failed_episode_has_no_score_and_is_not_trained_on(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [*ROWS[:3], {"prompt": "bad ", "letter": "x"}]
    rewards = Rewards(["environment_reward"], max_unscorable_fraction=0.5)
    watcher = run(
        build(RLOO, language_model, tokenizer, rewards=rewards), tmp_path, rows, max_steps=1
    )
    (experience,) = watcher.experiences
    for row, record in enumerate(records_of(tmp_path)):
        failed = record["columns"]["letter"] == "x"
        assert (record["finish_reason"] == "failed") == failed
        assert (record["score"] is None) == failed
        assert bool(experience.loss_mask[row].any()) != failed
        if failed:
            assert record["failure"] == "step() raised RuntimeError: x is not a letter"


class Prefers(RewardFunction):
    """Compares the responses to a prompt by their lengths."""

    compares_responses = True

    def __call__(self, *, completions: Sequence[Any], **_: Any) -> list[float]:
        if len(completions) < 2:
            raise NoSiblingsError("nobody to compare with")
        longest = max(map(len, completions))
        return [len(one) / longest for one in completions]


class Breaks(Letters):
    """Fails in the second of all episodes."""

    begun = 0

    def reset(self, letter: str) -> str:
        type(self).begun += 1
        self.number = self.begun
        return super().reset(letter)

    def step(self, action: str) -> str | None:
        if self.number == 2:
            raise RuntimeError("an accident")
        return super().step(action)


@pytest.mark.parametrize("cls", [RLOO, PPO])
def test_a_response_whose_only_sibling_failed_does_not_end_a_run_that_compares(
    language_model: Any, tokenizer: Any, tmp_path: Path, cls: type[RLOO | PPO]
) -> None:
    Breaks.begun = 0
    rewards = Rewards([Prefers()], max_unscorable_fraction=1.0)
    episodes = Episodes(environment=Breaks, max_turn_tokens=5)
    module = build(cls, language_model, tokenizer, rewards=rewards, episodes=episodes)
    data = PromptDataModule(ROWS, batch_size=1)
    first, second = run(module, tmp_path, data=data).experiences
    assert not first.loss_mask.any()
    assert second.loss_mask.any()
    scores = [record["score"] for record in records_of(tmp_path)]
    assert [score is None for score in scores] == [True, True, False, False]


def test_other_rewards_see_turns_and_environments(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def judge(completions: Any, environments: Any, episodes: Any, **_: Any) -> list[float]:
        seen.append((completions, [one.turns for one in environments], episodes))
        return [float(episode.turns) for episode in episodes]

    run(build(RLOO, language_model, tokenizer, rewards=Rewards([judge])), tmp_path, max_steps=1)
    ((completions, turns, episodes),) = seen
    assert turns == [3] * 8
    assert completions[0].count("(1)") == 1
    assert [one.finish_reason for one in episodes] == ["done"] * 8
    assert {record["score"] for record in records_of(tmp_path)} == {3.0}


def test_credit_of_turns_changes_ppo_and_not_the_scores(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    experiences = {}
    state = {name: value.clone() for name, value in language_model.state_dict().items()}
    for credit in ("turn", "response"):
        language_model.load_state_dict(state)
        module = build(PPO, language_model, tokenizer, advantage=Advantage(credit=credit))  # type: ignore[arg-type]
        experiences[credit] = run(module, tmp_path / credit, max_steps=1).experiences[0]
    turn, response = experiences["turn"], experiences["response"]
    assert torch.equal(turn.scores, response.scores)
    assert torch.equal(turn.input_ids, response.input_ids)
    assert turn.returns is not None
    assert response.returns is not None
    assert not torch.allclose(turn.returns, response.returns)


def test_a_resumed_run_is_the_same_run(language_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in language_model.state_dict().items()}
    run(build(PPO, language_model, tokenizer), tmp_path / "whole", max_steps=4)
    whole = [weight.detach().clone() for weight in language_model.parameters()]
    language_model.load_state_dict(state)
    run(build(PPO, language_model, tokenizer), tmp_path / "parts", max_steps=2)
    language_model.load_state_dict(state)
    run(build(PPO, language_model, tokenizer), tmp_path / "parts", max_steps=4, ckpt_path="last")
    for first, second in zip(whole, language_model.parameters(), strict=True):
        assert torch.equal(first, second)
    first, second = (records_of(tmp_path / name) for name in ("whole", "parts"))
    assert first == second


@pytest.mark.parametrize("cls", [RLOO, PPO])
def test_rewritten_histories_are_trained_on_as_they_were_seen(
    language_model: Any, tokenizer: Any, tmp_path: Path, cls: type[RLOO | PPO]
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']",
        "(message['content'] if message['role'] == 'user' else "
        "message['content'] | replace('e', '') | upper)",
    )
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    state = {name: value.clone() for name, value in language_model.state_dict().items()}
    weights, forks = [], []
    # neither how a batch is cut, nor padding, nor an interruption makes a difference
    for name, update, packs, steps in (
        ("whole", Update(), True, (2,)),
        ("cut", Update(micro_batch_tokens=1), True, (2,)),
        ("padded", Update(), False, (2,)),
        ("resumed", Update(), True, (1, 2)),
    ):
        for last in steps:
            language_model.load_state_dict(state)
            language_model.set_attn_implementation("sdpa" if packs else "eager")
            module = build(
                cls,
                language_model,
                tokenizer,
                update=update,
                sampling=Sampling(max_new_tokens=150),
                episodes=Episodes(environment=Letters, max_turn_tokens=5, history="template"),
            )
            ckpt_path = "last" if last == 2 and len(steps) == 2 else None
            watcher = run(module, tmp_path / name, rows, max_steps=last, ckpt_path=ckpt_path)
        weights.append([weight.detach().clone() for weight in language_model.parameters()])
        forks.append(watcher.experiences[-1].forks)
    assert forks[0] is not None
    assert forks[0].any()
    for name, others in zip(("cut", "padded", "resumed"), weights[1:], strict=True):
        for first, other in zip(weights[0], others, strict=True):
            if name == "resumed":
                assert torch.equal(first, other)
            torch.testing.assert_close(first, other, rtol=0, atol=2e-5, msg=name)


def test_evaluation_and_dynamic_sampling_play_episodes(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    module = build(RLOO, language_model, tokenizer, dynamic_sampling=DynamicSampling(prompts=2))
    data = PromptDataModule(ROWS, ROWS[:3], batch_size=4)
    run(module, tmp_path, data=data, val_check_interval=1, check_val_every_n_epoch=None)
    lines = (tmp_path / "eval_scores_2.jsonl").read_text().splitlines()
    assert [json.loads(line)["turns"] for line in lines] == [3, 3, 3]


def test_stored_episodes_are_trained_on_again(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    from lrlhf.callbacks import RolloutLog  # noqa: PLC0415

    state = {name: value.clone() for name, value in language_model.state_dict().items()}
    watcher = Watcher()
    log = RolloutLog(dirpath=tmp_path / "first", save_tensors=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        default_root_dir=tmp_path / "first",
        callbacks=[watcher, log],
        enable_progress_bar=False,
    )
    trainer.fit(
        build(PPO, language_model, tokenizer), datamodule=PromptDataModule(ROWS, batch_size=4)
    )
    language_model.load_state_dict(state)
    folder = next(
        path.parent
        for path in (tmp_path / "first").rglob("*.safetensors")
        if path.name.startswith("step_")
    )
    again = run(
        build(PPO, language_model, tokenizer),
        tmp_path / "second",
        data=ReplayDataModule(folder),
        max_steps=1,
    )
    first, second = watcher.experiences[0], again.experiences[0]
    assert first.turn_rewards is not None
    assert second.turn_rewards is not None
    assert torch.equal(first.turn_rewards, second.turn_rewards)
    assert torch.equal(first.input_ids, second.input_ids)
    torch.testing.assert_close(first.advantages, second.advantages, rtol=0, atol=1e-4)
