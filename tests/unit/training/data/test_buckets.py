"""Buckets and the order of batches: laws over all sizes, and the same run for every number of processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from inweave.errors import ConfigError
from inweave.training.data.batches import Order, Position, epoch_batches, position
from inweave.training.data.buckets import Bucket, BucketRules, assign, buckets_for

FAST = settings(deadline=None, max_examples=60)
SIDES = st.integers(1, 6000)


@st.composite
def some_rules(draw: st.DrawFn) -> BucketRules:
    step = draw(st.sampled_from([8, 16, 32, 64]))
    resolution = draw(st.integers(max(step, 64), 1200))
    try:
        return BucketRules(
            resolution,
            step,
            draw(st.none() | st.integers(1, resolution)),
            draw(st.none() | st.integers(resolution, 3 * resolution)),
            upscale=draw(st.booleans()),
            enabled=draw(st.booleans()),
        )
    except ConfigError:
        assume(False)
        raise


def test_the_buckets_of_512_are_those_everybody_knows() -> None:
    wide = {(512, 512), (576, 448), (640, 384), (704, 320), (768, 320), (832, 256), (896, 256), (960, 256), (1024, 256)}
    result = {(bucket.width, bucket.height) for bucket in buckets_for(512, 64, 256, 1024)}
    assert result == wide | {(height, width) for width, height in wide}


@FAST
@given(some_rules())
def test_buckets_keep_to_the_rules(rules: BucketRules) -> None:
    low, high = rules.limits
    result = buckets_for(rules.size, rules.step, low, high)
    assert len(set(result)) == len(result)
    for bucket in result:
        assert bucket.width * bucket.height <= rules.area
        assert bucket.width % rules.step == bucket.height % rules.step == 0
        assert low <= min(bucket.width, bucket.height) <= max(bucket.width, bucket.height) <= high
        assert Bucket(bucket.height, bucket.width) in result


@FAST
@given(SIDES, SIDES, some_rules())
def test_every_image_is_cropped_from_a_cover_of_one_bucket(width: int, height: int, rules: BucketRules) -> None:
    if not rules.upscale and min(width, height) < rules.step:
        try:
            placement = assign((width, height), rules)
        except ConfigError as error:
            assert f"{width}x{height}" in str(error)
            return
        assert placement.scale <= 1
        return
    placement = assign((width, height), rules)
    bucket, resized = placement.bucket, placement.resized
    x, y, across, down = placement.crop
    assert (across, down) == (bucket.width, bucket.height)
    assert bucket.width * bucket.height <= rules.area
    assert bucket.width % rules.step == bucket.height % rules.step == 0
    assert x >= 0 and y >= 0 and x + across <= resized[0] and y + down <= resized[1]
    assert resized[0] == across or resized[1] == down  # covers, and not more than it must
    assert abs(resized[0] - width * placement.scale) <= 0.5 + 1e-6
    assert abs(resized[1] - height * placement.scale) <= 0.5 + 1e-6
    assert abs(2 * x + across - resized[0]) <= 1 and abs(2 * y + down - resized[1]) <= 1  # the middle of it
    if not rules.upscale:
        assert placement.scale <= 1 and resized[0] <= width and resized[1] <= height
    if not placement.own_bucket and rules.enabled:
        mine = width / height / (bucket.width / bucket.height)
        for other in buckets_for(rules.size, rules.step, *rules.limits):
            theirs = width / height / (other.width / other.height)
            assert max(mine, 1 / mine) <= max(theirs, 1 / theirs) * (1 + 1e-9)


def test_small_images_get_a_bucket_of_their_own_only_without_upscaling() -> None:
    own = assign((300, 200), BucketRules(512, 64, upscale=False))
    assert (own.bucket, own.own_bucket) == (Bucket(256, 192), True)
    grown = assign((300, 200), BucketRules(512, 64))
    assert not grown.own_bucket and grown.scale > 1
    large = assign((3000, 2000), BucketRules(512, 64, upscale=False))
    assert large == assign((3000, 2000), BucketRules(512, 64)) and not large.own_bucket
    with pytest.raises(ConfigError, match=r"300x40 pixels.*step of 64.*allow upscaling"):
        assign((300, 40), BucketRules(512, 64, upscale=False))


def test_a_very_long_image_stays_inside_the_area_and_the_limits() -> None:
    placement = assign((20000, 100), BucketRules(512, 64, 256, 1024, upscale=False))
    assert placement.bucket == Bucket(1024, 64) and placement.scale <= 1
    assert placement.cropped_fraction > 0.25
    tight = BucketRules(128, 64, 128, 4096, upscale=False)
    assert assign((20000, 100), tight).bucket == Bucket(256, 64)
    assert assign((100, 20000), tight).bucket == Bucket(64, 256)


def test_ratios_are_compared_alike_in_both_directions() -> None:
    # 448x576 keeps more of 200x228 than 512x512; the plain difference of ratios would choose the other
    assert assign((200, 228), BucketRules(512)).bucket == Bucket(448, 576)
    assert assign((228, 200), BucketRules(512)).bucket == Bucket(576, 448)


def test_without_buckets_everything_is_the_resolution() -> None:
    rules = BucketRules((512, 768), 64, enabled=False)
    assert assign((1000, 100), rules).bucket == assign((600, 900), rules).bucket == Bucket(512, 768)


def test_rules_that_allow_nothing_say_all_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"no bucket has 262144 pixels.*sides from 768 to 1024"):
        BucketRules(512, 64, 768, 1024)
    with pytest.raises(ConfigError) as caught:
        BucketRules(32, 64, 900, 100)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="0x10"):
        assign((0, 10), BucketRules(512))


@st.composite
def some_order(draw: st.DrawFn) -> Order:
    examples = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=24))
    bucket, repeats, prior = zip(*examples, strict=True)
    return Order(bucket, repeats, draw(st.integers(1, 5)), draw(st.integers(0, 2**64)), prior)


@FAST
@given(some_order(), st.integers(0, 5))
def test_an_epoch_holds_each_example_as_often_as_it_repeats(order: Order, epoch: int) -> None:
    batches = order.batches(epoch)
    assert Counter(index for batch in batches for index in batch) == Counter(dict(enumerate(order.repeats)))
    short: Counter[Hashable] = Counter()
    for batch in batches:
        assert len({order.buckets[index] for index in batch}) == 1
        short[order.buckets[batch[0]]] += len(batch) < order.batch_size
    assert max(short.values()) <= 1
    assert len(batches) == len(order)


@FAST
@given(some_order(), st.integers(0, 40), st.integers(1, 3), st.integers(1, 3))
def test_any_number_of_processes_sees_the_same_sequence(
    order: Order, steps: int, accumulation: int, world: int
) -> None:
    def run(start: int, end: int, accumulation: int, world: int) -> list[tuple[Position, ...]]:
        sequence: list[tuple[Position, ...]] = []
        for step in range(start, end):
            shares = [
                order.step_positions(step, accumulation=accumulation, world=world, rank=rank) for rank in range(world)
            ]
            for turn in zip(*shares, strict=True):  # ranks side by side: one micro-batch each
                sequence += turn
        return sequence

    single = run(0, steps, accumulation * world, 1)
    assert single == run(0, steps, accumulation, world)
    assert single == run(0, steps // 2, accumulation, world) + run(steps // 2, steps, accumulation * world, 1)
    endless = [batch for epoch in range(len(single) // len(order) + 1) for batch in order.positions(epoch)]
    assert single == endless[: len(single)]


def test_two_processes_merged_are_one_with_twice_the_accumulation() -> None:
    order = Order(tuple("aabbb"), (1, 2, 3, 1, 2), 2, seed=7)
    one = [order.step_positions(step, accumulation=2) for step in range(9)]
    first = [order.step_positions(step, world=2, rank=0) for step in range(9)]
    second = [order.step_positions(step, world=2, rank=1) for step in range(9)]
    assert one == [a + b for a, b in zip(first, second, strict=True)]
    assert position(3, 1, accumulation=2, world=1, batches_per_epoch=5) == (1, 2)


@FAST
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 8), st.integers(0, 99))
def test_regularization_is_distributed_over_all_batches(subjects: int, priors: int, size: int, seed: int) -> None:
    kinds = (False,) * subjects + (True,) * priors
    share = priors / (subjects + priors)
    for batch in epoch_batches((0,) * len(kinds), (1,) * len(kinds), size, seed, 0, regularization=kinds):
        assert abs(sum(kinds[index] for index in batch) - len(batch) * share) <= 1 + 1e-9


def test_epochs_and_seeds_differ_and_nothing_else_matters() -> None:
    order = Order((0,) * 40, (1,) * 40, 4, seed=3)
    assert order.batches(0) != order.batches(1)
    assert order.batches(0) != Order((0,) * 40, (1,) * 40, 4, seed=4).batches(0)
    assert order.batches(5) == Order((0,) * 40, (1,) * 40, 4, seed=3).batches(5)
    flat = [index for batch in order.batches(0) for index in batch]
    assert flat != sorted(flat)  # shuffled within the bucket
    two = Order((0,) * 20 + (1,) * 20, (1,) * 40, 4, seed=3)
    assert [two.buckets[batch[0]] for batch in two.batches(0)] not in ([0] * 5 + [1] * 5, [1] * 5 + [0] * 5)


def test_the_order_is_the_same_everywhere() -> None:
    batches = epoch_batches([0, 1] * 50, [2] * 100, 4, seed=123, epoch=4)
    digest = hashlib.sha256(repr(batches).encode()).hexdigest()[:16]
    assert digest == "63fb48801d4ef7ef"
    program = (
        "from inweave.training.data.batches import epoch_batches; import hashlib\n"
        "order = repr(epoch_batches([0, 1] * 50, [2] * 100, 4, seed=123, epoch=4))\n"
        "print(hashlib.sha256(order.encode()).hexdigest()[:16])\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == digest


def test_batches_that_are_not_full_are_left_out_and_others_in_each_epoch() -> None:
    buckets, repeats = "aaaaabbb", [1] * 7 + [2]
    seen = set()
    for epoch in range(20):
        batches = epoch_batches(buckets, repeats, 2, 0, epoch, whole=True)
        assert sorted(len(batch) for batch in batches) == [2] * 4  # 5 // 2 and 4 // 2
        assert all(len({buckets[index] for index in batch}) == 1 for batch in batches)
        seen |= {index for batch in batches for index in batch}
    assert seen == set(range(8))
    order = Order(tuple("aaab"), (1,) * 4, {"a": 2, "b": 2}, whole=True)
    assert len(order) == 1 and len(order.without([0, 1])) == 0


def test_batch_sizes_may_differ_by_bucket_and_the_last_one_is_short() -> None:
    batches = epoch_batches("aaab", [1] * 4, {"a": 2, "b": 5}, 0, 0)
    assert sorted(map(len, batches)) == [1, 1, 2]
    empty = Order(("a",), (0,), 2)
    with pytest.raises(ConfigError, match="no batch"):
        empty.step_positions(0)


@pytest.mark.parametrize(("seed", "size"), [(-1, 1), (0, 0)])
def test_impossible_orders_are_refused(seed: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"seed {seed}.*batch size {size}"):
        epoch_batches([0], [1], size, seed, 0)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Order((0,), (1,), 1).step_positions(0, world=2, rank=2)
