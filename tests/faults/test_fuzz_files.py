"""Damaged files are refused by name, or hold what was written; nothing else comes of them."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lrlhf.callbacks.rollout_log import _forget_steps_after
from lrlhf.rewards import RewardError, Rewards
from lrlhf.rollout.storage import load_rollout, save_rollout
from lrlhf.run.atomic import atomic_folder, remove
from lrlhf.run.checkpoints.checkpoint_reader import NotACheckpointError
from lrlhf.run.checkpoints.sharded_checkpoint import AtomicCheckpointIO, save_folder
from lrlhf.types import Rollout
from tests.faults.fuzz_settings import assert_told, fuzzing

Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """One way to spoil a file, at a place drawn as a share of its length."""
    share = draw(st.floats(0, 1))
    how = draw(st.sampled_from(["flip", "cut", "zero", "add", "drop"]))
    extra, bit = draw(st.binary(min_size=1, max_size=20)), draw(st.integers(0, 7))

    def spoil(data: bytes) -> bytes:
        at = min(int(share * len(data)), len(data) - 1)
        return {
            "flip": lambda: data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :],
            "cut": lambda: data[:at],
            "zero": lambda: data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :],
            "add": lambda: data[:at] + extra + data[at:],
            "drop": lambda: data[:at] + data[at + len(extra) :],
        }[how]()

    return spoil


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, Mapping):
        return list(found) == list(expected) and all(same(found[k], v) for k, v in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


CHECKPOINT = {
    "global_step": 7,
    "state_dict": {"weight": torch.arange(60.0).reshape(6, 10), "bias": torch.ones(3)},
    "optimizer_states": [
        {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1}]}
    ],
    "callbacks": {"RLCheckpoint": {"best": None, "kept": ["a", "b"]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Path]:
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, folder / "file.ckpt")
    with atomic_folder(folder / "folder.ckpt") as fresh:
        save_folder(CHECKPOINT, fresh, None)
    return {kind: folder / f"{kind}.ckpt" for kind in ("file", "folder")}


@fuzzing(200)
@given(data=st.data(), kind=st.sampled_from(["file", "folder"]), damage=damages())
@pytest.mark.filterwarnings("ignore:.*")
def test_a_damaged_checkpoint_is_refused(
    folder: Path, whole: dict[str, Path], data: st.DataObject, kind: str, damage: Damage
) -> None:
    path = folder / "spoiled.ckpt"
    remove(path)
    if kind == "folder":
        shutil.copytree(whole[kind], path)
        victim = data.draw(st.sampled_from(sorted(path.iterdir())))
    else:
        victim = Path(shutil.copy(whole[kind], path))
    victim.write_bytes(damage(victim.read_bytes()))
    try:
        found = AtomicCheckpointIO().load_checkpoint(path)
    except NotACheckpointError as error:
        assert_told(error, str(path))
    else:
        assert same(found, CHECKPOINT)


def rollout() -> Rollout:
    ids = torch.arange(24).reshape(4, 6)
    mask = torch.ones(4, 6, dtype=torch.bool)
    return Rollout(
        input_ids=ids,
        attention_mask=mask,
        response_mask=mask,
        sampling_logprobs=-torch.rand(4, 6),
        group_ids=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
    )


RECORDS = tuple({"step": 3, "group": n // 2, "completion": "añ"} for n in range(4))


@fuzzing(200)
@given(damage=damages())
def test_a_damaged_stored_rollout_is_refused(folder: Path, damage: Damage) -> None:
    path = folder / "step_000003.rank_0.safetensors"
    expected, scores = rollout(), torch.arange(4.0)
    save_rollout(path, expected, scores, RECORDS)
    path.write_bytes(damage(path.read_bytes()))
    try:
        found = load_rollout(path)
    except ValueError as error:
        assert_told(error, str(path))
    else:
        assert torch.equal(found.rollout.input_ids, expected.input_ids)
        assert torch.equal(found.rollout.sampling_logprobs, expected.sampling_logprobs)
        assert torch.equal(found.scores, scores)
        assert found.records == RECORDS


LINES = st.one_of(
    st.sampled_from([b"", b"null", b"[" * 5000, b"\xff", b"\x00" * 9]),
    st.sampled_from([b"Infinity", b"NaN", b'"3"', b"[3]", b"1e400", b"9" * 5001]).map(
        lambda step: b'{"step": ' + step + b"}"
    ),
    st.binary(max_size=12),
)


@fuzzing(200)
@given(line=LINES, damage=damages(), where=st.integers(0, 6))
def test_a_damaged_rollouts_file_is_refused_or_cut_at_the_step(
    folder: Path, line: bytes, damage: Damage, where: int
) -> None:
    path = folder / "rollouts.jsonl"
    good = [json.dumps({"step": step, "completion": "x"}).encode() for step in (1, 1, 2, 2, 3, 3)]
    spoiled = b"\n".join([*good[:where], line, *good[where:]]) + b"\n"
    content = damage(spoiled)
    path.write_bytes(content)
    try:
        _forget_steps_after(path, 2)
    except ValueError as error:
        assert_told(error, str(path))
        assert path.read_bytes() == content  # nothing was lost by looking
    else:
        kept = path.read_bytes().splitlines(keepends=True)
        # what is left are lines as they were, in their order
        lines = iter(content.splitlines(keepends=True))
        assert all(line in lines for line in kept)
        assert all(float(json.loads(line)["step"]) < 3 for line in kept if line.strip())


# ---- what a reward function returns


class Hostile:
    """Raises whatever is asked of it."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __len__ = __getitem__ = __iter__ = __float__ = __index__ = __bool__ = _refuse


ODD = [
    *(10**400, object(), Hostile(), float, lambda: 1.0),
    *(torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.tensor(1j)),
    torch.empty((), device="meta"),
    *(np.float64("nan"), np.datetime64("2026-01-01"), np.array("x"), np.array(1.0)),
]
SCALARS: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers()),
    *(st.text(max_size=4), st.binary(max_size=4), st.fractions(), st.decimals()),
    st.sampled_from(ODD),
)
ODD_LISTS = [
    *(torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta")),
    *(torch.ones(3).to_sparse(), torch.ones(3, requires_grad=True)),
    *(np.array(["a", "b", "c"]), np.array([1, None, object()], dtype=object)),
    np.array(["2026-01-01"] * 3, dtype="datetime64[D]"),
    np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
    *(range(3), range(10**9), b"abc"),
]
RETURNED: st.SearchStrategy[Any] = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=4),
    st.lists(SCALARS, min_size=3, max_size=3),
    st.tuples(SCALARS, SCALARS, SCALARS),
    st.dictionaries(st.integers(), SCALARS, max_size=3),
    st.lists(st.lists(SCALARS, max_size=3), min_size=3, max_size=3),
    st.sampled_from(ODD_LISTS),
)


@fuzzing(200)
@given(returned=RETURNED)
@pytest.mark.filterwarnings("ignore:.*")
def test_any_returned_value_is_scores_or_an_error_that_names_the_function(returned: Any) -> None:
    def odd(**_: Any) -> Any:
        return returned

    rewards = Rewards([odd], max_unscorable_fraction=1.0)
    try:
        result = rewards.score(["p"] * 3, ["c"] * 3, [[1]] * 3, [{}] * 3)
    except RewardError as error:
        assert_told(error, "odd")
    else:
        assert len(result.scores) == 3
        assert all(math.isfinite(score) or math.isnan(score) for score in result.scores.tolist())
