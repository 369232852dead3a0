"""Records ``trl_training.json``: losses and gradients of TRL's SFT, DPO and CPO trainers.

Run in an environment of its own with TRL 1.16.0, beside this repository's packages::

    python tests/functional/golden/record_trl_training.py

The model is small enough for its weights to stand in the file.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

CONFIG = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
OPTIONS: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
    "remove_unused_columns": False,
    "per_device_train_batch_size": 4,
}
ROWS = [([5, 6, 7], [8, 9, 1]), ([10], [11, 12, 13, 14, 1]), ([2, 3], [4]), ([20, 21, 22], [9, 1])]
PAIRS = [
    ([5, 6, 7], [8, 9, 1], [10, 1]),
    ([10], [11, 12, 13, 14, 1], [15, 1]),
    ([2, 3], [4, 1], [16, 17, 18, 19, 1]),
    ([20, 21, 22], [9, 1], [23, 2, 1]),
]


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).double()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 24)}}
    backend = Tokenizer(WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def weights(of: torch.nn.Module) -> dict[str, Any]:
    return {name: weight.detach().tolist() for name, weight in of.named_parameters()}


def gradients(of: torch.nn.Module) -> dict[str, Any]:
    return {name: weight.grad.tolist() for name, weight in of.named_parameters()}


def result(trainer: Any, loss: torch.Tensor, **further: Any) -> dict[str, Any]:
    trainer.model.zero_grad()
    loss.backward()
    found = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    metrics = {name: value for name, value in found.items() if name != "num_tokens"}
    return {
        **further,
        "loss": loss.item(),
        "metrics": metrics,
        "gradients": gradients(trainer.model),
    }


def supervised(folder: str) -> Iterator[dict[str, Any]]:
    for loss_type in ("nll", "dft"):
        for completion_only in (True, False):
            options = {**OPTIONS, "loss_type": loss_type}
            rows = [
                {"input_ids": asked + said, "completion_mask": [0] * len(asked) + [1] * len(said)}
                for asked, said in ROWS
            ]
            if not completion_only:
                rows = [{"input_ids": row["input_ids"]} for row in rows]
            trainer = SFTTrainer(
                model(1),
                args=SFTConfig(output_dir=folder, completion_only_loss=completion_only, **options),
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer(),
            )
            batch = trainer.data_collator(list(trainer.train_dataset))
            loss = trainer.compute_loss(trainer.model.train(), batch)
            yield result(trainer, loss, loss_type=loss_type, completion_only=completion_only)


def preferences(folder: str) -> Iterator[dict[str, Any]]:
    rows = [
        dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), one, strict=True)) for one in PAIRS
    ]
    texts = [{"prompt": "w5", "chosen": "w6", "rejected": "w7"}]
    for loss_type, beta in (
        *(("sigmoid", 0.1), ("sigmoid", 0.5), ("ipo", 0.1), ("ipo", 0.4)),
        *(("hinge", 0.1), ("sigmoid_norm", 2.0)),
    ):
        trainer = DPOTrainer(
            model(1),
            ref_model=model(2),
            args=DPOConfig(output_dir=folder, loss_type=loss_type, beta=beta, **OPTIONS),
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer(),
        )
        loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(rows))
        yield result(trainer, loss, loss_type=loss_type, beta=beta)


def further_losses(folder: str) -> Iterator[dict[str, Any]]:
    rows = [
        dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), one, strict=True)) for one in PAIRS
    ]
    texts = [{"prompt": "w5", "chosen": "w6", "rejected": "w7"}]
    for loss_type, beta, options in (
        ("robust", 0.3, {"label_smoothing": 0.1}),
        ("exo_pair", 0.3, {"label_smoothing": 0.01}),
        *((name, 0.3, {}) for name in ("nca_pair", "bco_pair", "sppo_hard")),
        *((name, 0.3, {}) for name in ("apo_zero", "apo_down", "discopop")),
        ("sigmoid", 0.3, {"ld_alpha": 0.4}),
    ):
        trainer = DPOTrainer(
            model(1),
            ref_model=model(2),
            args=DPOConfig(output_dir=folder, loss_type=loss_type, beta=beta, **options, **OPTIONS),
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer(),
        )
        loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(rows))
        found = result(trainer, loss, loss_type=loss_type, beta=beta, **options)
        yield {**found, "gradients": found["gradients"]["lm_head.weight"], "metrics": {}}


def reference_free(folder: str) -> Iterator[dict[str, Any]]:
    """CPO's losses, of which SimPO is one; the others, without its NLL term, are cDPO's."""
    texts = [{"prompt": "w5", "chosen": "w6", "rejected": "w7"}]
    batch: dict[str, torch.Tensor] = {}
    for index, side in ((1, "chosen"), (2, "rejected")):
        longest = max(len(pair[0]) + len(pair[index]) for pair in PAIRS)
        for name, padding in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
            made = []
            for pair in PAIRS:
                asked, said = pair[0], pair[index]
                values = {
                    "input_ids": asked + said,
                    "attention_mask": [1] * len(asked + said),
                    "labels": [-100] * len(asked) + said,
                }[name]
                made.append(values + [padding] * (longest - len(values)))
            batch[f"{side}_{name}"] = torch.tensor(made)
    for loss_type, beta, gamma, smoothing in (
        *(("simpo", 2.0, 1.0, 0.0), ("simpo", 2.5, 0.5, 0.1)),
        *(("sigmoid", 0.3, 0.0, 0.0), ("sigmoid", 0.3, 0.0, 0.2)),
    ):
        options = {key: value for key, value in OPTIONS.items() if key != "max_length"}
        trainer = CPOTrainer(
            model(1),
            args=CPOConfig(
                output_dir=folder,
                loss_type=loss_type,
                beta=beta,
                simpo_gamma=gamma,
                cpo_alpha=0.0,
                label_smoothing=smoothing,
                **options,
            ),
            train_dataset=Dataset.from_list(texts),
            processing_class=tokenizer(),
        )
        trainer.model.train().zero_grad()
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
        loss.backward()
        found = {name: float(value) for name, value in metrics.items()}
        yield {
            **{"loss_type": loss_type, "beta": beta, "gamma": gamma, "label_smoothing": smoothing},
            **{"loss": loss.item(), "metrics": found, "gradients": gradients(trainer.model)},
        }


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = {
            "source": f"TRL {trl.__version__}: compute_loss of SFTTrainer and DPOTrainer, "
            "get_batch_loss_metrics of CPOTrainer (float64, CPU)",
            "config": CONFIG,
            "policy": weights(model(1)),
            "reference": weights(model(2)),
            "rows": ROWS,
            "pairs": PAIRS,
            "sft": list(supervised(folder)),
            "dpo": list(preferences(folder)),
            "cpo": list(reference_free(folder)),
            "further": list(further_losses(folder)),
        }
    path = Path(__file__).parent / "trl_training.json"
    path.write_text(json.dumps(rounded(record)) + "\n")


if __name__ == "__main__":
    main()
