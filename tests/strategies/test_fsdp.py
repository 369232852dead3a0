"""FSDP2 on one process and on two, in bfloat16, with images, and with either kind of checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lrlhf.callbacks import EMA, RLCheckpoint
from lrlhf.datamodules import PromptDataModule
from lrlhf.models.sharding import settle, whole
from lrlhf.modules import PPO, RLOO, Reference, RewardModel, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutListener, Sampling
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint
from lrlhf.strategies import FSDP2
from tests.conftest import build_language_model, build_tokenizer
from tests.distributed.strategy_runs import MODULES, adamw, data_of
from tests.modules.policy_runs import letters
from tests.modules.test_vision_training import letters_said, sgd
from tests.vlms import build_vlm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

OFTEN = partial(pytest.param, marks=pytest.mark.exhaustive)
"""Another case of the same."""


class KeepEnd(L.Callback):
    """Leaves a file per rank: whole weights, precisions as they are trained, metrics."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, set[str]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for model in models_of(pl_module).values():
            for name, part in model.named_modules():
                if type(part).__name__ in ("RewardHead", "ValueHead", "Linear"):
                    part.register_forward_pre_hook(self._watch(name))

    def _watch(self, name: str) -> Callable[..., None]:
        def note(part: nn.Module, _: object) -> None:
            kinds = {str(weight.dtype) for weight in part.parameters()}
            self.seen.setdefault(name, set()).update(kinds)

        return note

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights: dict[str, Tensor] = {}
        split: dict[str, bool] = {}
        for role, model in models_of(pl_module).items():
            settle(model)
            for name, value in model.state_dict(keep_vars=True).items():
                weights[f"{role}.{name}"] = whole(value).detach().clone()
                if isinstance(value, nn.Parameter):  # a buffer stays whole
                    split[f"{role}.{name}"] = isinstance(value, DTensor)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        state = {"weights": weights, "split": split, "seen": self.seen, "metrics": metrics}
        torch.save(state, self.folder / f"rank{trainer.global_rank}.pt")


def models_of(module: L.LightningModule) -> dict[str, nn.Module]:
    assert isinstance(module, RLOO | PPO | RewardModel)
    return module.trainable_models()


def fit(  # noqa: PLR0913  the trainer's options
    module: L.LightningModule,
    folder: Path,
    *,
    ranks: int = 2,
    strategy: FSDP2 | None = None,
    steps: int = 3,
    data: L.LightningDataModule | None = None,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: Path | None = None,
    precision: Any = "32-true",
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy or "auto",
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=any(isinstance(callback, RLCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[*callbacks, KeepEnd(folder)],
    )
    trainer.fit(module, datamodule=data or data_of(module, folder, ranks), ckpt_path=ckpt_path)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


def forked(**options: Any) -> FSDP2:
    return FSDP2(start_method="fork", timeout=60, **options)


class LooksBeforeTheUpdate(RolloutListener, L.Callback):
    """Checks what the passes without gradients left behind."""

    def __init__(self, frees_blocks: bool) -> None:
        self.frees_blocks = frees_blocks
        self.trainer: L.Trainer | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trainer = trainer

    def on_phase(self, phase: str) -> None:
        if phase != "update":
            return
        assert self.trainer is not None
        module = self.trainer.lightning_module
        assert isinstance(module, RLOO | PPO)
        assert module.parts.reference is not None
        for model in (module.policy, module.parts.reference.model):  # type: ignore[attr-defined]
            assert all(isinstance(weight, DTensor) for weight in model.parameters())
        for block in module.policy.model.layers:  # type: ignore[union-attr]
            (group,) = block._get_fsdp_state()._fsdp_param_groups
            assert (group.post_forward_mesh_info is not None) == self.frees_blocks


@pytest.mark.parametrize("frees_blocks", [True, OFTEN(False)])
def test_after_drawing_and_looking_weights_are_split_as_before(
    frees_blocks: bool, model_folder: str, tmp_path: Path
) -> None:
    module = MODULES["rloo"](Path(model_folder))
    strategy = forked(reshard_after_forward=frees_blocks)
    look = LooksBeforeTheUpdate(frees_blocks)
    assert len(fit(module, tmp_path, strategy=strategy, callbacks=[look])) == 2


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            other[name], value, **{"rtol": 1e-3, "atol": 2e-5, **tolerance}, msg=name
        )


@pytest.mark.parametrize("name", [OFTEN("reward"), OFTEN("rloo"), "ppo with its own critic"])
def test_on_one_process_it_changes_nothing(name: str, model_folder: str, tmp_path: Path) -> None:
    build = MODULES[name]
    (plain,) = fit(build(Path(model_folder)), tmp_path / "plain", ranks=1)
    (alone,) = fit(build(Path(model_folder)), tmp_path / "alone", ranks=1, strategy=forked())
    assert all(alone["split"].values())
    assert not any(plain["split"].values())
    assert_close(plain["weights"], alone["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [OFTEN("reward"), "ppo with its own critic"])
def test_bfloat16_gathers_in_bfloat16_and_keeps_heads_and_weights_in_float32(
    name: str, model_folder: str, tmp_path: Path
) -> None:
    ends = fit(
        MODULES[name](Path(model_folder)), tmp_path, strategy=forked(), precision="bf16-mixed"
    )
    for end in ends:
        assert {value.dtype for value in end["weights"].values()} == {torch.float32}
        heads = {part: kinds for part, kinds in end["seen"].items() if "head" in part}
        blocks = {part: kinds for part, kinds in end["seen"].items() if "mlp" in part}
        assert heads
        assert blocks
        outputs = {part for part in heads if part.endswith("lm_head")}
        for part, kinds in heads.items():
            assert kinds == {"torch.bfloat16" if part in outputs else "torch.float32"}, part
        for part, kinds in blocks.items():
            assert kinds == {"torch.bfloat16"}, part
        assert all(bool(value.isfinite().all()) for value in end["weights"].values())
    first, second = (end["weights"] for end in ends)
    assert_close(first, second, rtol=0, atol=0)
    (plain,) = fit(MODULES[name](Path(model_folder)), tmp_path / "plain", ranks=1, steps=1)
    moved = [key for key, value in plain["weights"].items() if not torch.equal(value, first[key])]
    assert moved


@pytest.mark.parametrize(
    ("reshard", "offload"), [(False, True), OFTEN(True, True), OFTEN(False, False)]
)
def test_options_change_what_it_costs_and_not_what_comes_out(
    reshard: bool, offload: bool, model_folder: str, tmp_path: Path
) -> None:
    build = MODULES["rloo"]
    (one,) = fit(build(Path(model_folder)), tmp_path / "one", ranks=1, steps=2)
    strategy = forked(reshard_after_forward=reshard, cpu_offload=offload)
    for end in fit(build(Path(model_folder)), tmp_path / "two", strategy=strategy, steps=2):
        assert_close(one["weights"], end["weights"])


@pytest.mark.exhaustive
def test_copies_in_groups_of_one_rank_train_as_one_process(
    model_folder: str, tmp_path: Path
) -> None:
    build = MODULES["ppo"]
    (one,) = fit(build(Path(model_folder)), tmp_path / "one", ranks=1, steps=2)
    for end in fit(
        build(Path(model_folder)), tmp_path / "two", strategy=forked(shard_group=1), steps=2
    ):
        assert_close(one["weights"], end["weights"])


# ---------------------------------------------------------------------- checkpoints


def saving(folder: Path) -> list[L.Callback]:
    return [EMA(decay=0.5), RLCheckpoint(folder / "ck", every_n_train_steps=1, save_top_k=-1)]


def at_a_constant_rate() -> RLOO:
    """One that does not mind after how many steps it is stopped."""
    tokenizer = build_tokenizer()
    return RLOO(
        build_language_model(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        reference=Reference(kl_coef=0.05, sync_every=3),
        optimizer=replace(adamw(5e-3), schedule="constant"),
    )


@pytest.mark.parametrize("kinds", [("full", "sharded"), OFTEN(("sharded", "full"))])
def test_either_kind_of_checkpoint_is_saved_over_the_other_and_resumed_from(
    kinds: tuple[Any, Any], tmp_path: Path
) -> None:
    last = tmp_path / "ck" / "last.ckpt"
    (straight,) = fit(at_a_constant_rate(), tmp_path / "straight", ranks=1, steps=4)
    for steps, kind in zip((2, 3), kinds, strict=True):
        fit(
            at_a_constant_rate(),
            tmp_path,
            strategy=forked(checkpoint=kind),
            steps=steps,
            callbacks=saving(tmp_path),
            ckpt_path=last if steps > 2 else None,
        )
        assert is_folder_checkpoint(last) == (kind == "sharded")
        assert last.is_file() == (kind == "full")
    # and one process over either
    (end,) = fit(
        at_a_constant_rate(),
        tmp_path,
        ranks=1,
        steps=4,
        callbacks=saving(tmp_path),
        ckpt_path=last,
    )
    assert last.is_file()
    assert_close(straight["weights"], end["weights"])
    hidden = [path.name for path in (tmp_path / "ck").iterdir() if path.name.startswith(".")]
    assert hidden == []


# ---------------------------------------------------------------------- images


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two rows, of which one shows images: in each batch they go to a rank each."""
    names = ["0.png", "1.png"]
    for index, name in enumerate(names):
        shape = (32 + 16 * index, 48, 3)
        pixels = np.random.RandomState(index).randint(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    rows = [
        {"prompt": [{"role": "user", "content": f"what is {number}?"}], "images": images}
        for number, images in enumerate([names, []])
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class WhoSees(L.Callback):
    """Which ranks were shown images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        media = batch.media or ()
        with (self.folder / f"seen{trainer.global_rank}").open("a") as file:
            file.write("1" if any(entry is not None for entry in media) else "0")


@pytest.mark.parametrize("family", ["qwen2_vl", OFTEN("gemma3")])
def test_an_encoder_learns_though_only_one_rank_sees_images(
    family: str, questions: Path, tmp_path: Path
) -> None:
    def build() -> RLOO:
        vlm = build_vlm(family)
        L.seed_everything(3, verbose=False)
        return RLOO(
            vlm.model,
            Rewards([letters_said]),
            tokenizer=vlm.tokenizer,
            processor=vlm.processor.processor,
            num_generations=4,
            sampling=Sampling(max_new_tokens=6),
            reference=Reference(kl_coef=0.1),
            update=Update(micro_batch_tokens=200),
            optimizer=sgd(0.1),
            seed=3,
        )

    def data(ranks: int) -> PromptDataModule:
        return PromptDataModule(train=str(questions), batch_size=2 // ranks)

    start = build_vlm(family).model.state_dict()
    (one,) = fit(build(), tmp_path / "one", ranks=1, data=data(1))
    (tmp_path / "two").mkdir()
    ends = fit(
        build(),
        tmp_path / "two",
        strategy=forked(),
        data=data(2),
        callbacks=[WhoSees(tmp_path / "two")],
    )
    seen = [(tmp_path / "two" / f"seen{rank}").read_text() for rank in range(2)]
    assert [sorted(step) for step in zip(*seen, strict=True)] == [["0", "1"]] * 3
    assert_close(ends[0]["weights"], ends[1]["weights"], rtol=0, atol=0)
    assert_close(one["weights"], ends[0]["weights"], atol=5e-5)
    encoder = [name for name in start if "vision" in name or "visual" in name]
    after = {name: ends[0]["weights"][f"policy.{name}"] for name in encoder}
    moved = [name for name in encoder if not torch.equal(start[name], after[name])]
    assert len(moved) > len(encoder) / 2
