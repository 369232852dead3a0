"""Pretrained models as a configuration describes them: precision, adapters, memory savings."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import peft
import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    BitsAndBytesConfig,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lrlhf.arguments import short_text
from lrlhf.models.backbone import allow_packing, keep_attention
from lrlhf.models.experts import has_experts
from lrlhf.models.heads import body_of, check_output_head
from lrlhf.models.loading.adapters import LoRA, add_adapters, stored_adapters, warn_of_unknown_words
from lrlhf.models.loading.deferred_weights import build_deferred
from lrlhf.models.loading.export import check_mergeable
from lrlhf.models.loading.model_sources import (
    explained,
    load_config,
    resolve_source,
    warn_of_remote_code,
)
from lrlhf.models.loading.tokenization import load_processor, load_tokenizer
from lrlhf.models.media_inputs import placeholder_ids, vision_encoder
from lrlhf.models.modes import in_trial
from lrlhf.models.packed.packed_attention import FUNCTIONS
from lrlhf.models.scorers import blocks_of
from lrlhf.models.transformers_internals import without_load_report
from lrlhf.options.conversion import settings

_LARGE = 3_000_000_000
"""Weights of a model above which activations are what fills a GPU first."""


def recompute(
    model: PreTrainedModel,
    choice: bool | Literal["auto"],
    *,
    offload: bool,
    has_adapters: bool,
    on_gpu: bool | None = None,
) -> None:
    """Have a model's blocks keep what they begin with only, if that is the choice.

    Args:
        model: With or without its weights.
        choice: ``auto``: on a GPU, for models of more than three billion weights that can.
        offload: What they begin with waits in main memory; ``auto`` stands for True then.
        has_adapters: The model's own weights are frozen.
        on_gpu: Where it is going to be trained; None: on a GPU if this machine has one.
    """
    if choice == "auto":
        on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        large = model.num_parameters() > _LARGE  # knows weights that are packed
        choice = offload or (on_gpu and large and model.supports_gradient_checkpointing)
    if not choice:
        return
    # without an accelerator they are in main memory already, which cannot be pinned
    offloads = offload and torch.accelerator.is_available()
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offloads)
    if has_adapters:
        # the inputs of the first block come from frozen embeddings
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]


_WORDS = ("dropout", "pdrop", "layerdrop", "drop_path")


def clear_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout probability of a config, and of the configs inside it, to 0."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            clear_dropout(value)
        elif isinstance(value, float) and any(word in name for word in _WORDS):
            setattr(config, name, 0.0)


_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def silence_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout layer to 0."""
    for module in model.modules():
        if isinstance(module, _DROPOUT):
            module.p = 0.0


_VARIANTS = 64
"""How often one layer's code is compiled at most: with and without gradients, in another precision,
with another window, for the policy, its reference and a critic, which may share it."""


def compile_layers(model: PreTrainedModel) -> None:
    """Have the layers of a language model compiled the first time that a batch goes through them.

    All layers share what is compiled, for any number of tokens, so that a run compiles a few
    times, in its first step. The names of weights and modules stay as they are. Generation, which
    fills a cache, and encoders of images and videos run as they did.

    Args:
        model: On any device; changed in place.

    Raises:
        ValueError: This machine has no C++ compiler; the model has experts, whose routers are
            listened to in ways that compiled code leaves out; or its blocks are not found.
    """
    _check_compiler()
    name, blocks = type(model).__name__, blocks_of(model)
    if has_experts(model):
        raise ValueError(f"compile: {name} has experts, whose layers are not compiled; drop it.")
    if not blocks:
        raise ValueError(f"compile: the blocks of {name} were not found; drop it.")
    # it looks at lengths and writes down what layers say of themselves
    for attention, function in FUNCTIONS.items():
        uncompiled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        AttentionInterface.register(attention, uncompiled)
    fused: dict[type[nn.Module], _Compiled] = {}
    for block in blocks:
        kind = type(block)
        if kind not in fused:
            fused[kind] = _Compiled(kind.forward)
        block.forward = MethodType(fused[kind], block)


def is_compiled(model: nn.Module) -> bool:
    """Tell whether `compile_layers` was called on a model or a part of it."""
    forwards = (getattr(module.forward, "__func__", None) for module in model.modules())
    return any(isinstance(forward, _Compiled) for forward in forwards)


class _Compiled:
    """The forward pass of a kind of block, as it is written where a cache is filled."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)  # its signature is asked for
        self._plain = forward
        # sizes are symbols from the beginning: the code should not depend on which came first
        known = inspect.signature(torch.compile).parameters  # older ones stop at 8 variants
        limit: Any = {"recompile_limit": _VARIANTS} if "recompile_limit" in known else {}
        self._fused: Callable[..., Any] = torch.compile(forward, dynamic=True, **limit)

    def __call__(self, block: nn.Module, *inputs: Any, **options: Any) -> Any:
        cached = any(isinstance(each, Cache) for each in (*inputs, *options.values()))
        forward = self._plain if cached or in_trial() else self._fused
        return forward(block, *inputs, **options)


def _check_compiler() -> None:
    # the one that torch.compile takes
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(name) else [f"a C++ compiler ({name})"]
    missing += [] if header.is_file() else [f"Python's headers ({header})"]
    if missing:
        raise ValueError(
            f"compile: torch.compile needs {' and '.join(missing)}, not found here. Install what "
            "is missing (Debian and Ubuntu: apt install g++ python3-dev), name another compiler "
            "in CXX, or set compile: false."
        )


logger = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float16", "auto"]


@settings
@dataclass(frozen=True, kw_only=True, repr=False)
class PretrainedSpec:
    """Loading options that all pretrained models share."""

    source: str
    """Folder, hub id, ``.gguf`` file or ``package:<module>[/<path>]``."""
    dtype: DType = "float32"
    """Of the weights. ``auto``: as stored. Adapters on a 16-bit model stay float32."""
    attn_implementation: str | None = None
    """``sdpa``, ``flex_attention``, ``flash_attention_2``, ``eager``, ...; None: the model's own.
    Packed rows go through FlashAttention or FlexAttention, but not with ``sdpa``, nor with None on
    CPUs. ``eager`` stands in for ``sdpa`` where that leaves out what a model asks for (Gemma 2)."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Gradient checkpointing: recompute activations in the backward pass instead of keeping them.
    ``auto``: where there is a GPU, for models of more than three billion weights."""
    activation_offload: bool = False
    """Keep what `gradient_checkpointing` recomputes from, the inputs of the blocks, in main memory:
    frees 2 bytes (in 16 bits) per token, layer and hidden unit of a GPU, and costs copies."""
    compile: bool = False
    """Fuse what the layers compute beside matrix products (``torch.compile``): faster steps and
    fewer activations for half a minute in the first one. Needs a C++ compiler."""
    dropout: bool = False
    """Keep the model's own dropout. Off by default: it makes policy ratios and scores noisy."""
    lora: LoRA | None = None
    """Train adapters only; None: train every weight."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Hold the frozen weights in nf4 or int8 (bitsandbytes). Training then needs ``lora``."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    freeze: list[str] = field(default_factory=list)
    """Modules that do not learn, as shell patterns over the names of the model's body:
    ``embed_tokens``, ``layers.[0-5]``, ``*``. Not with ``lora``."""
    freeze_vision: bool = False
    """The encoder of images and videos does not learn, nor get adapters, whatever its name. What
    fits its features to the language model learns, unless it is part of the encoder (Qwen)."""

    def __post_init__(self) -> None:
        if self.freeze and self.lora is not None:
            raise ValueError(
                "freeze: with lora all of the model's own weights are frozen already; choose the "
                "adapted layers with lora.target_modules instead."
            )
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offload keeps what gradient_checkpointing recomputes from in main "
                "memory; set gradient_checkpointing: true too"
            )

    def __repr__(self) -> str:
        return short_text(self)

    @property
    def of_hub(self) -> dict[str, Any]:
        """What a hub id is loaded with, as keywords."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that lies beside the model."""
        return load_tokenizer(self.source, **self.of_hub)

    def load_processor(self) -> ProcessorMixin | None:
        """Load what turns media into the model's input; None of a text model."""
        return load_processor(self.source, **self.of_hub)


@settings
@dataclass(frozen=True, kw_only=True, repr=False)
class CausalLM(PretrainedSpec):
    """A language or vision-language model: a policy or a reference model."""

    def load(self, *, trainable: bool = True) -> PreTrainedModel | peft.PeftModel:
        """Load the model, in eval mode as ``from_pretrained`` leaves it.

        Args:
            trainable: False: every parameter is frozen, those of ``lora.source`` too; new adapters,
                which would compute nothing, are left out.

        Raises:
            ValueError: The source leads to no model, an option does not fit it, or its output
                head computes logits in a way that this library does not know.
        """
        auto_class = language_model_class(load_config(self.source, **self.of_hub))
        model = load_pretrained(self, auto_class, trainable=trainable)
        check_output_head(model)
        allow_packing(model)
        return finish_for_training(model, self, trainable=trainable, task_type="CAUSAL_LM")


def language_model_class(config: PreTrainedConfig) -> Any:
    """Return the auto class of a model with an output head."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    hearing = "audio" in placeholder_ids(config)
    return AutoModelForMultimodalLM if hearing else AutoModelForCausalLM


def load_pretrained(
    spec: PretrainedSpec, auto_class: Any, *, trainable: bool, new: Sequence[str] = ()
) -> PreTrainedModel:
    """Load the weights that ``spec`` names into the class that ``auto_class`` picks, no adapters.

    Args:
        spec: Source and loading options.
        auto_class: ``AutoModel``, ``AutoModelForCausalLM``, ...
        trainable: Whether the weights will be trained, which a quantised model cannot without
            adapters.
        new: Names of layers that the source may lack, which are then as ``transformers`` draws
            them.

    Raises:
        ValueError: The source leads to no model, or lacks weights that the class needs.
    """
    if spec.quantization is not None and spec.lora is None and trainable:
        raise ValueError(
            f"quantization: {spec.quantization} cannot train the model's own weights. "
            "Add `lora: {}` to train adapters, or drop quantization."
        )
    location = resolve_source(spec.source)
    if spec.trust_remote_code:
        warn_of_remote_code(spec.source)
    quantization = _bitsandbytes(spec)
    with explained(spec.source):
        config = AutoConfig.from_pretrained(location, **spec.of_hub)
        if not spec.dropout:
            clear_dropout(config)
        if trainable:
            _try_adapters(auto_class, config, spec)
        load = partial(
            auto_class.from_pretrained,
            location,
            config=config,
            dtype=spec.dtype,
            attn_implementation=spec.attn_implementation,
            quantization_config=quantization,
            use_safetensors=None,  # safetensors where there is one, else a weights_only pickle
            output_loading_info=True,
            **spec.of_hub,
        )
        model: PreTrainedModel
        with without_load_report():  # what is missing is refused below, heads are others' matter
            built = build_deferred(load, location, config, exotic=_exotic(spec), of_hub=spec.of_hub)
            model, report = built or load()
    _check_complete(report, spec.source, type(model).__name__, new)
    _keep_4_bit_layout(model)
    if not spec.dropout:
        silence_dropout(model)
    keep_attention(model, spec.attn_implementation)
    if spec.compile:
        compile_layers(model)
    return model


def finish_for_training(
    model: PreTrainedModel,
    spec: PretrainedSpec,
    *,
    task_type: str,
    trainable: bool = True,
    on_gpu: bool | None = None,
) -> PreTrainedModel | peft.PeftModel:
    """Add the adapters, the activation recomputing and the freezing that ``spec`` asks for.

    Args:
        model: As it was loaded.
        spec: What it asks for.
        task_type: PEFT's name for what the model does.
        trainable: False: all of it is frozen, and of ``lora`` only what its source holds is there.
        on_gpu: Where it is going to be trained; None: on a GPU if this machine has one.
    """
    if task_type != "CAUSAL_LM":  # it generates nothing: keys and values are not kept
        for config in (model.config, model.config.get_text_config()):
            config.use_cache = False
    finished: PreTrainedModel | peft.PeftModel = model
    if not trainable:
        if spec.lora is not None and spec.lora.source is not None:
            finished = add_adapters(model, spec.lora, task_type, skip=None)
        return finished.eval().requires_grad_(False)
    freeze_modules(body_of(model), spec.freeze)
    if spec.lora is not None:
        warn_of_unknown_words(model, spec.lora)
        finished = add_adapters(model, spec.lora, task_type, skip=_skipped(model, spec))
        check_mergeable(finished)
    if spec.freeze_vision:  # with the adapters that were trained on it before
        vision_encoder(model).requires_grad_(False)
    recompute(
        model,
        spec.gradient_checkpointing,
        offload=spec.activation_offload,
        has_adapters=spec.lora is not None,
        on_gpu=on_gpu,
    )
    return finished


def _try_adapters(auto_class: Any, config: PreTrainedConfig, spec: PretrainedSpec) -> None:
    """Refuse adapters that do not fit a model before its weights are read."""
    if spec.lora is None:
        return
    with torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=spec.trust_remote_code)
        task_type = "FEATURE_EXTRACTION"  # of which none of the checks depends
        check_mergeable(add_adapters(model, spec.lora, task_type, skip=_skipped(model, spec)))


def _exotic(spec: PretrainedSpec) -> str | None:
    """Say what keeps a model's weights from being read in parts."""
    if spec.quantization is not None:
        return "its weights are quantised as they are loaded"
    adapters = None if spec.lora is None else spec.lora.source
    if adapters is not None and stored_adapters(adapters).modules_to_save:
        return "its adapters replace some of them"
    return "its own code may compute what no file holds" if spec.trust_remote_code else None


def freeze_modules(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch the gradient of all modules off whose name fits a shell pattern, and inside them.

    Raises:
        ValueError: A pattern matches no module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        matching = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)
            raise ValueError(
                f"freeze: {pattern!r} matches no module of {type(model).__name__}. "
                f"Near matches: {', '.join(near) or ', '.join(list(modules)[:3])}."
            )
        for module in matching:
            module.requires_grad_(False)


def _skipped(model: PreTrainedModel, spec: PretrainedSpec) -> str | None:
    """Return the pattern of module names that get no adapter; None: there is none to leave out."""
    patterns = []
    if spec.freeze_vision:
        encoder = vision_encoder(model)
        name = next(name for name, module in model.named_modules() if module is encoder)
        patterns.append(rf"{re.escape(name)}\..*")
    if spec.lora is not None and spec.lora.target_modules == "all-linear":
        patterns += map(re.escape, _unlike_linear(model))
    return "|".join(patterns) or None


def _unlike_linear(model: nn.Module) -> Iterator[str]:
    """Go through linear layers whose place an adapted linear layer cannot take."""
    for name, module in model.named_modules():
        # a model's own kind of layer, such as a router, which returns something else
        own = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
        if own and isinstance(module, nn.Linear) and not _maps_vectors(module):
            yield name
        # a state space reads these weights, or its kernel does, and never calls the layers
        if {"A_log", "D"} <= dict(module.named_parameters(recurse=False)).keys():
            yield from (f"{name}.{part}" for part in ("dt_proj", "out_proj"))


@torch.no_grad()
def _maps_vectors(layer: nn.Linear) -> bool:
    vector = torch.zeros_like(layer.weight[:1])
    try:
        result: Any = layer(vector)
    except (RuntimeError, TypeError):  # it takes something else
        return False
    return isinstance(result, torch.Tensor) and result.shape == (1, layer.out_features)


def _keep_4_bit_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew in the first pass of an evaluation.

    On CPUs with AVX512-BF16 it does, in place, for a product that has no gradient: adapters that
    are trained after it would learn nothing. It also fails on layers smaller than a block.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _bitsandbytes(spec: PretrainedSpec) -> BitsAndBytesConfig | None:
    if spec.quantization is None:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"quantization: {spec.quantization} needs bitsandbytes. "
            "Run `pip install 'lrlhf[quantization]'`."
        )
    if spec.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    compute = torch.bfloat16 if spec.dtype == "auto" else getattr(torch, spec.dtype)
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def _check_complete(
    report: Mapping[str, Any], source: str, class_name: str, new: Sequence[str]
) -> None:
    """Refuse weights left at random; a pooling layer is allowed to be new, nothing uses it."""
    keys = [key for key in report["missing_keys"] if "pooler" not in key]
    missing = sorted(key for key in keys if set(key.split(".")).isdisjoint(new))
    wrong = sorted(str(entry) for entry in report["mismatched_keys"])
    if missing or wrong:
        raise ValueError(
            f"source {source!r} does not fill {class_name}: missing {missing[:5]}, "
            f"of another shape {wrong[:5]}. It holds another kind of model, or is incomplete."
        )
