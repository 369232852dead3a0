"""Each set is fed rows in the columns in which it was published."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from convert_media_pairs import SETS, exchanged, main
from PIL import Image

from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.datamodules.rows.preference_rows import LabelReader


def png(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (2, 2), (shade, shade, shade)).save(stream, format="PNG")
    return stream.getvalue()


def write(path: Path, value: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(value), path)
    else:
        path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def pairs(name: str, path: str | Path, *flags: str) -> list[Mapping[str, Any]]:
    """What is in the output; bytes in the place of the files that they were written to."""
    output = Path(path).parent / "pairs.jsonl"
    main([name, str(path), str(output), *flags])
    rows: list[dict[str, Any]] = [json.loads(line) for line in output.read_text().splitlines()]
    written = str(output.with_suffix(".media"))
    for row in rows:
        for column, value in row.items():
            if isinstance(value, str) and value.startswith(written):
                row[column] = Path(value).read_bytes()
    return [*rows]


def better(pair: Mapping[str, Any], kind: str = "image") -> tuple[Any, Any]:
    """The candidate that was preferred, and the other one."""
    first = "AB".index(pair["preference"])
    return pair[f"{kind}_{first}"], pair[f"{kind}_{1 - first}"]


def part_of(pair: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return {key: pair.get(key) for key in expected} == expected


def hpd(number: int, **more: Any) -> dict[str, Any]:
    row = {"prompt": f"prompt {number}", "model1": "flux", "model2": "sd2", "confidence": 0.98}
    return {**row, "path1": f"in/good_{number}.jpg", "path2": f"in/bad_{number}.jpg", **more}


def test_the_order_is_sampled_for_about_half_of_the_rows_and_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "train.json", [hpd(number) for number in range(400)])
    rows = pairs("hpdv3", path, "--seed", "3")
    labels = [row["preference"] for row in rows]
    assert 160 <= labels.count("A") <= 240  # four standard deviations of 10 around 200
    assert all("good" in better(row)[0] and "bad" in better(row)[1] for row in rows)
    assert pairs("hpdv3", path, "--seed", "3") == rows
    other = [row["preference"] for row in pairs("hpdv3", path, "--seed", "4")]
    assert 140 <= sum(a != b for a, b in zip(labels, other, strict=True)) <= 260


def test_the_order_is_the_same_on_every_machine(tmp_path: Path) -> None:
    path = write(tmp_path / "train.json", [hpd(number) for number in range(16)])
    # lowest bit of `printf seed:row:0 | b2sum -l 8`
    labels = [row["preference"] for row in pairs("hpdv3", path, "--seed", "7")]
    assert "".join(str("AB".index(label)) for label in labels) == "1110010101010100"


def test_exchanging_turns_candidates_and_label_and_leaves_the_rest() -> None:
    same = {"prompt": "A", "image": "first.png"}
    videos = {"video_0": "a.mp4", "video_1": "b.mp4"}
    turned = {"video_0": "b.mp4", "video_1": "a.mp4"}
    assert exchanged({**same, **videos, "preference": "B"}) == {**same, **turned, "preference": "A"}
    images = {"image_0": b"0", "image_1": b"1"}
    assert exchanged({**images, "preference": "C"})["preference"] == "C"
    assert exchanged(images) == {"image_0": b"1", "image_1": b"0"}
    told = {"model_0": "x", "model_1": "y", "vote_type": "leftvote"}
    assert exchanged(told) == {"model_0": "y", "model_1": "x", "vote_type": "rightvote"}
    assert exchanged({"vote_type": "bothbad_vote"}) == {"vote_type": "bothbad_vote"}


def rapid(*scores: tuple[float | None, float | None], **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": "a dog runs", "file_name1": "a.mp4", "file_name2": "b.mp4"}
    for name, (first, second) in zip(("Preference", "Coherence", "Alignment"), scores, strict=True):
        row |= {f"weighted_results1_{name}": first, f"weighted_results2_{name}": second}
    return {**row, **more}


NAN = float("nan")
RAPIDATA = [
    # 0.4 + 0.9 + 0.5 = 1.8 against 0.6 + 0.1 + 0.5 = 1.2
    (
        rapid((0.4, 0.6), (0.9, 0.1), (0.5, 0.5)),
        {"preference": "A", "preference_vote": "B", "coherence": "A", "alignment": "C"},
    ),
    # 0.1 + 0.2 + 0.3 against 0.3 + 0.2 + 0.1: a tie, though their floats differ
    (
        rapid((0.1, 0.3), (0.2, 0.2), (0.3, 0.1)),
        {"preference": "C", "preference_vote": "B", "coherence": "C", "alignment": "A"},
    ),
    # coherence not judged, alignment by one score only
    (
        rapid((0.2, 0.8), (None, None), (0.9, None)),
        {"preference": "B", "preference_vote": "B", "coherence": None, "alignment": None},
    ),
    (rapid((None, None), (None, NAN), (NAN, None)), {"preference": None, "preference_vote": None}),
]
OMNI = {"prompt": "a red cube", "criteria": "large", "id": "t2i_1", "model1": "x", "model2": "y"}
OMNI_PATHS = {"response1_path": "t2i/1_a.png", "response2_path": "t2i/1_b.png"}
VOTE = {
    "prompt": "a boat",
    "left_model": "SDXL",
    "left_image": {"bytes": png(10), "path": "l.png"},
    "right_model": "PixArt",
    "right_image": {"bytes": png(20), "path": "r.png"},
}
EDIT = {
    "target_prompt": "a dog",
    "instruct_prompt": "make it a dog",
    "source_image": {"bytes": png(1), "path": None},
    "left_output_image": {"bytes": png(2), "path": None},
    "right_output_image": {"bytes": png(3), "path": None},
    "vote_type": "rightvote",
}
CRITERIA = ("response1", "response2", "other", None)


@pytest.mark.parametrize(
    ("format", "file", "rows", "expected"),
    [
        # a pair's better candidate first, where the set has no order of its own
        (
            "hpdv3",
            "train.json",
            [hpd(0), hpd(1, confidence=None)],
            [
                {
                    "image_0": "in/good_0.jpg",
                    "image_1": "in/bad_0.jpg",
                    "preference": "A",
                    "source": "HPDv3",
                    "model_chosen": "flux",
                    "preferred_path": "in/good_0.jpg",
                    "confidence": 0.98,
                },
                {"image_0": "in/good_1.jpg", "confidence": None},
            ],
        ),
        (
            "rapidata",
            "data/train-00000-of-00001.parquet",
            [row for row, _ in RAPIDATA],
            [
                {**labels, "video_0": "Videos/a.mp4", "prompt": "a dog runs"}
                for _, labels in RAPIDATA
            ],
        ),
        (
            "omnireward_t2i",
            "t2i/test.parquet",
            [{**OMNI, **OMNI_PATHS, "criteria_preference": word} for word in CRITERIA],
            [
                {
                    "preference": label,
                    "image_1": "media_data/t2i/1_b.png",
                    "criteria_preference": word,
                }
                for label, word in zip(("A", "B", "C", None), CRITERIA, strict=True)
            ],
        ),
        (
            "omnireward_t2v",
            "t2v/test.parquet",
            [
                {
                    **OMNI,
                    "response1_path": "t2v/1_a.mp4",
                    "response2_path": "t2v/1_b.mp4",
                    "criteria_preference": "response2",
                }
            ],
            [
                {
                    "preference": "B",
                    "video_0": "media_data/t2v/1_a.mp4",
                    "video_1": "media_data/t2v/1_b.mp4",
                    "prompt": "a red cube",
                    "criteria": "large",
                }
            ],
        ),
        (
            "omnireward_t2i",  # images in the rows themselves
            "b.parquet",
            [{**OMNI, **OMNI_PATHS, "response1": {"bytes": png(1)}, "response2": png(2)}],
            [{"image_0": png(1), "image_1": png(2), "preference": None}],
        ),
        (
            "genai_bench",
            "image_generation/test_v1.parquet",
            [{**VOTE, "vote_type": vote} for vote in ("leftvote", "rightvote", "bothbad_vote")],
            [
                {"image_0": png(10), "image_1": png(20), "preference": "A"},
                {"image_0": png(20), "model_0": "PixArt", "model_1": "SDXL", "preference": "A"},
                {"preference": "C", "vote_type": "bothbad_vote"},
            ],
        ),
        (
            "genai_bench",
            "edits.parquet",
            [EDIT],
            [{"prompt": "make it a dog", "image": png(1), "image_0": png(3), "image_1": png(2)}],
        ),
        (
            "genai_bench",
            "test.parquet",
            [
                {
                    "Index": "00007",
                    "Prompt": "a robot",
                    "DALLE_3": {"path": "x.jpg", "bytes": png(1)},
                    "Mid_6": {"path": "x.jpg", "bytes": png(2)},
                    "SDXL": {"path": "x.jpg", "bytes": png(3)},
                    "Turbo": None,
                    # means 4, 4 and 3; the last one is not shown
                    "HumanRatings": {
                        "DALLE_3": [5, 4, 3],
                        "Mid_6": [4, 4, 4],
                        "SDXL": [3, 3, 3],
                        "Turbo": [5, 5, 5],
                    },
                }
            ],
            [
                {"preference": "C"},
                {"image_0": png(1), "image_1": png(3), "id": "00007", "prompt": "a robot"},
                {"image_0": png(2), "model_0": "Mid_6", "model_1": "SDXL"},
            ],
        ),
        (
            "genai_bench_video",
            "ok.json",
            [{"prompt": "a kite", "models": {"Pika": [3], "Gen2": [5]}, "id": 4}],
            [{"video_0": "Gen2/4.mp4", "video_1": "Pika/4.mp4"}],
        ),
        (
            "videodpo",
            "pair.json",
            [
                {"video1": 6, "video2": 13, "frame_caption": ["a wave", "x"], "score": 0.8},
                {"video1": 0, "video2": 1, "frame_caption": "a hill"},
            ],
            [
                {
                    "video_0": "winvideos/000003.mp4",
                    "video_1": "losevideos/000006.mp4",
                    "prompt": "a wave",
                    "score": 0.8,
                },
                {"video_0": "winvideos/000000.mp4", "prompt": "a hill"},
            ],
        ),
    ],
)
def test_each_set_is_read_from_its_own_columns(
    tmp_path: Path, format: str, file: str, rows: list[Any], expected: list[dict[str, Any]]
) -> None:
    (tmp_path / "Videos").mkdir()
    read = pairs(format, write(tmp_path / file, rows))
    for pair, wanted in zip(read, expected, strict=True):
        if SETS[format].ordered_by_seed and pair["preference"] == "B":
            pair = exchanged(pair)
        for column, value in wanted.items():
            shown = column.startswith(("image", "video")) and isinstance(value, str)
            assert pair.get(column) == (str(tmp_path / value) if shown else value), column


def test_heads_named_like_the_criteria_find_their_labels(tmp_path: Path) -> None:
    rows = pairs("rapidata", write(tmp_path / "a.parquet", [row for row, _ in RAPIDATA]))
    labels = LabelReader(("preference", "coherence", "alignment")).of_candidates(rows[2])
    assert labels[0] == -1.0
    assert all(label != label for label in labels[1:])  # what is not judged is no tie


def test_addresses_stand_for_local_files_beside_the_first_frame(tmp_path: Path) -> None:
    row = rapid(
        *[(0.7, 0.3)] * 3,
        file_name1="https://assets.example.com/x/seedance/0%201.mp4?download=true",
        file_name2="https://assets.example.com/x/kling/02.mp4",
        prompt_asset={"bytes": png(7), "path": "0001.jpg"},
    )
    path = write(tmp_path / "data" / "train.parquet", [row])
    (tmp_path / "videos" / "kling").mkdir(parents=True)
    (pair,) = pairs("rapidata", path)
    assert pair["video_0"] == str(tmp_path / "videos" / "0 1.mp4")
    assert pair["video_1"] == str(tmp_path / "videos" / "kling" / "02.mp4")
    assert pair["image"] == png(7)
    (pair,) = pairs("rapidata", path, "--media-root", str(tmp_path / "else"))
    assert pair["video_1"] == str(tmp_path / "else" / "02.mp4")


def test_the_folder_of_an_address_may_be_a_link_to_another_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "https://assets.example.com/kling/{}"
    (tmp_path / "disk").mkdir()
    (tmp_path / "kling").symlink_to(tmp_path / "disk")
    rows = [hpd(0, path1=address.format("1.jpg"), path2="https://assets.example.com/other/2.jpg")]
    rows += [hpd(1, path1=address.format(name)) for name in (".", "..", "%2e%2e")]
    path = write(tmp_path / "rows" / "train.json", rows)
    (pair,) = pairs("hpdv3", path, "--media-root", str(tmp_path))
    assert better(pair) == (str(tmp_path / "kling" / "1.jpg"), str(tmp_path / "2.jpg"))
    assert "3 left out" in capsys.readouterr().out
    (tmp_path / "rows" / "kling").symlink_to(tmp_path / "disk")
    pair, *_ = pairs("hpdv3", path)
    assert better(pair)[0] == str(tmp_path / "rows" / "kling" / "1.jpg")


def test_files_are_those_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = tmp_path / "private.png"
    outside.write_bytes(b"")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.png").symlink_to(outside)
    named = ["../private.png", "link.png", "file:../private.png", str(outside)]
    path = write(tmp_path / "data" / "train.json", [hpd(n, path2=p) for n, p in enumerate(named)])
    # an absolute path is the user's own, unless a root is given
    (pair,) = pairs("hpdv3", path)
    assert better(pair)[1] == str(outside)
    assert "left out: file outside the data: " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no pair can be made"):
        pairs(
            "hpdv3",
            write(Path(path), [hpd(0, path2=str(outside))]),
            "--media-root",
            str(tmp_path / "data"),
        )


def ranked(prompt_id: str, name: str, rank: int | None) -> dict[str, Any]:
    row = {"prompt_id": prompt_id, "prompt": f"text of {prompt_id}", "overall_rating": 5}
    return {**row, "image_path": f"images/train/train_1/{name}.webp", "rank": rank}


# of p-1 three pairs, of p-2 the two that the image of rank 3 makes, of p-3 none
RANKS = {"p-1": {"a": 2, "b": 1, "c": 3}, "p-2": {"d": 1, "e": 1, "f": 3}, "p-3": {"alone": 1}}
RANKED = [ranked(key, name, rank) for key, ranks in RANKS.items() for name, rank in ranks.items()]


@pytest.mark.parametrize("given", ["", "images/train", "metadata-train.parquet"])
def test_imagerewarddb_pairs_all_ranks_that_differ(tmp_path: Path, given: str) -> None:
    shard = tmp_path / "images" / "train" / "train_1" / "train_1.json"
    write(shard, RANKED)
    if given.endswith("parquet"):
        write(tmp_path / given, RANKED)
    rows = pairs("imagerewarddb", tmp_path / given)
    decided = [tuple(Path(path).stem for path in better(row)) for row in rows]
    assert sorted(decided) == [("a", "c"), ("b", "a"), ("b", "c"), ("d", "f"), ("e", "f")]
    assert better(rows[0])[0] == str(shard.parent / "b.webp")
    assert part_of(rows[0], {"prompt": "text of p-1", "rank_chosen": 1, "rank_rejected": 2})
    assert rows[0]["rejected_img"] == "images/train/train_1/a.webp"


def test_an_image_without_a_rank_is_left_out_and_the_others_of_its_prompt_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ranked("p", "a", 1), ranked("p", "b", None), ranked("p", "c", 2), "no row"]
    (pair,) = pairs("imagerewarddb", write(tmp_path / "s" / "s.json", rows))
    assert [Path(one).stem for one in better(pair)] == ["a", "c"]
    shown = capsys.readouterr()
    assert "left out: no rank: " in shown.err
    assert "1 pairs in " in shown.out
    assert ", 2 left out" in shown.out


def test_genai_bench_video_reads_the_file_of_ratings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {
        "00000": {"prompt": "a kite", "models": {"Pika": [1, 2, 3], "Gen2": [5], "Other": []}},
        "00001": "nothing",
        "00002": {"models": {"Pika": [1], "Gen2": [5]}},
        "00003": {"prompt": "a kite", "models": {"Pika": 3, "Gen2": [5]}},
        "00004": {"prompt": "a kite", "models": {"Pika": ["good"], "Gen2": [5]}},
    }
    write(tmp_path / "genai_video.json", samples)
    first, second, third = pairs("genai_bench_video", tmp_path)
    assert better(first, "video") == tuple(
        str(tmp_path / model / "00000.mp4") for model in ("Gen2", "Pika")
    )
    assert "preference" not in {**second, **third}  # nobody rated Other
    assert "3 pairs in " in (shown := capsys.readouterr().out)
    assert ", 4 left out" in shown


def test_videogen_rewardbench_has_a_label_per_head(tmp_path: Path) -> None:
    path = tmp_path / "videogen-rewardbench.csv"
    path.write_text(
        "path_A,path_B,A_model,B_model,prompt,fps_A,VQ,MQ,TA,Overall\n"
        'videos/1.mp4,./videos/2.mp4,kling,luma,"a fox, running",24,A,same,B,A\n'
        "videos/3.mp4,videos/4.mp4,kling,luma,a fox,24,invalid,B,,same\n"
        "videos/5.mp4,videos/6.mp4,kling,luma,a fox,24,B,B,B,\n",
        encoding="utf-8",
    )
    first, second, third = pairs("videogen_rewardbench", path)
    heads = ("preference", "VQ", "MQ", "TA")
    assert [{head: row[head] for head in heads if head in row} for row in (first, second)] == [
        {"preference": "A", "VQ": "A", "MQ": "C", "TA": "B"},
        {"preference": "C", "MQ": "B"},
    ]
    assert "preference" not in third
    assert part_of(first, {"prompt": "a fox, running", "A_model": "kling", "Overall": "A"})
    assert first["video_1"] == str(tmp_path / "videos" / "2.mp4")


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("hpdv3", hpd(1, path1=None), "no file: None names no file"),
        ("hpdv3", hpd(1, path1="https://example.com/"), "no file: the address"),
        ("hpdv3", hpd(1, path1="../private.png"), "file outside the data: "),
        ("hpdv3", hpd(1, prompt=" "), "empty text: "),
        ("hpdv3", {"prompt": "p", "path_1": "a"}, "another form: KeyError 'path1'"),
        (
            "omnireward_t2i",
            {**OMNI, **OMNI_PATHS, "criteria_preference": "response3"},
            "unknown label: 'response3' is none of response1, response2, other",
        ),
        *(
            ("videodpo", {"video1": n, "video2": 1, "frame_caption": "a"}, "another form: ")
            for n in (None, "six")
        ),
        ("genai_bench_video", {"prompt": "a", "models": {"P": [3]}}, "another form: KeyError 'id'"),
        (
            "videogen_rewardbench",
            {"prompt": "a", "path_A": "1.mp4", "path_B": "2.mp4", "Overall": "C"},
            "unknown label: 'C' is none of a, b, same, invalid",
        ),
    ],
)
def test_rows_of_another_form_are_left_out_and_said(
    tmp_path: Path,
    name: str,
    row: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match=f"no pair can be made of .* as {name}"):
        pairs(name, write(tmp_path / "train.json", [row]))
    shown = capsys.readouterr().err
    assert f"left out: {said}" in shown
    assert "(in train.json)" in shown


def test_a_source_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadDataError, match="hpdv4"):
        pairs("hpdv3", tmp_path / "hpdv4.json")


def test_reasoned_verdicts_without_caption_or_verdict_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {"from": "gpt", "value": "<think>Red.</think><answer>Image 1 is better</answer>"}
    asked = {"from": "human", "value": "<image>\n<image>\nText Caption: **a red hat**"}
    row = {"conversations": [asked, reply], "images": ["a.png", "b.png"]}
    said = {"conversations": [asked, {"from": "gpt", "value": "I cannot tell."}]}
    changes = [{}, said, {"conversations": [{"from": "human", "value": "Which?"}, reply]}]
    rows = [{**row, **change} for change in [*changes, {"images": ["a.png"]}]]
    (pair,) = pairs("imagegen_cot_reward", write(tmp_path / "train.json", rows))
    assert part_of(pair, {"prompt": "a red hat", "preference": "A", "reasoning": "Red."})
    shown = capsys.readouterr()
    assert all(reason in shown.err for reason in ("unknown label", "no caption", "another form"))
    assert ", 3 left out" in shown.out
