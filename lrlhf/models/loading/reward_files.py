"""Reward networks on disk: what is written, and which folders can be read.

A folder holds the backbone in its own format (or, where one linear head on the last token makes
it possible, as the family's plain sequence classifier), ``reward_head.json`` and
``reward_head.safetensors`` with the heads in full precision, and the tokenizer.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lrlhf.models.heads import HeadConfig, plain_model
from lrlhf.models.loading.deferred_weights import stored_tensor
from lrlhf.models.loading.export import merged_state_dict, save_model, skeleton_of
from lrlhf.models.loading.model_sources import explained, load_config, resolve_source
from lrlhf.models.loading.pretrained import PretrainedSpec, finish_for_training, load_pretrained
from lrlhf.models.scorers import HeadedBackbone, Scorer, StockClassifier

logger = logging.getLogger(__name__)

HEAD_CONFIG = "reward_head.json"
HEAD_WEIGHTS = "reward_head.safetensors"
_SCORE = "projection.weight"
_PAD = "<|pad|>"
"""Added to exported tokenizers that have no padding token of its own."""


def save_scorer(scorer: Scorer, folder: Path | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a scorer, adapters merged, and its tokenizer; folder as of `save_model`."""
    if isinstance(scorer, StockClassifier):
        save_model(scorer.model, folder, tokenizer)
    elif isinstance(scorer, HeadedBackbone):
        _save_headed(scorer, folder, tokenizer)
    else:
        raise TypeError(f"{type(scorer).__name__} cannot be saved.")


def load_scorer(spec: PretrainedSpec, *, trainable: bool) -> Scorer | None:
    """Load a trained scorer, or None where ``spec.source`` holds no reward model.

    Raises:
        ValueError: The folder's head files do not fit together.
    """
    location = resolve_source(spec.source)
    with explained(spec.source):
        folder = _head_folder(location, spec.revision)
        if (folder / HEAD_CONFIG).is_file():
            return _load_headed(spec, folder, trainable=trainable)
        config = load_config(spec.source, **spec.of_hub)
    names = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return None
    if config.num_labels != 1:
        logger.warning(
            "%s is a classifier with %d labels, which say nothing of how good a text is: of it "
            "only the model below its head is used",
            spec.source,
            config.num_labels,
        )
        return None
    return _load_classifier(spec, trainable=trainable)


def load_backbone(spec: PretrainedSpec, *, trainable: bool) -> PreTrainedModel | PeftModel:
    """Load the body of a model, without any head; arguments as of `load_pretrained`."""
    body = load_pretrained(spec, AutoModel, trainable=trainable)
    return finish_for_training(body, spec, trainable=trainable, task_type="FEATURE_EXTRACTION")


def _head_folder(location: str, revision: str | None) -> Path:
    if Path(location).is_dir():
        return Path(location)
    needed = [HEAD_CONFIG, HEAD_WEIGHTS]
    return Path(snapshot_download(location, revision=revision, allow_patterns=needed))


def _load_headed(spec: PretrainedSpec, folder: Path, *, trainable: bool) -> HeadedBackbone:
    stored = json.loads((folder / HEAD_CONFIG).read_text(encoding="utf-8"))
    stored.setdefault("pad_token_id", None)  # which older folders do not have
    known = {field.name for field in dataclasses.fields(HeadConfig)}
    if stored.keys() != known:
        different = ", ".join(sorted(stored.keys() ^ known))
        raise ValueError(
            f"{folder / HEAD_CONFIG} was written by another version of lrlhf: {different} differ."
        )
    config = HeadConfig(**{**stored, "names": tuple(stored["names"])})
    body = load_backbone(spec, trainable=trainable)
    scorer = HeadedBackbone(body, config)
    weights = load_file(folder / HEAD_WEIGHTS)
    expected = scorer.heads.state_dict()
    if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in expected.items()}:
        different = ", ".join(sorted(weights.keys() ^ expected.keys())) or "their shapes"
        raise ValueError(
            f"{folder / HEAD_WEIGHTS} does not fit {HEAD_CONFIG} beside it: {different} differ."
        )
    scorer.heads.load_state_dict(weights)
    scorer.heads.requires_grad_(trainable)
    return scorer


def _load_classifier(spec: PretrainedSpec, *, trainable: bool) -> Scorer:
    model = load_pretrained(spec, AutoModelForSequenceClassification, trainable=trainable)
    score = dict(model.named_children()).get("score")
    known = type(model).__module__.startswith("transformers.")  # code of its own may do otherwise
    if not (known and isinstance(score, nn.Linear) and score.bias is None):
        finished = finish_for_training(model, spec, trainable=trainable, task_type="SEQ_CLS")
        return StockClassifier(finished)
    body = finish_for_training(
        model.base_model, spec, trainable=trainable, task_type="FEATURE_EXTRACTION"
    )
    pad = model.config.get_text_config().pad_token_id
    scorer = HeadedBackbone(body, HeadConfig(pad_token_id=pad))
    (projection,) = scorer.heads.parameters()
    projection.data.copy_(stored_tensor(score, "weight"))
    scorer.heads.requires_grad_(trainable)
    return scorer


def _save_headed(
    scorer: HeadedBackbone, folder: Path | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = plain_model(scorer.backbone)
    classifier = _plain_classifier(scorer)
    heads = merged_state_dict(scorer.heads)
    if classifier is None:
        save_model(scorer.backbone, folder, tokenizer)
    else:
        body = merged_state_dict(plain, keep=folder is not None)
    if folder is None:
        return
    if classifier is not None:
        padding = _with_padding(scorer.config, tokenizer)
        classifier = _padding_with(classifier, scorer.config.pad_token_id, padding)
        prefix = classifier.base_model_prefix
        weights = {f"{prefix}.{name}": weight for name, weight in body.items()}
        weights["score.weight"] = heads[f"{scorer.head_names[0]}.{_SCORE}"]
        sizes = {name: weight.shape for name, weight in classifier.state_dict().items()}
        weights = {name: _grown(weight, sizes[name]) for name, weight in weights.items()}
        classifier.save_pretrained(folder, state_dict=weights)
        _write_index(folder)
        padding.save_pretrained(folder)
    (folder / HEAD_CONFIG).write_text(
        json.dumps(dataclasses.asdict(scorer.config), indent=2) + "\n", encoding="utf-8"
    )
    heads = {name: weight.contiguous() for name, weight in heads.items()}
    save_file(heads, folder / HEAD_WEIGHTS, metadata={"format": "pt"})


def _with_padding(
    config: HeadConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose padding leads ``transformers`` to the token that the head reads.

    Its classifiers read the last token that is not padding, so a token that may end a text must not
    be the padding as well.
    """
    pad, written = tokenizer.pad_token, f"{tokenizer.eos_token}{tokenizer.chat_template or ''}"
    if config.pad_token_id is None:
        if pad is not None and pad not in written:
            return tokenizer
        own = copy.deepcopy(tokenizer)
        own.add_special_tokens({"pad_token": _PAD})
        return own
    pad_token_id = config.pad_token_id
    if pad_token_id == tokenizer.pad_token_id or not 0 <= pad_token_id < len(tokenizer):
        return tokenizer
    own = copy.deepcopy(tokenizer)
    own.pad_token = own.convert_ids_to_tokens(pad_token_id)
    return own


def _padding_with(
    classifier: PreTrainedModel, read: int | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Build a weightless classifier anew, with that padding and an embedding of it."""
    config, pad = classifier.config, tokenizer.pad_token_id if read is None else read
    text_config = config.get_text_config()
    text_config.pad_token_id = config.pad_token_id = pad
    text_config.vocab_size = max(text_config.vocab_size, pad + 1)
    with torch.device("meta"):
        built: nn.Module = type(classifier)(config)
    return cast(PreTrainedModel, built.to(classifier.dtype))


def _grown(weight: Tensor, shape: torch.Size) -> Tensor:
    """Append rows for a padding token that the model has none for."""
    if weight.shape == shape:
        return weight
    return torch.cat([weight, weight.new_zeros(shape[0] - len(weight), *shape[1:])])


def _write_index(folder: Path) -> None:
    """Name the classifier's file as the only one with weights.

    Without an index vLLM would read the heads beside it as well, which the classifier has not.
    """
    path = folder / SAFE_WEIGHTS_NAME
    if not path.is_file():  # several files, which have an index
        return
    with safe_open(path, framework="pt") as file:
        names = sorted(file.keys())
    index = {
        "metadata": {"total_size": path.stat().st_size},
        "weight_map": dict.fromkeys(names, SAFE_WEIGHTS_NAME),
    }
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _plain_classifier(scorer: HeadedBackbone) -> PreTrainedModel | None:
    """Build the family's own sequence classifier, weightless, if it would give the same scores."""
    plain, config = plain_model(scorer.backbone), scorer.config
    read = config.pad_token_id
    if config != HeadConfig(names=config.names[:1], scale_max=config.scale_max, pad_token_id=read):
        return None
    if type(plain.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    classifier_config = copy.deepcopy(skeleton_of(plain).config)
    classifier_config.num_labels = 1
    auto_class: Any = AutoModelForSequenceClassification
    with torch.device("meta"):
        classifier = auto_class.from_config(classifier_config)
    score = dict(classifier.named_children()).get("score")
    if not isinstance(score, nn.Linear) or score.bias is not None:
        return None
    if type(classifier.base_model) is not type(plain):
        return None
    return cast(PreTrainedModel, classifier.to(plain.dtype))
