"""Features of torch alone: gradients that lie in the buffers from which they are sent."""

from __future__ import annotations

import keras
import pytest
import torch
from helpers_keras import STEPS, data, fit, small_model

import psd_client
import psd_client.keras as psd


def test_gradients_lie_in_the_buffers(run_workers):
    """Nothing is copied at the push."""

    def worker(ps):
        model = small_model()
        model.compile(optimizer=psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps), loss="mse")
        fit(model)
        starts = [view.ctypes.data for view in ps._worker.gradients.views]
        return [v.value.grad.data_ptr() for v in model.trainable_variables] == starts

    assert run_workers(1, 1, worker) == [True]


def test_a_loop_of_its_own_with_a_missing_gradient(run_workers):
    """optimizer.apply in torch's own training loop; the errors keep their type."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps)
        x, _ = data()
        before = model.get_weights()
        loss = model.layers[0](torch.from_numpy(x[0])).square().mean()
        loss.backward()
        with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
            optimizer.apply([v.value.grad for v in model.trainable_variables])
        with pytest.raises(psd_client.NonFiniteGradient):
            optimizer.apply([torch.full(tuple(v.shape), torch.nan) for v in model.trainable_variables])
        after = model.get_weights()
        return [bool((a == b).all()) for a, b in zip(before, after, strict=True)], ps.clock

    ((unchanged, clock),) = run_workers(1, 2, worker)

    assert unchanged == [False, False, True, True]
    assert clock == 1


def test_close_leaves_the_parameters_alone(run_workers):
    """The hooks are gone; Keras trains on alone."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, keras.optimizers.SGD(0.1), ps=ps)
        buffers = ps._worker.gradients
        optimizer.close()
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        fit(model)
        return int(model.optimizer.iterations) // STEPS, float(abs(buffers.spaces[0]).sum())

    assert run_workers(1, 1, worker) == [(3, 0.0)]
