"""What is written as a user writes it: ``examples/orpo.py``, CONTRIBUTING's algorithm."""

import copy
import json
import math
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from orpo import ORPO, odds_ratio_loss

from lrlhf.cli import run
from lrlhf.datamodules import PreferenceDataModule
from lrlhf.functional import EstimatorInputs
from lrlhf.modules import RLOO, Guard, OptimizerConfig, TrainingDivergedError
from lrlhf.rewards import Rewards

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
ROW = {"prompt": "say ", "chosen": "yes", "rejected": "no way"}


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(f"{json.dumps(ROW)}\n" * 2)
    return "pairs.jsonl"


def fit(model: ORPO, pairs: str, steps: int) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        use_distributed_sampler=False,
    )
    trainer.fit(model, PreferenceDataModule(pairs, batch_size=2))
    return trainer


def test_the_loss_of_a_pair_by_hand() -> None:
    # probabilities 0.8, 0.5 and 0.8 against 0.5, 0.8 and 0.8: odds 4, 1 and 4 against 1, 4 and 4;
    # -log σ(log r) = log(1 + 1 / r)
    better, worse = torch.tensor([[0.8, 0.5, 0.8], [0.5, 0.8, 0.8]]).log()

    expected = torch.tensor([1.25, 5.0, 2.0]).log()
    torch.testing.assert_close(odds_ratio_loss(better, worse), expected)
    # an answer without tokens counts as certain, and the loss stays finite
    assert math.isfinite(float(odds_ratio_loss(torch.zeros(()), worse[0])))


def mean_logprob(model: ORPO, prompt: str, answer: str) -> float:
    """Score an answer with plain logits, its end token too."""
    given = model.tokenizer(prompt)["input_ids"]
    said = [*model.tokenizer(answer)["input_ids"], model.tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model.policy(torch.tensor([given + said])).logits[0]
    logprobs = logits.log_softmax(dim=-1)[len(given) - 1 : -1]
    return float(logprobs[torch.arange(len(said)), torch.tensor(said)].mean())


def test_its_first_loss_is_that_of_plain_logits_and_it_learns_the_preference(
    model_folder: str, pairs: str
) -> None:
    model = ORPO(model_folder, odds_coef=0.5, optimizer=OptimizerConfig(lr=1e-2))

    better, worse = (
        mean_logprob(model, ROW["prompt"], ROW[name]) for name in ("chosen", "rejected")
    )
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (better, worse)]
    expected = 0.5 * math.log(1 + odds[1] / odds[0]) - better
    first = fit(model, pairs, 1).callback_metrics
    assert float(first["train/loss"]) == pytest.approx(expected, rel=1e-4)
    last = fit(model, pairs, 5).callback_metrics
    assert float(last["train/loss"]) < expected
    assert float(last["train/accuracy"]) == 1.0
    assert float(last["train/skipped_steps"]) == 0


def test_a_gradient_that_is_not_finite_moves_nothing_and_counts(
    model_folder: str, pairs: str
) -> None:
    model = ORPO(model_folder, odds_coef=math.nan, guard=Guard(max_skipped=1))
    before = copy.deepcopy(model.policy.state_dict())
    with pytest.raises(TrainingDivergedError, match="gradient 2"):
        fit(model, pairs, 3)
    assert model.skipped_steps == 2
    torch.testing.assert_close(model.policy.state_dict(), before, rtol=0, atol=0)


@pytest.mark.usefixtures("_own_log")
def test_the_command_line_trains_it_and_resumes(
    model_folder: str, pairs: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = ["fit", "--model=orpo.ORPO", f"--model.policy={model_folder}"]
    command += ["--data=PreferenceDataModule", f"--data.train={pairs}", "--data.batch_size=2"]
    command += ["--trainer.accelerator=cpu", "--trainer.logger=false"]

    assert run([*command, "--trainer.max_steps=1"]) == 0
    saved = next(Path().rglob("checkpoints/*.ckpt")).rename("first.ckpt")
    assert run([*command, "--trainer.max_steps=2", f"--ckpt_path={saved}"]) == 0
    assert "`max_steps=2` reached" in caplog.text


def test_the_algorithm_of_the_contributing_page_needs_nothing_but_its_file(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = next(re.finditer(r"```python\n(# my_package.*?)```", CONTRIBUTING, re.DOTALL))[1]
    (tmp_path / "my_package.py").write_text(page)
    monkeypatch.syspath_prepend(tmp_path)

    module = RLOO(model_folder, Rewards(["repetition_penalty"]), algorithm="my_package.ALGORITHM")

    algorithm = module.settings.algorithm
    assert algorithm.extra_samples == {"greedy": {"temperature": 0.0}}
    assert module.settings.kl_in_reward
    mask = torch.tensor([[False, True, True], [False, True, False], [False, True, True]])
    advantages = algorithm.estimator(
        EstimatorInputs(
            scores=torch.tensor([3.0, 1.0, math.nan]),
            kl=torch.tensor([[0.0, 1.0, 3.0], [0.0, 2.0, 0.0], [0.0, 1.0, 1.0]]),
            response_mask=mask,
            num_generations=3,
            kl_coef=0.5,
            baseline_mask=torch.tensor([True, True, True]),
            rows={"greedy": torch.tensor([2.0, 2.0, 2.0])},
        )
    )
    # the first row: 3 - 0.5 * (1 + 3) - 2, the second: 1 - 0.5 * 2 - 2, the third is unscorable
    expected = torch.tensor([[0.0, -1.0, -1.0], [0.0, -2.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected)
