from lrlhf.datamodules.loading.loader import BalancedOrder, CyclicOrder, EpochOrder
from lrlhf.datamodules.loading.splits import hold_out


def test_shares_that_do_not_divide_are_rounded_by_largest_remainder() -> None:
    # 10 rows at 1/3 each are 3.33: one source gets the tenth row
    order = EpochOrder([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]], [1.0, 1.0, 1.0], seed=0)
    assert sorted(order.counts) == [3, 3, 4]


def test_a_small_share_goes_through_all_of_its_rows_before_any_comes_again() -> None:
    # source 0 has 60 rows and 20 places per epoch: three epochs go through it exactly once
    order = EpochOrder([list(range(60)), list(range(60, 80))], [1.0, 3.0], seed=3)
    assert order.counts == (20, 60)
    for start in (0, 3, 6):
        drawn = [row for epoch in range(start, start + 3) for row in order.epoch(epoch).tolist()]
        assert sorted(row for row in drawn if row < 60) == list(range(60))


def test_a_balanced_order_deals_the_same_batches_by_tokens() -> None:
    costs = [1, 50, 2, 40, 3, 30, 4, 20, 5, 10, 6]
    plain = EpochOrder([list(range(11))], None, seed=2)
    balanced = BalancedOrder(plain, costs, batch_size=2, world=2)
    assert (len(balanced), balanced.seed) == (11, 2)
    for epoch in range(8):
        before, after = plain.epoch(epoch).tolist(), balanced.epoch(epoch).tolist()
        for start in (0, 4):
            assert sorted(after[start : start + 4]) == sorted(before[start : start + 4])
            first, second = after[start : start + 2], after[start + 2 : start + 4]
            # of the three ways to make two pairs of four, the one that comes nearest
            tokens = sorted(costs[row] for row in first + second)
            assert {sum(costs[row] for row in first), sum(costs[row] for row in second)} == {
                tokens[0] + tokens[3],
                tokens[1] + tokens[2],
            }
        # the rows that make no full batch stay where they are
        assert after[8:] == before[8:]


def test_a_given_order_goes_on_where_the_last_epoch_ended() -> None:
    # of five rows, batches of two take four
    order = CyclicOrder(size=5, per_epoch=4, seed=0)
    assert [order.epoch(epoch).tolist() for epoch in (0, 1, 2)] == [
        [0, 1, 2, 3, 4],
        [4, 0, 1, 2, 3],
        [3, 4, 0, 1, 2],
    ]


def test_rows_that_belong_together_are_held_out_together_and_no_more_than_asked_for() -> None:
    keys = [(row // 3,) for row in range(60)]  # prompts of three rows each
    held = set()
    for seed in range(8):
        train, validation = hold_out(keys, size=10, seed=seed)
        assert sorted(train + validation) == list(range(60))
        # three whole prompts, as a fourth would be 12 rows
        assert len(validation) == 9
        assert {keys[row] for row in train}.isdisjoint(keys[row] for row in validation)
        held.add(tuple(validation))
    assert len(held) == 8
