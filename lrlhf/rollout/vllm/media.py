"""Images, videos and audio of a prompt as vLLM reads them, in its own process and over HTTP."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from lrlhf.types import Media


def media_argument(media: Media | None) -> dict[str, Any]:
    """Return the media fields of a prompt, with the inputs of the policy's processor."""
    if media is None:
        return {}
    videos = [
        (
            video.frames,
            {
                "total_num_frames": len(video.frames),
                "fps": video.fps,
                "duration": len(video.frames) / video.fps,
                "frames_indices": list(range(len(video.frames))),
                "video_backend": "lrlhf",
                # they are sampled frames already
                "do_sample_frames": False,
            },
        )
        for video in media.videos
    ]
    audios = [(audio.samples, audio.sampling_rate) for audio in media.audios]
    data = {"image": list(media.images), "video": videos, "audio": audios}
    return {"multi_modal_data": {kind: items for kind, items in data.items() if items}}


def content_parts(media: Media) -> list[dict[str, str]]:
    """Return images and audio as data URLs, without loss, for a server's own processor.

    The prompt of such a request is `Media.prompt_ids`; the server returns it with all placeholder
    tokens, which `decode_response` compares with the policy's.

    Raises:
        ValueError: There are videos, whose frame rate this route has no field for.
    """
    if media.videos:
        raise ValueError(
            "a prompt shows a video, and vLLM's servers take no frame rate with token ids: take "
            "lrlhf.rollout.TransformersEngine, or VLLMEngine with engine.inexact_video: true"
        )
    urls = [("image_url", _image_url(image)) for image in media.images]
    urls += [("audio_url", _data_url("audio/wav", audio.wav())) for audio in media.audios]
    return [{"type": kind, "url": url} for kind, url in urls]


def _image_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return _data_url("image/png", file.getvalue())


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
