"""Records ``trl_kto.json``: losses and gradients of TRL's KTO trainer.

Run as ``record_trl_training.py``, whose models and tokenizer it takes. The mismatched pairs are
those that TRL's data preparation makes: the answers of a batch, shifted by one.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from record_trl_training import OPTIONS, gradients, model, rounded, tokenizer
from trl import KTOConfig, KTOTrainer

ROWS = [
    ([5, 6, 7], [8, 9, 1], True),
    ([10], [11, 12, 13, 14, 1], False),
    ([2, 3], [4, 1], False),
    ([20, 21, 22], [9, 1], True),
    ([15, 16], [17, 18, 1], True),
]


def without_others(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "KL_completion_ids"}


def cases(folder: str) -> Iterator[dict[str, Any]]:
    shifted = [ROWS[-1], *ROWS[:-1]]
    rows = [
        {"prompt_ids": asked, "completion_ids": said, "label": label, "KL_completion_ids": other[1]}
        for (asked, said, label), other in zip(ROWS, shifted, strict=True)
    ]
    texts = [{"prompt": "w5", "completion": "w6", "label": label} for label in (True, False)]
    for loss_type, beta, desirable, undesirable in (
        ("kto", 0.1, 1.0, 1.0),
        ("kto", 0.7, 1.0, 1.5),
        ("apo_zero_unpaired", 0.4, 2.0, 1.0),
    ):
        # with the models the other way round the estimate of the divergence is above 0
        for policy, reference in ((1, 2), (2, 1)):
            trainer = KTOTrainer(
                model(policy),
                ref_model=model(reference),
                args=KTOConfig(
                    output_dir=folder,
                    loss_type=loss_type,
                    beta=beta,
                    desirable_weight=desirable,
                    undesirable_weight=undesirable,
                    **OPTIONS,
                ),
                train_dataset=Dataset.from_list(texts),
                processing_class=tokenizer(),
            )
            own = rows if loss_type == "kto" else [without_others(row) for row in rows]
            loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(own))
            trainer.model.zero_grad()
            loss.backward()
            found = {name: values[-1] for name, values in trainer._metrics["train"].items()}
            kept = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins")
            yield {
                "loss_type": loss_type,
                "beta": beta,
                "weights": [desirable, undesirable],
                "policy": policy,
                "loss": loss.item(),
                "metrics": {name: found[name] for name in kept},
                "gradient": gradients(trainer.model)["lm_head.weight"],
            }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = {
            "source": f"TRL {trl.__version__}: compute_loss of KTOTrainer (float64, CPU)",
            "rows": ROWS,
            "cases": list(cases(folder)),
        }
    path = Path(__file__).parent / "trl_kto.json"
    path.write_text(json.dumps(rounded(record)) + "\n")


if __name__ == "__main__":
    main()
