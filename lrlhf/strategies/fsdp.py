"""Fully sharded data parallel training, with PyTorch's second implementation of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lrlhf.models import ValueHead, media_modules
from lrlhf.models.heads import RewardHead
from lrlhf.models.loading.deferred_weights import read, reading
from lrlhf.models.sharding import load_state, reshard, unshard
from lrlhf.models.transformers_internals import block_names
from lrlhf.run.checkpoints.sharded_checkpoint import (
    FolderCheckpoints,
    load_optimizer_state,
    optimizer_state,
)
from lrlhf.run.collectives import leave_inference_mode, refuse_quantised, trained_models
from lrlhf.run.gradient_updates import device_memory, reduces_each
from lrlhf.run.lightning_internals import choose_backend, move_optimizers


class FSDP2(FolderCheckpoints, DDPStrategy):
    """Shards weights, gradients and optimizer states of every trained model over the ranks.

    Each block of a model is gathered for its forward and backward pass and freed again, as is
    what lies around the blocks. Every model that ``trainable_models()`` of the module names is
    sharded by itself, so actor and critic keep an optimizer each, and so are frozen references.
    Models that the command line builds, or ``trainer.init_module()``, are read from safetensors
    files once they are sharded, each rank its shards; others are loaded whole by every process.
    It runs on CPUs as well. In YAML: ``trainer.strategy: fsdp2``, or this class with its options.

    With ``trainer.precision: bf16-mixed`` weights are gathered and multiplied in bfloat16, while
    gradients are added up, and weights are kept, in float32.

    Args:
        reshard_after_forward: Free a block's weights after its forward pass; off, they stay until
            its backward pass, which costs memory and saves a gather.
        cpu_offload: Keep weights, gradients and optimizer states in main memory, and take the
            optimizer steps there.
        shard_group: Ranks that share one copy of a model, such as the GPUs of one node; the groups
            hold the same and add up their gradients. None: all ranks share one.
        reduce_each_micro_batch: Add the gradients of each micro-batch up over the ranks at once, so
            that a rank keeps its part of them; off, they stay whole in float32 until the last
            one, and the ranks wait for each other once a step. ``auto``: at once for models
            whose whole gradients would take more than a quarter of a GPU's memory. Between groups
            of ranks they are added up once a step in any case.
        checkpoint: ``sharded``: a folder that all ranks write to at once; ``full``: one file,
            which rank zero puts together. Either can be resumed on any number of processes and
            under any strategy.
        async_save: Copy what a checkpoint of `RLCheckpoint` holds to main memory, and write it from
            there while the run goes on. The next one waits for it, as does the end of the run.
        timeout: Seconds that a rank waits for the others.
        process_group_backend: ``nccl``, ``gloo``, …; None: what the device wants.
        start_method: ``popen``, or ``fork`` in notebooks, as in ``DDPStrategy``.
        options: What Lightning passes to a strategy.

    Reference:
        Rajbhandari et al. 2020, section 5, https://arxiv.org/abs/1910.02054 (stage 3);
        Zhao et al. 2023, https://arxiv.org/abs/2304.11277
    """

    strategy_name = "fsdp2"

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        shard_group: int | None = None,
        reduce_each_micro_batch: Literal["auto"] | bool = "auto",
        checkpoint: Literal["sharded", "full"] = "sharded",
        async_save: bool = False,
        timeout: float = 1800.0,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            timeout=timedelta(seconds=timeout),
            process_group_backend=process_group_backend,
            start_method=start_method,
            **options,
        )
        if shard_group is not None and shard_group < 1:
            raise ValueError(f"strategy.shard_group is {shard_group}; it must be 1 or more")
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.shard_group = shard_group
        self.reduce_each_micro_batch = reduce_each_micro_batch
        self._reduces_each: dict[str, bool] | None = None
        self.start_method = start_method
        self.checkpoint = checkpoint
        self.async_save = async_save
        self._mesh: DeviceMesh | None = None

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        if self.cpu_offload and self._on_gpu:
            # the norm of gradients in main memory is added up there
            choose_backend(self, "cuda:nccl,cpu:gloo")
        super().setup_environment()

    def loading_shards(self) -> AbstractContextManager[None]:
        """Build models without weights; each rank reads its parts once they are split.

        Not where a process that has a model starts those that train it, and takes it over again.
        """
        return reading(later=self.start_method == "popen")

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build models in ``trainer.init_module()`` as the command line does."""
        del empty_init
        with self.loading_shards():
            yield

    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._refuse_loss_scaler()
        self._reduces_each = None  # a trainer may fit one module after another
        leave_inference_mode(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        for model in trained_models(self.lightning_module).values():
            self.shard(model)
        read(self.model, self.root_device)  # what the module does not train
        if not self.cpu_offload:
            self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self.cpu_offload:
            move_optimizers(self.optimizers, self.root_device)

    def teardown(self) -> None:
        """Give the rest back; what is sharded stays on its devices, until the process ends."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.end_saves()
        if self.start_method != "popen" and sys.exc_info()[0] is None:
            # what the process that started this one takes over as the trained model
            unshard(self._resharded_module())
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _refuse_loss_scaler(self) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            raise ValueError(
                "trainer.precision 16-mixed scales losses, which fsdp2 does not support; use "
                "bf16-mixed"
            )

    # ------------------------------------------------------------------ sharding

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks, or the groups that hold a copy each, and the ranks in them."""
        if self._mesh is None:
            world, group = self.world_size, self.shard_group
            device = self.root_device.type
            if group is None or group == world:
                self._mesh = init_device_mesh(device, (world,))
            elif world % group:
                raise ValueError(
                    f"strategy.shard_group is {group}, which does not divide the {world} processes"
                )
            else:
                names = ("copies", "parts")
                self._mesh = init_device_mesh(device, (world // group, group), mesh_dim_names=names)
        return self._mesh

    def shard(self, model: nn.Module) -> None:
        """Shard a model over the ranks, in place; done twice it is done once."""
        if isinstance(model, FSDPModule):
            return
        refuse_quantised(model, "fsdp2", "train with ddp")
        self._share_from_rank_zero(model)
        offload = CPUOffloadPolicy(pin_memory=self._on_gpu) if self.cpu_offload else OffloadPolicy()
        options: dict[str, Any] = {"mesh": self.mesh, "offload_policy": offload}
        for head in [part for part in model.modules() if isinstance(part, RewardHead | ValueHead)]:
            # in the precision of their own weights
            fully_shard(head, reshard_after_forward=False, **options)
        options["mp_policy"] = self._mixed_precision()
        for block in blocks(model):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
        # the outermost part is needed first in the backward pass: freed, it would be gathered at
        # once again
        root: FSDPModule
        if isinstance(model, FSDPModule):  # a head by itself
            root = model
        else:
            root = fully_shard(model, reshard_after_forward=False, **options)
        root.set_reduce_scatter_unused_params(True)
        read(model, "cpu" if self.cpu_offload else self.root_device, self.root_device)

    def shard_frozen(self, model: nn.Module, *, full: bool = False) -> None:
        """Shard a model that gets no gradient, unless ``full``; autocast is for both."""
        if full:
            read(model, "cpu")
        else:
            self.shard(model)

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        if self.precision_plugin.precision != "bf16-mixed":
            return MixedPrecisionPolicy()
        # autocast decides what is computed in which precision; here only what is gathered in which
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    @torch.no_grad()
    def _share_from_rank_zero(self, model: nn.Module) -> None:
        """Make what was initialised at random, such as new heads, the same on all ranks."""
        if self.world_size == 1:
            return
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_meta:  # all ranks read it
                continue
            there = tensor.to(self.root_device)
            torch.distributed.broadcast(there, src=0)
            tensor.copy_(there)

    # ------------------------------------------------------------------ gradients

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up gradients only as far as memory asks for; the next backward pass does the rest."""
        for hold in self._holds():
            hold(False)
        try:
            yield
        finally:
            for hold in self._holds():
                hold(True)

    def _holds(self) -> list[Callable[[bool], None]]:
        """What delays, for each model, the sums that can wait for the last micro-batch."""
        models = trained_models(self.lightning_module)
        if self._reduces_each is None:  # all ranks are here in their first step
            self._reduces_each = self.broadcast(self._choose_reduction(models))
        return [
            model.set_requires_all_reduce  # type: ignore[misc]  # between groups of ranks
            if self._reduces_each[role]
            else model.set_requires_gradient_sync
            for role, model in models.items()
        ]

    def _choose_reduction(self, models: Mapping[str, nn.Module]) -> dict[str, bool]:
        size = device_memory(self.root_device)
        gradient_bytes = {
            role: sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
            for role, model in models.items()
        }
        chosen = {
            role: reduces_each(self.reduce_each_micro_batch, gradients, size)
            for role, gradients in gradient_bytes.items()
        }
        for role, at_once in chosen.items():
            when = "with each micro-batch" if at_once else "once a step"
            described = f"{gradient_bytes[role] / 2**30:.3g} GiB"
            rank_zero_info(f"fsdp2 reduces gradients of {role}, {described} if whole, {when}")
        return chosen

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # the weights themselves: tied ones are known by being the same
        return self._resharded_module().state_dict(keep_vars=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_state(self._resharded_module(), checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_state(self._resharded_module(), optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self._resharded_module()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(module, optimizer, state)

    def _resharded_module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        reshard(self.lightning_module)
        return self.lightning_module


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model that are gathered one at a time, outermost first.

    Encoders of images stay with what lies around the blocks: on a rank whose rows show nothing
    they do not run, and would not take part in the gathering.
    """
    names: set[str] = set()
    unsplit: set[nn.Module] = set()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            names |= block_names(part)
            unsplit |= {inner for seeing in media_modules(part) for inner in seeing.modules()}
    result: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in model.modules():
        if part in inside or part in unsplit or type(part).__name__ not in names:
            continue
        result.append(part)
        inside |= set(part.modules())
    return result
