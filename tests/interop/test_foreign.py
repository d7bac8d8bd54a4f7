"""Every reader against files and buffers that the library itself wrote, row by row, through both sinks."""

import ast
import dataclasses

import h5py
import jax
import numpy as np
import pytest

import fbuf
from fbuf import interop
from tests.support.foreign import FILES, world
from tests.support.foreign.check import check_draws
from tests.support.foreign.check import check_rows as check
from tests.support.refusals import raises
from tests.support.tables import by_tier

TIANSHOU = {
    "part": ([world.steps(25)], True),
    "wrapped": ([world.steps(57)[-40:]], True),
    "prioritized": ([world.steps(57)[-40:]], True),
    "ignore": ([world.steps(57)[-40:]], False),
    "vector": ([world.steps(11, 0), world.steps(33, 1)[-20:], []], True),
}


@pytest.mark.parametrize("name", TIANSHOU)
def test_tianshou(name, tmp_path):
    lanes, final = TIANSHOU[name]
    check(lambda: interop.from_file(FILES / f"tianshou_{name}.hdf5"), lanes, tmp_path, final)


@pytest.mark.parametrize("name", ["continuous", "discrete", "tuple"])
def test_d3rlpy(name, tmp_path):
    # An episode of one step that ran out of time has no transition, and d3rlpy does not write it.
    episodes = [steps for steps in world.episodes(7) if len(steps) > 1 or steps[0].terminated]
    steps = [step for steps in episodes for step in steps]
    check(lambda: interop.from_file(FILES / f"d3rlpy_{name}.h5"), [steps], tmp_path, final=False)


@pytest.mark.parametrize("name", by_tier("", more=["_regular", "_compact"]))
def test_ogbench(name, tmp_path):
    steps = [step for steps in world.episodes(6) for step in steps]
    late = [dataclasses.replace(s, terminated=False, truncated=s.terminated or s.truncated, reward=1.0) for s in steps]
    with np.load(FILES / f"ogbench{name}.npz") as file:
        arrays = dict(file)
    rewards = {"rewards": np.ones(len(arrays["terminals"]), np.float32)}
    check(lambda: interop.from_ogbench(arrays | rewards), [late], tmp_path)
    mask = {"masks": np.ones(len(arrays["terminals"]))}
    mask["masks"][2] = 0  # a success
    ended = [dataclasses.replace(step, terminated=i == 2) for i, step in enumerate(late)]
    check(lambda: interop.from_ogbench(arrays | rewards | mask), [ended], tmp_path / "b")
    buffer, state = interop.from_ogbench(FILES / f"ogbench{name}.npz").save(tmp_path / "c", view=fbuf.views.Row())
    rows = buffer.rows(state).data
    assert rows["obs"].tolist() == [s.obs.tolist() for s in late]
    assert rows["final_obs"].tolist() == [s.next_obs.tolist() if s.truncated else [0, 0, 0] for s in late]


@pytest.mark.parametrize("mode", by_tier(0, more=[1, 2]))
def test_robomimic(mode, tmp_path):
    demos, path = world.episodes(6), FILES / f"robomimic_{mode}.hdf5"
    raises(ValueError, "ends is None, .*whether dones are.*Pass ends='terminated'", interop.from_file, path)
    ends = "terminated" if mode == 0 else "trajectory"
    for mask, chosen in ((None, demos), ("train", [demos[0], demos[2], demos[5]]), ("valid", [demos[1]])):
        steps = [step for demo in chosen for step in demo]
        if mode:
            steps = [dataclasses.replace(s, terminated=False, truncated=s.terminated or s.truncated) for s in steps]
        check(lambda m=mask: interop.from_file(path, ends=ends, mask=m), [steps], tmp_path / str(mask))
    raises(ValueError, "mask is 'x'; expected one of train, valid", interop.from_file, path, ends=ends, mask="x")


@pytest.mark.parametrize("name", ["part", "wrapped"])
def test_skrl(name, tmp_path):
    number = 9 if name == "part" else 33
    lanes = [world.steps(number, lane)[-20:] for lane in range(2)]
    there = {"position": number % 20, "filled": number > 20}
    check(lambda: interop.from_skrl(FILES / f"skrl_{name}.npz", **there), lanes, tmp_path)
    if name == "part":
        raises(ValueError, "was never written", interop.from_skrl, FILES / "skrl_part.npz", position=9, filled=True)
        raises(ValueError, "was never written", interop.from_skrl, FILES / "skrl_part.npz", position=12, filled=False)


@pytest.mark.more
def test_skrl_steps_that_reset_are_not_drawn():
    """gymnasium's vector environments reset in steps, which skrl stores: every fourth one here."""
    step = np.arange(12.0, dtype=np.float32)
    leaves = {"observations": step, "actions": step, "rewards": step, "next_observations": step + 1}
    memory = leaves | {"terminated": step % 4 == 2, "truncated": step < 0}
    memory = {name: leaf.reshape(12, 1, 1) for name, leaf in memory.items()}
    buffer = fbuf.Buffer(12, view=fbuf.views.Transition(autoreset="next_step"))
    buffer, state = interop.from_skrl(memory, position=12, filled=False).into(buffer)
    data = buffer.sample(state, jax.random.key(0), 256)[1].data
    drawn = np.stack([data["obs"][:, 0], data["next_obs"][:, 0], data["discount"] > 0], axis=1)
    assert {*map(tuple, drawn.tolist())} == {(t, t + 1, t % 4 != 2) for t in range(12) if t % 4 != 3}


@pytest.mark.parametrize("name", ["part", "wrapped"])
def test_cpprb(name, tmp_path):
    steps = world.steps(25) if name == "part" else world.steps(57)[-40:]
    with np.load(FILES / f"cpprb_{name}.npz") as file:
        arrays = dict(file)
    there = {"position": 25 if name == "part" else 17, "ends": "terminated"}
    check(lambda: interop.from_cpprb(arrays, **there), [steps], tmp_path)
    raises(ValueError, "nothing says whether done are.*Pass ends=", interop.from_cpprb, arrays, position=0, ends=None)
    saved = FILES / f"cpprb_saved_{name}.npz"
    raises(ValueError, r"holds pickled rows of cpprb.*get_all_transitions\(\)", interop.from_file, saved)


def rlds_steps(episode):
    final = {"observation": episode[-1].next_obs, "action": 9, "reward": 0.0}
    steps = [{"observation": s.obs, "action": s.action, "reward": s.reward} for s in episode] + [final]
    for t, step in enumerate(steps):
        last = t == len(steps) - 1
        step |= {"is_first": t == 0, "is_last": last, "is_terminal": last and episode[-1].terminated, "discount": 1.0}
    return steps


def test_rlds(tmp_path):
    episodes = world.episodes(7)
    nested = [{"steps": rlds_steps(episode)} for episode in episodes]
    single = [step for episode in nested for step in episode["steps"]]
    batched = [{"steps": {n: np.stack([s[n] for s in e["steps"]]) for n in e["steps"][0]}} for e in nested]
    for number, data in enumerate((nested, single, batched)):
        steps = [step for episode in episodes for step in episode]
        check(lambda d=data: interop.from_rlds(d), [steps], tmp_path / str(number))
    with pytest.raises(ValueError, match=r"of unknown length; expected a buffer .*into\(fbuf.Buffer\(n\)\)"):
        interop.from_rlds(nested).into()
    cut = single[:3]  # before is_last
    buffer, state = interop.from_rlds(cut).save(tmp_path / "cut", view=fbuf.views.Row())
    assert buffer.capacity == 2 and buffer.rows(state).data["truncated"].tolist() == [False, True]


@pytest.mark.more
def test_transitions_are_drawn(tmp_path):
    """One stream and lanes of different lengths; every format in tests/interop/test_foreign.py."""
    lanes, final = TIANSHOU["vector"]
    check_draws(lambda: interop.from_file(FILES / "tianshou_vector.hdf5"), lanes, tmp_path / "a", final)


def test_other_formats_are_refused_by_name(tmp_path):
    for ending, words in {
        "pkl": r"a pickle, which may run code.*from_sb3\(model.replay_buffer\)",
        "pt": "a torch pickle",
        "parquet": "one parquet file.*LeRobot.*RLlib",
        "msgpack": "a checkpoint of dopamine",
    }.items():
        (tmp_path / f"x.{ending}").write_bytes(b"")
        raises(ValueError, words, interop.from_file, tmp_path / f"x.{ending}")
    raises(ValueError, "a folder without meta/info.json", interop.from_file, tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/metadata.json").write_text("{}")
    raises(ValueError, r"a Minari data set. Use fbuf.datasets.minari\(", interop.from_file, tmp_path)


@pytest.mark.parametrize(
    ("name", "edits", "words"),
    [
        ("tianshou_part", {"_size": 26}, "_size is 26 and _insertion_idx 25 of 40 slots"),
        ("tianshou_wrapped", {"_insertion_idx": 41}, "_insertion_idx 41 of 40 slots"),
        ("tianshou_vector", {"_lengths": [11, 21, 0]}, "the counts of its rows are not those of 60 slots"),
        ("tianshou_vector", {"last_index": [9, 32, 40]}, "the newest rows are not where its counts say"),
        ("d3rlpy_continuous", {"num_episodes": 5}, "has 'actions_5', but num_episodes is 5"),
        ("d3rlpy_continuous", {"num_episodes": 7}, "6 of 7 episodes have 'action'"),
        (
            "d3rlpy_continuous",
            {"rewards_1": np.zeros((5, 1), np.float32)},
            "'reward' of episode 1 has 5 rows; expected 6",
        ),
        ("robomimic_1", {"data/demo_2/rewards": np.zeros(5)}, "'reward' of episode 2 has 5 rows; expected 6"),
        ("robomimic_1", {"mask/train": np.array([b"demo_9"])}, "mask/train names 'demo_9', which is missing"),
    ],
)
def test_counts_that_contradict_the_rows_are_refused(name, edits, words, tmp_path):
    file = next(FILES.glob(f"{name}.h*5"))
    path = tmp_path / file.name
    path.write_bytes(file.read_bytes())
    with h5py.File(path, "a") as there:
        for key, value in edits.items():
            if key in there.attrs:
                there.attrs[key] = value
            else:
                del there[key]
                there[key] = value
    more = {"ends": "trajectory", "mask": "train"} if name.startswith("robomimic") else {}
    if "data/demo_2/rewards" in edits:
        more.pop("mask")
    raises(ValueError, words, interop.from_file, path, **more)


def test_arguments_that_a_file_does_not_use_are_refused():
    d3rlpy = FILES / "d3rlpy_continuous.h5"
    for name, value in {"lanes": 2, "mask": "train", "ends": "terminated", "episode_end": ("done",)}.items():
        with pytest.raises(ValueError, match=rf"{name} is .*, which the format 'd3rlpy buffer' has no"):
            interop.from_file(d3rlpy, **{name: value})
    rows = interop.from_file(d3rlpy).count()["rows"]
    assert interop.from_file(d3rlpy, rows=rows - 1).count()["rows"] == rows - 1
    with pytest.raises(ValueError, match=f"rows is {rows + 1}; expected an int from 1 to {rows}"):
        interop.from_file(d3rlpy, rows=rows + 1).into()
    with pytest.raises(ValueError, match="fields renames 'obs', whose next observations would be lost"):
        interop.from_file(FILES / "tianshou_part.hdf5", fields={"obs": "state", "action": "action"})


def test_arguments_that_rows_of_to_file_do_not_use_are_refused(tmp_path):
    buffer, state = interop.from_arrays({"a": np.arange(4)}).into()
    interop.to_file(tmp_path / "a.npz", buffer, state)
    for name, value in {"lanes": 2, "mask": "train", "ends": "terminated"}.items():
        with pytest.raises(ValueError, match=rf"{name} is .*, which the format 'fbuf rows' has no use for"):
            interop.from_file(tmp_path / "a.npz", **{name: value})


def test_ends_without_flags_are_refused(tmp_path):
    path = tmp_path / "robomimic_1.hdf5"
    path.write_bytes((FILES / path.name).read_bytes())
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            del demo["dones"]
    with pytest.raises(ValueError, match="ends is 'terminated', but there are no dones"):
        interop.from_file(path, ends="terminated")
    assert interop.from_file(path).count()["terminated"] == 0


def test_leaves_that_are_not_taken_may_have_any_length(tmp_path):
    path = tmp_path / "robomimic_1.hdf5"
    path.write_bytes((FILES / path.name).read_bytes())
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            demo["camera_times"] = np.zeros(3)
            demo["notes"] = "text"
    rows = interop.from_file(FILES / path.name, ends="trajectory").count()
    assert interop.from_file(path, ends="trajectory").count() == rows
    with pytest.raises(ValueError, match="'camera_times' of episode 0 has 3 rows"):
        interop.from_file(path, ends="trajectory", fields=["obs/flat", "action", "camera_times"])
    with np.load(FILES / "ogbench_regular.npz") as file:
        data = dict(file)
    expected = interop.from_ogbench(data).count()
    np.savez(tmp_path / "a.npz", **data, version=2, notes=np.array(["a"]))
    assert interop.from_ogbench(tmp_path / "a.npz").count() == expected
    with np.load(FILES / "skrl_part.npz") as file:
        data = dict(file)
    expected = interop.from_skrl(data, position=9, filled=False).count()
    assert interop.from_skrl(data | {"seeds": np.zeros(2)}, position=9, filled=False).count() == expected
    rows = {"obs": np.zeros((5, 2)), "act": np.zeros((5, 1)), "rew": np.zeros((5, 1)), "done": np.zeros((5, 1))}
    assert interop.from_cpprb(rows | {"seeds": np.zeros(2)}, position=0, ends="terminated").count()["rows"] == 5


def test_a_demonstration_that_is_missing_is_noticed(tmp_path):
    path = tmp_path / "robomimic_1.hdf5"
    path.write_bytes((FILES / path.name).read_bytes())
    with h5py.File(path, "a") as file:
        del file["data/demo_2"]
    raises(ValueError, "rows; expected total, 23", interop.from_file, path, ends="trajectory")


def test_fields_may_have_the_names_of_the_file():
    path, fields = FILES / "robomimic_1.hdf5", ["obs/flat", "actions"]
    names = interop.from_file(path, ends="trajectory").columns
    fields = [next(name for name in names if name.startswith("obs/")), "actions"]
    for given in (fields, tuple(fields), {fields[0]: fields[0], "actions": "action"}):
        example = interop.from_file(path, ends="trajectory", fields=given).stored()[0]
        assert {"action", "terminated", "truncated"} < set(example) and "reward" not in example
    with pytest.raises(TypeError, match="fields is 'ted'; expected a dict, or names"):
        interop.from_file(path, ends="trajectory", fields="ted")


def test_rlds_without_its_flags_among_fields_keeps_them():
    data = [{"steps": rlds_steps(episode)} for episode in world.episodes(7)]
    steps = [step for episode in world.episodes(7) for step in episode]
    for fields in (["obs", "action"], ["observation", "action"], {"observation": "obs", "action": "a"}):
        buffer, state = interop.from_rlds(data, fields=fields).into(fbuf.Buffer(len(steps)))
        rows = buffer.rows(state).data
        assert set(rows) == {"obs", "final_obs", "terminated", "truncated", "a" if "a" in rows else "action"}
        assert rows["terminated"].tolist() == [step.terminated for step in steps]
        assert rows["final_obs"].tolist() == [
            s.next_obs.tolist() if s.terminated or s.truncated else [0] * 3 for s in steps
        ]
    with pytest.raises(ValueError, match="fields has 'x', which is missing"):
        interop.from_rlds(data, fields=["x"]).into(fbuf.Buffer(200))


def test_rows_of_an_iterable_are_not_counted(tmp_path):
    data = [{"steps": rlds_steps(episode)} for episode in world.episodes(7)]
    for source in (interop.from_rlds(data), interop.from_arrays([{"a": np.zeros(3)}])):
        with pytest.raises(ValueError, match=r"is read once. Save it, and see fbuf.datasets.info\(path\)"):
            source.count()
    buffer, state = interop.from_rlds(data).save(tmp_path / "a")
    assert fbuf.datasets.info(tmp_path / "a").rows == buffer.capacity


def test_objects_of_hdf5_that_are_no_data_sets_are_not_overlooked(tmp_path):
    path = tmp_path / "tianshou_part.hdf5"
    for other in (lambda file: np.dtype("f4"), lambda file: file.create_group("other")):
        path.write_bytes((FILES / path.name).read_bytes())
        with h5py.File(path, "a") as file:
            del file["_meta/obs_next"]
            file["_meta/obs_next"] = other(file)
        with pytest.raises(ValueError, match="'_meta/obs_next' is empty, or a type; expected a data set"):
            interop.from_file(path).into()
    with h5py.File(path, "a") as file:
        del file["_meta/obs_next"]
        file["_meta/obs_nexu"] = np.zeros((40, 3), np.float32)
    with pytest.raises(ValueError, match="'_meta/obs_nexu', which is not of tianshou") as caught:
        interop.from_file(path)
    fields = ast.literal_eval(str(caught.value).partition("fields=")[2].rstrip("."))
    assert interop.from_file(path, fields=fields).count()["rows"] == 25


def test_text_of_variable_length_is_not_read(tmp_path):
    """HDF5 does not return from some damaged text."""
    reader = interop._hdf5.Reader(FILES / "d3rlpy_continuous.h5", "x")
    assert {"columns", "version"} < set(reader.columns)
    for name in ("columns", "version"):
        raises(ValueError, f"no data set '{name}' of this kind", reader.array, name)
    reader.close()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["fbuf"] = file.attrs["_size"] = "text"
    reader = interop._hdf5.Reader(tmp_path / "a.h5", "x")
    assert reader.attribute("_size") is None
    raises(ValueError, "attribute 'fbuf' is not text of a fixed length", reader.about)
    reader.close()


def test_nothing_to_read_is_said(tmp_path):
    memory = {
        name: np.zeros((4, 0, 1), np.float32) for name in ("states", "actions", "rewards", "terminated", "truncated")
    }
    with pytest.raises(ValueError, match=r"\[4, 0, 1\].*; expected \[memory_size, num_envs, size\]"):
        interop.from_skrl(memory, position=1, filled=False)
    path = tmp_path / "robomimic_1.hdf5"
    path.write_bytes((FILES / path.name).read_bytes())
    with h5py.File(path, "a") as file:
        file["mask/none"] = np.array([], "S8")
    with pytest.raises(ValueError, match="no demonstration with actions; expected some in those of mask/none"):
        interop.from_file(path, ends="terminated", mask="none")
    with pytest.raises(ValueError, match="ends is 'over', but nothing says whether dones are terminations"):
        interop.from_file(path, ends="over")


@pytest.mark.parametrize("position", [-1, 99, 1.5, None])
def test_positions_outside_a_ring_are_refused(position):
    rows = {"obs": np.zeros((5, 2)), "act": np.zeros((5, 1)), "rew": np.zeros((5, 1)), "done": np.zeros((5, 1))}
    with pytest.raises(ValueError, match="expected buffer.get_next_index"):
        interop.from_cpprb(rows, position=position, ends="terminated")


def test_iterables_take_neither_priorities_nor_lanes():
    data = [{"obs": np.zeros((3, 2), np.float32)}]
    for given in ({"priority": np.ones(3)}, {"lanes": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} is given, but data is an iterable"):
            interop.from_arrays(iter(data), **given)
