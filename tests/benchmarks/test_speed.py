"""Costs: memory is counted exactly, ratios are of one round, the literal step is the fast one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cosine
import lpom
import measuring
import ranks
import speed
from lpom.graph import trace
from lpom.weights.blocks import Use, blocks
from lpom.weights.exact import exact_step
from measuring import LiveTensors
from records import Store


def test_live_tensors_are_counted_until_they_are_freed() -> None:
    given = torch.ones(500)
    live = LiveTensors()
    with live:
        a = torch.ones(1000)  # 4000 bytes
        b = a * 2
        assert live.held == 8000
        del a
        assert live.held == 4000
        c = b.view(10, 100)  # no memory of its own
        c += 1
        given.mul_(2)
        assert live.held == 4000
        del b
        assert live.held == 4000  # c still looks at it
        del c
    assert (live.held, live.peak) == (0, 8000)


def test_what_autograd_keeps_for_the_way_back_is_counted() -> None:
    weight = torch.zeros(100, 100, requires_grad=True)
    live = LiveTensors()
    with live:
        loss = (weight.exp() * 2).sum()  # keeps exp's result
        held = live.held
        loss.backward()
    assert held == 4 * (100 * 100 + 1)
    assert live.peak >= 2 * 4 * 100 * 100


def test_contestants_take_turns_and_each_ratio_is_of_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is twice as slow in every other round changes times, not ratios."""
    now, log = [0.0], []

    def turn(name, seconds):
        def run():
            log.append(name)
            round_ = (len(log) - 1) // 2
            now[0] += seconds * (2 if round_ % 2 else 1)

        return run

    monkeypatch.setattr(measuring, "_clock", lambda: lambda: now[0])
    rows = measuring.contest("case", {"a": turn("a", 2.0), "b": turn("b", 3.0)}, rounds=4)
    assert [row["ratio"] for row in rows] == [1.0, 1.5]
    assert [row["amount"] for row in rows] == [3000.0, 4500.0]
    assert sorted(log[:2]) == sorted(log[2:4]) == ["a", "b"]
    assert log[2:4] != log[4:6]  # who begins changes


def test_ratios_have_a_median_and_quartiles() -> None:
    times = [float(k) for k in (5, 1, 2, 3, 4)]
    assert measuring.spread(times, [1.0] * 5) == (3.0, 2.0, 4.0)


def test_the_literal_step_is_the_fast_one() -> None:
    """With independent rows and no ridge the two are one formula."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    goal = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    model = lpom.mlp((8, 4), "relu", "relu", bias=False, seed=0, dtype=torch.float64)
    W = model[0].weight.detach().clone()
    graph = trace(model, X)
    (block,) = blocks(graph)
    exact_step(block, [Use(graph[1], (X,), goal)], iterations=3, ridge=0.0)
    expected = speed.literal(W, X, goal, 3)
    torch.testing.assert_close(model[0].weight.detach(), expected, atol=1e-10, rtol=1e-10)


def test_when_an_accuracy_was_reached() -> None:
    curves = {
        "a": [[(1.0, 0.9), (2.0, 0.98)], [(1.0, 0.98), (2.0, 0.97)], [(1.5, 0.98)]],
        "b": [[(3.0, 0.99)], [(3.0, 0.99)], [(3.0, 0.99)]],
        "c": [[(1.0, 0.5)], [(1.0, 0.5)], [(1.0, 0.99)]],
    }
    a, b, c = speed.reached(0.98, curves)
    assert (a["amount"], a["ratio"], b["amount"], b["ratio"]) == (1.5, 1.0, 3.0, 2.0)
    assert (c["amount"], c["ratio"]) == (None, None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.CASES, "small", lambda: speed._mlp((6, 5, 3), 2))
    monkeypatch.setitem(speed.CASES, "rnn", lambda: speed._known("rnn", (1, 4, 3), 2, width=4))


def test_steps_and_memory_have_a_row_for_each_contestant(small: None) -> None:
    for rows in (speed.step(["small", "rnn"]), speed.memory(["small", "rnn"])):
        assert len(rows) == 2 * len(speed.contestants())
        assert all(row["amount"] > 0 and row["ratio"] > 0 for row in rows)
        assert rows[0]["ratio"] == 1.0


def test_other_parts_run() -> None:
    parts = (
        speed.attention(length=8, rounds=1),
        speed.fit(rounds=1, rows=1),
        speed.exact(6, 5, rounds=1),
    )
    for rows in parts:
        assert rows and all(row["amount"] > 0 for row in rows)


def test_cases_are_kept_beside_others_of_the_same_day(folder: Path) -> None:
    store = Store(folder / "speed.jsonl")
    where = {"made": "lpom", "processor": "p", "threads": 1}
    for part, date, case, amount in (
        ("step", "1", "a", 1),
        ("step", "2", "a", 2),
        ("memory", "2", "a", 3),
        ("step", "2", "b", 4),
        ("step", "2", "a", 5),
    ):
        rows = [{"case": case, "amount": amount}]
        speed.keep(store, {"part": part, "date": date, "rows": rows, **where})
    found = {r["part"]: [row["amount"] for row in r["rows"]] for r in store}
    assert found == {"memory": [3], "step": [4, 5]}


def test_the_two_steps_meet_as_mu_grows() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(20, 64, generator=generator, dtype=torch.float64)
    y = torch.randint(10, (20,), generator=generator)
    model = lpom.mlp(cosine.SIZES, "tanh", seed=0, dtype=torch.float64)
    cosines = [cosine.cosine(model, X, y, mu) for mu in (1.0, 20.0, 1e4)]
    assert cosines == sorted(cosines) and cosines[-1] > 1 - 1e-8


@pytest.mark.slow
def test_two_processes_take_their_turns() -> None:
    times = ranks.measure([6, 8, 8, 3], 200, 1)
    assert times.keys() == ranks.WAYS.keys()
    assert all(len(taken) == 1 and taken[0] > 0 for taken in times.values())
