"""Policies, critics and reward models that are shown images, trained for a step or two."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from lrlhf.callbacks import RLCheckpoint, RolloutLog
from lrlhf.datamodules import BadDataError, PreferenceDataModule, PromptDataModule, ReplayDataModule
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.models import HeadConfig, RewardNetwork, ValueHead, ValueNetwork
from lrlhf.models.scorers import HeadedBackbone
from lrlhf.modules import PPO, RLOO, Critic, OptimizerConfig, Reference, RewardModel, Update
from lrlhf.modules.checks import refuse_idle_encoder
from lrlhf.rewards import LearnedReward, Rewards
from lrlhf.rewards.function import completion_text
from lrlhf.rollout import Sampling
from tests.matrices import few_of
from tests.modules.policy_runs import Run, assert_same, letters, moved, sgd, weights
from tests.modules.reward_runs import trainer
from tests.vlms import Vlm, build_vlm

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

FAMILIES = ("qwen2_vl", "gemma3", "idefics3")
LEARNERS = ("qwen2_vl", "qwen3_vl", "gemma3", "llava_onevision", "smolvlm")


def letters_said(completions: Sequence[Any]) -> list[float]:
    return letters([completion_text(completion) for completion in completions])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def draw(path: Path, seed: int, height: int = 32, low: int = 0, high: int = 256) -> str:
    """Write a picture of random pixels, and return its name."""
    pixels = np.random.RandomState(seed).randint(low, high, (height, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Eight rows: with no image, one, or two, of different sizes."""
    rows = []
    for number in range(8):
        names = [
            draw(tmp_path / f"{number}_{index}.png", 10 * number + index, 32 + 16 * index)
            for index in range(number % 3)
        ]
        prompt = [{"role": "user", "content": f"what is {number}?"}]
        rows.append({"prompt": prompt, "images": names, "answer": str(number)})
    return write_rows(tmp_path / "questions.jsonl", rows)


@pytest.fixture
def ask(train: Any, questions: Path) -> Callable[..., Run]:
    """Trains a policy on the questions."""

    def ask(module: Any, *, batch_size: int = 8, **options: Any) -> Run:
        data = PromptDataModule(train=str(questions), batch_size=batch_size, num_workers=0)
        result: Run = train(module, **({"data": data} | options))
        return result

    return ask


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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_does_not_depend_on_how_it_is_cut(family: str, ask) -> None:
    runs = []
    for tokens in (None, 1, 150):
        update = Update(micro_batch_tokens=tokens)
        runs.append(ask(policy(build_vlm(family), update=update, optimizer=sgd(0.1)), batch_size=4))
    before, after = runs[0].before, runs[0].after
    encoder = {name: after[name] for name in after if "vision" in name or "visual" in name}
    assert moved(before, encoder)
    assert moved(before, {name: after[name] for name in after.keys() - encoder})
    for run in runs[1:]:
        assert_same(after, run.after, rtol=1e-4, atol=1e-5)


def test_turns_behind_images_are_refused_before_anything_is_sampled(ask) -> None:
    module = policy(build_vlm("qwen2_vl"), algorithm="gigpo")
    monitored: list[Any] = []
    module.engine.generate = lambda *given, **_: monitored.append(given)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="these rows show images or sounds"):
        ask(module)
    assert not monitored


@pytest.mark.parametrize("own", [False, True])
def test_ppo_trains_actor_and_critic_on_what_they_see(own: bool, ask) -> None:
    critic = Critic()
    if own:
        body = build_vlm("qwen2_vl").model.base_model
        head = ValueHead(body.config.get_text_config().hidden_size, "linear")
        critic = Critic(model=ValueNetwork(body, head), optimizer=OptimizerConfig(lr=1e-2))
    run = ask(policy(build_vlm("qwen2_vl"), module=PPO, critic=critic), steps=2, batch_size=4)
    for role in ("policy.", "critic.") if own else ("policy.",):
        seen = [name for name in run.after if name.startswith(role) and "visual" in name]
        assert moved(run.before, {name: run.after[name] for name in seen})
    assert np.isfinite(run.logged["value/loss"])
    values = run.watcher.experiences[-1].values
    assert values is not None
    assert values.abs().sum() > 0


def test_rewards_and_records_are_shown_what_the_policy_saw(ask) -> None:
    shown: list[list[tuple[int, int]]] = []

    def counted(images: Sequence[Any], **_: Any) -> list[float]:
        shown.extend([image.size for image in row] for row in images)
        return [float(len(row)) for row in images]

    records = ask(policy(build_vlm("qwen2_vl"), rewards=Rewards([counted]))).records
    assert sorted(map(len, shown)) == sorted([number % 3 for number in range(8)] * 2)
    for record, sizes in zip(records, shown, strict=True):
        number = int(record["columns"]["answer"])
        # [width, height] as the files were written
        assert sizes == [(48, 32), (48, 48)][: number % 3]
        assert record["score"] == number % 3
        names = [Path(name).name for name in record.get("media", [])]
        assert names == [f"{number}_{index}.png" for index in range(number % 3)]
        assert record["prompt"].count("<|image_pad|>") == number % 3


def test_a_stored_rollout_with_images_is_trained_on_as_when_it_was_sampled(
    ask, tmp_path: Path
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    straight = ask(policy(build_vlm("qwen2_vl"), optimizer=sgd(0.1)), callbacks=[log])
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    replayed = ask(policy(build_vlm("qwen2_vl"), optimizer=sgd(0.1)), data=data)
    media = replayed.experience.media
    assert media is not None
    assert sorted(entry is None for entry in media) == [False] * 10 + [True] * 6
    assert len({id(entry) for entry in media if entry is not None}) == 5
    assert_same(straight.after, replayed.after, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_with_images_ends_in_the_same_weights(ask, tmp_path: Path) -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        files = RLCheckpoint(dirpath=tmp_path / "files", every_n_train_steps=1, save_top_k=-1)
        module = policy(build_vlm("qwen2_vl"))
        return weights(ask(module, steps=3, batch_size=2, callbacks=[files], **options).module)

    assert_same(run(), run(ckpt_path=str(tmp_path / "files" / "step=000002.ckpt")))


class Turns(TextEnvironment):
    """Shows the images of the prompt again, upside down, and a square of the turn's length."""

    def reset(self, images: list[Image.Image]) -> None:
        self.images = images

    def step(self, action: str) -> Any:
        shade = 40 * (len(action) % 6)
        square = Image.new("RGB", (40, 40), (shade, 0, 255 - shade))
        return ["again", *(image.rotate(180) for image in self.images), square]


def turning(**options: Any) -> RLOO | PPO:
    return policy(
        build_vlm("qwen2_vl"),
        episodes=Episodes(environment=Turns, max_turns=3, max_turn_tokens=4),
        sampling=Sampling(max_new_tokens=300),
        **options,
    )


def test_an_update_on_episodes_with_images_does_not_depend_on_how_it_is_cut(ask) -> None:
    runs = [
        ask(turning(update=Update(micro_batch_tokens=tokens), optimizer=sgd(0.1)), batch_size=4)
        for tokens in (None, 1, 200)
    ]
    assert moved(runs[0].before, runs[0].after)
    for run in runs[1:]:
        assert_same(runs[0].after, run.after, rtol=1e-4, atol=1e-5)


def test_a_resumed_run_of_episodes_with_images_ends_in_the_same_weights(
    ask, tmp_path: Path
) -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        files = RLCheckpoint(dirpath=tmp_path / "files", every_n_train_steps=1, save_top_k=-1)
        module = turning(module=PPO, critic=Critic())
        return weights(ask(module, steps=3, batch_size=2, callbacks=[files], **options).module)

    assert_same(run(), run(ckpt_path=str(tmp_path / "files" / "step=000002.ckpt")))


def test_a_stored_rollout_of_episodes_with_images_is_trained_on_as_when_it_was_sampled(
    ask, tmp_path: Path
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", print_every=None, save_tensors=True)
    recorded = ask(turning(optimizer=sgd(0.1)), callbacks=[log], batch_size=4)
    lines = map(json.loads, (tmp_path / "log" / "rollouts.jsonl").read_text().splitlines())
    records = [record for record in lines if "tokens" in record]
    assert len(records) == 4
    for record in records:  # of each response that is written in full, what its turns showed
        behind = record["media"][int(record["columns"]["answer"]) % 3 :]
        assert len(behind) >= 2
        assert behind[-1] in record["pictures"]
        assert record["pictures"].keys() == {*behind}
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    # its images are gone: a table has none
    log = RolloutLog(dirpath=tmp_path / "again", print_every=1)
    replayed = ask(turning(optimizer=sgd(0.1)), data=data, callbacks=[log])
    assert moved(recorded.before, recorded.after)
    assert_same(recorded.after, replayed.after, rtol=1e-4, atol=1e-5)


def test_pretraining_texts_with_images_go_into_the_loss(ask, questions, tmp_path: Path) -> None:
    image = str(tmp_path / "1_0.png")
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    answer = {"role": "assistant", "content": "seven"}
    row = {"messages": [{"role": "user", "content": parts}, answer]}
    texts = {"pretraining": str(write_rows(tmp_path / "dialogues.jsonl", [row] * 4))}
    data = PromptDataModule(train=str(questions), batch_size=2, pretraining_batch_size=2, **texts)
    update = Update(pretraining_coef=1.0)
    module = policy(build_vlm("qwen2_vl"), update=update, reference=Reference(kl_coef=0))
    # a placeholder that counted would make it infinite; ln(332) = 5.8 is what guessing gives
    assert 0 < ask(module, steps=2, data=data).logged["policy/pretraining_loss"] < 20


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs of a bright and a dark image: the first head likes the bright one."""
    rows = []
    for number in range(12):
        levels = (200, 60) if number % 2 else (60, 200)
        names = [
            draw(tmp_path / f"pair{number}_{side}.png", number, low=level - 40, high=level + 40)
            for side, level in enumerate(levels)
        ]
        label = "A" if number % 2 else "B"
        row = {"prompt": f"which {number}?", "image_0": names[0], "image_1": names[1]}
        row["bright"] = "C" if number == 5 else label
        if number % 3 == 0:
            row["dark"] = "B" if label == "A" else "A"
        rows.append(row)
    return write_rows(tmp_path / "pairs.jsonl", rows)


@pytest.mark.parametrize("family", few_of(LEARNERS, ["qwen2_vl", "gemma3"]))
def test_a_reward_model_of_each_family_learns_from_pairs_of_images(
    family: str, pairs: Path
) -> None:
    vlm = build_vlm(family)
    heads = HeadConfig(names=("bright", "dark"), pooling="mean")
    module = RewardModel(
        RewardNetwork(HeadedBackbone(vlm.model.base_model, heads)),
        tokenizer=vlm.tokenizer,
        processor=vlm.processor.processor,
        optimizer=OptimizerConfig(lr=3e-3),
    )
    run = trainer(pairs.parent, max_steps=24, max_epochs=-1, check_val_every_n_epoch=12)
    data = PreferenceDataModule(train=str(pairs), val=str(pairs), batch_size=6)
    run.fit(module, datamodule=data)
    # of 11 labelled pairs; 0.5 is chance
    assert float(run.callback_metrics["eval/accuracy/bright"]) >= 0.9


def count_looks(body: Any) -> list[int]:
    """Have a model count the images that it computes features of."""
    seen: list[int] = []
    look = body.get_image_features

    def counted(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        seen.append(len(image_grid_thw))
        return look(pixel_values, image_grid_thw, **options)

    body.get_image_features = counted
    return seen


def test_an_encoder_that_does_not_learn_sees_each_image_once_per_step(ask) -> None:
    vlm = build_vlm("qwen2_vl")
    # with Qwen what fits the features to the language model is part of the encoder
    vlm.model.base_model.get_encoder("image").requires_grad_(False)
    seen = count_looks(vlm.model.base_model)
    options = {"update": Update(micro_batch_tokens=1), "reference": Reference(kl_coef=0)}
    ask(policy(vlm, num_generations=4, **options))
    # rows 0 to 7 have 0, 1, 2, 0, 1, 2, 0, 1 images: seven, once to generate and once to update
    assert sum(seen) == 14


def test_a_prompt_that_ends_with_its_image_is_left_out_before_training(ask, questions) -> None:
    row = {"prompt": "look <|vision_start|><|image_pad|>", "images": ["1_0.png"]}
    questions.write_text(questions.read_text() + "\n" + json.dumps(row))
    with pytest.raises(BadDataError, match=r"ends with an image.*\n.*1_0.png"):
        ask(policy(build_vlm("qwen2_vl")))


# ---- a learned reward that is shown images


@pytest.fixture
def shown_reward(tmp_path: Path) -> LearnedReward:
    vlm = build_vlm("qwen2_vl")
    network = RewardNetwork(HeadedBackbone(vlm.model.base_model, HeadConfig(pooling="mean")))
    network.save_pretrained(tmp_path / "scorer", vlm.tokenizer)
    vlm.processor.save(tmp_path / "scorer")
    return LearnedReward(str(tmp_path / "scorer"))


def scores(
    reward: LearnedReward, prompt: Any, completions: Sequence[str], pictures: Sequence[Image.Image]
) -> list[float | None]:
    """Scores of answers to one prompt, each with its picture if there are any."""
    answers = [[{"role": "assistant", "content": text}] for text in completions]
    return reward(
        prompts=[prompt] * len(answers),
        completions=completions if isinstance(prompt, str) else answers,
        completion_ids=[[1]] * len(answers),
        log_metric=lambda *_: None,
        log_extra=lambda *_: None,
        images=[[picture] for picture in pictures] or [[]] * len(answers),
    )


def test_a_learned_reward_sees_the_image_of_a_plain_prompt(shown_reward: LearnedReward) -> None:
    prompt = "look <|vision_start|><|image_pad|><|vision_end|> what?"
    pictures = [Image.new("RGB", (56, 56), (level,) * 3) for level in (20, 230)]
    dark, bright = scores(shown_reward, prompt, ["seven", "seven"], pictures)
    assert dark != bright


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
@pytest.mark.parametrize("images", [0, 1])
def test_a_response_that_spells_the_mark_of_an_image_is_scored_without_it(
    mark: str, images: int, shown_reward: LearnedReward
) -> None:
    content = [*[{"type": "image"}] * images, {"type": "text", "text": "what?"}]
    prompt = [{"role": "user", "content": content}]
    pictures = [Image.new("RGB", (56, 56), "red")] * 2 * images
    plain, spelt = scores(shown_reward, prompt, ["se ven", f"se{mark} ven"], pictures)
    assert spelt == pytest.approx(plain, abs=1e-5)


def test_a_learned_reward_sees_the_images_of_turns_at_their_places(
    shown_reward: LearnedReward,
) -> None:
    def turn(role: str, *content: Any) -> dict[str, Any]:
        parts = [{"type": "text", "text": part} if part else {"type": "image"} for part in content]
        return {"role": role, "content": parts if None in content else content[0]}

    first = [turn("user", None, "what?"), turn("assistant", "crop"), turn("user", None)]
    last = turn("assistant", "seven")
    pictures = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    same = {"completion_ids": [[1]], "log_metric": lambda *_: None, "log_extra": lambda *_: None}
    values = [
        shown_reward(prompts=[chat[:end]], completions=[chat[end:]], images=[shown], **same)[0]
        for chat in ([*first, last],)
        for end, shown in ((1, pictures), (3, pictures), (1, pictures[::-1]))
    ]
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert values[0] != pytest.approx(values[2], abs=1e-4)


def test_a_learned_reward_looks_once_at_an_image_however_many_responses_it_has(
    shown_reward: LearnedReward,
) -> None:
    pictures = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue") for _ in "1234"]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    answers = ["one", "seven", "a longer answer", "no"] * 2
    apart = scores(shown_reward, prompt, answers, pictures)
    seen = count_looks(shown_reward._loaded.network.scorer.plain)  # type: ignore[union-attr]
    shared = [pictures[0]] * 4 + [pictures[4]] * 4
    assert scores(shown_reward, prompt, answers, shared) == pytest.approx(apart, abs=1e-5)
    assert sum(seen) == 2


def test_a_strategy_that_would_wait_for_an_encoder_is_refused() -> None:
    vlm = build_vlm("qwen2_vl")
    waits = L.Trainer(accelerator="cpu", devices=1, strategy="ddp", logger=False)
    with pytest.raises(ValueError, match=r"ddp_find_unused_parameters_true.*freeze_vision: true"):
        refuse_idle_encoder(waits, vlm.model, vlm.processor)
    refuse_idle_encoder(waits, vlm.model, None)
    vlm.model.base_model.get_encoder("image").requires_grad_(False)
    refuse_idle_encoder(waits, vlm.model, vlm.processor)


def test_a_processor_beside_a_text_policy_is_refused(build) -> None:
    with pytest.raises(ValueError, match="was passed for a text model"):
        build(processor=build_vlm("qwen2_vl").processor.processor)
