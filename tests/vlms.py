"""Eight families of vision-language models, tiny and random, with tokenizer and processor."""

import copy
import functools
import io
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.video_utils import VideoMetadata

from lrlhf.media import MediaProcessor, Video
from lrlhf.types import Media, PromptBatch, SequenceBatch
from tests.conftest import byte_tokenizer
from tests.matrices import few_of

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# two heads of 32 numbers each, which vLLM's kernels for CPUs take too
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.2,
}


class Vlm(NamedTuple):
    """A model and what it reads with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    processor: MediaProcessor


class _Parts(NamedTuple):
    config: PreTrainedConfig
    processor: ProcessorMixin


def _tokenizer(specials: Sequence[str], **named: str) -> PreTrainedTokenizerFast:
    extra: dict[str, Any] = (
        {"extra_special_tokens": named} if named else {"additional_special_tokens": list(specials)}
    )
    return byte_tokenizer(
        ["<|pad|>", "<|im_start|>", "<|im_end|>", *specials], "<|im_end|>", **extra
    )


def _config(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    text: dict[str, Any],
    vision: dict[str, Any],
    **options: Any,
) -> PreTrainedConfig:
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**_TEXT, **ids, "bos_token_id": None, "vocab_size": len(tokenizer), **text}
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=True, **options
    )


def _template(tokenizer: PreTrainedTokenizerFast, image: str, video: str = "") -> str:
    template = _CHATML.replace("IMAGE", image).replace("VIDEO", video)
    tokenizer.chat_template = template
    return template


def _qwen(family: str) -> _Parts:
    tokenizer = _tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(marks), strict=True))
    patch = 16 if family == "qwen3_vl" else 14
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    text: dict[str, Any] = {"rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch}
    vision["initializer_range"] = 0.2
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    if family == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    if family == "qwen3_vl":
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text["head_dim"] = 32
        rope["mrope_interleaved"] = True
    pixels = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2}
    prefix = "Qwen3VL" if family == "qwen3_vl" else "Qwen2VL"
    name = "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else f"{prefix}Processor"
    sizes = {"patch_size": patch, "merge_size": 2}
    processor = getattr(transformers, name)(
        image_processor=transformers.Qwen2VLImageProcessor(size=pixels, **sizes),
        tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{prefix}VideoProcessor")(
            temporal_patch_size=2,
            cap_pixels_per_frame=False,
            size={**pixels, "longest_edge": 4 * pixels["longest_edge"]},
            **sizes,
        ),
        chat_template=_template(
            tokenizer, *(f"<|vision_start|>{mark}<|vision_end|>" for mark in marks[:2])
        ),
    )
    return _Parts(_config(family, tokenizer, text, vision, **ids), processor)


def _idefics(family: str) -> _Parts:
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tokenizer = _tokenizer([*marks, "<video>", *tiles])
    config = _config(
        family,
        tokenizer,
        {"model_type": "llama"},
        _VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    edge = {"longest_edge": 32}
    prefix = "SmolVLM" if family == "smolvlm" else "Idefics3"
    images = getattr(transformers, f"{prefix}ImageProcessor")(
        size=edge, max_image_size=edge, do_image_splitting=False
    )
    options: dict[str, Any] = {}
    if family == "smolvlm":
        sampling = {"video_size": edge, "max_frames": 4, "fps": 1}
        options["video_processor"] = transformers.SmolVLMVideoProcessor(
            size=edge, max_image_size=edge, num_frames=4, fps=1, video_sampling=sampling
        )
    processor = getattr(transformers, f"{prefix}Processor")(
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_template(tokenizer, "<image>", "<video>"),
        **options,
    )
    return _Parts(config, processor)


def _llava_onevision(family: str) -> _Parts:
    tokenizer = _tokenizer(["<image>", "<video>"])
    tiles = {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]]}
    config = _config(
        family,
        tokenizer,
        {"model_type": "qwen2"},
        {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        **tiles,
    )
    size = {"height": 32, "width": 32}
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(size=size, **tiles),
        tokenizer=tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=_template(tokenizer, "<image>", "<video>"),
    )
    return _Parts(config, processor)


def _llava(family: str) -> _Parts:
    tokenizer = _tokenizer(["<image>"])
    config = _config(
        family,
        tokenizer,
        {"model_type": "llama"},
        {**_VISION, "model_type": "clip_vision_model"},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template(tokenizer, "<image>"),
    )
    return _Parts(config, processor)


def _gemma3(family: str) -> _Parts:
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = _tokenizer(list(named.values()), **named)
    config = _config(
        family,
        tokenizer,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
        {**_VISION, "vision_use_head": False},
        mm_tokens_per_image=4,
        **{f"{k}_index": tokenizer.convert_tokens_to_ids(mark) for k, mark in named.items()},
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=_template(tokenizer, "<start_of_image>"),
    )
    return _Parts(config, processor)


_BUILDERS: Mapping[str, Callable[[str], _Parts]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "llava": _llava,
    "llava_onevision": _llava_onevision,
    "smolvlm": _idefics,
    "idefics3": _idefics,
    "gemma3": _gemma3,
}
FAMILIES = tuple(_BUILDERS)
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "smolvlm")
QWEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# positions of three axes and features of several layers; line ends between patches; pixels per row;
# images that are seen both ways
FAMILY_PARAMS = few_of(FAMILIES, ("qwen3_vl", "llava_onevision", "smolvlm", "gemma3"))
"""Of tests over all families, most of them exhaustive."""


@functools.cache
def _built(family: str) -> Vlm:
    config, processor = _BUILDERS[family](family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        _stir(model)
    return Vlm(model, processor.tokenizer, MediaProcessor.of(processor, config))


def _stir(model: PreTrainedModel) -> None:
    """Move the weights that start at zero or one, so that no part of the model does nothing."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
            elif not weight.any():
                weight.normal_(std=0.2)


def build_vlm(family: str) -> Vlm:
    """A model of its own; tokenizer and processor are shared with the other tests."""
    built = _built(family)
    return built._replace(model=copy.deepcopy(built.model))


def save_vlm(family: str, folder: str | Path) -> None:
    """Write what a hub user would have: model, tokenizer, processor."""
    built = _built(family)
    built.model.save_pretrained(folder)
    built.processor.save(folder)


def picture(seed: int) -> Image.Image:
    """Random pixels, of another height with another seed."""
    shape = (40 + 8 * (seed % 4), 48, 3)
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8))


def clip(seed: int) -> Video:
    """Random frames, two per second: four with an even seed, six with an odd one."""
    shape = (4 + 2 * (seed % 2), 48, 40, 3)
    random = np.random.RandomState(100 + seed)
    return Video(random.randint(0, 256, shape, dtype=np.uint8), 2.0)


@dataclass(frozen=True)
class Row:
    """A text that shows something, as the library encodes it and as the processor itself does."""

    input_ids: tuple[int, ...]
    response: int
    """Tokens at its end that are the answer."""
    media: Media | None
    plain: Mapping[str, torch.Tensor]
    """Arguments of the model for this row alone, straight from its processor."""


def row(
    vlm: Vlm,
    images: Sequence[int] = (),
    videos: Sequence[int] = (),
    *,
    question: str = "what?",
    answer: str = "seven",
) -> Row:
    """A question about the pictures and clips of these seeds, and an answer; "" for a prompt."""
    processor = vlm.processor.processor
    parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    text = vlm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text += answer
    pictures, clips = [picture(seed) for seed in images], [clip(seed) for seed in videos]
    shown: dict[str, Any] = {"images": pictures} if pictures else {}
    if clips:
        shown |= _video_arguments(clips, nested=vlm.model.config.model_type == "smolvlm")
    plain = dict(processor(text=[text], return_tensors="pt", **shown))
    ids = tuple(plain["input_ids"][0].tolist())
    media = None
    if pictures or clips:
        encoded = vlm.processor.encode(text, pictures, clips)
        assert tuple(encoded.input_ids) == ids
        media = encoded.media
    return Row(ids, len(answer), media, plain)


def _video_arguments(clips: Sequence[Video], *, nested: bool) -> dict[str, Any]:
    frames: Any = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in clips]
    told: Any = []
    for video in clips:
        count = len(video.frames)
        told.append(
            VideoMetadata(
                count, video.fps, duration=count / video.fps, frames_indices=[*range(count)]
            )
        )
    if nested:
        frames, told = [frames], [told]
    told = {"do_sample_frames": False, "video_metadata": told}
    return {"videos": frames, "videos_kwargs": told}


def rows_of(vlm: Vlm) -> list[Row]:
    """Rows that show nothing, one picture, three, and a clip where the family reads one."""
    rows = [
        row(vlm, question="which digit is it?", answer="zero"),
        row(vlm, [0], answer="one!"),
        row(vlm, [1, 2, 3], question="and?", answer="three"),
    ]
    if vlm.model.config.model_type in VIDEO_FAMILIES:
        rows.append(row(vlm, videos=[0], answer="moves"))
    return rows


def sharing_media(rows: Sequence[Row]) -> list[Row]:
    """Every row once more, with the same `Media` object."""
    return [replace(entry) for entry in rows for _ in range(2)]


def batch_of(rows: Sequence[Row], *, left: bool = False, extra: int = 2) -> SequenceBatch:
    """Rows padded to the longest one and ``extra`` columns more."""
    width = max(len(entry.input_ids) for entry in rows) + extra
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    response = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, entry in enumerate(rows):
        length = len(entry.input_ids)
        start = width - length if left else 0
        ids[index, start : start + length] = torch.tensor(entry.input_ids)
        attention[index, start : start + length] = True
        response[index, start + length - entry.response : start + length] = True
    return SequenceBatch(
        input_ids=ids,
        attention_mask=attention,
        response_mask=response,
        media=tuple(entry.media for entry in rows),
    )


def prompts_of(rows: Sequence[Row]) -> PromptBatch:
    """Rows without an answer, left-padded, ready to generate."""
    batch = batch_of(rows, left=True, extra=0)
    return PromptBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        prompts=("",) * len(rows),
        columns=({},) * len(rows),
        media=batch.media,
    )


def never_said(vlm: Vlm) -> list[int]:
    """The ids of the marks around and instead of pictures and clips, by their names."""
    family = vlm.model.config.model_type
    names = {
        "llava": ["<image>"],
        "llava_onevision": ["<image>", "<video>"],
        "smolvlm": ["<image>"],
        "idefics3": ["<image>"],
        "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    }
    qwen = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return sorted(vlm.tokenizer.convert_tokens_to_ids(names.get(family, qwen)))


def plain_logprobs(model: PreTrainedModel, vlm: Vlm, entry: Row) -> torch.Tensor:
    """Log-probabilities of a row's answer `[response]`, by the model's own forward pass."""
    logits = model(**entry.plain).logits[0]
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool)
    banned[never_said(vlm)] = True
    logprobs = logits.masked_fill(banned, -torch.inf).log_softmax(-1)
    targets = torch.tensor(entry.input_ids)[-entry.response :]
    return logprobs[-entry.response - 1 : -1].gather(1, targets[:, None])[:, 0]


def gif_bomb(side: int, frames: int) -> bytes:
    """One pixel, and then ``frames`` squares of some bytes each."""
    stream = io.BytesIO()
    Image.new("P", (side, side)).save(stream, "GIF")
    square = stream.getvalue()
    start = square.index(b"," + struct.pack("<4H", 0, 0, side, side))
    colours = square[start + 9] & 0x80
    begin = start + 10 + (3 << ((square[start + 9] & 7) + 1) if colours else 0)
    later = b"," + struct.pack("<4HB", 0, 0, side, side, 0) + square[begin : square.rindex(b";")]
    first = b"," + struct.pack("<4HB", 0, 0, 1, 1, 0) + bytes.fromhex("0202440100")
    head = b"GIF89a" + struct.pack("<2H", 1, 1) + bytes.fromhex("800000 000000ffffff")
    return head + first + later * frames + b";"
