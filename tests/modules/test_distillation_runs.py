"""What a teacher is for, and teachers of runs with images, environments and stale responses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.models import CausalLM
from lrlhf.modules import RLOO, OptimizerConfig, Teacher, Update
from lrlhf.rollout import Sampling
from lrlhf.types import Experience
from tests.conftest import build_language_model
from tests.modules import test_episode_runs as episodes
from tests.modules.policy_runs import Watcher, assert_same, fit, sgd
from tests.modules.test_vision_training import ask, policy, questions  # noqa: F401  fixtures
from tests.rollout.copy_engine import CopyEngine
from tests.rollout.flight_engine import FlightEngine
from tests.vllm.models import disturb
from tests.vlms import build_vlm

PLACEMENTS = pytest.mark.parametrize(
    "placement", [{}, {"placement": "loss"}, {"placement": "loss", "top_k": 8}], ids=str
)


def expected_advantages(spec: CausalLM, experience: Experience) -> Tensor:
    """Teacher's minus policy's log-probabilities, the teacher's from whole logits."""
    mask = experience.attention_mask
    with torch.no_grad():
        logits = spec.load()(input_ids=experience.input_ids, attention_mask=mask.long()).logits
    theirs = logits.log_softmax(-1)[:, :-1].gather(2, experience.input_ids[:, 1:, None])[..., 0]
    assert experience.old_logprobs is not None
    distance = torch.zeros(mask.shape)
    distance[:, 1:] = theirs - experience.old_logprobs[:, 1:]
    return torch.where(experience.response_mask, distance, 0.0)


def test_the_turns_of_an_environment_are_not_compared(
    language_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    other_model: CausalLM,
    tmp_path: Path,
) -> None:
    module = episodes.build(
        RLOO, language_model, tokenizer, rewards=None, teacher=Teacher(model=other_model)
    )
    watcher = episodes.run(module, tmp_path)
    experience = watcher.experiences[0]
    first = experience.response_mask.int().argmax(dim=1)
    behind = torch.arange(experience.input_ids.shape[1]) >= first[:, None]
    assert (behind & experience.attention_mask & ~experience.response_mask).any(), "no tool tokens"
    torch.testing.assert_close(
        experience.advantages, expected_advantages(other_model, experience), rtol=1e-4, atol=1e-4
    )


def test_stale_responses_are_compared_with_the_policy_that_learns_from_them(
    tokenizer: PreTrainedTokenizerBase, other_model: CausalLM, train: Any
) -> None:
    module = RLOO(
        build_language_model(tokenizer),
        tokenizer=tokenizer,
        engine=FlightEngine(patience=0.5),
        max_staleness=2,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        optimizer=OptimizerConfig(lr=1e-2),
        teacher=Teacher(model=other_model),
    )
    assert isinstance(module.engine, CopyEngine)
    run = train(module, steps=5, callbacks=[VLLMWeightSync(probe_every=0)])
    last = run.watcher.experiences[-1]
    assert last.token_versions is not None
    assert (last.token_versions[last.response_mask] < 4).any()
    torch.testing.assert_close(
        last.advantages, expected_advantages(other_model, last), rtol=1e-4, atol=1e-4
    )
    assert last.importance_weights is not None


@PLACEMENTS
def test_a_teacher_sees_the_images(
    ask: Any,  # noqa: F811
    tmp_path: Path,
    placement: dict[str, Any],
) -> None:
    vlm = build_vlm("qwen2_vl")
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        vlm.model.save_pretrained(folder)
        vlm.processor.save(folder)
        vlm.tokenizer.save_pretrained(folder)
        disturb(vlm.model, seed=1)
    # one of the same weights that sees the same is at no distance
    same = Teacher(model=str(own), **placement)
    run = ask(_seeing(same, lr=1e-9), batch_size=4)
    assert run.logged["teacher/reverse_kl"] == pytest.approx(0, abs=1e-4)
    assert abs(run.logged["teacher/reverse_kl_sampled"]) < 1e-3
    runs = []
    for tokens in (None, 150):
        teacher = Teacher(model=str(other), **placement)
        runs.append(ask(_seeing(teacher, lr=0.1, micro_batch_tokens=tokens), batch_size=4))
    assert runs[0].logged["teacher/reverse_kl"] > 1e-3
    assert_same(runs[0].after, runs[1].after, rtol=1e-4, atol=1e-5)


def _seeing(teacher: Teacher, *, lr: float, **update: Any) -> Any:
    return policy(
        build_vlm("qwen2_vl"),
        module=_alone,  # type: ignore[arg-type]
        teacher=teacher,
        optimizer=sgd(lr),
        update=Update(**update),
    )


def _alone(model: Any, _rewards: Any, **options: Any) -> RLOO:
    del options["reference"]
    return RLOO(model, None, **options)


# ---- what a teacher is for


def distances(
    tokenizer: PreTrainedTokenizerBase, teacher: CausalLM, folder: Path, seed: int, **options: Any
) -> tuple[float, float]:
    """Reverse KL per token on held-out prompts, before and after a short run."""
    found: list[float] = []

    class Kept(Watcher):
        def on_validation_end(self, trainer: Any, _: Any) -> None:
            found.append(float(trainer.callback_metrics["eval/teacher_reverse_kl"]))

    module = RLOO(
        build_language_model(tokenizer),
        tokenizer=tokenizer,
        num_generations=8,
        sampling=Sampling(max_new_tokens=8),
        eval_sampling=Sampling(max_new_tokens=8),
        optimizer=OptimizerConfig(lr=1e-2),
        teacher=Teacher(model=teacher, **options),
        seed=seed,
    )
    words = [
        f"say {chr(letter)}{chr(other)}" for letter in range(97, 107) for other in range(97, 103)
    ]
    data = PromptDataModule(
        [{"prompt": word} for word in words[:44]],
        val=[{"prompt": word} for word in words[44:]],
        batch_size=4,
        val_batch_size=16,
    )
    every = {"val_check_interval": STEPS, "check_val_every_n_epoch": None}
    fit(module, folder, folder, steps=STEPS, data=data, callbacks=[Kept()],
        num_sanity_val_steps=-1, **every)  # fmt: skip
    return found[0], found[-1]


STEPS = 60


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "placement", [{}, {"placement": "loss"}, {"placement": "loss", "top_k": 128}], ids=str
)
@pytest.mark.slow
def test_the_distance_on_held_out_prompts_falls_by_half(
    tokenizer, other_model, tmp_path: Path, placement: dict[str, Any], seed: int
) -> None:
    before, after = distances(tokenizer, other_model, tmp_path, seed, **placement)
    assert after < before / 2
