"""The tests of this folder fail when a key line is broken on purpose, and pass when it is not."""

from __future__ import annotations

import json
import os
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
    """One line, what becomes of it, and the test that must not stand it."""

    file: str
    line: str
    broken: str
    test: str
    slow: bool = False


STATES, METHOD, OBJECTIVE = "states.py", "methods/lpom.py", "objectives.py"
BLOCKS, EXACT, GRAM = "weights/blocks.py", "weights/exact.py", "weights/gram.py"

MUTANTS = {
    "pull without the ratio of mu": Mutant(
        STATES,
        "ratio = self.mu[node.index] / self.mu[source]",
        "ratio = 1.0",
        "test_orders.py::test_orders_are_their_loops[paper]",
    ),
    "pulls of several consumers that replace each other": Mutant(
        STATES,
        "self.pulls[node.index] = old + pull",
        "self.pulls[node.index] = pull + 0 * old",
        "test_theorem2.py::test_without_activations_the_iteration_is_a_sum_over_the_consumers"
        "[products]",
        slow=True,
    ),
    "pull with the wrong sign": Mutant(
        STATES,
        "P - Z if pull is None else P - Z + pull",
        "P - Z if pull is None else P - Z - pull",
        "test_theorem3.py::test_below_one_the_limit_is_the_minimum_of_its_block[chain]",
        slow=True,
    ),
    "states that are not damped": Mutant(
        STATES,
        "(step if alpha is None else alpha * step)",
        "step",
        "test_safe_step.py::test_no_block_of_states_raises_F[chain]",
        slow=True,
    ),
    "residual with the wrong sign": Mutant(
        STATES,
        "return said - moved",
        "return moved - said",
        "test_orders.py::test_interleaved_is_design_section_3",
        slow=True,
    ),
    "one sweep with the wrong sign": Mutant(
        "activations/base.py",
        "torch.sub(self.phi(z) if said is None else said, self.phi(z - pull), out=out)",
        "torch.sub(self.phi(z - pull), self.phi(z) if said is None else said, out=out)",
        "test_transcription.py::test_one_interleaved_sweep_is_autograd_with_another_rule[skips]",
    ),
    "a moved state that leaves those above it feed-forward": Mutant(
        STATES,
        "if value is not None and self.P[node.index] is None:",
        "if value is None:",
        "test_safe_step.py::test_no_sweep_raises_F[skips]",
    ),
    "gradients of several uses that replace each other": Mutant(
        "weights/gradients.py",
        "kept = int(id(parameter) in self._known)",
        "kept = 0",
        "test_kkt.py::test_weight_gradients_are_autograd_s[shared]",
    ),
    "gradient without mu": Mutant(
        STATES,
        "share = self.mu[node.index] / total",
        "share = 1 / total",
        "test_kkt.py::test_weight_gradients_are_autograd_s[chain]",
        slow=True,
    ),
    "gradient of a layer without sample weights": Mutant(
        STATES,
        "self._run_back(node, _weighted(residual, weight), share, down=False)",
        "self._run_back(node, residual, share, down=False)",
        "test_kkt.py::test_sample_weights_weigh_the_gradient[chain]",
        slow=True,
    ),
    "gradient of an edge without sample weights": Mutant(
        STATES,
        "found += self._adjoint(node, _weighted(residual, weight), weights)",
        "found += self._adjoint(node, residual, weights)",
        "test_kkt.py::test_sample_weights_weigh_the_gradient[convolutions]",
        slow=True,
    ),
    "output pull without mu": Mutant(
        METHOD,
        "return gradient / states.mu[states.graph.output]",
        "return gradient",
        "test_theorem3.py::test_the_plain_iteration_never_expands_by_more_than_tau",
        slow=True,
    ),
    "parallel sweeps that see the states below moved": Mutant(
        METHOD,
        'nodes = graph.nodes if order == "paper" else graph.nodes[::-1]',
        'nodes = graph.nodes if order != "top-down" else graph.nodes[::-1]',
        "test_orders.py::test_orders_are_their_loops[parallel]",
        slow=True,
    ),
    "weights updated before the pull that shares them": Mutant(
        METHOD,
        "        states.pull_back(node, residual)\n        for block in state.blocks:\n",
        "        from contextlib import ExitStack\n\n"
        "        after = ExitStack()\n"
        "        after.callback(states.pull_back, node, residual)\n"
        "        with after:\n"
        "            self._fit(states, node, batch, state, waiting)\n\n"
        "    def _fit(self, states, node, batch, state, waiting):\n"
        "        for block in state.blocks:\n",
        "test_orders.py::test_interleaved_exact_steps_are_algorithm_2[chain]",
        slow=True,
    ),
    "uses of a weight that all count alike": Mutant(
        METHOD,
        "share = state.mu[node.index] / max(state.mu[v] for v in block.uses)",
        "share = 1.0",
        "test_orders.py::test_interleaved_exact_steps_are_algorithm_2[shared]",
        slow=True,
    ),
    "safe share of the last consumer alone": Mutant(
        METHOD,
        "steepness = steepness + NORM_MARGIN * state.mu",
        "steepness = NORM_MARGIN * state.mu",
        "test_safe_step.py::test_more_than_twice_the_share_is_not_for_a_state_with_two_consumers",
    ),
    "safe share without the ratio of mu": Mutant(
        METHOD,
        "1 / (1 + gamma / states.mu[node.index] * steepness)",
        "1 / (1 + gamma * steepness)",
        "test_safe_step.py::test_no_block_of_states_raises_F[chain]",
        slow=True,
    ),
    "safe share with one Lipschitz constant": Mutant(
        METHOD,
        "gamma = states.soft[above.index].activation.lipschitz",
        "gamma = 1.0",
        "test_safe_step.py::test_the_share_counts_the_lipschitz_constants_of_both_layers",
        slow=True,
    ),
    "safe share with the norm unsquared": Mutant(
        METHOD,
        "gamma * norm**2",
        "gamma * norm",
        "test_safe_step.py::test_power_iteration_on_gaussian_matrices",
        slow=True,
    ),
    "norm of a product measured on one sample": Mutant(
        OBJECTIVE,
        "rows = slice(1) if edge.alone else slice(None)",
        "rows = slice(1)",
        "test_safe_step.py::test_power_iteration_on_every_edge[products]",
        slow=True,
    ),
    "rate of the last consumer alone": Mutant(
        OBJECTIVE,
        "rate += mu[above.index] / mu[v] * slope * norms[above.index, v] ** 2",
        "rate = mu[above.index] / mu[v] * slope * norms[above.index, v] ** 2",
        "test_theorem2.py::test_rates_add_up_over_the_consumers[skips]",
        slow=True,
    ),
    "rho without the layer below": Mutant(
        OBJECTIVE,
        "slope = node.activation.lipschitz * above.activation.lipschitz",
        "slope = above.activation.lipschitz",
        "test_theorem2.py::test_rates_are_the_theorems",
        slow=True,
    ),
    "F without sample weights on the gaps": Mutant(
        OBJECTIVE,
        "total(node.activation.gap(X[node.index], said(node)), weight)",
        "total(node.activation.gap(X[node.index], said(node)))",
        "test_kkt.py::test_sample_weights_weigh_the_gradient[slices]",
        slow=True,
    ),
    "F with another mask of dropout": Mutant(
        OBJECTIVE,
        "(lambda node: value(node, X, switches))",
        "(lambda node: value(node, X))",
        "test_kkt.py::test_feed_forward_states_leave_the_loss_alone[convolutions]",
        slow=True,
    ),
    "residual of eq. 17 with the ratio upside down": Mutant(
        OBJECTIVE,
        "G[s] = G[s] + mu[v] / mu[s] * pull",
        "G[s] = G[s] + mu[s] / mu[v] * pull",
        "test_kkt.py::test_kkt_residuals_are_eqs_17_20_and_27",
        slow=True,
    ),
    "residual of eq. 20 of the last use alone": Mutant(
        OBJECTIVE,
        "gradients[parameter] += mu[v] * gradient",
        "gradients[parameter] = mu[v] * gradient",
        "test_kkt.py::test_kkt_residuals_are_autograd_s[shared]",
        slow=True,
    ),
    "acceleration with the wrong theta": Mutant(
        EXACT,
        "sub_(C_old, alpha=root * theta_old)",
        "sub_(C_old, alpha=root * theta)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[independent-rows]",
    ),
    "theta of another equation": Mutant(
        EXACT,
        "math.sqrt(c * c + 4.0)",
        "math.sqrt(c * c + 3.0)",
        "test_theorem4.py::test_theta_satisfies_its_equation",
        slow=True,
    ),
    "exact step without gamma": Mutant(
        EXACT,
        "torch.sub(Y, gradient(Y), alpha=1 / gamma)",
        "torch.sub(Y, gradient(Y))",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[columns]",
        slow=True,
    ),
    "exact step with the smallest gamma": Mutant(
        EXACT,
        "phi for use in uses]\n    gamma = max(use",
        "phi for use in uses]\n    gamma = min(use",
        "test_theorem4.py::test_the_exact_step_on_any_edge_is_algorithm_2[shared]",
        slow=True,
    ),
    "sample weights not undone": Mutant(
        BLOCKS,
        "rows = rows / self.scale",
        "rows = rows * 1.0",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[columns]",
        slow=True,
    ),
    "a lone bias fitted as its whole layer": Mutant(
        BLOCKS,
        "layers.pop() if alone and len(layers) == 1 else None",
        "layers.pop() if len(layers) == 1 else None",
        "test_theorem4.py::test_the_exact_step_on_any_edge_is_algorithm_2[shared]",
        slow=True,
    ),
    "conjugate gradients without ridge": Mutant(
        BLOCKS,
        "q = self._adjoint(self.apply(p)) + self.ridge * p",
        "q = self._adjoint(self.apply(p))",
        "test_theorem4.py::test_conjugate_gradients_agree_with_the_gram_matrix[1.0-False-linear]",
    ),
    "conjugate gradients on the last use alone": Mutant(
        BLOCKS,
        "total = flat if total is None else total + flat",
        "total = flat",
        "test_theorem4.py::test_conjugate_gradients_agree_with_the_gram_matrix[1.0-False-conv]",
        slow=True,
    ),
    "conjugate gradients without sample weights": Mutant(
        BLOCKS,
        "weighted = value if weight is None else weight * value",
        "weighted = value",
        "test_theorem4.py::test_conjugate_gradients_agree_with_the_gram_matrix[1.0-True-linear]",
        slow=True,
    ),
    "ridge dropped": Mutant(
        GRAM,
        "torch.linalg.cholesky_ex(matrix + ridge * eye)",
        "torch.linalg.cholesky_ex(matrix)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[rows-ridge]",
        slow=True,
    ),
    "singular directions kept": Mutant(
        GRAM,
        "torch.where(kept, 1 / (values + ridge), 0)",
        "1 / (values + ridge)",
        "test_theorem4.py::test_dependent_rows_and_columns_get_the_pseudo_inverse[True]",
        slow=True,
    ),
    "ramps that are widened": Mutant(
        "graph/network.py",
        "if node.activation.jumps\n",
        "if node\n",
        "../test_states.py::test_ramps_that_a_model_has_already_keep_their_width",
        slow=True,
    ),
    "gap with the wrong sign": Mutant(
        "activations/piecewise.py",
        "s / 2 * left**2 - up * left",
        "s / 2 * left**2 + up * left",
        "test_activations.py::test_gap_is_fenchel_young_and_never_negative"
        "[LeakyReLU(negative_slope=0.3)]",
        slow=True,
    ),
    "a slope that is not the steepest": Mutant(
        "activations/smooth.py",
        "lipschitz = 0.25",
        "lipschitz = 0.2",
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
        path = source / "lpom" / mutant.file
        path.write_text(path.read_text().replace(mutant.line, mutant.broken))
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
    mutant = MUTANTS[name]
    assert (SOURCE / mutant.file).read_text().count(mutant.line) == 1, "the line has changed"
    assert exit_codes["untouched"] == pytest.ExitCode.OK
    assert exit_codes[name] == pytest.ExitCode.TESTS_FAILED
