"""What is generated beside the main thread, and when it is taken."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import Response, RolloutQueue, Sampling
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import PromptBatch
from tests.rollout.copy_engine import CopyEngine

SAMPLING = Sampling(max_new_tokens=4)


PROMPTS = token_prompts([[10, 11], [12]])


def started(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling = SAMPLING,
    **options: Any,
) -> tuple[CopyEngine, RolloutQueue]:
    engine = CopyEngine(**options)
    engine.attach(model, tokenizer)
    engine.push(0)
    ahead = RolloutQueue(engine, 1)
    ahead.start(1, PROMPTS, sampling, num_generations=2, seeds=range(4))
    return engine, ahead


def take(ahead: RolloutQueue, step: int = 1, prompts: PromptBatch = PROMPTS, **options: Any) -> Any:
    arguments = {"num_generations": 2, "any_rank": bool} | options
    return ahead.take(step, prompts, **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"step": 2},
        {"prompts": token_prompts([[10, 11], [13]])},
        {"prompts": token_prompts([[10], [12]])},  # which the responses' prompts begin with
        {"num_generations": 1},
        # another rank has to draw anew, and all do it together
        {"any_rank": lambda _: True},
    ],
)
def test_responses_to_something_else_are_not_taken(
    language_model, tokenizer, options: dict[str, Any]
) -> None:
    _, ahead = started(language_model, tokenizer)
    assert take(ahead, **options) is None
    assert take(ahead) is None


@pytest.mark.parametrize(
    ("fails", "options", "version"),
    [
        ([1], {}, None),
        # on another rank: a push to a shared engine needs them all
        ([], {"any_rank": lambda _: True}, None),
        ([], {"step": 2}, 0),
    ],
)
def test_a_failure_makes_all_ranks_push_again(
    language_model, tokenizer, fails: list[int], options: dict[str, Any], version: int | None
) -> None:
    engine, ahead = started(language_model, tokenizer, fail={"respond": fails})
    assert take(ahead, **options) is None
    assert engine.version == version


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        Sampling(max_new_tokens=4, top_k=5),
        Sampling(max_new_tokens=4, top_p=0.8, keep_mask=True),
    ],
)
def test_a_state_holds_the_whole_rollout(
    language_model, tokenizer, tmp_path, sampling: Sampling
) -> None:
    _, ahead = started(language_model, tokenizer, sampling)
    torch.save(ahead.state_dict(), tmp_path / "state.pt")
    resumed = RolloutQueue(CopyEngine(), 1)
    resumed.load_state_dict(
        torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu")
    )
    first, second = take(ahead), take(resumed)
    assert (first.kept_mass is None) == (sampling is SAMPLING)
    assert (first.sampling_mask is None) != sampling.keep_mask
    for name in first.__dataclass_fields__:
        value, other = getattr(first, name), getattr(second, name)
        if name == "sampling_mask" and value is not None:
            assert torch.equal(value.sizes, other.sizes)
            assert torch.equal(value.ids, other.ids)
            continue
        assert (value is None and other is None) or torch.equal(value, other), name


def test_what_is_unfinished_is_waited_for_only_where_nothing_else_is_in_the_making(
    language_model, tokenizer
) -> None:
    goes_on = threading.Event()

    class Waits(CopyEngine):
        def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            if sampling.max_new_tokens == 5:
                assert goes_on.wait(20)
            return super()._respond(requests, sampling)

    engine = Waits()
    engine.attach(language_model, tokenizer)
    engine.push(0)
    queue = RolloutQueue(engine, 2)
    queue.start(1, PROMPTS, SAMPLING, num_generations=2, seeds=range(4))
    queue.wait()
    queue.start(2, PROMPTS, Sampling(max_new_tokens=5), num_generations=2, seeds=range(4))
    assert list(queue.state_dict()["pending"]) == [1]
    goes_on.set()
    queue.wait()
    assert list(queue.state_dict()["pending"]) == [1, 2]


def test_after_a_failure_nothing_is_left_of_what_the_engine_was_making(
    language_model, tokenizer
) -> None:
    engine = CopyEngine(fail={"respond": [2]})
    engine.attach(language_model, tokenizer)
    engine.push(0)
    queue = RolloutQueue(engine, 3)
    for step in range(1, 5):  # the second fails, and the engine is gone
        queue.start(step, PROMPTS, SAMPLING, num_generations=2, seeds=range(4))
        queue.wait()
    assert take(queue, 1) is not None
    assert take(queue, 2) is None
    assert engine.version is None
    assert [step in queue for step in (3, 4)] == [False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_state_that_was_read_to_the_cpu_is_moved_to_its_prompts(
    language_model, tokenizer
) -> None:
    _, ahead = started(language_model, tokenizer)
    resumed = RolloutQueue(CopyEngine(), 1)
    # Lightning loads checkpoints before it moves the module
    resumed.load_state_dict(ahead.state_dict(), torch.device("cpu"))
    assert take(resumed, prompts=PROMPTS.to("cuda")).input_ids.is_cuda
