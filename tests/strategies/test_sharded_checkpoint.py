"""Checkpoints as folders: what goes in comes out, to the bit, and nothing that is damaged does."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.multiprocessing
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lrlhf.run.atomic import atomic_folder
from lrlhf.run.checkpoints.checkpoint_reader import (
    NotACheckpointError,
    StoredTensors,
    is_folder_checkpoint,
    read_checkpoint,
    read_folder,
)
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint, save_folder


def save(checkpoint: Mapping[str, Any], folder: Path) -> Path:
    with atomic_folder(folder) as fresh:
        save_folder(checkpoint, fresh, None)
    return folder


def assert_equal(found: Any, expected: Any, at: str = "") -> None:
    """Same structure, types and bits."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, at
        assert found.shape == expected.shape, at
        assert torch.equal(found, expected.detach()), at
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), at
        for name in expected:
            assert_equal(found[name], expected[name], f"{at}/{name}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), at
        assert len(found) == len(expected), at
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{at}/{index}")
    else:
        assert found == expected, at
        assert type(found) is type(expected), at


def contents() -> dict[str, Any]:
    shared = torch.arange(4.0)
    return {
        "epoch": 3,
        "state_dict": OrderedDict(
            weight=torch.randn(3, 4),
            tied=shared,
            also_tied=shared,
            parameter=nn.Parameter(torch.randn(2)),
            low=torch.randn(5).to(torch.bfloat16),
            whole_number=torch.tensor(7),
            truth=torch.tensor([True, False]),
            transposed=torch.randn(3, 4).T,
            piece=torch.arange(10)[3:7],
            spread=torch.arange(10)[::3],
            none_of_it=torch.zeros(0, 3),
            broadcast=torch.ones(1).expand(3),
        ),
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.randn(2)}, 1: {}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0, 1]}],
            },
            {"state": {}, "param_groups": []},
        ],
        "nested": {"list": [torch.ones(1), 2, "three", None], "pair": (torch.zeros(1), {})},
        "empty": {},
        "words": {"__tensor": "no mark", "tensor__": b"neither"},
        "rng": {"torch": torch.get_rng_state(), "python": (3, (1, 2), None)},
    }


UNUSUAL: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no tensor": {"step": 1},
    "only tensors": {"only": torch.ones(2)},
    "empty parts": {"a": {}, "b": [], "c": ()},
    "names that spell the same path": {
        "a": {"b": torch.zeros(1), "rest": 0},
        "a/b": torch.ones(1),
        "numbers": {0: torch.zeros(2), "0": torch.ones(2), "rest": 0},
    },
}


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["usual", *UNUSUAL])
def test_what_goes_in_comes_out(kind: str, lazy: bool, tmp_path: Path) -> None:
    checkpoint = contents() if kind == "usual" else UNUSUAL[kind]
    found = read_folder(save(checkpoint, tmp_path / "c"), lazy=lazy)
    assert isinstance(found, dict)
    assert_equal(found, checkpoint)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({"hparams": {"__tensor__": "x"}}, "/hparams has an entry '__tensor__'"),
        ({"state": {"w": torch.ones(2, device="meta")}}, "no rank holds /state/w"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(
    checkpoint: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        save(checkpoint, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- lazily


def test_stored_tensors_are_a_mapping_that_reads_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.tensor(4)}
    folder = save({"step": 1, "state_dict": tensors}, tmp_path / "c")
    reads: list[str] = []
    plain = torch.load

    def counted(*arguments: Any, **options: Any) -> Any:
        reads.append("")
        return plain(*arguments, **options)

    monkeypatch.setattr(torch, "load", counted)
    stored = read_folder(folder, lazy=True)["state_dict"]
    reads.clear()
    assert isinstance(stored, StoredTensors)
    assert "a" in stored
    assert "d" not in stored
    assert list(stored) == list(stored.keys()) == ["a", "b", "c"]
    assert (len(stored), reads) == (3, [])
    assert stored["b"].tolist() == [0, 0, 0]
    assert len(reads) == 1
    with pytest.raises(KeyError, match="d"):
        stored["d"]
    assert_equal(dict(stored), tensors)
    assert len(reads) == 4


# ---------------------------------------------------------------------- damaged


def cut(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def shard(folder: Path) -> Path:
    (found,) = folder.glob("*.distcp")
    return found


class Foreign:
    """A class that no checkpoint should bring along."""


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no shard": lambda c: shard(c).unlink(),
    "cut shard": lambda c: cut(shard(c)),
    "other shard": lambda c: shard(c).write_bytes(b"x" * shard(c).stat().st_size),
    "no list": lambda c: (c / ".metadata").unlink(),
    "other list": lambda c: (c / ".metadata").write_bytes(pickle.dumps({"a": 1})),
    "cut meta": lambda c: cut(c / "meta.pt"),
    "foreign class": lambda c: torch.save({"a": Foreign()}, c / "meta.pt"),
    "other meta": lambda c: torch.save([1], c / "meta.pt"),
    "unknown tensor": lambda c: torch.save({"w": {"__tensor__": "/v"}}, c / "meta.pt"),
    "no meta": lambda c: (c / "meta.pt").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    folder = save({"step": 1, "state_dict": {"w": torch.randn(1000)}}, tmp_path / "c.ckpt")
    DAMAGES[damage](folder)
    with pytest.raises(NotACheckpointError, match=r"c\.ckpt") as caught:
        read_folder(folder, lazy=True)["state_dict"]["w"]
    assert "\n" not in str(caught.value)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        # as attributes of modules whose own classes such a list consists of
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "serialization.os.system"),
    ],
)
def test_a_list_of_tensors_that_would_run_code_is_refused_and_does_not(
    module: str, name: str, tmp_path: Path
) -> None:
    folder = save({"w": torch.ones(1)}, tmp_path / "c")
    proof = tmp_path / "it ran"
    # protocol 4: STACK_GLOBAL takes a module and a name, with dots; REDUCE calls what it found
    arguments = short(f"touch '{proof}'") + b"\x85"
    program = b"\x80\x04" + short(module) + short(name) + b"\x93" + arguments + b"R."
    (folder / ".metadata").write_bytes(program)
    with pytest.raises(NotACheckpointError, match="no such list contains"):
        read_folder(folder, lazy=False)
    assert not proof.exists()


def test_an_interrupt_while_reading_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save({"w": torch.ones(1)}, tmp_path / "c")

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_folder(folder, lazy=False)


# ---------------------------------------------------------------------- any kind


NO_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("hello " * 100),
    "foreign": lambda path: torch.save({"state_dict": {}, "a": Foreign()}, path),
    "other": lambda path: torch.save({"w": torch.ones(1)}, path),
    "folder": lambda path: path.mkdir(),
    "missing": lambda _: None,
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    NO_CHECKPOINTS[kind](tmp_path / "bad.ckpt")
    with pytest.raises(NotACheckpointError, match=r"bad\.ckpt") as caught:
        read_checkpoint(tmp_path / "bad.ckpt")
    assert "\n" not in str(caught.value)


def test_a_file_of_the_users_own_classes_is_read_when_they_say_so(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "a": Foreign()}, tmp_path / "c.ckpt")
    found = read_checkpoint(tmp_path / "c.ckpt", weights_only=False)
    assert isinstance(found["a"], Foreign)


def test_converting_there_and_back_keeps_every_bit(tmp_path: Path) -> None:
    checkpoint = contents()
    file, folder, again = (tmp_path / name for name in ("a.ckpt", "b.ckpt", "c.ckpt"))
    torch.save(checkpoint, file)
    convert_checkpoint(file, folder, "sharded")
    assert is_folder_checkpoint(folder)
    assert not is_folder_checkpoint(file)
    convert_checkpoint(folder, again, "full")
    assert again.is_file()
    assert_equal(torch.load(again, weights_only=True), checkpoint)
    assert_equal(read_checkpoint(folder), checkpoint)
    # the sources are as they were
    assert_equal(torch.load(file, weights_only=True), checkpoint)
    assert sorted(tmp_path.iterdir()) == [file, folder, again]


def test_converting_over_something_is_refused(tmp_path: Path) -> None:
    torch.save(contents(), tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"b\.ckpt exists; choose another name"):
        convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt", "full")
    assert (tmp_path / "b.ckpt").read_text() == "precious"


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = save(contents(), tmp_path / "a.ckpt")
    shard(folder).unlink()
    with pytest.raises(NotACheckpointError, match=r"a\.ckpt"):
        convert_checkpoint(folder, tmp_path / "b.ckpt", "full")
    assert list(tmp_path.iterdir()) == [folder]


# ---------------------------------------------------------------------- two processes


class Ranks:
    """The part of a strategy that saving needs."""

    def __init__(self) -> None:
        self.is_global_zero = torch.distributed.get_rank() == 0

    def broadcast(self, value: Any) -> Any:
        values = [value]
        torch.distributed.broadcast_object_list(values)
        return values[0]


def two_ranks(rank: int, folder: Path, case: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    split = distribute_tensor(
        torch.arange(10.0).view(5, 2), init_device_mesh("cpu", (2,)), [Shard(0)]
    )
    alone = torch.arange(3.0)
    checkpoint: dict[str, Any] = {
        "rank": rank,
        "w": {
            "split": split,
            "on both": torch.full((2,), float(rank)),
            "on 0": alone if rank == 0 else alone.to("meta"),
            "on 1": alone + 1 if rank == 1 else alone.to("meta"),
        },
    }
    if case == "more on rank 1" and rank == 1:
        checkpoint["own"] = torch.ones(1)
    if case == "on none":
        checkpoint["w"]["lost"] = alone.to("meta")
    target = folder / "c"
    if rank == 0:
        target.mkdir()
    torch.distributed.barrier()
    try:
        save_folder(checkpoint, target, cast(Strategy, Ranks()))
    except ValueError as error:
        (folder / f"error{rank}").write_text(str(error))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(os.name != "posix", reason="processes are forked")
@pytest.mark.parametrize("case", ["more on rank 1", "on none"])
def test_tensors_come_from_the_ranks_that_hold_them(case: str, tmp_path: Path) -> None:
    # forked: what is imported already is there
    torch.multiprocessing.start_processes(
        two_ranks, args=(tmp_path, case), nprocs=2, start_method="fork"
    )
    errors = [path.read_text() for path in tmp_path.glob("error*")]
    if case == "on none":
        assert len(errors) == 2
        assert all("no rank holds /w/lost" in error for error in errors)
        return
    expected = {
        "rank": 0,
        "w": {
            "split": torch.arange(10.0).view(5, 2),
            "on both": torch.zeros(2),
            "on 0": torch.arange(3.0),
            "on 1": torch.arange(3.0) + 1,
        },
    }
    assert errors == []
    for lazy in (True, False):
        assert_equal(read_folder(tmp_path / "c", lazy=lazy), expected)
