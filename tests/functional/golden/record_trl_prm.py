"""Records ``trl_prm.json``: losses and gradients of TRL's trainer of process reward models.

TRL 1.16.0 has none any more. Run in an environment of its own, with TRL 0.27.0 beside this
repository's packages::

    python tests/functional/golden/record_trl_prm.py

The model is that of ``trl_training.json``, with a classifier whose weights stand in the file.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast
from trl.experimental.prm import PRMConfig, PRMTrainer

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "trl_training.json").read_text())["config"]
ROWS = [
    {"prompt": "w5 w6 w7", "completions": ["w8 w9", "w10", "w11 w12 w13"], "labels": [1, 1, 0]},
    {"prompt": "w10", "completions": ["w14"], "labels": [0]},
    {"prompt": "w2 w3", "completions": ["w4 w5", "w6"], "labels": [0, 1]},
    {"prompt": "w20 w21 w22", "completions": ["w9 w8 w7 w6", "w5"], "labels": [1, 1]},
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 24)}}
    backend = Tokenizer(WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def recorded(folder: str, *, last_step_only: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    model = LlamaForTokenClassification(LlamaConfig(**CONFIG)).double()
    torch.nn.init.normal_(model.score.bias)
    trainer = PRMTrainer(
        model,
        args=PRMConfig(
            output_dir=folder,
            step_separator="w23",
            train_on_last_step_only=last_step_only,
            max_length=None,
            disable_dropout=True,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=4,
        ),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer(),
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    parameters = dict(trainer.model.named_parameters())
    return {
        "last_step_only": last_step_only,
        "input_ids": batch["input_ids"].tolist(),
        "labels": batch["labels"].tolist(),
        "loss": loss.item(),
        "weights": {name: weight.detach().tolist() for name, weight in parameters.items()},
        "gradients": {name: weight.grad.tolist() for name, weight in parameters.items()},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        cases = [recorded(folder, last_step_only=only) for only in (False, True)]
    weights = cases[0]["weights"]
    assert all(case.pop("weights") == weights for case in [*cases])
    record = {"trl": trl.__version__, "config": CONFIG, "rows": ROWS, "weights": weights}
    (HERE / "trl_prm.json").write_text(json.dumps({**record, "cases": cases}) + "\n")
