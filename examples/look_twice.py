"""A task that takes two looks: what is on the tile that a page's colour stands for?

    pip install 'lrlhf[vision]'
    python -m lrlhf.examples.look_twice --seed 1
    python -m lrlhf.examples.look_twice --seed 1 --engine vllm
    python -m lrlhf.examples.look_twice --seed 1 --blind

A red page asks about its left tile, a blue one about its right tile; nobody says so. The prompt
shows a thumbnail, in which every pattern is one even colour: it says where to look. The policy
calls the tool ``crop``, sees that tile at its full size, and answers with colour and pattern. The
best guess without sight is right in an eighth of the cases, cropping either tile in five.

The model is that of ``tiny_vlm.py``. Before RLOO it learns what a larger model brings: the form of
an episode, and to name colour and pattern of what it is shown, from episodes that crop either tile
at random. Nothing there says which tile a page asks about. See docs/vision.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning import seed_everything
from numpy.typing import NDArray
from PIL import Image

from lrlhf import Trainer
from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule, Source, SupervisedDataModule
from lrlhf.environments import Episodes, RegexCalls
from lrlhf.examples.tiny_vlm import build
from lrlhf.modules import RLOO, SFT, OptimizerConfig
from lrlhf.modules.settings import Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMServerEngine

Pixels = NDArray[np.uint8]

TILE = 32
"""Pixels of a tile along each side."""
_Y, _X = np.indices((TILE, TILE))
PATTERNS = {
    "plain": 0 * _X,
    "rows": (-1) ** _Y,
    "columns": (-1) ** _X,
    "checks": (-1) ** (_X + _Y),
}
"""Lighter and darker pixels, as many of either in each square of four."""
COLOURS = {"red": (60, -60, -60), "blue": (-60, -60, 60)}
"""What is added to grey on the pages about the left and about the right tile."""
WORDS = (
    "user",
    "assistant",
    "tool",
    "which?",
    *(f"crop {tile}" for tile in range(2)),
    *(f"{colour} {name}" for colour in COLOURS for name in PATTERNS),
)
GREY = np.full((TILE, 2 * TILE, 3), 128, np.uint8)


class Pages(Source):
    """Pages of two tiles, and the pattern of the one that the page's colour stands for.

    Rows have the chat ``prompt`` with the thumbnail, ``page``, from which `drawn` makes the pixels,
    and ``answer``; with ``either`` a whole episode in ``messages``, which crops either tile at
    random and answers with the pattern of that one.

    Args:
        size: How many.
        seed: Another one gives other pages.
        blind: Show grey pages, of which nothing but the answer is left.
        either: Give whole episodes.
    """

    def __init__(
        self, size: int, *, seed: int = 0, blind: bool = False, either: bool = False
    ) -> None:
        self._size = size
        self._seed = seed
        self._blind = blind
        self._either = either

    @property
    def name(self) -> str:
        return "pages"

    def rows(self) -> Iterable[dict[str, Any]]:
        for number in range(self._size):
            page = [self._seed, number]
            pixels, names, asked_for = drawn(page)
            if self._blind:
                page, pixels = [], GREY
            thumbnail = pixels.reshape(TILE // 2, 2, TILE, 2, 3).mean((1, 3)).astype(np.uint8)
            asked = _turn("user", {"type": "image", "image": thumbnail}, "which?")
            if not self._either:
                yield {"prompt": [asked], "page": page, "answer": names[asked_for]}
                continue
            tile = int(np.random.default_rng([*page, 1]).integers(2))
            shown = _turn("tool", {"type": "image", "image": np.asarray(crop(pixels, tile))})
            said = [
                {"role": "assistant", "content": text} for text in (f"crop {tile}", names[tile])
            ]
            yield {"messages": [asked, said[0], shown, said[1]]}


def _turn(role: str, *parts: dict[str, Any] | str) -> dict[str, Any]:
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    return {"role": role, "content": content}


def drawn(number: Sequence[int]) -> tuple[Pixels, list[str], int]:
    """Draw the page of a number.

    Returns:
        Pixels, uint8 `[32, 64, 3]`; what each tile is called; and which of them is asked about.
    """
    random = np.random.default_rng(number)
    tile, names = int(random.integers(2)), random.choice([*PATTERNS], 2)
    colour, added = [*COLOURS.items()][tile]
    pixels = [
        random.integers(118, 138, 3) + added + 50 * PATTERNS[name][..., None] for name in names
    ]
    page = np.concatenate(pixels, axis=1).astype(np.uint8)
    return page, [f"{colour} {name}" for name in names], tile


def crop(page: Pixels, tile: int) -> Image.Image:
    """Cut out the left tile, 0, or the right one, 1."""
    return Image.fromarray(page[:, TILE * tile : TILE * (tile + 1)])


class LookTwice:
    """A page that can be looked at more closely."""

    def reset(self, page: Sequence[int]) -> None:
        """Begin an episode, with a row's column ``page``."""
        self.pixels = drawn(page)[0] if page else GREY

    def crop(self, tile: int) -> Image.Image:
        """Show a tile of the page at its full size.

        Args:
            tile: 0, the left one, or 1.
        """
        return crop(self.pixels, tile)


def right(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Score the last turn of each episode: 1 for what is right, else 0."""
    ends = (str(turns[-1]["content"]) for turns in completions)
    return [float(end == pattern) for end, pattern in zip(ends, answer, strict=True)]


def warm_up(model: Path, folder: Path, *, steps: int = 150) -> Path:
    """Train the model on episodes that crop either tile; returns the folder of the result."""
    data = SupervisedDataModule(Pages(2000, seed=100, either=True), batch_size=32)
    sft = SFT(str(model), optimizer=OptimizerConfig(lr=2e-3))
    trainer = Trainer(accelerator="cpu", max_steps=steps, default_root_dir=folder)
    trainer.fit(sft, data)
    return folder / "export" / "final"


def train(
    model: Path, folder: Path, *, steps: int = 80, blind: bool = False, vllm: bool = False
) -> Trainer:
    """Train the model with RLOO, and test it on 200 other pages every 10 iterations."""
    policy = RLOO(
        str(model),
        Rewards([right]),
        engine=VLLMServerEngine(max_model_len=128, kv_cache_gib=0.1) if vllm else None,
        num_generations=8,
        sampling=Sampling(max_new_tokens=32),
        reference=Reference(kl_coef=0.0),
        update=Update(entropy_coef=0.01),
        episodes=Episodes(
            environment=LookTwice,
            tool_calls=RegexCalls("crop (?P<tile>[01])", tool="crop"),
            max_turns=2,
            max_turn_tokens=4,
        ),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    data = PromptDataModule(
        Pages(16 * steps, seed=200, blind=blind),
        val=Pages(200, seed=300, blind=blind),
        batch_size=16,
        val_batch_size=200,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        default_root_dir=folder,
        check_val_every_n_epoch=None,
        val_check_interval=10,
        callbacks=[VLLMWeightSync()] if vllm else [],
    )
    trainer.fit(policy, data)
    return trainer


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80, help="iterations of RLOO")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--blind", action="store_true", help="show grey pages")
    options = parser.parse_args()
    seed_everything(options.seed)
    runs = Path("runs") / f"look_twice_{options.seed}"
    form = runs / "form" / "export" / "final"
    if not form.exists():
        build(runs / "model", seed=options.seed, words=WORDS)
        warm_up(runs / "model", runs / "form")
    name = f"{options.engine}_blind" if options.blind else options.engine
    vllm = options.engine == "vllm"
    train(form, runs / name, steps=options.steps, blind=options.blind, vllm=vllm)


if __name__ == "__main__":
    main()
