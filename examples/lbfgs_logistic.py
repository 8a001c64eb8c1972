"""Logistic regression on sparse rows by L-BFGS: weights, gradients and history on the shards. Needs SciPy.

$ psd-run --shards 2 --workers 2 examples/lbfgs_logistic.py
$ psd-run --shards 2 --workers 4 examples/lbfgs_logistic.py --data a9a --test a9a.t --l2 1
$ psd-run --shards 2 --workers 4 examples/lbfgs_logistic.py --data farm-ads-vect.gz --l1 1

Each worker has a share of the rows. `--l1` leaves most weights at 0. `--plain` has SciPy's L-BFGS-B minimize the same objective
in this process, without psd and without `--l1`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sparse_data
from command_line import CommandLine
from scipy.optimize import minimize as scipy_minimize
from scipy.sparse import csr_matrix, hstack
from scipy.special import expit
from sparse_data import Array, SparseRows

import psd_client
import psd_client.lbfgs

LossAndGrad = Callable[[Array], tuple[float, Array]]


def matrix(rows: SparseRows, size: int) -> csr_matrix:
    """Rows as a matrix (rows, size); feature 0, which no file has, is the bias."""
    of_files = csr_matrix((rows.values.astype(np.float64), rows.ids, rows.starts), (len(rows.labels), size))
    return hstack([np.ones((len(rows.labels), 1)), of_files[:, 1:]], format="csr")


def logistic_loss(features: csr_matrix, labels: Array) -> LossAndGrad:
    """Sum of the logistic losses, and its gradient, as functions of the weights. Labels are 0 or 1."""
    signs, by_feature = 2.0 * labels - 1, features.T.tocsr()

    def loss_and_grad(weights: Array) -> tuple[float, Array]:
        margins = signs * (features @ weights)
        return float(np.logaddexp(0, -margins).sum()), by_feature @ (-signs * expit(-margins))

    return loss_and_grad


def train(args: argparse.Namespace) -> None:
    """Run one worker."""
    if args.plain and args.l1:
        raise ValueError("--plain: L-BFGS-B of SciPy has no --l1")
    name, rows, test = sparse_data.sparse_rows(args.data, args.test)
    size = 1 + max(int(rows.ids.max()), int(test.ids.max()))
    features, started = matrix(rows, size), time.perf_counter()
    if args.plain:
        result = alone(logistic_loss(features, rows.labels), size, args)
        report(name, result, matrix(test, size), test.labels, time.perf_counter() - started)
        return
    with psd_client.connect() as ps:
        if ps.rank == 0:
            print(
                f"{name}: {len(rows.labels)} rows, {size} features for {ps.world_size} workers, {len(test.labels)} for testing"
            )
        mine = slice(ps.rank, None, ps.world_size)
        result = psd_client.lbfgs.minimize(
            ps, logistic_loss(features[mine], rows.labels[mine]), np.zeros(size), args.l2, args.l1,
            max_iterations=args.iterations, tolerance=args.tolerance, callback=show,
        )  # fmt: skip
        if ps.rank == 0:
            report(name, result, matrix(test, size), test.labels, time.perf_counter() - started)


def show(result: psd_client.lbfgs.Result) -> None:
    """Print a line for every tenth iteration."""
    if result.nit % 10 == 0:
        print(f"iteration {result.nit:4d}  objective {result.fun:.6f}  gradient {result.gradient_norm:.2e}", flush=True)


def alone(loss_and_grad: LossAndGrad, size: int, args: argparse.Namespace) -> psd_client.lbfgs.Result:
    """Have SciPy minimize in this process."""

    def objective(weights: Array) -> tuple[float, Array]:
        loss, gradient = loss_and_grad(weights)
        return loss + args.l2 / 2 * float(weights @ weights), gradient + args.l2 * weights

    options = {"maxiter": args.iterations, "maxfun": 10 * args.iterations, "ftol": args.tolerance / 5, "gtol": args.tolerance}
    found = scipy_minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options)
    norm = float(np.abs(found.jac).max())
    return psd_client.lbfgs.Result(
        found.x, float(found.fun), found.nit, found.nfev, found.success, found.status, str(found.message), norm, 1.0
    )


def report(name: str, result: psd_client.lbfgs.Result, test: csr_matrix, labels: Array, seconds: float) -> None:
    """Print how it ended, and a line for programs."""
    scores = test @ result.x
    print(f"{result.message}; {result.nit} iterations in {seconds:.1f} s")
    measures = {
        "data": name,
        "objective": result.fun,
        "iterations": result.nit,
        "evaluations": result.nfev,
        "weights": int(np.count_nonzero(result.x)),
        "accuracy": round(float(np.mean((scores > 0) == labels)), 4),
        "auc": round(sparse_data.auc(labels, scores), 4),
    }
    print(f"result {json.dumps(measures)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Logistic regression by L-BFGS.")
    parser.add_argument("--data", type=Path, help="libsvm file, plain or gzipped; without it, rows are generated")
    parser.add_argument("--test", type=Path, help="libsvm file for testing; without it, every fifth row of the other")
    parser.number("--l2", 1.0, "weight of half the sum of squares")
    parser.number("--l1", 0.0, "weight of the sum of absolute values")
    parser.number("--iterations", 500, "most iterations")
    parser.number("--tolerance", 1e-8, "of psd_client.lbfgs.minimize")
    parser.add_argument("--plain", action="store_true", help="minimize in this process, by SciPy, without psd")
    parser.run(train)


if __name__ == "__main__":
    main()
