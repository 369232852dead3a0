"""Small visual tasks from the pictures inside packages."""

import itertools
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from skimage.metrics import structural_similarity
from sklearn.datasets import load_digits

from lrlhf.datamodules import Digits, DistortedPhotos
from lrlhf.datamodules.datasets.pictures import HELD_OUT, LEVELS, PHOTOS, distorted


def rows(part: str = "train", **options):
    return list(DistortedPhotos(part, **options).rows())


def test_the_label_says_which_of_two_is_less_distorted() -> None:
    found = rows(pairs=60, ties=0.3)
    for row in found:
        first, second = row["level_0"], row["level_1"]
        expected = "A" if first < second else "B" if second < first else "C"
        assert row["fidelity"] == expected
        if row["kind"] in ("blur", "jpeg"):
            assert row["sharpness"] == expected
        else:
            assert "sharpness" not in row
    counts = Counter(row["fidelity"] for row in found)
    assert all(counts[label] > 8 for label in "ABC")
    assert {row["kind"] for row in found} == set(LEVELS)


def test_pictures_are_of_the_asked_size_and_of_another_content_each_time() -> None:
    found = rows(pairs=10, pixels=32)
    images = [row[name] for row in found for name in ("image_0", "image_1")]
    assert {image.shape for image in images} == {(32, 32, 3)}
    assert {image.dtype for image in images} == {np.dtype(np.uint8)}
    assert len({row["image_0"].tobytes() for row in found}) == 10


def test_validation_shows_photographs_that_no_training_pair_is_from() -> None:
    train = {row["photo"] for row in rows(pairs=200)}
    held = {row["photo"] for row in rows("validation", pairs=60)}
    assert held == set(HELD_OUT)
    assert not train & held
    assert train <= set(PHOTOS)
    own = {row["photo"] for row in rows("validation", pairs=20, held_out=["moon", "coins"])}
    assert own == {"moon", "coins"}


def test_the_same_seed_gives_the_same_pairs_and_another_one_others() -> None:
    def content(**options):
        return [
            (row["image_0"].tobytes(), row["image_1"].tobytes(), row["fidelity"])
            for row in rows(pairs=5, **options)
        ]

    assert content() == content()
    assert content() != content(seed=1)
    # a pair does not depend on how many there are
    assert rows(pairs=5)[3]["image_0"].tobytes() == rows(pairs=9)[3]["image_0"].tobytes()


@pytest.mark.parametrize("kind", LEVELS)
def test_each_level_leaves_less_of_the_picture(kind) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (16, 16, 3), dtype=np.uint8)
    smooth = Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC)
    original = np.asarray(smooth)
    likeness = [
        structural_similarity(
            original,
            distorted(smooth, kind, level, np.random.default_rng(0)),
            channel_axis=2,
        )
        for level in range(5)
    ]
    assert likeness[0] == 1.0
    assert all(more > less for more, less in itertools.pairwise(likeness))


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"kinds": ["fog"]}, "choose from blur, noise, jpeg, contrast"),
        ({"kinds": []}, "choose from blur"),
        ({"held_out": ["dog"]}, "choose some of astronaut"),
        ({"held_out": list(PHOTOS)}, "choose some of"),
        ({"pairs": 0}, "pairs=0"),
        ({"ties": 2.0}, "ties=2.0"),
    ],
)
def test_options_that_make_no_pairs_are_refused(options, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        DistortedPhotos(**options)


def test_digits_are_asked_about_with_their_picture() -> None:
    train, held = list(Digits().rows()), list(Digits("validation").rows())
    assert len(train) == 1500
    assert len(held) == 297
    pictures = [row["image"].tobytes() for row in train + held]
    assert len(set(pictures)) > 1780  # a few people wrote alike
    data = load_digits()
    known: dict[bytes, set[str]] = {}
    for pixels, target in zip(data.images, data.target, strict=True):
        shown = (pixels / 16 * 255).round().astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)
        known.setdefault(shown.tobytes(), set()).add(str(target))
    for row in train[:50] + held[:50]:
        assert row["answer"] in known[row["image"].tobytes()]
        (turn,) = row["prompt"]
        assert turn["role"] == "user"
        assert [part["type"] for part in turn["content"]] == ["image", "text"]


def test_digits_come_as_dialogues_and_in_other_sizes_too() -> None:
    (row,) = Digits(size=1, pixels=32, answered=True, question="which?").rows()
    (plain,) = Digits(size=1, pixels=32).rows()
    assert row["image"].shape == (32, 32)
    assert row["messages"][0]["content"][1]["text"] == "which?"
    assert row["messages"][1] == {"role": "assistant", "content": plain["answer"]}
    for wrong in ({"pixels": 12}, {"size": 0}):
        with pytest.raises(ValueError, match=r"pixels=12|size=0"):
            Digits(**wrong)
