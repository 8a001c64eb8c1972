"""Tables in plain files: exported, imported, and read back by the parameters' own reader, by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from helpers_tables import ShardTables, tables_spec

from psd.checkpoint import CheckpointDirectory, open_parameters, table_values
from psd.cli.psdctl import main
from psd.contract.errors import SpecMismatch
from psd.contract.layout import Layout

pytestmark = pytest.mark.usefixtures("no_fsync")

IDS = np.array([5, 2**63 + 7, 2**64 - 1, 0, 77], np.uint64)


@pytest.fixture
def place(tmp_path):
    """A checkpoint of tables on 2 shards, and one that builds on it."""
    tables = ShardTables(tmp_path / "stores", 2)
    directory = CheckpointDirectory(str(tmp_path / "run"))
    tables.write(0, np.arange(2000), 0.25)
    tables.write(1, IDS, 1.5)
    full, marks = tables.store(directory, 7)
    tables.write(0, np.arange(50), 0.75)
    tables.remove(0, np.arange(50, 100))
    tables.store(directory, 8, base=full.name, since=marks)
    return tmp_path


def values_of(url, shard_count=3):
    """The values of table 0, by id, as the shards of a job begin with them."""
    found = {}
    layout = Layout(tables_spec(), shard_count)
    source = open_parameters(str(url))
    for index in range(shard_count):
        (_, user), _ = table_values(source, layout, index)
        for ids, values in user:
            found |= dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True))
    return found


EXPECTED = {key: key + (0.75 if key < 50 else 0.25) for key in range(2000) if not 50 <= key < 100}


def test_an_export_has_ids_and_rows_of_each_table(place, capsys):
    target = place / "model.safetensors"

    assert main(["export", str(place / "run"), "--to", str(target)]) == 0

    assert "1 tensors and tables user, item of step 8" in capsys.readouterr().out
    found = safetensors.numpy.load_file(target)
    assert {name: array.dtype.name for name, array in found.items()} == {
        "w": "float32",
        "user.ids": "int64",
        "user.rows": "float32",
        "item.ids": "int64",
        "item.rows": "float32",
    }
    assert found["user.rows"].shape == (1950, 3)
    assert dict(zip(found["user.ids"].tolist(), found["user.rows"][:, 2].tolist(), strict=True)) == EXPECTED
    assert set(found["item.ids"].view(np.uint64).tolist()) == set(IDS.tolist())


def test_a_job_can_begin_with_a_checkpoint_or_with_what_was_exported(place):
    main(["export", str(place / "run"), "--to", str(place / "model.safetensors")])

    assert values_of(place / "run") == EXPECTED
    assert values_of(place / "model.safetensors") == EXPECTED


def test_a_table_goes_to_parquet_and_back(place, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    target, start = str(place / "user.parquet"), str(place / "start.safetensors")
    main(["export", str(place / "run"), "--to", str(place / "model.safetensors")])

    assert main(["export", str(place / "run"), "--table", "user", "--to", target]) == 0
    command = ["import", target, "--table", "user", "--with", str(place / "model.safetensors"), "--to", start]
    assert main(command) == 0

    found = parquet.read_table(target)
    assert found.schema.names == ["id", "row"]
    assert found.num_rows == 1950
    assert values_of(start) == EXPECTED
    assert "table user with 1950 rows of 3 numbers" in capsys.readouterr().out
    assert set(safetensors.numpy.load_file(start)) == {"w", "user.ids", "user.rows", "item.ids", "item.rows"}


def test_a_table_that_the_file_has_under_a_modules_name_is_read_and_replaced_by_its_own(tmp_path):
    """As in exports of models: the metadata say so. The file that is made has it in the same place, once."""
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    given, other, start = tmp_path / "model.safetensors", tmp_path / "other.safetensors", tmp_path / "start.safetensors"
    names = {f"{alias}.{part}": f"inner.who.{part}" for alias in ("user", "again") for part in ("ids", "rows")}
    more = {"item.ids": IDS[:1], "item.rows": rows[:1, :1], "w": rows}
    safetensors.numpy.save_file({"inner.who.ids": IDS, "inner.who.rows": rows, **more}, given, {**names, "format": "pt"})
    safetensors.numpy.save_file({"user.ids": IDS[::-1].copy(), "user.rows": rows + 1}, other)
    assert values_of(given) == dict(zip(IDS.tolist(), rows[:, 0].tolist(), strict=True))

    assert main(["import", str(given), "--table", "user", "--to", str(start)]) == 0
    assert set(safetensors.numpy.load_file(start)) == {"user.ids", "user.rows"}
    assert main(["import", str(other), "--table", "user", "--with", str(given), "--to", str(start)]) == 0

    assert values_of(start) == dict(zip(IDS[::-1].tolist(), (rows[:, 0] + 1).tolist(), strict=True))
    with safetensors.safe_open(start, "np") as opened:
        assert set(opened.keys()) == {"inner.who.ids", "inner.who.rows", *more}
        assert opened.metadata() == {**names, "format": "pt"}


def test_ids_and_rows_of_other_names_and_dtypes_are_imported(tmp_path):
    """And all other tensors with them, of whatever type."""
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float16)
    given, start = tmp_path / "a.safetensors", tmp_path / "start.safetensors"
    others = {"scale": np.array([1 + 2j, 3j], np.complex64), "count": np.arange(7, dtype=np.uint16)}
    safetensors.numpy.save_file({"keys": IDS, "weight": rows, **others}, given)

    command = ["import", str(given), "--table", "user", "--ids", "keys", "--rows", "weight", "--with", str(given)]
    assert main([*command, "--to", str(start)]) == 0

    found = safetensors.numpy.load_file(start)
    np.testing.assert_array_equal(found["user.ids"].view(np.uint64), IDS)
    np.testing.assert_array_equal(found["user.rows"], rows.astype(np.float32))
    for name, value in others.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def dump(folder, name, parts):
    """A table as dynamicemb dumps it: of each process a file of ids and one of rows."""
    folder.mkdir(exist_ok=True)
    for rank, (ids, rows) in enumerate(parts):
        where = f"rank_{rank}.world_size_{len(parts)}"
        ids.astype(np.uint64).tofile(folder / f"{name}_emb_keys.{where}")
        rows.astype(np.float32).tofile(folder / f"{name}_emb_values.{where}")
        (ids * 0).tofile(folder / f"{name}_emb_scores.{where}")


@pytest.mark.usefixtures("small_pieces")
def test_a_table_of_a_dynamicemb_dump_is_imported(tmp_path, capsys):
    """Of all processes, also of one that has none of its ids; beside a table whose name begins like its own."""
    rows = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    dump(tmp_path / "ebc", "u", [(IDS[:2], rows[:2]), (IDS[:0], rows[:0]), (IDS[2:], rows[2:])])
    dump(tmp_path / "ebc", "u_emb", [(IDS, rows[:, :1])])
    start = tmp_path / "start.safetensors"

    command = ["import", str(tmp_path / "ebc"), "--dynamicemb", "u", "--table", "user", "--to", str(start)]
    assert main(command) == 0

    assert "table user with 5 rows of 3 numbers" in capsys.readouterr().out
    found = safetensors.numpy.load_file(start)
    np.testing.assert_array_equal(found["user.ids"].view(np.uint64), IDS)
    np.testing.assert_array_equal(found["user.rows"], rows)
    with pytest.raises(SystemExit):
        main([*command, "--ids", "keys"])
    assert "--dynamicemb: not with --ids or --rows" in capsys.readouterr().err


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("psd.checkpoint.dynamicemb.PIECE_BYTES", 24)


def test_a_dump_that_is_not_whole_is_refused_by_the_name_of_the_file(tmp_path, capsys):
    rows, start = np.ones((5, 3), np.float32), tmp_path / "start.safetensors"

    def refused(message, *parts, change=lambda folder: None):
        folder = tmp_path / f"dump-{len(list(tmp_path.iterdir()))}"
        dump(folder, "user", parts)
        change(folder)
        assert main(["import", str(folder), "--dynamicemb", "user", "--table", "user", "--to", str(start)]) == 1
        assert message in capsys.readouterr().err
        assert not start.exists()

    halves = (IDS[:2], rows[:2]), (IDS[2:], rows[2:])
    of_keys, of_values = "user_emb_keys.rank_1.world_size_2", "user_emb_values.rank_1.world_size_2"
    refused("table 'user': is not there; its files are user_emb_keys.rank_...")
    refused(f"{of_values} is missing", *halves, change=lambda folder: (folder / of_values).unlink())
    refused(f"{of_keys} is missing", *halves, change=lambda folder: (folder / of_keys).unlink())
    refused("is of 2 and of 3 processes", *halves, change=lambda folder: dump(folder, "user", [*halves, halves[0]]))
    refused(
        f"{of_values}: has 40 bytes, which are no float32", *halves, change=lambda f: (f / of_values).write_bytes(b"0" * 40)
    )
    refused(f"{of_values}: has 36 bytes", *halves, change=lambda folder: (folder / of_keys).write_bytes(b""))
    refused("has 0 bytes, which are no float32", (IDS, rows[:0]))
    refused("has rows of [2, 3] numbers", halves[0], (IDS[2:], rows[2:, :2]))
    refused("has no rows, and so no dim", (IDS[:0], rows[:0]))
    refused("id 5 comes twice", (IDS, rows), (IDS[:1], rows[:1]))
    refused("the row of id 77 holds NaN or infinity", (IDS, np.where(IDS[:, None] == 77, np.nan, rows)))


ROWS = np.ones((5, 3), np.float32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"user.ids": IDS}, "there is no tensor 'user.rows'"),
        ({"user.ids": IDS.astype(np.float32), "user.rows": ROWS}, "'user.ids': expected ids, (n,) int64 or uint64"),
        ({"user.ids": IDS[:4], "user.rows": ROWS}, "'user.rows': expected rows, (4, dim) floating, got (5, 3) F32"),
        ({"user.ids": IDS, "user.rows": ROWS[:, :0].copy()}, "'user.rows': expected rows, (5, dim) floating, got (5, 0) F32"),
        ({"user.ids": IDS[[0, 1, 2, 3, 0]], "user.rows": ROWS}, "id 5 comes twice"),
        ({"user.ids": IDS, "user.rows": ROWS * np.float32(np.nan)}, "the row of id 5 holds NaN or infinity"),
    ],
)
def test_what_is_no_table_is_not_imported(tmp_path, tensors, words, capsys):
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors")

    assert main(["import", str(tmp_path / "a.safetensors"), "--table", "user", "--to", str(tmp_path / "b.safetensors")]) == 1

    assert words in capsys.readouterr().err
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([None, [1.0]], "column 'row': expected at least one number in each row, got none in the first"),
        ([[], []], "column 'row': expected at least one number in each row, got none in the first"),
        ([[1.0], None], "rows 0 to 2: expected an id and 1 numbers in each"),
        ([[1.0], [1e300]], "the row of id 6 holds NaN or infinity"),
        ("damaged", "a.parquet: "),
    ],
)
def test_what_is_no_table_in_parquet_is_not_imported(tmp_path, rows, words, capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    values = pa.array([[1.0], [2.0]] if rows == "damaged" else rows, pa.list_(pa.float64()))
    parquet.write_table(pa.table({"id": [5, 6], "row": values}), file)
    if rows == "damaged":
        data = bytearray(file.read_bytes())
        data[4:24] = b"\xff" * 20  # the first page, behind the file's magic bytes
        file.write_bytes(data)

    assert main(["import", str(file), "--table", "user", "--to", str(tmp_path / "b.safetensors")]) == 1

    assert words in capsys.readouterr().err
    assert not (tmp_path / "b.safetensors").exists()


def test_a_table_that_is_missing_or_of_another_dim_is_refused_before_anything_is_read(tmp_path):
    tensors = {"w": np.zeros(9000, np.float32), "user.ids": IDS, "user.rows": ROWS}
    for more, words in (
        ({}, "table 'item': is in this worker's declaration, is not in .*start.safetensors"),
        ({"item.ids": IDS, "item.rows": ROWS}, r"dim of table 'item': 3 in .*start.safetensors, 1 in this worker's"),
    ):
        safetensors.numpy.save_file(tensors | more, tmp_path / "start.safetensors")
        with pytest.raises(SpecMismatch, match=words):
            values_of(tmp_path / "start.safetensors")


def test_the_list_shows_rows_and_what_a_checkpoint_builds_on(place, capsys):
    assert main(["checkpoints", str(place / "run")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-3:] == ["ROWS", "BUILDS", "ON"]
    assert [line.split()[-2:] for line in lines[1:3]] == [["1955", "7"], ["2005", "-"]]
    main(["checkpoints", str(place / "run"), "--json"])
    newest = json.loads(capsys.readouterr().out)["checkpoints"][0]
    assert (newest["rows"], newest["base"][-2:]) == (1955, "a7")


def test_an_export_that_cannot_be_says_why(place, capsys):
    run, file = str(place / "run"), str(place / "x.parquet")

    assert main(["export", run, "--table", "nobody", "--to", file]) == 1
    assert main(["export", run, "--to", file]) == 1

    errors = capsys.readouterr().err.splitlines()
    assert "there is no table 'nobody' in" in errors[0]
    assert errors[0].endswith("it has user, item")
    assert "a Parquet file takes one table, and none was named" in errors[1]
