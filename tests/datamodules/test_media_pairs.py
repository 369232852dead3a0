"""Each format is fed rows in the columns that the published set has."""

import io
import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lrlhf.datamodules.datasets.media_pairs import FORMATS, MediaPairs, exchanged, is_exchanged
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
from lrlhf.datamodules.rows.preference_labels import LabelReader


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


def pairs(format: str, path: str | Path, **options: Any) -> list[Mapping[str, Any]]:
    rows = list(MediaPairs(format, str(path), **options).rows())
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if not isinstance(row, BadRow)]


def problems(format: str, path: str | Path) -> list[BadRow]:
    return [row for row in MediaPairs(format, str(path)).rows() if isinstance(row, BadRow)]


def better(pair: Mapping[str, Any], kind: str = "image") -> tuple[Any, Any]:
    """The candidate that was preferred, and the other one."""
    first = "AB".index(pair["preference"])
    return pair[f"{kind}_{first}"], pair[f"{kind}_{1 - first}"]


def part_of(pair: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return {key: pair.get(key) for key in expected} == expected


def hpd(number: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": f"prompt {number}",
        "path1": f"images/good_{number}.jpg",
        "path2": f"images/bad_{number}.jpg",
        "model1": "flux",
        "model2": "sd2",
        "confidence": 0.98,
        "choice_dist": [12, 1],
        **more,
    }


def test_hpdv3_prefers_the_first_path_and_resolves_it_beside_the_file(tmp_path: Path) -> None:
    rows = [hpd(0), hpd(1, confidence=None, choice_dist=None)]
    first, second = pairs("hpdv3", write(tmp_path / "train.json", rows))
    folder = tmp_path / "images"
    assert better(first) == (str(folder / "good_0.jpg"), str(folder / "bad_0.jpg"))
    assert {
        key: value for key, value in first.items() if not key.startswith(("image_", "preference"))
    } == {
        "prompt": "prompt 0",
        "source": "HPDv3",
        "confidence": 0.98,
        "choice_dist": [12, 1],
        "model_chosen": "flux",
        "model_rejected": "sd2",
        "preferred_path": "images/good_0.jpg",
        "rejected_path": "images/bad_0.jpg",
    }
    assert not {"confidence", "choice_dist"} & second.keys()


def test_the_order_is_sampled_for_about_half_of_the_rows_and_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "train.json", [hpd(number) for number in range(400)])
    rows = pairs("hpdv3", path, seed=3)
    labels = [row["preference"] for row in rows]
    assert 160 <= labels.count("A") <= 240  # four standard deviations of 10 around 200
    assert all("good" in better(row)[0] and "bad" in better(row)[1] for row in rows)
    source = MediaPairs("hpdv3", path, seed=3)
    assert source.name == f"hpdv3:{path}"
    assert list(pickle.loads(pickle.dumps(source)).rows()) == rows
    other = [row["preference"] for row in pairs("hpdv3", path, seed=4)]
    assert 140 <= sum(a != b for a, b in zip(labels, other, strict=True)) <= 260


def test_every_process_samples_the_same_order() -> None:
    # lowest bit of `printf seed:row:pair | b2sum -l 8`
    turned = [is_exchanged(0, number, number % 3) for number in range(16)]
    assert "".join(str(int(one)) for one in turned) == "0111101001000011"
    turned = [is_exchanged(7, number) for number in range(16)]
    assert "".join(str(int(one)) for one in turned) == "1110010101010100"


def test_exchanging_turns_candidates_and_label_and_leaves_the_rest() -> None:
    same = {"prompt": "A", "image": "first.png"}
    videos = {"video_0": "a.mp4", "video_1": "b.mp4", "model_0": "m", "model_1": "n"}
    turned = {"video_0": "b.mp4", "video_1": "a.mp4", "model_0": "n", "model_1": "m"}
    assert exchanged({**same, **videos, "preference": "B"}) == {
        **same,
        **turned,
        "preference": "A",
    }
    images = {"image_0": b"0", "image_1": b"1"}
    assert exchanged({**images, "preference": "C"})["preference"] == "C"
    assert exchanged(images) == {"image_0": b"1", "image_1": b"0"}


def ranked(prompt_id: str, name: str, rank: int | None) -> dict[str, Any]:
    return {
        "image_path": f"images/train/train_1/{name}.webp",
        "prompt_id": prompt_id,
        "prompt": f"text of {prompt_id}",
        "classification": "People",
        "rank": rank,
        "overall_rating": 5,
    }


# of p-1 three pairs, of p-2 the two that the image of rank 3 makes, of p-3 none
RANKED = [
    ranked("p-1", "a", 2),
    ranked("p-1", "b", 1),
    ranked("p-2", "d", 1),
    ranked("p-1", "c", 3),
    ranked("p-2", "e", 1),
    ranked("p-2", "f", 3),
    ranked("p-3", "alone", 1),
]


@pytest.mark.parametrize("given", ["", "images/train", "metadata-train.parquet"])
def test_imagerewarddb_pairs_all_ranks_that_differ(tmp_path: Path, given: str) -> None:
    shard = tmp_path / "images" / "train" / "train_1" / "train_1.json"
    write(shard, RANKED)
    if given.endswith("parquet"):
        write(tmp_path / given, RANKED)
    rows = pairs("imagerewarddb", tmp_path / given)
    decided = {tuple(Path(path).stem for path in better(row)) for row in rows}
    assert decided == {("b", "a"), ("a", "c"), ("b", "c"), ("d", "f"), ("e", "f")}
    assert len(rows) == 5
    assert better(rows[0])[0] == str(shard.parent / "b.webp")
    assert part_of(
        rows[0],
        {
            "prompt": "text of p-1",
            "prompt_id": "p-1",
            "rank_chosen": 1,
            "chosen_img": "images/train/train_1/b.webp",
            "rejected_img": "images/train/train_1/a.webp",
            "rank_rejected": 2,
            "classification": "People",
            "overall_rating_rejected": 5,
        },
    )


def test_an_image_without_a_rank_is_counted_and_the_others_of_its_prompt_stay(
    tmp_path: Path,
) -> None:
    rows = [
        ranked("p", "a", 1),
        ranked("p", "b", None),
        ranked("p", "c", 2),
        {key: value for key, value in ranked("p", "d", 3).items() if key != "prompt_id"},
        {**ranked("p", "e", 4), "prompt_id": ["p"]},
        "no row",
    ]
    path = write(tmp_path / "s" / "s.json", rows)
    found = problems("imagerewarddb", path)
    reasons = ["no rank", "missing column", "wrong type", "wrong type"]
    assert [problem.reason for problem in found] == reasons
    assert "'rank'" in found[0].detail
    assert all("'prompt_id'" in problem.detail for problem in found[1:3])
    *_, pair = MediaPairs("imagerewarddb", path).rows()
    assert not isinstance(pair, BadRow)
    assert [Path(one).stem for one in better(pair)] == ["a", "c"]


def rapid(scores: Iterable[tuple[float | None, float | None]], **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": "a dog runs", "file_name1": "a.mp4", "file_name2": "b.mp4"}
    for name, (first, second) in zip(("Preference", "Coherence", "Alignment"), scores, strict=True):
        row[f"weighted_results1_{name}"] = first
        row[f"weighted_results2_{name}"] = second
    return {**row, **more}


def labels(row: Mapping[str, Any]) -> dict[str, str]:
    names = ("preference", "preference_vote", "coherence", "alignment")
    return {name: row[name] for name in names if name in row}


def test_rapidata_compares_each_criterion_and_their_sums(tmp_path: Path) -> None:
    rows = [
        # 0.4 + 0.9 + 0.5 = 1.8 against 0.6 + 0.1 + 0.5 = 1.2
        rapid([(0.4, 0.6), (0.9, 0.1), (0.5, 0.5)]),
        # 0.1 + 0.2 + 0.3 against 0.3 + 0.2 + 0.1: a tie, though their floats differ
        rapid([(0.1, 0.3), (0.2, 0.2), (0.3, 0.1)]),
        # coherence not judged, alignment by one score only
        rapid([(0.2, 0.8), (None, None), (0.9, None)]),
        rapid([(None, None), (None, float("nan")), (float("nan"), None)]),
    ]
    path = write(tmp_path / "data" / "train-00000-of-00001.parquet", rows)
    (tmp_path / "Videos").mkdir()
    read = pairs("rapidata_t2v", path)
    assert [labels(row) for row in read] == [
        {"preference": "A", "preference_vote": "B", "coherence": "A", "alignment": "C"},
        {"preference": "C", "preference_vote": "B", "coherence": "C", "alignment": "A"},
        {"preference": "B", "preference_vote": "B"},
        {},
    ]
    assert read[0]["video_0"] == str(tmp_path / "Videos" / "a.mp4")
    assert read[0]["video_1"] == str(tmp_path / "Videos" / "b.mp4")
    # heads that are named like the criteria find their labels; what is not judged is no tie
    heads = LabelReader(("preference", "coherence", "alignment"))
    read_labels = heads.of_candidates(read[2])
    assert read_labels[0] == -1.0
    assert all(label != label for label in read_labels[1:])


def test_rapidata_maps_addresses_to_local_files_and_keeps_the_first_frame(tmp_path: Path) -> None:
    row = rapid(
        [(0.7, 0.3)] * 3,
        file_name1="https://assets.example.com/x/seedance/0%201.mp4?download=true",
        file_name2="https://assets.example.com/x/kling/02.mp4",
        prompt_asset={"bytes": png(7), "path": "0001.jpg"},
    )
    path = write(tmp_path / "data" / "train.parquet", [row])
    (tmp_path / "videos" / "kling").mkdir(parents=True)
    (pair,) = pairs("rapidata_i2v", path)
    videos = {
        "video_0": str(tmp_path / "videos" / "0 1.mp4"),
        "video_1": str(tmp_path / "videos" / "kling" / "02.mp4"),
    }
    assert part_of(pair, {**videos, "image": png(7), "alignment": "A"})


def omni(choice: str | None, **more: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cube",
        "response1_path": "text_to_image/1_a.png",
        "response2_path": "text_to_image/1_b.png",
        "criteria": "the cube is the largest thing",
        "criteria_preference": choice,
        "id": "t2i_1",
        "model1": "x",
        "model2": "y",
        **more,
    }


def test_omnireward_translates_the_preferred_response(tmp_path: Path) -> None:
    rows = [omni("response1"), omni("response2"), omni("other"), omni(None)]
    read = pairs("omnireward_t2i", write(tmp_path / "text_to_image" / "test.parquet", rows))
    assert [row.get("preference") for row in read] == ["A", "B", "C", None]
    assert "preference" not in read[3]
    media = tmp_path / "media_data" / "text_to_image"
    kept = {"criteria": "the cube is the largest thing", "id": "t2i_1", "model2": "y"}
    paths = {"image_0": str(media / "1_a.png"), "image_1": str(media / "1_b.png")}
    assert part_of(read[1], {**kept, **paths})
    # images in the rows themselves
    shown = {f"response{n}": {"bytes": png(n), "path": f"{n}.png"} for n in (1, 2)}
    (row,) = pairs("omnireward_t2i", write(tmp_path / "b.parquet", [omni("response1", **shown)]))
    assert (row["image_0"], row["image_1"]) == (png(1), png(2))
    # videos are named in the responses
    named = {key: value for key, value in omni("response2").items() if "_path" not in key}
    named |= {f"response{n}": f"text_to_video/{n}.mp4" for n in (1, 2)}
    path = write(tmp_path / "data" / "test.parquet", [named])
    (row,) = pairs("omnireward_t2v", path, media_root=str(tmp_path / "else"))
    assert better(row, "video")[0] == str(tmp_path / "else" / "text_to_video" / "2.mp4")


def vote(choice: str, **more: Any) -> dict[str, Any]:
    return {
        "prompt": "a boat",
        "left_model": "SDXL",
        "left_image": {"bytes": png(10), "path": "l.png"},
        "right_model": "PixArt",
        "right_image": {"bytes": png(20), "path": "r.png"},
        "vote_type": choice,
        **more,
    }


def test_genai_bench_votes_for_the_left_the_right_or_neither(tmp_path: Path) -> None:
    rows = [vote("leftvote"), vote("rightvote"), vote("tievote"), vote("bothbad_vote")]
    read = pairs("genai_bench", write(tmp_path / "image_generation" / "test_v1.parquet", rows))
    assert [better(row)[0] for row in read[:2]] == [png(10), png(20)]
    assert [row["preference"] for row in read[2:]] == ["C", "C"]
    assert {row["vote_type"] for row in read[2:]} == {"tievote", "bothbad_vote"}
    models = {png(10): "SDXL", png(20): "PixArt"}
    for row in read:
        assert (models[row["image_0"]], models[row["image_1"]]) == (row["model_0"], row["model_1"])


def test_genai_bench_edits_start_from_an_image(tmp_path: Path) -> None:
    row = {
        "target_prompt": "a dog",
        "instruct_prompt": "make it a dog",
        "source_image": {"bytes": png(1), "path": None},
        "left_model": "InfEdit",
        "left_output_image": {"bytes": png(2), "path": None},
        "right_model": "SDEdit",
        "right_output_image": {"bytes": png(3), "path": None},
        "vote_type": "rightvote",
    }
    (read,) = pairs("genai_bench", write(tmp_path / "e.parquet", [row]))
    assert (read["prompt"], read["image"]) == ("make it a dog", png(1))
    assert better(read) == (png(3), png(2))


def test_genai_bench_pairs_all_rated_models(tmp_path: Path) -> None:
    row = {
        "Index": "00007",
        "Prompt": "a tin robot",
        "DALLE_3": {"path": "x.jpg", "bytes": png(1)},
        "Midjourney_6": {"path": "x.jpg", "bytes": png(2)},
        "SDXL_Base": {"path": "x.jpg", "bytes": png(3)},
        "SDXL_Turbo": None,
        # means 4, 4 and 3; the last one is not shown
        "HumanRatings": {
            "DALLE_3": [5, 4, 3],
            "Midjourney_6": [4, 4, 4],
            "SDXL_Base": [3, 3, 3],
            "SDXL_Turbo": [5, 5, 5],
        },
    }
    read = pairs("genai_bench", write(tmp_path / "test.parquet", [row]))
    assert len(read) == 3  # of three shown models
    found = {
        frozenset((pair["model_0"], pair["model_1"])): (
            "tie" if pair["preference"] == "C" else better(pair)[0]
        )
        for pair in read
    }
    assert found == {
        frozenset(("DALLE_3", "Midjourney_6")): "tie",
        frozenset(("DALLE_3", "SDXL_Base")): png(1),
        frozenset(("Midjourney_6", "SDXL_Base")): png(2),
    }
    assert {(pair["id"], pair["prompt"]) for pair in read} == {("00007", "a tin robot")}


def test_genai_bench_video_reads_the_file_of_ratings(tmp_path: Path) -> None:
    samples = {
        "00000": {"prompt": "a kite", "models": {"Pika": [1, 2, 3], "Gen2": [5], "Other": []}},
        "00001": "nothing",
        "00002": {"models": {"Pika": [1], "Gen2": [5]}},
        "00003": {"prompt": "a kite", "models": {"Pika": 3, "Gen2": [5]}},
        "00004": {"prompt": "a kite", "models": {"Pika": ["good"], "Gen2": [5]}},
    }
    write(tmp_path / "genai_video.json", samples)
    rows = MediaPairs("genai_bench_video", str(tmp_path)).rows()
    read = [row for row in rows if not isinstance(row, BadRow)]
    assert [{row["model_0"], row["model_1"]} for row in read] == [
        {"Pika", "Gen2"},
        {"Pika", "Other"},
        {"Gen2", "Other"},
    ]
    videos = tuple(str(tmp_path / model / "00000.mp4") for model in ("Gen2", "Pika"))
    assert better(read[0], "video") == videos
    assert "preference" not in read[1]  # nobody rated Other
    found = problems("genai_bench_video", tmp_path)
    reasons = ["wrong type", "missing column", "wrong type", "wrong type"]
    assert [problem.reason for problem in found] == reasons
    for problem, named in zip(found, ["'00001'", "'prompt'", *["'models[Pika]'"] * 2], strict=True):
        assert named in problem.detail


def test_genai_bench_video_reads_votes_and_rows_with_ids_too(tmp_path: Path) -> None:
    row = {
        "prompt": "a kite",
        "left_model": "Pika",
        "left_video": "https://videos.example.com/resolve/main/l.mp4",
        "right_model": "Gen2",
        "right_video": "r.mp4",
        "vote_type": "leftvote",
    }
    path = write(tmp_path / "video_generation" / "test.parquet", [row])
    (read,) = pairs("genai_bench_video", path, media_root=str(tmp_path / "mp4"))
    assert better(read, "video") == tuple(
        str(tmp_path / "mp4" / name) for name in ("l.mp4", "r.mp4")
    )
    rated = {"prompt": "a kite", "models": {"Pika": [3], "Gen2": [5]}}
    (problem,) = problems("genai_bench_video", write(tmp_path / "rows.json", [rated]))
    assert problem.reason == "missing column"
    assert "'id'" in problem.detail
    (pair,) = pairs("genai_bench_video", write(tmp_path / "ok.json", [{**rated, "id": 4}]))
    assert better(pair, "video")[0] == str(tmp_path / "Gen2" / "4.mp4")


def test_videodpo_numbers_stand_for_files(tmp_path: Path) -> None:
    rows = [
        {"video1": 6, "video2": 13, "frame_caption": ["a wave", "x"], "score": 0.8},
        {"video1": 0, "video2": 1, "frame_caption": "a hill"},
        *({"video1": n, "video2": 1, "frame_caption": "a"} for n in (None, -1, 1.5, "six")),
    ]
    first, second = pairs("videodpo", write(tmp_path / "pair.json", rows[:2]))
    assert better(first, "video") == (
        str(tmp_path / "winvideos" / "000003.mp4"),
        str(tmp_path / "losevideos" / "000006.mp4"),
    )
    assert part_of(first, {"prompt": "a wave", "score": 0.8, "source": "VideoDPO"})
    assert better(second, "video")[0] == str(tmp_path / "winvideos" / "000000.mp4")
    assert second["prompt"] == "a hill"
    found = problems("videodpo", write(tmp_path / "bad.json", rows))
    assert ["'video1'" in problem.detail for problem in found] == [True] * 4


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
    assert part_of(first, {"prompt": "a fox, running", "A_model": "kling", "B_model": "luma"})
    assert first["video_1"] == str(tmp_path / "videos" / "2.mp4")


def test_generic_rows_keep_their_labels_and_lose_their_empty_columns(tmp_path: Path) -> None:
    images = {"image_0": {"bytes": None, "path": "in/0.jpg"}, "image_1": "/far/1.jpg"}
    videos = {"image": "start.png", "video_0": "file:///far/0.mp4", "video_1": "1.mp4"}
    rows = [
        {"prompt": "sky", **images, "alignment": "B", "coherence": None, "video_0": None},
        {"prompt": "ice", **videos, "x": 0},
    ]
    assert pairs("generic", write(tmp_path / "rows.json", rows)) == [
        {
            "prompt": "sky",
            "image_0": str(tmp_path / "in" / "0.jpg"),
            "image_1": "/far/1.jpg",
            "alignment": "B",
        },
        {
            "prompt": "ice",
            "image": str(tmp_path / "start.png"),
            "video_0": "/far/0.mp4",
            "video_1": str(tmp_path / "1.mp4"),
            "x": 0,
        },
    ]
    row = {"prompt": "a", "image_0": "0.jpg", "image_1": "1.jpg", "video_0": "0.mp4"}
    (problem,) = problems("generic", write(tmp_path / "both.json", [row]))
    assert problem.reason == "two kinds of media"
    half = write(tmp_path / "half.json", [{"prompt": "a", "video_0": "0.mp4"}])
    assert "'video_1'" in problems("generic", half)[0].detail


@pytest.mark.parametrize(
    ("format", "row", "reason", "named"),
    [
        ("hpdv3", hpd(1, path1=None), "no file", "'path1'"),
        ("hpdv3", hpd(1, path2=3), "wrong type", "'path2'"),
        ("hpdv3", hpd(1, path2={"bytes": None, "path": None}), "wrong type", "'path2'"),
        ("hpdv3", hpd(1, path1="https://example.com/"), "wrong type", "'path1'"),
        ("hpdv3", hpd(1, prompt=" "), "empty text", "'prompt'"),
        ("hpdv3", hpd(1, prompt=3), "wrong type", "'prompt'"),
        (
            "hpdv3",
            {"prompt": "p", "path_1": "a"},
            "missing column",
            "'path1'; did you mean 'path_1'?",
        ),
        (
            "omnireward_t2i",
            omni("response3"),
            "unknown label",
            "'criteria_preference' is 'response3', which is none of response1, response2, other",
        ),
    ],
)
def test_bad_rows_name_the_column_and_the_file(
    tmp_path: Path, format: str, row: dict[str, Any], reason: str, named: str
) -> None:
    good = hpd(0) if format == "hpdv3" else omni("other")
    path = write(tmp_path / "train.json", [good, row, good])
    first, problem, last = MediaPairs(format, path).rows()
    assert not isinstance(first, BadRow)
    assert not isinstance(last, BadRow)
    assert isinstance(problem, BadRow)
    assert problem.reason == reason
    assert named in problem.detail
    assert "train.json" in problem.detail
    assert repr(format) in problem.remedy


@pytest.mark.parametrize(
    ("format", "name", "content", "message"),
    [
        ("hpdv3", "train.jsonl", "", r"train\.jsonl: there are no rows"),
        ("hpdv3", "train.json", "[]", r"train\.json: there are no rows"),
        ("hpdv3", "train.json", "", r"train\.json: cannot be read as \.json"),
        ("genai_bench_video", "v.json", "{}", "no rows"),
        ("genai_bench_video", "v.json", '{"0": ', r"v\.json: cannot be read as \.json"),
        ("imagerewarddb", "", "", r"no shard.*train_1\.zip.*unpack"),
        (
            "imagerewarddb",
            "s.json",
            json.dumps([ranked("p", "a", 1), ranked("p", "b", 1)]),
            "no pair can be made",
        ),
        ("hpdv3", "../hpdv4", "", r"hpdv4'; did you mean 'hpdv3'"),
    ],
)
def test_a_file_without_pairs_is_an_error(
    tmp_path: Path, format: str, name: str, content: str, message: str
) -> None:
    folder = tmp_path / "hpdv3"
    folder.mkdir()
    if name.endswith(("json", "jsonl")):
        (folder / name).write_text(content, encoding="utf-8")
    else:
        (folder / "train_1.zip").touch()
    with pytest.raises(BadDataError, match=message):
        list(MediaPairs(format, str(folder / name)).rows())


def test_formats_are_named_and_documented() -> None:
    with pytest.raises(BadDataError, match=r"'hpd_v3'.*did you mean 'hpdv3'.*rapidata_i2v"):
        MediaPairs("hpd_v3", "train.json")
    assert not [name for name in FORMATS if f"``{name}``" not in (MediaPairs.__doc__ or "")]
