"""A teacher that a vLLM server holds, in a run."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PromptDataModule
from lrlhf.models.teacher import TeacherModel
from lrlhf.modules import RLOO, OptimizerConfig, Teacher
from lrlhf.rollout import Sampling
from lrlhf.rollout.vllm.teacher_server import TeacherServer
from lrlhf.types import Rollout
from tests.conftest import byte_tokenizer
from tests.modules.policy_runs import Watcher, fit
from tests.vllm.models import build_policy
from tests.vllm.serving import served

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def teacher(tokenizer: PreTrainedTokenizerBase):
    return build_policy(tokenizer, seed=9)


@pytest.fixture(scope="module")
def url(teacher, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    with served(teacher, tokenizer, folder) as url:
        yield url


def test_vllm_says_what_the_model_in_the_process_does(url, teacher, tokenizer) -> None:
    ids = torch.tensor([[60, 61, 62, 63, 64, 65], [70, 71, 72, 0, 0, 0]])
    rollout = Rollout(
        input_ids=ids,
        attention_mask=ids > 0,
        response_mask=torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]).bool(),
        sampling_logprobs=torch.zeros(2, 6),
        group_ids=torch.arange(2),
        truncated=torch.zeros(2, dtype=torch.bool),
    )
    server = TeacherServer(url)
    server.check_tokens(tokenizer)
    told = server.ask(rollout, num_ids=5, vocabulary=len(tokenizer))
    expected = TeacherModel(teacher).best(rollout, num_ids=5, vocabulary=len(tokenizer))
    torch.testing.assert_close(told.logprobs, expected.logprobs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(told.top_logprobs, expected.top_logprobs, rtol=1e-3, atol=1e-3)
    assert torch.equal(told.top_ids, expected.top_ids)


def test_vllm_with_another_tokenizer_is_refused(url) -> None:
    marks = ["<|pad|>", "<|endoftext|>", "<|user|>", "<|im_end|>"]
    with pytest.raises(ValueError, match=r"id 2 is '<\|im_start\|>' to the teacher"):
        TeacherServer(url).check_tokens(byte_tokenizer(marks, marks[1]))


def test_more_best_tokens_than_the_server_gives_are_refused_in_its_words(url, tokenizer) -> None:
    server = TeacherServer(url)
    server.check_tokens(tokenizer)
    ids = torch.tensor([[60, 61, 62]])
    rollout = Rollout(
        input_ids=ids,
        attention_mask=ids > 0,
        response_mask=ids > 60,
        sampling_logprobs=torch.zeros(1, 3),
        group_ids=torch.zeros(1, dtype=torch.long),
        truncated=torch.zeros(1, dtype=torch.bool),
    )
    with pytest.raises(ValueError, match=r"teacher\.server .*logprobs"):
        server.ask(rollout, num_ids=50, vocabulary=len(tokenizer))


@pytest.mark.parametrize("placement", [{}, {"placement": "loss", "top_k": 16}], ids=str)
def test_a_run_learns_from_a_vllm_server(
    url, tokenizer, tmp_path: Path, placement: dict[str, object]
) -> None:
    module = RLOO(
        build_policy(tokenizer),
        tokenizer=tokenizer,
        num_generations=8,
        sampling=Sampling(max_new_tokens=8),
        optimizer=OptimizerConfig(lr=2e-2),
        teacher=Teacher(server=url, **placement),  # type: ignore[arg-type]
    )
    distances: list[float] = []

    class Kept(Watcher):
        def on_train_batch_end(self, trainer, *_):
            distances.append(float(trainer.logged_metrics["teacher/reverse_kl_sampled"]))

    data = PromptDataModule([{"prompt": f"write {number}"} for number in range(8)], batch_size=4)
    fit(
        module,
        tmp_path,
        tmp_path / "run",
        steps=16,
        callbacks=[Kept()],
        data=data,
        limit_val_batches=0,
    )
    assert sum(distances[-3:]) < 0.8 * sum(distances[:3])
