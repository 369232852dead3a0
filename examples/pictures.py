"""Small visual tasks from the pictures that scikit-image and scikit-learn bring along.

    pip install scikit-image scikit-learn
    lrlhf fit --config lrlhf:rloo_vl --config lrlhf:cpu/rloo_vl

Sources of your own look like this: a subclass of `lrlhf.datamodules.Source` with a name and rows,
which a config names by its class path (`lrlhf.examples.pictures.Digits`).
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from lrlhf.datamodules import Source

Part = Literal["train", "validation"]
Distortion = Literal["blur", "noise", "jpeg", "contrast"]
Pixels = NDArray[np.uint8]
Row = dict[str, Any]

LEVELS: dict[Distortion, tuple[float, ...]] = {
    "blur": (0.0, 0.7, 1.1, 1.7, 2.6),
    "noise": (0.0, 8.0, 18.0, 34.0, 60.0),
    "jpeg": (0.0, 50.0, 25.0, 12.0, 5.0),
    "contrast": (1.0, 0.75, 0.55, 0.4, 0.28),
}
"""Strength of each distortion at level 0, which leaves a picture alone, to 4: radius of a Gaussian
in pixels, standard deviation in grey values, JPEG quality, factor around the mean colour."""
_BLURS: tuple[Distortion, ...] = ("blur", "jpeg")

PHOTOS = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "china",
    "coffee",
    "coins",
    "flower",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "page",
    "retina",
    "rocket",
    "stereo_motorcycle",
    "text",
)
HELD_OUT = ("chelsea", "china", "coffee", "flower")
_DIGITS_HELD_OUT = 297
_DULL = 12.0
"""Grey values: a piece of a photo that varies less shows nothing, such as an empty sky."""


class DistortedPhotos(Source):
    """Pairs of one piece of a photograph at two levels of a distortion; which is better?

    The label ``fidelity`` says which is less distorted, by whatever it is; ``sharpness`` which is
    sharper, and is left out where the distortion is noise or contrast. Equal levels make a tie.

    Args:
        part: ``train``, or ``validation``, which takes photographs that no training pair is from.
        pairs: Number of them.
        kinds: Distortions to draw from.
        pixels: Width and height.
        ties: Share of pairs with equal levels.
        held_out: Photographs of the validation part.
        seed: Another seed gives other pairs.
    """

    def __init__(
        self,
        part: Part = "train",
        *,
        pairs: int = 1000,
        kinds: Sequence[Distortion] = get_args(Distortion),
        pixels: int = 64,
        ties: float = 0.1,
        held_out: Sequence[str] = HELD_OUT,
        seed: int = 0,
    ) -> None:
        if not kinds or not {*kinds} <= LEVELS.keys():
            raise ValueError(f"kinds={list(kinds)!r}: choose from {', '.join(LEVELS)}")
        if not held_out or not {*held_out} < {*PHOTOS}:
            raise ValueError(f"held_out={list(held_out)!r}: choose some of {', '.join(PHOTOS)}")
        if pairs < 1 or pixels < 8 or not 0 <= ties <= 1:
            raise ValueError(
                f"pairs={pairs}, pixels={pixels}, ties={ties}: there is at least 1 pair, of at "
                "least 8 pixels, and the share of ties lies in [0, 1]"
            )
        self._part = part
        self._pairs = pairs
        self._kinds = tuple(kinds)
        self._pixels = pixels
        self._ties = ties
        held = [name for name in PHOTOS if name in held_out]
        rest = [name for name in PHOTOS if name not in held_out]
        self._photos = held if part == "validation" else rest
        self._seed = seed

    @property
    def name(self) -> str:
        return f"distorted_photos:{'+'.join(self._kinds)}"

    def rows(self) -> Iterable[Row]:
        photos = {name: _photo(name) for name in self._photos}
        part = get_args(Part).index(self._part)
        for number in range(self._pairs):
            yield self._row(photos, np.random.default_rng([self._seed, part, number]))

    def _row(self, photos: dict[str, Image.Image], numbers: np.random.Generator) -> Row:
        photo = str(numbers.choice(self._photos))
        kind: Distortion = self._kinds[int(numbers.integers(len(self._kinds)))]
        first, second = (int(level) for level in numbers.permutation(5)[:2])
        if numbers.random() < self._ties:
            second = first
        piece = _piece(photos[photo], self._pixels, numbers)
        if self._part == "train":
            piece = _varied(piece, numbers)
        label = "C" if first == second else "A" if first < second else "B"
        return {
            "prompt": "picture",
            "image_0": distorted(piece, kind, first, numbers),
            "image_1": distorted(piece, kind, second, numbers),
            "fidelity": label,
            **({"sharpness": label} if kind in _BLURS else {}),
            "photo": photo,
            "kind": kind,
            "level_0": first,
            "level_1": second,
        }


class Digits(Source):
    """Handwritten digits, and which one each of them is.

    Rows have the chat ``prompt`` with one image, and ``answer``, the digit; or with ``answered``
    the whole dialogue in ``messages``, to begin with.

    Args:
        part: ``train`` (1,500 digits), or ``validation`` (297).
        size: Take only so many, the first; None: all.
        pixels: Width and height, a multiple of 8.
        question: What is asked.
        answered: Give whole dialogues.

    Reference:
        Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning
        Repository (CC BY 4.0), as scikit-learn brings it
    """

    def __init__(
        self,
        part: Part = "train",
        *,
        size: int | None = None,
        pixels: int = 64,
        question: str = "what digit?",
        answered: bool = False,
    ) -> None:
        if pixels < 8 or pixels % 8:
            raise ValueError(f"pixels={pixels}: give a multiple of 8, the pixels of a digit")
        if size is not None and size < 1:
            raise ValueError(f"size={size}: give at least 1")
        self._part = part
        self._size = size
        self._pixels = pixels
        self._question = question
        self._answered = answered

    @property
    def name(self) -> str:
        return "digits"

    def rows(self) -> Iterable[Row]:
        data = _package("sklearn.datasets").load_digits()
        # the file has its writers in blocks
        order = np.random.default_rng(0).permutation(len(data.target))
        held, rest = order[:_DIGITS_HELD_OUT], order[_DIGITS_HELD_OUT:]
        chosen = held if self._part == "validation" else rest
        for index in chosen[: self._size]:
            pixels = np.rint(data.images[index] * (255 / 16)).astype(np.uint8)
            image = np.kron(pixels, np.ones((self._pixels // 8,) * 2, dtype=np.uint8))
            yield self._row(image, str(int(data.target[index])))

    def _row(self, image: Pixels, answer: str) -> Row:
        content = [{"type": "image"}, {"type": "text", "text": self._question}]
        asked = {"role": "user", "content": content}
        if self._answered:
            return {"messages": [asked, {"role": "assistant", "content": answer}], "image": image}
        return {"prompt": [asked], "image": image, "answer": answer}


def distorted(
    picture: Image.Image, kind: Distortion, level: int, numbers: np.random.Generator
) -> Pixels:
    """Distort a picture.

    Args:
        picture: RGB.
        kind: How.
        level: 0, not at all, to 4; see `LEVELS`.
        numbers: Where noise comes from.

    Returns:
        uint8 `[H, W, 3]`.
    """
    strength = LEVELS[kind][level]
    if level == 0:
        return np.asarray(picture)
    if kind == "blur":
        return np.asarray(picture.filter(ImageFilter.GaussianBlur(strength)))
    if kind == "jpeg":
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=int(strength))
        return np.asarray(Image.open(buffer).convert("RGB"))
    pixels = np.asarray(picture).astype(np.float64)
    if kind == "noise":
        return _bytes(pixels + numbers.normal(0.0, strength, pixels.shape))
    mean = pixels.mean(axis=(0, 1), keepdims=True)
    return _bytes(mean + strength * (pixels - mean))


def _piece(photo: Image.Image, size: int, numbers: np.random.Generator) -> Image.Image:
    """Cut a square with something in it out of a photograph, and scale it to ``size``."""
    largest = min(256, *photo.size)
    while True:
        side = int(numbers.integers(min(size, largest), largest + 1))
        left, top = (int(numbers.integers(length - side + 1)) for length in photo.size)
        cut = photo.crop((left, top, left + side, top + side))
        piece = cut.resize((size, size), Image.Resampling.BICUBIC)
        if np.asarray(piece.convert("L"), dtype=np.float64).std() >= _DULL:
            break
    return piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if numbers.integers(2) else piece


def _varied(piece: Image.Image, numbers: np.random.Generator) -> Image.Image:
    """Turn a piece, change its colours and brightness: fewer photographs look like more."""
    pixels = np.rot90(np.asarray(piece), int(numbers.integers(4))) / 255.0
    pixels = pixels[..., numbers.permutation(3)]
    bent = pixels ** np.exp(numbers.uniform(-0.4, 0.4)) * numbers.uniform(0.8, 1.0)
    return Image.fromarray(_bytes(bent * 255.0))


def _bytes(pixels: NDArray[np.float64]) -> Pixels:
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def _photo(name: str) -> Image.Image:
    if name in ("china", "flower"):
        samples = _package("sklearn.datasets").load_sample_images().images
        return Image.fromarray(samples[("china", "flower").index(name)])
    load: Callable[[], Any] = getattr(_package("skimage.data"), name)
    loaded = load()
    pixels = loaded[0] if isinstance(loaded, tuple) else loaded
    photo = Image.fromarray(pixels).convert("RGB")
    # the photograph of a retina is mostly larger than its structures
    return photo.resize((700, 700), Image.Resampling.BICUBIC) if name == "retina" else photo


def _package(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"no {module}, whose pictures these are: pip install scikit-image scikit-learn"
        ) from error
