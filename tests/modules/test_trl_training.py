"""Losses and gradients of `SFT` and `DPO` are those that TRL's trainers gave on recorded inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.models import ReferencePolicy
from lrlhf.modules import DPO, SFT
from tests.conftest import build_tokenizer
from tests.modules.language_runs import SGD, Row, gradients, pairs, texts

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "functional" / "golden" / "trl_training.json").read_text()
)
ROWS: list[Row] = RECORD["rows"]
CASES = [*RECORD["dpo"], *RECORD["cpo"]]


def recorded_model(which: str) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**RECORD["config"])).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.tensor(RECORD[which][name], dtype=torch.float64))
    return model


def assert_recorded(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    largest = max(torch.tensor(values).abs().max() for values in expected.values())
    assert largest > 1e-3
    for name, values in expected.items():
        wanted = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(
            actual[name],
            wanted,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def close(actual: Any, expected: float) -> None:
    assert float(actual) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", RECORD["sft"], ids=lambda case: case["loss_type"])
def test_sft_equals_trl(case: dict[str, Any], tmp_path: Path) -> None:
    rows = ROWS if case["completion_only"] else [((), [*given, *said]) for given, said in ROWS]
    module = SFT(
        recorded_model("policy"),
        tokenizer=build_tokenizer(),
        loss=case["loss_type"],
        log_entropy=True,
        optimizer=SGD,
        max_grad_norm=float("inf"),
    )
    found, logged = gradients(module, [texts(rows)], tmp_path)
    assert_recorded(found, case["gradients"])
    close(logged["train/loss"], case["loss"])
    close(logged["train/entropy"], case["metrics"]["entropy"])
    close(logged["train/token_accuracy"], case["metrics"]["mean_token_accuracy"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['loss_type']}-{case['beta']}")
def test_dpo_equals_trl(case: dict[str, Any], tmp_path: Path) -> None:
    of_cpo = "gamma" in case
    module = DPO(
        recorded_model("policy"),
        tokenizer=build_tokenizer(),
        loss=case["loss_type"],
        beta=case["beta"],
        margin=case["gamma"] if of_cpo else None,
        label_smoothing=case.get("label_smoothing", 0.0),
        optimizer=SGD,
        max_grad_norm=float("inf"),
    )
    if of_cpo:  # no reference, which a constant one is as well
        module.reference = None
    else:
        module.reference = ReferencePolicy(recorded_model("reference"))
    found, logged = gradients(module, [pairs(RECORD["pairs"])], tmp_path)
    assert_recorded(found, case["gradients"])
    close(logged["train/loss"], case["loss"])
    metrics = case["metrics"]
    if case["loss_type"] in (
        "sigmoid",
        "hinge",
        "simpo",
    ):  # of others TRL reports rewards that are not those of the loss
        close(logged["rewards/accuracy"], metrics["rewards/accuracies"])
        close(logged["rewards/chosen_mean"], metrics["rewards/chosen"])
        close(logged["rewards/rejected_mean"], metrics["rewards/rejected"])
        close(logged["rewards/margin"], metrics["rewards/margins"])
    if case["loss_type"] != "simpo":  # whose log-probabilities are per token in TRL's metrics
        close(logged["logprobs/chosen"], metrics["logps/chosen"])
        close(logged["logprobs/rejected"], metrics["logps/rejected"])


@pytest.mark.parametrize("case", RECORD["further"], ids=lambda case: case["loss_type"])
def test_the_other_losses_on_pairs_equal_trl(case: dict[str, Any], tmp_path: Path) -> None:
    epsilon = case.get("label_smoothing")
    module = DPO(
        recorded_model("policy"),
        tokenizer=build_tokenizer(),
        loss=case["loss_type"],
        loss_options={} if epsilon is None else {"epsilon": epsilon},
        beta=case["beta"],
        ld_alpha=case.get("ld_alpha"),
        optimizer=SGD,
        max_grad_norm=float("inf"),
    )
    module.reference = ReferencePolicy(recorded_model("reference"))
    found, logged = gradients(module, [pairs(RECORD["pairs"])], tmp_path)
    expected = torch.tensor(case["gradients"], dtype=torch.float64)
    torch.testing.assert_close(found["lm_head.weight"], expected, rtol=1e-5, atol=1e-6)
    close(logged["train/loss"], case["loss"])


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"loss": "robust", "loss_options": {"epsilom": 0.1}}, "did you mean 'epsilon'"),
        ({"loss": "sppo_hard", "loss_options": {"beta": 0.1}}, "loss_options"),
        ({"ld_alpha": 1.5}, "ld_alpha"),
    ],
)
def test_options_that_a_loss_on_pairs_has_not_are_refused(
    options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        DPO(recorded_model("policy"), tokenizer=build_tokenizer(), **options)
