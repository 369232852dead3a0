"""What a model cannot read is refused before the first step, and padding is no text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedTokenizerBase,
    RobertaConfig,
)

from lrlhf import Trainer
from lrlhf.datamodules import (
    PreferenceDataModule,
    PromptDataModule,
    StepwiseDataModule,
    SupervisedDataModule,
)
from lrlhf.models import CausalLM, ValueModel
from lrlhf.models.text_limits import TextLimits, context_of
from lrlhf.modules import (
    DPO,
    PPO,
    RLOO,
    SFT,
    Critic,
    ProcessRewardModel,
    Reference,
    RewardModel,
    Update,
)
from lrlhf.rewards import LearnedReward
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import letters

CONTEXT = 24
NEW = 4


def policy_options(**options: Any) -> dict[str, Any]:
    sampling = Sampling(max_new_tokens=NEW, min_new_tokens=0)
    no_reference = Reference(kl_coef=0.0)
    return {
        "rewards": letters,
        "num_generations": 2,
        "sampling": sampling,
        "reference": no_reference,
        **options,
    }


def answers(length: int, **options: Any) -> Any:
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in (1, length - 2)]
    return PreferenceDataModule(rows, batch_size=2, **options)


def texts(length: int, **options: Any) -> Any:
    rows = [{"prompt": "a", "completion": "b" * n} for n in (1, length - 2)]
    return SupervisedDataModule(rows, batch_size=2, **options)


def steps(length: int, **options: Any) -> Any:
    rows = [{"prompt": "a", "completions": ["b" * n], "labels": [True]} for n in (1, length - 2)]
    return StepwiseDataModule(rows, batch_size=2, **options)


def prompts(length: int, **options: Any) -> Any:
    rows = [{"prompt": "a" * n} for n in (1, length - NEW)]
    return PromptDataModule(rows, batch_size=2, **options)


RUNS: dict[str, tuple[Callable[[str], Any], Callable[..., Any]]] = {
    "sft": (SFT, texts),
    "dpo": (DPO, answers),
    "reward": (RewardModel, answers),
    "prm": (ProcessRewardModel, steps),
    "rloo": (lambda folder: RLOO(folder, **policy_options()), prompts),
    "ppo": (lambda folder: PPO(folder, **policy_options()), prompts),
}


def test_a_text_may_use_the_last_id_and_fill_the_context() -> None:
    limits = TextLimits(source="m", context=8, vocabulary=5, response=3, option="max_new_tokens")
    limits.refuse_texts([("row 1", [4]), ("row 2", [0] * 5)], None)
    with pytest.raises(ValueError, match="row 1 has the token 5, but the embedding of m has 5"):
        limits.refuse_texts([("row 1", [5])], None)
    with pytest.raises(ValueError, match=r"at most 8 tokens.*row 2\) is 6 and max_new_tokens is 3"):
        limits.refuse_texts([("row 1", [4]), ("row 2", [0] * 6)], None)


def test_the_context_is_what_positions_are_left_and_rope_stretches() -> None:
    assert context_of(LlamaConfig(max_position_embeddings=64)) == 64
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    assert context_of(LlamaConfig(max_position_embeddings=64, rope_parameters=rope)) == 256
    # positions begin behind that of the padding
    assert context_of(RobertaConfig(max_position_embeddings=66, pad_token_id=1)) == 64


def save(folder: Path, tokenizer: PreTrainedTokenizerBase, family: str, context: int) -> str:
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": context}
        config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=None, **sizes)
        config.eos_token_id = tokenizer.eos_token_id
        GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        build_language_model(tokenizer, max_position_embeddings=context).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def fit(module: Any, data: Any, folder: Path) -> None:
    Trainer(
        max_steps=1,
        default_root_dir=folder,
        accelerator="cpu",
        default_callbacks=False,
        enable_progress_bar=False,
        logger=False,
    ).fit(module, data)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", RUNS)
def test_rows_fill_the_context_and_no_more(
    name: str, family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    build, data = RUNS[name]
    source = save(tmp_path / "model", tokenizer, family, CONTEXT)
    if name == "prm":  # it ends each step with a mark
        fit(build(source), data(CONTEXT - 2), tmp_path)
    else:
        fit(build(source), data(CONTEXT), tmp_path)
    said = rf"reads at most {CONTEXT} tokens \(max_position_embeddings\); the longest .*list:2"
    with pytest.raises(ValueError, match=said):
        fit(build(source), data(CONTEXT + 1), tmp_path)
    # also where it is only evaluated on
    with pytest.raises(ValueError, match=said):
        fit(build(source), data(8, val=rows_of(data(CONTEXT + 1))), tmp_path)


def rows_of(data: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in data.train_components[0].sources[0].rows()]


@pytest.mark.parametrize("role", ["reference", "critic", "dpo", "pretraining", "evaluation"])
def test_all_that_reads_the_rows_is_asked(
    role: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    wide = save(tmp_path / "wide", tokenizer, "llama", CONTEXT)
    short = save(tmp_path / "short", tokenizer, "llama", CONTEXT - 4)
    data, limit = prompts(CONTEXT), CONTEXT - 4
    if role == "reference":
        reference = Reference(kl_coef=0.1, model=CausalLM(source=short))
        module: Any = RLOO(wide, **policy_options(reference=reference))
    elif role == "critic":
        module = PPO(wide, critic=Critic(model=ValueModel(source=short)), **policy_options())
    elif role == "dpo":
        module, data = DPO(wide, reference=short), answers(CONTEXT)
    elif role == "pretraining":
        module = RLOO(wide, update=Update(pretraining_coef=0.1), **policy_options())
        data, limit = prompts(8, pretraining=[{"text": "b" * 30}] * 2), CONTEXT
    else:
        longer = Sampling(max_new_tokens=CONTEXT, min_new_tokens=0)
        module = RLOO(wide, eval_sampling=longer, **policy_options())
        data, limit = prompts(8, val=[{"prompt": "a"}]), CONTEXT
    with pytest.raises(ValueError, match=rf"reads at most {limit} tokens"):
        fit(module, data, tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", RUNS)
def test_padding_needs_no_embedding_and_a_token_of_the_text_does(
    name: str, family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    build, data = RUNS[name]
    source = save(tmp_path / "model", tokenizer, family, 64)
    own = AutoTokenizer.from_pretrained(source)
    own.add_special_tokens({"pad_token": "<|beyond|>"})
    own.add_tokens(["b<call>"])
    own.save_pretrained(source)
    module = build(source)
    fit(module, data(20), tmp_path)  # its rows are of several lengths
    module.save_pretrained(tmp_path / "export")
    classifies = name == "reward"
    kind = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    if name != "prm":
        exported = kind.from_pretrained(tmp_path / "export")
        padded = AutoTokenizer.from_pretrained(tmp_path / "export")(
            ["a", "aaa"], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            assert exported(**padded).logits.isfinite().all()
    rows = [{**row, "prompt": "b<call>"} for row in rows_of(data(20))]
    said = rf"list:1 has the token \d+ \('b<call>'\).* has {len(tokenizer)} rows, and the tokenizer"
    with pytest.raises(ValueError, match=said + f" has {len(own)} tokens"):
        fit(build(source), type(data(20))(rows, batch_size=2), tmp_path)


def test_a_tokenizer_that_is_given_pads_with_what_the_model_has(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = save(tmp_path / "model", tokenizer, "gpt2", 64)
    own = AutoTokenizer.from_pretrained(source)
    own.add_special_tokens({"pad_token": "<|beyond|>"})
    model = AutoModelForCausalLM.from_pretrained(source)
    fit(SFT(model, tokenizer=own), texts(20), tmp_path)
    assert own.pad_token == own.eos_token


def test_learned_rewards_leave_out_what_gpt2_cannot_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = save(tmp_path / "model", tokenizer, "gpt2", CONTEXT)
    RewardModel(source).save_pretrained(tmp_path / "reward")
    scores = LearnedReward(str(tmp_path / "reward"))(
        prompts=["a", "a"], completions=["b", "b" * CONTEXT], log_metric=lambda *_: None
    )
    assert scores[0] is not None
    assert scores[1] is None
