"""Arguments that do not fit raise before an actor starts, or a call leaves the client."""

import re

import jax
import numpy as np
import pytest

import fbuf
from fbuf import samplers, storages, transforms, views, writers
from fbuf.ray._checks import check_path, check_service, check_shards
from tests.support.ray_shards import clients
from tests.support.refusals import raises

PLAIN = fbuf.Buffer(96)
SERVICE = [
    (fbuf.prioritized, {}, "buffer is function; expected a Buffer"),
    (PLAIN, {"shards": 0}, "shards is 0; expected an int >= 1"),
    (PLAIN, {"save_every": 3}, "save_every is 3, but path is None. Use path='/data/replay'"),
    (PLAIN, {"limit": fbuf.limits.queue(4), "shards": 2}, "shards that wait for one another could deadlock"),
    (fbuf.Buffer(8, storage=storages.Ragged()), {}, "has no arrays to send"),
    (fbuf.Buffer(8, storage=storages.Memmap("/data/rows")), {}, "the storage's path is '/data/rows'"),
    (fbuf.Buffer(8, prefetch=1, batch_size=4), {}, "prefetch is 1; expected 0"),
]
STEPS = views.Transition(autoreset="same_step")
SHARDS = [
    (fbuf.Buffer(64), 3, "capacity is 64, not a multiple of the 3 shards. Use 63 or 66"),
    (fbuf.Buffer(24, lanes=2), 3, "lanes is 2, not a multiple of the 3 shards. Use 3"),
    (fbuf.Buffer(24, writer=writers.Reservoir()), 3, "needs all rows in one place"),
    (fbuf.Buffer(24, sampler=samplers.Epoch()), 3, "draws without replacement, which several shards cannot do"),
    (
        fbuf.Buffer(24, sampler=samplers.Ranked()),
        3,
        "ranks the rows of the whole. Use samplers.Prioritized(), or shards=1.",
    ),
    (fbuf.Buffer(24, sampler=samplers.Prioritized(on="host")), 3, "expected on='device'. Use shards=1."),
    (fbuf.Buffer(24, sampler=samplers.Prioritized(uniform=0.1)), 3, "expected uniform=None. Use shards=1."),
    (
        fbuf.Buffer(24, sampler=samplers.Prioritized(replace=False)),
        3,
        "draws without replacement, which several shards cannot",
    ),
    (fbuf.Buffer(24, view=STEPS), 3, "without lanes those are on several shards. Use lanes=3"),
    (fbuf.Buffer(24, on_read=transforms.Normalize("obs")), 3, "would keep statistics of one shard. Use shards=1."),
]


@pytest.mark.parametrize(("buffer", "options", "message"), SERVICE, ids=[m[:20] for *_, m in SERVICE])
def test_a_service_that_cannot_work_is_refused(buffer, options, message):
    with pytest.raises((TypeError, ValueError), match=f"^RayReplay: .*{re.escape(message)}"):
        check_service(buffer, **{"shards": 1, "limit": None, "path": None, "save_every": 0} | options)


@pytest.mark.parametrize(("buffer", "shards", "message"), SHARDS, ids=[m[:20] for *_, m in SHARDS])
def test_a_buffer_that_cannot_be_split_is_refused(buffer, shards, message):
    check_service(buffer, shards, None, None, 0)
    assert check_shards(buffer, 1) is buffer
    raises((TypeError, ValueError), f"^RayReplay: .*{re.escape(message)}", check_shards, buffer, shards)


def test_checkpoints_of_another_number_of_shards_are_refused(tmp_path):
    for name in ("shard-00000", "shard-00000.lock", "shard-00001"):
        (tmp_path / name).mkdir()
    check_path(tmp_path / "new", 3)
    for shards in (2, 3):  # a shard of three may have ended before it was saved
        check_path(tmp_path, shards)
    with pytest.raises(ValueError, match="has checkpoints of 2 shards, but shards is 1. Use shards=2, or another path"):
        check_path(tmp_path, 1)


def test_invalid_calls_do_not_leave_the_client():
    example = {"obs": np.zeros(3, np.float32)}
    uniform = clients(PLAIN, example)[1]()
    link, client = clients(fbuf.prioritized(96), example, shards=2)
    remote, rows = client(), {"obs": np.ones((4, 3), np.float32)}
    link.calls.clear()

    def index(**other):
        return fbuf.Index(**dict.fromkeys(("slot", "generation", "shard", "birth"), [0]) | other)

    calls = [
        (lambda: remote.extend({"obs": np.ones((4, 2))}), r"leaf 'obs' has shape \[4, 2\]"),
        (lambda: remote.extend({"obs": np.full((4, 3), 1e300)}), "which float32 cannot hold"),
        (lambda: remote.extend({"action": rows["obs"]}), "leaf 'obs' is missing"),
        (lambda: remote.extend(rows, mask=np.ones(3, bool)), r"mask has shape \[3\]; expected \[4\]"),
        (lambda: remote.extend(rows, priority=np.ones((4, 1))), r"priority has shape \[4, 1\]; expected \[4\]"),
        (
            lambda: remote.update_priority(fbuf.Index(0, 0), 1.0),
            "an Index of one buffer; expected one of shard, birth.",
        ),
        (
            lambda: remote.extend(rows, priority=np.array([None] * 4)),
            "priority is object; expected a floating or integer",
        ),
        (
            lambda: remote.extend(rows, priority=[1, np.nan, np.inf, 1]),
            r"2 values that are not finite; no row was added.*np.nan_to_num\(np.float32\(priority\)\)",
        ),
        (lambda: remote.extend({"obs": np.ma.ones((4, 3), np.float32)}), "leaf 'obs' is a masked array"),
        (lambda: uniform.extend(rows, priority=np.ones(4)), r"Uniform\(\) has no priorities"),
        (lambda: uniform.update_priority(index(), [1.0]), r"Uniform\(\) has no priorities"),
        (lambda: remote.extend(rows, priority=np.ones(4, bool)), "priority is bool; expected a floating or integer"),
        (lambda: remote.extend(rows, mask=np.ones(4)), "mask is float32; expected a boolean"),
        (lambda: remote.extend(rows, mask=np.ones(4, np.int32)), "mask is int32; expected a boolean"),
        (lambda: remote.update_priority(index(slot=[2**32 + 1]), [1.0]), "slot is 4294967297, which int32 cannot hold"),
        (lambda: remote.update_priority(index(birth=[2**32]), [1.0]), "birth is 4294967296, which uint32 cannot hold"),
        (
            lambda: remote.update_priority(index(generation=[1, 1]), [1.0]),
            r"index.generation has shape \[2\]; expected \[1\]",
        ),
        (lambda: remote.update_priority(index(), None), "td_error is object; expected a floating or integer"),
        (lambda: remote.update_priority(index(), [1e300]), "1 TD error of 1 not finite"),
        (lambda: remote.update_priority(index(), [1.0], eta=2.0), "eta is 2.0; expected one number from 0 to 1"),
        (lambda: remote.sample(0), "batch_size is 0; expected an int >= 1"),
        (lambda: remote.sample(4, uniform=0.1), "expected beta only. Use shards=1"),
        (lambda: remote.sample(4, to="tf"), "to is 'tf'"),
        (lambda: remote.batches(4, to="numpy", device=jax.devices()[0]), "numpy's arrays are in memory"),
        (lambda: remote.batches(4, prefetch=0), "prefetch is 0; expected an int >= 1"),
    ]
    for call, message in calls:
        raises((TypeError, ValueError), f"^Client.*{message}", call)
    remote.extend(rows, priority=[1, np.nan, 1, 1], mask=[True, False, True, True])
    with np.errstate(over="ignore"):  # the remedy of the error
        remote.extend(rows, priority=np.nan_to_num(np.float32([1, np.nan, np.inf, 1e300])))
    remote.flush()
    link.calls = [call for call in link.calls if call != "extend"]
    assert not link.calls
