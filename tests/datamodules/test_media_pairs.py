"""Each format is fed rows in the columns that the published set has."""

import io
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
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


def write_json(path: Path, value: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def pairs(source: MediaPairs) -> list[Mapping[str, Any]]:
    rows = list(source.rows())
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if not isinstance(row, BadRow)]


def problems(source: MediaPairs) -> list[BadRow]:
    return [row for row in source.rows() if isinstance(row, BadRow)]


def winner(pair: Mapping[str, Any], kind: str = "image") -> Any:
    return pair[f"{kind}_{'AB'.index(pair['preference'])}"]


def loser(pair: Mapping[str, Any], kind: str = "image") -> Any:
    return pair[f"{kind}_{'BA'.index(pair['preference'])}"]


def hpd(number: int) -> dict[str, Any]:
    return {
        "prompt": f"prompt {number}",
        "path1": f"images/good_{number}.jpg",
        "path2": f"images/bad_{number}.jpg",
        "model1": "flux",
        "model2": "sd2",
        "confidence": 0.98,
        "choice_dist": [12, 1],
    }


def test_hpdv3_prefers_the_first_path_and_resolves_it_beside_the_file(tmp_path: Path) -> None:
    rows = [hpd(0), {**hpd(1), "confidence": None, "choice_dist": None}]
    source = MediaPairs("hpdv3", write_json(tmp_path / "train.json", rows))
    first, second = pairs(source)
    assert winner(first) == str(tmp_path / "images" / "good_0.jpg")
    assert loser(first) == str(tmp_path / "images" / "bad_0.jpg")
    first = {
        key: value for key, value in first.items() if not key.startswith(("image_", "preference"))
    }
    assert first == {
        "prompt": "prompt 0",
        "source": "HPDv3",
        "confidence": 0.98,
        "choice_dist": [12, 1],
        "model_chosen": "flux",
        "model_rejected": "sd2",
        "preferred_path": "images/good_0.jpg",
        "rejected_path": "images/bad_0.jpg",
    }
    assert "confidence" not in second
    assert "choice_dist" not in second


def test_the_order_is_drawn_for_about_half_of_the_rows_and_by_the_seed(tmp_path: Path) -> None:
    path = write_json(tmp_path / "train.json", [hpd(number) for number in range(400)])
    rows = pairs(MediaPairs("hpdv3", path, seed=3))
    labels = [row["preference"] for row in rows]
    assert 160 <= labels.count("A") <= 240  # four standard deviations of 10 around 200
    assert all("good" in winner(row) and "bad" in loser(row) for row in rows)
    again = pairs(MediaPairs("hpdv3", path, seed=3))
    assert rows == again
    other = [row["preference"] for row in pairs(MediaPairs("hpdv3", path, seed=4))]
    assert 140 <= sum(a != b for a, b in zip(labels, other, strict=True)) <= 260


def test_every_process_draws_the_same_order() -> None:
    # lowest bit of `printf seed:row:pair | b2sum -l 8`
    drawn = [is_exchanged(0, number, number % 3) for number in range(16)]
    assert "".join(str(int(turned)) for turned in drawn) == "0111101001000011"
    drawn = [is_exchanged(7, number) for number in range(16)]
    assert "".join(str(int(turned)) for turned in drawn) == "1110010101010100"


def test_exchanging_turns_candidates_and_label_and_leaves_the_rest() -> None:
    pair = {
        "prompt": "A",
        "image": "first.png",
        "video_0": "a.mp4",
        "video_1": "b.mp4",
        "model_0": "m",
        "model_1": "n",
        "preference": "B",
    }
    turned = {
        "prompt": "A",
        "image": "first.png",
        "video_0": "b.mp4",
        "video_1": "a.mp4",
        "model_0": "n",
        "model_1": "m",
        "preference": "A",
    }
    assert exchanged(pair) == turned
    assert exchanged({"image_0": b"0", "image_1": b"1", "preference": "C"}) == {
        "image_0": b"1",
        "image_1": b"0",
        "preference": "C",
    }
    assert "preference" not in exchanged({"image_0": b"0", "image_1": b"1"})


def ranked(prompt_id: str, name: str, rank: int | None) -> dict[str, Any]:
    return {
        "image_path": f"images/train/train_1/{name}.webp",
        "prompt_id": prompt_id,
        "prompt": f"text of {prompt_id}",
        "classification": "People",
        "image_amount_in_total": 3,
        "rank": rank,
        "overall_rating": 5,
        "image_text_alignment_rating": 3,
        "fidelity_rating": 4,
    }


def image_reward_rows() -> list[dict[str, Any]]:
    # of p-1 three pairs, of p-2 the two that the image of rank 3 makes, of p-3 none
    return [
        ranked("p-1", "a", 2),
        ranked("p-1", "b", 1),
        ranked("p-2", "d", 1),
        ranked("p-1", "c", 3),
        ranked("p-2", "e", 1),
        ranked("p-2", "f", 3),
        ranked("p-3", "alone", 1),
    ]


@pytest.mark.parametrize("given", ["", "images", "images/train", "images/train/train_1"])
def test_imagerewarddb_pairs_all_ranks_that_differ(tmp_path: Path, given: str) -> None:
    shard = tmp_path / "images" / "train" / "train_1" / "train_1.json"
    write_json(shard, image_reward_rows())
    rows = pairs(MediaPairs("imagerewarddb", str(tmp_path / given)))
    decided = {(Path(winner(row)).stem, Path(loser(row)).stem) for row in rows}
    assert decided == {("b", "a"), ("a", "c"), ("b", "c"), ("d", "f"), ("e", "f")}
    assert len(rows) == 5
    assert winner(rows[0]) == str(shard.parent / "b.webp")
    assert {key: rows[0][key] for key in ("prompt", "prompt_id", "rank_chosen")} == {
        "prompt": "text of p-1",
        "prompt_id": "p-1",
        "rank_chosen": 1,
    }
    assert (rows[0]["chosen_img"], rows[0]["rejected_img"], rows[0]["rank_rejected"]) == (
        "images/train/train_1/b.webp",
        "images/train/train_1/a.webp",
        2,
    )
    assert rows[0]["classification"] == "People"
    assert rows[0]["overall_rating_rejected"] == 5


def test_imagerewarddb_reads_its_table_of_metadata_too(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "metadata-train.parquet", image_reward_rows())
    rows = pairs(MediaPairs("imagerewarddb", path))
    assert len(rows) == 5
    assert loser(rows[0]) == str(tmp_path / "images" / "train" / "train_1" / "a.webp")


def test_an_image_without_a_rank_is_told_and_the_others_of_its_prompt_stay(tmp_path: Path) -> None:
    rows = [
        ranked("p", "a", 1),
        ranked("p", "b", None),
        ranked("p", "c", 2),
        {key: value for key, value in ranked("p", "d", 3).items() if key != "prompt_id"},
        {**ranked("p", "e", 4), "prompt_id": ["p"]},
        "no row",
    ]
    source = MediaPairs("imagerewarddb", write_json(tmp_path / "s" / "s.json", rows))
    reasons = ["no rank", "missing column", "wrong type", "wrong type"]
    assert [problem.reason for problem in problems(source)] == reasons
    assert "'rank'" in problems(source)[0].detail
    assert all("'prompt_id'" in problem.detail for problem in problems(source)[1:3])
    (pair,) = [row for row in source.rows() if not isinstance(row, BadRow)]
    assert Path(winner(pair)).stem == "a"
    assert Path(loser(pair)).stem == "c"


def test_a_folder_without_shards_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train_1.zip").touch()
    with pytest.raises(BadDataError, match=r"no shard.*train_1\.zip.*unpack"):
        list(MediaPairs("imagerewarddb", str(tmp_path)).rows())


def test_images_of_equal_rank_only_are_no_data(tmp_path: Path) -> None:
    path = write_json(tmp_path / "s.json", [ranked("p", "a", 1), ranked("p", "b", 1)])
    with pytest.raises(BadDataError, match="no pair can be made"):
        list(MediaPairs("imagerewarddb", path).rows())


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
    path = write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", rows)
    (tmp_path / "Videos").mkdir()
    read = pairs(MediaPairs("rapidata_t2v", path))
    assert [labels(row) for row in read] == [
        {"preference": "A", "preference_vote": "B", "coherence": "A", "alignment": "C"},
        {"preference": "C", "preference_vote": "B", "coherence": "C", "alignment": "A"},
        {"preference": "B", "preference_vote": "B"},
        {},
    ]
    assert read[0]["video_0"] == str(tmp_path / "Videos" / "a.mp4")
    assert read[0]["video_1"] == str(tmp_path / "Videos" / "b.mp4")
    assert read[0]["source"] == "Rapidata"
    assert not [column for column in read[0] if column.endswith("_label")]


def test_the_heads_named_like_the_criteria_find_their_labels(tmp_path: Path) -> None:
    rows = [rapid([(0.2, 0.8), (0.9, 0.1), (None, None)])]
    (pair,) = pairs(MediaPairs("rapidata_t2v", write_parquet(tmp_path / "r.parquet", rows)))
    read = LabelReader(("preference", "coherence", "alignment")).of_candidates(pair)
    assert read[:2] == (1.0, 1.0)  # 0.2 + 0.9 against 0.8 + 0.1
    assert read[2] != read[2]  # NaN: not judged, which is not a tie


def test_rapidata_maps_addresses_to_local_files_and_keeps_the_first_frame(tmp_path: Path) -> None:
    frame = png(7)
    rows = [
        rapid(
            [(0.7, 0.3)] * 3,
            file_name1="https://assets.example.com/x/seedance/0%201.mp4?download=true",
            file_name2="https://assets.example.com/x/kling/02.mp4",
            prompt_asset={"bytes": frame, "path": "0001.jpg"},
        )
    ]
    path = write_parquet(tmp_path / "data" / "train.parquet", rows)
    (tmp_path / "videos" / "kling").mkdir(parents=True)
    (row,) = pairs(MediaPairs("rapidata_i2v", path))
    assert row["image"] == frame
    assert row["video_0"] == str(tmp_path / "videos" / "0 1.mp4")
    assert row["video_1"] == str(tmp_path / "videos" / "kling" / "02.mp4")
    assert labels(row)["alignment"] == "A"


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
    path = write_parquet(tmp_path / "text_to_image" / "test.parquet", rows)
    read = pairs(MediaPairs("omnireward_t2i", path))
    assert [row.get("preference") for row in read] == ["A", "B", "C", None]
    assert "preference" not in read[3]
    media = tmp_path / "media_data" / "text_to_image"
    assert (read[1]["image_0"], read[1]["image_1"]) == (
        str(media / "1_a.png"),
        str(media / "1_b.png"),
    )
    assert (read[1]["criteria"], read[1]["id"], read[1]["model2"]) == (
        "the cube is the largest thing",
        "t2i_1",
        "y",
    )


def test_omnireward_takes_images_that_are_in_the_rows_themselves(tmp_path: Path) -> None:
    images = {
        "response1": {"bytes": png(1), "path": "1_a.png"},
        "response2": {"bytes": png(2), "path": "1_b.png"},
    }
    path = write_parquet(tmp_path / "test.parquet", [omni("response1", **images)])
    (row,) = pairs(MediaPairs("omnireward_t2i", path))
    assert (row["image_0"], row["image_1"]) == (png(1), png(2))


def test_omnireward_videos_are_named_in_the_responses(tmp_path: Path) -> None:
    row = {key: value for key, value in omni("response2").items() if "_path" not in key}
    row |= {"response1": "text_to_video/1.mp4", "response2": "text_to_video/2.mp4"}
    path = write_parquet(tmp_path / "data" / "test.parquet", [row])
    (read,) = pairs(MediaPairs("omnireward_t2v", path, media_root=str(tmp_path / "else")))
    assert read["video_1"] == str(tmp_path / "else" / "text_to_video" / "2.mp4")
    assert read["preference"] == "B"


def test_an_unknown_choice_is_a_bad_row_and_no_tie(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "test.parquet", [omni("response3")])
    (problem,) = problems(MediaPairs("omnireward_t2i", path))
    assert problem.reason == "unknown label"
    assert "'criteria_preference'" in problem.detail
    assert "response1, response2, other" in problem.detail


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
    path = write_parquet(tmp_path / "image_generation" / "test_v1.parquet", rows)
    read = pairs(MediaPairs("genai_bench", path))
    assert winner(read[0]) == png(10)
    assert winner(read[1]) == png(20)
    assert [row["preference"] for row in read[2:]] == ["C", "C"]
    assert {row["vote_type"] for row in read[2:]} == {"tievote", "bothbad_vote"}
    models = {png(10): "SDXL", png(20): "PixArt"}
    for row in read:
        assert (models[row["image_0"]], models[row["image_1"]]) == (row["model_0"], row["model_1"])


def test_genai_bench_edits_start_from_an_image(tmp_path: Path) -> None:
    row = {
        "source_prompt": "a cat",
        "target_prompt": "a dog",
        "instruct_prompt": "make it a dog",
        "source_image": {"bytes": png(1), "path": None},
        "left_model": "InfEdit",
        "left_output_image": {"bytes": png(2), "path": None},
        "right_model": "SDEdit",
        "right_output_image": {"bytes": png(3), "path": None},
        "vote_type": "rightvote",
    }
    (read,) = pairs(MediaPairs("genai_bench", write_parquet(tmp_path / "e.parquet", [row])))
    assert (read["prompt"], read["image"]) == ("make it a dog", png(1))
    assert (winner(read), loser(read)) == (png(3), png(2))


def test_genai_bench_pairs_all_rated_models(tmp_path: Path) -> None:
    image = {"path": "x.jpg"}
    row = {
        "Index": "00007",
        "Prompt": "a tin robot",
        "DALLE_3": {**image, "bytes": png(1)},
        "Midjourney_6": {**image, "bytes": png(2)},
        "SDXL_Base": {**image, "bytes": png(3)},
        "SDXL_Turbo": None,
        # means 4, 4 and 3; nobody rated the last one
        "HumanRatings": {
            "DALLE_3": [5, 4, 3],
            "Midjourney_6": [4, 4, 4],
            "SDXL_Base": [3, 3, 3],
            "SDXL_Turbo": [5, 5, 5],
        },
    }
    path = write_parquet(tmp_path / "test.parquet", [row])
    read = pairs(MediaPairs("genai_bench", path))
    assert len(read) == 3  # of three shown models
    found = {
        frozenset((pair["model_0"], pair["model_1"])): (
            "tie" if pair["preference"] == "C" else winner(pair)
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
    }
    write_json(tmp_path / "genai_video.json", samples)
    source = MediaPairs("genai_bench_video", str(tmp_path))
    read = [row for row in source.rows() if not isinstance(row, BadRow)]
    assert [frozenset((row["model_0"], row["model_1"])) for row in read] == [
        frozenset(("Pika", "Gen2")),
        frozenset(("Pika", "Other")),
        frozenset(("Gen2", "Other")),
    ]
    assert winner(read[0], "video") == str(tmp_path / "Gen2" / "00000.mp4")
    assert loser(read[0], "video") == str(tmp_path / "Pika" / "00000.mp4")
    assert "preference" not in read[1]  # nobody rated Other
    assert [problem.reason for problem in problems(source)] == ["wrong type", "missing column"]
    assert "'00001'" in problems(source)[0].detail
    assert "'prompt'" in problems(source)[1].detail


def test_genai_bench_video_reads_votes_too(tmp_path: Path) -> None:
    row = {
        "prompt": "a kite",
        "left_model": "Pika",
        "left_video": "https://videos.example.com/resolve/main/l.mp4",
        "right_model": "Gen2",
        "right_video": "r.mp4",
        "vote_type": "leftvote",
    }
    path = write_parquet(tmp_path / "video_generation" / "test.parquet", [row])
    (read,) = pairs(MediaPairs("genai_bench_video", path, media_root=str(tmp_path / "mp4")))
    assert winner(read, "video") == str(tmp_path / "mp4" / "l.mp4")
    assert loser(read, "video") == str(tmp_path / "mp4" / "r.mp4")


def test_ratings_that_are_no_list_of_numbers_are_a_bad_row(tmp_path: Path) -> None:
    samples = {
        "0": {"prompt": "a kite", "models": {"Pika": 3, "Gen2": [5]}},
        "1": {"prompt": "a kite", "models": {"Pika": ["good"], "Gen2": [5]}},
    }
    path = write_json(tmp_path / "genai_video.json", samples)
    found = problems(MediaPairs("genai_bench_video", path))
    assert [problem.reason for problem in found] == ["wrong type", "wrong type"]
    assert all("'models[Pika]'" in problem.detail for problem in found)


def test_a_rated_row_needs_the_id_that_names_its_videos(tmp_path: Path) -> None:
    row = {"prompt": "a kite", "models": {"Pika": [3], "Gen2": [5]}}
    source = MediaPairs("genai_bench_video", write_json(tmp_path / "rows.json", [row]))
    (problem,) = problems(source)
    assert problem.reason == "missing column"
    assert "'id'" in problem.detail
    (pair,) = pairs(
        MediaPairs("genai_bench_video", write_json(tmp_path / "ok.json", [{**row, "id": 4}]))
    )
    assert winner(pair, "video") == str(tmp_path / "Gen2" / "4.mp4")


def test_a_broken_file_of_ratings_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "genai_video.json").write_text('{"0": ', encoding="utf-8")
    with pytest.raises(BadDataError, match=r"genai_video\.json: cannot be read as \.json"):
        list(MediaPairs("genai_bench_video", str(tmp_path)).rows())


def test_videodpo_numbers_stand_for_files(tmp_path: Path) -> None:
    rows = [
        {"video1": 6, "video2": 13, "frame_caption": ["a wave", "x"], "score": 0.8},
        {"video1": 0, "video2": 1, "frame_caption": "a hill"},
    ]
    first, second = pairs(MediaPairs("videodpo", write_json(tmp_path / "pair.json", rows)))
    assert winner(first, "video") == str(tmp_path / "winvideos" / "000003.mp4")
    assert loser(first, "video") == str(tmp_path / "losevideos" / "000006.mp4")
    assert (first["prompt"], first["score"], first["source"]) == ("a wave", 0.8, "VideoDPO")
    assert winner(second, "video") == str(tmp_path / "winvideos" / "000000.mp4")
    assert second["prompt"] == "a hill"


def test_videogen_rewardbench_has_a_label_per_head(tmp_path: Path) -> None:
    path = tmp_path / "videogen-rewardbench.csv"
    path.write_text(
        "path_A,path_B,A_model,B_model,prompt,fps_A,VQ,MQ,TA,Overall\n"
        'videos/1.mp4,./videos/2.mp4,kling,luma,"a fox, running",24,A,same,B,A\n'
        "videos/3.mp4,videos/4.mp4,kling,luma,a fox,24,invalid,B,,same\n"
        "videos/5.mp4,videos/6.mp4,kling,luma,a fox,24,B,B,B,\n",
        encoding="utf-8",
    )
    first, second, third = pairs(MediaPairs("videogen_rewardbench", str(path)))
    heads = ("preference", "VQ", "MQ", "TA")
    assert [{head: row[head] for head in heads if head in row} for row in (first, second)] == [
        {"preference": "A", "VQ": "A", "MQ": "C", "TA": "B"},
        {"preference": "C", "MQ": "B"},
    ]
    assert "preference" not in third
    assert first["prompt"] == "a fox, running"
    assert first["video_1"] == str(tmp_path / "videos" / "2.mp4")
    assert (first["A_model"], first["B_model"]) == ("kling", "luma")


def test_generic_rows_keep_their_labels_and_lose_their_empty_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": "sea", "image_0": "0.jpg", "image_1": "/far/1.jpg", "preference": "A"},
        {
            "prompt": "sky",
            "image_0": {"bytes": None, "path": "in/0.jpg"},
            "image_1": "1.jpg",
            "alignment": "B",
            "coherence": None,
            "video_0": None,
            "source": "mine",
        },
        {
            "prompt": "ice",
            "image": "start.png",
            "video_0": "file:///far/0.mp4",
            "video_1": "1.mp4",
            "x": 0,
        },
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert pairs(MediaPairs("generic", str(path))) == [
        {
            "prompt": "sea",
            "image_0": str(tmp_path / "0.jpg"),
            "image_1": "/far/1.jpg",
            "preference": "A",
        },
        {
            "prompt": "sky",
            "image_0": str(tmp_path / "in" / "0.jpg"),
            "image_1": str(tmp_path / "1.jpg"),
            "alignment": "B",
            "source": "mine",
        },
        {
            "prompt": "ice",
            "image": str(tmp_path / "start.png"),
            "video_0": "/far/0.mp4",
            "video_1": str(tmp_path / "1.mp4"),
            "x": 0,
        },
    ]


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        ({"path1": None}, "no file", "'path1'"),
        ({"path2": 3}, "wrong type", "'path2'"),
        ({"path2": {"bytes": None, "path": None}}, "wrong type", "'path2'"),
        ({"path1": "https://example.com/"}, "wrong type", "'path1'"),
        ({"prompt": " "}, "empty text", "'prompt'"),
        ({"prompt": 3}, "wrong type", "'prompt'"),
    ],
)
def test_bad_rows_name_the_column_and_the_file(
    tmp_path: Path, change: dict[str, Any], reason: str, named: str
) -> None:
    path = write_json(tmp_path / "train.json", [hpd(0), {**hpd(1), **change}, hpd(2)])
    source = MediaPairs("hpdv3", path)
    first, problem, last = source.rows()
    assert not isinstance(first, BadRow)
    assert not isinstance(last, BadRow)
    assert isinstance(problem, BadRow)
    assert problem.reason == reason
    assert named in problem.detail
    assert "train.json" in problem.detail
    assert "'hpdv3'" in problem.remedy


def test_a_missing_column_comes_with_the_nearest_one(tmp_path: Path) -> None:
    row = {("path_1" if key == "path1" else key): value for key, value in hpd(0).items()}
    (problem,) = problems(MediaPairs("hpdv3", write_json(tmp_path / "train.json", [row])))
    assert problem.reason == "missing column"
    assert "'path1'; did you mean 'path_1'?" in problem.detail


@pytest.mark.parametrize("number", [None, -1, 1.5, "six"])
def test_a_video_that_is_no_number_is_a_bad_row(tmp_path: Path, number: object) -> None:
    row = {"video1": number, "video2": 1, "frame_caption": "a"}
    (problem,) = problems(MediaPairs("videodpo", write_json(tmp_path / "pair.json", [row])))
    assert "'video1'" in problem.detail


def test_images_and_videos_to_compare_in_one_row_are_a_bad_row(tmp_path: Path) -> None:
    row = {"prompt": "a", "image_0": "0.jpg", "image_1": "1.jpg", "video_0": "0.mp4"}
    (problem,) = problems(MediaPairs("generic", write_json(tmp_path / "rows.json", [row])))
    assert problem.reason == "two kinds of media"
    half = write_json(tmp_path / "half.json", [{"prompt": "a", "video_0": "0.mp4"}])
    assert "'video_1'" in problems(MediaPairs("generic", half))[0].detail


def test_an_unparsable_row_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(hpd(0))}\n{{\n", encoding="utf-8")
    assert [row.reason for row in problems(MediaPairs("hpdv3", str(path)))] == ["unparsable JSON"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", "", r"train\.jsonl: there are no rows"),
        ("train.json", "[]", r"train\.json: there are no rows"),
        ("train.json", "", r"train\.json: cannot be read as \.json"),
    ],
)
def test_an_empty_file_is_an_error(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(BadDataError, match=message):
        list(MediaPairs("hpdv3", str(tmp_path / name)).rows())


def test_an_empty_file_of_ratings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadDataError, match="no rows"):
        list(MediaPairs("genai_bench_video", write_json(tmp_path / "v.json", {})).rows())


def test_a_missing_path_names_the_nearest_one(tmp_path: Path) -> None:
    write_json(tmp_path / "hpdv3" / "train.json", [hpd(0)])
    with pytest.raises(BadDataError, match=r"trian\.json'; did you mean 'train\.json'"):
        list(MediaPairs("hpdv3", str(tmp_path / "hpdv3" / "trian.json")).rows())
    with pytest.raises(BadDataError, match=r"hpdv4'; did you mean 'hpdv3'"):
        list(MediaPairs("hpdv3", str(tmp_path / "hpdv4")).rows())


def test_an_unknown_format_names_the_nearest_and_all() -> None:
    with pytest.raises(BadDataError, match=r"'hpd_v3'.*did you mean 'hpdv3'.*rapidata_i2v"):
        MediaPairs("hpd_v3", "train.json")


def test_the_name_says_format_and_path_and_a_source_can_be_sent_to_workers(tmp_path: Path) -> None:
    source = MediaPairs("hpdv3", write_json(tmp_path / "train.json", [hpd(0), hpd(1)]), seed=5)
    assert source.name == f"hpdv3:{tmp_path / 'train.json'}"
    assert pairs(pickle.loads(pickle.dumps(source))) == pairs(source)


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "train.json", [hpd(0)])
    monkeypatch.chdir(tmp_path)
    (row,) = pairs(MediaPairs("hpdv3", "train.json", media_root="pictures"))
    assert winner(row) == str(tmp_path / "pictures" / "images" / "good_0.jpg")
    (row,) = pairs(MediaPairs("hpdv3", "train.json"))
    assert winner(row) == str(tmp_path / "images" / "good_0.jpg")


def test_the_files_of_a_pattern_are_read_in_order(tmp_path: Path) -> None:
    for number in (1, 0):
        write_json(tmp_path / f"part_{number}.json", [hpd(number)])
    read = pairs(MediaPairs("hpdv3", str(tmp_path / "part_*.json")))
    assert [row["prompt"] for row in read] == ["prompt 0", "prompt 1"]
    assert pairs(MediaPairs("hpdv3", str(tmp_path))) == read


def test_the_docstring_lists_all_formats() -> None:
    assert not [name for name in FORMATS if f"``{name}``" not in (MediaPairs.__doc__ or "")]
