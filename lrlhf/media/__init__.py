"""Images and videos: from what a row names to what a vision-language model reads."""

from lrlhf.media.decode import BadRow, MediaError, MediaOptions, Video, read_image, read_video
from lrlhf.media.processing import Encoded, MediaProcessor
from lrlhf.media.refs import MediaRefs, media_name

__all__ = [
    "BadRow",
    "Encoded",
    "MediaError",
    "MediaOptions",
    "MediaProcessor",
    "MediaRefs",
    "Video",
    "media_name",
    "read_image",
    "read_video",
]
