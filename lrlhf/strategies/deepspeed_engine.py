"""One trained model under DeepSpeed: its backward passes, its gradients and its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from lrlhf.models import zero
from lrlhf.run.lightning_internals import after_closure

if TYPE_CHECKING:
    from lrlhf.strategies.deepspeed import DeepSpeed


class Shard(NamedTuple):
    """Where this rank keeps its share of a parameter's 32-bit weight and optimizer states."""

    flat: Tensor
    """All shares of a group of parameters in a row; the optimizer's state goes by it."""
    offset: int
    """Where the share begins in it."""
    start: int
    """Where the share begins in the flattened parameter."""
    length: int
    """Entries of the share; 0: other ranks have it all."""

    def of(self, flat: Tensor) -> Tensor:
        """Return the share within a tensor that is laid out like ``flat``."""
        return flat.detach().narrow(0, self.offset, self.length)

    def cut(self, full: Tensor) -> Tensor:
        """Cut the share out of a tensor of the parameter's shape."""
        return full.reshape(-1)[self.start : self.start + self.length]


class TrainedEngine:
    """A DeepSpeed engine whose model is called directly, and whose steps are taken in two parts.

    Between the parts, once the gradients of all micro-batches and ranks are averaged, they can be
    measured, scaled and dropped: it is the `Gradients` of its optimizer's next step.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, config: dict[str, Any], device: torch.device
    ) -> None:
        self.model = model
        self.base = optimizer
        self.device = device
        self.groups: list[list[nn.Parameter]] = [
            [weight for weight in group["params"] if weight.requires_grad]
            for group in optimizer.param_groups
        ]
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        sources = [weight.detach() for weight in weights]
        self.engine, self.zero, *_ = zero.load_deepspeed().initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=weights,
            config=config,
            dist_init_required=False,
        )
        self.stage = int(config["zero_optimization"]["stage"])
        self.offloads = "offload_optimizer" in config["zero_optimization"]
        self._dropped = False
        self.group_of = {
            id(weight): index for index, group in enumerate(self.groups) for weight in group
        }
        """Index of a trained weight's group of parameters, by the id of the weight."""
        if self.stage == 3:
            zero.remember(model, self.zero.parameter_offload)
        if "bf16" in config:
            self._restore_precision(weights, sources)

    @torch.no_grad()
    def _restore_precision(self, weights: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start the optimizer from the weights as they were loaded.

        DeepSpeed rounds a model to 16 bits first, and makes the copy in 32 bits of that.
        """
        for weight, source in zip(weights, sources, strict=True):
            shard = self.place(weight)
            shard.of(shard.flat).copy_(shard.cut(source))

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> None:
        """Get ready for a backward pass that may reach the model.

        It is what DeepSpeed does in the forward pass of its own wrapper, which nobody calls here.
        Without it ZeRO-3 would let each micro-batch overwrite the gradients of the last.
        """
        zero.begin_backward(self.engine)

    def end_backward(self) -> None:
        """Leave a backward pass; one that reached the model has left by itself."""
        zero.end_backward(self.zero)

    # ------------------------------------------------------------------ gradients

    def reduce(self) -> None:
        """Finish the averaging of the gradients, before they are looked at."""
        if self.stage == 3:
            return  # done by every backward pass
        if self.stage == 2:
            self.zero.finalize_gradient_accumulation_boundary()
            return
        zero.average_gradients(self.engine)

    def norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in self._gradients()]
        total = torch.stack([norm.to(self.device) for norm in norms]).square().sum()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        for part in self._gradients():
            part.mul_(factor.to(part.device) if isinstance(factor, Tensor) else factor)

    def drop(self) -> None:
        self._dropped = True

    def _gradients(self) -> list[Tensor]:
        """This rank's share of the averaged gradients; what is padding is 0."""
        if self.stage == 3:
            return [self.zero.grad_partitions_flat_buffer]
        if self.offloads:
            return [flat.grad for flat in self.zero.single_partition_of_fp32_groups]
        return [part for group in self.zero.averaged_gradients.values() for part in group]

    # ------------------------------------------------------------------ step

    def step(self) -> None:
        """Move the weights, unless the gradients were dropped, and forget the gradients."""
        if not self._dropped:
            if self.stage == 3:
                self.zero.finalize_gradient_accumulation_boundary()
            zero.take_step(self.engine)
        self._forget_gradients()
        self._dropped = False

    def _forget_gradients(self) -> None:
        self.zero.zero_grad(set_to_none=True)
        self.zero.set_gradient_accumulation_boundary(False)
        if self.stage == 3:
            self.zero.averaged_gradients = {}
            # what no micro-batch of the next step reaches must not have the gradient of this one
            self.zero.grad_partitions_flat_buffer.zero_()
        else:
            for index in range(len(self.groups)):
                self.zero.averaged_gradients[index] = None
                self.zero.all_grad_tensors[index] = None
            self.zero.micro_step_id = -1
        zero.forget_offloaded(self.zero, self.stage)
        if self.offloads:
            self.zero.reset_cpu_buffers()
            for flat in self._flats():
                flat.grad.zero_()

    # ------------------------------------------------------------------ layout

    def _flats(self) -> list[Any]:
        if self.stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return list(self.zero.single_partition_of_fp32_groups)

    def place(self, weight: Any) -> Shard:
        """Find this rank's share of a trained weight."""
        if self.stage == 3:  # which cuts every parameter into shards of one length
            index, offset, length = self.zero.grad_position[self.zero.get_param_id(weight)]
            start = zero.start_of_partition(weight)
            length = max(0, min(length, weight.ds_numel - start))
            return Shard(self.zero.fp32_partitioned_groups_flat[index], offset, start, length)
        # the others put a group's parameters in a row and cut that
        flat = self.zero.single_partition_of_fp32_groups[self.group_of[id(weight)]]
        share = zero.fragment_of(weight)
        if share is None:
            return Shard(flat, 0, 0, 0)
        here, there = share.hp_fragment_address, share.lp_fragment_address
        return Shard(flat, here.start, there.start, here.numel)


def split_frozen(model: nn.Module, config: dict[str, Any]) -> Any:
    """Shard the weights of a model that gets no gradient over the ranks; returns its engine."""
    engine, *_ = zero.load_deepspeed().initialize(
        model=model, config=config, dist_init_required=False
    )
    zero.remember(model, engine.optimizer)
    return engine


def close_engine(engine: Any) -> None:
    """Remove an engine's hooks from its model and free its buffers."""
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.destroy()
    # models of ZeRO-3 stay at the bottom of this stack of running modules
    running = zero.load_deepspeed().runtime.zero.parameter_offload.FWD_MODULE_STACK
    if engine.module in running:
        running.remove(engine.module)


def check_ownership(
    module: L.LightningModule, models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Raise `ValueError` unless every optimizer moves the weights of its own model only."""
    if len(models) != len(optimizers):
        raise ValueError(
            f"{type(module).__name__} has {len(models)} trained models ({', '.join(models)}) and "
            f"{len(optimizers)} optimizers; DeepSpeed needs one for each, in the same order"
        )
    names = {id(weight): name for name, weight in module.named_parameters()}
    owners: dict[int, str] = {}
    for (role, model), optimizer in zip(models.items(), optimizers, strict=True):
        own = {id(weight) for weight in model.parameters()}
        for weight in own:
            if owners.setdefault(weight, role) != role:
                raise ValueError(
                    f"{names.get(weight)} belongs to {owners[weight]} and to {role}: DeepSpeed "
                    "can train it as part of one model only"
                )
        moved = [weight for group in optimizer.param_groups for weight in group["params"]]
        for weight in moved:
            if id(weight) not in own:
                raise ValueError(
                    f"the optimizer of {role} moves {names.get(id(weight))}, which is no weight of "
                    "that model: the i-th optimizer belongs to the i-th of trainable_models()"
                )


class EnginePrecision(DeepSpeedPrecision):
    """Backward and step through the strategy's engines; nothing else is converted here.

    Lightning's own turns every number of a batch into bfloat16, scores and margins too.
    """

    def __init__(self, precision: Any, strategy: DeepSpeed) -> None:
        if precision in ("16-mixed", "16-true"):
            raise ValueError(
                f"trainer.precision is {precision}: DeepSpeed's loss scale and steps that are left "
                "out because of a gradient that is not finite do not go together; use bf16-mixed"
            )
        super().__init__(precision)
        self._strategy = strategy

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module  # the engines do it, and keep a copy in 32 bits

    def convert_input(self, data: Any) -> Any:
        return data

    def tensor_init_context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: L.LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        del model, optimizer, args, kwargs
        self._strategy.run_backward(tensor)

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Any,
        model: L.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        del kwargs
        engine = self._strategy.engine_of(optimizer)
        result = closure()
        if model.automatic_optimization and result is None:
            raise ValueError(
                "training_step returned None; DeepSpeed needs a loss from every process"
            )
        engine.reduce()
        after_closure(self, model, optimizer)
        engine.step()
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if not clip_val:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(
                "trainer.gradient_clip_algorithm is value, which DeepSpeed does not support; "
                "use norm"
            )
        gradients = self._strategy.engine_of(optimizer)
        norm = gradients.norm()
        gradients.scale(torch.clamp(clip_val / (norm + 1e-6), max=1.0))
