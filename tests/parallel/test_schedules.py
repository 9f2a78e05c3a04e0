"""The model of parallel training against what is known of its schedules."""

from __future__ import annotations

import pytest

from lpom.experiments.schedules import (
    Operation,
    Part,
    Wire,
    gpipe,
    lpom,
    one_forward_one_back,
    rows_apart,
    seconds_per_batch,
    simulate,
)

FREE = Wire(0.0, float("inf"))


def even(n):
    return [Part(1.0, 2.0, 0.0, 8.0, 8.0)] * n


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_back])
def test_micro_batches_reach_m_of_m_plus_n_less_one(schedule, n):
    assert 3 / seconds_per_batch(schedule, even(n), FREE) == pytest.approx(4 / (4 + n - 1))


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_pipelined_lpom_has_no_bubble(n):
    assert seconds_per_batch(lpom, even(n), FREE) == pytest.approx(3.0)


def test_the_slowest_part_sets_the_pace():
    parts = [*even(2), Part(2.0, 3.0, 1.0, 8.0, 8.0), *even(1)]
    assert seconds_per_batch(lpom, parts, FREE) == pytest.approx(6.0)


def test_two_ranks_that_share_rows_halve_all_but_the_update_and_wait_for_the_sum():
    part = Part(1.0, 2.0, 0.5, 0.0, 8.0)
    wire = Wire(0.25, 2.0)  # a ring of two: twice half of the gradients, 2 (0.25 + 4 / 2)
    assert rows_apart(part, wire, 2) == pytest.approx(1.5 + 0.5 + 4.5 - 0.5)


def test_a_schedule_whose_ranks_wait_for_each_other_is_refused():
    first = [Operation("a", 1.0, (("b", 0.0),))]
    second = [Operation("b", 1.0, (("a", 0.0),))]
    with pytest.raises(ValueError, match="never ends"):
        simulate([first, second])
