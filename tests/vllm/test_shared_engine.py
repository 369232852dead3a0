"""Two ranks share an engine of vLLM, each with a part of the model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import VLLMEngine
from tests.vllm.models import disturb
from tests.vllm.shared_engine import PUSHES, respond

ROOT = Path(__file__).parents[2]


def ranks(folder: Path, what: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.vllm.shared_engine", str(folder)]
    logs = [(folder / f"log{rank}").open("w+") for rank in range(2)]
    processes = [
        subprocess.Popen([*command, str(rank), what], cwd=ROOT, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], [(folder / f"log{rank}").read_text()[-3000:] for rank in range(2)]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_pushed(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert len(own["gaps"]) == PUSHES
        assert max(own["gaps"]) < 1e-4
        assert max(own["probes"]) < 1e-4
        assert own["ranks"] == 2


def test_ranks_that_share_an_engine_get_the_responses_of_one_each(
    engine: VLLMEngine,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    found = ranks(tmp_path, "whole")
    assert_pushed(found)
    for version in range(1, PUSHES + 1):
        disturb(policy, seed=version)
    engine.push(PUSHES)
    for rank, own in enumerate(found):
        expected = respond(engine, rank, tokenizer)
        for rollout in (own["rollout"], own["after"]):
            assert torch.equal(rollout.input_ids, expected.input_ids)
            assert torch.equal(rollout.response_mask, expected.response_mask)
            torch.testing.assert_close(
                rollout.sampling_logprobs, expected.sampling_logprobs, rtol=0, atol=1e-4
            )
    # what one rank may not ask for, none begins with
    assert found[1]["refusal"].startswith("ValueError: a prompt has 200 tokens")
    assert "the prompts of another rank were refused" in found[0]["refusal"]


@pytest.mark.exhaustive
def test_each_rank_has_its_part_of_an_adapter(tmp_path: Path) -> None:
    assert_pushed(ranks(tmp_path, "adapter"))


@pytest.mark.exhaustive
def test_a_failure_on_one_rank_ends_the_step_of_the_other(tmp_path: Path) -> None:
    other, failed = (own["failure"] for own in ranks(tmp_path, "fails"))
    assert failed == (
        "vLLM failed in generation (IndexError: a kernel went wrong), which cannot be mended"
    )
    assert "vLLM failed in generation (RuntimeError: " in other
    assert "onnection" in other
