"""Times and memory of small made-up models, counted by hand."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.planning.simulation.hardware import GPUS, Rates
from lrlhf.planning.simulation.iteration import Layout, Links, Simulation, Workload
from lrlhf.planning.simulation.layouts import (
    ACTIVATIONS,
    Answer,
    Machine,
    best_layouts,
    bottleneck,
    cache_tokens,
    layouts,
    simulation_of,
    trainer_counts,
    why_nothing_fits,
)
from lrlhf.planning.simulation.lengths import Lengths, lognormal_lengths, recorded_lengths
from lrlhf.planning.simulation.model_costs import ModelCosts, costs_of
from lrlhf.planning.strategy_shares import OptimizerNeeds, Part, Strategy, Weights

NUMBER = 10**9
WEIGHTS = Weights(Part(NUMBER, 4 * NUMBER), Part(), Part(10**7, 4 * 10**7), Part(10**8, 4 * 10**8))
MODEL = ModelCosts(
    WEIGHTS, multiplied=NUMBER, layers=10, heads=4, key_heads=4, attention_width=0, key_width=100
)
ADAM = OptimizerNeeds(states=2.0)
SLOW = Rates(
    decode_flops=math.inf,
    prefill_flops=math.inf,
    read_bytes=math.inf,
    step_s=0.0,
    layer_s=0.0,
    sequence_s=0.0,
    forward_flops=2.0 * NUMBER,  # a token a second
    update_flops=6.0 * NUMBER,  # a token a second, forward and backward
)


def _same(length: int) -> Lengths:
    return Lengths(np.array([length]), "made up")


def _work(**options: object) -> Workload:
    given = {"prompts": 4, "copies": 2, "prompt_tokens": 10, "lengths": _same(5), "policy": MODEL}
    return Workload(**(given | options))  # type: ignore[arg-type]


def test_a_token_is_multiplied_by_each_weight_and_attends_to_those_before_it() -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    costs = costs_of(model, model)
    # queries and output 16x16, keys and values 16x8, three matrices 16x24; norms, output head
    matrices = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 50 * 16
    norms, positions = 7 * 16, 2 * 2  # kept twice
    assert costs.multiplied == matrices + norms + positions
    assert (costs.layers, costs.attention_width, costs.key_width) == (3, 16, 8)
    assert costs.cache_numbers(1) == 2 * 3 * 8
    # a group of responses of 1 and 3 tokens after 2: positions see 1 … 2, then 3, then 3, 4, 5
    seen = {True: 3 + 3 + 12, False: (3 + 3) + (3 + 12)}
    for shared, tokens in ((True, 2 + 4), (False, 2 + 2 + 4)):
        flops = costs.forward_flops(2, np.array([[1, 3]]), shares_prompts=shared)
        exact = 2 * costs.multiplied * tokens + 4 * 3 * 16 * seen[shared]
        # half of the diagonal is left out
        assert flops == pytest.approx(exact - 2 * 3 * 16 * tokens)


def test_experts_are_refused() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    model = LlamaForCausalLM(config)
    model.config.num_experts = 4
    with pytest.raises(ValueError, match="mixtures of experts are not simulated"):
        costs_of(model, model)


def test_passes_and_updates_take_the_tokens_of_the_trainer_with_most_of_them() -> None:
    work = _work(prompts=5, passes=(MODEL, MODEL), trained=(MODEL,), epochs=3)
    phases = Simulation(work, SLOW).draws(Layout(2, 1), 1)[0]
    # three of five prompts: 3 x (10 + 2 x 5) tokens
    assert phases.logprob == pytest.approx(2 * 60)
    assert phases.update == pytest.approx(3 * 60)


def test_unshared_prompts_and_what_is_recomputed_count_again() -> None:
    recomputing = MODEL._replace(recomputes=True)
    work = _work(trained=(recomputing,), shares_prompts=False)
    phases = Simulation(work, SLOW).draws(Layout(4, 1), 1)[0]
    # 2 x (10 + 5) tokens, and 8 instead of 6 FLOP for each weight
    assert phases.update == pytest.approx(30 * 8 / 6)


def test_frozen_weights_need_no_gradients_of_their_own() -> None:
    frozen = MODEL._replace(weights=WEIGHTS._replace(trained=Part(), frozen=WEIGHTS.trained))
    phases = Simulation(_work(trained=(frozen,)), SLOW).draws(Layout(4, 1), 1)[0]
    assert phases.update == pytest.approx(20 * 4 / 6)


def test_gathering_weights_is_a_bound_of_a_pass() -> None:
    # each micro-batch of 10 tokens gathers 3/4 of 2 GB at 0.7 x 1 GB/s, and 4 s of computing do not
    links, strategy = Links(node=1e9, network=1e9), Strategy(kind="fsdp2", ranks=4)
    work = _work(passes=(MODEL,), micro_batch_tokens=10)
    fast = replace(SLOW, forward_flops=10.0 * NUMBER)
    phases = Simulation(work, fast, links, strategy).draws(Layout(4, 1), 1)[0]
    assert phases.logprob == pytest.approx(2 * 1.5 / 0.7)


def test_nothing_takes_no_time() -> None:
    free = replace(SLOW, forward_flops=math.inf, update_flops=math.inf)
    work = _work(passes=(MODEL,), trained=(MODEL,), reward_models=(MODEL,))
    for staleness in (0, 1, 2):
        layout = Layout(4, 2, max_staleness=staleness)
        assert Simulation(work, free).seconds(layout) == 0


def test_a_push_and_rewards_take_their_time() -> None:
    work = _work(reward_s=3.0, reward_models=(MODEL,))
    phases = Simulation(work, SLOW, Links(node=1e9, push_s=0.5)).draws(Layout(4, 1), 1)[0]
    assert phases.transfer == pytest.approx(0.5 + 2 / 0.7)
    assert phases.reward == pytest.approx(3 + 30)


def test_trainers_keep_their_part_of_what_is_trained() -> None:
    machine = Machine(GPUS["h100"], Strategy(kind="fsdp2", ranks=64), ((WEIGHTS, ADAM),))
    # weights, two moments and gradients of 4 bytes; beside them 4 x (10^8 + 2 x 10^7) gathered, and
    # the gradients of all weights until they are reduced
    resident, passing = 3 * 4 * NUMBER / 8, 4 * 1.2e8 + 4 * NUMBER / 8 + 4 * NUMBER
    assert machine.trainer_bytes(8) == pytest.approx(resident + passing + ACTIVATIONS)


def test_keys_and_values_get_what_is_left() -> None:
    machine = Machine(GPUS["h100"], Strategy(), ((WEIGHTS, ADAM),))
    # two GPUs, the weights once; a token has 2 x 10 x 100 numbers of 2 bytes
    room = cache_tokens(_work(), machine, Layout(1, 1, 2, together=False))
    assert room == pytest.approx((2 * 0.9 * 80e9 - 2 * NUMBER) / 4000)
    trainer = machine.trainer_bytes(2)
    room = cache_tokens(_work(), machine, Layout(2, 1, 2, together=True))
    assert room == pytest.approx((2 * (0.9 * 80e9 - trainer) - 2 * NUMBER) / 4000)
    small = machine._replace(gpu=GPUS["h100"]._replace(memory=20e9))
    assert cache_tokens(_work(), small, Layout(1, 1, together=False)) is None


def test_key_heads_that_are_too_few_are_kept_by_several_gpus() -> None:
    # 2 x 10 x 100 numbers; of two heads each of eight GPUs keeps one, four times as many
    few = MODEL._replace(heads=8, key_heads=2)
    assert [few.cache_numbers(gpus) for gpus in (1, 2, 4, 8)] == [2000, 2000, 4000, 8000]
    machine = Machine(GPUS["h100"], Strategy(), ((WEIGHTS, ADAM),))
    layout = Layout(1, 1, 8, together=False)
    room = cache_tokens(_work(policy=few), machine, layout)
    assert room == pytest.approx((8 * 0.9 * 80e9 - 2 * NUMBER) / (2 * 8000))
    reading = Simulation(_work(policy=few), replace(SLOW, read_bytes=1e6)).engine(layout).step
    assert reading.context == pytest.approx(2 * 8000 / 1e6)


def test_a_policy_that_generates_itself_has_one_copy_and_no_push() -> None:
    own = _work(continuous=False)
    links = Links(node=1e9, push_s=0.5)
    assert Simulation(own, SLOW, links).draws(Layout(4, 4), 1)[0].transfer == 0
    machine = Machine(GPUS["h100"], Strategy(), ((WEIGHTS, ADAM),))
    # weights and two moments of 4 bytes
    room = cache_tokens(own, machine, Layout(4, 4))
    assert room == pytest.approx((0.9 * 80e9 - 12 * NUMBER) / 4000)
    # split weights are gathered: 3/4 of 2 GB at 0.7 x 1 GB/s; in 16 bits beside the parts
    split = Strategy(kind="fsdp2", ranks=4, low_precision=True)
    gathers = Simulation(own, SLOW, links, split).draws(Layout(4, 4), 1)[0]
    assert gathers.transfer == pytest.approx(1.5 / 0.7)
    room = cache_tokens(own, machine._replace(strategy=split), Layout(4, 4))
    assert room == pytest.approx((0.9 * 80e9 - 3 * NUMBER - 2 * NUMBER) / 4000)


def _update(strategy: Strategy, **options: object) -> float:
    """The update of 8 trainers, in groups of 4 that are nodes, where computing takes no time."""
    fast = replace(SLOW, update_flops=math.inf, optimizer_s=1e-9)
    links = Links(node=1e9, network=1e8)
    work = _work(prompts=16, trained=(MODEL,), **options)
    return Simulation(work, fast, links, strategy).draws(Layout(16, 2), 1)[0].update


def test_groups_add_up_their_gradients_too() -> None:
    # per micro-batch 2 x 2 GB x 7/8 gathered and 4 GB x 7/8 reduced in a group of 8, at 0.7 GB/s;
    # between two groups an eighth of 4 GB, there and back: 0.5 GB at 0.07 GB/s; steps of 1/8 s
    groups = Strategy(kind="fsdp2", ranks=8, reduces=True)
    once = 7 / 0.7 + 0.5 / 0.07 + 1 / 8
    assert _update(groups) == pytest.approx(once)
    # four micro-batches of one step; the groups add up once
    several = _update(groups, micro_batch_tokens=5)
    assert several == pytest.approx(4 * 7 / 0.7 + 0.5 / 0.07 + 1 / 8)


@pytest.mark.parametrize(
    ("kind", "stage", "step"), [("replicated", 0, 1.0), ("zero", 1, 1 / 16), ("zero", 2, 1 / 16)]
)
def test_trainers_share_the_step_where_they_split_its_states(
    kind: str, stage: int, step: float
) -> None:
    # a ring of 16 over two nodes: 2 x 4 GB x 15/16 at 0.07 GB/s
    strategy = Strategy(kind=kind, ranks=16, stage=stage)  # type: ignore[arg-type]
    assert _update(strategy) == pytest.approx(7.5 / 0.07 + step)


def test_trainers_are_few_or_whole_nodes_in_whole_groups() -> None:
    machine = Machine(GPUS["h100"], Strategy(), ((WEIGHTS, ADAM),))
    work = _work(prompts=64)
    assert trainer_counts(work, machine, 5) == [1, 2, 3, 4, 5]
    assert trainer_counts(work, machine, 40) == [*range(1, 17), 24, 32, 40]
    # no more than prompts
    assert trainer_counts(work, machine, 512) == [*range(1, 17), 24, 32, 40, 48, 56, 64]
    grouped = machine._replace(shard_group=6)
    assert trainer_counts(work, grouped, 64) == [6, 12, 24, 48, 60]
    for gpus in (2, 7, 16):
        found = list(layouts(work, machine, gpus))
        assert {one.trainers for one in found if one.together} == set(range(1, gpus + 1))
        assert all(one.gpus <= gpus for one in found)
        # of all GPUs, or of those of one node
        for one in found:
            assert one.together or min(gpus, 8) - one.gpus < one.tensor_parallel
    own = list(layouts(_work(prompts=64, continuous=False), machine, 2))
    assert own == [
        one._replace(cache_tokens=own[0].cache_tokens) for one in (Layout(1, 1), Layout(2, 2))
    ]


SEARCHED = {
    "short": {"prompts": 48, "copies": 4, "lengths": lognormal_lengths(100, 300)},
    # what limits is a long response, unless several batches are in the making
    "long": {"prompts": 12, "copies": 2, "lengths": lognormal_lengths(60, 1500)},
    "uneven": {"prompts": 10, "copies": 8, "lengths": lognormal_lengths(100, 300)},
}


@pytest.mark.parametrize("name", list(SEARCHED))
@pytest.mark.parametrize("gpus", [5, 8, 12])
def test_the_best_layout_is_no_slower_than_any_other(name: str, gpus: int) -> None:
    machine = Machine(GPUS["a100"], Strategy(), ((WEIGHTS, ADAM),))
    work = _work(**SEARCHED[name], prompt_tokens=500, passes=(MODEL,), trained=(MODEL,))
    best = {
        (one.layout.together, one.layout.max_staleness): one.seconds
        for one in best_layouts(work, machine, gpus)
    }
    assert set(best) == {(True, 0), (False, 0), (False, 1), (False, 2), (False, 4)}
    for layout in layouts(work, machine, gpus):
        simulation = simulation_of(work, machine, layout)
        for staleness in (0,) if layout.together else (0, 1, 2, 4):
            seconds = simulation.seconds(layout._replace(max_staleness=staleness))
            assert seconds >= 0.99 * best[layout.together, staleness]


def test_more_gpus_are_not_slower() -> None:
    machine = Machine(GPUS["a100"], Strategy(), ((WEIGHTS, ADAM),))
    work = _work(prompts=48, lengths=lognormal_lengths(100, 300), trained=(MODEL,))
    fastest = [
        min(one.seconds for one in best_layouts(work, machine, gpus)) for gpus in range(7, 19)
    ]
    for before, after in pairwise(fastest):
        assert after <= 1.01 * before


@pytest.mark.parametrize(
    ("options", "gpus", "cause"),
    [
        ({"shard_group": 8}, 4, "trainers come in groups of strategy.shard_group (8)"),
        # weights, two moments and gradients: 16 GB, and 10 GiB of activations; 0.9 x 20 GB
        ({"memory": 20e9}, 4, "each of 4 trainers needs 26.7 GB, and 18.0 GB are usable; take"),
        ({"memory": 20e9}, 9, "set --prompts to at least 9 for more trainers, take more GPUs"),
        # 10 + 10^8 tokens of 4000 bytes
        (
            {"longest": 10**8},
            4,
            "2.0 GB for its weights and 400.0 GB for one response of 100000010",
        ),
    ],
)
def test_why_nothing_fits_is_told(options: dict[str, float], gpus: int, cause: str) -> None:
    gpu = GPUS["h100"]._replace(memory=options.get("memory", 80e9))
    machine = Machine(gpu, Strategy(), ((WEIGHTS, ADAM),))
    machine = machine._replace(shard_group=int(options.get("shard_group", 1)))
    work = _work(lengths=_same(int(options.get("longest", 5))))
    assert list(layouts(work, machine, gpus)) == []
    assert cause in why_nothing_fits(work, machine, gpus)


def _limited(**options: object) -> str:
    rates = replace(SLOW, forward_flops=1e15, update_flops=1e15, read_bytes=1e12)
    work = _work(lengths=Lengths(np.array([10, 20, 30]), "made up"), trained=(MODEL,))
    rate_options = {name: options.pop(name) for name in list(options) if hasattr(rates, name)}
    links = options.pop("links", Links())
    simulation = Simulation(
        replace(work, **options),  # type: ignore[arg-type]
        replace(rates, **rate_options),  # type: ignore[arg-type]
        links,  # type: ignore[arg-type]
    )
    layout = Layout(1, 1)
    draws = simulation.draws(layout)
    return bottleneck(Answer(layout, simulation.seconds(layout), draws[0], simulation))[0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"read_bytes": 1e9}, "generation: memory bandwidth"),
        ({"decode_flops": 1e9}, "generation: FLOP/s"),
        ({"step_s": 10.0}, "generation: fixed time of a step"),
        ({"update_flops": 1e9}, "trainer: FLOP/s"),
        ({"links": Links(node=1e6)}, "links between GPUs"),
        ({"links": Links(push_s=1e6)}, "fixed time of a push"),
        ({"reward_s": 1e6}, "rewards"),
        (
            {
                "step_s": 10.0,
                "lengths": Lengths(np.array([1] * 30 + [1000]), "made up"),
                "prompts": 50,
            },
            "generation: longest responses",
        ),
    ],
)
def test_what_is_slow_is_named(options: dict[str, object], name: str) -> None:
    assert _limited(**options) == name


def test_lengths_have_the_mean_after_they_are_cut() -> None:
    lengths = lognormal_lengths(700, 1000)
    assert lengths.mean == pytest.approx(700, rel=1e-3)
    assert lengths.known.max() == 1000
    assert (lengths.known == 1000).mean() > 0.1
    assert len(np.unique(lengths.known)) > 100
    assert set(lognormal_lengths(64, 64).known) == {64}
    with pytest.raises(ValueError, match="--response-lengths is 65"):
        lognormal_lengths(65, 64)


def test_lengths_of_a_run_are_drawn_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"length": length}) + "\n" for length in (3, 5, 0)))
    lengths = recorded_lengths(path)
    assert sorted(lengths.known) == [1, 3, 5]  # an engine takes a step for an empty one too
    drawn = lengths.draw(500, 4, seed=0)
    assert drawn.shape == (500, 4)
    assert set(drawn.ravel()) == {1, 3, 5}
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="has no lengths of responses"):
        recorded_lengths(path)
