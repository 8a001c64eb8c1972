"""Hashes and initial values: pure functions whose values no release may change."""

import statistics

import numpy as np
import pytest

from psd_core import InvalidArray
from psd_core.initial import Constant, Normal, TruncatedNormal, Uniform, Zeros
from psd_core.table import TableSpec, TableStore, initial_rows, mixed


def values(memory_path, init, ids, name="user", seed=7, dim=4):
    store = TableStore.create(memory_path / "table", TableSpec(name, dim, "sgd", init=init, seed=seed))
    try:
        return store.read(ids)
    finally:
        store.close(remove=True)


def test_the_hash_of_an_id_is_that_of_splitmix64():
    """The first outputs of the generator seeded with 0 and with 1234567, from its authors' page and Rosetta Code."""
    golden = 0x9E3779B97F4A7C15
    states = [golden, 2 * golden % 2**64, 1234567 + golden, 0]

    assert mixed(np.array(states, np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 6457827717110365317, 0]
    assert mixed(np.array([[-1], [5]])).shape == (2, 1)


@pytest.mark.parametrize(
    ("init", "golden"),
    [
        (Zeros(), [0.0, 0.0, 0.0, 0.0]),
        (Constant(0.5), [0.5, 0.5, 0.5, 0.5]),
        (Uniform(-1, 3), [0.787882387638092, 0.193452388048172, 0.05802943930029869, 2.0511727333068848]),
        (Normal(0.01, mean=1), [0.9986668229103088, 0.9947088360786438, 0.9937049150466919, 1.0071531534194946]),
        (TruncatedNormal(0.1), [-0.012721922248601913, -0.050284214317798615, -0.05970939248800278, 0.06771229952573776]),
    ],
)
def test_initial_values_are_these(init, golden, memory_path):
    assert values(memory_path, init, np.array([12345]))[0].tolist() == golden


def test_a_value_follows_from_the_definition_in_a_few_lines_of_python(memory_path):
    """FNV-1a of the name over the hashed seed, SplitMix64 from there, two cells of 2^-32 from each output."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x):
        return int(mixed(np.array([x & mask], np.uint64))[0])

    seed = mix(7)
    for byte in b"user":
        seed = (seed ^ byte) * 0x100000001B3 & mask
    start = mix(seed ^ mix(12345 + golden))
    bits = [mix(start + golden * (1 + i // 2)) >> 32 * (i % 2) & 0xFFFFFFFF for i in range(5)]

    found = values(memory_path, Uniform(-1, 3), np.array([12345]), dim=5)[0]

    assert found.tolist() == [float(np.float32(-1 + 4 * (cell + 0.5) / 2**32)) for cell in bits]


def test_values_depend_on_seed_name_and_id_alone(memory_path):
    ids = np.array([3, -3, 2**62])
    one = values(memory_path, Normal(1), ids)

    assert (values(memory_path, Normal(1), ids[::-1].copy())[::-1] == one).all()
    assert (values(memory_path, Normal(1), ids, name="item") != one).all()
    assert (values(memory_path, Normal(1), ids, seed=8) != one).all()
    assert len(np.unique(one)) == one.size


@pytest.mark.parametrize("init", [Zeros(), Constant(0.5), Uniform(-1, 3), Normal(0.1, mean=1), TruncatedNormal(0.1)])
@pytest.mark.parametrize("dim", [1, 5])
def test_initial_rows_are_those_of_a_table_without_the_table(memory_path, init, dim):
    ids = np.array([0, 2**64 - 1, 2**63, 7, 7], np.uint64)

    found = initial_rows("user", dim, init, 7, ids)

    assert found.tobytes() == values(memory_path, init, ids, dim=dim).tobytes()
    assert initial_rows("user", dim, init, 7, ids.view(np.int64)).tobytes() == found.tobytes()
    assert initial_rows("user", dim, init, 7, ids[:0]).shape == (0, dim)
    with pytest.raises(InvalidArray, match="ids: expected a 1-D array of int64 or uint64, got 1-D float64"):
        initial_rows("user", dim, init, 7, ids.astype(np.float64))


def test_the_normal_quantile_is_exact_and_the_distributions_have_their_moments(memory_path):
    """AS 241 without the C library's logarithm, against Python's, by the uniform numbers of the same cells."""
    ids = np.arange(20_000)
    uniform = values(memory_path, Uniform(0, 1), ids).ravel().astype(np.float64)
    normal = values(memory_path, Normal(2, mean=-1), ids).ravel()
    short = values(memory_path, TruncatedNormal(1), ids).ravel()

    quantile = statistics.NormalDist(-1, 2).inv_cdf
    inner = np.flatnonzero((uniform > 0.001) & (uniform < 0.999))[:5000]
    assert np.abs(normal[inner] - [quantile(u) for u in uniform[inner]]).max() < 2e-4  # the uniform ones are rounded
    assert abs(normal.mean() + 1) < 0.03
    assert abs(normal.std() - 2) < 0.03
    assert abs(uniform.mean() - 0.5) < 0.005
    assert np.abs(short).max() <= 2
    assert abs(short.std() - 0.8796) < 0.01


def test_numbers_that_are_none_are_refused():
    for make, says in (
        (lambda: Normal(-1), "std: must be >= 0, got -1"),
        (lambda: Uniform(0, float("nan")), "high: expected a number that is finite as a float32, got nan"),
        (lambda: Uniform(2, 1), "low: must be at most high, which is 1.0, got 2.0"),
        (lambda: Constant(1e39), "value: expected a number that is finite as a float32, got 1e.39"),
        (lambda: Constant(1e39), "value: expected a number that is finite as a float32, got 1e.39"),
        (lambda: Constant("x"), "value: expected a number that is finite as a float32, got 'x'"),
        (lambda: Constant(None), "value: expected a number that is finite as a float32, got None"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
