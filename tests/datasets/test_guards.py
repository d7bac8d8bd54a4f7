"""Arrays that look like another library's storage are refused, and what the errors advise is right."""

import ast
import re

import h5py
import numpy as np
import pytest

import fbuf
from tests.support.datasets_oracle import from_arrays
from tests.support.foreign import FILES
from tests.support.refusals import raises
from tests.support.tables import by_tier

ROW = fbuf.views.Row()


def loaded(name):
    with np.load(FILES / name) as file:
        return {key: file[key] for key in file}


def flat(n=12, zeros=0):
    t = np.arange(1, n + 1, dtype=np.float32)
    rows = {"observations": t[:, None], "actions": t, "rewards": t, "terminals": t % 4 == 0, "timeouts": t < 0}
    return {name: np.concatenate([leaf, np.zeros((zeros, *leaf.shape[1:]), leaf.dtype)]) for name, leaf in rows.items()}


@pytest.mark.parametrize("name", by_tier("ogbench.npz", more=["ogbench_regular.npz", "ogbench_compact.npz"]))
def test_terminals_without_time_limits_need_a_declaration(name, tmp_path):
    data = loaded(name)
    for source in (data, iter([data]), FILES / name):
        raises(
            ValueError,
            "'terminals' comes without|'valids' is a leaf of OGBench",
            from_arrays,
            source,
            path=tmp_path / "a",
        )
    rows = {"observations": data["observations"], "terminals": data["terminals"]}
    for number, (ends, leaf) in enumerate({"terminated": "terminated", "trajectory": "truncated"}.items()):
        buffer, state = from_arrays(rows, path=tmp_path / str(number), ends=ends, view=ROW)
        found = buffer.rows(state).data
        assert found[leaf].tolist() == (data["terminals"] > 0).tolist()
        assert not found["truncated" if ends == "terminated" else "terminated"][:-1].any()
        del state
    raises(ValueError, "ends is 'x'", from_arrays, rows, path=tmp_path / "a", ends="x")
    raises(ValueError, "no leaf is 'terminals'", from_arrays, {"a": np.ones(3)}, path=tmp_path / "a", ends="terminated")
    from_arrays(flat(), path=tmp_path / "b", view=ROW)  # with timeouts nothing is asked


def test_slots_of_a_ring_are_refused(tmp_path):
    with h5py.File(FILES / "tianshou_wrapped.hdf5") as file:
        raises(ValueError, "of a ring.*from_file", from_arrays, file, path=tmp_path / "a")
        raises(
            ValueError,
            "'_meta/.*' is of a ring",
            from_arrays,
            {"_meta": file["_meta"]},
            path=tmp_path / "a",
            fields=["_meta/obs"],
        )
    raises(ValueError, "'_size' is of a ring", from_arrays, flat() | {"_size": np.zeros(12)}, path=tmp_path / "a")


def test_own_leaves_named_like_a_cursor_are_taken_if_all_are_named(tmp_path):
    rows = flat() | {"last_index": np.arange(12)}
    np.savez(tmp_path / "a.npz", **rows)
    for number, source in enumerate((rows, tmp_path / "a.npz", iter([rows]))):
        with pytest.raises(ValueError, match="name all leaves if it is yours") as caught:
            from_arrays(iter([rows]) if number == 2 else source, path=tmp_path / "b")
        advice = ast.literal_eval(str(caught.value).partition("fields=")[2].rstrip(".").replace(", ...}", "}"))
        fields = {name: fbuf.datasets._arrays.episodes.KNOWN.get(name, name) for name in flat()} | advice
        buffer, state = from_arrays(source, path=tmp_path / str(number), fields=fields, view=ROW)
        assert buffer.rows(state).data["last_index"].tolist() == list(range(12))
        del state


@pytest.mark.parametrize("zeros", by_tier(2, more=[7]))
def test_slots_that_were_never_written_are_refused(zeros, tmp_path):
    np.savez(tmp_path / "a.npz", **flat(zeros=zeros))
    for number, source in enumerate((flat(zeros=zeros), tmp_path / "a.npz")):
        with pytest.raises(ValueError, match=f"rows 12 to {11 + zeros} are zeros in every leaf") as caught:
            from_arrays(source, path=tmp_path / "b")
        advice = re.findall(r"rows=(\d+)", str(caught.value))
        del caught  # the file is closed with its reader, and not by a collection, which may finalize the file first
        for wanted in map(int, advice):
            buffer, state = from_arrays(source, path=tmp_path / f"{number}{wanted}", rows=wanted, view=ROW)
            assert buffer.rows(state).data["reward"].tolist() == flat(zeros=wanted - 12)["rewards"].tolist()
            del state


def test_zeros_that_may_be_steps_are_taken(tmp_path):
    from_arrays(flat(zeros=1), path=tmp_path / "a", view=ROW)  # the last step may well be zeros
    from_arrays({name: 0 * leaf for name, leaf in flat().items()}, path=tmp_path / "b", view=ROW)
    from_arrays({"x": np.array([1.0, 0, 0, 0], np.float32)}, path=tmp_path / "c", episode_end=(), view=ROW)
    raises(ValueError, "rows is 13; expected an int from 1 to 12", from_arrays, flat(), path=tmp_path / "d", rows=13)
    raises(ValueError, "rows is 1, but data is an iterable", from_arrays, iter([flat()]), path=tmp_path / "d", rows=1)
