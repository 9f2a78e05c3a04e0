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


STATES, METHOD = "methods/lpom/states.py", "methods/lpom/method.py"
WEIGHTS, OPTIMIZERS = "methods/lpom/weights.py", "methods/optimizers.py"

MUTANTS = {
    "hidden pull without the ratio of mu": Mutant(
        STATES,
        "return self.mu[i] / self.mu[i - 1] * self.network[i].map.adjoint(residual)",
        "return self.network[i].map.adjoint(residual)",
        "test_orders.py::test_orders_are_their_loops[paper]",
    ),
    "output pull without mu": Mutant(
        STATES,
        "return self.loss.gradient(self.X[-1], self.target) / self.mu[-1]",
        "return self.loss.gradient(self.X[-1], self.target)",
        "test_theorem3.py::test_the_plain_iteration_never_expands_by_more_than_tau",
        slow=True,
    ),
    "pull with the wrong sign": Mutant(
        STATES,
        "said, step = phi(self.Z[i]), self.P[i] - self.Z[i] + pull",
        "said, step = phi(self.Z[i]), self.P[i] - self.Z[i] - pull",
        "test_theorem3.py::test_below_one_the_limit_is_the_minimum_of_its_block",
    ),
    "states that are not damped": Mutant(
        STATES,
        "(step if self.alpha is None else self.alpha[i] * step)",
        "step",
        "test_safe_step.py::test_no_block_of_states_raises_F",
    ),
    "residual with the wrong sign": Mutant(
        STATES,
        "return said - self.X[i + 1]",
        "return self.X[i + 1] - said",
        "test_orders.py::test_large_mu_gives_the_back_propagation_gradient",
    ),
    "paper's order with stale outputs of maps": Mutant(
        STATES,
        "            states.refresh(i)\n        states.move(last, states.output_pull())",
        "        states.move(last, states.output_pull())",
        "test_orders.py::test_orders_are_their_loops[paper]",
        slow=True,
    ),
    "weights updated before the pull that shares them": Mutant(
        STATES,
        "            if i > 0:\n"
        "                pull = states.hidden_pull(i, R)\n"
        "            if visit is not None:\n"
        "                visit(i, R)\n",
        "            if visit is not None:\n"
        "                visit(i, R)\n"
        "            if i > 0:\n"
        "                pull = states.hidden_pull(i, R)\n",
        "test_orders.py::test_interleaved_exact_steps_are_algorithm_2",
        slow=True,
    ),
    "safe share without the ratio of mu": Mutant(
        METHOD,
        "NORM_MARGIN * ratio * gamma[i] * gamma[i + 1] * norm**2",
        "NORM_MARGIN * gamma[i] * gamma[i + 1] * norm**2",
        "test_safe_step.py::test_no_block_of_states_raises_F",
    ),
    "safe share with one Lipschitz constant": Mutant(
        METHOD,
        "NORM_MARGIN * ratio * gamma[i] * gamma[i + 1] * norm**2",
        "NORM_MARGIN * ratio * gamma[i] * norm**2",
        "test_safe_step.py::test_the_share_counts_the_lipschitz_constants_of_both_layers",
        slow=True,
    ),
    "safe share with the norm unsquared": Mutant(
        METHOD,
        "NORM_MARGIN * ratio * gamma[i] * gamma[i + 1] * norm**2",
        "NORM_MARGIN * ratio * gamma[i] * gamma[i + 1] * norm",
        "test_safe_step.py::test_power_iteration_on_gaussian_matrices",
        slow=True,
    ),
    "acceleration with the wrong theta": Mutant(
        WEIGHTS,
        "Y = theta * C - math.sqrt(theta) * (theta_old * C_old - C)",
        "Y = theta * C - math.sqrt(theta) * (theta * C_old - C)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[independent-rows]",
    ),
    "theta of another equation": Mutant(
        WEIGHTS,
        "math.sqrt(c * c + 4.0)",
        "math.sqrt(c * c + 3.0)",
        "test_theorem4.py::test_theta_satisfies_its_equation",
        slow=True,
    ),
    "exact step without gamma": Mutant(
        WEIGHTS,
        "Y - gram.solve(scale * residual) / gamma",
        "Y - gram.solve(scale * residual)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[columns]",
    ),
    "sample weights not undone": Mutant(
        WEIGHTS,
        "phi(start + gram.apply(Y) / scale)",
        "phi(start + gram.apply(Y))",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[columns]",
        slow=True,
    ),
    "gradient without mu": Mutant(
        OPTIMIZERS,
        "scaled = residual * (mu / total)",
        "scaled = residual / total",
        "test_kkt.py::test_weight_gradients_are_autograd_s",
    ),
    "ridge dropped": Mutant(
        "gram.py",
        "torch.linalg.cholesky_ex(matrix + ridge * eye)",
        "torch.linalg.cholesky_ex(matrix)",
        "test_theorem4.py::test_the_exact_step_is_algorithm_2[rows-ridge]",
    ),
    "singular directions kept": Mutant(
        "gram.py",
        "torch.where(kept, 1 / (values + ridge), 0)",
        "1 / (values + ridge)",
        "test_theorem4.py::test_dependent_rows_and_columns_get_the_pseudo_inverse[True]",
        slow=True,
    ),
    "residual of eq. 17 with the ratio upside down": Mutant(
        "objective.py",
        "pull = mu[i + 1] / mu[i] * above.map.adjoint(residual)",
        "pull = mu[i] / mu[i + 1] * above.map.adjoint(residual)",
        "test_kkt.py::test_kkt_residuals_are_eqs_17_20_and_27",
    ),
    "rho without the layer below": Mutant(
        "objective.py",
        "        * below.activation.lipschitz\n",
        "",
        "test_theorem2.py::test_rates_are_the_theorems",
        slow=True,
    ),
    "gap with the wrong sign": Mutant(
        "activations/piecewise.py",
        "s / 2 * left**2 - up * left",
        "s / 2 * left**2 + up * left",
        "test_activations.py::test_gap_is_fenchel_young_and_never_negative"
        "[LeakyReLU(negative_slope=0.3)]",
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
