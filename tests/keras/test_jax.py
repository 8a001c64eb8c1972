"""The JAX face: an optax-style transformation whose updates lead to what the shards hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psd_client
import psd_client.jax as psd

STEPS = 12


def start(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "hidden": {"w": jnp.asarray(rng.normal(size=(5, 4)), "float32"), "b": jnp.zeros(4)},
        "out": [jnp.asarray(rng.normal(size=(4, 2)), "float32")],
    }


def batch(step):
    rng = np.random.default_rng(100 + step)
    return jnp.asarray(rng.normal(size=(8, 5)), "float32"), jnp.asarray(rng.normal(size=(8, 2)), "float32")


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["out"][0] - y) ** 2)


def adam_alone(rate):
    """Kingma and Ba, with epsilon where torch has it."""
    params = start()
    m = v = jax.tree.map(jnp.zeros_like, params)
    for t in range(1, STEPS + 1):
        g = jax.grad(loss)(params, *batch(t))
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, g)
        params = jax.tree.map(
            lambda p, m, v, t=t: p - rate(t - 1) * m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), params, m, v
        )
    return params


@pytest.mark.parametrize("wrap", [jax.jit, lambda step: step], ids=["jit", "eager"])
@pytest.mark.parametrize("rate", [lambda clock: 0.01, lambda clock: 0.02 / (1 + clock)], ids=["constant", "schedule"])
def test_two_workers_on_two_shards_equal_one_process(run_workers, wrap, rate):
    """Uneven shares of each batch; rank 1 begins with other values."""

    def worker(ps):
        if ps.rank == 1:
            ps.barrier("declared")
        params, transformation = psd.distribute(start(ps.rank), psd_client.Adam(), learning_rate=rate, ps=ps)
        if ps.rank == 0:
            ps.barrier("declared")
        state = transformation.init(params)
        rows = slice(0, 2) if ps.rank == 0 else slice(2, 8)

        @wrap
        def step(params, state, x, y):
            gradients = jax.grad(loss)(params, x, y)
            updates, state = transformation.update(gradients, state, params, batch_size=len(x))
            return jax.tree.map(jnp.add, params, updates), state

        for t in range(1, STEPS + 1):
            x, y = batch(t)
            params, state = step(params, state, x[rows], y[rows])
        return params, int(state)

    expected = adam_alone(rate)
    for params, clock in run_workers(2, 2, worker):
        assert clock == STEPS
        jax.tree.map(lambda mine, right: np.testing.assert_allclose(mine, right, rtol=0, atol=1e-5), params, expected)


def test_parameters_that_come_as_differences_are_the_same_on_all_workers(run_workers):
    def train(**job):
        def worker(ps):
            params, transformation = psd.distribute(start(), psd_client.SGD(lr=0.1), ps=ps, **job)
            state = transformation.init(params)
            for t in range(1, STEPS + 1):
                updates, state = transformation.update(jax.grad(loss)(params, *batch(t + ps.rank)), state, params)
                params = jax.tree.map(jnp.add, params, updates)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(params)], ps.stats()["received_bytes"]

        return run_workers(2, 1, worker, transport="tcp")

    ((plain, plain_bytes), _), ((mine, few_bytes), (other, _)) = train(), train(pull="int8")

    for leaf, theirs, exact in zip(mine, other, plain, strict=True):
        np.testing.assert_array_equal(leaf, theirs)
        np.testing.assert_allclose(leaf, exact, atol=1e-3)
    assert few_bytes < plain_bytes / 2


def test_a_worker_that_joins_a_running_job_has_the_rates_of_its_step(cluster):
    """The schedule is called with the job's clock, and not with the number of steps that this process has made."""
    servers = cluster(2, lease_s=60).servers

    def train(rank, steps):
        seen = []

        def rate(clock):
            seen.append(clock)
            return 0.1 / (1 + clock)

        with psd_client.connect(servers, rank, 2, wait_timeout=120) as ps:
            params, transformation = psd.distribute(start(), psd_client.SGD(lr=1.0), learning_rate=rate, ps=ps, quorum=1)
            state = transformation.init(params)
            states = [int(state)]
            for step in range(steps):
                gradients = jax.grad(loss)(params, *batch(step))
                updates, state = transformation.update(gradients, state, params)
                params = jax.tree.map(jnp.add, params, updates)
                states.append(int(state))
        return seen, states

    assert train(0, 3) == ([0, 1, 2], [0, 1, 2, 3])
    assert train(1, 2) == ([3, 4], [3, 4, 5])


def test_rows_of_a_table_are_an_argument_of_the_loss(run_workers):
    """Two workers equal one process in which all rows are one array. Ids are repeated, and need all of their 64 bits."""

    def of_loss(w, rows, y):
        return jnp.mean((jnp.tanh(rows) @ w - y) ** 2)

    def drawn(step, rank):
        rng = np.random.default_rng((step, rank))
        return rng.integers(0, 9, (4, 2)), rng.normal(size=(4, 2)).astype("float32")

    first, w0 = np.uint64(2**63 + 5), np.linspace(-1, 1, 3, dtype="float32")
    every = first + np.arange(9, dtype=np.uint64)
    gradients = jax.jit(jax.grad(of_loss, argnums=(0, 1)))

    def worker(ps):
        table = psd_client.Table("user", 3, psd_client.SGD(lr=0.2), init=psd_client.Normal(1.0))
        params = ps.declare({"w": w0}, psd_client.SGD(lr=0.1), tables=[table])
        start = ps.tables["user"].pull(every)
        ps.barrier("pulled")
        for step in range(STEPS):
            ids, y = drawn(step, ps.rank)
            ids = first + ids.astype(np.uint64)
            of_w, of_rows = gradients(params["w"], ps.tables["user"].pull(ids), y)
            params = ps.push_pull({"w": of_w}, tables={"user": (ids, of_rows)})
        return start, params["w"], ps.tables["user"].pull(every)

    found = run_workers(2, 2, worker)
    w, rows = jnp.asarray(w0), jnp.asarray(found[0][0])
    for step in range(STEPS):
        ids, y = (np.concatenate(parts) for parts in zip(drawn(step, 0), drawn(step, 1), strict=True))
        of_w, of_rows = jax.grad(lambda w, rows, ids=ids, y=y: of_loss(w, rows[ids], y), argnums=(0, 1))(w, rows)
        w, rows = w - 0.1 * of_w, rows - 0.2 * of_rows
    for _, last, of_table in found:
        np.testing.assert_allclose(last, w, atol=1e-6)
        np.testing.assert_allclose(of_table, rows, atol=1e-6)


def test_large_arrays_pass_through_jit(run_workers):
    """Callbacks with arrays of megabytes; what JAX holds is not the buffer of the next pull."""

    def worker(ps):
        params, transformation = psd.distribute(jnp.ones((1024, 1024)), psd_client.SGD(lr=1.0), ps=ps)
        update = jax.jit(lambda params, state: transformation.update(0.25 * params, state, params))
        kept = []
        for _ in range(3):
            updates, _ = update(params, jnp.int32(0))
            params = params + updates
            kept.append(params)
        return [float(value[-1, -1]) for value in kept], ps._worker.parameters.layout.spec.tensors[0].name

    assert run_workers(1, 2, worker) == [([0.75, 0.5625, 0.421875], "params")]


@pytest.mark.parametrize("wrap", [jax.jit, lambda update: update], ids=["jit", "eager"])
def test_gradients_of_16_bits_travel_as_they_are(run_workers, wrap):
    """Numbers that float32 masters of them can hold come back; wider ones are refused."""

    def worker(ps):
        start = {"b": jnp.ones((3, 2), "bfloat16"), "h": jnp.ones(3, "float16"), "s": jnp.ones((), "bfloat16")}
        params, transformation = psd.distribute(start, psd_client.SGD(lr=2.0**-8), ps=ps)
        update, state = wrap(transformation.update), transformation.init(params)
        for _ in range(2):
            updates, state = update(jax.tree.map(lambda p: jnp.full_like(p, 1.5), params), state, params)
        with pytest.raises(psd_client.InvalidTensor, match=r"gradients\['h'\]: dtype must be float16, got float32"):
            update({**params, "h": jnp.ones(3)}, state, params)
        return ps.stats()["sent_bytes"], [float(view.min()) for view in ps._worker.parameters.views], updates["h"].dtype

    ((sent, masters, dtype),) = run_workers(1, 1, worker)

    assert (sent, dtype) == (2 * 2 * (6 + 3 + 1) + 4 * (6 + 3 + 1), "float16")  # the initial values are float32
    assert masters == [1 - 3 / 256] * 3


@pytest.mark.parametrize("wrap", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_a_loop_ends_by_itself_when_one_worker_stops_the_job(run_workers, wrap):
    """Both make the same steps; a step beyond is refused outside of jit by its own name, which says who has asked."""

    def worker(ps):
        params, transformation = psd.distribute({"w": jnp.zeros(3)}, psd_client.SGD(lr=1.0), ps=ps)
        state = transformation.init(params)

        def step(params, state):
            updates, state = transformation.update({"w": jnp.ones(3)}, state, params)
            return jax.tree.map(jnp.add, params, updates), state

        made = wrap(step)
        while not ps.is_over:
            params, state = made(params, state)
            jax.block_until_ready(params)
            if ps.rank == 1 and ps.clock == 3:
                assert ps.stop() == 5
        with pytest.raises(psd_client.Drained, match="as worker 1 has asked"):
            step(params, state)
        total = ps.all_reduce({"loss": params["w"].sum(), "one": jnp.int32(1)})
        return ps.clock, int(state), dict(total)

    assert run_workers(2, 1, worker) == [(5, 5, {"loss": -30.0, "one": 2})] * 2


def test_errors_keep_their_type_outside_of_jit(run_workers):
    """And their text inside."""

    def worker(ps):
        params, transformation = psd.distribute({"a": jnp.ones(3), "b/c": jnp.ones(2)}, psd_client.SGD(lr=0.1), ps=ps)
        state = transformation.init(params)
        bad = jax.tree.map(lambda p: p * jnp.nan, params)
        with pytest.raises(psd_client.NonFiniteGradient, match="the gradient of 'a' at step 0"):
            transformation.update(bad, state, params)
        with pytest.raises(Exception, match="NonFiniteGradient: worker 0: the gradient of 'a' at step 0"):
            jax.block_until_ready(jax.jit(transformation.update)(bad, state, params))
        with pytest.raises(psd_client.InvalidTensor, match="gradients: expected the tree that was declared"):
            transformation.update({"a": bad["a"]}, state, params)
        with pytest.raises(psd_client.InvalidTensor, match=r"gradients\['a'\]: shape must be \(3,\), got \(1,\)"):
            transformation.update({**params, "a": jnp.ones(1)}, state, params)
        with pytest.raises(psd_client.InvalidTensor, match=r"params\['a'\]: shape must be \(3,\), got \(\)"):
            transformation.update(params, state, {**params, "a": 0.0})
        return ps.clock

    assert run_workers(1, 1, worker) == [0]


def test_numbers_of_python_are_arrays_without_dimensions(run_workers):
    """In the parameters, and in gradients, which jax.grad does not make so but programs may."""

    def worker(ps):
        params, transformation = psd.distribute({"a": 1.0}, psd_client.SGD(lr=0.5), ps=ps)
        for update in (transformation.update, jax.jit(transformation.update)):
            updates, _ = update({"a": 2.0}, transformation.init(params), {"a": 0.5})
        return updates["a"].item()

    assert run_workers(1, 1, worker) == [1.0 - 2 * 0.5 * 2.0 - 0.5]


@pytest.mark.parametrize("clock", [2**31 - 1, 2**31, 2**40])
def test_a_clock_beyond_jaxs_whole_numbers_does_not_end_the_job(run_workers, monkeypatch, clock):
    """It was put into an int32: from then on every step raised, after the gradient had counted."""

    def worker(ps):
        params, transformation = psd.distribute({"a": jnp.ones(1)}, psd_client.SGD(lr=0.5), ps=ps)
        monkeypatch.setattr(type(ps._worker), "clock", property(lambda _: clock))
        return transformation.init(params).item()

    assert run_workers(1, 1, worker) == [min(clock, 2**31 - 1)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": 0.1}, TypeError, "expected one of psd_client's, such as psd_client.Adam"),
        ({"optimizer": {"a": psd_client.SGD(lr=0.1)}}, psd_client.InvalidRequest, "optimizer: several are not in this face"),
        ({"ps": object(), "connect_args": {"servers": "x:1"}}, TypeError, "pass either ps or servers"),
        ({"servers": "x:1"}, TypeError, "servers: goes into connect_args, such as"),
        ({"consistancy": "async"}, TypeError, r"distribute\(\) got .* 'consistancy'; did you mean 'consistency'"),
        ({"connect_args": {"server": "x:1"}}, TypeError, "'server'; did you mean 'servers'"),
        ({"ps": object()}, TypeError, "ps: expected what psd_client.connect"),
        ({"tables": []}, TypeError, "tables: this face takes none"),
        ({"local": 50}, TypeError, "local: local steps are made by PyTorch's face alone"),
        ({"params": {}}, psd_client.InvalidTensor, "params: has no leaves"),
        ({"params": {"n": jnp.ones(2, "int32")}}, psd_client.InvalidTensor, "params\\['n'\\]: dtype must be one of"),
        ({"params": {"a": [jnp.ones(2)], "a/0": jnp.ones(2)}}, psd_client.InvalidTensor, "two leaves have the same path"),
    ],
)
def test_arguments_are_refused(arguments, error, message):
    arguments = {"params": {"w": jnp.ones(2)}, "optimizer": psd_client.SGD(lr=0.1), **arguments}
    with pytest.raises(error, match=message):
        psd.distribute(**arguments)
