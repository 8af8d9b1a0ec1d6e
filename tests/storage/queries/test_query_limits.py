"""The limits of queries: a query reads and writes no file, uses limited memory, and harms only its connection."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import storage
from storage.queries import views
from storage.runs.run import Run
from tests.support.sampled_parameters import sampled
from tests.support.storage.synthetic import STEPS, make_run
from tests.support.storage.views import rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a finished run that many tests read and none changes."""
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def con(finished: Run) -> duckdb.DuckDBPyConnection:
    return storage.connect(finished)


HOSTILE = (
    "copy (select 1) to '{here}/out.csv'",
    "copy trajectories to '{run}/trajectories/searcher=000/seq=00000000.parquet' (format parquet)",
    "copy (select 1) to '/dev/stdout'",
    "export database '{here}/exported'",
    "import database '{here}'",
    "attach '{here}/other.db'",
    "install httpfs",
    "force install httpfs from 'http://localhost'",
    "load httpfs",
    "load '{here}/extension.duckdb_extension'",
    "select * from read_csv('/etc/passwd')",
    "select * from '/etc/passwd'",
    "select * from '{here}/secret.csv'",
    "select * from read_text('{here}/secret.csv')",
    "select * from read_blob('{here}/secret.csv')",
    "select * from read_json('{run}/run.json')",
    "select * from read_parquet('{run}/prompts/train.parquet')",
    "select * from parquet_metadata('{run}/prompts/train.parquet')",
    "select * from sniff_csv('{here}/secret.csv')",
    "select * from glob('/etc/*')",
    "select * from query('select * from read_text(''/etc/passwd'')')",
    "create table t (a int); copy t from '{here}/secret.csv'",
    "set enable_external_access = true",
    "reset enable_external_access",
    "pragma enable_external_access = true",
    "set lock_configuration = false",
    "set allowed_directories = ['/']",
    "set temp_directory = '{here}'",
    "set python_enable_replacements = true",
    "set log_query_path = '{here}/queries.log'",
    "pragma profiling_output = '{here}/profile.json'",
    "call enable_profiling(save_location = '{here}/profile.json')",
    "create persistent secret s (type s3)",
    "select getenv('HOME')",
    "select * from secret",
    "copy (select 1) to 's3://bucket/out.parquet'",
    "copy (select 1) to 'http://localhost:1/out.csv'",
    "copy (select 1) to program 'touch {here}/made'",
    "copy (select 1 as a) to '{here}/parts' (format parquet, partition_by (a))",
    "explain analyze copy (select 1) to '{here}/out.csv'",
    "attach '{here}/other.db' (type sqlite)",
    "attach 'ducklake:{here}/lake'",
    "attach 's3://bucket/other.db'",
    "select * from 's3://bucket/x.parquet'",
    "select * from 'http://localhost:1/x.csv'",
    "select * from read_csv('/dev/stdin')",
    "select * from read_text('/dev/fd/0')",
    "select * from read_text('/proc/self/environ')",
    "select * from read_csv(['{here}/secret.csv'])",
    "select * from read_ndjson('{here}/secret.csv')",
    "select * from read_duckdb('{here}/other.db')",
    "select * from parquet_schema('{run}/prompts/train.parquet')",
    "select * from parquet_kv_metadata('{run}/prompts/train.parquet')",
    "select * from query_table('{here}/secret.csv')",
    "select * from json_execute_serialized_sql(json_serialize_sql('from read_text(''/etc/passwd'')'))",
    "prepare p as from read_text('/etc/passwd')",
    "create view stolen as from read_text('/etc/passwd')",
    "create macro stolen() as table from read_text('/etc/passwd'); from stolen()",
    "create table t (a text); insert into t select content from read_text('/etc/passwd')",
    "create secret s (type s3, key_id 'a', secret 'b')",
    "install httpfs from community",
    "update extensions",
    "set global lock_configuration = false",
    "reset lock_configuration",
    "pragma lock_configuration = false",
    "set disabled_filesystems = ''",
    "reset disabled_filesystems",
    "set allowed_paths = ['/etc/passwd']",
    "set secret_directory = '{here}'",
    "set extension_directory = '{here}'",
    "set home_directory = '{here}'",
    "set allow_unsigned_extensions = true",
    "set custom_extension_repository = 'http://localhost:1'",
    "set enable_profiling = 'json'",
    "set profiling_output = '{here}/profile.json'",
    "set logging_storage = 'file'",
    "set memory_limit = '100TB'",
    "pragma max_memory = '100TB'",
    "set threads = 1000",
    "set python_scan_all_frames = true",
    "select * from pandas_scan(null)",
    "select * from arrow_scan(null, null, null)",
)


@pytest.mark.parametrize("query", sampled(HOSTILE, kept=HOSTILE[::4]))
def test_a_query_reads_and_writes_no_file(query: str, finished: Run, con: duckdb.DuckDBPyConnection, tmp_path: Path):
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    before, run = fingerprint(tmp_path), fingerprint(Path(finished.url))
    secret = pa.table({"a": [1]})  # local, because DuckDB finds only Python variables of the calling frame
    if query == "select * from secret":
        assert duckdb.connect().execute(query).fetchall() == [(1,)]
    with pytest.raises(duckdb.Error):
        for statement in query.split(";"):
            con.execute(statement.format(here=tmp_path, run=finished.url)).fetchall()
    assert len(secret) == 1
    assert fingerprint(tmp_path) == before
    assert fingerprint(Path(finished.url)) == run


HARMLESS = (
    "attach ':memory:' as other; create table other.t as select 1; use other; detach memory",
    "checkpoint", "force checkpoint", "vacuum", "pragma enable_checkpoint_on_shutdown",
    "call enable_logging(); select write_log('x'); call disable_logging()",
    "call enable_logging(storage := 'stdout')",
    "pragma enable_profiling; select 1", "call enable_profiling(); select 1",
    "create table steps_mine as from steps; drop view steps; create table steps as select 1 as step",
    "create or replace macro drift() as table select 1; create temp table selection as from selection",
    "drop schema stored cascade", "truncate stored.shards", "alter table stored.steps rename to gone",
    "set variable x = (select count(*) from steps)", "begin; delete from stored.steps; commit",
)  # fmt: skip


def test_what_is_not_refused_leaves_nothing_and_the_process_lives(finished: Run, tmp_path: Path, cache: Path):
    """The queries run in another process, whose standard input has something to read."""
    script = """
import sys
import duckdb, storage
for queries in sys.argv[2:]:
    con = storage.connect(sys.argv[1])
    for query in queries.split(";;"):
        try:
            con.execute(query).fetchall()
        except duckdb.Error:
            pass
    con.close()
print("and lives:", sys.stdin.read(), storage.connect(sys.argv[1]).execute("select count(*) from steps").fetchall())
"""
    run = fingerprint(Path(finished.url))
    refused = ";;".join(HOSTILE).replace("; ", ";;").format(here=tmp_path, run=finished.url)
    queries = [*(query.replace("; ", ";;") for query in HARMLESS), refused]
    arguments = [sys.executable, "-c", script, finished.url, *queries]
    here = {
        **os.environ,
        "PYTHONPATH": str(Path(storage.__file__).parents[1]),
        "HOME": str(tmp_path),
        "TBA_CACHE": str(cache),
    }
    done = subprocess.run(arguments, input="mine", capture_output=True, text=True, timeout=250, cwd=tmp_path, env=here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"and lives: mine [({STEPS},)]\n")
    assert list(tmp_path.iterdir()) == []
    assert fingerprint(Path(finished.url)) == run


def test_a_query_that_needs_too_much_memory_says_so_and_spills_nothing(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(views, "SHARE_OF_MEMORY", 0.002)
    con = storage.connect(finished)
    with pytest.raises(duckdb.OutOfMemoryException, match="Out of Memory"):
        rows(con, "select count(*) from (select distinct md5(i::varchar) from range(10000000) r(i))")
    assert rows(con, "select count(*) from steps") == [(STEPS,)]
    assert list(tmp_path.iterdir()) == []


def test_a_query_may_take_half_of_the_machines_memory(con: duckdb.DuckDBPyConnection):
    limits = []
    for asked in (duckdb.connect(), con):
        size, unit = rows(asked, "select memory_limit from pragma_database_size()")[0][0].split()
        limits.append(float(size) * 1024.0 ** ["KiB", "MiB", "GiB", "TiB"].index(unit))
    assert limits[1] == pytest.approx(limits[0] / 0.8 * 0.5, rel=0.02)


def test_a_log_to_a_file_is_an_error_and_not_the_end_of_the_process(finished: Run, tmp_path: Path):
    script = """
import sys
import duckdb, storage
con = storage.connect(sys.argv[1])
try:
    con.execute(f"call enable_logging(storage = 'file', storage_path = '{sys.argv[2]}')")
except duckdb.Error:
    print(con.execute("select count(*) > 0 from steps").fetchall())
"""
    arguments = [sys.executable, "-c", script, finished.url, str(tmp_path / "log")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[(True,)]\n")
    assert list(tmp_path.iterdir()) == []


def test_dropping_a_view_harms_nothing_but_the_connection(finished: Run, con: duckdb.DuckDBPyConnection):
    before = fingerprint(Path(finished.url))
    con.execute("drop view trajectories")
    con.execute("create table mine as select * from steps")
    con.execute("create or replace view steps as select 1 as step")
    assert fingerprint(Path(finished.url)) == before
    assert rows(storage.connect(finished), "select count(*) from steps") == [(STEPS,)]


def test_large_queries_leave_nothing_in_the_working_directory(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    con = storage.connect(finished)
    assert len(rows(con, "select a.trajectory_id from trajectories a, trajectories b order by random()")) > 1000
    assert list(tmp_path.iterdir()) == []


def fingerprint(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }
