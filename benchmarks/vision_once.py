"""What it saves to look at an image once for all responses to it.

    python benchmarks/vision_once.py --num-generations 8 --image-tokens 256

Log-probabilities of responses to random images, with a tiny Qwen2-VL: rows that share the image's
object, which the encoder then sees once, against rows with an object each. The two take turns;
medians are shown.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from lrlhf.media import MediaProcessor
from lrlhf.models import CausalLM, sequence_logprobs
from lrlhf.types import SequenceBatch

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_vlm.py"


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--image-tokens", type=int, default=256, help="a square, at most 256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, shared = build(options)
    assert shared.media is not None
    # a copy of the object is another image, as far as anyone can know
    apart = replace(shared, media=tuple(replace(entry) for entry in shared.media if entry))
    for gradients in (False, True):
        times: dict[str, list[float]] = {"once": [], "per response": []}
        for _ in range(options.rounds + 1):
            for name, batch in (("once", shared), ("per response", apart)):
                times[name].append(measure(model, batch, gradients=gradients))
        once, each = (statistics.median(seconds[1:]) for seconds in times.values())
        what = "with gradients" if gradients else "without gradients"
        print(f"{what}: once {once:.3f} s, per response {each:.3f} s, {each / once:.1f} times")  # noqa: T201


def build(options: argparse.Namespace) -> tuple[PreTrainedModel, SequenceBatch]:
    """Build the model, and responses to random images that rows share."""
    side = 16 * round(options.image_tokens**0.5)
    with tempfile.TemporaryDirectory() as folder:
        script = runpy.run_path(str(EXAMPLE))
        script["build"].__globals__["SIDE"] = side
        script["build"](Path(folder))
        spec = CausalLM(source=folder)
        model, tokenizer = spec.load(), spec.load_tokenizer()
        processor = MediaProcessor.for_model(spec.load_processor(), model.config)
    assert processor is not None
    random = np.random.default_rng(0)
    rows = []
    for _ in range(options.prompts):
        pixels = random.integers(0, 256, (side, side, 3)).astype(np.uint8)
        content = [{"type": "image"}, {"type": "text", "text": "what digit?"}]
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        rows.append(processor.encode(str(text), [Image.fromarray(pixels)], []))
    answer = [tokenizer.convert_tokens_to_ids("7")] * options.response_tokens
    copies = [row for row in rows for _ in range(options.num_generations)]
    ids = torch.tensor([[*row.input_ids, *answer] for row in copies])
    said = torch.zeros_like(ids, dtype=torch.bool)
    said[:, -options.response_tokens :] = True
    batch = SequenceBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(said),
        response_mask=said,
        media=tuple(row.media for row in copies),
    )
    return model, batch  # type: ignore[return-value]


def measure(model: PreTrainedModel, batch: SequenceBatch, *, gradients: bool) -> float:
    """Return the seconds of one pass."""
    start = time.perf_counter()
    with torch.set_grad_enabled(gradients):
        total = sequence_logprobs(model, batch).sum()
    if gradients:
        total.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
