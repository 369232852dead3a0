"""Sounds in the rows of data sets: every tone has a frequency, which tells whose it is."""

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
from convert_media_pairs import main

from lrlhf.datamodules import BadDataError, MemorySource, PreferenceDataModule, PromptDataModule
from lrlhf.media import MediaOptions
from lrlhf.types import Media, SequenceBatch
from tests.datamodules.conftest import WriteRows
from tests.hearing import RATE, build_hearing, save_hearing, tone

ASKED = [{"role": "user", "content": "which tone?"}]


@pytest.fixture(scope="session")
def hearing_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hearing")
    save_hearing(path)
    return str(path)


def wav(hertz: float, seconds: float = 0.25) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, tone(hertz, seconds), RATE, format="WAV")
    return stream.getvalue()


def hertz(media: Media | None) -> list[int]:
    """The frequencies that a row lets hear."""
    assert media is not None
    found = []
    for audio in media.audios:
        spectrum = np.abs(np.fft.rfft(audio.samples))
        found.append(round(spectrum.argmax() * RATE / len(audio.samples)))
    return found


def heard(data: Any, folder: str, **options: Any) -> list[tuple[str, list[int]]]:
    """The text of each prompt, its marks counted out, and the frequencies behind it."""
    module = PromptDataModule(data, tokenizer=folder, batch_size=1, shuffle=False, **options)
    module.setup("fit")
    tokenizer = build_hearing().tokenizer
    found = []
    for batch in module.train_dataloader():
        rows = zip(batch.input_ids, batch.attention_mask, batch.media, strict=True)
        for ids, mask, media in rows:
            found.append((str(tokenizer.decode(ids[mask])), hertz(media)))
    return found


def asked(marks: int) -> str:
    shown = "<|audio_bos|>" + "<|AUDIO|>" * 6 + "<|audio_eos|>"
    return f"<|im_start|>user\n{shown * marks}which tone?<|im_end|>\n<|im_start|>assistant\n"


def test_prompts_hear_what_their_parts_and_columns_hold(
    tmp_path: Path, write_rows: WriteRows, hearing_folder: str
) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"{number}.wav").write_bytes(wav(400 * number))
    parts = [{"type": "audio", "audio": "3.wav"}, {"type": "text", "text": "which tone?"}]
    path = write_rows(
        [
            {"prompt": ASKED, "audio": "1.wav"},
            {"prompt": ASKED, "audios": ["2.wav", "1.wav"]},
            {"prompt": [{"role": "user", "content": parts}]},
            {"prompt": ASKED, "audio": {"array": tone(2000, 0.25).tolist(), "sampling_rate": RATE}},
        ]
    )
    assert heard(path, hearing_folder) == [
        (asked(1), [400]),
        (asked(2), [800, 400]),
        (asked(1), [1200]),
        (asked(1), [2000]),
    ]


def test_texts_say_where_their_sounds_are(write_rows: WriteRows, hearing_folder: str) -> None:
    row = {"prompt": "before <audio> after", "audio": {"array": [0.1] * 4000}}
    row["audio"]["sampling_rate"] = RATE  # type: ignore[index]
    ((text, _),) = heard(write_rows([row]), hearing_folder, as_chat=True)
    assert "before <|audio_bos|><|AUDIO|>" in text
    assert "<|audio_eos|> after" in text


@pytest.mark.parametrize("held", ["bytes", "array", "path", "feature", "decoded feature"])
def test_rows_of_python_hold_sounds_in_any_form(
    held: str, tmp_path: Path, hearing_folder: str
) -> None:
    files = [tmp_path / f"{number}.wav" for number in range(2)]
    for number, file in enumerate(files):
        file.write_bytes(wav(400 * (number + 1)))
    if "feature" in held:
        column = [{"bytes": file.read_bytes(), "path": None} for file in files]
        data: Any = datasets.Dataset.from_list([{"prompt": ASKED}] * 2)
        data = data.add_column("audio", column)
        data = data.cast_column("audio", datasets.Audio(decode=held.startswith("decoded")))
    else:
        column = {
            "bytes": [file.read_bytes() for file in files],
            "array": [
                {"array": tone(400 * n, 0.25), "sampling_rate": RATE, "path": None} for n in (1, 2)
            ],
            "path": [str(file) for file in files],
        }[held]
        data = [{"prompt": ASKED, "audio": one} for one in column]
    assert heard(data, hearing_folder) == [(asked(1), [400]), (asked(1), [800])]


def test_a_data_set_of_the_hub_has_its_sounds_as_bytes(
    tmp_path: Path, hearing_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of Parquet files holds them, a data set of single files names them."""
    (tmp_path / "1.wav").write_bytes(wav(800))
    file = str(tmp_path / "1.wav")
    column = [{"bytes": wav(400), "path": "0.wav"}, {"bytes": None, "path": file}]
    data = datasets.Dataset.from_list([{"prompt": ASKED}] * 2).add_column("audio", column)
    data = data.cast_column("audio", datasets.Audio())
    data.info.download_checksums = {"hf://datasets/a/b@0/data.parquet": {"num_bytes": 1}}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    for train in ("someone/tones", data):
        assert heard(train, hearing_folder) == [(asked(1), [400]), (asked(1), [800])]


def test_samples_in_rows_of_python_are_not_copied_into_lists() -> None:
    samples = tone(400, 0.25)
    data = [{"audio": {"array": samples, "sampling_rate": RATE}}]
    (row,) = MemorySource(data).rows()
    assert row["audio"]["array"] is samples


def sides(data: Any, folder: str, **options: Any) -> list[tuple[str, str, list[int], list[int]]]:
    """Text and frequencies of both candidates of each pair."""
    module = PreferenceDataModule(data, tokenizer=folder, batch_size=1, shuffle=False, **options)
    module.prepare_data()
    module.setup("fit")

    def text(side: SequenceBatch) -> str:
        ids = side.input_ids[0][side.attention_mask[0]]
        return str(build_hearing().tokenizer.decode(ids)).replace("<|AUDIO|>", "")

    return [
        (
            text(batch.candidate0),
            text(batch.candidate1),
            hertz((batch.candidate0.media or ())[0]),
            hertz((batch.candidate1.media or ())[0]),
        )
        for batch in module.train_dataloader()
    ]


MARKS = "<|audio_bos|><|audio_eos|>"


def converted(name: str, path: str, folder: Path) -> tuple[str, list[Any]]:
    """The file that the script makes of a published set, and its rows."""
    output = folder / "pairs.jsonl"
    main([name, path, str(output)])
    return str(output), [json.loads(line) for line in output.read_text().splitlines()]


def test_pairs_are_answers_about_a_sound_or_sounds(
    write_rows: WriteRows, tmp_path: Path, hearing_folder: str
) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.wav").write_bytes(wav(400 * number))
    path = write_rows(
        [
            {"prompt": ASKED, "audio": "1.wav", "chosen": "low", "rejected": "high"},
            {"prompt": "a tone", "audio_0": "1.wav", "audio_1": "2.wav", "preference": "B"},
            {"prompt": "a tone", "audio_chosen": "2.wav", "audio_rejected": "1.wav"},
        ]
    )
    answers, compared, named = sides(path, hearing_folder)
    question = f"<|im_start|>user\n{MARKS}which tone?<|im_end|>\n<|im_start|>assistant\n"
    assert answers[0] == f"{question}low<|im_end|>\n"
    assert answers[1] == f"{question}high<|im_end|>\n"
    assert answers[2:] == ([400], [400])
    shown = f"<|im_start|>user\n{MARKS}a tone<|im_end|>\n"
    assert compared == (shown, shown, [400], [800])
    assert named == (shown, shown, [800], [400])


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_audio_alpaca_is_read_with_the_better_sound_on_either_side(
    tmp_path: Path, hearing_folder: str
) -> None:
    rows = [
        {
            "prompt": f"a dog barks {number} times",
            "chosen": {"bytes": wav(400 + 40 * number), "path": "x.wav"},
            "rejected": {"bytes": wav(2000 + 40 * number), "path": "y.wav"},
            "strategy": "low_clap",
        }
        for number in range(16)
    ]
    path = write_parquet(tmp_path / "data" / "train-00000.parquet", rows)
    source, pairs = converted("audio_alpaca", path, tmp_path)
    assert len(pairs) == 16
    for pair, row in zip(pairs, rows, strict=True):
        better = "AB".index(pair["preference"])
        chosen, rejected = (Path(pair[f"audio_{side}"]) for side in (better, 1 - better))
        assert chosen.read_bytes() == row["chosen"]["bytes"]  # type: ignore[index]
        assert rejected.read_bytes() == row["rejected"]["bytes"]  # type: ignore[index]
        told = (pair["prompt"], pair["source"], pair["strategy"])
        assert told == (row["prompt"], "Audio-Alpaca", "low_clap")
    # 4 to 12 of 16 fair coins: all but 2 in 100 seeds
    assert 4 <= sum(pair["preference"] == "A" for pair in pairs) <= 12
    found = sides(source, hearing_folder, instruction="Rate this sound of: {{ prompt }}")
    for number, (first, second, left, right) in enumerate(found):
        system = f"Rate this sound of: a dog barks {number} times"
        shown = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{MARKS}<|im_end|>\n"
        assert (first, second) == (shown, shown)
        assert sorted([*left, *right]) == [400 + 40 * number, 2000 + 40 * number]


def test_generic_pairs_hold_sounds_in_every_form(tmp_path: Path, hearing_folder: str) -> None:
    (tmp_path / "1.wav").write_bytes(wav(400))
    uri = f"data:audio/wav;base64,{base64.b64encode(wav(800)).decode()}"
    held = {"array": tone(1200, 0.25).tolist(), "sampling_rate": RATE}
    ends = ["1.wav", held, uri, {"path": "1.wav", "bytes": None}]
    rows = [
        {"prompt": "a tone", "audio_0": first, "audio_1": second, "preference": "A"}
        for first, second in itertools.pairwise(ends)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = sides(str(path), hearing_folder)
    heard = [[400], [1200], [800], [400]]
    assert [tuple(pair[2:]) for pair in found] == [*itertools.pairwise(heard)]


def test_omnireward_names_sounds_below_media_data(tmp_path: Path) -> None:
    row = {
        "id": "t2a_1",
        "prompt": "rain on a roof",
        "criteria": "clarity",
        "response1": "audio",
        "response2": "audio",
        "response1_path": "t2a/1_a.wav",
        "response2_path": "t2a/1_b.wav",
        "model1": "tango",
        "model2": "audiogen",
    }
    words = ("response1", "response2", "other", None)
    path = write_parquet(
        tmp_path / "text-to-audio" / "test.parquet",
        [{**row, "criteria_preference": word} for word in words],
    )
    (tmp_path / "media_data").mkdir()
    _, pairs = converted("omnireward_t2a", path, tmp_path)
    assert [pair.get("preference") for pair in pairs] == ["A", "B", "C", None]
    for pair in pairs:
        assert pair["audio_0"] == str(tmp_path / "media_data" / "t2a" / "1_a.wav")
        assert pair["audio_1"] == str(tmp_path / "media_data" / "t2a" / "1_b.wav")
        assert (pair["criteria"], pair["model1"], pair["id"]) == ("clarity", "tango", "t2a_1")
        assert pair["source"] == "OmniRewardBench"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"audio": "none.wav"}, "missing file", "none.wav"),
    ({"audio": "broken.wav"}, "broken audio", "broken.wav"),
    ({"audio": "short.wav"}, "audio too short", "short.wav has 0.05 s of sound"),
    ({"audio": "long.wav"}, "audio too long", "long.wav has 1.5 s of sound"),
    ({"audio": "https://example.org/a.wav"}, "remote file", "example.org/a.wav"),
    (
        {"audio": "good.wav", "prompt": [{"role": "user", "content": "<audio> or <audio>?"}]},
        "placeholder count",
        "the text has 2 <audio>, the row 1 audio(s): ",
    ),
    (
        {"prompt": [{"role": "user", "content": [{"type": "audio"}]}]},
        "placeholder count",
        "more parts of type 'audio' than the row has audios",
    ),
    ({"image": "good.wav"}, "no images", "Qwen2AudioProcessor reads no images"),
]


@pytest.mark.parametrize("check", ["files", "all"])
def test_bad_rows_are_told_with_their_file_and_line(
    check: Any, tmp_path: Path, write_rows: WriteRows, hearing_folder: str
) -> None:
    for name, content in {
        "good": wav(400),
        "broken": wav(400)[:3000],
        "short": wav(400, 0.05),
        "long": wav(400, 1.5),
    }.items():
        (tmp_path / f"{name}.wav").write_bytes(content)
    good = {"prompt": ASKED, "audio": "good.wav"}
    rows = [{**{"prompt": ASKED}, **row} for row, _, _ in BAD]
    path = write_rows([good, *rows])
    options: dict[str, Any] = {"tokenizer": hearing_folder, "batch_size": 1}
    options["media"] = MediaOptions(check=check)
    with pytest.raises(BadDataError) as caught:
        PromptDataModule(path, **options).setup("fit")
    lines = str(caught.value).splitlines()
    assert f"{len(BAD)} of {len(BAD) + 1} rows of the train data cannot be used" in lines[0]
    for line, (_, reason, detail) in enumerate(BAD, start=2):
        told = [one for one in lines if f"rows.jsonl:{line}: " in one]
        assert len(told) == 1
        assert detail in told[0]
        assert any(one.split()[1:] == reason.split() for one in lines)
    assert heard(path, hearing_folder, max_bad_fraction=0.95) == [(asked(1), [400])]


def test_a_model_without_ears_is_given_no_sounds(
    write_rows: WriteRows, vlm_folder: str, tmp_path: Path
) -> None:
    (tmp_path / "good.wav").write_bytes(wav(400))
    path = write_rows([{"prompt": ASKED, "audio": "good.wav"}])
    with pytest.raises(BadDataError, match=r"no audios\n.*rows.jsonl:1: .* reads no audios .*good"):
        PromptDataModule(path, tokenizer=vlm_folder, batch_size=1).setup("fit")


def test_changed_sounds_are_noticed_by_a_resumed_run(
    tmp_path: Path, write_rows: WriteRows, hearing_folder: str
) -> None:
    file = tmp_path / "a.wav"
    path = write_rows([{"prompt": ASKED, "audio": "a.wav"}])

    def state() -> str:
        module = PromptDataModule(path, tokenizer=hearing_folder, batch_size=1)
        module.setup("fit")
        list(module.train_dataloader())
        return json.dumps(module.state_dict(), default=str)

    file.write_bytes(wav(400))
    before = state()
    assert state() == before
    file.write_bytes(wav(500))
    assert state() != before
