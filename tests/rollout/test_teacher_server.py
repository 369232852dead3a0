"""What a vLLM server says of given tokens, from a stand-in that answers as vLLM does."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models.teacher import TeacherModel
from lrlhf.modules import RLOO, Teacher
from lrlhf.rollout import Sampling
from lrlhf.rollout.vllm import teacher_server
from lrlhf.rollout.vllm.teacher_server import TeacherServer
from lrlhf.types import Media, Rollout
from tests.conftest import build_language_model, byte_tokenizer
from tests.modules.conftest import prompts  # noqa: F401  a fixture
from tests.modules.policy_runs import Watcher, assert_same, fit, sgd, weights


class StandIn(ThreadingHTTPServer):
    """Serves a model; fails the first ``failures`` completions."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.model, self.tokenizer = model, tokenizer
        self.failures = 0
        self.busy = 503
        self.beyond = 0
        """Added to all ids but the sampled ones."""
        self.authorized: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @torch.no_grad()
    def prompt_logprobs(self, ids: list[int], count: int) -> list[Any]:
        logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        answer: list[Any] = [None]
        for token, row in zip(ids[1:], logits[:-1].log_softmax(1), strict=True):
            best = row.topk(count).indices.tolist()
            told = {str(one + self.beyond): {"logprob": row[one].item()} for one in best}
            answer.append({str(token): {"logprob": row[token].item()}} | told)
        return answer


class _Answers(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._tell({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "teacher"
        self.server.authorized.add(self.headers["Authorization"])
        if self.path == "/detokenize":
            self._tell({"prompt": self.server.tokenizer.decode(body["tokens"])})
        elif self.server.failures:
            self.server.failures -= 1
            self._tell({"error": "busy"}, status=self.server.busy)
        elif len(body["prompt"]) > 100:
            self._tell({"error": "longer than max_model_len"}, status=400)
        else:
            found = self.server.prompt_logprobs(body["prompt"], body["prompt_logprobs"])
            self._tell({"choices": [{"prompt_logprobs": found}]})

    def _tell(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def teacher(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return build_language_model(tokenizer, seed=9)


@pytest.fixture
def start() -> Iterator[Callable[..., StandIn]]:
    running: list[StandIn] = []

    def start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> StandIn:
        server = StandIn(model, tokenizer)
        running.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def rollout() -> Rollout:
    """Two rows of different lengths; a token in the middle of the first is a tool's."""
    ids = torch.tensor([[60, 61, 62, 63, 64, 65], [70, 71, 72, 0, 0, 0]])
    response = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]).bool()
    return Rollout(
        input_ids=ids,
        attention_mask=ids > 0,
        response_mask=response,
        sampling_logprobs=torch.zeros(2, 6),
        group_ids=torch.arange(2),
        truncated=torch.zeros(2, dtype=torch.bool),
    )


def test_a_server_says_what_the_model_in_the_process_does(
    start, teacher, tokenizer, rollout
) -> None:
    server = TeacherServer(start(teacher, tokenizer).url)
    server.check_tokens(tokenizer)
    told = server.ask(rollout, num_ids=3, vocabulary=len(tokenizer))
    expected = TeacherModel(teacher).best(rollout, num_ids=3, vocabulary=len(tokenizer))
    assert torch.equal(told.top_ids, expected.top_ids)
    torch.testing.assert_close(told.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(told.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-5)
    assert not told.logprobs[~rollout.response_mask].any()


@pytest.mark.parametrize("placement", [{}, {"placement": "loss", "top_k": 5}], ids=str)
def test_a_run_learns_from_a_server_as_from_a_model(
    start,
    teacher,
    tokenizer,
    prompts,  # noqa: F811
    tmp_path,
    placement: dict[str, Any],
) -> None:
    folder = tmp_path / "teacher"
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    runs = []
    for source in ({"model": str(folder)}, {"server": start(teacher, tokenizer).url}):
        module = RLOO(
            build_language_model(tokenizer),
            tokenizer=tokenizer,
            num_generations=2,
            sampling=Sampling(max_new_tokens=4),
            optimizer=sgd(0.05),
            teacher=Teacher(**source, **placement),
        )
        watcher = Watcher()
        fit(module, prompts, tmp_path, steps=2, callbacks=[watcher])
        runs.append((module, watcher))
    (module, watched), (served, other) = runs
    assert_same(weights(module), weights(served), rtol=1e-4, atol=1e-5)
    for one, two in zip(watched.experiences, other.experiences, strict=True):
        torch.testing.assert_close(one.advantages, two.advantages, rtol=1e-4, atol=1e-4)


def test_a_server_is_asked_again_after_a_run_has_ended(
    start,
    teacher,
    tokenizer,
    prompts,  # noqa: F811
    tmp_path,
    monkeypatch,
) -> None:
    stand_in = start(teacher, tokenizer)
    module = RLOO(
        build_language_model(tokenizer),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=4),
        teacher=Teacher(server=stand_in.url),
    )
    trainer = fit(module, prompts, tmp_path, steps=1)
    for token in ("first", "second"):  # each with the token that holds by then
        monkeypatch.setenv("VLLM_API_KEY", token)
        trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
        assert float(trainer.logged_metrics["eval/teacher_reverse_kl_sampled"]) != 0
    assert stand_in.authorized == {"Bearer none", "Bearer first", "Bearer second"}
    stand_in.tokenizer = byte_tokenizer(["<|pad|>", "<|endoftext|>", "<|user|>"], "<|endoftext|>")
    with pytest.raises(ValueError, match="another tokenizer"):
        trainer.validate(module, datamodule=trainer.datamodule, verbose=False)


def test_the_token_of_the_environment_is_shown(start, teacher, tokenizer, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = start(teacher, tokenizer)
    TeacherServer(server.url).check_tokens(tokenizer)
    assert server.authorized == {"Bearer secret"}


def test_another_tokenizer_is_refused_by_its_first_other_id(start, teacher, tokenizer) -> None:
    marks = ["<|pad|>", "<|endoftext|>", "<|user|>", "<|im_end|>"]
    server = TeacherServer(start(teacher, byte_tokenizer(marks, marks[1])).url)
    with pytest.raises(ValueError, match=r"id 2 is '<\|user\|>' to the teacher \(teacher\)"):
        server.check_tokens(tokenizer)


@pytest.mark.parametrize("busy", [503, 429])
def test_a_server_that_is_busy_is_asked_again_and_one_that_is_gone_is_named(
    start, teacher, tokenizer, rollout, monkeypatch, busy: int
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(teacher_server.time, "sleep", waited.append)
    stand_in = start(teacher, tokenizer)
    stand_in.busy = busy
    server = TeacherServer(stand_in.url, requests=1)
    server.check_tokens(tokenizer)
    stand_in.failures = 3
    assert server.ask(rollout, num_ids=1, vocabulary=len(tokenizer)).logprobs.any()
    assert waited == [1.0, 2.0, 4.0]
    stand_in.failures = 4
    with pytest.raises(ValueError, match=rf"teacher\.server {stand_in.url}: .*{busy}"):
        server.ask(rollout, num_ids=1, vocabulary=len(tokenizer))


def test_what_a_server_cannot_say_is_refused(start, teacher, tokenizer, rollout) -> None:
    stand_in = start(teacher, tokenizer)
    server = TeacherServer(stand_in.url)
    server.check_tokens(tokenizer)
    seen = Media(tensors={}, tokens={}, prompt_ids=(), names=("cat.png",))
    for given, culprit in (
        (replace(rollout, media=(seen, None)), "images or videos"),
        (replace(rollout, forks=torch.zeros_like(rollout.input_ids)), "rewritten histories"),
    ):
        with pytest.raises(ValueError, match=rf"{culprit}: load the teacher .*teacher\.model"):
            server.ask(given, num_ids=1, vocabulary=len(tokenizer))
    ids = torch.full((1, 120), 60)
    long = replace(
        rollout.select(torch.tensor([0])),
        input_ids=ids,
        attention_mask=ids > 0,
        response_mask=ids > 0,
        sampling_logprobs=torch.zeros(1, 120),
    )
    with pytest.raises(ValueError, match="longer than max_model_len"):
        server.ask(long, num_ids=1, vocabulary=len(tokenizer))
    stand_in.beyond = 500
    with pytest.raises(ValueError, match=r"id \d+, and the policy has 260"):
        server.ask(rollout, num_ids=1, vocabulary=len(tokenizer))
