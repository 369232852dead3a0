"""From files, bytes and arrays to samples of sound."""

from __future__ import annotations

import importlib
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lrlhf.media.decode import MediaError, explained, local_content
from lrlhf.media.refs import media_name

_SHORTEST = 0.1
"""Seconds. Of less, encoders make no token, or one that stands for no sound."""
_CUT_OFF = re.compile(r"^ ?(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
"""How libsndfile, which reads what is left, tells of a WAV or AIFF file that ends early."""
_STREAMED = 0x7FFFF000
"""Programs that do not know how long a sound will be write so many bytes or more."""
_PCM = ("uint8", "int8", "int16", "int32")
"""Types of integers whose width tells how loud the loudest sample is."""
_LOUDEST = 10.0
_MOST_SAMPLES = 2**28
"""Of all channels as they are read, and of one as the most demanding processor hears it."""
_FINEST = 48_000
"""Samples per second of that processor."""
_FORMATS = (
    "WAV", "WAVEX", "W64", "RF64", "AIFF", "AU", "FLAC", "OGG", "MP3", "CAF", "NIST", "VOC",
)  # fmt: skip
"""What libsndfile may read; of others one (SD2) looks into a second file."""
_TO_FLOATS = "give floats between -1 and 1 (samples of 16 bits divided by 32768), or an int16 array"
_FORM = "a path, bytes, or {'array': samples, 'sampling_rate': rate}"


@dataclass(frozen=True, eq=False)
class Audio:
    """Sound with one channel.

    Args:
        samples: float32 `[N]`, between -1 and 1.
        sampling_rate: Samples per second.
    """

    samples: NDArray[np.float32]
    sampling_rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.sampling_rate

    def wav(self) -> bytes:
        """Return a WAV file with the samples as they are.

        Raises:
            ImportError: soundfile is missing.
        """
        file = io.BytesIO()
        _package("soundfile").write(
            file, self.samples, self.sampling_rate, format="WAV", subtype="FLOAT"
        )
        return file.getvalue()

    def resampled(self, sampling_rate: int) -> Audio:
        """Return the same sound with another number of samples per second (soxr, high quality)."""
        if sampling_rate == self.sampling_rate:
            return self
        soxr = _package("soxr")
        with explained("broken audio", f"a sound of {self.sampling_rate} samples per second"):
            samples = soxr.resample(self.samples, self.sampling_rate, sampling_rate)
        return Audio(samples, sampling_rate)


def read_audio(value: Any, max_seconds: float | None = None) -> Audio:
    """Read a sound; of several channels, their mean.

    Args:
        value: A path, bytes or ``data:`` URI of a file (WAV, FLAC, OGG, MP3 and others that
            libsndfile knows), ``{"bytes": …, "path": …}``, or ``{"array": …, "sampling_rate": …}``
            `[N]` or `[channels, N]`: floats between -1 and 1, or integers of 8, 16 or 32 bits.
        max_seconds: Longer ones are refused, before they are decoded; None: none is too long.

    Raises:
        MediaError: It is missing, broken, too short or too long, or of another type.
        ImportError: It is a file, and soundfile is not installed.
    """
    name = media_name(value)
    audio = value if isinstance(value, Audio) else _in_memory(value, name)
    if audio is None:
        with explained("broken audio", name), _opened(value, name) as file:
            _check_seconds(_seconds(file, name), max_seconds, name)
            samples = file.read(dtype="float32", always_2d=True)
            if len(samples) != file.frames:
                raise MediaError(
                    "broken audio", f"{name} ends after {len(samples)} of {file.frames} samples"
                )
            audio = Audio(samples.mean(axis=1), file.samplerate)
    _check_seconds(audio.seconds, max_seconds, name)
    if not np.isfinite(audio.samples).all():
        raise MediaError("broken audio", f"{name} has samples that are no finite numbers")
    _check_range(audio, name)
    return audio


def check_audio(value: Any, max_seconds: float | None = None) -> None:
    """Look at the head of a sound's file, and not at its samples; see `read_audio`.

    Raises:
        MediaError: It is no sound, or too short or too long.
    """
    name = media_name(value)
    audio = value if isinstance(value, Audio) else _in_memory(value, name)
    if audio is None:
        with explained("broken audio", name), _opened(value, name) as file:
            seconds = _seconds(file, name)
    else:
        _check_range(audio, name)
        seconds = audio.seconds
    _check_seconds(seconds, max_seconds, name)


def _in_memory(value: Any, name: str) -> Audio | None:
    """Read what holds samples; None: it names or holds a file."""
    if not isinstance(value, Mapping) or value.get("array") is None:
        return None
    rate = value.get("sampling_rate")
    number = int | float | np.integer | np.floating
    if isinstance(rate, bool) or not isinstance(rate, number) or not 1 <= rate < math.inf:
        raise MediaError("wrong type", f"{name}: sampling_rate is {rate!r}, not samples per second")
    array = value["array"]
    samples = array.numpy(force=True) if isinstance(array, Tensor) else _array(array, name)
    if samples.ndim == 2 and samples.shape[0] > samples.shape[1]:
        raise MediaError(
            "wrong type",
            f"{name}: the array is {list(samples.shape)}, and the channels come first",
            remedy="transpose it to [channels, samples]",
        )
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise MediaError(
            "wrong type",
            f"{name}: the array is {samples.dtype} {list(samples.shape)}, not numbers [samples] or "
            "[channels, samples]",
        )
    if samples.dtype.kind in "iu":  # of so many bits; those of 8 have no sign
        if samples.dtype.name not in _PCM:  # as lists of integers become
            raise MediaError(
                "wrong type",
                f"{name}: the array is {samples.dtype}, which does not tell how loud its samples "
                "are",
                remedy=_TO_FLOATS,
            )
        middle = 128 if samples.dtype == np.uint8 else 0
        samples = (samples.astype(np.float64) - middle) / (np.iinfo(samples.dtype).max - middle)
    mono = samples if samples.ndim == 1 else samples.mean(axis=0)
    return Audio(np.ascontiguousarray(mono, dtype=np.float32), int(rate))


def _check_range(audio: Audio, name: str) -> None:
    """Refuse integers that were made floats; what was mixed or resampled is little above 1."""
    peak = float(np.abs(audio.samples).max(initial=0))
    if peak > _LOUDEST:
        raise MediaError(
            "wrong type",
            f"{name} has samples up to {peak:g}, and floats are between -1 and 1",
            remedy=_TO_FLOATS,
        )


def _array(value: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # lists of several lengths
        raise MediaError("wrong type", f"{name}: the array is no array: {error}") from error


def _opened(value: Any, name: str) -> Any:
    content = local_content(value, name)
    if not isinstance(content, Path | bytes):
        raise MediaError("wrong type", f"an audio is {_FORM}, not {type(content).__name__}")
    file = _package("soundfile").SoundFile(
        str(content) if isinstance(content, Path) else io.BytesIO(content)
    )
    if file.format not in _FORMATS:
        file.close()
        raise MediaError(
            "broken audio", f"{name} is of the format {file.format}; read are {', '.join(_FORMATS)}"
        )
    return file


def _seconds(file: Any, name: str) -> float:
    """Return how long a file says that it is, if it has as much as it says, and not too much."""
    if file.frames * file.channels > _MOST_SAMPLES:
        raise MediaError(
            "audio too long",
            f"{name} has {file.frames} samples of {file.channels} channels; {_MOST_SAMPLES} in all "
            "is the most",
            remedy="cut such files into parts beforehand",
        )
    match = _CUT_OFF.search(file.extra_info)
    if match is not None and int(match[2]) < int(match[1]) < _STREAMED:
        raise MediaError("broken audio", f"{name} has {match[2]} of {match[1]} bytes of sound")
    seconds: float = file.frames / file.samplerate
    return seconds


def _check_seconds(seconds: float, most: float | None, name: str) -> None:
    if seconds < _SHORTEST:
        raise MediaError(
            "audio too short",
            f"{name} has {seconds:.3g} s of sound; {_SHORTEST} s is the least",
            remedy="leave such rows out",
        )
    limit = _MOST_SAMPLES / _FINEST if most is None else most
    if seconds > limit:
        heard = f"{limit:.0f} s is the most" if most is None else f"the model hears {most:g} s"
        raise MediaError(
            "audio too long",
            f"{name} has {seconds:.4g} s of sound, and {heard}",
            remedy="cut such files into parts beforehand",
        )


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"reading audio needs {name}: pip install 'lrlhf[audio]'") from error
