"""How many blocks fit is planned from real free memory, and said with every number."""

import pytest

from corolla.errors import BadInput
from corolla.server.memory import LEAST_HEADROOM_BYTES, MemoryNeeds, plan_memory, transition, weight_bytes

MIB, GIB = 1 << 20, 1 << 30
NEEDS = MemoryNeeds(block_bytes=[400 * MIB] * 32, cache_bytes_per_token=4096, cache_tokens=16384)


def test_as_many_blocks_as_fit_beside_cache_and_headroom() -> None:
    plan = plan_memory(10 * GIB, NEEDS)
    each = 464 * MIB
    assert plan.num_blocks == int(0.8 * 10 * GIB) // each == 17
    assert plan.weights_bytes + plan.cache_bytes == 17 * each
    assert plan.weights_bytes + plan.cache_bytes + plan.headroom_bytes <= plan.free_bytes


def test_no_more_than_the_model_has() -> None:
    assert plan_memory(1000 * GIB, NEEDS).num_blocks == 32


def test_the_largest_block_counts_so_that_any_span_fits() -> None:
    mixed = MemoryNeeds(block_bytes=[100 * MIB] * 3 + [900 * MIB] * 29, cache_bytes_per_token=0, cache_tokens=1)
    assert plan_memory(10 * GIB, mixed).num_blocks == int(0.8 * 10 * GIB) // (900 * MIB)


def test_weights_outside_the_blocks_count_once() -> None:
    beside = MemoryNeeds(
        block_bytes=[400 * MIB] * 32, cache_bytes_per_token=4096, cache_tokens=16384, side_bytes=1000 * MIB
    )
    plan = plan_memory(10 * GIB, beside)
    assert plan.num_blocks == (int(0.8 * 10 * GIB) - 1000 * MIB) // (464 * MIB) == 15
    assert plan.weights_bytes == 15 * 400 * MIB + 1000 * MIB


def test_small_machines_keep_a_least_headroom() -> None:
    assert plan_memory(1 * GIB, NEEDS).headroom_bytes == LEAST_HEADROOM_BYTES
    assert plan_memory(1 * GIB, NEEDS).num_blocks == 1


def test_the_plan_is_one_line_with_its_numbers() -> None:
    sentence = plan_memory(10 * GIB, NEEDS, journal_bytes=GIB).sentence
    assert "\n" not in sentence
    for number in (
        "17 of 32 blocks", "6.6 GiB of weights", "1.1 GiB of cache for 16384 tokens", "10.0 GiB of free",
        "at most 1.0 GiB of the machine's",
    ):  # fmt: skip
        assert number in sentence


def test_a_wish_is_granted_when_it_fits_and_refused_with_the_numbers_when_not() -> None:
    assert plan_memory(10 * GIB, NEEDS, num_blocks=5).num_blocks == 5
    with pytest.raises(BadInput, match=r"20 block\(s\) need 9\.1 GiB.*10\.0 GiB are free.*so 17 fit"):
        plan_memory(10 * GIB, NEEDS, num_blocks=20)
    with pytest.raises(BadInput, match="this model has 32 blocks"):
        plan_memory(1000 * GIB, NEEDS, num_blocks=33)
    with pytest.raises(BadInput, match=r"1 block\(s\) need"):
        plan_memory(300 * MIB, NEEDS)


def test_dtype_and_quantization_decide_the_bytes_of_a_weight() -> None:
    assert [weight_bytes(1000, dtype) for dtype in ("float32", "bfloat16")] == [4000, 2000]
    assert weight_bytes(1000, "bfloat16", "int8") == 1010
    assert weight_bytes(1000, "bfloat16", "nf4") == 536
    with pytest.raises(BadInput, match="'fp3' is not one of"):
        weight_bytes(1000, "bfloat16", "fp3")


def test_new_blocks_are_loaded_beside_the_old_ones_where_memory_allows() -> None:
    plan = plan_memory(10 * GIB, NEEDS, num_blocks=5)
    assert transition(10 * GIB - 5 * 464 * MIB, plan, 5) == "load_first"
    assert transition(2 * GIB, plan, 5) == "leave_first"
