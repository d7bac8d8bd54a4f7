"""The files of a data set: what is read is what was written, or an error; what was not committed never was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _files, _pieces
from fbuf._host.store import StoreClosed
from fbuf._pieces import _chunked, _manifest
from fbuf.storages import BitPack, Raw, Zstd
from tests.support import pieces

Used = _pieces.Used


def same(got: pieces.Rows, want: pieces.Rows) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


def check(path: Path, want: pieces.Rows, **settings: Any) -> None:
    """All rows, and some in no order, as every leaf."""
    with _pieces.DataSet.open(path, **settings) as dataset:
        number = len(next(iter(want.values())))
        assert dataset.rows == number
        same(dataset.read_rows(0, number), want)
        at = np.random.default_rng(0).integers(0, number, (5, 3))
        same(dataset.read(dict.fromkeys(want, at)), {name: array[at] for name, array in want.items()})


# -------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("memory", [1 << 28, 0])
@pytest.mark.parametrize("verify", ["lazy", "full"])
def test_rows_come_back(tmp_path: Path, memory: int, verify: str) -> None:
    want = pieces.make(tmp_path)
    check(tmp_path, want, memory=memory, verify=verify)
    check(tmp_path, want, memory=memory, verify=verify, cache=200)  # of chunks of 144 bytes


def test_chunks_are_cached(tmp_path: Path) -> None:
    want = pieces.make(tmp_path)
    with _pieces.DataSet.open(tmp_path, cache=1 << 20) as dataset:
        for _ in range(2):
            same(dataset.read_rows(0, 34, ["obs"]), {"obs": want["obs"]})
        cache = dataset.store._parts[0].cache  # type: ignore[union-attr]
        assert cache is not None and cache.hits == cache.misses == 11 and cache.nbytes <= dataset.store.nbytes


DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "bfloat16")


@st.composite
def data_sets(draw: Any) -> Any:
    """Leaves of any kind and dtype, some pieces of them, and which of their rows are used."""
    leaves: dict[str, tuple[tuple[int, ...], str]] = {}
    codecs: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["", "a/"])) + f"x{i}"
        leaves[name] = draw(st.sampled_from([(), (1,), (3, 2), (0,), (7,)])), draw(st.sampled_from(DTYPES))
        codec = draw(st.sampled_from([None, Zstd(chunk=3), Zstd(chunk=8, repack=False), BitPack(chunk=5), Raw()]))
        if codec is not None:
            codecs[name] = codec
    leaves["truncated"] = (), "bool"
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    used = []
    for number, size in enumerate(sizes):
        begin = draw(st.integers(0, size - 1))
        used.append(Used(number, begin, draw(st.integers(begin + 1, size)), draw(st.booleans())))
    values = draw(st.sampled_from([2, 3, 1000]))
    return leaves, codecs, sizes, draw(st.permutations(used)), values, draw(st.integers(1, 9))


@given(made=data_sets(), seed=st.integers(0, 9), memory=st.sampled_from([0, 40, 1 << 28]))
def test_anything_comes_back(tmp_path_factory: pytest.TempPathFactory, made: Any, seed: int, memory: int) -> None:
    leaves, codecs, sizes, used, values, step = made
    path, rng = tmp_path_factory.mktemp("made"), np.random.default_rng(seed)
    schema = _pieces.Schema(leaves, codec=codecs)
    rows = {}
    for number, size in enumerate(sizes):
        rows[number] = {
            leaf.name: (rng.integers(0, values if number else 2, (size, *leaf.shape)) - 1).astype(leaf.dtype)
            for leaf in schema.leaves
        }
        pieces.write(path, number, schema, rows[number], step)
    _pieces.finish(path, used, sync=False)
    check(path, pieces.used_of(rows, tuple(used)), memory=memory)


def test_few_values_are_codes_bit_for_bit(tmp_path: Path) -> None:
    odd = np.array([0x7FC00001, 0x7FC00000, 0x80000000, 0, 0x3F800000], np.uint32).view(np.float32)
    schema = _pieces.Schema({"few": ((), "float32"), "many": ((), "int32"), "mixed": ((), "int64")})
    rows = {
        k: {
            "few": np.resize(odd, 300) if k else np.full(300, 7, np.float32),
            "many": np.arange(300, dtype=np.int32) + 200 * k,
            "mixed": np.arange(300) if k == 1 else np.zeros(300, np.int64),
        }
        for k in range(3)
    }
    for number, mine in rows.items():
        pieces.write(tmp_path, number, schema, mine, 100)
    used = tuple(Used(k) for k in rows)
    _pieces.finish(tmp_path, used)
    for memory in (0, 1 << 20):
        check(tmp_path, pieces.used_of(rows, used), memory=memory)
    with _pieces.DataSet.open(tmp_path, memory=0) as dataset:
        # a byte a row of `few`, and of `mixed` in the two pieces where it is one value
        assert 900 + 600 <= dataset.store.nbytes < 900 + 600 + 64


def test_memory_is_an_index_and_codes(tmp_path: Path) -> None:
    schema = _pieces.Schema({"obs": ((40, 40), "uint8"), "action": ((), "int32"), "done": ((), "bool")})
    rows = 4000
    obs = np.arange(rows).astype(np.uint8)[:, None, None] * np.ones((40, 40), np.uint8)
    mine = {"obs": obs, "action": np.arange(rows, dtype=np.int32) % 18, "done": np.zeros(rows, bool)}
    pieces.write(tmp_path, 0, schema, mine, 1000)
    _pieces.finish(tmp_path, [Used(0)])
    with _pieces.DataSet.open(tmp_path) as dataset:
        assert dataset.store.nbytes <= rows * (18 / 8 + 1 + 1 / 8) + 200
        dataset.read_rows(0, rows)
        stats = dataset.store.stats()
        assert stats["nbytes"] <= rows * (18 / 8 + 1 + 1 / 8) + 200 + stats["dictionaries"] * (16 * 1600 + 30_000)
        assert stats["raw_bytes"] == rows * 1605 and dataset.store.disk == sum(
            file.stat().st_size for file in (tmp_path / "pieces" / "0").glob("data-*")
        )


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    want, wrong = pieces.make(tmp_path), []
    with _pieces.DataSet.open(tmp_path, memory=0) as dataset:

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(30):
                at = rng.integers(0, dataset.rows, 16)
                got = dataset.read(dict.fromkeys(want, at))
                wrong.extend(name for name in want if (got[name] != want[name][at]).any())

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_reads_that_wait_for_the_disk_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = pieces.make(tmp_path)
    spans: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, how: spans.append((at, size)))
    monkeypatch.setattr(_chunked, "_SEVERAL", 1)
    with _pieces.DataSet.open(tmp_path) as dataset:
        for cold, hints in ((1.0, False), (-1.0, False), (1.0, True)):
            monkeypatch.setattr(_chunked, "_COLD", cold)
            spans.clear()
            same(dataset.read_rows(0, 34), want)
            assert bool(spans) == hints
        assert len(spans) == 4 and dataset.store._parts[0].arena.announced == _chunked._ANNOUNCED - 1  # type: ignore[union-attr]
        data = {size for _, size in spans}
        assert sum(data) >= dataset.store._parts[0].payload * 0.7  # type: ignore[union-attr]


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    pieces.make(tmp_path)
    dataset = _pieces.DataSet.open(tmp_path)
    with pytest.raises(IndexError, match="there are 34"):
        dataset.read({"action": np.array([34])})
    with pytest.raises(IndexError, match="there are 34"):
        dataset.read_rows(-1, 3)
    with pytest.raises(KeyError, match="no_such"):
        dataset.read({"no_such": np.array([0])})
    with pytest.raises(TypeError, match="float64; expected integers"):
        dataset.read({"action": np.array([0.0])})
    assert dataset.read({"action": np.zeros((0, 3), int)})["action"].shape == (0, 3)
    assert dataset.read({"action": 3})["action"] == dataset.read_rows(3, 4)["action"][0]
    dataset.close()
    dataset.close()
    with pytest.raises(StoreClosed):
        dataset.read_rows(0, 1)


def test_the_store_takes_nothing(tmp_path: Path) -> None:
    pieces.make(tmp_path)
    with _pieces.DataSet.open(tmp_path) as dataset:
        for call in (
            lambda: dataset.store.write([], None),
            lambda: dataset.store.patch(np.zeros(0), np.zeros(0), {}),
        ):
            with pytest.raises(TypeError, match="read-only"):
                call()
        assert dataset.store.to_arrays() == {}


# ------------------------------------------------------------------------------------------------------- a piece


def test_a_piece_is_there_or_not(tmp_path: Path) -> None:
    rows = pieces.rows_of(np.random.default_rng(0), 9)
    with _pieces.PieceWriter(tmp_path, 7, pieces.SCHEMA) as piece:
        piece.append(rows)
        assert piece.rows == 9 and piece.nbytes > 0
    assert _pieces.committed(tmp_path) == {} and not _pieces.is_dataset(tmp_path)
    pieces.write(tmp_path, 7, pieces.SCHEMA, rows, meta={"url": "x"})
    info = _pieces.committed(tmp_path)[7]
    assert (info.rows, info.meta, info.schema) == (9, {"url": "x"}, pieces.SCHEMA)
    assert _pieces.is_dataset(tmp_path)
    with pytest.raises(FileExistsError, match=r"discard\(path, 7\)"):
        _pieces.PieceWriter(tmp_path, 7, pieces.SCHEMA)
    _pieces.discard(tmp_path, 7)
    _pieces.discard(tmp_path, 7)
    assert _pieces.committed(tmp_path) == {} and not (tmp_path / "pieces" / "7").exists()
    pieces.write(tmp_path, 7, pieces.SCHEMA, rows)


def test_two_writers_of_one_piece(tmp_path: Path) -> None:
    rows = pieces.rows_of(np.random.default_rng(0), 9)
    with _pieces.PieceWriter(tmp_path, 0, pieces.SCHEMA) as one, _pieces.PieceWriter(tmp_path, 0, pieces.SCHEMA) as two:
        one.append(rows)
        two.append(rows)
        one.commit()
        with pytest.raises(FileExistsError, match="has a piece 0"):
            two.commit()


def test_what_a_piece_refuses(tmp_path: Path) -> None:
    rows = pieces.rows_of(np.random.default_rng(0), 4)
    with _pieces.PieceWriter(tmp_path, 0, pieces.SCHEMA) as piece:
        for change, error, match in (
            ({"obs": None}, ValueError, "'obs' is missing"),
            ({"more": rows["action"]}, ValueError, "'more' is not in the schema"),
            ({"action": rows["action"].astype(np.int64)}, TypeError, r"int64; expected int32. Cast with x.astype"),
            ({"action": rows["action"][:2]}, ValueError, r"'(obs|action)' has shape"),
            ({"obs": rows["obs"][:, :3]}, ValueError, r"'obs' has shape \[4, 3, 6\]; expected"),
        ):
            wrong = {name: array for name, array in {**rows, **change}.items() if array is not None}
            with pytest.raises(error, match=match):
                piece.append(wrong)
        assert piece.rows == 0
        with pytest.raises(ValueError, match="has no rows"):
            piece.commit()
    with pytest.raises(ValueError, match="is closed"):
        piece.append(rows)
    with pytest.raises(ValueError, match="expected an int from 0"):
        _pieces.PieceWriter(tmp_path, -1, pieces.SCHEMA)
    leaves = {name: ((3,), "uint8") for name in "abc"}
    odd = _pieces.Schema(leaves, codec={"a": Zstd(chunk=64), "b": Zstd(chunk=63), "c": BitPack(chunk=61)})
    with pytest.raises(
        ValueError, match=r"'c': 'BitPack\(chunk=61\)'.*only at every 245952 rows; expected at most 4096"
    ):
        _pieces.PieceWriter(tmp_path, 1, odd)  # a piece of one row would take a minute


@pytest.mark.parametrize(
    ("leaves", "settings", "match"),
    [
        ({}, {}, "1 leaf or more"),
        ({"x": ((), "object")}, {}, "expected numbers or booleans"),
        ({"x": ((-1,), "int32")}, {}, "has shape"),
        ({"x#": ((), "int32")}, {}, "without '#'"),
        ({"x": ((), "int32")}, {"codec": {"y": Zstd()}}, "codec names 'y'"),
        ({"x": ((), "int32")}, {"codec": {"x": fbuf.storages.Blocks()}}, "which every reader knows"),
        ({"x": ((), "int32")}, {"structure": {"dict": [["x", 1]]}}, "each of 1 leaves once"),
        ({"x": ((), "int32")}, {"structure": {"own": "os:system"}}, "dicts, lists and tuples"),
    ],
)
def test_what_a_schema_refuses(leaves: Any, settings: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        _pieces.Schema(leaves, **settings)


def test_a_schema_is_json() -> None:
    structure = {"tuple": [1, {"dict": [["a", 0], ["b", None]]}]}
    schema = _pieces.Schema({"1/a": ((2,), "bfloat16"), "0": ((40, 40), "uint8")}, structure, {"1/a": BitPack(chunk=2)})
    assert _pieces.Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema["0"].codec == Zstd() and schema.row_bytes == 1604
    for change in ({"leaves": 3}, {"leaves": [["x", [1]]]}, {"more": 1}, {"leaves": [["x", [1], "object", ["raw"]]]}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            _pieces.Schema.from_json({**schema.to_json(), **change})


# ------------------------------------------------------------------------------------------------------ dataset.json


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no data set at"):
        _pieces.DataSet.open(tmp_path)
    rng = np.random.default_rng(0)
    pieces.write(tmp_path, 0, pieces.SCHEMA, pieces.rows_of(rng, 3))
    with pytest.raises(FileNotFoundError, match="not finished: 1 pieces are there"):
        _pieces.DataSet.open(tmp_path)
    with pytest.raises(ValueError, match="piece 1 is not at"):
        _pieces.finish(tmp_path, [Used(0), Used(1)])
    with pytest.raises(ValueError, match="each once"):
        _pieces.finish(tmp_path, [Used(0), Used(0)])
    for used in (Used(0, 3), Used(0, 0, 4), Used(0, -1), Used(0, 2, 2)):
        with pytest.raises(ValueError, match="it has 3"):
            _pieces.finish(tmp_path, [used])
    other = _pieces.Schema({"t": ((), "int32")})
    pieces.write(tmp_path, 1, other, {"t": np.zeros(3, np.int32)})
    with pytest.raises(ValueError, match="as in piece 0"):
        _pieces.finish(tmp_path, [Used(0), Used(1)])
    for number, (codec, match) in enumerate(
        ((Zstd(chunk=3), r"'obs': 'Zstd\(chunk=3\)'"), (Raw(), r"'obs': 'Raw\(\)'")), 5
    ):
        leaves = {leaf.name: (leaf.shape, leaf.dtype) for leaf in pieces.SCHEMA.leaves}
        pieces.write(tmp_path, number, _pieces.Schema(leaves, codec={"obs": codec}), pieces.rows_of(rng, 3))
        with pytest.raises(ValueError, match=match):
            _pieces.finish(tmp_path, [Used(0), Used(number)])
    with pytest.raises(ValueError, match="no leaf 'truncated'"):
        _pieces.finish(tmp_path, [Used(1, cut=True)])
    assert not (tmp_path / "dataset.json").exists()


def test_more_pieces_later(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {number: pieces.rows_of(rng, 6) for number in range(2)}
    pieces.write(tmp_path, 0, pieces.SCHEMA, rows[0])
    _pieces.finish(tmp_path, [Used(0, cut=True)])
    before = _pieces.DataSet.open(tmp_path)
    pieces.write(tmp_path, 1, pieces.SCHEMA, rows[1])
    _pieces.finish(tmp_path, [Used(0), Used(1)])
    check(tmp_path, pieces.used_of(rows, (Used(0), Used(1))))
    same(before.read_rows(0, 6), pieces.used_of(rows, (Used(0, cut=True),)))  # what was opened stays
    with _pieces.DataSet.open(tmp_path) as after:
        assert after.identity != before.identity


def test_a_piece_made_anew_makes_it_unfinished(tmp_path: Path) -> None:
    pieces.make(tmp_path)
    _pieces.discard(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="piece 1 of .* is missing"):
        _pieces.DataSet.open(tmp_path)
    pieces.write(tmp_path, 1, pieces.SCHEMA, pieces.rows_of(np.random.default_rng(5), pieces.SIZES[1]))
    with pytest.raises(FileNotFoundError, match="written anew"):
        _pieces.DataSet.open(tmp_path)


@pytest.mark.parametrize("at", [40, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 3, 20, 39, 41, 60, 80))])
def test_killed_between_and_within_pieces(tmp_path: Path, at: int) -> None:
    code = """
        import os, sys
        import numpy as np
        from fbuf import _files
        from tests.support import pieces
        path, at = sys.argv[1], int(sys.argv[2])
        calls = 0
        class Dying(_files.Disk):
            pass
        def dying(name):
            was = getattr(_files.Disk, name)
            def call(self, *args):
                global calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), 9)
                return was(self, *args)
            return call
        for name in ("open", "pwrite", "fsync", "rename", "close"):
            setattr(_files.Disk, name, dying(name))
        pieces.make(__import__("pathlib").Path(path))
    """
    root = Path(fbuf.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(at)]
    assert subprocess.run(command, env=environment, cwd=root).returncode == -9
    there = _pieces.committed(tmp_path)
    with pytest.raises(FileNotFoundError):
        _pieces.DataSet.open(tmp_path)
    rng = np.random.default_rng(0)  # what resumes makes the others
    rows = {number: pieces.rows_of(rng, size) for number, size in pieces.SIZES.items()}
    for number in rows.keys() - there.keys():
        pieces.write(tmp_path, number, pieces.SCHEMA, rows[number])
    _pieces.finish(tmp_path, pieces.USED)
    check(tmp_path, pieces.used_of(rows, pieces.USED), verify="full")


# ------------------------------------------------------------------------------------------------------ damaged files


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock" and file.stat().st_size)


def test_a_damaged_byte_is_an_error_or_nothing(tmp_path: Path) -> None:
    """Bytes of every file, one at a time: whatever is read then is right."""
    want = pieces.make(tmp_path)
    number, opened = len(want["action"]), 0
    for file in files_of(tmp_path):
        text = file.read_bytes()
        for at in range(0, len(text), max(len(text) // 23, 1)):
            file.write_bytes(text[:at] + bytes([text[at] ^ 0x41]) + text[at + 1 :])
            with pytest.raises((fbuf.StoreCorrupted, FileNotFoundError, fbuf.VersionError)):
                _pieces.DataSet.open(tmp_path, verify="full").close()
                raise AssertionError(f"{file.name} byte {at} of {len(text)}")
            for memory in (0, 1 << 20):
                try:
                    with _pieces.DataSet.open(tmp_path, memory=memory) as dataset:
                        opened += 1
                        same(dataset.read_rows(0, number), want)
                except (fbuf.StoreCorrupted, FileNotFoundError, fbuf.VersionError):
                    pass
        file.write_bytes(text)
    assert opened  # rows that are damaged are found when they are read
    check(tmp_path, want)


def test_a_file_cut_short_while_it_is_open(tmp_path: Path) -> None:
    schema = _pieces.Schema({"obs": ((6,), "uint8"), "vector": ((3,), "float32")}, codec={"obs": Zstd()})
    pieces.write(tmp_path, 0, schema, {"obs": np.ones((9, 6), np.uint8), "vector": np.ones((9, 3), np.float32)})
    _pieces.finish(tmp_path, [Used(0)])
    with _pieces.DataSet.open(tmp_path, memory=0) as dataset:
        for file in files_of(tmp_path / "pieces"):
            os.truncate(file, 64)
        for leaf in ("obs", "vector"):
            with pytest.raises(fbuf.StoreCorrupted, match="cut short"):
                dataset.read_rows(0, 5, [leaf])
        assert isinstance(dataset.store.last_error, fbuf.StoreCorrupted)


def rewritten(path: Path, change: Any) -> None:
    """dataset.json with a changed second line, and a first that fits it."""
    file = path / "dataset.json"
    value = json.loads(file.read_bytes().splitlines()[1])
    body = json.dumps(change(value), separators=(",", ":")).encode()
    head = {"format": "fbuf data set", "version": 1, "bytes": len(body), "crc32": zlib.crc32(body)}
    file.write_bytes(json.dumps(head, separators=(",", ":")).encode() + b"\n" + body + b"\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda v: [],
        lambda v: {**v, "more": 1},
        lambda v: {**v, "version": 2},
        lambda v: {**v, "pieces": []},
        lambda v: {**v, "pieces": v["pieces"] * 2},
        lambda v: {**v, "pieces": [[0, "../../etc", 0, 3, False]]},
        lambda v: {**v, "pieces": [["../x", *v["pieces"][1][1:]]]},
        lambda v: {**v, "pieces": [[*v["pieces"][1][:2], 0, 1 << 60, False]]},
        lambda v: {**v, "pieces": [[*v["pieces"][1][:2], 0, 4, False]]},
        lambda v: {**v, "pieces": [[*v["pieces"][1][:2], 2, 1, False]]},
        lambda v: {
            **v,
            "schema": {"leaves": [["obs", [1 << 29], "uint8", ["zstd", 1, 4, 16, True]]], "structure": None},
        },
        lambda v: {**v, "schema": {"leaves": [["obs", [6, 6], "uint8", ["raw"]]], "structure": None}},
        lambda v: {**v, "schema": {"leaves": [["obs", [6, 6], "int8", ["zstd", 1, 5, 16, True]]], "structure": None}},
        lambda v: {**v, "schema": {"leaves": [["action", [], "bool", ["raw"]]], "structure": None}},
        lambda v: {**v, "schema": {"leaves": [["reward", [2], "float32", ["raw"]]], "structure": None}},
        lambda v: {**v, "schema": {"leaves": [["obs", [6, 6], "uint8", ["pickle"]]], "structure": None}},
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, change: Any) -> None:
    pieces.make(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises((fbuf.StoreCorrupted, FileNotFoundError)):
        _pieces.DataSet.open(tmp_path).read_rows(0, 1)


def _index(name: str, change: Any) -> Any:
    def altered(arrays: dict[str, Any]) -> None:
        arrays[f"rows/obs/{name}"] = change(np.array(arrays[f"rows/obs/{name}"]))

    return altered


def _set(name: str, value: Any) -> Any:
    return lambda arrays: arrays.update({f"rows/{name}": value})


@pytest.mark.parametrize(
    "change",
    [
        _index("address", lambda a: a + np.uint64(1 << 30)),
        _index("address", lambda a: a[:-1]),
        _index("address", lambda a: a.astype(np.int64)),
        _index("length", lambda a: a * 0),
        _index("length", lambda a: a * 0 + np.uint32(0xFFFFFFFF)),
        _index("length", lambda a: a + np.uint32(1)),
        _index("checksum", lambda a: a + np.uint32(1)),
        _index("dictionary", lambda a: a + np.uint16(7)),
        _index("state", lambda a: a * 0 + 5),
        _index("span", lambda a: a * 2),
        _index("span", lambda a: a * 0 - 1),
        _index("payload", lambda a: a[:-1]),
        _set("obs/dictionary_length", np.array([-1])),
        _set("obs/dictionary_slot", np.array([1, 1], np.uint16)),
        _set("few/codes", np.full(9, 200, np.uint8)),
        _set("few/codes", np.zeros(8, np.uint8)),
        _set("few/palette", np.zeros(0, np.uint32)),
        _set("few/palette", np.zeros(300, np.uint32)),
        _set("few/palette", np.zeros(3, np.uint64)),
        _set("flag/bits", np.zeros(1, np.uint8)),
        _set("flag/bits", np.zeros(1 << 12, np.uint8)),
        _set("vector/values", np.zeros((9, 4), np.float32)),
        _set("vector/values", np.zeros((9, 3), np.int32)),
        lambda arrays: arrays.pop("rows/vector/values"),
        lambda arrays: arrays.pop("rows/obs/address"),
    ],
)
def test_a_hostile_piece_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Every checksum of the file is right, and what it says makes no sense."""
    leaves = {"obs": ((6, 6), "uint8"), "few": ((), "float32"), "flag": ((), "bool"), "vector": ((3,), "float32")}
    schema = _pieces.Schema(leaves, codec={"obs": Zstd(chunk=4)})
    rows = {leaf.name: np.ones((9, *leaf.shape), leaf.dtype) for leaf in schema.leaves}
    write = _files.write

    def altered(path: Any, arrays: dict[str, Any], *args: Any, **settings: Any) -> Any:
        change(arrays)
        return write(path, arrays, *args, **settings)

    monkeypatch.setattr(_files, "write", altered)
    pieces.write(tmp_path, 0, schema, rows)
    _pieces.finish(tmp_path, [Used(0)])
    with pytest.raises(fbuf.StoreCorrupted):
        _pieces.DataSet.open(tmp_path).read_rows(0, 9)


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    pieces.make(tmp_path)
    file = tmp_path / "dataset.json"
    file.write_bytes(file.read_bytes().replace(b'"version":1', b'"version":9', 1))
    with pytest.raises(fbuf.VersionError, match="version 9"):
        _pieces.DataSet.open(tmp_path)
    os.truncate(file, 10)
    with pytest.raises(fbuf.StoreCorrupted, match="first line"):
        _pieces.DataSet.open(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fbuf.StoreCorrupted, match="is a link"):
        _pieces.DataSet.open(tmp_path)


def test_the_page_names_every_key_and_array(tmp_path: Path) -> None:
    pieces.make(tmp_path)
    page = (Path(fbuf.__file__).parent / "FORMAT.md").read_text().split("# The format of a data set")[1]
    keys = set(json.loads((tmp_path / "dataset.json").read_bytes().splitlines()[1]))
    with _files.read(tmp_path / "pieces" / "0") as saved:
        kept = {name.rpartition("/")[2] for name in saved.arrays}
        assert set(saved.meta) == {"piece", "schema", "meta"}
    internal = {"state", "packed", "open", "open_length", "open_checksum"}
    internal |= {"dictionary_slot", "dictionary_length", "dictionary_checksum"}
    for name in keys | (kept - internal):
        assert f"`{name}`" in page, name


def test_deep_and_long_json_is_refused(tmp_path: Path) -> None:
    for body in (b"[" * 100 + b"]" * 100, b"[" + b"1," * (1 << 23) + b"1,1]"):
        head = b'{"format":"fbuf data set","version":1,"bytes":%d,"crc32":%d}\n' % (len(body), zlib.crc32(body))
        with pytest.raises(ValueError, match="deep|values"):
            _manifest.decode(head + body + b"\n")
