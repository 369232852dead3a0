"""The parts of an iteration by themselves: built, given their inputs, asked for their results."""

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedTokenizerBase

from lrlhf.models import TokenBudget, frozen_reference
from lrlhf.modules import RLOO, Update
from lrlhf.modules.policy.experience import as_experience
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.sample import Sampler
from lrlhf.modules.policy.score import Scorer
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.rewards import Rewards
from lrlhf.rollout import Capabilities, Response, RolloutEngine, Sampling, assemble_rollout
from lrlhf.types import PromptBatch, Rollout


def settings_of(**options: Any) -> PolicySettings:
    names = {field.name for field in fields(PolicySettings)}
    written = inspect.signature(RLOO).parameters.items()
    defaults = {name: one.default for name, one in written if name in names}
    own = {"num_generations": 2, "sampling": Sampling(max_new_tokens=4)}
    return PolicySettings.complete(default_algorithm="rloo", **(defaults | own | options))


def iteration(rank: int = 0, world_size: int = 1) -> Iteration:
    """The third iteration of a run without callbacks."""
    trainer = SimpleNamespace(
        world_size=world_size,
        global_rank=rank,
        callbacks=[],
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        train_dataloader=None,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        estimated_stepping_batches=10,
    )
    module = SimpleNamespace(
        trainer=trainer, device=torch.device("cpu"), global_step=2, token_budget=TokenBudget()
    )
    return Iteration(module)  # type: ignore[arg-type]


def prompts_of(tokenizer: PreTrainedTokenizerBase, *texts: str) -> PromptBatch:
    encoded = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left")
    return PromptBatch(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"].bool(),
        prompts=texts,
        columns=tuple({"prompt": text} for text in texts),
    )


class Says(RolloutEngine):
    """Answers the k-th time it is asked with k, written as often as the row's number says."""

    capabilities = Capabilities(exact=True, concurrent=True)

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def attach(self, policy: Any, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer

    def generate(
        self, prompts: PromptBatch, sampling: Sampling, *, num_generations: int, seeds: Any
    ) -> Rollout:
        self.asked.append(list(seeds))
        responses = []
        for row in range(len(prompts) * num_generations):
            ids = self.tokenizer(str(len(self.asked)) * (row + 1), return_tensors="pt")["input_ids"]
            logprobs = torch.full((ids.shape[1],), -0.5)
            responses.append(Response.sampled(ids[0], logprobs, truncated=False))
        pad_id = self.tokenizer.pad_token_id
        return assemble_rollout(prompts, responses, num_generations=num_generations, pad_id=pad_id)

    def close(self) -> None:
        pass


@pytest.fixture
def sample(language_model, tokenizer):
    """Samples responses to prompts, and returns them and the seeds that the engine was given."""

    def sample(it: Iteration, *texts: str, **options: Any) -> tuple[Any, list[list[int]]]:
        rewards = Rewards({"length": lambda completions: list(map(len, completions))})
        loaded, engine = LoadedPolicy(language_model, tokenizer, None), Says()
        sampler = Sampler(loaded, engine, rewards, settings_of(**options), seed=5)
        return sampler.sample(prompts_of(tokenizer, *texts), it), engine.asked

    return sample


def test_a_sampler_returns_responses_scores_and_columns(sample) -> None:
    it = iteration()
    found, seeds = sample(it, "one", "and two", algorithm="remax")
    assert [record["completion"] for record in it.records] == ["1", "11", "111", "1111"]
    assert found.scores.tolist() == found.columns["reward/length"].tolist() == [1, 2, 3, 4]
    # beside them one greedy response to each prompt: "2" and "22"
    assert found.columns["greedy"].tolist() == [1, 1, 2, 2]
    assert [len(set(asked)) for asked in seeds] == [4, 2]
    assert found.old_source is None
    assert found.counted.all()
    # seeds of (run, iteration, prompt), no state
    assert sample(iteration(), "one", "and two")[1] == seeds[:1]


def test_responses_do_not_depend_on_how_many_ranks_there_are(sample) -> None:
    texts = ("a", "b", "c", "d")
    _, alone = sample(iteration(), *texts, algorithm="remax")
    ranks = [
        sample(iteration(rank, 2), *texts[2 * rank : 2 * rank + 2], algorithm="remax")[1]
        for rank in (0, 1)
    ]
    # the responses, then what is sampled beside them
    for together, first, second in zip(alone, *ranks, strict=True):
        assert together == first + second
        assert len({*together}) == len(together)


def test_a_loader_that_cannot_look_ahead_is_refused(sample) -> None:
    with pytest.raises(ValueError, match="a NoneType does not tell them"):
        sample(iteration(), "one", max_staleness=1)


@torch.no_grad()
def test_a_scorer_gives_log_probabilities_of_policy_and_reference(
    language_model, tokenizer
) -> None:
    settings = settings_of(update=Update(num_minibatches=2), sampling=Sampling(temperature=2.0))
    engine = Says()
    engine.attach(language_model, tokenizer)
    rollout = engine.generate(
        prompts_of(tokenizer, "one", "and two"), settings.sampling, num_generations=2, seeds=[0] * 4
    )
    reference = frozen_reference(language_model)
    for parameter in language_model.parameters():
        parameter.mul_(1.1)
    engine.capabilities = Capabilities(exact=False)
    scorer = Scorer(language_model, reference, engine, settings, models={"policy": language_model})
    it = iteration()
    it.kl_coef = 0.05
    experience = as_experience(rollout, scores=torch.zeros(4))
    scored = scorer(experience, it)
    assert scored.old_source == "policy"
    for model, found in (
        (language_model, scored.old_logprobs),
        (reference.model, scored.ref_logprobs),
    ):
        assert found is not None
        for row in range(4):
            ids = rollout.input_ids[row][rollout.attention_mask[row]]
            spread = (model(ids[None]).logits[0] / 2.0).log_softmax(dim=-1)
            expected = spread[:-1].gather(1, ids[1:, None])[:, 0]
            said = rollout.response_mask[row][: len(ids)][1:]
            torch.testing.assert_close(
                found[row, 1 : len(ids)][said], expected[said], rtol=1e-4, atol=1e-5
            )
    assert scorer(experience, iteration()).ref_logprobs is None
