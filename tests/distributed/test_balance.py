"""Ranks exchange rows: each ends with as many tokens, and training ends where it did without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, distributed, multiprocessing

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules.policy import update
from lrlhf.run import Collectives, sequence_balancing
from lrlhf.run.sequence_balancing import Balanced, balance_over_ranks
from lrlhf.types import Experience, Media
from tests.distributed import strategy_runs

pytestmark = pytest.mark.slow

PER_TOKEN = ("input_ids", "response_mask", "sampling_logprobs", "advantages", "loss_mask")


def experience(
    seed: int, *, groups: int = 4, size: int = 3, scale: float = 1.0, **columns: Any
) -> Experience:
    """Groups of responses whose lengths have a long tail, on a rank that ``scale`` makes slow."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * size
    prompts = torch.randint(2, 9, (groups,), generator=generator).repeat_interleave(size)
    tails = torch.exp(2 + torch.randn(rows, generator=generator)) * scale
    lengths = prompts + tails.long().clamp(1, 200)
    width = int(lengths.max()) + 2  # padding that no row needs
    place = torch.arange(width)
    attention = place < lengths[:, None]
    response = attention & (place >= prompts[:, None])
    numbers = torch.randn(rows, width, generator=generator)
    ids = torch.randint(5, 90, (rows, width), generator=generator)
    given: dict[str, Any] = {
        "input_ids": torch.where(attention, ids, 3),
        "attention_mask": attention,
        "response_mask": response,
        "sampling_logprobs": torch.where(response, -numbers.abs(), 0.0),
        "group_ids": torch.arange(groups).repeat_interleave(size),
        "truncated": lengths % 2 == 0,
        "scores": torch.randn(rows, generator=generator),
        "old_logprobs": torch.where(response, numbers, 0.0),
        "advantages": torch.where(response, numbers * 2, 0.0),
        "loss_mask": response & (numbers > -1),
        "counted": lengths % 3 > 0,
        "kept_mass": torch.where(response, 0.5, 1.0),
        "weight_version": torch.full((rows,), seed),
        "values": torch.where(response, numbers, 0.0).bfloat16(),
    }
    return Experience(**{**given, **columns})


def process(rank: int, world: int, folder: Path, options: dict[str, Any]) -> None:
    """One rank: makes its rows, exchanges them, writes both."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    own = options.get("by_rank", [{}] * world)[rank]
    before = experience(rank, **{"scale": 1.0 + 4 * (rank == 0), **own})
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(world_size=world, global_rank=rank, strategy=strategy)
    ranks = Collectives(cast(L.Trainer, trainer))
    done = balance_over_ranks(before, ranks)
    result = {
        "before": rows_of(before),
        "after": rows_of(done.rows),
        "group_ids": done.rows.group_ids.tolist(),
        "balance": (done.before, done.after),
        "same": done.rows is before,
        "padding": {
            name: value[~done.rows.attention_mask].unique().tolist()
            for name in (*PER_TOKEN, "kept_mass")
            if isinstance(value := getattr(done.rows, name), Tensor)
        },
    }
    torch.save(result, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


def rows_of(batch: Experience) -> list[dict[str, Any]]:
    """Every row without its padding, as plain numbers by column."""
    listed = []
    for row in range(len(batch)):
        mask = batch.attention_mask[row]
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        listed.append(
            {
                name: (value[row][mask] if value[row].shape == mask.shape else value[row]).tolist()
                for name, value in values.items()
                if isinstance(value, Tensor) and name not in ("attention_mask", "group_ids")
            }
        )
    return listed


def exchanged(folder: Path, world: int, **options: Any) -> list[dict[str, Any]]:
    multiprocessing.start_processes(
        process, (world, folder, options), nprocs=world, start_method="fork"
    )
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]


def load(rows: list[dict[str, Any]], group_ids: list[int]) -> int:
    """Tokens of the responses, and of one prompt per group."""
    prompts = {}
    for row, group in zip(rows, group_ids, strict=True):
        prompts[group] = row["response_mask"].index(True)
    return sum(prompts.values()) + sum(sum(row["response_mask"]) for row in rows)


def test_all_ranks_together_keep_every_row_and_each_has_about_as_many_tokens(
    tmp_path: Path,
) -> None:
    world = 3
    ranks = exchanged(tmp_path, world)
    before = [row for rank in ranks for row in rank["before"]]
    after = [row for rank in ranks for row in rank["after"]]
    # of the rows, `weight_version` says where they come from, and their place says in which group
    assert sorted(after, key=repr) == sorted(before, key=repr)
    assert not any(rank["same"] for rank in ranks)
    place = {repr(row): (index // 3, index) for index, row in enumerate(before)}
    owner: dict[int, int] = {}
    for index, rank in enumerate(ranks):
        places = [place[repr(row)] for row in rank["after"]]
        # groups stay whole and in their order, under an id that no other group has
        for first in range(0, len(places), 3):
            group, row = places[first]
            assert places[first : first + 3] == [(group, row), (group, row + 1), (group, row + 2)]
            assert len(set(rank["group_ids"][first : first + 3])) == 1
            assert owner.setdefault(rank["group_ids"][first], index) == index
        assert rank["padding"]["kept_mass"] in ([1.0], [])
        assert all(rank["padding"][name] in ([0], []) for name in PER_TOKEN)
    assert len(owner) == 4 * world
    assert {len(rank["after"]) for rank in ranks} == {12}
    loads = [load(rank["after"], rank["group_ids"]) for rank in ranks]
    came = [load(rank["before"], [index // 3 for index in range(12)]) for rank in ranks]
    for rank in ranks:
        measured = (max(came) / sum(came) * world, max(loads) / sum(loads) * world)
        assert rank["balance"] == pytest.approx(measured)
    assert max(came) / sum(came) * world > 1.3
    assert max(loads) / sum(loads) * world < 1.1


MEDIA = (Media(tensors={"pixel_values": torch.zeros(1)}, tokens={"image": 1}),) * 12


@pytest.mark.parametrize(
    "by_rank",
    [
        [{}, {"media": MEDIA}],
        [{}, {"kept_mass": None}],
        [{"size": 2}, {}],
        [{"values": torch.zeros(12, 2, 2)}] * 2,
        [{"values": torch.zeros(12, 1)}] * 2,
        # the second rank has the same rows as the first
        [{"scale": 1.0}, {"scale": 1.0, "weight_version": torch.zeros(12)}],
    ],
    ids=[
        "media",
        "a column that one lacks",
        "groups of several sizes",
        "more than one number per token",
        "another width",
        "another type",
    ],
)
def test_what_cannot_be_exchanged_stays_on_all_ranks(
    tmp_path: Path, by_rank: list[dict[str, Any]]
) -> None:
    ranks = exchanged(tmp_path, 2, by_rank=by_rank)
    assert [rank["same"] for rank in ranks] == [True, True]
    for rank in ranks:
        assert rank["balance"][0] == rank["balance"][1] > 1.0


def test_rows_that_are_balanced_already_stay(tmp_path: Path) -> None:
    same = {"scale": 0.0, "weight_version": torch.zeros(12, dtype=torch.int64)}
    # a response of one token each; prompts differ by less than 2 % of the whole
    prompts = {"groups": 1, "size": 200, "weight_version": None}
    ranks = exchanged(tmp_path, 2, by_rank=[{**same, **prompts}, {**same, **prompts}])
    assert [rank["same"] for rank in ranks] == [True, True]


def test_one_process_gets_its_own_rows_back() -> None:
    alone = cast(L.Trainer, SimpleNamespace(world_size=1))
    rows = experience(0)
    assert balance_over_ranks(rows, Collectives(alone)) == (rows, 1.0, 1.0)


def noting(path: Path) -> Callable[[Experience, Collectives], Balanced]:
    """Exchange rows, and write down how evenly the ranks are loaded."""

    def balance(rows: Experience, collectives: Collectives) -> Balanced:
        balanced = balance_over_ranks(rows, collectives)
        with path.with_suffix(f".{collectives.rank}").open("a") as handle:
            handle.write(json.dumps(balanced[1:]) + "\n")
        return balanced

    return balance


def data_of(_module: L.LightningModule, folder: Path, ranks: int) -> L.LightningDataModule:
    """Prompts of 5 to 53 letters."""
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"say {'bcdf'[index % 4] * (1 + index * 7 % 49)}"} for index in range(32)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return PromptDataModule(train=str(path), batch_size=strategy_runs.ROWS // ranks)


def test_training_ends_where_it_does_without_the_exchange(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy_runs, "data_of", data_of)
    model = Path(model_folder)
    monkeypatch.setattr(update, "balance_over_ranks", noting(tmp_path / "moved.x"))
    moved = strategy_runs.run("ppo", model, tmp_path / "moved", strategy="ddp")
    # more than there is to gain: nothing moves
    monkeypatch.setattr(sequence_balancing, "MIN_GAIN", 2.0)
    monkeypatch.setattr(update, "balance_over_ranks", noting(tmp_path / "stayed.x"))
    stayed = strategy_runs.run("ppo", model, tmp_path / "stayed", strategy="ddp")

    def balances(folder: str) -> list[tuple[float, float]]:
        texts = [(tmp_path / f"{folder}.{rank}").read_text() for rank in (0, 1)]
        assert texts[0] == texts[1]
        return [tuple(json.loads(line)) for line in texts[0].splitlines()]

    assert all(before == after for before, after in balances("stayed"))
    assert len(balances("moved")) == strategy_runs.STEPS
    assert sum(after < before for before, after in balances("moved")) >= 2
    for name, weight in stayed[0]["weights"].items():
        for state in moved:
            torch.testing.assert_close(state["weights"][name], weight, rtol=1e-4, atol=1e-6)
    same = [name for name in stayed[0]["metrics"] if not name.startswith("perf/")]
    for state in moved:
        assert {name: state["metrics"][name] for name in same} == {
            name: pytest.approx(stayed[0]["metrics"][name], rel=1e-3, abs=1e-5) for name in same
        }
