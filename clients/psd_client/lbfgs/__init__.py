"""L-BFGS on server-side vectors: smooth minimization, and OWL-QN with L1, over data that is split over workers.

    def loss_and_grad(x):                        # of this worker's share of the data
        p = expit(labels * (rows @ x)); return -np.log(p).sum(), rows.T @ (labels * (p - 1))

    result = psd_client.lbfgs.minimize(ps, loss_and_grad, np.zeros(rows.shape[1]), l2=1.0)

Worker 0 leads: it takes the decisions. x, its gradients and the history are vectors on the shards, which compute with them.
"""

from psd_client.lbfgs.run import Result, minimize

__all__ = ["Result", "minimize"]
