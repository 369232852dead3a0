"""What is measured of each source of a mixture of pairs."""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import EvalJSONL, RLCheckpoint
from lrlhf.datamodules import PreferenceDataModule, Weighted
from lrlhf.datamodules.loading.sources import distinct_names
from lrlhf.datamodules.preferences import MOST_SOURCES
from lrlhf.modules import DPO, OptimizerConfig, RewardModel
from lrlhf.modules.metrics.reward_metrics import INTERVAL, OF_SOURCES, RewardMetrics
from tests.conftest import build_language_model
from tests.modules.policy_runs import one_process
from tests.modules.reward_runs import trainer

STILL = OptimizerConfig(lr=1e-12, optimizer_class="torch.optim.SGD", warmup_steps=0)
"""Of a run whose scores stay as they are."""
LETTERS = "abcdefghij"


def pairs(letters: str) -> list[dict[str, str]]:
    return [{"prompt": f"{a}?", "chosen": a * 3, "rejected": f"{a}xy"} for a in letters]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Four and six pairs."""
    paths = tmp_path / "helpful.jsonl", tmp_path / "safe.jsonl"
    for path, letters in zip(paths, (LETTERS[:4], LETTERS[4:]), strict=True):
        path.write_text("\n".join(map(json.dumps, pairs(letters))))
    return str(paths[0]), str(paths[1])


def scored(gaps: list[float]) -> tuple[Tensor, ...]:
    """Scores, losses, labels and lengths of pairs whose first candidate is better by so much."""
    first = torch.tensor(gaps)[:, None]
    nothing = torch.zeros_like(first)
    return first, nothing, first.square(), nothing + 1, torch.ones(len(gaps), 2)


def test_sources_by_hand() -> None:
    metrics = RewardMetrics(("reward",), [1.0])
    metrics.update(*scored([1.0, -2.0, 3.0]), sources=torch.tensor([0, 0, 1]))
    metrics.update(*scored([4.0, -5.0]), sources=torch.tensor([1, -1]))
    metrics.update(*scored([-6.0]))  # of no source
    summary = metrics.compute()
    assert summary.metrics["accuracy"] == 0.5  # 3 of 6
    assert summary.sources.keys() == {0, 1}
    first, second = (summary.sources[number].main_metrics for number in (0, 1))
    assert set(first) == set(OF_SOURCES)
    assert (first["accuracy"], first["pairs"], first["margin"]) == (0.5, 2, -0.5)
    assert first["loss"] == 2.5  # (1 + 4) / 2
    assert (second["accuracy"], second["pairs"], second["margin"]) == (1.0, 2, 3.5)


def test_sources_are_those_of_their_set() -> None:
    metrics = RewardMetrics(("reward",), [1.0])
    metrics.update(*scored([1.0, -2.0]), 0, torch.tensor([0, 1]))
    metrics.update(*scored([-3.0, 4.0]), 1, torch.tensor([0, -1]))
    summary = metrics.compute()
    assert summary.sources == {}
    by_set = {
        number: {source: one.metrics["accuracy"] for source, one in own.sources.items()}
        for number, own in summary.sets.items()
    }
    assert by_set == {0: {0: 1.0, 1: 0.0}, 1: {0: 0.0}}


def test_pairs_from_before_a_resume_keep_their_source() -> None:
    first, second = (RewardMetrics(("reward",), [1.0]) for _ in range(2))
    first.update(*scored([1.0, -2.0]), sources=torch.tensor([0, 1]))
    second.resume([first.seen()], one_process())
    found = {number: own.metrics["accuracy"] for number, own in second.compute().sources.items()}
    assert found == {0: 1.0, 1: 0.0}


class AfterOne(L.Callback):
    """Saves after the first batch, and sees the sources of the pairs that a run begins with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[list[int]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        kept = pl_module.train_metrics.seen()  # type: ignore[operator,union-attr]
        self.found.append(kept["sources"].tolist() if kept else [])

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def test_pairs_from_before_a_resume_with_other_data_keep_their_source(
    files: tuple[str, str], model_folder: str, tmp_path: Path
) -> None:
    more = [f"{tmp_path}/{name}.jsonl" for name in ("new", "other")]
    for path in more:
        Path(path).write_text("\n".join(map(json.dumps, pairs(LETTERS))))
    watch = AfterOne(tmp_path / "one.ckpt")

    def run(train: list[str], ckpt_path: Path | None = None) -> set[str]:
        module = RewardModel(model_folder, optimizer=STILL, seed=1)
        # the first batch has four pairs of the first file and one of the second
        options = {"shuffle": False, "batch_size": 5, "accept_changed_data": True}
        goes = trainer(tmp_path, max_epochs=1, log_every_n_steps=100, callbacks=[watch])
        goes.fit(module, PreferenceDataModule([*train], **options), ckpt_path=ckpt_path)
        return {name.split("/")[2] for name in goes.logged_metrics if "/source/" in name}

    run([*files])
    assert run([more[0], files[1], more[1]], watch.path) == {"new", "safe", "other"}
    assert run([more[0], more[1]], watch.path) == {"new", "other"}
    assert watch.found == [[], [-1] * 4 + [1], [-1] * 5]
    # saved before sources were named: their numbers count
    saved = torch.load(watch.path, weights_only=True)
    (unlogged,) = unlogged_in(saved)
    del unlogged["sources"]
    torch.save(saved, watch.path)
    run([*files], watch.path)
    assert watch.found[3] == [0] * 4 + [1]


def unlogged_in(saved: Any) -> Iterator[dict[str, Any]]:
    if isinstance(saved, dict):
        if {"ranks", "sources"} == saved.keys():
            yield saved
        for value in saved.values():
            yield from unlogged_in(value)


def module_of(kind: type, model_folder: str, tokenizer) -> RewardModel | DPO:
    if kind is RewardModel:
        return RewardModel(model_folder, optimizer=STILL, seed=1)
    # another reference, or all implicit rewards are 0
    return DPO(
        build_language_model(tokenizer),
        tokenizer=tokenizer,
        reference=model_folder,
        optimizer=STILL,
        seed=1,
    )


@pytest.mark.parametrize(
    ("kind", "prefix"), [(RewardModel, "reward_model"), (DPO, "rewards")], ids=["reward", "dpo"]
)
def test_a_mixture_is_measured_as_its_parts_are_alone(
    kind: type, prefix: str, files: tuple[str, str], model_folder: str, tokenizer, tmp_path: Path
) -> None:
    module, writer = module_of(kind, model_folder, tokenizer), EvalJSONL(tmp_path)
    with torch.no_grad():
        for weight in getattr(module, "policy", module).parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    mixed = [files[0], Weighted(files[1], columns={"source": "harm/less"})]
    data = PreferenceDataModule(mixed, val=mixed, batch_size=5)
    best = RLCheckpoint(monitor="eval/source/helpful/accuracy")
    options = {"callbacks": [writer, best], "enable_checkpointing": True}
    run = trainer(tmp_path, log_every_n_steps=100, **options)
    run.fit(module, data)
    found = {name: float(value) for name, value in run.logged_metrics.items()}
    named = {name for name in found if name.startswith("eval/source/")}
    assert named == {f"eval/source/{one}/{m}" for one in ("helpful", "less") for m in OF_SOURCES}
    alone = PreferenceDataModule(files[0], val={"helpful": files[0], "less": files[1]})
    apart: dict[str, float] = {}
    for values in trainer(tmp_path).validate(module, alone, verbose=False):
        apart |= values
    for source, metric in itertools.product(("helpful", "less"), OF_SOURCES):
        expected = pytest.approx(apart[f"eval/{source}/{metric}"], rel=1e-4, abs=1e-6)
        assert found[f"eval/source/{source}/{metric}"] == expected
        if metric in INTERVAL:
            assert f"{prefix}/source/{source}/{metric}" not in found
        else:
            assert found[f"{prefix}/source/{source}/{metric}"] == expected
    assert found["eval/source/helpful/pairs"] == 4
    assert float(best.best_model_score) == found["eval/source/helpful/accuracy"]
    assert found["eval/source/helpful/margin"] != found["eval/source/less/margin"]
    lines = [json.loads(line) for line in writer.paths[-1].read_text().splitlines()]
    assert [line["info"]["source"] for line in lines] == [files[0]] * 4 + ["harm/less"] * 6


def test_each_set_has_sources_of_its_own(files, model_folder: str, tmp_path: Path) -> None:
    module = RewardModel(model_folder, optimizer=STILL, seed=1)
    data = PreferenceDataModule(files[0], val={"both": [*files], "one": files[1]}, batch_size=5)
    found: dict[str, float] = {}
    for values in trainer(tmp_path).validate(module, data, verbose=False):
        found |= values
    assert {name.rpartition("/")[0] for name in found if "source" in name} == {
        "eval/both/source/helpful",
        "eval/both/source/safe",
    }
    for metric in OF_SOURCES:
        expected = pytest.approx(found[f"eval/one/{metric}"], rel=1e-4, abs=1e-6)
        assert found[f"eval/both/source/safe/{metric}"] == expected


def test_too_many_sources_are_not_told_apart(model_folder: str, tmp_path: Path, caplog) -> None:
    rows = [{**row, "source": f"page {i}"} for i, row in enumerate(pairs("ab" * MOST_SOURCES))]
    data = PreferenceDataModule(rows, val=rows[:MOST_SOURCES], batch_size=64)
    with caplog.at_level(logging.INFO):
        run = trainer(tmp_path, limit_train_batches=1)
        run.fit(RewardModel(model_folder, optimizer=STILL, seed=1), data)
    assert f"the column source of the train rows has {2 * MOST_SOURCES} values" in caplog.text
    named = {name.split("/source/")[0] for name in run.logged_metrics if "/source/" in name}
    assert named == {"eval"}


def test_names_that_metrics_can_have() -> None:
    assert distinct_names(["a/helpful.jsonl", "b/safe.json.gz", "owner/set:main@test"]) == {
        "a/helpful.jsonl": "helpful",
        "b/safe.json.gz": "safe",
        "owner/set:main@test": "set:main@test",
    }
    assert distinct_names(["a/x.jsonl", "b/x.jsonl", "list 1"]) == {
        "a/x.jsonl": "a_x.jsonl",
        "b/x.jsonl": "b_x.jsonl",
        "list 1": "list_1",
    }
    assert list(distinct_names(["C", "C++", "C#", "C_2"]).values()) == ["C", "C_2", "C_3", "C_2_2"]
