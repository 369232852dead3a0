"""A module that satisfies the contracts of the callbacks, with numbers known beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lrlhf.rollout.listener import RolloutListener
from lrlhf.run import count_iterations_as_steps
from lrlhf.types import Experience, Media


class Weight(nn.Module):
    """One trained number beside one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.full((1,), 7.0), requires_grad=False)


class ToyPolicy(L.LightningModule):
    """Its trained weight is the number of finished steps: 0, 1, 2, ..."""

    def __init__(
        self,
        *,
        kl: Sequence[float] = (),
        records_per_step: int = 2,
        fail_in_validation: bool = False,
        fail_at_step: int | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = Weight()
        self.tokenizer = None
        self.kl_coef = 0.5
        self.samples_per_step = 10
        self.kl = kl
        self.records_per_step = records_per_step
        self.fail_in_validation = fail_in_validation
        self.fail_at_step = fail_at_step
        self.validated_weights: list[float] = []
        self.extra_column: Any = "plain"
        self.media: tuple[Media | None, ...] | None = None
        """What the responses are about."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            count_iterations_as_steps(self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.policy.trained], lr=1.0)

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def export_pretrained(self, folder: Path) -> None:
        (folder / "weight.txt").write_text(f"{self.weight:g}")
        (folder / "tokenizer.json").write_text("{}")

    @property
    def weight(self) -> float:
        return self.policy.trained.item()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        step = self.global_step
        if step == self.fail_at_step:
            raise RuntimeError("the power went out")
        listeners = [cb for cb in self.trainer.callbacks if isinstance(cb, RolloutListener)]
        for listener in listeners:
            listener.on_phase("generate")
            listener.on_phase("")
            rows = replace(experience(), media=self.media)
            listener.on_rollout(self.trainer, self, rows, self._records(step + 1))
            listener.on_phase("update")
        self.log("rollout/score", float(step))
        self.log("train/loss", 0.25)
        if self.kl:
            self.log("kl/sequence", self.kl[step])
        optimizer = self.optimizers()
        self.manual_backward(-self.policy.trained.sum())
        optimizer.step()
        optimizer.zero_grad()
        for listener in listeners:
            listener.on_phase("")

    def _records(self, step: int) -> list[dict[str, Any]]:
        return [
            record(step, row, columns={"answer": self.extra_column})
            for row in range(self.records_per_step)
        ]

    def validation_step(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        self.validated_weights.append(self.weight)
        if self.fail_in_validation and not self.trainer.sanity_checking:
            raise RuntimeError("no more memory")
        self.log("eval/score", self.weight)
        return {"records": [{"index": int(index), "score": float("nan")} for index in batch]}

    def test_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"records": [{"index": int(index), "weight": self.weight} for index in batch]}


def record(step: int, row: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": 0,
        "prompt": "2 + 2 =",
        "completion": f"answer {row}",
        "token_ids": [5, 6],
        "score": float(row),
        "rewards": {"exact": float(row), "format": None},
        "advantage": -0.5,
        "length": 2,
        "finish_reason": "stop",
        "columns": {},
        "extras": {},
        **changes,
    }


def experience() -> Experience:
    mask = torch.tensor([[False, True]])
    zeros = torch.zeros(1, 2)
    return Experience(
        input_ids=torch.zeros(1, 2, dtype=torch.long),
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        response_mask=mask,
        sampling_logprobs=zeros,
        group_ids=torch.zeros(1, dtype=torch.long),
        truncated=torch.tensor([False]),
        scores=torch.zeros(1),
        advantages=zeros,
        loss_mask=mask,
        counted=torch.tensor([True]),
    )


def batches(count: int, *, order: Sequence[int] | None = None) -> DataLoader:
    """``count`` batches of one number each, by default 0, 1, 2, ..."""
    return DataLoader(torch.tensor(list(order) if order else list(range(count))), batch_size=1)


def trainer(tmp_path: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
        "callbacks": list(callbacks),
    }
    return L.Trainer(**(settings | options))


def resume(
    tmp_path: Path, first: L.Callback, again: L.Callback, *, steps: int = 2, **module: Any
) -> Callable[[], ToyPolicy]:
    """Train an epoch of so many steps, and return what trains a second one from its checkpoint."""
    begun = trainer(tmp_path, first)
    begun.fit(ToyPolicy(**module), batches(steps))
    begun.save_checkpoint(tmp_path / "first.ckpt")

    def go() -> ToyPolicy:
        policy, path = ToyPolicy(**module), tmp_path / "first.ckpt"
        run = trainer(tmp_path, again, max_epochs=2)
        run.fit(policy, batches(steps), ckpt_path=path, weights_only=True)
        return policy

    return go
