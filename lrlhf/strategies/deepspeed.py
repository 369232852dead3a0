"""DeepSpeed with one engine per trained model."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators.cpu import CPUAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lrlhf.models import zero
from lrlhf.models.sharding import CheckpointMismatchError, load_state
from lrlhf.run.checkpoints.sharded_checkpoint import FolderCheckpoints, stored_names
from lrlhf.run.collectives import (
    leave_inference_mode,
    refuse_compiled,
    refuse_quantised,
    trained_models,
)
from lrlhf.run.gradient_updates import Gradients
from lrlhf.run.lightning_internals import (
    build_optimizers,
    join_deepspeed,
    start_processes_by,
    trainer_of,
)
from lrlhf.strategies.deepspeed_engine import (
    EnginePrecision,
    Shard,
    TrainedEngine,
    check_ownership,
    close_engine,
    split_frozen,
)


class Assembly:
    """Puts tensors together, each on the rank that has the least so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        several = torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if several else 0
        self._load = [0] * (torch.distributed.get_world_size() if several else 1)

    @torch.no_grad()
    def put_together(self, share: Tensor, start: int, shape: torch.Size) -> Tensor:
        """Return a tensor of ``shape`` of which this rank has the entries from ``start`` on."""
        owner = self._next_owner(shape.numel() * share.element_size())
        full = torch.zeros(shape.numel(), dtype=share.dtype, device=self._device)
        full[start : start + share.numel()] = share
        if len(self._load) > 1:
            # bytes that one rank has and the others have as 0 add up without rounding
            torch.distributed.reduce(full.view(torch.uint8), dst=owner)
        return self._kept(full.view(shape), owner)

    def keep(self, full: Tensor) -> Tensor:
        """Keep a tensor that every rank has on one of them."""
        return self._kept(full, self._next_owner(full.numel() * full.element_size()))

    def _next_owner(self, size: int) -> int:
        owner = self._load.index(min(self._load))
        self._load[owner] += size
        return owner

    def _kept(self, full: Tensor, owner: int) -> Tensor:
        if owner != self._rank:
            return torch.empty(full.shape, dtype=full.dtype, device="meta")
        return full.detach().to("cpu", copy=True)


def module_state(
    module: L.LightningModule, engines: Sequence[TrainedEngine], device: torch.device
) -> dict[str, Any]:
    """Return the weights and buffers of a module; all ranks must call it."""
    assembly = Assembly(device)
    known: dict[int, Tensor] = {}  # a tied weight has several names
    state: dict[str, Any] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            if id(tensor) not in known:
                known[id(tensor)] = _gathered_tensor(tensor, engines, assembly)
            state[name] = known[id(tensor)]
        else:
            state[name] = tensor
    return state


def _gathered_tensor(tensor: Any, engines: Sequence[TrainedEngine], assembly: Assembly) -> Tensor:
    shape = zero.shape_of(tensor)
    engine = _engine_of(tensor, engines)
    if engine is not None:
        shard = engine.place(tensor)
        return assembly.put_together(shard.of(shard.flat), shard.start, shape)
    if zero.is_partitioned(tensor):
        start = zero.start_of_partition(tensor)
        own = tensor.ds_tensor[: max(0, tensor.ds_numel - start)]
        return assembly.put_together(own, start, shape)
    return assembly.keep(tensor)


@torch.no_grad()
def load_module_state(
    module: L.LightningModule,
    engines: Sequence[TrainedEngine],
    stored: Mapping[str, Tensor],
    *,
    strict: bool,
) -> None:
    """Copy stored weights, whole by name, into a module, each rank its own share.

    Raises:
        CheckpointMismatchError: Shapes differ, or with ``strict`` names.
    """
    load_state(module, stored, strict=strict, write=partial(_write, engines=engines))


def _write(target: Tensor, value: Tensor, *, engines: Sequence[TrainedEngine]) -> None:
    engine = _engine_of(target, engines)
    if engine is not None:
        shard = engine.place(target)
        shard.of(shard.flat).copy_(shard.cut(value))
    if zero.is_partitioned(target):
        zero.local_partition(target).copy_(zero.partition_of(target, value))
    else:
        target.detach().copy_(value)


def optimizer_state(
    engine: TrainedEngine, names: Mapping[int, str], device: torch.device
) -> dict[str, Any]:
    """Return the state of an engine's optimizer; all ranks must call it.

    ``names`` are by the id of the parameter; tensors are put together on ``device``.

    Raises:
        ValueError: The optimizer keeps something that is neither per entry nor a number.
    """
    assembly = Assembly(device)
    state: dict[str, dict[str, Any]] = {}
    for weight in chain.from_iterable(engine.groups):
        shard = engine.place(weight)
        values = engine.base.state.get(shard.flat, {})
        if values:
            shape = zero.shape_of(weight)
            state[names[id(weight)]] = {
                key: _state_value(key, value, shard, shape, assembly)
                for key, value in values.items()
            }
    groups = [
        {**options, "params": [names[id(weight)] for weight in weights]}
        for options, weights in zip(engine.base.param_groups, engine.groups, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _state_value(key: str, value: Any, shard: Shard, shape: torch.Size, assembly: Assembly) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == shard.flat.shape:
        return assembly.put_together(shard.of(value), shard.start, shape)
    if value.ndim == 0:
        return value.detach().cpu().clone()
    raise ValueError(
        f"the optimizer keeps {key!r} of shape {tuple(value.shape)}, which DeepSpeed cannot split "
        "over ranks; take one with one value per weight, such as AdamW"
    )


@torch.no_grad()
def load_optimizer_state(
    engine: TrainedEngine, names: Mapping[int, str], stored: Mapping[str, Any]
) -> None:
    """Restore what `optimizer_state` returned, or what another strategy saved, tensors whole.

    Raises:
        CheckpointMismatchError: It is the state of other parameters.
    """
    weights = list(chain.from_iterable(engine.groups))
    keys = stored_names(stored, engine.base, [names[id(weight)] for weight in weights])
    for group, old in zip(engine.base.param_groups, stored["param_groups"], strict=True):
        group.update({key: value for key, value in old.items() if key != "params"})
    numbers: dict[Tensor, dict[str, list[Any]]] = {}
    for weight in weights:
        entries = stored["state"].get(keys[names[id(weight)]], {})
        shard = engine.place(weight)
        for key in entries:
            number = _restore(engine, shard, zero.shape_of(weight), key, entries[key])
            if number is not None:
                numbers.setdefault(shard.flat, {}).setdefault(key, []).append(number)
    for flat, lists in numbers.items():
        number = next(
            engine.group_of[id(each)] for each in weights if engine.place(each).flat is flat
        )
        group = engine.base.param_groups[number]
        for key, several in lists.items():
            engine.base.state[flat][key] = _common(key, several, flat, group)


def _restore(engine: TrainedEngine, shard: Shard, shape: torch.Size, key: str, value: Any) -> Any:
    """Write a value per entry into its place; returns any other value."""
    if not isinstance(value, Tensor) or key == "step" or value.shape != shape:
        return value
    state = engine.base.state[shard.flat]
    if key not in state:
        state[key] = torch.zeros_like(shard.flat, requires_grad=False)
    shard.of(state[key]).copy_(shard.cut(value))
    return None


def _common(key: str, values: list[Any], flat: Tensor, group: Mapping[str, Any]) -> Any:
    """Return the one number that a row of parameters shares, such as the steps taken."""
    numbers = [float(value) for value in values]
    if min(numbers) != max(numbers):
        rank_zero_warn(
            f"the checkpoint's optimizer has {key!r} from {min(numbers):g} to {max(numbers):g}, "
            "which DeepSpeed keeps once for all parameters of a group: the largest is taken"
        )
    value = values[numbers.index(max(numbers))]
    if not isinstance(value, Tensor):
        return value
    on_device = group.get("fused") or group.get("capturable")
    return value.detach().to(flat.device if on_device else "cpu", copy=True)


def _engine_of(tensor: Tensor, engines: Sequence[TrainedEngine]) -> TrainedEngine | None:
    return next((engine for engine in engines if id(tensor) in engine.group_of), None)


_ELSEWHERE = {
    "bf16": "set trainer.precision: bf16-mixed",
    "bfloat16": "set trainer.precision: bf16-mixed",
    "data_types": "set trainer.precision",
    "fp16": "fp16 is not supported, take trainer.precision: bf16-mixed",
    "gradient_accumulation_steps": "set trainer.accumulate_grad_batches of a reward model, or "
    "update.micro_batch_tokens of a policy",
    "gradient_clipping": "set trainer.gradient_clip_val of a reward model, or "
    "update.max_grad_norm and critic.max_grad_norm of a policy",
    "managed_gradient_accumulation": "the modules decide when a step is due",
    "optimizer": "set the module's optimizer",
    "scheduler": "set the schedule of the module's optimizer",
    "train_batch_size": "set the data's batch_size",
    "train_micro_batch_size_per_gpu": "set the data's batch_size",
    "zero_optimization.offload_optimizer": "set strategy.offload_optimizer",
    "zero_optimization.offload_param": "set strategy.offload_parameters",
    "zero_optimization.stage": "set strategy.stage",
}


def engine_config(
    *, stage: int, offload_optimizer: bool, offload_parameters: bool, bf16: bool, on_gpu: bool
) -> dict[str, Any]:
    """Return the options of an engine that trains a model; see `DeepSpeed` for their meaning."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": on_gpu and stage > 1}
    memory = {"device": "cpu", "pin_memory": on_gpu}
    if offload_optimizer:
        zero["offload_optimizer"] = dict(memory)
    if offload_parameters:
        zero["offload_param"] = dict(memory)
    config: dict[str, Any] = {
        # we clip, and we say when a step is due
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "train_micro_batch_size_per_gpu": 1,  # for its own throughput figures only
        # optimizers are those of PyTorch, in main memory too
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if bf16:
        config["bf16"] = {"enabled": True}
        config["communication_data_type"] = "fp32"
        if stage > 1:  # ZeRO-1 would need another optimizer for it
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def frozen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the options of an engine that only splits weights from those of one that trains."""
    changed = copy.deepcopy(dict(config))
    for name in ("data_types", "communication_data_type", "managed_gradient_accumulation"):
        changed.pop(name, None)
    changed["zero_optimization"].pop("offload_optimizer", None)
    return changed


def merged(config: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the options of ``further`` put over it, group by group."""
    result = dict(config)
    for key, value in further.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def check_further_options(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an option that is set somewhere else; it says where."""
    zero = options.get("zero_optimization", {})
    names = [*options, *(f"zero_optimization.{name}" for name in zero)]
    for name in names:
        if name in _ELSEWHERE:
            raise ValueError(f"strategy.config sets {name}; instead, {_ELSEWHERE[name]}")


class DeepSpeed(FolderCheckpoints, DeepSpeedStrategy):
    """Shards optimizer states, gradients and weights over the ranks with DeepSpeed's ZeRO.

    Every model that ``trainable_models()`` of the module names has an engine of its own: actor and
    critic keep an optimizer, learning rate, schedule and clip each. Models are loaded whole, one
    copy per process, and sharded then. It runs on CPUs as well. In YAML: ``trainer.strategy:
    deepspeed_zero1``, ``deepspeed_zero2`` or ``deepspeed_zero3``, or this class with its options.

    With ``trainer.precision: bf16-mixed`` weights and activations are bfloat16 altogether, while
    the optimizer moves a copy in float32. Gradients are averaged, and with stages 2 and 3 added up,
    in float32; stage 1 adds up those of a step's micro-batches in bfloat16.

    Args:
        stage: What is sharded: 1 the optimizer's states, 2 gradients too, 3 weights too.
        offload_optimizer: Keep the optimizer's copy of the weights and its states in main memory,
            and take the steps there.
        offload_parameters: Keep the sharded weights in main memory too; only with stage 3.
        config: Further options of DeepSpeed, as in its JSON file.
        checkpoint: ``sharded``: a folder that all ranks write to at once; ``full``: one file,
            which rank zero puts together. Either can be resumed on any number of processes and
            under any strategy.
        timeout: Seconds that a rank waits for the others.
        process_group_backend: ``nccl``, ``gloo``, …; None: what the device wants.
        start_method: ``popen``, or ``fork`` in notebooks, as in ``DDPStrategy``.
        options: What Lightning passes to a strategy.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError: Options do not fit together.

    Reference:
        Rajbhandari et al. 2020, section 5, https://arxiv.org/abs/1910.02054
    """

    strategy_name = "deepspeed_zero"

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: dict[str, Any] | None = None,
        checkpoint: Literal["sharded", "full"] = "sharded",
        timeout: float = 1800.0,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        zero.load_deepspeed()
        if stage not in (1, 2, 3):
            raise ValueError(f"strategy.stage is {stage}; it must be 1, 2 or 3")
        if offload_parameters and stage != 3:
            raise ValueError(
                f"strategy.offload_parameters needs weights that are split, but strategy.stage is "
                f"{stage}: set it to 3"
            )
        check_further_options(config or {})
        super().__init__(
            stage=stage,
            timeout=timedelta(seconds=timeout),
            process_group_backend=process_group_backend,
            **options,
        )
        start_processes_by(self, start_method)
        self.stage = stage
        self.offload_optimizer = offload_optimizer
        self.offload_parameters = offload_parameters
        self.further_options = config or {}
        self.checkpoint = checkpoint
        self._engines: list[TrainedEngine] = []
        self._frozen: list[Any] = []

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Join the other processes; Lightning's own refuses CPUs here."""
        self.precision_plugin = EnginePrecision(self.precision_plugin.precision, self)
        if isinstance(self.accelerator, CPUAccelerator):
            _prepare_cpu()
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        if self._on_gpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        join_deepspeed(self)

    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        leave_inference_mode(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._start_engines()
        else:
            self._place_models()
        self.setup_precision_plugin()
        self.barrier()

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build models whole: under DeepSpeed's own context transformers cannot."""
        yield

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build models as they are without a strategy."""
        del empty_init
        yield

    def _start_engines(self) -> None:
        module = self.lightning_module
        assert module is not None
        models = trained_models(module)
        optimizers, self.lr_scheduler_configs = build_optimizers(module)
        check_ownership(module, models, optimizers)
        for model in models.values() if self.stage == 3 else ():
            _refuse(model)
        self._engines = [
            TrainedEngine(model, optimizer, self.engine_config, self.root_device)
            for model, optimizer in zip(models.values(), optimizers, strict=True)
        ]
        self.optimizers = [engine.zero for engine in self._engines]
        _move_rest(module, set(models.values()), self.root_device)

    def _place_models(self) -> None:
        """Evaluate without engines."""
        self.model_to_device()
        for model in trained_models(self.lightning_module).values():
            self._place_for_forward(model)

    def _place_for_forward(self, model: nn.Module) -> None:
        """Put a model without engine onto the device, in the precision that engines have."""
        model.to(self.root_device)
        for weight in model.parameters() if self._bf16 else ():
            if weight.is_floating_point():
                weight.data = weight.data.bfloat16()

    @property
    def engine_config(self) -> dict[str, Any]:
        """Options of DeepSpeed for an engine that trains."""
        own = engine_config(
            stage=self.stage,
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            bf16=self._bf16,
            on_gpu=self._on_gpu,
        )
        return merged(own, self.further_options)

    @property
    def _bf16(self) -> bool:
        return self.precision_plugin.precision in ("bf16-mixed", "bf16-true")

    def shard_frozen(self, model: nn.Module, *, full: bool = False) -> None:
        """Shard a model that gets no gradient; with stages 1 and 2, or ``full``, it stays whole.

        It is callable as the same object, in the precision that trained models compute in.
        """
        if full or self.stage != 3:
            self._place_for_forward(model)
        elif not any(engine.module is model for engine in self._frozen):
            _refuse(model)
            self._frozen.append(split_frozen(model, frozen_config(self.engine_config)))

    def teardown(self) -> None:
        """Take DeepSpeed off the models and, where all ranks got this far, make them whole."""
        module = self.lightning_module
        trainer = None if module is None else trainer_of(module)
        failed = trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED
        engines = [*(engine.engine for engine in self._engines), *self._frozen]
        for engine in engines:
            if not failed:
                zero.unshard(engine.module)
            close_engine(engine)
        self._engines, self._frozen, self.optimizers = [], [], []
        super().teardown()

    # ------------------------------------------------------------------ steps

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    def run_backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of every trained model that a loss reaches, one or several."""
        for engine in self._engines:
            engine.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        for engine in self._engines:
            engine.end_backward()

    def gradients_of(self, optimizer: Optimizer) -> Gradients:
        """Return the gradients of an optimizer's next step, within ``on_before_optimizer_step``."""
        return self.engine_of(optimizer)

    def engine_of(self, optimizer: Any) -> TrainedEngine:
        """Return the engine that an optimizer, or Lightning's wrapper of it, belongs to."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return next(engine for engine in self._engines if engine.zero is plain)

    # ------------------------------------------------------------------ checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if not self._engines:
            return module.state_dict()
        return module_state(module, self._engines, self.root_device)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        stored = checkpoint["state_dict"]
        load_module_state(self.lightning_module, self._engines, stored, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_state(self.engine_of(optimizer), self._names, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        stored = checkpoint["optimizer_states"]
        if len(stored) != len(self._engines):
            raise CheckpointMismatchError(
                f"the checkpoint has {len(stored)} optimizers and the module {len(self._engines)}; "
                "resume with the module of that run"
            )
        for engine, state in zip(self._engines, stored, strict=True):
            load_optimizer_state(engine, self._names, state)

    @property
    def _names(self) -> dict[int, str]:
        assert self.lightning_module is not None
        return {id(weight): name for name, weight in self.lightning_module.named_parameters()}


def _refuse(model: nn.Module) -> None:
    """Refuse what stage 3 cannot split."""
    refuse_quantised(model, "strategy.stage 3", "set strategy.stage: 2")
    refuse_compiled(model, "strategy.stage 3", "take strategy.stage: 2 or strategy: fsdp2")


def _prepare_cpu() -> None:
    """Keep DeepSpeed on the CPU, and from compiling its own communication for it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = zero.load_deepspeed()
    device = deepspeed.accelerator.get_accelerator().device_name()
    if device != "cpu":
        raise ValueError(
            f"trainer.accelerator is cpu, but DeepSpeed has taken {device}: set DS_ACCELERATOR=cpu "
            "in the environment"
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _move_rest(module: nn.Module, placed: set[nn.Module], device: torch.device) -> None:
    """Move what lies outside of models that are on their devices already."""
    for child in module.children():
        if child in placed:
            continue
        if placed.isdisjoint(child.modules()):
            child.to(device)
        else:
            _move_rest(child, placed, device)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in own:
        tensor.data = tensor.data.to(device)
