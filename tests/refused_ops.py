"""Operations that torch refuses on CUDA where algorithms are to be deterministic.

The list is that of `torch.use_deterministic_algorithms`. On CPUs none is refused; here all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = lambda *_: True  # noqa: E731 - one of many entries of a table

REFUSED: dict[str, Callable[..., bool]] = {
    "cumsum": lambda values, *_: values.dtype.is_floating_point,
    "cumsum_": lambda values, *_: values.dtype.is_floating_point,
    "histc": _ALWAYS,
    "bincount": lambda _, weights=None, *__: weights is not None,
    "put_": _ALWAYS,
    "put": _ALWAYS,
    "scatter_reduce": lambda _1, _2, _3, _4, reduce, *__: reduce == "prod",
    "nll_loss_forward": _ALWAYS,
    "nll_loss2d_forward": _ALWAYS,
    "kthvalue": _ALWAYS,
    "avg_pool3d_backward": _ALWAYS,
    "_adaptive_avg_pool2d_backward": _ALWAYS,
    "_adaptive_avg_pool3d_backward": _ALWAYS,
    "adaptive_max_pool2d_backward": _ALWAYS,
    "max_unpool2d": _ALWAYS,
    "max_unpool3d": _ALWAYS,
    "upsample_linear1d_backward": _ALWAYS,
    "upsample_bilinear2d_backward": _ALWAYS,
    "upsample_bicubic2d_backward": _ALWAYS,
    "upsample_trilinear3d_backward": _ALWAYS,
    "reflection_pad1d_backward": _ALWAYS,
    "reflection_pad2d_backward": _ALWAYS,
    "reflection_pad3d_backward": _ALWAYS,
    "grid_sampler_2d_backward": _ALWAYS,
    "grid_sampler_3d_backward": _ALWAYS,
    "_embedding_bag_dense_backward": _ALWAYS,
}


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, _: Any, inputs: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        of_indices = name == "median" and "dim" in function._overloadname
        if of_indices or REFUSED.get(name, lambda *_: False)(*inputs):
            raise RuntimeError(f"{function} has no deterministic implementation on CUDA")
        return function(*inputs, **(options or {}))


@contextmanager
def refusing() -> Iterator[None]:
    """Compute deterministically, as ``Trainer(deterministic=True)`` does, as strictly as CUDA."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        with _Refusing():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
