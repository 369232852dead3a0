"""Engines of DeepSpeed in two processes do what plain PyTorch does in one.

Every case runs in the same two processes, this file as a program:
python -m tests.distributed.test_deepspeed FOLDER
"""

import contextlib
import copy
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lrlhf.models import CausalLM, zero
from lrlhf.models.sharding import CheckpointMismatchError, within
from lrlhf.modules.optimizers import parameter_groups
from lrlhf.run.gradient_updates import Updater
from lrlhf.strategies.deepspeed import DeepSpeed
from lrlhf.strategies.deepspeed_engine import EnginePrecision, check_ownership
from tests.conftest import build_language_model, build_tokenizer
from tests.distributed.runs import ROOT, running

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)

STAGES = (1, 2, 3)
STEPS = 3
APART = 2
"""Step in which each loss has a backward pass of its own."""
ROWS, LENGTH = 4, 6
LEARNING_RATES = {"actor": 1e-2, "critic": 5e-2}
CLIPS = {"actor": 0.5, "critic": 0.05}
EVERY_PIECE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def batches(ranks: int = 2) -> Tensor:
    """[steps, ranks, rows, length]: token ids; for one rank the rows of both."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 200, (STEPS + 1, 2, ROWS, LENGTH), generator=generator)
    return ids if ranks == 2 else ids.flatten(1, 2)[:, None]


class Networks(nn.Module):
    """An actor, of which a part is frozen, and a critic that reads its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = build_language_model(build_tokenizer())
        for weight in self.actor.model.layers[0].mlp.parameters():
            weight.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.critic = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), nn.Linear(7, 1))

    def outputs(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        def forward() -> tuple[Tensor, Tensor]:
            hidden = self.actor.model(input_ids=ids).last_hidden_state
            # as log-probabilities are computed: the head runs again in the backward pass
            return hidden, checkpoint(self.actor.lm_head, hidden, use_reentrant=False)

        return within(self.actor, forward)

    def losses(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        hidden, logits = self.outputs(ids)
        fixed = hidden.detach()
        if step != APART:  # the critic's loss reaches the actor too, as that of a value head does
            fixed = fixed + 0.5 * (hidden - fixed)
        values = self.critic(fixed).squeeze(-1)
        actor = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return actor, (values.float() - ids / 100).square().mean()

    def roles(self) -> dict[str, nn.Module]:
        return {"actor": self.actor, "critic": self.critic}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(
                parameter_groups(model.named_parameters(), weight_decay=0.1),
                lr=LEARNING_RATES[role],
                eps=1e-4,
            )
            for role, model in self.roles().items()
        ]


class ActorCritic(L.LightningModule):
    """Two optimizers, two micro-batches per step, forward passes without gradients in between."""

    def __init__(self, poisoned_step: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.networks = Networks()
        self.poisoned_step = poisoned_step
        self.updater = Updater(self)
        self.inside: Callable[[int], None] = lambda step: None
        self.norms: list[list[float]] = []
        self.rates: list[list[float]] = []

    def trainable_models(self) -> dict[str, nn.Module]:
        return self.networks.roles()

    def configure_optimizers(self) -> Any:
        optimizers = self.networks.optimizers()
        decay = torch.optim.lr_scheduler.LambdaLR
        return optimizers, [decay(one, lambda step: 1 / (1 + step)) for one in optimizers]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.inside(batch_idx)
        parts = batch[self.global_rank].chunk(2)
        for index, ids in enumerate(parts):
            with torch.no_grad():
                self.networks.outputs(ids)
            actor, critic = (loss / len(parts) for loss in self.networks.losses(ids, batch_idx))
            if batch_idx == self.poisoned_step and self.global_rank == 1:
                actor = actor * float("inf")
            for loss in (actor, critic) if batch_idx == APART else (actor + critic,):
                self.updater.backward(loss, last=index == len(parts) - 1)
        norms, rates = [], []
        for optimizer, clip in zip(self.optimizers(), CLIPS.values(), strict=True):
            rates.append(optimizer.param_groups[0]["lr"])
            norms.append(self.updater.step(optimizer, max_grad_norm=clip))
        self.norms.append(norms)
        self.rates.append(rates)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.networks.outputs(batch[self.global_rank])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.updater.before_step(optimizer)


class Regression(L.LightningModule):
    """One model under automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.reward = Reward()

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"reward": self.reward}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return regression_loss(self.reward, batch[self.global_rank], batch_idx)


class Reward(nn.Module):
    """A part of it is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH, 7), nn.Tanh())
        self.head, self.seldom = nn.Linear(7, 1), nn.Linear(7, 1)

    def forward(self, ids: Tensor, *, seldom: bool) -> Tensor:
        hidden = self.body(ids / 100)
        scores = self.head(hidden)
        return (scores + self.seldom(hidden) if seldom else scores).squeeze(-1)


def regression_loss(model: nn.Module, ids: Tensor, batch_idx: int) -> Tensor:
    # in the first of two batches of the first of two steps
    return (model(ids, seldom=batch_idx == 0) - ids[:, 0] / 50).square().mean()


# ---------------------------------------------------------------------- one process, plain PyTorch


def reference(steps: int = STEPS) -> tuple[Networks, list[Any], list[Any]]:
    networks = Networks()
    optimizers = networks.optimizers()
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers
    ]
    norms = []
    for step, batch in enumerate(batches()[:steps]):
        parts = [part for rows in batch for part in rows.chunk(2)]
        for ids in parts:
            actor, critic = networks.losses(ids, step)
            ((actor + critic) / len(parts)).backward()
        clipped = [
            float(nn.utils.clip_grad_norm_(model.parameters(), CLIPS[role]))
            for role, model in networks.roles().items()
        ]
        norms.append(clipped)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return networks, optimizers, norms


def canonical(networks: Networks, optimizers: list[Any]) -> dict[str, Any]:
    """The checkpoint of a module that holds these networks, whichever the strategy."""
    names = {id(weight): f"networks.{name}" for name, weight in networks.named_parameters()}
    stored = []
    for optimizer in optimizers:
        groups = [
            {**group, "params": [names[id(weight)] for weight in group["params"]]}
            for group in optimizer.param_groups
        ]
        state = {names[id(weight)]: dict(values) for weight, values in optimizer.state.items()}
        stored.append({"state": state, "param_groups": groups})
    weights = {f"networks.{name}": value for name, value in networks.state_dict().items()}
    return copy.deepcopy({"state_dict": weights, "optimizer_states": stored})


# ---------------------------------------------------------------------- the processes


class Keep(L.Callback):
    """Takes the state at the end, as a checkpoint would, and puts one in at the start."""

    def __init__(self, start: dict[str, Any] | None = None) -> None:
        self.start = start
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.start is not None:
            trainer.strategy.load_model_state_dict(self.start, strict=True)
            trainer.strategy.load_optimizer_state_dict(self.start)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state = whole_state(trainer.strategy)


def whole_state(strategy: DeepSpeed) -> dict[str, Any]:
    own = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(one) for one in strategy.optimizers],
    }
    everybodys: list[Any] = [own]
    if strategy.world_size > 1:
        everybodys = [None] * strategy.world_size
        torch.distributed.all_gather_object(everybodys, own)
    return merged(everybodys)


def merged(parts: list[Any]) -> Any:
    """Take every tensor from the one rank that has it."""
    if isinstance(parts[0], dict):
        assert all(part.keys() == parts[0].keys() for part in parts)
        return {key: merged([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], list):
        return [merged(list(each)) for each in zip(*parts, strict=True)]
    if not isinstance(parts[0], Tensor):
        return parts[0]
    held = [part for part in parts if not part.is_meta]
    assert len(held) == (1 if held[0].ndim else len(parts)), "held by several ranks, or by none"
    assert {(part.shape, part.dtype) for part in parts} == {(held[0].shape, held[0].dtype)}
    return held[0]


def fit(
    module: L.LightningModule,
    data: Tensor,
    *,
    keep: Keep | None = None,
    precision: Any = "32-true",
    validate: bool = False,
    strategy: dict[str, Any],
    **options: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DeepSpeed(**strategy),
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=1 if validate else 0,
        callbacks=[] if keep is None else [keep],
        **options,
    )
    loader = DataLoader(data, batch_size=None)
    trainer.fit(module, loader, loader if validate else None)
    return trainer


def train(stage: int) -> dict[str, Any]:
    """The usual run, with generation and a frozen copy on the way."""
    module, keep = ActorCritic(), Keep()
    # nothing stays whole between passes, as in a large model
    pieces = {"config": EVERY_PIECE} if stage == 3 else {}
    frozen = copy.deepcopy(module.networks.actor).requires_grad_(False)
    seen: dict[str, Any] = {}

    def inside(step: int) -> None:
        if step != 1:
            return
        ids = batches()[0, 0]
        with zero.gathered_for_generation(module.networks.actor), torch.no_grad():
            for _ in range(1 + 2 * module.global_rank):
                seen["logits"] = module.networks.actor(input_ids=ids).logits
        module.trainer.strategy.shard_frozen(frozen)
        module.trainer.strategy.shard_frozen(frozen)
        with torch.no_grad():
            seen["frozen"] = frozen(input_ids=ids).logits
        seen["split"] = zero.is_partitioned(frozen.lm_head.weight)

    module.inside = inside
    ranks = int(os.environ["WORLD_SIZE"])
    fit(
        module,
        batches(ranks)[:STEPS],
        keep=keep,
        validate=True,
        strategy={"stage": stage, **pieces},
    )
    after = {name: value.clone() for name, value in module.state_dict().items()}
    norms, rates = list(module.norms), list(module.rates)
    again = Keep()
    fit(module, batches(ranks)[STEPS:], keep=again, strategy={"stage": stage})
    return {
        "norms": norms,
        "rates": rates,
        "state": keep.state,
        "after": after,
        "again": again.state,
        **seen,
    }


def resume(stage: int, start: dict[str, Any]) -> dict[str, Any]:
    keep = Keep(start)
    ranks = int(os.environ["WORLD_SIZE"])
    fit(ActorCritic(), batches(ranks)[STEPS:], keep=keep, strategy={"stage": stage})
    return keep.state


def poison(stage: int) -> dict[str, Any]:
    """The second step's gradient of the actor is not finite."""
    module, before, keep = ActorCritic(poisoned_step=1), {}, Keep()

    def inside(step: int) -> None:
        before[step] = whole_state(module.trainer.strategy)

    module.inside = inside
    fit(module, batches()[:STEPS], keep=keep, strategy={"stage": stage})
    return {"before": before[1], "after": before[2], "norms": module.norms, "end": keep.state}


def variant(**options: Any) -> dict[str, Any]:
    """Another run of the usual steps."""
    module, keep = ActorCritic(), Keep()
    fit(module, batches()[:STEPS], keep=keep, **options)
    kinds = {str(weight.dtype) for weight in module.networks.actor.parameters()}
    return {"norms": module.norms, "state": keep.state, "kinds": kinds}


def low_precision(stage: int) -> dict[str, Any]:
    return variant(precision="bf16-mixed", strategy={"stage": stage})


def offloaded(stage: int) -> dict[str, Any]:
    options = {"offload_optimizer": True, "offload_parameters": stage == 3}
    return variant(strategy={"stage": stage, **options})


def automatic(stage: int) -> dict[str, Any]:
    keep = Keep()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    fit(Regression(), batches(), keep=keep, strategy={"stage": stage}, **options)
    return keep.state


CASES: dict[Callable[[int], dict[str, Any]], tuple[int, ...]] = {
    train: STAGES,
    # stage 2 differs from 1 in how gradients are reduced, which every run shows
    poison: (1, 3),
    low_precision: (1, 3),
    offloaded: (2, 3),
    automatic: (1, 3),
}


def main(folder: Path) -> None:
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    networks, optimizers, _ = reference()
    start = canonical(networks, optimizers)
    results: dict[str, Any] = {}
    for stage in STAGES:
        results[f"resume{stage}"] = resume(stage, start)
        for case in CASES if ranks == 2 else ():
            if stage in CASES[case]:
                results[f"{case.__name__}{stage}"] = case(stage)
    torch.save(results, folder / f"{ranks}-{rank}.pt")


# ---------------------------------------------------------------------- the tests


def launch(folder: Path, ranks: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    command = [sys.executable, "-m", "tests.distributed.test_deepspeed", str(folder)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                running(command, ROOT, {**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
            )
            for rank in range(ranks)
        ]
        with ThreadPoolExecutor() as readers:
            told = list(readers.map(lambda one: one.communicate(timeout=500)[0], processes))
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, "\n".join(output[-3000:] for output in told)
    return [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Any], list[Any]]:
    networks, optimizers, norms = reference()
    return canonical(networks, optimizers), norms


@pytest.fixture(scope="module")
def plain_and_one_more() -> dict[str, Any]:
    networks, optimizers, _ = reference(steps=STEPS + 1)
    return canonical(networks, optimizers)


def assert_same(actual: Any, expected: Any, **tolerance: float) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(actual[key], value, **tolerance)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, **tolerance)
    elif isinstance(expected, Tensor):
        assert not actual.is_meta
        torch.testing.assert_close(actual, expected, **tolerance)
    else:
        assert actual == pytest.approx(expected)


CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MOVED = "networks.actor.lm_head.weight"


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_train_as_plain_torch(stage: int, both, plain) -> None:
    expected, norms = plain
    after_one, _, _ = reference(steps=1)
    ids = batches()[0, 0]
    with torch.no_grad():
        logits = after_one.actor(input_ids=ids).logits
        frozen = Networks().actor(input_ids=ids).logits
    # both clips are at work, and the second is not the first
    assert (torch.tensor(norms) > torch.tensor(list(CLIPS.values()))).all()
    for rank in both:
        run = rank[f"train{stage}"]
        assert_same(torch.tensor(run["norms"]), torch.tensor(norms), rtol=1e-4, atol=0)
        for n, rates in enumerate(run["rates"], start=1):
            assert rates == pytest.approx([1e-2 / n, 5e-2 / n])
        assert_same_states(run["state"], expected)
        # each rank generated with whole weights, as often as it liked, and used a frozen copy
        torch.testing.assert_close(run["logits"], logits, **CLOSE)
        torch.testing.assert_close(run["frozen"], frozen, **CLOSE)
        assert run["split"] == (stage == 3)
        if stage in CASES[offloaded]:  # states in main memory change nothing
            other = rank[f"offloaded{stage}"]
            assert_same(torch.tensor(other["norms"]), torch.tensor(norms), rtol=1e-4, atol=0)
            assert_same(other["state"]["state_dict"], expected["state_dict"], **CLOSE)
        # models are whole after a run, and can be trained again
        assert_same(run["after"], run["state"]["state_dict"], rtol=0, atol=0)
        assert run["again"]["state_dict"].keys() == run["after"].keys()
        assert not torch.equal(run["again"]["state_dict"][MOVED], run["after"][MOVED])


def assert_same_states(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, and states of optimizers, which go by name and are whole."""
    assert_same(state["state_dict"], expected["state_dict"], **CLOSE)
    pairs = zip(state["optimizer_states"], expected["optimizer_states"], strict=True)
    for own, other in pairs:
        assert_same(own["state"], other["state"], **CLOSE)
        # a schedule is another's state
        names = [[group["params"] for group in one["param_groups"]] for one in (own, other)]
        assert_same(*names)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_continues_from_the_state_of_another_number_of_processes(
    stage: int, ranks: int, both, alone, plain_and_one_more
) -> None:
    for rank in both if ranks == 2 else alone:
        assert_same_states(rank[f"resume{stage}"], plain_and_one_more)


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES[poison])
def test_a_gradient_that_is_not_finite_moves_nothing(stage: int, both) -> None:
    for rank in both:
        run = rank[f"poison{stage}"]
        assert not torch.isfinite(torch.tensor(run["norms"][1][0]))
        assert torch.isfinite(torch.tensor(run["norms"])[[0, 2]]).all()
        before, after = run["before"], run["after"]
        states = [one["optimizer_states"][0]["state"] for one in (after, before)]
        assert_same(*states, rtol=0, atol=0)
        for name, value in before["state_dict"].items():
            assert torch.equal(after["state_dict"][name], value) == ("actor" in name), name
        # and what comes after is not lost either
        assert not torch.equal(run["end"]["state_dict"][MOVED], after["state_dict"][MOVED])


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES[low_precision])
def test_bfloat16_is_trained_with_a_copy_in_float32(stage: int, both, plain) -> None:
    expected, norms = plain
    for rank in both:
        run = rank[f"low_precision{stage}"]
        assert run["kinds"] == {"torch.bfloat16"}
        assert_same(torch.tensor(run["norms"]), torch.tensor(norms), rtol=0.1, atol=0)
        for name, value in expected["state_dict"].items():
            frozen = "layers.0.mlp" in name
            own = run["state"]["state_dict"][name]
            assert own.dtype == (torch.bfloat16 if frozen else torch.float32)
            torch.testing.assert_close(own.float(), value, rtol=0.05, atol=0.05)
            # what moved has bits that bfloat16 has not
            assert torch.equal(own, own.bfloat16().to(own.dtype)) == frozen, name


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES[automatic])
def test_automatic_optimization_accumulates_and_clips(stage: int, both) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for first in range(0, STEPS + 1, 2):
        for batch_idx in (first, first + 1):
            for ids in batches()[batch_idx]:
                (regression_loss(model.reward, ids, batch_idx) / 4).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        optimizer.zero_grad()
    for rank in both:
        assert_same(rank[f"automatic{stage}"]["state_dict"], dict(model.state_dict()), **CLOSE)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "must be 1, 2 or 3"),
        ({"stage": 2, "offload_parameters": True}, "set it to 3"),
        ({"config": {"gradient_clipping": 1.0}}, "update.max_grad_norm"),
        ({"config": {"zero_optimization": {"stage": 1}}}, "strategy.stage"),
    ],
)
def test_options_that_are_set_elsewhere_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeed(**options)


def test_batches_keep_their_precision_and_fp16_is_refused() -> None:
    scores = torch.tensor([0.1])
    assert EnginePrecision("bf16-mixed", DeepSpeed()).convert_input(scores) is scores
    with pytest.raises(ValueError, match="bf16-mixed"):
        EnginePrecision("16-mixed", DeepSpeed())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of DeepSpeed's own code
def test_stage_3_refuses_compiled_layers(model_folder: str) -> None:
    model = CausalLM(source=model_folder, compile=True).load(trainable=False)
    with pytest.raises(ValueError, match=r"compile: false, or take strategy\.stage: 2"):
        DeepSpeed(stage=3).shard_frozen(model)


def test_each_optimizer_belongs_to_its_own_model() -> None:
    module = ActorCritic()
    models, (actor, critic) = module.networks.roles(), module.networks.optimizers()
    check_ownership(module, models, [actor, critic])
    with pytest.raises(ValueError, match=r"optimizer of actor moves networks\.critic\.0"):
        check_ownership(module, models, [critic, actor])
    with pytest.raises(ValueError, match=r"2 trained models .* 1 optimizers"):
        check_ownership(module, models, [actor])
    module.networks.critic.add_module("shared", module.networks.actor.lm_head)
    with pytest.raises(ValueError, match="belongs to actor and to critic"):
        check_ownership(module, models, [actor, critic])


def test_a_state_of_other_weights_is_refused() -> None:
    module = Regression()
    strategy = DeepSpeed()
    strategy._lightning_module = module
    state = module.state_dict() | {"reward.head.bias": torch.zeros(2)}
    with pytest.raises(CheckpointMismatchError, match=r"reward\.head\.bias has the shape \(2,\)"):
        strategy.load_model_state_dict({"state_dict": state})
    with pytest.raises(CheckpointMismatchError, match="1 optimizers and the module 0"):
        strategy.load_optimizer_state_dict({"optimizer_states": [{}]})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
