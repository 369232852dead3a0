"""The model's own processor, row by row."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.video_utils import VideoMetadata

from lrlhf.media.audio import Audio, check_audio, read_audio
from lrlhf.media.decode import (
    MediaError,
    MediaOptions,
    Video,
    check_image,
    check_video,
    read_image,
    read_video,
)
from lrlhf.media.refs import MediaRefs, image_name, is_file, media_name
from lrlhf.models import context_of, placeholder_ids, reader_of
from lrlhf.models.media_inputs import joined_tensors
from lrlhf.types import Media

_TEXT_KEYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_KINDS = ("image", "video", "audio")
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}


class Encoded(NamedTuple):
    """One row as the model reads it."""

    input_ids: list[int]
    media: Media


@dataclass(frozen=True)
class MediaProcessor:
    """Turns a text with placeholders, and what it shows, into tokens and tensors."""

    processor: ProcessorMixin
    placeholders: Mapping[str, int]
    """Token ids that stand for media in the model's input, by kind."""
    merge_size: int | None = None
    """Patches along each side that the model makes one token of; None: it does not tell."""
    context: int | None = None
    """Tokens that the model can read; None: it does not tell."""
    family: str = ""

    @classmethod
    def of(cls, processor: ProcessorMixin, config: PreTrainedConfig) -> MediaProcessor:
        """Take what is needed from a model's config."""
        values = config.to_dict()
        vision = values.get("vision_config") or {}
        return cls(
            processor=processor,
            placeholders=placeholder_ids(config),
            merge_size=vision.get("spatial_merge_size"),
            context=context_of(config),
            family=config.model_type,
        )

    @classmethod
    def for_model(
        cls, processor: ProcessorMixin | None, config: PreTrainedConfig
    ) -> MediaProcessor | None:
        """Pair a model with its processor, if it sees anything and has one.

        A vision-language model without a processor is trained on text alone.
        """
        if processor is None:
            return None
        if not placeholder_ids(config):
            raise ValueError(
                f"a {type(processor).__name__} was passed for a text model ({config.model_type}): "
                "leave `processor` out"
            )
        return cls.of(processor, config)

    def save(self, folder: str | Path) -> None:
        """Write the processor beside a model, for ``AutoProcessor``."""
        self.processor.save_pretrained(str(folder))

    @property
    def markers(self) -> dict[str, str]:
        """What stands in a text for one image, video or audio, before the processor counts."""
        tokens = {kind: vars(self.processor).get(f"{kind}_token") for kind in _KINDS}
        return {kind: str(token) for kind, token in tokens.items() if token}

    @cached_property
    def written(self) -> dict[str, str]:
        """What the chat template writes for one of each kind: its marker, and what is around it."""
        return {kind: self._written(kind, marker) for kind, marker in self.markers.items()}

    @property
    def marks(self) -> dict[str, str]:
        """Kinds of what the model itself reads in the place of media."""
        forms = (*self.markers.items(), *self.written.items())
        return {form: kind for kind, form in forms}

    @cached_property
    def encodes_images_alone(self) -> bool:
        """Whether a text with images is its own tokens, with those of each image by itself.

        Not so where the processor writes letters around an image, which may become one token with
        their neighbours, or cuts an image into tiles unless there are others.
        """
        if (marker := self.markers.get("image")) is None:
            return False
        random = np.random.Generator(np.random.Philox(0))
        images = [
            Image.fromarray(random.integers(0, 256, (height, 64, 3)).astype(np.uint8))
            for height in (40, 128)
        ]
        text = "a\n{0}\n{0}\nb".format(self.written["image"])
        together = self.encode(text, images, [])
        alone = [self.encode(marker, [image], []) for image in images]
        tokenizer: Any = vars(self.processor)["tokenizer"]
        mark, waiting = tokenizer.convert_tokens_to_ids(marker), iter(alone)
        ids: list[int] = []
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids += next(waiting).input_ids if token == mark else [token]
        keys = [*together.media.tensors]
        one, several = (
            joined_tensors(media, keys, self.family)
            for media in ([together.media], [each.media for each in alone])
        )
        same = all(key in several and torch.equal(one[key], several[key]) for key in keys)
        return ids == together.input_ids and same

    @property
    def not_alone(self) -> str:
        """What it is that `encodes_images_alone` denies, for messages."""
        name = type(self.processor).__name__
        return f"{name} encodes an image by itself otherwise than beside others"

    def _written(self, kind: str, marker: str) -> str:
        tokenizer = vars(self.processor)["tokenizer"]
        template = tokenizer.chat_template or vars(self.processor).get("chat_template")
        before, after = ({"type": "text", "text": text} for text in ("[[before", "after]]"))
        messages = [{"role": "user", "content": [before, {"type": kind}, after]}]
        try:
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        # there is none, or it was not written for such a message
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return marker
        inside = str(text).partition("[[before")[2].partition("after]]")[0].strip()
        return inside if inside.count(marker) == 1 else marker

    @property
    def max_seconds(self) -> float | None:
        """The longest audio that the processor does not cut off; None: it does not tell."""
        extractor = vars(self.processor).get("feature_extractor")
        samples = getattr(extractor, "n_samples", None)
        return None if samples is None else samples / self._sampling_rate

    @property
    def _sampling_rate(self) -> int:
        extractor: Any = vars(self.processor)["feature_extractor"]
        return int(extractor.sampling_rate)

    def check(self, text: str, refs: MediaRefs) -> None:
        """Look at all that can be known of a row without reading pixels or samples.

        Raises:
            MediaError: The placeholders do not fit the media, or a file is missing or no image.
        """
        self._check_counts(text, refs)
        for image in refs.images:
            check_image(image)
        for video in refs.videos:
            check_video(video)
        for audio in refs.audios:
            check_audio(audio, self.max_seconds)

    def read(
        self,
        text: str,
        refs: MediaRefs,
        options: MediaOptions,
        *,
        complete: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> Encoded:
        """Read a row's media and encode it; see `encode`.

        Raises:
            MediaError: Something cannot be read, does not fit the text, or the processor or the
                model refuses it.
        """
        self._check_counts(text, refs)
        images = [read_image(value, options) for value in refs.images]
        videos = [read_video(value, options) for value in refs.videos]
        audios = [read_audio(value, self.max_seconds) for value in refs.audios]
        shown = zip(refs.images, images, strict=True)
        names = [media_name(value) if is_file(value) else image_name(own) for value, own in shown]
        return self.encode(
            text,
            images,
            videos,
            audios,
            complete=complete,
            prompt_ids=prompt_ids,
            names=(*names, *refs.names[len(names) :]),
        )

    def encode(
        self,
        text: str,
        images: Sequence[Image.Image],
        videos: Sequence[Video],
        audios: Sequence[Audio] = (),
        *,
        complete: bool = True,
        prompt_ids: Sequence[int] = (),
        names: tuple[str, ...] = (),
    ) -> Encoded:
        """Encode a row whose media are in memory.

        Args:
            text: With one placeholder per image, video or audio.
            images: What stands behind those of images.
            videos: What stands behind those of videos.
            audios: What stands behind those of audio; resampled to the rate of the processor.
            complete: Whether the text has its special tokens already.
            prompt_ids: See `Media.prompt_ids`.
            names: What messages call images, videos and audio.

        Raises:
            MediaError: They do not fit the text, or the processor or the model refuses them.
        """
        self._check_counts(text, MediaRefs(tuple(images), tuple(videos), tuple(audios)))
        if audios:
            audios = [
                read_audio(audio, self.max_seconds).resampled(self._sampling_rate)
                for audio in audios
            ]
        try:
            output = self._reader_of(text)(
                text=[text],
                return_tensors="pt",
                text_kwargs={"add_special_tokens": not complete},
                **({"images": list(images)} if images else {}),
                **(self._video_arguments(videos) if videos else {}),
                **(self._audio_arguments(audios) if audios else {}),
            )
        # what processors raise at shapes that they cannot cut into patches
        except (ValueError, TypeError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise MediaError(
                "refused by the processor",
                f"{', '.join(names) or 'media'}: {type(error).__name__}: {error}",
            ) from error
        ids = output["input_ids"][0]
        tensors = {
            name: value
            for name, value in output.items()
            if name not in _TEXT_KEYS and isinstance(value, Tensor)
        }
        tokens = {kind: int((ids == token).sum()) for kind, token in self.placeholders.items()}
        self._check_tokens(tokens, tensors, names)
        if self.context is not None and len(ids) > self.context:
            raise MediaError(
                "too long",
                f"{', '.join(names)}: {len(ids)} tokens with the text, and the model reads "
                f"{self.context}",
                remedy="lower media.max_pixels or media.max_frames",
            )
        media = Media(
            tensors=tensors,
            tokens={kind: count for kind, count in tokens.items() if count},
            images=tuple(images),
            videos=tuple(videos),
            audios=tuple(audios),
            prompt_ids=tuple(prompt_ids),
            names=names,
        )
        return Encoded(ids.tolist(), media)

    def _reader_of(self, text: str) -> ProcessorMixin:
        """Return the processor, with a tokenizer that splits what is split in the text."""
        processor: Any = self.processor
        tokenizer = reader_of(processor.tokenizer, text)
        if tokenizer is processor.tokenizer:
            return self.processor
        splitting = copy.copy(processor)
        splitting.tokenizer = tokenizer
        return cast(ProcessorMixin, splitting)

    def specimen(self, tokenizer: PreTrainedTokenizerBase, *, size: int) -> Encoded:
        """Encode a text with a square image of random pixels, the same every time.

        A model that hears, and sees no images, gets half a second of noise.
        """
        random = np.random.Generator(np.random.Philox(0))
        images, audios = [], []
        if "image" in self.markers:
            pixels = random.integers(0, 256, (size, size, 3)).astype(np.uint8)
            images.append(Image.fromarray(pixels))
        else:
            noise = random.uniform(-0.5, 0.5, self._sampling_rate // 2).astype(np.float32)
            audios.append(Audio(noise, self._sampling_rate))
        kind = "image" if images else "audio"
        content = [{"type": kind}, {"type": "text", "text": "1 2 3"}]
        if tokenizer.chat_template is None:
            text = f"{self.markers[kind]} 1 2 3"
        else:
            messages: Any = [{"role": "user", "content": content}]
            text = str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        short: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.encode(text, images, [], audios, prompt_ids=short)

    def _audio_arguments(self, audios: Sequence[Audio]) -> dict[str, Any]:
        return {
            "audio": [audio.samples for audio in audios],
            "audio_kwargs": {"sampling_rate": self._sampling_rate},
        }

    def _video_arguments(self, videos: Sequence[Video]) -> dict[str, Any]:
        videos = [self._as_patches(video) for video in videos]
        frames: Any = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos]
        described = [
            VideoMetadata(
                total_num_frames=len(video.frames),
                fps=video.fps,
                frames_indices=list(range(len(video.frames))),
                duration=len(video.frames) / video.fps,
            )
            for video in videos
        ]
        nested = self.family == "smolvlm"
        return {
            "videos": [frames] if nested else frames,
            "videos_kwargs": {
                "do_sample_frames": False,
                "video_metadata": [described] if nested else described,
            },
        }

    def _as_patches(self, video: Video) -> Video:
        """Show a film that is shorter than the model's patches of time as often as one needs."""
        reader = vars(self.processor).get("video_processor")
        patch = getattr(reader, "temporal_patch_size", None) or 1
        times = math.ceil(patch / len(video.frames))
        if times == 1:
            return video
        return Video(np.repeat(video.frames, times, axis=0), video.fps * times)

    def _check_counts(self, text: str, refs: MediaRefs) -> None:
        expected = refs.counts
        for kind, marker in self.markers.items():
            count = text.count(marker)
            if count != expected[kind]:
                raise MediaError(
                    "placeholder count",
                    f"the text has {count} x {marker!r} for {expected[kind]} {kind}(s)"
                    + (f" ({', '.join(refs.names)})" if len(refs) else ""),
                    remedy="give each image, video and audio one part in the messages, or one "
                    "<image>, <video> or <audio> in the text",
                )
        if expected["image"] and expected["video"] and "video" not in self.placeholders:
            raise MediaError(
                "images beside a video",
                f"{type(self.processor).__name__} reads a video as images, and cannot tell them "
                f"apart ({', '.join(refs.names)})",
            )
        for kind in expected.keys() - self.markers.keys():
            if expected[kind]:
                raise MediaError(
                    f"no {kind}s",
                    f"{type(self.processor).__name__} reads no {kind}s ({', '.join(refs.names)})",
                )

    def _check_tokens(
        self, tokens: Mapping[str, int], tensors: Mapping[str, Tensor], names: Sequence[str]
    ) -> None:
        """Compare the placeholders with the patches, by the model's own merge size."""
        for kind, key in _GRIDS.items():
            if key not in tensors or self.merge_size is None:
                continue
            expected = int(tensors[key].prod(dim=-1).sum()) // self.merge_size**2
            if tokens.get(kind) != expected:
                raise MediaError(
                    "grid does not match",
                    f"{', '.join(names)}: {tokens.get(kind)} {kind} tokens in the text, and the "
                    f"model makes {expected} of the grid {tensors[key].tolist()} (merge size "
                    f"{self.merge_size})",
                    remedy="use the processor that belongs to the model",
                )
