"""What is generated beside the main thread, and when it is taken."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.rollout import RolloutAhead, Sampling
from lrlhf.rollout.responses import untold_prompts
from lrlhf.types import PromptBatch
from tests.rollout.copy_engine import CopyEngine

SAMPLING = Sampling(max_new_tokens=4)


PROMPTS = untold_prompts([[10, 11], [12]])


def started(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> tuple[CopyEngine, RolloutAhead]:
    engine = CopyEngine(**options)
    engine.attach(model, tokenizer)
    engine.push(0)
    ahead = RolloutAhead(engine)
    ahead.start(1, PROMPTS, SAMPLING, num_generations=2, seeds=range(4))
    return engine, ahead


def take(ahead: RolloutAhead, step: int = 1, prompts: PromptBatch = PROMPTS, **options: Any) -> Any:
    arguments = {"num_generations": 2, "any_rank": bool} | options
    return ahead.take(step, prompts, **arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"step": 2},
        {"prompts": untold_prompts([[10, 11], [13]])},
        {"prompts": untold_prompts([[10], [12]])},  # which the responses' prompts begin with
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


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(max_new_tokens=4, top_k=5)])
def test_a_state_holds_the_whole_rollout(
    language_model, tokenizer, tmp_path, sampling: Sampling
) -> None:
    _, ahead = started(language_model, tokenizer)
    ahead.start(1, PROMPTS, sampling, num_generations=2, seeds=range(4))
    torch.save(ahead.state_dict(), tmp_path / "state.pt")
    resumed = RolloutAhead(CopyEngine())
    resumed.load_state_dict(
        torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu")
    )
    first, second = take(ahead), take(resumed)
    assert (first.kept_mass is None) == (sampling is SAMPLING)
    for name in first.__dataclass_fields__:
        value, other = getattr(first, name), getattr(second, name)
        assert (value is None and other is None) or torch.equal(value, other), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_state_that_was_read_to_the_cpu_is_moved_to_its_prompts(
    language_model, tokenizer
) -> None:
    _, ahead = started(language_model, tokenizer)
    resumed = RolloutAhead(CopyEngine())
    # Lightning loads checkpoints before it moves the module
    resumed.load_state_dict(ahead.state_dict(), torch.device("cpu"))
    assert take(resumed, prompts=PROMPTS.to("cuda")).input_ids.is_cuda
