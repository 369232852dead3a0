"""Policies, critics and reward models that are shown images, trained for a step or two."""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lrlhf.callbacks import RLCheckpoint, RolloutLog
from lrlhf.datamodules import BadDataError, PreferenceDataModule, PromptDataModule, ReplayDataModule
from lrlhf.models import HeadConfig, RewardNetwork, ValueHead, ValueNetwork
from lrlhf.models.scorers import HeadedBackbone
from lrlhf.modules import (
    PPO,
    RLOO,
    Advantage,
    Critic,
    OptimizerConfig,
    Reference,
    RewardModel,
    Update,
)
from lrlhf.modules.checks import refuse_idle_encoder
from lrlhf.rewards import LearnedReward, Rewards
from lrlhf.rewards.function import completion_text
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import Watcher, fit, letters, weights
from tests.vlms import Vlm, build_vlm

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

FAMILIES = ("qwen2_vl", "gemma3", "idefics3")


def letters_said(completions: Sequence[Any]) -> list[float]:
    return letters([completion_text(completion) for completion in completions])


def sgd(lr: float) -> OptimizerConfig:
    return OptimizerConfig(
        lr=lr, weight_decay=0.0, optimizer_class="torch.optim.SGD", optimizer_options={}
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Eight rows: with no image, one, or two, of different sizes."""
    lines = []
    for number in range(8):
        names = []
        for index in range(number % 3):
            pixels = np.random.RandomState(10 * number + index).randint(
                0, 256, (32 + 16 * index, 48, 3), dtype=np.uint8
            )
            names.append(f"{number}_{index}.png")
            Image.fromarray(pixels).save(tmp_path / names[-1])
        prompt = [{"role": "user", "content": f"what is {number}?"}]
        lines.append(json.dumps({"prompt": prompt, "images": names, "answer": str(number)}))
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines))
    return path


def policy(
    vlm: Vlm,
    *,
    module: Callable[..., RLOO | PPO] = RLOO,
    rewards: Rewards | None = None,
    **options: Any,
) -> RLOO | PPO:
    settings: dict[str, Any] = {
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=5),
        "reference": Reference(kl_coef=0.1),
        "optimizer": OptimizerConfig(lr=1e-3),
        "seed": 3,
    }
    return module(
        vlm.model,
        rewards or Rewards([letters_said]),
        tokenizer=vlm.tokenizer,
        processor=vlm.processor.processor,
        **{**settings, **options},
    )


def own_critic(vlm: Vlm, **options: Any) -> Critic:
    body = build_vlm(vlm.model.config.model_type).model.base_model
    size = body.config.get_text_config().hidden_size
    return Critic(model=ValueNetwork(body, ValueHead(size, "linear")), **options)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], **{"rtol": 1e-4, "atol": 1e-6, **tolerance}, msg=name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_does_not_depend_on_how_it_is_cut(
    family: str, questions: Path, tmp_path: Path
) -> None:
    ends = []
    for tokens in (None, 1, 150):
        vlm = build_vlm(family)
        module = policy(vlm, update=Update(micro_batch_tokens=tokens), optimizer=sgd(0.1))
        fit(module, questions, tmp_path, steps=1)
        ends.append(weights(module.policy))
    moved = build_vlm(family).model.state_dict()
    assert any(not torch.equal(ends[0][name], moved[name]) for name in moved)
    encoder = [name for name in moved if "vision" in name or "visual" in name]
    assert any(not torch.equal(ends[0][name], moved[name]) for name in encoder)
    for end in ends[1:]:
        assert_same(ends[0], end, atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_ppo_trains_actor_and_critic_on_what_they_see(
    own: bool, questions: Path, tmp_path: Path
) -> None:
    vlm = build_vlm("qwen2_vl")
    critic = own_critic(vlm, optimizer=OptimizerConfig(lr=1e-2)) if own else Critic()
    module = policy(vlm, module=PPO, critic=critic, advantage=Advantage(estimator="gae"))
    assert isinstance(module, PPO)
    before = weights(module)
    watcher = Watcher()
    trainer = fit(module, questions, tmp_path, steps=2, callbacks=[watcher])
    after = weights(module)
    assert any(not torch.equal(before[name], after[name]) for name in before if "visual" in name)
    if own:
        seen = [name for name in before if name.startswith("critic.") and "visual" in name]
        assert any(not torch.equal(before[name], after[name]) for name in seen)
    assert np.isfinite(float(trainer.logged_metrics["value/loss"]))
    values = watcher.experiences[-1].values
    assert values is not None
    assert values.abs().sum() > 0


def test_rewards_and_records_are_shown_what_the_policy_saw(questions: Path, tmp_path: Path) -> None:
    shown: list[list[tuple[int, int]]] = []

    def counted(images: Sequence[Any], **_: Any) -> list[float]:
        shown.extend([image.size for image in row] for row in images)
        return [float(len(row)) for row in images]

    watcher = Watcher()
    module = policy(build_vlm("qwen2_vl"), rewards=Rewards([counted]))
    data = PromptDataModule(train=str(questions), batch_size=8, num_workers=0)
    fit(module, questions, tmp_path, steps=1, callbacks=[watcher], data=data)
    records = watcher.records[0]
    assert sorted(map(len, shown)) == sorted([number % 3 for number in range(8)] * 2)
    for record, sizes in zip(records, shown, strict=True):
        number = int(record["columns"]["answer"])
        # [width, height] as the files were written
        assert sizes == [(48, 32), (48, 48)][: number % 3]
        assert record["score"] == number % 3
        names = [Path(name).name for name in record.get("media", [])]
        assert names == [f"{number}_{index}.png" for index in range(number % 3)]
        assert record["prompt"].count("<|image_pad|>") == number % 3


def test_a_stored_rollout_with_images_is_trained_on_as_when_it_was_drawn(
    questions: Path, tmp_path: Path
) -> None:
    straight = policy(build_vlm("qwen2_vl"), optimizer=sgd(0.1))
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    data = PromptDataModule(train=str(questions), batch_size=8)
    fit(straight, questions, tmp_path, steps=1, callbacks=[log], data=data)
    replayed = policy(build_vlm("qwen2_vl"), optimizer=sgd(0.1))
    again = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    watcher = Watcher()
    fit(replayed, questions, tmp_path, steps=1, data=again, callbacks=[watcher])
    media = watcher.experiences[0].media
    assert media is not None
    assert sorted(entry is None for entry in media) == [False] * 10 + [True] * 6
    assert len({id(entry) for entry in media if entry is not None}) == 5
    assert_same(weights(replayed.policy), weights(straight.policy), atol=1e-5)


def test_a_resumed_run_with_images_ends_in_the_same_weights(
    questions: Path, tmp_path: Path
) -> None:
    def run(steps: int, **options: Any) -> RLOO:
        module = policy(build_vlm("qwen2_vl"))
        checkpoint = RLCheckpoint(
            dirpath=tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1
        )
        data = PromptDataModule(train=str(questions), batch_size=2)
        fit(module, questions, tmp_path, steps=steps, callbacks=[checkpoint], data=data, **options)
        assert isinstance(module, RLOO)
        return module

    expected = weights(run(3).policy)
    resumed = run(3, ckpt_path=str(tmp_path / "checkpoints" / "step=000002.ckpt"))
    for name, value in weights(resumed.policy).items():
        assert torch.equal(value, expected[name]), name


def test_pretraining_texts_with_images_go_into_the_loss(questions: Path, tmp_path: Path) -> None:
    dialogues = tmp_path / "dialogues.jsonl"
    image = str(tmp_path / "1_0.png")
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": "seven"}
    row = {"messages": [{"role": "user", "content": parts}, answer]}
    dialogues.write_text("\n".join([json.dumps(row)] * 4))
    module = policy(
        build_vlm("qwen2_vl"), update=Update(pretraining_coef=1.0), reference=Reference(kl_coef=0)
    )
    data = PromptDataModule(
        train=str(questions), batch_size=2, pretraining=str(dialogues), pretraining_batch_size=2
    )
    trainer = fit(module, questions, tmp_path, steps=8, data=data)
    loss = float(trainer.logged_metrics["policy/pretraining_loss"])
    # a placeholder that counted would make it infinite; ln(332) = 5.8 is what guessing gives
    assert 0 < loss < 20


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs of a bright and a dark image: the first head likes the bright one."""
    lines = []
    random = np.random.RandomState(0)
    for number in range(12):
        names = []
        for side, level in enumerate((200, 60) if number % 2 else (60, 200)):
            pixels = random.randint(level - 40, level + 40, (32, 48, 3)).astype(np.uint8)
            names.append(f"pair{number}_{side}.png")
            Image.fromarray(pixels).save(tmp_path / names[-1])
        label = "A" if number % 2 else "B"
        row = {"prompt": f"which {number}?", "image_0": names[0], "image_1": names[1]}
        row |= {"bright": "C" if number == 5 else label}
        if number % 3 == 0:
            row["dark"] = "B" if label == "A" else "A"
        lines.append(json.dumps(row))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines))
    return path


def reward_model(family: str, *, pooling: Any = "mean", lr: float = 3e-3) -> RewardModel:
    vlm = build_vlm(family)
    heads = HeadConfig(names=("bright", "dark"), pooling=pooling)
    network = RewardNetwork(HeadedBackbone(vlm.model.base_model, heads))
    return RewardModel(
        network,
        tokenizer=vlm.tokenizer,
        processor=vlm.processor.processor,
        optimizer=OptimizerConfig(lr=lr),
    )


def train(module: L.LightningModule, pairs: Path, folder: Path, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    data = PreferenceDataModule(train=str(pairs), val=str(pairs), batch_size=6)
    trainer.fit(module, datamodule=data)
    return trainer


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "gemma3", "llava_onevision", "smolvlm"])
def test_a_reward_model_of_each_family_learns_from_pairs_of_images(
    family: str, pairs: Path, tmp_path: Path
) -> None:
    module = reward_model(family)
    trainer = train(
        module, pairs, tmp_path, max_steps=24, max_epochs=-1, check_val_every_n_epoch=12
    )
    # of 11 labelled pairs; 0.5 is chance
    assert float(trainer.callback_metrics["eval/accuracy/bright"]) >= 0.9


def test_a_trained_reward_model_scores_responses_to_images(
    pairs: Path, questions: Path, tmp_path: Path
) -> None:
    module = reward_model("qwen2_vl")
    train(module, pairs, tmp_path, max_steps=2, max_epochs=-1)
    module.eval().export_pretrained(tmp_path / "reward")
    reward = LearnedReward(str(tmp_path / "reward"), head="bright", batch_size=3)
    watcher = Watcher()
    learner = policy(build_vlm("qwen2_vl"), rewards=Rewards({"learned": reward}, timeout=None))
    data = PromptDataModule(train=str(questions), batch_size=8)
    fit(learner, questions, tmp_path, steps=1, callbacks=[watcher], data=data)
    experience = watcher.experiences[0]
    for row, record in enumerate(watcher.records[0]):
        assert module.processor is not None
        prompt = [{"role": "user", "content": f"what is {record['columns']['answer']}?"}]
        media = None if experience.media is None else experience.media[row]
        if media is not None:
            parts = [{"type": "image"}] * len(media.images)
            text = {"type": "text", "text": prompt[0]["content"]}
            prompt = [{"role": "user", "content": [*parts, text]}]
        answer = {"role": "assistant", "content": record["completion"]}
        text = module.tokenizer.apply_chat_template([*prompt, answer], tokenize=False)
        images = {} if media is None else {"images": list(media.images)}
        inputs = module.processor.processor(text=[text], return_tensors="pt", **images)
        scorer = module.network.scorer
        assert isinstance(scorer, HeadedBackbone)
        with torch.no_grad():
            hidden = scorer.plain(**inputs).last_hidden_state
            expected = hidden.mean(dim=1) @ scorer.heads["bright"].projection.weight.T
        assert record["score"] == pytest.approx(float(expected), abs=1e-5)


def test_an_encoder_that_does_not_learn_sees_each_image_once_per_step(
    questions: Path, tmp_path: Path
) -> None:
    vlm = build_vlm("qwen2_vl")
    # with Qwen what fits the features to the language model is part of the encoder
    vlm.model.base_model.get_encoder("image").requires_grad_(False)
    seen: list[int] = []
    look = vlm.model.base_model.get_image_features

    def counted(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        seen.append(len(image_grid_thw))
        return look(pixel_values, image_grid_thw, **options)

    vlm.model.base_model.get_image_features = counted
    module = policy(
        vlm, update=Update(micro_batch_tokens=1), reference=Reference(kl_coef=0), num_generations=4
    )
    data = PromptDataModule(train=str(questions), batch_size=8)
    fit(module, questions, tmp_path, steps=1, data=data)
    # rows 0 to 7 have 0, 1, 2, 0, 1, 2, 0, 1 images: seven, once to generate and once to update
    assert sum(seen) == 14


def test_a_prompt_that_ends_with_its_image_is_left_out_before_training(
    questions: Path, tmp_path: Path
) -> None:
    row = {"prompt": "look <|vision_start|><|image_pad|>", "images": ["1_0.png"]}
    with questions.open("a") as handle:
        handle.write("\n" + json.dumps(row))
    data = PromptDataModule(train=str(questions), batch_size=8)
    with pytest.raises(BadDataError, match=r"ends with an image.*\n.*1_0.png"):
        fit(policy(build_vlm("qwen2_vl")), questions, tmp_path, steps=1, data=data)


@pytest.fixture
def shown_reward(tmp_path: Path) -> LearnedReward:
    vlm = build_vlm("qwen2_vl")
    network = RewardNetwork(HeadedBackbone(vlm.model.base_model, HeadConfig(pooling="mean")))
    network.save_pretrained(tmp_path / "scorer", vlm.tokenizer)
    vlm.processor.save(tmp_path / "scorer")
    return LearnedReward(str(tmp_path / "scorer"))


def scores(reward: LearnedReward, prompt: Any, completion: Any, *images: Image.Image) -> float:
    found = reward(
        prompts=[prompt],
        completions=[completion],
        completion_ids=[[1]],
        log_metric=lambda *_: None,
        log_extra=lambda *_: None,
        images=[list(images)],
    )
    assert found[0] is not None
    return found[0]


def test_a_learned_reward_sees_the_image_of_a_plain_prompt(shown_reward: LearnedReward) -> None:
    prompt = "look <|vision_start|><|image_pad|><|vision_end|> what?"
    dark, bright = (Image.new("RGB", (56, 56), (level,) * 3) for level in (20, 230))
    assert scores(shown_reward, prompt, "seven", dark) != scores(
        shown_reward, prompt, "seven", bright
    )


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
@pytest.mark.parametrize("images", [0, 1])
def test_a_response_that_spells_the_mark_of_an_image_is_scored_without_it(
    mark: str, images: int, shown_reward: LearnedReward
) -> None:
    content = [*[{"type": "image"}] * images, {"type": "text", "text": "what?"}]
    prompt = [{"role": "user", "content": content}]
    pictures = [Image.new("RGB", (56, 56), "red")] * images

    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    plain = scores(shown_reward, prompt, answer("se ven"), *pictures)
    assert scores(shown_reward, prompt, answer(f"se{mark} ven"), *pictures) == plain


def test_a_learned_reward_looks_once_at_an_image_however_many_responses_it_has(
    shown_reward: LearnedReward,
) -> None:
    pictures = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    answers = ["one", "seven", "a longer answer", "no"]

    def asked(images: Sequence[Image.Image]) -> dict[str, Any]:
        return {
            "prompts": [prompt] * len(images),
            "completions": [[{"role": "assistant", "content": text}] for text in answers * 2],
            "completion_ids": [[1]] * len(images),
            "log_metric": lambda *_: None,
            "log_extra": lambda *_: None,
            "images": [[image] for image in images],
        }

    apart = shown_reward(**asked([picture.copy() for picture in pictures for _ in answers]))
    scorer = shown_reward._loaded.network.scorer  # type: ignore[union-attr]
    assert isinstance(scorer, HeadedBackbone)
    seen: list[int] = []
    look = scorer.plain.get_image_features

    def counted(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        seen.append(len(image_grid_thw))
        return look(pixel_values, image_grid_thw, **options)

    scorer.plain.get_image_features = counted
    together = shown_reward(**asked([picture for picture in pictures for _ in answers]))
    assert sum(seen) == 2
    assert together == pytest.approx(apart, abs=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_strategy_that_would_wait_for_an_encoder_is_refused(frozen: bool) -> None:
    vlm = build_vlm("qwen2_vl")
    if frozen:
        vlm.model.base_model.get_encoder("image").requires_grad_(False)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="ddp", logger=False)
    expectation = (
        contextlib.nullcontext()
        if frozen
        else pytest.raises(ValueError, match="ddp_find_unused_parameters_true")
    )
    with expectation:
        refuse_idle_encoder(trainer, vlm.model, vlm.processor)
    refuse_idle_encoder(trainer, vlm.model, None)


def test_a_processor_beside_a_text_policy_is_refused(language_model, tokenizer) -> None:
    processor = build_vlm("qwen2_vl").processor.processor
    with pytest.raises(ValueError, match="was passed for a text model"):
        RLOO(language_model, Rewards([letters_said]), tokenizer=tokenizer, processor=processor)
