"""What generative reward models are for: the form of verdicts is learnt, and who is better."""

import json
import logging
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import lightning as L
import pytest

from lrlhf.callbacks import EvalJSONL
from lrlhf.datamodules import MemorySource, PromptDataModule, SupervisedDataModule, VerdictTasks
from lrlhf.modules import RLOO, SFT, OptimizerConfig, Reference
from lrlhf.rewards import RegexFormat, Rewards, VerdictCorrect, VerdictFormat
from lrlhf.rollout import GenerativeReward, Sampling
from tests.conftest import build_language_model
from tests.modules.reward_runs import trainer

logger = logging.getLogger(__name__)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Of two letters the later one is better, which nothing in the question says."""
SHORT = "{{ responses[0] }} or {{ responses[1] }}?"


SFT_STEPS, RLOO_STEPS, POLICY_STEPS = 200, 80, 30


def split(seed: int, held_out: int = 60) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Pairs of letters; those held out are none of the others, in no order."""
    rows = [
        {"prompt": "", "chosen": later, "rejected": earlier}
        for earlier, later in combinations(LETTERS, 2)
    ]
    Random(seed).shuffle(rows)
    return rows[held_out:], rows[:held_out]


def tasks(rows: list[dict[str, str]]) -> VerdictTasks:
    return VerdictTasks(rows, form="direct", template=SHORT, system="", positions="both")


def reinforced(model: Any, rewards: Any, max_new_tokens: int, lr: float, **options: Any) -> RLOO:
    return RLOO(
        model,
        rewards,
        num_generations=8,
        sampling=Sampling(max_new_tokens=max_new_tokens),
        reference=Reference(kl_coef=0.0),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=0),
        **options,
    )


def chat_model(tokenizer: Any, seed: int) -> Any:
    model = build_language_model(tokenizer, seed=seed, initializer_range=0.05, hidden_size=64)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    return model


def of_judge(run: L.Trainer, pairs: str) -> dict[str, float]:
    """What the last evaluation says of some pairs."""
    start = f"eval/{pairs}/verdict_correct/"
    values = run.callback_metrics.items()
    return {
        name.removeprefix(start): round(float(value), 3)
        for name, value in values
        if name.startswith(start)
    }


# the same with other weights and other pairs held out; figures: docs/generative_reward_models.md
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.exhaustive if seed else ()) for seed in range(3)]
)
@pytest.mark.slow
def test_a_tiny_judge_beats_chance_on_pairs_that_it_has_not_seen_and_trains_a_policy(
    tokenizer: Any, tmp_path: Path, seed: int
) -> None:
    train, held_out = split(seed)
    model = chat_model(tokenizer, seed)
    prompts = PromptDataModule(
        tasks(train),
        val={"seen": tasks(train), "held_out": tasks(held_out)},
        batch_size=32,
        val_batch_size=120,
    )
    verdicts = Rewards([VerdictCorrect("direct"), VerdictFormat("direct")], weights=[1.0, 0.1])

    def judge() -> RLOO:
        return reinforced(model, verdicts, 14, 6e-4, tokenizer=tokenizer, seed=seed)

    def evaluated(name: str) -> tuple[dict[str, float], dict[str, float]]:
        run = trainer(tmp_path / name, callbacks=[EvalJSONL(tmp_path / name)])
        run.validate(judge(), prompts, verbose=False)
        seen, new = of_judge(run, "seen"), of_judge(run, "held_out")
        logger.info("seed %d, %s: seen %s, held out %s", seed, name, seen["accuracy"], new)
        return seen, new

    assert evaluated("before")[1]["malformed"] == 1
    supervised = SFT(
        model,
        tokenizer=tokenizer,
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=10),
        seed=seed,
    )
    texts = SupervisedDataModule(tasks(train), batch_size=64)
    trainer(tmp_path / "sft", max_steps=SFT_STEPS, max_epochs=-1).fit(supervised, texts)
    taught, held_out_taught = evaluated("supervised")
    assert held_out_taught["malformed"] < 0.05
    assert held_out_taught["accuracy_low"] > 0.5

    trainer(tmp_path / "rloo", max_steps=RLOO_STEPS, max_epochs=-1).fit(judge(), prompts)
    practised, held_out_practised = evaluated("reinforced")
    assert practised["accuracy"] > taught["accuracy"]
    assert held_out_practised["accuracy_low"] > 0.5
    (file,) = (tmp_path / "reinforced").glob("eval_scores_*.jsonl")
    line = json.loads(file.read_text().splitlines()[0])
    assert line["extras"]["correct"] is (line["extras"]["verdict"] == line["columns"]["gold"])

    # a policy that says any letter learns to say late ones from verdicts alone
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    policy = chat_model(tokenizer, seed + 10)
    asked = [{"role": "user", "content": "Which?"}]
    said = [{"prompt": asked, "completion": letter} for letter in LETTERS]
    speaks = SFT(
        policy, tokenizer=tokenizer, optimizer=OptimizerConfig(lr=3e-3, warmup_steps=10), seed=seed
    )
    trainer(tmp_path / "speaks", max_steps=40, max_epochs=-1).fit(
        speaks, SupervisedDataModule(MemorySource(said), batch_size=26)
    )
    reward = GenerativeReward(
        str(tmp_path / "judge"), "direct", template=SHORT, system="", max_new_tokens=14
    )
    learner = reinforced(
        policy,
        # the judge has no idea of what is no letter
        Rewards([reward, RegexFormat("[a-z]")], max_unscorable_fraction=1.0),
        2,
        1e-3,
        tokenizer=tokenizer,
        seed=seed,
    )

    def lateness() -> float:
        """Mean place in the alphabet of what the policy says, 0 to 25; -1: it is no letter."""
        answers = learner.generate([asked] * 64, seed=0)
        return sum(LETTERS.find(answer or "?") for answer in answers) / len(answers)

    before = lateness()
    data = PromptDataModule([{"prompt": asked}] * 4, batch_size=4)
    trainer(tmp_path / "policy", max_steps=POLICY_STEPS, max_epochs=-1).fit(learner, data)
    after = lateness()
    logger.info("seed %d, place of the policy's letters: %.1f, then %.1f", seed, before, after)
    assert before < 16
    assert after > before + 4
