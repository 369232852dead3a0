"""`module.generate`: texts, chats, rows and images, by a policy that stays as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lrlhf.modules import PPO, RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import Capabilities, Sampling, TransformersEngine
from lrlhf.types import PromptBatch, Rollout
from tests.modules.policy_runs import assert_same, fit, letters, weights
from tests.vlms import build_vlm, picture

Build = Callable[..., RLOO | PPO]
CHAT = [{"role": "user", "content": "say a"}]


def greedy(module: Any, tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> str:
    """The likeliest tokens, one forward pass each."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in range(length):
        with torch.no_grad():
            chosen = module.policy(input_ids=ids).logits[0, -1].argmax()
        ids = torch.cat([ids, chosen.reshape(1, 1)], dim=1)
        if int(chosen) == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[0, start:], skip_special_tokens=True))


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_a_text_is_continued_greedily(
    build: Build, tokenizer: PreTrainedTokenizerBase, kind: type[RLOO | PPO]
) -> None:
    module = build(kind=kind)
    expected = [greedy(module, tokenizer, text, 5) for text in ("say a", "say something long")]
    assert len(set(expected)) == 2
    assert module.generate("say a", max_new_tokens=5, temperature=0) == expected[0]
    several = module.generate(["say a", "say something long"], max_new_tokens=5, temperature=0)
    assert several == expected


def test_a_chat_goes_through_the_template(build: Build, tokenizer: PreTrainedTokenizerBase) -> None:
    module = build()
    rendered = "<|im_start|>user\nsay a<|im_end|>\n<|im_start|>assistant\n"
    expected = greedy(module, tokenizer, rendered, 6)
    assert module.generate(CHAT, temperature=0) == expected
    assert module.generate([CHAT, "say a"], temperature=0)[0] == expected
    assert module.generate({"messages": CHAT, "answer": "a"}, temperature=0) == expected


def test_what_is_returned_has_the_form_of_what_is_asked(build: Build) -> None:
    module = build()
    assert isinstance(module.generate("say a"), str)
    assert [type(text) for text in module.generate(["say a"])] == [str]
    assert [type(text) for text in module.generate("say a", n=3)] == [str] * 3
    assert [[*map(type, group)] for group in module.generate(["a", "b"], n=2)] == [[str] * 2] * 2
    assert module.generate([]) == []


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, Dataset.from_dict])
def test_tables_and_columns_are_rows(build: Build, kind: Callable[..., Any]) -> None:
    module, columns = build(), {"prompt": ["say a", "say something long"], "n": [1, 2]}
    options: Any = {"max_new_tokens": 5, "temperature": 0}
    assert module.generate(kind(columns), **options) == module.generate(
        columns["prompt"], **options
    )


def test_a_seed_repeats_responses_whatever_goes_together(build: Build) -> None:
    module = build()
    first = module.generate(["say a", "b"], n=3, seed=1)
    assert module.generate(["say a", "b"], n=3, seed=1, batch_size=1) == first
    assert module.generate(["say a", "b"], n=3, seed=2) != first
    assert len(set(first[0])) > 1
    # without one they differ from call to call
    assert len({module.generate("say a", max_new_tokens=8) for _ in range(4)}) > 1


def test_sampling_is_that_of_training_unless_it_is_given(build: Build) -> None:
    seen: list[Sampling] = []

    class Spy(TransformersEngine):
        def generate(self, prompts: Any, sampling: Sampling, **options: Any) -> Rollout:
            seen.append(sampling)
            return super().generate(prompts, sampling, **options)

    own = Sampling(max_new_tokens=3, temperature=0.5)
    module = build(engine=Spy(), sampling=own)
    module.generate("a")
    module.generate("a", Sampling(max_new_tokens=2), top_k=4)
    module.generate("a", stop="x")
    assert seen == [own, Sampling(max_new_tokens=2, top_k=4), replace(own, stop=("x",))]


def test_nothing_of_the_module_or_the_process_changes(build: Build) -> None:
    module = build()
    module.train()
    module.policy.model.layers[0].eval()
    modes = [part.training for part in module.modules()]
    before = weights(module)
    states = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    module.generate("say a", n=2)
    assert [part.training for part in module.modules()] == modes
    assert_same(before, weights(module))
    assert all(weight.grad is None for weight in module.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_a_run_is_the_same_whether_or_not_it_is_asked(
    build: Build, prompts: Path, tmp_path: Path
) -> None:
    class Asks(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            answers.append(pl_module.generate("say a", max_new_tokens=8, temperature=0))

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.generate(["b", CHAT], n=2)

    answers: list[str] = []
    asked, alone = build(), build()
    before = asked.generate("say a", max_new_tokens=8, temperature=0)
    fit(asked, prompts, tmp_path, callbacks=[Asks()])
    fit(alone, prompts, tmp_path)
    assert_same(weights(alone), weights(asked))
    after = asked.generate("say a", max_new_tokens=8, temperature=0)
    assert answers[-1] == after
    assert after == alone.generate("say a", max_new_tokens=8, temperature=0)
    assert len({before, *answers}) > 1  # it answers with the weights that it has by then
    fit(asked, prompts, tmp_path, steps=1)  # and may be trained again


class Copied(TransformersEngine):
    """Says that it has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.held: int | None = None
        self.ranks = 1
        self.structured = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(holds_copy=True, ranks_together=self.ranks, structured=self.structured)

    @property
    def version(self) -> int | None:
        return self.held

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        self.calls.append("generate")
        return super().generate(prompts, sampling, num_generations=num_generations, seeds=seeds)

    def forget(self) -> None:
        self.calls.append("forget")


def test_an_engine_with_a_copy_answers_only_with_current_weights(build: Build) -> None:
    engine = Copied()
    module = build(engine=engine)
    expected = module.generate("say a", temperature=0)
    assert engine.calls == []
    engine.held = 3  # of an iteration that this module never came to
    module.generate("say a")
    assert engine.calls == []
    engine.held = 0
    assert module.generate("say a", temperature=0) == expected
    assert engine.calls == ["generate", "forget"]


def test_an_engine_that_ranks_share_is_not_asked_by_one_of_them(build: Build) -> None:
    engine = Copied()
    module = build(engine=engine)
    engine.held, engine.ranks = 0, 2
    assert module.generate("say a", temperature=0) == build().generate("say a", temperature=0)
    assert engine.calls == []


@pytest.mark.parametrize(
    ("ranks", "held", "reason"),
    [(2, 0, "is shared by 2 ranks, one of which cannot ask it alone"), (1, 3, "current weights")],
)
def test_a_format_that_only_the_engine_holds_is_refused_where_it_is_not_asked(
    build: Build, ranks: int, held: int, reason: str
) -> None:
    engine = Copied()
    module = build(engine=engine)
    engine.held, engine.ranks = held, ranks
    with pytest.raises(ValueError, match="TransformersEngine holds no responses to a format"):
        module.generate("say a", structured={"regex": "a"})
    engine.structured = True
    with pytest.raises(ValueError, match=rf"structured: Copied .*{reason}.* eval_sampling"):
        module.generate("say a", structured={"regex": "a"})


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("say a", {"max_new_token": 3}, "no option 'max_new_token'; did you mean 'max_new_tokens'"),
        ("say a", {"temperature": -1}, "temperature is -1; it must be 0 or more"),
        ("say a", {"n": 0}, "n is 0; it must be 1 or more"),
        ({"prompt": ["a", "b"], "n": [1]}, {}, "columns of the dict have different lengths"),
        ([3], {}, "a prompt is a int; give text, a list of messages"),
        ([["a"]], {}, "a prompt is a list; give text"),
        ("", {}, r"prompt 0 \(from 0\): column 'prompt' is empty"),
        (["a", {"question": "b"}], {}, r"prompt 1 \(from 0\): no column 'prompt'"),
        ("a" * 300, {}, "has 300 tokens, and the model reads 256"),
        ("a" * 200, {"max_new_tokens": 100}, "set max_new_tokens to 56 or less"),
        ("a", {"images": [[1], [2]]}, "the policy reads text only"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    build: Build, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build().generate(prompts, **options)


def test_images_change_the_answer_of_a_policy_that_sees() -> None:
    seeing = build_vlm("qwen2_vl")
    module = RLOO(
        seeing.model,
        Rewards([letters]),
        tokenizer=seeing.tokenizer,
        processor=seeing.processor.processor,
    )
    options: Any = {"max_new_tokens": 12, "temperature": 0}
    images = [picture(1), picture(2)]
    first, second = (module.generate("what is it?", images=image, **options) for image in images)
    assert first != second
    both = module.generate(["what is it?", "what is it?"], images=images, **options)
    assert both == [first, second]
    turns = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": images[0]},
                {"type": "text", "text": "what is it?"},
            ],
        }
    ]
    assert module.generate(turns, **options) == first
    with pytest.raises(ValueError, match="images for 2 prompts, and 1 prompts"):
        module.generate(["what is it?"], images=images)
