"""A reward model and policies that hear, trained for a few steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import (
    BadDataError,
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    SupervisedDataModule,
)
from lrlhf.media import Audio
from lrlhf.models import CausalLM, HeadConfig, LoRA, RewardNetwork, sequence_logprobs
from lrlhf.models.scorers import HeadedBackbone
from lrlhf.modules import DPO, PPO, RLOO, SFT, Critic, OptimizerConfig, RewardModel, Update
from lrlhf.modules.checks import refuse_idle_encoder
from lrlhf.rewards import LearnedReward, RemoteReward, Rewards
from lrlhf.rewards.function import RewardError
from lrlhf.statistics.intervals import wilson_interval
from tests.hearing import RATE, build_hearing, save_hearing, tone
from tests.modules.policy_runs import assert_same, moved, sgd, weights
from tests.modules.reward_runs import trainer
from tests.modules.test_vision_training import letters_said
from tests.modules.test_vision_training import policy as policy_of
from tests.vlms import Vlm

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

PITCHES = np.geomspace(200, 6000, 60)
HEARD, UNHEARD = PITCHES[::2], PITCHES[1::2]
"""Hz, in turns: whoever knows the neighbours does not know a pitch between them by heart."""


def sound(hertz: float, phase: float = 0.0) -> dict[str, Any]:
    return {"array": tone(hertz, 0.3, phase), "sampling_rate": RATE}


def pairs(pitches: NDArray[Any], count: int, seed: int) -> list[dict[str, Any]]:
    """Two tones of any phase each; the higher one is preferred, on either side."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        first, second = random.choice(pitches, 2, replace=False)
        sounds = [sound(hertz, random.uniform(0, 2 * np.pi)) for hertz in (first, second)]
        label = "A" if first > second else "B"
        row = {"prompt": "a tone", "audio_0": sounds[0], "audio_1": sounds[1], "preference": label}
        rows.append(row)
    return rows


def hearing_reward(hearing: Vlm, seed: int = 0) -> RewardModel:
    torch.manual_seed(seed)
    network = RewardNetwork(HeadedBackbone(hearing.model.base_model, HeadConfig(pooling="mean")))
    return RewardModel(
        network,
        tokenizer=hearing.tokenizer,
        processor=hearing.processor.processor,
        optimizer=OptimizerConfig(lr=3e-3),
    )


ASKED = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "a tone"}]}]


def test_a_reward_model_prefers_the_higher_of_tones_that_it_has_not_heard(tmp_path: Path) -> None:
    hearing = build_hearing()
    module = hearing_reward(hearing)
    held_out = pairs(UNHEARD, 96, seed=1)
    data = PreferenceDataModule(pairs(HEARD, 192, seed=0), val=held_out, batch_size=16)
    run = trainer(tmp_path, max_steps=30, max_epochs=-1, check_val_every_n_epoch=None)
    before = trainer(tmp_path).validate(module, datamodule=data, verbose=False)[0]["eval/accuracy"]
    run.fit(module, datamodule=data)
    after = run.validate(module, datamodule=data, verbose=False)[0]["eval/accuracy"]
    assert before < 0.7
    low, high = wilson_interval(round(after * 96), 96)
    assert 0.75 < low < after < high
    # the same tones one at a time, as a reward in another run hears them
    scores = module.score([{"prompt": ASKED, "audio": sound(h)} for h in UNHEARD[::5]], [""] * 6)
    assert np.mean(np.diff(scores) > 0) >= 0.8


# ---- policies


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Eight rows: with no sound, one, or two, of different lengths."""
    rows = []
    for number in range(8):
        sounds = [
            {"array": tone(300 * (number + 1), 0.2 + 0.3 * index).tolist(), "sampling_rate": RATE}
            for index in range(number % 3)
        ]
        prompt = [{"role": "user", "content": f"which is {number}?"}]
        rows.append({"prompt": prompt, "audios": sounds, "answer": str(number)})
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def heard_seconds(audios: Sequence[Sequence[Audio]], **_: Any) -> list[float]:
    return [sum(audio.seconds for audio in row) for row in audios]


def policy(rewards: Rewards | None = None, **options: Any) -> RLOO | PPO:
    return policy_of(build_hearing(), rewards=rewards, **options)


def asking(questions: Path, batch_size: int = 8) -> PromptDataModule:
    return PromptDataModule(train=str(questions), batch_size=batch_size)


def encoder_of(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if "audio_tower" in name}


@pytest.mark.parametrize("tokens", [None, 1])
def test_rloo_trains_on_what_it_sampled(tokens: int | None, questions: Path, train: Any) -> None:
    update = Update(micro_batch_tokens=tokens, num_minibatches=2)
    run = train(policy(update=update), data=asking(questions))
    experience = run.experience
    assert experience.old_logprobs is not None
    sampled = experience.response_mask
    torch.testing.assert_close(
        experience.old_logprobs[sampled],
        experience.sampling_logprobs[sampled],
        rtol=0,
        atol=1e-5,
    )
    with torch.no_grad():
        plain = sequence_logprobs(build_hearing().model, experience)
    torch.testing.assert_close(
        plain[sampled], experience.sampling_logprobs[sampled], rtol=0, atol=1e-5
    )
    assert sorted(entry is None for entry in experience.media) == [False] * 10 + [True] * 6
    assert moved(run.before, encoder_of(run.after))


def test_an_update_does_not_depend_on_how_it_is_cut(questions: Path, train: Any) -> None:
    first, *others = (
        train(
            policy(update=Update(micro_batch_tokens=tokens), optimizer=sgd(0.1)),
            data=asking(questions, 4),
        )
        for tokens in (None, 1, 120)
    )
    for run in others:
        assert_same(first.after, run.after, rtol=1e-4, atol=1e-5)


def test_ppo_trains_a_critic_that_hears(questions: Path, train: Any) -> None:
    run = train(policy(module=PPO, critic=Critic()), data=asking(questions, 4))
    assert moved(run.before, encoder_of(run.after))
    assert run.watcher.experiences[-1].values.abs().sum() > 0


def test_rewards_and_records_have_what_the_policy_heard(questions: Path, train: Any) -> None:
    records = train(policy(Rewards([heard_seconds])), data=asking(questions)).records
    for record in records:
        number = int(record["columns"]["answer"])
        assert record["score"] == pytest.approx([0, 0.2, 0.7][number % 3])
        assert record["prompt"].count("<|AUDIO|>") == number % 3
        names = [f"an array of {RATE} samples per second"] * (number % 3)
        assert record.get("media", []) == names


def test_a_stored_rollout_is_trained_on_as_when_it_was_sampled(
    questions: Path, train: Any, tmp_path: Path
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    straight = train(policy(optimizer=sgd(0.1)), data=asking(questions), callbacks=[log])
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    replayed = train(policy(optimizer=sgd(0.1)), data=data)
    assert_same(straight.after, replayed.after, rtol=1e-4, atol=1e-5)


def test_a_learned_reward_hears_the_prompt_at_its_own_rate(
    questions: Path, train: Any, tmp_path: Path
) -> None:
    module = hearing_reward(build_hearing())
    module.export_pretrained(tmp_path / "scorer")
    learned = LearnedReward(str(tmp_path / "scorer"), max_tokens=None)
    run = train(policy(Rewards([learned])), data=asking(questions))
    for record in run.records:
        number = int(record["columns"]["answer"])
        sounds = [
            {
                "array": tone(300 * (number + 1), 0.2 + 0.3 * index, rate=48_000),
                "sampling_rate": 48_000,
            }
            for index in range(number % 3)
        ]
        prompt = [{"role": "user", "content": f"which is {number}?"}]
        row = {"prompt": prompt, "audios": sounds}
        # resampled at the very ends a tone differs a little
        assert module.score(row, record["completion"]) == pytest.approx(record["score"], abs=0.02)


def test_a_service_is_not_sent_sounds() -> None:
    reward = RemoteReward("http://127.0.0.1:9")
    audio = Audio(tone(440), RATE)
    call = reward(prompts=["a"], completions=["b"], log_metric=lambda *_: None, audios=[[audio]])
    with pytest.raises(RewardError, match="cannot be sent audio"):
        call.send(None)


# ---- given texts


def test_sft_learns_answers_and_not_what_is_heard(questions: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    path = tmp_path / "answered.jsonl"
    path.write_text("\n".join(json.dumps({**row, "completion": "seven"}) for row in rows))
    updates = []
    for limit in (None, 1):
        hearing = build_hearing()
        module = SFT(
            hearing.model,
            tokenizer=hearing.tokenizer,
            processor=hearing.processor.processor,
            micro_batch_tokens=limit,
            optimizer=sgd(0.1),
        )
        before = weights(module)
        run = trainer(tmp_path)
        run.fit(module, SupervisedDataModule(str(path), batch_size=8))
        # with the end of the turn and the line
        assert float(run.callback_metrics["train/tokens"]) == 8 * len("seven??")
        updates.append({name: before[name] - value for name, value in weights(module).items()})
    assert any(value.any() for value in encoder_of(updates[0]).values())
    assert_same(*updates, rtol=1e-4, atol=1e-5)


def test_dpo_compares_answers_about_sounds(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "high or low?"}],
            "audio": sound(hertz),
            "chosen": "high" if hertz > 1000 else "low",
            "rejected": "low" if hertz > 1000 else "high",
        }
        for hertz in (300, 3000, 500, 2000)
    ]
    hearing = build_hearing()
    module = DPO(
        hearing.model,
        tokenizer=hearing.tokenizer,
        processor=hearing.processor.processor,
        optimizer=OptimizerConfig(lr=3e-3),
    )
    run = trainer(tmp_path, max_epochs=30, check_val_every_n_epoch=30)
    run.fit(module, PreferenceDataModule(rows, batch_size=4, val=rows))
    # without hearing, at most half of the pairs can be right: the texts are the same
    assert float(run.callback_metrics["eval/accuracy"]) == 1.0


@pytest.mark.parametrize(
    ("shown", "answers"),
    [
        (("audio_0", "audio_1"), {"preference": "A"}),
        (("audio_chosen", "audio_rejected"), {}),
        (("audio_0", "audio_1"), {"candidate0": "a", "candidate1": "b", "preference": "A"}),
    ],
    ids=["numbered", "chosen", "with answers"],
)
def test_dpo_refuses_sounds_as_candidates(
    shown: tuple[str, str], answers: dict[str, str], tmp_path: Path
) -> None:
    sounds = dict(zip(shown, map(sound, (300, 3000)), strict=True))
    text = {"prompt": ASKED, "audio": sound(500), "chosen": "low", "rejected": "high"}
    rows = [{"prompt": "a tone", **sounds, **answers}]
    rows += [{"prompt": "x", "chosen": "low", "rejected": "high"}] * 200 if not answers else []
    hearing = build_hearing()
    data = PreferenceDataModule(rows, batch_size=1, shuffle=False)
    dpo = DPO(hearing.model, tokenizer=hearing.tokenizer, processor=hearing.processor.processor)
    with pytest.raises(BadDataError, match=f"{shown[0]}, {shown[1]}.*train a RewardModel"):
        trainer(tmp_path).fit(dpo, data)
    trainer(tmp_path, max_steps=1).fit(hearing_reward(build_hearing()), data)
    with pytest.raises(BadDataError, match="train a RewardModel"):
        trainer(tmp_path).validate(dpo, PreferenceDataModule([text], val=rows, batch_size=1))


def test_a_strategy_that_would_wait_for_an_encoder_says_what_to_freeze(tmp_path: Path) -> None:
    save_hearing(tmp_path / "model")
    waits = L.Trainer(accelerator="cpu", devices=1, strategy="ddp", logger=False)
    hearing = build_hearing()
    parts = ["audio_tower", "multi_modal_projector"]
    with pytest.raises(ValueError, match=rf"freeze it \(freeze: \[{', '.join(parts)}\]\)"):
        refuse_idle_encoder(waits, hearing.model, hearing.processor)
    advised = CausalLM(source=str(tmp_path / "model"), freeze=parts).load()
    refuse_idle_encoder(waits, advised, hearing.processor)
    rest = CausalLM(source=str(tmp_path / "model"), freeze=parts[:1]).load()
    with pytest.raises(ValueError, match=r"freeze: \[multi_modal_projector\]"):
        refuse_idle_encoder(waits, rest, hearing.processor)


def test_adapters_of_the_language_model_leave_the_encoder_as_it_is(
    tmp_path: Path, questions: Path, train: Any
) -> None:
    save_hearing(tmp_path / "model")
    lora = LoRA(r=2, target_modules=r".*language_model.*_proj")
    spec = CausalLM(source=str(tmp_path / "model"), lora=lora)
    run = train(RLOO(spec, Rewards([letters_said]), num_generations=2), data=asking(questions))
    assert not moved(run.before, encoder_of(run.after))
    learning = [
        name for name, weight in run.module.policy.named_parameters() if weight.requires_grad
    ]
    assert learning
    assert all("lora" in name and "language_model" in name for name in learning)


def test_answers_are_generated_to_what_python_holds() -> None:
    module = policy()
    row = {"prompt": ASKED, "audio": sound(440)}
    other = {"prompt": ASKED, "audio": sound(4400)}
    answers = module.generate([row, other, row], seed=1, n=4)
    assert [len(several) for several in answers] == [4, 4, 4]
    assert len({*map(tuple, answers)}) > 1
    with pytest.raises(ValueError, match=r"prompt 0 \(from 0\): .* more parts of type 'audio'"):
        module.generate([{"prompt": ASKED}])
