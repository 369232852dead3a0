"""Sounds from files, bytes and arrays, and what of them is refused."""

import base64
import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from lrlhf.media import Audio, MediaError, MediaOptions, MediaRefs, audio, read_audio
from lrlhf.media.audio import check_audio
from tests.hearing import RATE, build_hearing, tone

TONE = tone(440, 0.25)


def wav(samples: NDArray[Any] = TONE, rate: int = RATE, form: str = "WAV") -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=form)
    return stream.getvalue()


def frequency(audio: Audio) -> float:
    """The loudest frequency, by the peak of the spectrum."""
    spectrum = np.abs(np.fft.rfft(audio.samples * np.hanning(len(audio.samples))))
    return float(spectrum.argmax() * audio.sampling_rate / len(audio.samples))


def refused(value: Any, **options: Any) -> MediaError:
    with pytest.raises(MediaError) as caught:
        read_audio(value, **options)
    return caught.value


def test_a_sound_is_the_same_from_everything_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav())
    text = base64.b64encode(wav()).decode()
    listed = {"array": TONE.tolist(), "sampling_rate": RATE}
    values = [
        path,
        str(path),
        f"file://{path}",
        wav(),
        f"data:audio/wav;base64,{text}",
        {"bytes": wav(), "path": "another.wav"},
        {"bytes": None, "path": str(path)},
        {"array": TONE, "sampling_rate": RATE, "path": None},
        listed,
        {"array": torch.from_numpy(TONE), "sampling_rate": float(RATE)},
        {"array": (TONE * 32767).astype(np.int16), "sampling_rate": RATE},
    ]
    for value in values:
        audio = read_audio(value)
        assert audio.sampling_rate == RATE
        assert audio.samples.dtype == np.float32
        np.testing.assert_allclose(audio.samples, TONE, atol=1e-4)  # 16 bits: 3e-5


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_compressed_files_are_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form.lower()}"
    path.write_bytes(wav(tone(440, 0.5), form=form))
    for value in (path, path.read_bytes()):
        audio = read_audio(value)
        assert audio.seconds == pytest.approx(0.5, abs=0.1)
        assert frequency(audio) == pytest.approx(440, abs=5)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_resampling_keeps_pitch_length_and_loudness(rate: int) -> None:
    audio = Audio(tone(1000, 1.0, rate=rate), rate).resampled(RATE)
    assert (audio.sampling_rate, len(audio.samples)) == (RATE, RATE)
    # the sampled sine itself, away from the ends, where a filter has too few samples
    middle = slice(2000, -2000)
    np.testing.assert_allclose(audio.samples[middle], tone(1000, 1.0)[middle], atol=1e-3)


def test_what_the_lower_rate_cannot_hold_does_not_come_back_as_another_pitch() -> None:
    # sampled at 16 kHz without a filter, 15 kHz would sound as 1 kHz
    audio = Audio(tone(15_000, 1.0, rate=48_000), 48_000).resampled(RATE)
    assert np.abs(audio.samples[2000:-2000]).max() < 1e-3


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(300), np.zeros_like(tone(300))
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([left, right], axis=1), RATE, subtype="FLOAT")
    held = {"array": np.stack([left, right]), "sampling_rate": RATE}
    for value in (path, held):
        np.testing.assert_allclose(read_audio(value).samples, left / 2, atol=1e-7)


def test_eight_bits_have_their_silence_at_128() -> None:
    array = np.full(RATE, 128, dtype=np.uint8)
    array[0] = 255
    samples = read_audio({"array": array, "sampling_rate": RATE}).samples
    assert samples[0] == 1
    assert not samples[1:].any()


@pytest.mark.parametrize(
    ("value", "reason", "detail"),
    [
        ("/nowhere/a.wav", "missing file", "there is no file /nowhere/a.wav"),
        ("https://example.org/a.wav", "remote file", "is an address"),
        (b"", "broken audio", "0 bytes"),
        (b"<html>404</html>", "broken audio", "16 bytes"),
        (wav()[:30], "broken audio", "30 bytes"),
        (wav(form="FLAC")[:200], "broken audio", "200 bytes"),
        ("data:audio/wav;base64,####", "broken audio", "data:audio/wav"),
        ("data:audio/wav,hello", "broken audio", "not base64"),
        (TONE, "wrong type", "{'array': samples, 'sampling_rate': rate}, not ndarray"),
        (7, "wrong type", "not int"),
        (None, "wrong type", "not NoneType"),
        ({"array": TONE}, "wrong type", "sampling_rate is None"),
        ({"array": TONE, "sampling_rate": 0}, "wrong type", "sampling_rate is 0"),
        ({"array": TONE, "sampling_rate": True}, "wrong type", "sampling_rate is True"),
        ({"array": TONE, "sampling_rate": math.inf}, "wrong type", "sampling_rate is inf"),
        ({"array": TONE, "sampling_rate": math.nan}, "wrong type", "sampling_rate is nan"),
        ({"array": [0, 9000] * 2000, "sampling_rate": RATE}, "wrong type", "array is int64"),
        ({"array": np.ones(4000, "uint16"), "sampling_rate": RATE}, "wrong type", "is uint16"),
        ({"array": TONE * 2e4, "sampling_rate": RATE}, "wrong type", "floats are between -1 and 1"),
        (Audio(TONE * 2e4, RATE), "wrong type", "floats are between -1 and 1"),
        ({"array": [["a"]], "sampling_rate": RATE}, "wrong type", "not numbers"),
        ({"array": [[1.0], [1.0, 2.0]], "sampling_rate": RATE}, "wrong type", "no array"),
        ({"array": np.ones((9, 2)), "sampling_rate": RATE}, "wrong type", "channels come first"),
        ({"array": np.ones((1, 2, 3)), "sampling_rate": RATE}, "wrong type", "[1, 2, 3]"),
        ({"array": [], "sampling_rate": RATE}, "audio too short", "0 s of sound"),
        (wav(TONE[:1500]), "audio too short", "0.0938 s of sound; 0.1 s is the least"),
        ({"array": TONE * np.nan, "sampling_rate": RATE}, "broken audio", "no finite numbers"),
    ],
)
def test_what_cannot_be_used_is_told(value: Any, reason: str, detail: str) -> None:
    found = refused(value)
    assert found.reason == reason
    assert detail in found.detail
    assert "\n" not in str(found)


@pytest.mark.parametrize("array", [TONE * 2e4, [0, 9000] * 2000], ids=["floats", "integers"])
def test_samples_of_unknown_loudness_are_told_before_training(array: Any) -> None:
    with pytest.raises(MediaError) as caught:
        check_audio({"array": array, "sampling_rate": RATE})
    assert "divided by 32768" in caught.value.remedy


def test_integers_are_as_loud_as_their_width_says() -> None:
    for dtype, half in (("int8", 64), ("int16", 16384), (">i2", 16384), ("int32", 2**30)):
        held = {"array": np.full(RATE, half, dtype), "sampling_rate": RATE}
        np.testing.assert_allclose(read_audio(held).samples, 0.5, atol=5e-3)
    loud = read_audio({"array": np.full(RATE, 1.5), "sampling_rate": RATE})  # as mixing makes it
    assert loud.samples.max() == 1.5


def test_a_sound_that_is_too_long_is_refused_by_its_head() -> None:
    held = {"array": TONE, "sampling_rate": RATE}
    for value in (wav(), held, Audio(TONE, RATE)):
        assert refused(value, max_seconds=0.2).reason == "audio too long"
        with pytest.raises(MediaError, match=r"has 0.25 s of sound, and the model hears 0.2 s"):
            check_audio(value, 0.2)
        check_audio(value, 0.25)
        assert read_audio(value, 0.25).seconds == 0.25


@pytest.mark.parametrize("form", ["WAV", "AIFF", "FLAC", "MP3"])
def test_a_file_that_ends_early_is_broken_and_not_a_shorter_sound(form: str) -> None:
    whole = wav(tone(440, 1.0), form=form)
    for share in (0.5, 0.9):
        assert refused(whole[: int(share * len(whole))]).reason == "broken audio"


def test_a_file_that_was_written_as_a_stream_does_not_say_how_long_it_is() -> None:
    content = bytearray(wav())
    for place in (4, content.index(b"data") + 4):
        content[place : place + 4] = b"\xff\xff\xff\xff"
    assert read_audio(bytes(content)).seconds == 0.25


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ImportError, match=r"needs soundfile: pip install 'lrlhf\[audio\]'"):
        read_audio(wav())
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ImportError, match=r"needs soxr: pip install 'lrlhf\[audio\]'"):
        Audio(TONE, 8000).resampled(RATE)


def test_the_digest_tells_sounds_apart() -> None:
    def key(array: NDArray[Any], rate: int) -> str:
        held = {"bytes": None, "path": "a.wav", "array": array, "sampling_rate": rate}
        return MediaRefs(audios=(held,)).key

    assert key(TONE, RATE) == key(TONE.copy(), RATE)
    assert len({key(TONE, RATE), key(TONE, 8000), key(-TONE, RATE)}) == 3
    assert MediaRefs(audios=("/a.wav",)).names == ("/a.wav",)


# ---- with the processor of a model


TEXT = "<|audio_bos|><|AUDIO|><|audio_eos|> what?"


def encoding(text: str, refs: MediaRefs) -> MediaError:
    processor = build_hearing().processor
    with pytest.raises(MediaError) as caught:
        processor.read(text, refs, MediaOptions())
    with pytest.raises(MediaError) as checked:
        processor.check(text, refs)
    assert checked.value.reason == caught.value.reason
    return caught.value


def test_the_processor_is_given_its_own_sampling_rate() -> None:
    processor = build_hearing().processor
    assert processor.max_seconds == 1
    own = processor.read(TEXT, MediaRefs(audios=(wav(TONE),)), MediaOptions())
    other = processor.read(
        TEXT, MediaRefs(audios=(wav(tone(440, 0.25, rate=48_000), 48_000),)), MediaOptions()
    )
    assert own.input_ids == other.input_ids
    # 4,000 samples are 25 frames of 10 ms; two convolutions with a stride of two leave 6 of them
    assert own.media.tokens == other.media.tokens == {"audio": 6}
    for media in (own.media, other.media):
        assert [(len(a.samples), a.sampling_rate) for a in media.audios] == [(4000, RATE)]
    first, second = (one.media.tensors["input_features"] for one in (own, other))
    # the loudest band of every frame, away from the ends
    assert torch.equal(first[0, :, 5:20].argmax(0), second[0, :, 5:20].argmax(0))


def test_counts_lengths_and_kinds_that_do_not_fit_are_told() -> None:
    two = encoding(TEXT, MediaRefs(audios=(wav(), wav())))
    assert two.reason == "placeholder count"
    assert "1 x '<|AUDIO|>' for 2 audio(s)" in two.detail
    assert encoding("what?", MediaRefs(audios=(wav(),))).reason == "placeholder count"
    long = encoding(TEXT, MediaRefs(audios=(wav(tone(440, 1.5)),)))
    assert long.reason == "audio too long"
    assert "has 1.5 s of sound, and the model hears 1 s" in long.detail
    assert encoding("what?", MediaRefs(images=("/a.png",))).reason == "no images"
    assert encoding(TEXT, MediaRefs(audios=("/nowhere.wav",))).reason == "missing file"


def test_the_specimen_of_a_model_that_hears_is_a_sound() -> None:
    hearing = build_hearing()
    first, again = (hearing.processor.specimen(hearing.tokenizer, size=64) for _ in range(2))
    assert first.input_ids == again.input_ids
    assert first.media.tokens == {"audio": 12}  # half a second: 50 frames
    assert not first.media.images
    assert torch.equal(first.media.tensors["input_features"], again.media.tensors["input_features"])


def test_a_sound_that_would_fill_the_memory_is_refused_by_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence = np.zeros((20_000, 2), np.int16)
    flac, slow = wav(silence, form="FLAC"), wav(silence[:, 0], rate=1000, form="FLAC")
    for content in (flac, slow):
        check_audio(content)
    monkeypatch.setattr(audio, "_MOST_SAMPLES", 39_999)
    assert refused(flac).reason == "audio too long"  # of 20,000 samples of 2 channels
    assert "samples of 2 channels" in refused(flac).detail
    # 20 s are 960,000 samples of the finest processor
    monkeypatch.setattr(audio, "_MOST_SAMPLES", 959_999)
    assert "20 s is the most" in refused(slow).detail
    with pytest.raises(MediaError, match="20 s is the most"):
        check_audio(slow)


def test_formats_that_look_into_other_files_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "_FORMATS", ("FLAC",))
    assert "is of the format WAV" in refused(wav()).detail
