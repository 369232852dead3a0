"""Records ``trl_gdpo.json``: advantages of TRL's GRPO trainer that normalises before it sums.

Run in an environment of its own with TRL 1.16.0::

    python tests/functional/golden/record_trl_gdpo.py

The trainer generates and scores by itself; its reward functions return what stands in the rows.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

CASES: list[tuple[int, int, list[float], list[tuple[int, int]]]] = [
    # prompts, responses to each, weights, (row, reward) without a value
    (2, 2, [1.0, 1.0], []),
    (3, 4, [1.0, 0.5, -2.0], []),
    (2, 4, [1.0], []),
    (2, 4, [1.0, 0.0], []),
    # a response lacks one, a group has one value alone, a response has nothing, a group nothing
    (3, 4, [1.0, 2.0], [(0, 1), (4, 0), (5, 0), (6, 0), (9, 0), (9, 1)]),
    (3, 2, [0.5, 1.0], [(2, 0), (3, 0), (2, 1), (3, 1)]),
]


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=24, num_attention_heads=1, eos_token_id=1, pad_token_id=0, **sizes)
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 24)}}
    backend = Tokenizer(WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def returning(column: int) -> Any:
    def function(completions: list[Any], values: list[list[Any]], **_: Any) -> list[Any]:
        assert len(completions) == len(values)
        return [row[column] for row in values]

    function.__name__ = f"column{column}"
    return function


def advantages(folder: str) -> Iterator[dict[str, Any]]:
    generator = random.Random(0)
    for prompts, size, weights, missing in CASES:
        values: list[list[float | None]] = [
            [round(generator.gauss(0, 2), 3) for _ in weights] for _ in range(prompts * size)
        ]
        if len(weights) == 2:  # a group whose responses are all as good
            for row in range(size):
                values[row][0] = 0.7
        for row, column in missing:
            values[row][column] = None
        rows = [{"prompt": f"w{2 + row // size}", "values": one} for row, one in enumerate(values)]
        trainer = GRPOTrainer(
            model(),
            [returning(column) for column in range(len(weights))],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=prompts * size,
                num_generations=size,
                max_completion_length=2,
                reward_weights=weights,
                multi_objective_aggregation="normalize_then_sum",
                report_to="none",
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_list([{"prompt": "w2"}] * prompts),
            processing_class=tokenizer(),
        )
        trainer.model.train()
        output = trainer._generate_and_score_completions(rows)
        yield {
            "num_generations": size,
            "weights": weights,
            "rewards": values,
            "advantages": [float(f"{one:.9g}") for one in output["advantages"].tolist()],
        }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = {
            "source": f"TRL {trl.__version__}: GRPOTrainer with multi_objective_aggregation="
            "normalize_then_sum (float32, CPU)",
            "gdpo": list(advantages(folder)),
        }
    path = Path(__file__).parent / "trl_gdpo.json"
    path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
