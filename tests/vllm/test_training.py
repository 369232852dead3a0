"""PPO and RLOO with vLLM in the training process."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import EMA, RLCheckpoint, VLLMWeightSync
from lrlhf.modules import PPO, RLOO, Reference, Update
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine
from tests.modules.policy_runs import Watcher, fit, letters, weights
from tests.vllm.models import build_policy, largest_gap


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefghijklmnop"))
    return path


def module(
    tokenizer: PreTrainedTokenizerBase, kind: type[RLOO | PPO] = RLOO, **options: Any
) -> RLOO | PPO:
    return kind(
        build_policy(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=VLLMEngine(max_model_len=128, kv_cache_gib=0.05),
        num_generations=4,
        sampling=Sampling(max_new_tokens=8, temperature=0.9),
        optimizer=OptimizerConfig(lr=1e-2),
        **options,
    )


class Gaps(Watcher):
    """Recomputes each rollout with the policy that is about to learn from it."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    def on_rollout(self, trainer: L.Trainer, module: Any, experience: Any, records: Any) -> None:
        super().on_rollout(trainer, module, experience, records)
        self.gaps.append(largest_gap(module.policy.eval(), experience, 0.9))


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_every_iteration_learns_from_the_present_policy(
    kind: type[RLOO | PPO], tokenizer: PreTrainedTokenizerBase, prompts: Path, tmp_path: Path
) -> None:
    gaps = Gaps()
    trained = module(tokenizer, kind)
    before = weights(trained.policy)
    trainer = fit(
        trained, prompts, tmp_path, steps=3, callbacks=[gaps, VLLMWeightSync(probe_every=1)]
    )
    assert len(gaps.gaps) == 3
    assert max(gaps.gaps) < 1e-4
    assert [int(e.weight_version.max()) for e in gaps.experiences] == [0, 1, 2]
    assert trainer.callback_metrics["sync/age"] == 0
    assert trainer.callback_metrics["mismatch/max"] < 1e-4
    assert trainer.callback_metrics["perf/sync_s"] > 0
    assert any(not torch.equal(before[name], w) for name, w in weights(trained.policy).items())


def test_without_pushes_the_responses_come_from_an_older_policy(
    tokenizer: PreTrainedTokenizerBase, prompts: Path, tmp_path: Path
) -> None:
    gaps = Gaps()
    trainer = fit(
        module(tokenizer),
        prompts,
        tmp_path,
        steps=4,
        callbacks=[gaps, VLLMWeightSync(every_n_steps=2)],
    )
    assert [int(e.weight_version.max()) for e in gaps.experiences] == [0, 0, 2, 2]
    assert [gap < 1e-4 for gap in gaps.gaps] == [True, False, True, False]
    assert trainer.callback_metrics["sync/age"] == 1


def test_validation_draws_with_averaged_weights_and_training_does_not(
    tokenizer: PreTrainedTokenizerBase, prompts: Path, tmp_path: Path
) -> None:
    gaps = Gaps()
    trained = module(tokenizer)
    ema = EMA(decay=0.9)
    seen: list[list[str]] = []

    class Answers(L.Callback):
        def on_validation_batch_end(
            self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any
        ) -> None:
            # the averaged weights are in the module here
            seen.append([record["completion"] for record in outputs["records"]])
            self.expected = expected_answers(module, outputs)

    answers = Answers()
    fit(
        trained,
        prompts,
        tmp_path,
        steps=2,
        callbacks=[ema, answers, gaps, VLLMWeightSync()],
        val_check_interval=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
    )
    assert max(gaps.gaps) < 1e-4
    assert seen[-1] == answers.expected


def expected_answers(module: RLOO | PPO, outputs: Any) -> list[str]:
    """Greedy answers of the weights that stand in the module, one token at a time."""
    answers = []
    for record in outputs["records"]:
        ids = module.tokenizer(record["prompt"]).input_ids
        length = len(ids)
        for _ in range(8):
            token = int(module.policy(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
            if token == module.tokenizer.eos_token_id:
                break
        answers.append(module.tokenizer.decode(ids[length:], skip_special_tokens=True))
    return answers


def test_a_resumed_run_ends_with_the_same_weights(
    tokenizer: PreTrainedTokenizerBase, prompts: Path, tmp_path: Path
) -> None:
    def run(folder: Path, steps: int, resume: str | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        trained = module(tokenizer, seed=3)
        fit(
            trained,
            prompts,
            folder,
            steps=steps,
            callbacks=[VLLMWeightSync(), RLCheckpoint(dirpath=str(folder), every_n_train_steps=1)],
            ckpt_path=resume,
        )
        return weights(trained.policy)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    (last,) = (tmp_path / "parts").rglob("last.ckpt")
    resumed = run(tmp_path / "parts", 4, str(last))
    assert all(torch.equal(whole[name], weight) for name, weight in resumed.items())


def test_several_steps_on_one_rollout_with_a_reference(
    tokenizer: PreTrainedTokenizerBase, prompts: Path, tmp_path: Path
) -> None:
    gaps = Gaps()
    trainer = fit(
        module(
            tokenizer,
            reference=Reference(kl_coef=0.1),
            update=Update(minibatch_size=8, num_iterations=2),
        ),
        prompts,
        tmp_path,
        steps=2,
        callbacks=[gaps, VLLMWeightSync()],
    )
    assert max(gaps.gaps) < 1e-4
    assert trainer.callback_metrics["mismatch/mean"] < 1e-5
