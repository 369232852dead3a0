"""Times of small made-up models, counted by hand."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from lrlhf.apps.plan.times import GPU, GPUS, Engine, Texts, generation, roofline
from lrlhf.models.flops import ModelSize, size_of

# half of its FLOP/s, 4/5 of its bandwidth: engines get 10^9 FLOP/s and 10^9 bytes/s of each GPU
SLOW = GPU(flops=2e9, memory=8e6, bandwidth=1.25e9, link=1e9)
# without attention: 2 x 10^6 FLOP for each token, and 2 x 10^6 bytes to read all weights
PLAIN = ModelSize(10**6, 10**6, 10**6, query_width=0, key_width=0)
BESIDE = 2e-3
"""Seconds of a step beside its work."""


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
    size = size_of(model, model)
    # queries and output 16x16, keys and values 16x8, three matrices 16x24; norms, output head
    matrices = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 50 * 16
    norms, positions = 7 * 16, 2 * 2  # kept twice
    assert size.multiplied == matrices + norms + positions
    assert (size.query_width, size.key_width) == (3 * 16, 3 * 8)
    # two responses of 3 tokens after a prompt of 2: positions see 1, 2 and 3, 4, 5
    texts = Texts(1, 2, 2, 3, 3)
    for shared, tokens, seen in ((True, 2 + 6, 3 + 12 + 12), (False, 4 + 6, 2 * (3 + 12))):
        flops = texts.forward_flops(size, shares_prompts=shared)
        exact = 2 * size.multiplied * tokens + 4 * 3 * 16 * seen
        # half of the diagonal is left out
        assert flops == pytest.approx(exact - 2 * 3 * 16 * tokens)


def test_tied_embeddings_are_multiplied_as_a_head() -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    size = size_of(model, model)
    assert size.multiplied == size.number


def test_experts_are_refused() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    model = LlamaForCausalLM(config)
    model.config.num_experts = 4
    with pytest.raises(ValueError, match="how long mixtures of experts take is not known"):
        size_of(model, model)


def test_a_trainers_phase_takes_the_longer_of_computing_and_of_moving() -> None:
    # two GPUs: 2 x 0.4 x 2 GFLOP/s and 2 x 0.8 x 1.25 GB/s
    computing = roofline("update", SLOW, 2, 16e9, 10e9)
    assert (computing.seconds, computing.limit) == (pytest.approx(10), "FLOP/s")
    moving = roofline("update", SLOW, 2, 16e9, 40e9)
    assert (moving.seconds, moving.limit) == (pytest.approx(20), "memory")


def test_prompts_are_computed_once_for_their_responses() -> None:
    prompts, _ = generation(PLAIN, Texts(6, 4, 50, 10, 10), Engine(2), SLOW)
    # three prompts of each replica: 150 x 2 x 10^6 FLOP at 10^9 FLOP/s; twice as many of both
    assert prompts.seconds == pytest.approx(0.3)
    assert prompts.flops == pytest.approx(0.6e9)


def test_few_responses_wait_for_the_weights_and_many_for_arithmetic() -> None:
    # 10 steps read 2 x 10^6 bytes in 2 ms each; computing takes 2 ms of each response
    _, alone = generation(PLAIN, Texts(1, 1, 5, 10, 10), Engine(1), SLOW)
    assert alone.seconds == pytest.approx(10 * (2e-3 + BESIDE))
    _, four = generation(PLAIN, Texts(1, 4, 5, 10, 10), Engine(1), SLOW)
    assert (four.seconds, four.limit) == (pytest.approx(10 * (8e-3 + BESIDE)), "FLOP/s")
    # two GPUs read and compute twice as fast
    _, split = generation(PLAIN, Texts(1, 4, 5, 10, 10), Engine(1, gpus=2), SLOW)
    assert split.seconds == pytest.approx(10 * (4e-3 + BESIDE))


def test_keys_and_values_are_read_with_every_token() -> None:
    # a token has 2 x 10^4 numbers of 2 bytes; a response sees 5 tokens, and 5 of its 10 in the mean
    model = PLAIN._replace(key_width=10**4)
    _, found = generation(model, Texts(1, 1, 5, 10, 10), Engine(1), SLOW)
    assert found.moved == pytest.approx(10 * 2e6 + 4e4 * 10 * (5 + 5))
    assert found.seconds == pytest.approx(found.moved / 1e9 + 10 * BESIDE)
    assert found.limit == "memory"


def test_no_more_responses_run_than_have_room() -> None:
    # half of 8 MB for responses of 10 tokens and a fourth of a prompt of 40, 10^4 bytes each: 20
    model = PLAIN._replace(key_width=2500)
    _, found = generation(model, Texts(15, 4, 40, 10, 10), Engine(1), SLOW)
    # three rounds of 20 responses, which read all weights 10 times each
    assert found.moved == pytest.approx(30 * 2e6 + 1e4 * 600 * (40 + 5))
    # max_num_seqs is a limit too: six rounds
    _, found = generation(model, Texts(15, 4, 40, 10, 10), Engine(1, sequences=10), SLOW)
    assert found.moved == pytest.approx(60 * 2e6 + 1e4 * 600 * (40 + 5))


def test_the_longest_response_ends_alone() -> None:
    # 8 responses, 4 at a time: two rounds of 10 steps, and 20 more until one of 30 tokens ends
    texts = Texts(2, 4, 5, 10, 30)
    _, found = generation(PLAIN, texts, Engine(1, sequences=4), SLOW)
    assert found.moved == pytest.approx((20 + 20) * 2e6)
    # trainers that generate themselves take whole batches: two of 30 steps, of 20 ms beside
    _, own = generation(PLAIN, texts, Engine(1, sequences=4, own=True), SLOW)
    assert own.moved == pytest.approx(60 * 2e6)
    assert own.flops == pytest.approx(8 * 30 * 2e6)
    assert own.seconds == pytest.approx(0.48 + 60 * 20e-3)
    assert own.limit == "launch"


def test_a_known_order_of_magnitude_on_an_h100() -> None:
    # 7.6 billion weights in 16 bits take 15.2 GB: at 0.8 x 3.35 TB/s 5.7 ms for a token of one text
    model = ModelSize(7_600_000_000, 0, 7_000_000_000, 28 * 3584, 28 * 512)
    _, found = generation(model, Texts(1, 1, 100, 1000, 1000), Engine(1), GPUS["h100"])
    assert found.seconds == pytest.approx(1000 * (5.7e-3 + BESIDE), rel=0.01)
    assert found.limit == "memory"
