"""A vLLM server as a user would start it, for what is not trained."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.process_guard import descendants
from lrlhf.rollout.vllm.vllm_base import free_port
from tests.forked import Popen


@contextlib.contextmanager
def served(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *options: str
) -> Iterator[str]:
    """Serve a model from a folder; its URL, until the end."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    length = str(model.config.max_position_embeddings)
    with serving(folder, "--max-model-len", length, *options) as url:
        yield url


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Serve the model that is in a folder, in float32; its URL, until the end."""
    port = free_port("127.0.0.1")
    given = f"--port {port} --host 127.0.0.1 --dtype float32"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += [*given.split(), "--enforce-eager", *options]
    with (folder / "log").open("wb") as log:
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        process = Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(1.0)
        yield url
    finally:
        for one in [*descendants(process.pid)]:
            one.kill()
        process.kill()
        process.wait()
