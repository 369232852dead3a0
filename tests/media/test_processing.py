"""A processor's own output is what is expected; its parameters tell how many tokens there are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from lrlhf.media import Encoded, MediaError, MediaOptions, MediaProcessor, MediaRefs, Video
from lrlhf.media.refs import MediaPart, PartOptions, image_name
from tests.vlms import build_vlm

OPTIONS = MediaOptions()
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"


@pytest.fixture(scope="module")
def qwen() -> MediaProcessor:
    """Patches of 14 x 14 pixels, 2 x 2 of which make a token: 28 x 28 pixels; 2 frames a patch."""
    return build_vlm("qwen2_vl").processor


def processor_of(family: str) -> MediaProcessor:
    return build_vlm(family).processor


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.Generator(np.random.Philox(seed))
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def frames(count: int, width: int = 56, height: int = 28) -> Video:
    pixels = [np.asarray(noise(width, height, seed)) for seed in range(count)]
    return Video(np.stack(pixels), 4.0)


def refused(act: Callable[[], object]) -> MediaError:
    with pytest.raises(MediaError) as caught:
        act()
    return caught.value


def same(encoded: Encoded, output: Any, tensors: set[str]) -> None:
    """Compare with what the processor returned itself."""
    assert encoded.input_ids == output["input_ids"][0].tolist()
    assert encoded.media.tensors.keys() == tensors
    for name in tensors:
        torch.testing.assert_close(encoded.media.tensors[name], output[name], rtol=0, atol=0)


def test_images_are_encoded_as_the_processor_does_it(qwen: MediaProcessor) -> None:
    images = [noise(56, 28), noise(28, 84, 1)]
    text = f"<|im_start|>user\n{IMAGE}and{IMAGE}?"
    encoded = qwen.encode(text, images, [], prompt_ids=[1, 2], names=("a", "b"))
    output = qwen.processor(text=[text], images=images, return_tensors="pt")
    same(encoded, output, {"pixel_values", "image_grid_thw"})
    # 2 x 1 and 1 x 3 squares of 28 pixels
    assert encoded.media.tokens == {"image": 2 + 3}
    assert encoded.media.images == tuple(images)
    assert encoded.media.prompt_ids == (1, 2)
    assert encoded.media.names == ("a", "b")


def test_a_video_is_encoded_as_the_processor_does_it(qwen: MediaProcessor) -> None:
    video = frames(4)
    encoded = qwen.encode(f"{VIDEO} what?", [], [video])
    output = qwen.processor(
        text=[f"{VIDEO} what?"],
        videos=[torch.from_numpy(video.frames).permute(0, 3, 1, 2)],
        videos_kwargs={
            "do_sample_frames": False,
            "video_metadata": [
                VideoMetadata(total_num_frames=4, fps=4.0, frames_indices=[0, 1, 2, 3], duration=1)
            ],
        },
        return_tensors="pt",
    )
    # as forward of Qwen2-VL takes it; second_per_grid_ts is for Qwen2.5-VL
    same(encoded, output, {"pixel_values_videos", "video_grid_thw"})
    # 4 frames, two by two, of 2 x 1 squares
    assert encoded.media.tokens == {"video": 2 * 2}
    assert encoded.media.videos == (video,)


@pytest.mark.parametrize(
    ("family", "marker", "tokens"),
    [
        # all images become 32 x 32 pixels of patches of 8, two by two patches a token
        ("idefics3", "<image>", 4),
        ("smolvlm", "<image>", 4),
        ("gemma3", "<start_of_image>", 4),
        # 4 x 4 patches of the whole; of 56 x 56 pixels in a canvas of 32 x 64, 4 x 4 patches and
        # an end for each of 4 rows
        ("llava_onevision", "<image>", 16 + 4 * 5),
    ],
)
def test_other_families_are_encoded_as_their_processor_does_it(
    family: str, marker: str, tokens: int
) -> None:
    processor = processor_of(family)
    image, text = noise(56, 56), f"user {marker} what?"
    encoded = processor.encode(text, [image], [])
    output = processor.processor(
        text=[text], images=[image], return_tensors="pt", text_kwargs={"add_special_tokens": False}
    )
    assert encoded.input_ids == output["input_ids"][0].tolist()
    assert "pixel_values" in encoded.media.tensors
    for name, tensor in encoded.media.tensors.items():
        torch.testing.assert_close(tensor, output[name], rtol=0, atol=0)
    assert encoded.media.tokens == {"image": tokens}
    assert encoded.input_ids.count(processor.placeholders["image"]) == tokens


@pytest.mark.parametrize(
    ("text", "images", "videos"),
    [
        ("nothing", 1, 0),
        (f"{IMAGE}what is {IMAGE}?", 1, 0),
        (f"{IMAGE}{VIDEO}", 1, 0),
        (f"{VIDEO}{VIDEO}", 1, 1),
    ],
)
def test_placeholders_and_media_are_counted(
    qwen: MediaProcessor, text: str, images: int, videos: int
) -> None:
    refs = MediaRefs((noise(28, 28),) * images, (frames(2),) * videos)
    for act in (
        lambda: qwen.check(text, refs),
        lambda: qwen.read(text, refs, OPTIONS),
        lambda: qwen.encode(text, list(refs.images), list(refs.videos)),
    ):
        assert refused(act).reason == "placeholder count"


def test_a_grid_of_another_merge_size_is_refused(qwen: MediaProcessor) -> None:
    other = replace(qwen, merge_size=1)
    error = refused(lambda: other.encode(IMAGE, [noise(56, 28)], [], names=("cat.png",)))
    assert error.reason == "grid does not match"
    # 4 x 2 patches: two tokens where 2 x 2 are merged, else eight
    assert "cat.png: 2 image tokens in the text" in error.detail
    assert "makes 8 of the grid [[1, 2, 4]] (merge size 1)" in error.detail
    assert refused(lambda: other.encode(VIDEO, [], [frames(2)])).reason == "grid does not match"
    # unknown: nothing to compare with
    assert replace(qwen, merge_size=None).encode(IMAGE, [noise(56, 28)], []).media.tokens


def test_what_is_longer_than_the_context_is_refused(qwen: MediaProcessor) -> None:
    # 4 tokens and one for each of 6 bytes
    text = f"{IMAGE}abcdef"
    images = [noise(56, 56)]
    assert len(replace(qwen, context=10).encode(text, images, []).input_ids) == 10
    error = refused(lambda: replace(qwen, context=9).encode(text, images, [], names=("a.png",)))
    assert error.reason == "too long"
    assert error.detail == "a.png: 10 tokens with the text, and the model reads 9"
    assert "media.max_pixels" in error.remedy


@pytest.mark.parametrize("family", ["llava", "gemma3", "idefics3"])
def test_a_video_for_a_family_that_reads_none_is_refused(family: str) -> None:
    processor = processor_of(family)
    error = refused(lambda: processor.check("what?", MediaRefs(videos=("film.mp4",))))
    assert error.reason == "no videos"
    assert "film.mp4" in error.detail
    assert refused(lambda: processor.encode("what?", [], [frames(2)])).reason == "no videos"


def test_smolvlm_reads_a_video_or_images_but_not_both() -> None:
    processor = processor_of("smolvlm")
    error = refused(lambda: processor.encode("<image><video>", [noise(32, 32)], [frames(2)]))
    assert error.reason == "images beside a video"
    # 4 tokens for each of 4 frames
    encoded = processor.encode("<video> what?", [], [frames(4, 32, 32)])
    assert encoded.media.tokens == {"image": 4 * 4}
    assert encoded.media.tensors["pixel_values"].shape[:2] == (1, 4)


def test_reading_gives_what_encoding_of_the_same_pixels_gives(
    qwen: MediaProcessor, tmp_path: Path
) -> None:
    image = noise(56, 28)
    path = tmp_path / "cat.png"
    image.save(path)
    clip = frames(4)
    refs = MediaRefs((str(path),), (clip.frames,))
    read = qwen.read(f"{IMAGE}{VIDEO}", refs, MediaOptions(fps=4.0), prompt_ids=[5])
    direct = qwen.encode(f"{IMAGE}{VIDEO}", [image], [clip])
    assert read.input_ids == direct.input_ids
    for name, tensor in direct.media.tensors.items():
        assert torch.equal(read.media.tensors[name], tensor)
    assert read.media.names == (str(path), "ndarray")
    assert read.media.prompt_ids == (5,)
    # one in no file is called by its pixels, as are those that episodes show
    unnamed = qwen.read(IMAGE, MediaRefs((image,)), MediaOptions()).media.names
    assert unnamed == (image_name(image),)


def test_the_specimen_is_the_same_every_time_and_shows_one_image(qwen: MediaProcessor) -> None:
    tokenizer = build_vlm("qwen2_vl").tokenizer
    first, again = (qwen.specimen(tokenizer, size=56) for _ in range(2))
    assert first.input_ids == again.input_ids
    assert torch.equal(first.media.tensors["pixel_values"], again.media.tensors["pixel_values"])
    assert first.media.tokens == {"image": 4}
    assert first.media.prompt_ids.count(qwen.placeholders["image"]) == 1
    assert len(first.input_ids) == len(first.media.prompt_ids) + 3


def test_refs_are_equal_where_the_same_files_or_bytes_are_named() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    keys = [
        MediaRefs(("a.png",)),
        MediaRefs(({"bytes": None, "path": "a.png"},)),
        MediaRefs((b"12",)),
        MediaRefs(({"bytes": b"12", "path": "a.png"},)),
        MediaRefs((pixels,)),
        MediaRefs((Image.fromarray(pixels),)),
        MediaRefs(("b.png",)),
        MediaRefs((b"1", b"2")),
        MediaRefs((), ("a.png",)),
    ]
    groups = [keys[0:2], keys[2:4], keys[4:6], keys[6:7], keys[7:8]]
    found = [{refs.key for refs in group} for group in groups]
    assert all(len(same) == 1 for same in found)
    assert len(set().union(*found)) == 5
    both = MediaRefs(("a.png",)) + MediaRefs((b"123",), (["1.png", "2.png"],))
    assert len(both) == 3
    assert both.names == ("a.png", "3 bytes", "2 frames")
    assert not MediaRefs()


def test_palettes_tell_equal_indices_apart() -> None:
    red, blue = (Image.new("P", (2, 2)) for _ in range(2))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    assert MediaRefs((red,)).key != MediaRefs((blue,)).key
    assert MediaRefs((red,)).key == MediaRefs((red.copy(),)).key


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_film_of_one_frame_lasts_as_long_as_it_says(family: str) -> None:
    processor = processor_of(family)
    still = frames(1, 128, 128)
    encoded = processor.encode(VIDEO, [], [replace(still, fps=0.1)])
    assert encoded.media.tensors["video_grid_thw"][0, 0] == 1
    # a patch of two frames, which both are the one of 10 s
    if family == "qwen2_5_vl":
        assert encoded.media.tensors["second_per_grid_ts"].tolist() == [10.0]


def test_the_key_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    large = bytes(range(256)) * 1000
    for content in (b"12", large):
        paths = [tmp_path / name for name in ("a.png", "b.png")]
        for path in paths:
            path.write_bytes(content)
        forms: list[Any] = [*paths, str(paths[0]), f"file://{paths[1]}", content]
        assert len({MediaRefs((form,)).key for form in forms}) == 1
        part = MediaPart(str(paths[0]), PartOptions(max_pixels=100))
        assert MediaRefs((part,)).key != MediaRefs((content,)).key
        paths[0].write_bytes(content[:-1] + b"3x")
        assert MediaRefs((paths[0],)).key != MediaRefs((content,)).key


@pytest.mark.parametrize(
    ("family", "written"),
    [("qwen2_vl", "<|vision_start|><|image_pad|><|vision_end|>"), ("llava", "<image>")],
)
def test_the_written_form_of_an_image_is_what_the_template_makes_of_it(
    family: str, written: str
) -> None:
    assert build_vlm(family).processor.written["image"] == written
