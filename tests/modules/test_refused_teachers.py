"""Teachers that do not fit the policy or the options, and what is said of them."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.models.teacher import TeacherModel
from lrlhf.modules import PPO, RLOO, DynamicSampling, Teacher
from lrlhf.rewards import Rewards
from lrlhf.rollout import Capabilities, Sampling
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import SequenceBatch
from tests.conftest import build_language_model, byte_tokenizer
from tests.modules import test_episode_runs as episodes
from tests.modules.policy_runs import SkewedEngine, letters, moved


@pytest.mark.parametrize(
    ("teacher", "options", "culprit"),
    [
        ({"server": "http://here"}, {}, "both are set"),
        ({"model": None}, {}, "neither is set"),
        ({"coef": 0.0}, {}, r"teacher\.coef"),
        ({"beta": 2.0}, {}, r"teacher\.beta"),
        ({"beta": 0.5}, {}, "placement: loss"),
        ({"top_k": 0}, {}, r"teacher\.top_k"),
        ({"discount": 0.5, "placement": "loss"}, {}, r"teacher\.discount"),
        ({"model": None, "server": "http://here", "placement": "loss"}, {}, r"teacher\.top_k"),
        ({"model": None, "server": "http://here"}, {}, "temperature 1"),
        ({}, {"rewards": Rewards([letters])}, "teacher.placement: loss"),
        ({}, {"dynamic_sampling": DynamicSampling(prompts=2)}, "dynamic_sampling"),
        ({}, {"algorithm": "grpo"}, "algorithm 'grpo' learns from scores"),
        ({}, {"kind": PPO}, "algorithm 'distillation' uses no values: set critic: null"),
        (
            None,
            {"algorithm": "distillation", "rewards": Rewards([letters])},
            "algorithm 'distillation' makes nothing of rewards.* set teacher.model",
        ),
        (
            {"placement": "loss"},
            {"sampling": Sampling(first_temperature=3.0)},
            "first_temperature .* placement: reward",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    learner, teacher: dict[str, Any] | None, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        learner(teacher=teacher, **options)


def test_without_rewards_and_teacher_there_is_nothing_to_learn_from(learner) -> None:
    with pytest.raises(ValueError, match="rewards is missing"):
        learner(teacher=None)


def saved(tokenizer: PreTrainedTokenizerBase, folder: Path, **sizes: Any) -> str:
    build_language_model(tokenizer, seed=9, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_teacher_with_another_tokenizer_is_refused_by_name(learner, tmp_path) -> None:
    other = byte_tokenizer(
        ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>"
    )
    folder = saved(other, tmp_path / "other")
    with pytest.raises(ValueError, match=r"other.* 1 differ, the first is id 0.*<pad>"):
        learner(teacher={"model": folder})


@pytest.mark.parametrize("wider", ["policy", "teacher"])
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_embeddings_may_be_padded_differently(
    learner, train, tmp_path, tokenizer, wider: str, placement: str
) -> None:
    more = {"vocab_size": len(tokenizer) + 7}
    folder = saved(tokenizer, tmp_path / "padded", **(more if wider == "teacher" else {}))
    policy = build_language_model(tokenizer, **(more if wider == "policy" else {}))
    module = learner(policy, teacher={"model": folder, "placement": placement})
    if wider == "policy":  # which of random weights says what is no token
        with pytest.raises(ValueError, match=r"sampled token 26\d.* embedding has 260 rows"):
            train(module)
        return
    run = train(module)
    assert math.isfinite(run.logged["teacher/reverse_kl"])
    assert moved(run.before, run.after)


def test_a_teacher_with_a_shorter_context_is_refused_before_anything_is_generated(
    learner, train, tokenizer, tmp_path
) -> None:
    # the prompts have five tokens, and the responses up to six
    enough = saved(tokenizer, tmp_path / "enough", max_position_embeddings=11)
    train(learner(teacher={"model": enough}))
    short = saved(tokenizer, tmp_path / "short", max_position_embeddings=10)
    engine = SkewedEngine()
    engine.generate = lambda *_, **__: pytest.fail("it generates")  # type: ignore[method-assign]
    culprit = r"reads 10 tokens, fewer than a prompt of 5 and sampling.max_new_tokens, 6"
    with pytest.raises(ValueError, match=culprit):
        train(learner(teacher={"model": short}, engine=engine))
    none = saved(tokenizer, tmp_path / "none", max_position_embeddings=6)
    with pytest.raises(ValueError, match="reads 6 tokens"):
        learner(teacher={"model": none})


def test_a_teacher_must_read_the_responses_of_evaluations_too(
    learner, train, tokenizer, tmp_path
) -> None:
    # the prompts have five tokens: those of training fit, with responses of up to six
    teacher = {"model": saved(tokenizer, tmp_path / "teacher", max_position_embeddings=11)}
    culprit = "prompt of {} and eval_sampling.max_new_tokens, {}: lower eval_sampling.max"
    with pytest.raises(ValueError, match=culprit.format(1, 11)):
        learner(teacher=teacher, eval_sampling=Sampling(max_new_tokens=11))
    engine = SkewedEngine()
    engine.generate = lambda *_, **__: pytest.fail("it generates")  # type: ignore[method-assign]
    module = learner(teacher=teacher, eval_sampling=Sampling(max_new_tokens=7), engine=engine)
    with pytest.raises(ValueError, match=culprit.format(5, 7)):
        train(module, limit_val_batches=1)


def test_a_teacher_reads_episodes_that_end_with_the_policys_context(
    tokenizer, tmp_path: Path
) -> None:
    def module(context: int) -> Any:
        folder = saved(tokenizer, tmp_path / f"reads{context}", max_position_embeddings=context)
        policy = build_language_model(tokenizer, max_position_embeddings=30)
        # prompts of eight tokens and up to forty behind them, were there room
        return episodes.build(RLOO, policy, tokenizer, rewards=None, teacher=Teacher(model=folder))

    watcher = episodes.run(module(30), tmp_path, max_steps=1)
    # a prompt and what is shown, three turns, two answers: 8 + 3 + 3 * 5 + 2 * 3 = 32
    assert int(watcher.experiences[0].attention_mask.sum(dim=1).max()) in (29, 30)
    with pytest.raises(ValueError, match="reads 29 tokens"):
        module(29)


class Limited(SkewedEngine):
    """Says that it has a copy of the weights, and how far it reads with it."""

    reads: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(holds_copy=True)

    @property
    def context_length(self) -> int | None:
        return self.reads


def test_a_teacher_reads_episodes_that_end_with_the_engines_context(
    language_model, tokenizer, tmp_path: Path
) -> None:
    folder = saved(tokenizer, tmp_path / "teacher", max_position_embeddings=20)
    engine, prompts = Limited(), token_prompts([[70] * 8])
    module = episodes.build(
        RLOO, language_model, tokenizer, rewards=None, engine=engine, teacher=Teacher(model=folder)
    )
    for engine.reads in (None, 19, 20):  # None: it has not started
        module.teacher.check_prompts(prompts, "sampling", ChatFormat(tokenizer))
    engine.reads = 21
    with pytest.raises(ValueError, match=r"prompt of 8 and sampling\.max_new_tokens, 40"):
        module.teacher.check_prompts(prompts, "sampling", ChatFormat(tokenizer))


@pytest.mark.parametrize("forks", [False, True])
def test_rows_that_are_longer_than_what_a_teacher_reads_are_refused(tokenizer, forks: bool) -> None:
    teacher = TeacherModel(build_language_model(tokenizer, max_position_embeddings=5))
    ids = torch.arange(60, 66)[None]
    # the last two tokens go on from the second one: branches of four tokens
    behind = torch.tensor([[0, 0, 0, 0, 2, 0]]) if forks else None
    rows = SequenceBatch(
        input_ids=ids, attention_mask=ids > 0, response_mask=ids > 61, forks=behind
    )
    if forks:
        assert teacher.rows(rows).hidden.isfinite().all()
        return
    culprit = "have 6 tokens, and the teacher reads 5: leave out longer .* of eval_sampling"
    with pytest.raises(ValueError, match=culprit):
        teacher.rows(rows)


def test_another_end_token_is_said(learner, tmp_path, tokenizer, caplog) -> None:
    folder = tmp_path / "chat"
    saved(tokenizer, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(
        file.read_text().replace('"eos_token": "<|endoftext|>"', '"eos_token": "<|im_end|>"')
    )
    with caplog.at_level(logging.WARNING):
        learner(teacher={"model": str(folder)})
    assert "ends with '<|im_end|>' and the policy with '<|endoftext|>'" in caplog.text
