import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lrlhf.rollout import load_rollout, save_rollout
from lrlhf.rollout.storage import load_group_ids, rollout_files, rollout_path
from lrlhf.types import Rollout, SamplingMask


def rollout(*, kept_mass: bool = True) -> Rollout:
    mask = torch.tensor([[False, True, True], [False, True, False]])
    return Rollout(
        input_ids=torch.tensor([[5, 6, 7], [5, 8, 0]]),
        attention_mask=torch.tensor([[True, True, True], [True, True, False]]),
        response_mask=mask,
        sampling_logprobs=torch.tensor([[0.0, -0.125, -3.1], [0.0, -1.7, 0.0]]),
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([True, False]),
        kept_mass=torch.tensor([[1.0, 0.5, 0.9], [1.0, 0.75, 1.0]]) if kept_mass else None,
        sampling_mask=SamplingMask(
            sizes=torch.tensor([[0, 2, 0], [0, 1, 0]], dtype=torch.int32),
            ids=torch.tensor([6, 9, 8], dtype=torch.int32),
        )
        if kept_mass
        else None,
    )


RECORDS = [
    {"step": 3, "completion": "naïve 😀 \ud83d", "score": 1.5, "rewards": {"a": None}},
    {"step": 3, "completion": "", "score": None, "rewards": {}},
]
SCORES = torch.tensor([1.5, float("nan")])


def store(folder: Path, **changes: Any) -> Path:
    path = folder / "a.safetensors"
    save_rollout(path, rollout(**changes), SCORES, RECORDS)
    return path


@pytest.mark.parametrize("kept_mass", [True, False])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, kept_mass: bool) -> None:
    path = store(tmp_path, kept_mass=kept_mass)
    stored = load_rollout(path)
    for field in fields(Rollout):
        saved = getattr(rollout(kept_mass=kept_mass), field.name)
        loaded = getattr(stored.rollout, field.name)
        assert (loaded is None) == (saved is None), field.name
        if field.name == "sampling_mask" and saved is not None:
            assert torch.equal(loaded.sizes, saved.sizes)
            assert torch.equal(loaded.ids, saved.ids)
        elif saved is not None:
            assert loaded.dtype == saved.dtype, field.name
            assert torch.equal(loaded, saved), field.name
    assert stored.scores[0] == 1.5
    assert math.isnan(stored.scores[1])
    assert list(stored.records) == RECORDS
    # safetensors reads no header above 100 MB: records are no part of it
    with safe_open(path, framework="pt") as file:
        assert sorted(file.metadata()) == ["checksum", "format"]


def test_an_open_file_is_written_too_and_tensors_may_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    whole = torch.ones(2, 3, dtype=torch.bool)
    shared = replace(
        rollout(),
        input_ids=torch.arange(12).view(2, 6)[:, ::2],  # not contiguous
        attention_mask=whole,
        response_mask=whole,
        sampling_logprobs=torch.zeros(2, 3, requires_grad=True),
    )
    with path.open("wb") as handle:
        save_rollout(handle, shared, SCORES, RECORDS)
    stored = load_rollout(path)
    assert stored.rollout.input_ids.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert not stored.rollout.sampling_logprobs.requires_grad


def test_files_are_listed_by_step_and_rank_and_others_passed_over(tmp_path: Path) -> None:
    assert rollout_path(tmp_path, 12, 0).name == "step_000012.rank_0.safetensors"
    assert rollout_files(tmp_path / "none") == []
    places = [(1_000_000, 0), (12, 10), (12, 2), (3, 0)]
    for step, rank in places:
        rollout_path(tmp_path, step, rank).touch()
    for name in (".step_000012.rank_0.safetensors.tmp", "step_1.rank_0.safetensors.bak", "x"):
        (tmp_path / name).touch()
    listed = [(step, rank) for step, rank, _ in rollout_files(tmp_path)]
    assert listed == [(3, 0), (12, 2), (12, 10), (1_000_000, 0)]


@pytest.mark.parametrize(
    ("scores", "records", "message"),
    [
        (SCORES, RECORDS[:1], "2 rows came with 2 scores and 1 records"),
        (SCORES[:1], RECORDS, "2 rows came with 1 scores"),
        (SCORES, [{"value": object()}, {}], "not of JSON types"),
        (SCORES, [{"value": math.nan}, {}], "not of JSON types"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, scores: torch.Tensor, records: list[Any], message: str
) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=message):
        save_rollout(path, rollout(), scores, records)
    assert not path.exists()


def changed(path: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors under the checksum of the old ones."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {**load_file(path), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata=metadata)


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})


def one_bit_off(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "there is no file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
        (foreign, r"no stored rollout: .* 'pt'"),
        (partial(changed, scores=None), r"no complete rollout: tensors \['scores'\] are missing"),
        (partial(changed, weight=torch.zeros(1)), r"\['weight'\] are unknown"),
        (one_bit_off, "its checksum differs"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = store(tmp_path)
    assert load_group_ids(path).tolist() == [0, 0]
    damage(path)
    with pytest.raises(ValueError, match=message) as raised:
        load_rollout(path)
    assert str(path) in str(raised.value)
