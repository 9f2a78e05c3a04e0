"""The tests of this folder fail when a key line is broken on purpose, and pass when it is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lpom

HERE = Path(__file__).parent
SOURCE = Path(lpom.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One line, what becomes of it, and the test that must not stand it.

    The line is looked for in every file of the library, its spaces and line breaks aside. Where it
    is gone, the mutant is skipped and named, until it has the line that now does this.
    """

    line: str
    broken: str
    test: str
    slow: bool = False


MUTANTS = {
    "pull without the ratio of mu": Mutant(
        "pull * (self.mu[node.index] / self.mu[source])",
        "pull",
        "test_orders.py::test_orders_are_their_loops[paper]",
    ),
    "pulls of several consumers that replace each other": Mutant(
        "self.pulls[index] = pull if old is None else old + pull",
        "self.pulls[index] = pull",
        "test_theorem2.py::test_without_activations_the_iteration_is_a_sum_over_the_consumers"
        "[products]",
        slow=True,
    ),
    "pull with the wrong sign": Mutant(
        "P - Z if pull is None else P - Z + pull",
        "P - Z if pull is None else P - Z - pull",
        "test_theorem3.py::test_below_one_the_limit_is_the_minimum_of_its_block[chain]",
        slow=True,
    ),
    "states that are not damped": Mutant(
        "(step if alpha is None else alpha * step)",
        "step",
        "test_safe_step.py::test_no_block_of_states_raises_F[chain]",
        slow=True,
    ),
    "residual with the wrong sign": Mutant(
        "return self._phi(node, Z) - self.X[v].detach()",
        "return self.X[v].detach() - self._phi(node, Z)",
        "../test_states.py::test_a_move_gives_the_residual_that_is_left[0.5]",
    ),
    "one sweep with the wrong sign": Mutant(
        "return self.phi(z) - self.phi(z - pull)",
        "return self.phi(z - pull) - self.phi(z)",
        "test_transcription.py::test_one_interleaved_sweep_is_autograd_with_another_rule[skips]",
    ),
    "a moved state that leaves those above it feed-forward": Mutant(
        "if value is not None and self.P[node.index] is None:",
        "if value is None:",
        "../test_states.py::test_moving_a_state_makes_those_above_it_disagree",
    ),
    "gradients of several uses that replace each other": Mutant(
        "parameter.grad = parameter.grad + gradient",
        "parameter.grad = gradient",
        "test_transcription.py::test_one_interleaved_sweep_is_autograd_with_another_rule[shared]",
    ),
    "gradient without mu": Mutant(
        "{p: self.mu[node.index] * g for p, g in pairs if g is not None}",
        "{p: g for p, g in pairs if g is not None}",
        "test_kkt.py::test_weight_gradients_are_autograd_s[chain]",
        slow=True,
    ),
    "gradient of a layer without sample weights": Mutant(
        "residual = _weighted(residual, weight)",
        "residual = residual + 0.0",
        "test_kkt.py::test_sample_weights_weigh_the_gradient[chain]",
        slow=True,
    ),
    "output pull without mu": Mutant(
        "self._add_pull(output, gradient / self.mu[output])",
        "self._add_pull(output, gradient)",
        "test_theorem3.py::test_the_plain_iteration_never_expands_by_more_than_tau",
        slow=True,
    ),
    "parallel sweeps that see the states below moved": Mutant(
        'self.graph.nodes if how.order == "paper" else self.graph.nodes[::-1]',
        'self.graph.nodes if how.order != "top-down" else self.graph.nodes[::-1]',
        "test_orders.py::test_orders_are_their_loops[parallel]",
        slow=True,
    ),
    "weights updated before the pull that shares them": Mutant(
        "states.pull_sources(node, residual) weights.learn(states, node, residual)",
        "states._forget(node)\n"
        "                    weights.learn(states, node, residual)\n"
        "                    states._forget(node)\n"
        "                    states.pull_sources(node, residual)",
        "test_orders.py::test_interleaved_exact_steps_are_algorithm_2[chain]",
        slow=True,
    ),
    "uses of a weight that all count alike": Mutant(
        "share = states.mu[node.index] / max(states.mu[v] for v in block.uses)",
        "share = 1.0",
        "test_orders.py::test_interleaved_exact_steps_are_algorithm_2[shared]",
        slow=True,
    ),
    "safe share of the last consumer alone": Mutant(
        "steepness = steepness + self.mu[reader.index]",
        "steepness = self.mu[reader.index]",
        "test_safe_step.py::test_more_than_twice_the_share_is_not_for_a_state_with_two_consumers",
    ),
    "safe share without the ratio of mu": Mutant(
        "self.soft[v].activation.lipschitz / self.mu[v] * steepness",
        "self.soft[v].activation.lipschitz * steepness",
        "test_safe_step.py::test_no_block_of_states_raises_F[chain]",
        slow=True,
    ),
    "safe share with one Lipschitz constant": Mutant(
        "NORM_MARGIN * self.soft[reader.index].activation.lipschitz",
        "NORM_MARGIN",
        "test_safe_step.py::test_the_share_counts_the_lipschitz_constants_of_both_layers",
        slow=True,
    ),
    "safe share with the norm unsquared": Mutant(
        "slope * norm**2",
        "slope * norm",
        "test_safe_step.py::test_power_iteration_on_gaussian_matrices",
        slow=True,
    ),
    "norm of a product measured on one sample": Mutant(
        "rows = slice(1) if edge.alone else slice(None)",
        "rows = slice(1)",
        "test_safe_step.py::test_power_iteration_on_every_edge[products]",
        slow=True,
    ),
    "rate of the last consumer alone": Mutant(
        "rate += mu[above.index] / mu[v] * slope * norms[above.index, v] ** 2",
        "rate = mu[above.index] / mu[v] * slope * norms[above.index, v] ** 2",
        "test_theorem2.py::test_rates_add_up_over_the_consumers[skips]",
        slow=True,
    ),
    "rho without the layer below": Mutant(
        "slope = node.activation.lipschitz * above.activation.lipschitz",
        "slope = above.activation.lipschitz",
        "test_theorem2.py::test_rates_are_the_theorems",
        slow=True,
    ),
    "F without sample weights on the gaps": Mutant(
        "total(node.activation.gap(X[node.index], said(node)), weight)",
        "total(node.activation.gap(X[node.index], said(node)))",
        "test_kkt.py::test_sample_weights_weigh_the_gradient[slices]",
        slow=True,
    ),
    "F with another mask of dropout": Mutant(
        "(lambda node: value(node, X, switches))",
        "(lambda node: value(node, X))",
        "test_kkt.py::test_feed_forward_states_leave_the_loss_alone[convolutions]",
        slow=True,
    ),
    "residual of eq. 17 with the ratio upside down": Mutant(
        "G[s] = G[s] + mu[v] / mu[s] * pull",
        "G[s] = G[s] + mu[s] / mu[v] * pull",
        "test_kkt.py::test_kkt_residuals_are_eqs_17_20_and_27",
        slow=True,
    ),
    "residual of eq. 20 of the last use alone": Mutant(
        "gradients[parameter] += mu[v] * gradient",
        "gradients[parameter] = mu[v] * gradient",
        "test_kkt.py::test_kkt_residuals_are_autograd_s[shared]",
        slow=True,
    ),
    "acceleration with the wrong theta": Mutant(
        "sub_(C_old, alpha=root * theta_old)",
        "sub_(C_old, alpha=root * theta)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[independent-rows]",
    ),
    "theta of another equation": Mutant(
        "math.sqrt(c * c + 4.0)",
        "math.sqrt(c * c + 3.0)",
        "test_theorem4.py::test_theta_satisfies_its_equation",
        slow=True,
    ),
    "exact step without gamma": Mutant(
        "torch.sub(Y, gradient(Y), alpha=1 / gamma)",
        "torch.sub(Y, gradient(Y))",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[columns]",
        slow=True,
    ),
    "exact step with the smallest gamma": Mutant(
        "phi for use in uses] gamma = max(use",
        "phi for use in uses]\n    gamma = min(use",
        "test_theorem4.py::test_the_exact_step_on_any_edge_is_algorithm_2[shared]",
        slow=True,
    ),
    "sample weights not undone": Mutant(
        "rows = rows / self.scale",
        "rows = rows * 1.0",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[columns]",
        slow=True,
    ),
    "a lone bias fitted as its whole layer": Mutant(
        "layers.pop() if alone and len(layers) == 1 else None",
        "layers.pop() if len(layers) == 1 else None",
        "test_theorem4.py::test_the_exact_step_on_any_edge_is_algorithm_2[shared]",
        slow=True,
    ),
    "conjugate gradients without ridge": Mutant(
        "q = self._adjoint(self.apply(p)) + self.ridge * p",
        "q = self._adjoint(self.apply(p))",
        "test_theorem4.py::test_conjugate_gradients_agree_with_the_gram_matrix[1.0-False-linear]",
    ),
    "conjugate gradients on the last use alone": Mutant(
        "total = flat if total is None else total + flat",
        "total = flat",
        "test_theorem4.py::test_conjugate_gradients_agree_with_the_gram_matrix[1.0-False-conv]",
        slow=True,
    ),
    "conjugate gradients without sample weights": Mutant(
        "weighted = value if weight is None else weight * value",
        "weighted = value",
        "test_theorem4.py::test_conjugate_gradients_agree_with_the_gram_matrix[1.0-True-linear]",
        slow=True,
    ),
    "ridge dropped": Mutant(
        "torch.linalg.cholesky_ex(matrix + ridge * eye)",
        "torch.linalg.cholesky_ex(matrix)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[rows-ridge]",
        slow=True,
    ),
    "singular directions kept": Mutant(
        "torch.where(kept, 1 / (values + ridge), 0)",
        "1 / (values + ridge)",
        "test_theorem4.py::test_dependent_rows_and_columns_get_the_pseudo_inverse[True]",
        slow=True,
    ),
    "ramps that are widened": Mutant(
        "if node.activation.jumps else node",
        "if node else node",
        "../test_states.py::test_ramps_that_a_model_has_already_keep_their_width",
        slow=True,
    ),
    "gap with the wrong sign": Mutant(
        "total = self.conjugate(inside) + self.primitive(wide) - inside * wide",
        "total = self.conjugate(inside) + self.primitive(wide) + inside * wide",
        "test_activations.py::test_gap_is_fenchel_young_and_never_negative"
        "[LeakyReLU(negative_slope=0.3)]",
        slow=True,
    ),
    "a slope that is not the steepest": Mutant(
        "lipschitz, lower, upper = 0.25, 0.0, 1.0",
        "lipschitz, lower, upper = 0.2, 0.0, 1.0",
        "test_activations.py::test_lipschitz_is_attained",
        slow=True,
    ),
}


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def mark(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.slow] if MUTANTS[name].slow else [])


def copy(folder: Path) -> Path:
    """The library's source in a folder of its own, with the bytecode that is still true of it."""
    shutil.copytree(SOURCE, folder / "lpom")
    return folder


def pattern(mutant: Mutant) -> re.Pattern[str]:
    """The line, however it is broken."""
    return re.compile(r"\s+".join(map(re.escape, mutant.line.split())))


def places(mutant: Mutant) -> list[Path]:
    """The files that have the line, each as often as it does."""
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        for _ in pattern(mutant).findall(path.read_text())
    ]


def job(source: Path, tests: list[str]) -> dict[str, object]:
    return {"source": str(source), "tests": [str(HERE / test) for test in tests]}


@pytest.fixture(scope="module")
def exit_codes(request, tmp_path_factory) -> dict[str, int]:
    """Of pytest, for each mutant that is to be tried; under "untouched", for all their tests."""
    folder = tmp_path_factory.mktemp("mutants")
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = [call.params["name"] for call in calls if call and call.params.get("name") in MUTANTS]
    every = sorted({MUTANTS[name].test for name in wanted})
    jobs = {"untouched": job(copy(folder / "untouched"), every)}
    for i, name in enumerate(wanted):
        mutant, source = MUTANTS[name], copy(folder / f"{i}")
        found = places(mutant)
        if len(found) != 1:
            continue
        path = source / "lpom" / found[0].relative_to(SOURCE)
        path.write_text(
            pattern(mutant).sub(lambda _, mutant=mutant: mutant.broken, path.read_text())
        )
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
        jobs[name] = job(source, [mutant.test])
    done = subprocess.run(
        [sys.executable, str(HERE / "forked.py")],
        input=json.dumps(list(jobs.values())),
        capture_output=True,
        text=True,
        check=True,
    )
    print(done.stderr)  # pytest shows it if the first test fails
    codes = [int(line) for line in done.stdout.split()]
    return dict(zip(jobs, codes, strict=True))


@needs_fork
@pytest.mark.parametrize("name", [mark(name) for name in MUTANTS])
def test_a_broken_line_is_noticed(name, exit_codes):
    """And only because it is broken: the same test passes on a copy that is not."""
    if name not in exit_codes:
        pytest.skip(f"{len(places(MUTANTS[name]))} lines are {MUTANTS[name].line!r}: name the one")
    assert exit_codes["untouched"] == pytest.ExitCode.OK
    assert exit_codes[name] == pytest.ExitCode.TESTS_FAILED
