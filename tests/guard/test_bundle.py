"""A bundle is the same after its files, which hold no code."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrlhf.guard.dump import NotADumpError, StepBundle, read_bundle, write_bundle
from lrlhf.types import Media, TensorBatch
from tests.guard.batches import NAN, experience, filled, pairs, sequences


def bundle(**changes: Any) -> StepBundle:
    options: dict[str, Any] = {"stage": "policy", "batches": {}, "seeds": [(3, 1, 0)]}
    return StepBundle(**(options | {"context": {}} | changes))


def again(folder: Path, given: StepBundle) -> StepBundle:
    write_bundle(folder, 1, given)
    assert {path.name for path in folder.iterdir()} == {"rank_1.pt"}
    return read_bundle(folder, 1)


def assert_equal(found: TensorBatch, given: TensorBatch) -> None:
    assert type(found) is type(given)
    for field in fields(given):
        one, other = getattr(found, field.name), getattr(given, field.name)
        if isinstance(other, TensorBatch):
            assert_equal(one, other)
        elif isinstance(other, torch.Tensor | dict):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        elif field.name != "media":
            assert one == other


def test_an_iteration_is_the_same_after_its_files(tmp_path: Path) -> None:
    # advantages that are a column of something larger, and an experience of expanded rows
    columns = {"reward/a": torch.tensor([1.0, NAN])}
    wide, values = filled(NAN).repeat(1, 3)[:, 5:10], filled(float("inf"))
    part = experience(advantages=wide, values=values, columns=columns, old_source="engine")
    moments = {"mean": np.float64(0.5)}
    context = {"filler": torch.tensor([True, False]), "moments": moments, "none": None}
    given = bundle(batches={"experience": part}, context=context | {"drawn": True})
    found = again(tmp_path, given)
    assert (found.stage, found.seeds) == ("policy", [(3, 1, 0)])
    assert_equal(found.batches["experience"], part)
    filler = found.context.pop("filler")  # type: ignore[attr-defined]
    assert filler.tolist() == [True, False]
    assert found.context == {"moments": {"mean": 0.5}, "drawn": True, "none": None}
    # not the whole of what it is a view of
    stored = found.batches["experience"].advantages  # type: ignore[attr-defined]
    assert stored.untyped_storage().nbytes() == 2 * 5 * 4


def test_pairs_share_in_the_file_what_they_show(tmp_path: Path) -> None:
    picture = Media(
        tensors={"pixel_values": torch.randn(4, 3)},
        tokens={"image": 4},
        images=(object(),),
        prompt_ids=(1, 2),
        names=("a.png",),
    )
    both = (picture, None)
    given = pairs(
        candidate0=sequences(both), candidate1=sequences(both), margin=filled(1.0)[1, 2:4]
    )
    found = again(tmp_path, bundle(batches={"0": given, "1": pairs()})).batches
    assert_equal(found["0"], given)
    assert_equal(found["1"], pairs())
    read: Any = found["0"]
    seen = read.candidate0.media[0]
    assert seen is read.candidate1.media[0]
    assert torch.equal(seen.tensors["pixel_values"], picture.tensors["pixel_values"])
    assert (seen.tokens, seen.names, seen.prompt_ids) == ({"image": 4}, ("a.png",), (1, 2))
    assert seen.images == ()
    assert read.candidate0.media[1] is None


def other_kind(path: Path) -> None:
    described = torch.load(path, weights_only=True)
    described["batches"]["part"]["kind"] = "os.system"
    torch.save(described, path)


def code(path: Path) -> None:
    torch.save({"stage": os.system}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_kind, r"rank_1\.pt .*kind 'os.system'; known are Experience"),
        (code, r"rank_1\.pt cannot be read: .*"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), r"rank_1\.pt cannot be read"),
        (lambda path: path.unlink(), r"rank_1\.pt is missing: the dump is not whole"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: Any, message: str) -> None:
    write_bundle(tmp_path, 1, bundle(batches={"part": experience()}))
    change(tmp_path / "rank_1.pt")
    with pytest.raises(NotADumpError, match=message):
        read_bundle(tmp_path, 1)
