"""Runs one iteration of RLOO, and counts what lies between its step and the loss's formula.

    python -m tools.iteration_walk

Prints JSON: the files of lrlhf that are entered from ``training_step`` until the first call of a
policy loss, and the calls that stand between the two at that moment, with their files.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L

from lrlhf.models import CausalLM
from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.types import PromptBatch
from tests.conftest import build_language_model, build_tokenizer
from tests.modules.policy_runs import fit, letters

_OURS = str(Path(__file__).parents[1] / "lrlhf")
_FORMULAS = str(Path(_OURS, "functional", "policy.py"))


class Walk:
    """The files entered until a policy loss is called, and the calls that lead to it."""

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self.calls: list[str] = []

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Note one call, as `sys.setprofile` reports it."""
        name = frame.f_code.co_filename
        if self.calls or event != "call" or not name.startswith(_OURS):
            return
        self.entered.add(name)
        if name == _FORMULAS and frame.f_code.co_name.endswith("policy_loss"):
            self.calls = _until_step(frame)

    def measured(self) -> dict[str, int]:
        """Return the numbers that have a budget."""
        return {
            "iteration_files": len(self.entered),
            "formula_hops": len(self.calls) - 1,
            "formula_files": len(set(self.calls)),
        }


def _until_step(frame: FrameType | None) -> list[str]:
    """Return the files of the calls from ``training_step`` to ``frame``, the last call first."""
    calls: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            calls.append(frame.f_code.co_filename)
            if frame.f_code.co_name == "training_step":
                return calls
        frame = frame.f_back
    return []


class WalkedRLOO(RLOO):
    """RLOO whose step is watched."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, PromptBatch)
        sys.setprofile(WALK.profile)
        try:
            super().training_step(batch, batch_idx)
        finally:
            sys.setprofile(None)


WALK = Walk()


def main() -> None:
    """Take one step with a model of some thousand parameters."""
    L.seed_everything(0, verbose=False)
    tokenizer = build_tokenizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)))
        for part in (tokenizer, build_language_model(tokenizer)):
            part.save_pretrained(folder / "model")
        module = WalkedRLOO(
            policy=CausalLM(source=str(folder / "model")),
            rewards=Rewards([letters]),
            num_generations=2,
            sampling=Sampling(max_new_tokens=4),
        )
        fit(module, prompts, folder, steps=1)
    sys.stdout.write(json.dumps(WALK.measured()) + "\n")


if __name__ == "__main__":
    main()
