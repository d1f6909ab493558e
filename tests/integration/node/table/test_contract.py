"""What every backend of the table promises, asserted on each of them."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from azureml_elastic.config.rendezvous import TableRendezvous
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import KeyInvalid, RowChanged, RowExists, UsageError, ValueTooLarge
from azureml_elastic.node.table import open_table

HARD_KEYS = [
    "member.node-1", "a/b", "a\\b", "a#b", "a?b", "100%", "%2F", "=2F", "it's",
    'say "x"', "a'b''c", "a b", " ",
    "\t\n\0\x7f\x80", "é", "日本語", "😀.x", "a&b=c;d,e", "~", "a~b", ".", "..", "$", "A",
    "x" * 250, "@+*()[]{}<>|^`!:",
]  # fmt: skip


@pytest.fixture(params=["sqlite", "azurite"])
def open_run(request, tmp_path):
    """Open runs of one table that is the test's own."""
    if request.param == "sqlite":
        endpoint, table = str(tmp_path / "folder" / "table.sqlite"), "elastic"
    else:
        endpoint, table = request.getfixturevalue("azurite").endpoint, f"t{uuid.uuid4().hex}"
    tables = []

    def run(name="run"):
        tables.append(open_table(TableRendezvous(endpoint=endpoint, table=table), name, NodeEnvironment.read({})))
        return tables[-1]

    yield run
    for table in tables:
        table.close()


@pytest.fixture
def table(open_run):
    return open_run()


def by_key(rows):
    rows = list(rows)
    found = {row.key: row.value for row in rows}
    assert len(found) == len(rows)
    return found


def test_what_was_inserted_is_read_back(table):
    value = {"text": "é😀\ud83d\0\x1f", "number": -1.5e300, "big": 2**80, "list": [1, None, True, {"deep": {}}], "": []}
    etag = table.insert("key", value)
    row = table.get("key")
    assert (row.key, row.value, row.etag) == ("key", value, etag)


def test_a_row_that_is_not_there_is_none(table):
    assert table.get("nothing") is None


def test_insert_refuses_a_row_that_exists_and_leaves_it_alone(table):
    etag = table.insert("key", {"n": 1})
    with pytest.raises(RowExists, match="'key'"):
        table.insert("key", {"n": 2})
    row = table.get("key")
    assert (row.value, row.etag) == ({"n": 1}, etag)


def test_replace_needs_the_version_and_drops_the_old_value_whole(table):
    first = table.insert("key", {"old": "x" * 100_000})
    second = table.replace("key", {"n": 2}, first)
    with pytest.raises(RowChanged, match="'key'"):
        table.replace("key", {"n": 3}, first)
    row = table.get("key")
    assert (row.value, row.etag) == ({"n": 2}, second)


def test_replace_refuses_a_row_that_is_gone(table):
    etag = table.insert("key", {})
    table.delete("key")
    with pytest.raises(RowChanged, match="gone"):
        table.replace("key", {}, etag)
    assert table.get("key") is None


def test_delete_with_the_version_and_without(table):
    table.delete("nothing")
    first = table.insert("key", {})
    second = table.replace("key", {"n": 2}, first)
    with pytest.raises(RowChanged, match="'key'"):
        table.delete("key", first)
    assert table.get("key").value == {"n": 2}
    table.delete("key", second)
    assert table.get("key") is None
    with pytest.raises(RowChanged, match="gone"):
        table.delete("key", second)
    table.insert("key", {})
    table.delete("key")
    assert table.get("key") is None


def test_an_etag_never_comes_twice(table):
    etags = []
    for _ in range(5):
        etags.append(table.insert("key", {}))
        etags.extend(table.replace("key", {}, etags[-1]) for _ in range(3))
        table.delete("key")
    etags.append(table.insert("other", {}))
    assert len(set(etags)) == len(etags) == 21


def test_timestamps_are_the_servers_and_never_go_back(table):
    times = []
    for n in range(10):
        table.insert(f"key{n}", {})
        times.append(table.get(f"key{n}").timestamp)
    assert times == sorted(times)
    assert {time.tzinfo for time in times} == {timezone.utc}
    etag = table.get("key0").etag
    table.replace("key0", {}, etag)
    assert table.get("key0").timestamp >= times[-1] > times[0] - timedelta(seconds=1)
    assert {row.key: row.timestamp for row in table.query("key9")} == {"key9": times[-1]}


def test_hard_keys_and_each_as_a_prefix(table):
    for number, key in enumerate(HARD_KEYS):
        table.insert(key, {"n": number})
    everything = {key: {"n": number} for number, key in enumerate(HARD_KEYS)}
    assert by_key(table.query("")) == everything
    for key in HARD_KEYS:
        assert table.get(key).value == everything[key]
        assert by_key(table.query(key)) == {other: v for other, v in everything.items() if other.startswith(key)}
        table.replace(key, {"again": True}, table.get(key).etag)
        table.delete(key, table.get(key).etag)
    assert not list(table.query(""))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.sets(TEXT, min_size=1, max_size=4), cut=st.integers(0, 40))
def test_any_key_and_any_prefix(table, keys, cut):
    try:
        for key in keys:
            table.insert(key, {"key": key})
        prefix = min(keys)[:cut]
        assert by_key(table.query(prefix)) == {key: {"key": key} for key in keys if key.startswith(prefix)}
    finally:
        for key in keys:
            table.delete(key)


def test_prefixes_of_one_another(table):
    for key in ("node", "node.", "node.1", "node.10", "node.2", "node.zz", "nodes", "nod", "Node.1", "node/1"):
        table.insert(key, {})
    assert set(by_key(table.query("node."))) == {"node.", "node.1", "node.10", "node.2", "node.zz"}
    assert set(by_key(table.query("node.1"))) == {"node.1", "node.10"}
    assert set(by_key(table.query("node.3"))) == set()


def test_a_query_beyond_one_page(table):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: table.insert(f"event.{n:05}", {"n": n}), range(1050)))
    table.insert("other", {})
    assert by_key(table.query("event.")) == {f"event.{n:05}": {"n": n} for n in range(1050)}


def test_values_over_one_property_and_the_limit(table):
    for size in (32 * 1024, 65 * 1024, 460_000):
        value = {"text": "x" * size, "face": "😀"}
        table.insert(f"key{size}", value)
        assert table.get(f"key{size}").value == value
    etag = table.insert("small", {"n": 1})
    with pytest.raises(ValueTooLarge, match=r"1,000,\d+ bytes.*921,600"):
        table.insert("large", {"text": "x" * 500_000})
    with pytest.raises(ValueTooLarge, match="'small'"):
        table.replace("small", {"text": "x" * 500_000}, etag)
    assert table.get("large") is None
    assert table.get("small").etag == etag


def test_what_is_no_json_is_refused_and_not_written(table):
    for value in ({"n": float("nan")}, {"n": float("inf")}, {"n": {1, 2}}, {"n": b""}, {(1, 2): 3}):
        with pytest.raises(UsageError, match="JSON"):
            table.insert("key", value)
    assert table.get("key") is None


@pytest.mark.parametrize("key", ["", "x" * 251, "日" * 120, "\ud800"])
def test_keys_that_no_backend_could_store(table, open_run, key):
    for call in (
        lambda: table.get(key),
        lambda: table.insert(key, {}),
        lambda: table.replace(key, {}, "etag"),
        lambda: table.delete(key),
        lambda: open_run(key),
    ):
        with pytest.raises(KeyInvalid, match="key"):
            call()


def test_runs_do_not_see_each_other(open_run):
    one, other, longer = open_run("run"), open_run("run/2"), open_run("run2")
    etag = one.insert("key", {"of": "one"})
    other.insert("key", {"of": "other"})
    longer.insert("key", {"of": "longer"})
    one.replace("key", {"of": "one again"}, etag)
    other.delete("key")
    assert by_key(one.query("")) == {"key": {"of": "one again"}}
    assert by_key(other.query("")) == {}
    assert by_key(longer.query("")) == {"key": {"of": "longer"}}


def test_opening_again_and_all_at_once(open_run):
    barrier = threading.Barrier(12)

    def join(number):
        barrier.wait(300)
        table = open_run()
        table.insert(f"member.{number}", {})
        return len(list(table.query("member.")))

    with ThreadPoolExecutor(12) as pool:
        assert max(pool.map(join, range(12))) == 12
    assert len(list(open_run().query("member."))) == 12


def race(count, act):
    """Let threads act at once and return what each returned or raised of ours."""
    barrier = threading.Barrier(count)

    def one(number):
        barrier.wait(300)
        try:
            return act(number)
        except (RowExists, RowChanged) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_many_that_insert_one_wins(table):
    answers = race(16, lambda n: (n, table.insert("round", {"by": n})))
    (winner,) = [answer for answer in answers if isinstance(answer, tuple)]
    assert all(isinstance(answer, RowExists) for answer in answers if answer is not winner)
    row = table.get("round")
    assert (row.value["by"], row.etag) == winner


def test_of_many_that_replace_or_delete_one_version_one_wins(table):
    etag = table.insert("round", {"by": None})

    def act(number):
        if number % 4 == 3:
            return number, table.delete("round", etag)
        return number, table.replace("round", {"by": number}, etag)

    answers = race(16, act)
    (winner,) = [answer for answer in answers if isinstance(answer, tuple)]
    assert all(isinstance(answer, RowChanged) for answer in answers if answer is not winner)
    row = table.get("round")
    assert (None if row is None else (row.value["by"], row.etag)) == (None if winner[0] % 4 == 3 else winner)


def test_no_update_is_lost_between_threads(table):
    table.insert("counter", {"n": 0})

    def count_up(_):
        done = 0
        while done < 5:
            row = table.get("counter")
            try:
                table.replace("counter", {"n": row.value["n"] + 1}, row.etag)
            except RowChanged:
                continue
            done += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count_up, range(4)))
    assert table.get("counter").value == {"n": 20}
