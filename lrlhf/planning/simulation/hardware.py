"""What GPUs are built for, and which share of it programs are assumed to get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GPUS_PER_NODE = 8


class GPU(NamedTuple):
    """Figures of one GPU as its vendor gives them.

    Attributes:
        flops: Dense bfloat16 FLOP/s, without sparsity.
        memory: Bytes.
        memory_bandwidth: Bytes/s.
        node_bandwidth: Bytes/s to other GPUs of the node, in one direction.
        network_bandwidth: Bytes/s to other nodes, in one direction, with one network card per GPU.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float


GPUS = {
    "a100": GPU(312e12, 80e9, 2.039e12, 300e9, 25e9),
    "h100": GPU(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": GPU(989e12, 141e9, 4.8e12, 450e9, 50e9),
    "b200": GPU(2250e12, 180e9, 7.7e12, 900e9, 50e9),
    "l40s": GPU(362e12, 48e9, 0.864e12, 32e9, 25e9),
}
"""A100 80GB SXM, H100 SXM, H200 SXM, B200 SXM with 180 GB, L40S. FLOP/s are the dense ones, half of
those with sparsity; NVLink (L40S: PCIe 4 x16) is half of what is given for both directions.
Between nodes: ConnectX-7 of 400 Gbit/s as in DGX H100, ConnectX-6 of 200 Gbit/s as in DGX A100.

Reference:
    NVIDIA's figures as listed by https://glennklockwood.com/garden/processors/A100, …/h100 and
    …/B200, https://acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100 (H200; memory of B200) and
    https://www.mullet.se/product.html?product_id=355414 (L40S); B200's memory bandwidth as the
    driver reports it: https://github.com/pytorch/ao/pull/4002
"""

DECODE_BANDWIDTH = 0.8
PREFILL_UTILIZATION = 0.5
TRAINING_UTILIZATION = 0.4
LINK_UTILIZATION = 0.7
"""Shares of the data sheet's figures that are assumed to be reached."""

STEP_S, LAYER_S, SEQUENCE_S = 1e-3, 1e-5, 5e-6
"""Assumed seconds of a decoding step beside the model's arithmetic: of the scheduler, of two
all-reduces in each layer of a model that is split, and of the sampler for each sequence."""

_OPTIMIZER_BYTES = 28
"""AdamW reads and writes weight, gradient and two moments of 4 bytes; it writes no gradient."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the hardware achieves, from a data sheet or fitted to measured runs.

    Args:
        decode_flops: FLOP/s of a replica in a decoding step.
        prefill_flops: FLOP/s of a replica over prompts.
        read_bytes: Bytes/s at which a replica reads weights, keys and values.
        step_s: Seconds of a decoding step that depend neither on the model nor on the batch.
        layer_s: Seconds of a decoding step for each layer.
        sequence_s: Seconds of a decoding step for each sequence.
        forward_flops: FLOP/s of a trainer in passes without gradients.
        update_flops: FLOP/s of a trainer in updates.
        pass_layer_s: Seconds of each pass without gradients and of each optimizer step, for each
            layer of the model, whatever the size of the batch.
        optimizer_s: Seconds of an optimizer step for each weight.
    """

    decode_flops: float
    prefill_flops: float
    read_bytes: float
    step_s: float
    layer_s: float
    sequence_s: float
    forward_flops: float
    update_flops: float
    pass_layer_s: float = 0.0
    optimizer_s: float = 0.0


def rates_of(gpu: GPU, *, tensor_parallel: int) -> Rates:
    """Return the rates of replicas of so many GPUs, and of trainers of one each."""
    together = gpu.flops * tensor_parallel
    return Rates(
        decode_flops=PREFILL_UTILIZATION * together,
        prefill_flops=PREFILL_UTILIZATION * together,
        read_bytes=DECODE_BANDWIDTH * gpu.memory_bandwidth * tensor_parallel,
        step_s=STEP_S,
        layer_s=LAYER_S if tensor_parallel > 1 else 0.0,
        sequence_s=SEQUENCE_S,
        forward_flops=TRAINING_UTILIZATION * gpu.flops,
        update_flops=TRAINING_UTILIZATION * gpu.flops,
        optimizer_s=_OPTIMIZER_BYTES / (DECODE_BANDWIDTH * gpu.memory_bandwidth),
    )
