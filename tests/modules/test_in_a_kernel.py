"""What a person does in a notebook: stop a cell, go on with the same objects, ask the policy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

ROOT = Path(__file__).parents[2]
SET_UP = """
import logging, sys, time
sys.path.insert(0, {notebooks!r})
from tiny_model import build_model, build_tokenizer
from lrlhf import Trainer
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO
from lrlhf.rollout import Sampling

tokenizer = build_tokenizer("abc")
seen = []

def slow(completions, step):
    if step[0] == 2 and not seen:
        seen.append(step[0])
        print("waits", flush=True)
        time.sleep(4)
    return [float(text.count("a")) for text in completions]

module = RLOO(
    build_model(tokenizer, width=32, layers=1), slow, tokenizer=tokenizer,
    sampling=Sampling(max_new_tokens=3),
)
data = PromptDataModule(train=[{{"prompt": "a"}}, {{"prompt": "b"}}], batch_size=2)
trainer = Trainer(
    max_steps=4, default_root_dir={folder!r}, enable_progress_bar=False, accelerator="cpu"
)
module.sample("a", scored=False)
"""


class Kernel:
    """A kernel, and what it says."""

    def __init__(self) -> None:
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel()

    def run(self, code: str, *, stop_at: str | None = None) -> tuple[str, str | None]:
        """Return what a cell prints and shows, and the name of what it raises."""
        asked, said, raised = self.client.execute(code), "", None
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=240)
            if message["parent_header"].get("msg_id") != asked:
                continue
            content, kind = message["content"], message["msg_type"]
            if kind == "stream":
                said += content["text"]
            elif kind in ("execute_result", "display_data"):
                said += content["data"].get("text/plain", "")
            elif kind == "error":
                raised = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return said, raised
            if stop_at is not None and stop_at in said:
                stop_at = None
                self.manager.interrupt_kernel()
        raise TimeoutError(said)


@pytest.mark.slow
def test_a_cell_is_interrupted_and_fit_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernel = Kernel()
    try:
        values = {"notebooks": str(ROOT / "notebooks"), "folder": str(tmp_path)}
        shown, raised = kernel.run(SET_UP.format(**values))
        assert raised is None, shown
        assert "Sampled(" in shown
        said, raised = kernel.run("trainer.fit(module, data)", stop_at="waits")
        assert raised == "Interrupted", said
        assert kernel.run("trainer.global_step") == ("2", None)
        assert kernel.run("isinstance(module.sample('b', scored=True).score, float)")[0] == "True"
        said, raised = kernel.run("trainer.fit(module, data, ckpt_path='last')")
        assert raised is None, said
        # the table of responses is text, and not left to the kernel to draw
        assert "response" in said
        assert "\n\n\n\n" not in said
        said, raised = kernel.run("trainer.max_steps = 6; trainer.fit(module, data)")
        assert raised is None, said
        assert kernel.run("trainer.global_step") == ("6", None)
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)
