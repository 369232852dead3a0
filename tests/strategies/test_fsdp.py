"""FSDP2 on one process and on two, in bfloat16, with images, and with either kind of checkpoint."""

from __future__ import annotations

import json
import shutil
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
from transformers import MixtralConfig, MixtralForCausalLM

from lrlhf.callbacks import EMA, RLCheckpoint
from lrlhf.datamodules import PromptDataModule
from lrlhf.models import CausalLM, LoRA, ValueModel
from lrlhf.models.loading.deferred_weights import is_deferred, reading
from lrlhf.models.sharding import full_tensor, reshard
from lrlhf.modules import PPO, RLOO, Critic, Reference, RewardModel, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutListener, Sampling
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint
from lrlhf.strategies import FSDP2
from tests.conftest import build_tokenizer
from tests.distributed import strategy_runs
from tests.distributed.strategy_runs import MODULES, adamw, data_of
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
    """Leaves a file per rank: whole weights, and the precisions that were computed with."""

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
        for role, model in models_of(pl_module).items():
            reshard(model)
            for name, value in model.state_dict(keep_vars=True).items():
                weights[f"{role}.{name}"] = full_tensor(value).detach().clone()
        state = {"weights": weights, "seen": self.seen}
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
    """Checks that the passes without gradients left the weights split."""

    trainer: L.Trainer

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trainer = trainer

    def on_phase(self, phase: str) -> None:
        if phase != "update":
            return
        module: Any = self.trainer.lightning_module
        for model in (module.policy, module.reference.model):
            assert all(isinstance(weight, DTensor) for weight in model.parameters())
        for block in module.policy.model.layers:
            (group,) = block._get_fsdp_state()._fsdp_param_groups
            assert group.post_forward_mesh_info is not None


def test_after_drawing_and_looking_weights_are_split_as_before(
    model_folder: str, tmp_path: Path
) -> None:
    module = MODULES["rloo"](Path(model_folder))
    assert len(fit(module, tmp_path, strategy=forked(), callbacks=[LooksBeforeTheUpdate()])) == 2


def test_an_evaluation_alone_asks_a_teacher_that_is_split(
    model_folder: str, tmp_path: Path
) -> None:
    found = []
    for strategy, ranks in (("auto", 1), (forked(), 2)):
        with reading(later=True):
            module = MODULES["rloo with a teacher"](Path(model_folder))
        assert isinstance(module, RLOO)
        assert module.teacher is not None
        assert module.teacher.model is not None
        assert is_deferred(module.teacher.model.model)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
        )
        rows = [{"prompt": f"say {letter}"} for letter in "abcdefgh"]
        data = PromptDataModule(rows, val=rows, batch_size=4, val_batch_size=4)
        (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
        found.append(metrics["eval/teacher_reverse_kl"])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0] > 0.1


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            other[name], value, **{"rtol": 1e-3, "atol": 2e-5, **tolerance}, msg=name
        )


def test_bfloat16_gathers_in_bfloat16_and_keeps_heads_and_weights_in_float32(
    model_folder: str, tmp_path: Path
) -> None:
    module = MODULES["ppo with its own critic"](Path(model_folder))
    ends = fit(module, tmp_path, strategy=forked(), precision="bf16-mixed")
    for end in ends:
        assert {value.dtype for value in end["weights"].values()} == {torch.float32}
        assert all(bool(value.isfinite().all()) for value in end["weights"].values())
        kinds = {"head": set(), "lm_head": set(), "mlp": set()}
        for part, seen in end["seen"].items():
            kind = "lm_head" if part.endswith("lm_head") else "head" if "head" in part else "mlp"
            if kind in part:
                kinds[kind] |= seen
        bf16 = {"torch.bfloat16"}
        assert kinds == {"head": {"torch.float32"}, "lm_head": bf16, "mlp": bf16}
    assert_close(*(end["weights"] for end in ends), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False, "cpu_offload": True},
        OFTEN({"cpu_offload": True}),
        OFTEN({"shard_group": 1}),
    ],
)
def test_options_change_what_it_costs_and_not_what_comes_out(
    options: dict[str, Any], model_folder: str, tmp_path: Path
) -> None:
    build = MODULES["rloo"]
    (one,) = fit(build(Path(model_folder)), tmp_path / "one", ranks=1, steps=2)
    strategy = forked(**options)
    for end in fit(build(Path(model_folder)), tmp_path / "two", strategy=strategy, steps=2):
        assert_close(one["weights"], end["weights"])


# ---------------------------------------------------------------------- checkpoints


def saving(folder: Path) -> list[L.Callback]:
    return [EMA(decay=0.5), RLCheckpoint(folder / "ck", every_n_train_steps=1, save_top_k=-1)]


def at_a_constant_rate(folder: str) -> L.LightningModule:
    """One that does not mind after how many steps it is stopped."""
    module = MODULES["rloo"](Path(folder))
    assert isinstance(module, RLOO)
    module.optimizer_config = replace(adamw(5e-3), schedule="constant")
    return module


@pytest.mark.parametrize("kinds", [("full", "sharded"), OFTEN(("sharded", "full"))])
def test_either_kind_of_checkpoint_is_saved_over_the_other_and_resumed_from(
    kinds: tuple[Any, Any], model_folder: str, tmp_path: Path
) -> None:
    last = tmp_path / "ck" / "last.ckpt"
    (straight,) = fit(at_a_constant_rate(model_folder), tmp_path / "straight", ranks=1, steps=4)
    for steps, kind in zip((2, 3), kinds, strict=True):
        fit(
            at_a_constant_rate(model_folder),
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
        at_a_constant_rate(model_folder),
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
    ends = fit(build(), tmp_path / "two", strategy=forked(), data=data(2))
    assert_close(ends[0]["weights"], ends[1]["weights"], rtol=0, atol=0)
    assert_close(one["weights"], ends[0]["weights"], atol=5e-5)
    encoder = [name for name in start if "vision" in name or "visual" in name]
    after = {name: ends[0]["weights"][f"policy.{name}"] for name in encoder}
    moved = [name for name in encoder if not torch.equal(start[name], after[name])]
    assert len(moved) > len(encoder) / 2


# ---------------------------------------------------------------------- weights read in parts


def experts_in(folder: Path) -> Path:
    """A mixture of three experts, which two ranks hold two and one of, beside its tokenizer."""
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = MixtralConfig(vocab_size=len(tokenizer), **sizes, **heads, **experts, **ids)
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_split_experts_replay_their_routing(tmp_path: Path) -> None:
    folder = experts_in(tmp_path / "experts")
    update = Update(replay_routing=True, num_iterations=2, micro_batch_tokens=40)

    def build() -> L.LightningModule:
        L.seed_everything(3, verbose=False)
        spec = CausalLM(source=str(folder), gradient_checkpointing=True)
        module: L.LightningModule = strategy_runs.policy(RLOO, spec, update=update)
        return module

    (one,) = fit(build(), tmp_path / "one", ranks=1)
    ends = fit(build(), tmp_path / "two", strategy=forked())
    assert_close(ends[0]["weights"], ends[1]["weights"], rtol=0, atol=0)
    assert_close(one["weights"], ends[0]["weights"])


def of_folder(folder: Path, **options: Any) -> L.LightningModule:
    policy: L.LightningModule = strategy_runs.from_folder(folder, 5e-3, **options)
    return policy


def with_a_critic(folder: Path) -> L.LightningModule:
    model = ValueModel(source=str(folder))
    critic = Critic(model=model, optimizer=adamw(2e-2))
    module: L.LightningModule = strategy_runs.policy(
        PPO,
        CausalLM(source=str(folder)),
        critic=critic,
        reference=Reference(kl_coef=0.05, offload=True),
    )
    return module


# the process that started the others takes nothing over into a model without weights
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (MODULES["reward"], {}),
        OFTEN(of_folder, {}),
        OFTEN(of_folder, {"shard_group": 1}),
        OFTEN(of_folder, {"cpu_offload": True}),
        OFTEN(partial(of_folder, lora=LoRA(r=2)), {}),
        (with_a_critic, {}),
        (lambda folder: of_folder(experts_in(folder / "experts")), {}),
    ],
)
def test_weights_that_each_rank_reads_its_part_of_train_as_those_loaded_whole(
    build: Callable[[Path], L.LightningModule],
    options: dict[str, Any],
    model_folder: str,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    ends = []
    for later in (False, True):
        L.seed_everything(3, verbose=False)
        with reading(later=later):
            module = build(folder)
        assert all(is_deferred(model) == later for model in models_of(module).values())
        ends.append(fit(module, tmp_path / str(later), strategy=forked(**options), steps=2))
    for whole_end, end in zip(*ends, strict=True):
        assert_close(whole_end["weights"], end["weights"], rtol=0, atol=0)
