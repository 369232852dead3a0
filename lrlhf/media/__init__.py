"""Images, videos and audio: from what a row names to what a model reads."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.media.audio import Audio, read_audio
    from lrlhf.media.decode import BadRow, MediaError, MediaOptions, Video, read_image, read_video
    from lrlhf.media.processing import Encoded, MediaProcessor
    from lrlhf.media.refs import MediaRefs, media_name
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Audio",
    "BadRow",
    "Encoded",
    "MediaError",
    "MediaOptions",
    "MediaProcessor",
    "MediaRefs",
    "Video",
    "media_name",
    "read_audio",
    "read_image",
    "read_video",
]
