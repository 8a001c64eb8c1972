"""Declarations of tables: what they refuse, and that their messages say it all."""

import dataclasses

import numpy as np
import pytest

from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.spec_limits import check_counts, check_limits
from psd.contract.tables import SparseTableSpec
from psd.v1 import job_pb2
from psd_core.initial import Constant, Normal, TruncatedNormal, Uniform, Zeros

TABLE = SparseTableSpec("user", 64, init=Normal(0.01), seed=7)
ADAGRAD = GroupSpec("rowwise_adagrad", (), (0.0,))


def job(*tables, groups=(ADAGRAD,), tensors=(), **more):
    return JobSpec(2, tensors, groups, tables=tables, **more)


@pytest.mark.parametrize("init", [Zeros(), Constant(2.5), Uniform(-1.0, 1.0), Normal(0.1, 3.0), TruncatedNormal(0.5)])
def test_tables_come_back_from_their_message(init):
    """A declaration is the same after it has travelled."""
    table = SparseTableSpec(
        "user ü",
        3,
        init=init,
        seed=2**64 - 1,
        dtype="bfloat16",
        updates="catch_up",
        admit_after=255,
        admit_probability=0.25,
        expire_steps=9,
        max_rows=1 << 40,
        at_limit="refuse",
    )

    message = job_pb2.JobSpec.FromString(job(table).to_message().SerializeToString())

    assert JobSpec.from_message(message) == job(table)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": 1000}, r"table 1000: name: must be a string of .* \(a table needs no number of rows\), got 1000"),
        ({"name": ""}, "table '': name: must be a string of 1 to 256 bytes"),
        ({"name": "a\nb"}, "name: must be printable"),
        ({"dim": 0}, "table 'user': dim: must be a whole number from 1 to 65536, got 0"),
        ({"dim": True}, "dim: must be a whole number from 1 to 65536, got True"),
        ({"seed": -1}, "seed: must be a whole number from 0"),
        ({"admit_after": 256}, "admit_after: must be a whole number from 1 to 255, got 256"),
        ({"admit_probability": 0.0}, "admit_probability: must be a number > 0 and <= 1, got 0.0"),
        ({"expire_steps": 1, "expire_seconds": 1}, "expire_steps: is 1, but rows expire by time already"),
        ({"dtype": "float16"}, "dtype: must be one of float32, bfloat16, got 'float16'"),
        ({"updates": "eager"}, "updates: must be one of lazy, catch_up, got 'eager'"),
        ({"at_limit": "crash"}, "at_limit: must be one of evict, refuse, got 'crash'"),
        ({"init": 0.1}, "init: must be one of Zeros, Constant, Uniform, Normal, TruncatedNormal, got 0.1"),
        ({"modules": ("inner", "")}, "table 'user': modules: must be names of 1 to 4096 printable bytes, got .'inner', ''."),
        ({"modules": ("a\nb",)}, "table 'user': modules: must be names of 1 to 4096 printable bytes"),
    ],
)
def test_wrong_fields_are_named(change, error):
    """A wrong field of a table is refused by its name and limit."""
    with pytest.raises(InvalidRequest, match=error):
        dataclasses.replace(TABLE, **change)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (job, "tensors: there must be at least one parameter, or a table"),
        (lambda: job(TABLE, TABLE), "tables: the name 'user' is given twice"),
        (lambda: job(dataclasses.replace(TABLE, group=1)), "table 'user': group 1 is not below 1"),
        (lambda: job(TABLE, tensors=(TensorSpec("w", (1,)),), groups=(GroupSpec(),)), "group 0 has tensors"),
        (lambda: job(TABLE, groups=(GroupSpec("static"),)), "rule 'static' is none for tables"),
        (lambda: job(tensors=(TensorSpec("w", (1,)),)), "tensor 'w': rule 'rowwise_adagrad' is for tables only"),
        (
            lambda: job(TABLE, groups=(GroupSpec("lamb"),), aggregation="exact"),
            "'lamb' is none for tables: it needs the norm of",
        ),
    ],
)
def test_jobs_refuse_tables_that_do_not_fit(make, error):
    """A job refuses tables that do not fit each other, its groups or its norms."""
    with pytest.raises((InvalidRequest, InvalidTensor), match=error):
        make()


def test_limits_name_their_flag():
    """A shard's limits are named by their flags."""
    with pytest.raises(InvalidRequest, match="dim: 64 is above the shard's --max-table-dim 63"):
        check_limits(job(TABLE), Limits(table_dim_max=63))
    with pytest.raises(InvalidRequest, match="tables: 1 are above the shard's --max-tables 0"):
        check_counts(job(TABLE).to_message(), Limits(tables_max=0))
    named = job(dataclasses.replace(TABLE, modules=("a", "inner")), dataclasses.replace(TABLE, name="item", modules=("b",)))
    with pytest.raises(InvalidRequest, match="table 'user': modules: one has 5 bytes, the shard's --max-name-bytes is 4"):
        check_limits(named, Limits(name_bytes_max=4))
    check_counts(named.to_message(), Limits(tensors_max=3))
    with pytest.raises(InvalidRequest, match=r"tables\.modules: 3 are above the shard's --max-tensors 2"):
        check_counts(named.to_message(), Limits(tensors_max=2))


def test_unknown_initial_values_are_refused():
    """Initial values that are unknown, or lack their numbers, are refused."""
    message = TABLE.to_message()
    del message.init_arguments[:]
    with pytest.raises(InvalidRequest, match="init: Normal takes 2 finite numbers"):
        SparseTableSpec.from_message(message)
    message.init = "Xavier"
    with pytest.raises(InvalidRequest, match="init: must be one of Zeros"):
        SparseTableSpec.from_message(message)


@pytest.mark.parametrize(
    ("fields", "of_numpy"),
    [
        ({"init": Constant(1.0), "admit_probability": 1.0}, {"init": Constant(1), "admit_probability": 1}),
        ({"init": Normal(0.5)}, {"init": Normal(np.float64(0.5), np.float32(0))}),
        ({"admit_probability": 0.5}, {"admit_probability": np.float64(0.5)}),
        ({"dim": 8, "max_rows": 5}, {"dim": np.int32(8), "max_rows": np.uint64(5)}),
        ({}, {"name": np.str_("user"), "dtype": np.str_("float32")}),
    ],
)
def test_a_declaration_is_the_same_with_numbers_of_any_kind(fields, of_numpy):
    """Shards compare the layout's digest with that of the worker, who may have computed its numbers with NumPy."""
    plain, given = (dataclasses.replace(TABLE, **options) for options in (fields, of_numpy))

    assert Layout(job(given), 1).digest == Layout(JobSpec.from_message(job(given).to_message()), 1).digest
    assert Layout(job(given), 1).digest == Layout(job(plain), 1).digest
    tensors = [TensorSpec(name, (5,)) for name in ("w", np.str_("w"))]
    assert len({Layout(job(tensors=(tensor,), groups=(GroupSpec(),)), 1).digest for tensor in tensors}) == 1


def test_layout_has_a_block_of_tables_on_each_shard():
    """Each shard has a block of tables behind the layout's others; the digest covers the tables."""
    spec = job(TABLE, groups=(ADAGRAD, GroupSpec()), tensors=(TensorSpec("w", (5,), group=1),))

    layout = Layout(spec, 3)

    assert [layout.tables_block(shard) for shard in range(3)] == [1, 2, 3]
    assert [layout.shard_of(index) for index in range(4)] == [0, 0, 1, 2]
    assert layout.digest != Layout(job(dataclasses.replace(TABLE, seed=8), groups=spec.groups, tensors=spec.tensors), 3).digest


def test_differences_name_table_and_field():
    """The first difference between two declarations names table and field."""
    theirs = job(dataclasses.replace(TABLE, dim=32))

    assert job(TABLE).difference(theirs) == "dim of table 'user': 64 in the job, 32 in this worker's declaration"
    assert "table 'user': is in the job, is not in" in job(TABLE).difference(job(dataclasses.replace(TABLE, name="item")))


def test_names_of_modules_travel_and_make_no_difference():
    """Workers, and a job that goes on from another's checkpoint, may have the table in modules of other names."""
    named = dataclasses.replace(TABLE, modules=("inner.user", "again"))

    assert SparseTableSpec.from_message(named.to_message()).modules == ("inner.user", "again")
    assert job(TABLE).difference(job(named)) is None
    assert job(TABLE) == job(named)
    assert Layout(job(TABLE), 2).digest == Layout(job(named), 2).digest
