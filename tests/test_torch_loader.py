"""The loader: the batches of its source, in order, none lost, no thread left behind, and no process that hangs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fbuf  # noqa: E402
from fbuf._prefetch import Prefetch  # noqa: E402
from fbuf._stop import Stop  # noqa: E402
from fbuf.torch import Loader  # noqa: E402

EXAMPLE = {"t": np.float32(0)}


def replay(count: int = 40, **settings: Any) -> fbuf.Replay:
    made = fbuf.Replay(fbuf.Buffer(64, batch_size=8), EXAMPLE, seed=5, **settings)
    if count:
        made.extend({"t": np.arange(count, dtype=np.float32)})
    return made


def drawn(loader: Any) -> list[list[float]]:
    return [batch.data["t"].tolist() for batch in loader]


def no_threads(seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(thread.name == "fbuf.torch.Loader" for thread in threading.enumerate()):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_its_batches_are_those_of_the_replay(prefetch: int) -> None:
    one, other = replay(), replay()
    expected = [other.sample(to="torch").data["t"].tolist() for _ in range(5)]
    assert drawn(Loader(one, steps=5, prefetch=prefetch)) == expected
    assert no_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_under_a_dataloader(prefetch: int) -> None:
    loader = Loader(replay(), 4, steps=3, prefetch=prefetch)
    assert isinstance(loader, torch.utils.data.IterableDataset)
    data = torch.utils.data.DataLoader(loader, batch_size=None)
    assert len(data) == 3
    for _ in range(2):  # epochs
        batches = list(data)
        assert all(isinstance(b, fbuf.Sample) and b.data["t"].shape == (4,) for b in batches) and len(batches) == 3
    assert no_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_over_a_buffer_and_its_state(prefetch: int) -> None:
    buffer = fbuf.Buffer(40, sampler=fbuf.samplers.Epoch(), batch_size=8)
    state = buffer.extend(buffer.init(EXAMPLE), {"t": np.arange(40, dtype=np.float32)})
    before = [np.array(x) for x in jax.tree.leaves(state)]
    loader = Loader(buffer, state=state, steps=5, prefetch=prefetch, seed=1)
    first, second = drawn(loader), drawn(loader)
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == list(range(40))  # each row once
    assert first != second
    assert drawn(Loader(buffer, state=state, steps=5, prefetch=0, seed=1)) == first
    assert all(np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(state), strict=True))
    assert int(buffer.size(loader.state)) == 40


def test_what_was_drawn_ahead_is_handed_out_by_the_next_iteration() -> None:
    buffer = fbuf.Buffer(40, sampler=fbuf.samplers.Epoch(), batch_size=8)
    state = buffer.extend(buffer.init(EXAMPLE), {"t": np.arange(40, dtype=np.float32)})
    expected = drawn(Loader(buffer, state=state, steps=5, prefetch=0))
    loader = Loader(buffer, state=state, prefetch=3)
    out = []
    for _ in range(2):  # broken off twice
        batches = iter(loader)
        out += [next(batches).data["t"].tolist() for _ in range(2)]
        batches.close()
        with pytest.raises(StopIteration):
            next(batches)
    loader.steps = 1
    assert out + drawn(loader) == expected


def test_an_iteration_that_is_forgotten_ends_its_thread() -> None:
    batches = iter(Loader(replay(), prefetch=2))
    next(batches)
    del batches
    gc.collect()
    assert no_threads()
    for _ in Loader(replay(), prefetch=2):
        break
    gc.collect()
    assert no_threads()


def test_no_more_is_drawn_than_asked_for() -> None:
    source = fbuf.Replay(fbuf.uniform(100), {"t": 0}, limit=fbuf.limits.at_most(1000))
    source.extend({"t": np.arange(8)})
    assert len(list(Loader(source, 4, steps=3, prefetch=8))) == 3 and source.pace.drawn == 3 * 4
    batches = iter(Loader(source, 4, prefetch=2))
    next(batches)
    time.sleep(0.1)
    assert source.pace.drawn <= (3 + 1 + 2) * 4
    batches.close()
    assert list(Loader(source, 4, steps=0)) == [] and no_threads()


def test_errors_of_the_thread_are_raised_once_and_in_turn() -> None:
    def fails(batch: Any) -> Any:
        fails.calls += 1  # type: ignore[attr-defined]
        if fails.calls == 3:  # type: ignore[attr-defined]
            raise KeyError("third")
        return batch

    for prefetch in (0, 2):
        fails.calls = 0  # type: ignore[attr-defined]
        batches = iter(Loader(replay(), prefetch=prefetch, transform=fails))
        next(batches), next(batches)
        with pytest.raises(KeyError, match="third"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
    for prefetch in (0, 1):
        with pytest.raises(ValueError, match="nothing to draw"):
            next(iter(Loader(replay(0), prefetch=prefetch)))
        buffer = fbuf.Buffer(8, batch_size=2)
        with pytest.raises(ValueError, match="nothing to draw"):
            next(iter(Loader(buffer, state=buffer.init(EXAMPLE), prefetch=prefetch)))
    assert no_threads()


def test_an_error_nobody_took_is_raised_by_close() -> None:
    def fails(batch: Any) -> Any:
        raise KeyError("first")

    batches = iter(Loader(replay(), transform=fails))
    time.sleep(0.2)
    with pytest.raises(KeyError, match="first"):
        batches.close()
    batches.close()


def test_two_iterators_share_the_draws() -> None:
    buffer = fbuf.Buffer(64, sampler=fbuf.samplers.Epoch(), batch_size=4)
    state = buffer.extend(buffer.init(EXAMPLE), {"t": np.arange(64, dtype=np.float32)})
    loader = Loader(buffer, state=state, prefetch=1, steps=8)
    one, other = iter(loader), iter(loader)
    rows = [next(batches).data["t"] for _ in range(8) for batches in (one, other)]
    assert sorted(torch.cat(rows).tolist()) == list(range(64))


def test_beside_one_that_adds_and_sets_priorities() -> None:
    source = fbuf.Replay(fbuf.prioritized(64, batch_size=8), {"t": np.int32(0), "twice": np.int32(0)})
    rows = np.arange(64, dtype=np.int32)
    source.extend({"t": rows, "twice": 2 * rows})
    done = threading.Event()

    def add() -> None:
        for i in range(1, 40):
            source.extend({"t": torch.from_numpy(rows + i), "twice": torch.from_numpy(2 * (rows + i))})
        done.set()

    adder = threading.Thread(target=add)
    adder.start()
    for batch in Loader(source, steps=60):
        assert torch.equal(2 * batch.data["t"], batch.data["twice"]) and bool(batch.mask.all())
        source.update_priority(batch.index, torch.rand(8))
    adder.join(60)
    assert done.is_set() and no_threads()


def test_tensordicts_and_transforms() -> None:
    pytest.importorskip("tensordict")
    row = {"obs": np.zeros(2, np.float32), "reward": 0.0, "terminated": False, "truncated": False}
    source = fbuf.Replay(fbuf.Buffer(16, view=fbuf.views.Transition(action=None), batch_size=4), row)
    for _ in range(6):
        source.add(row)
    loader = Loader(source, to="tensordict", steps=2, transform=lambda td: td.set("made", td["observation"] + 1))
    data = torch.utils.data.DataLoader(loader, batch_size=None, collate_fn=lambda batch: batch)
    for batch in data:
        assert batch["next", "reward"].shape == (4, 1) and bool((batch["made"] == 1).all())


def test_what_does_not_fit_is_said() -> None:
    buffer, source = fbuf.Buffer(8), replay()
    state = buffer.init(EXAMPLE)
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "source is int", lambda: Loader(3)),
        (TypeError, "a Buffer without state", lambda: Loader(buffer)),
        (TypeError, "source is Mixture; .* mixture.sample", lambda: Loader(fbuf.Mixture({"a": fbuf.uniform(4)}), 2)),
        (TypeError, "which has its own state", lambda: Loader(source, state=state)),
        (TypeError, "state is dict; expected a BufferState", lambda: Loader(buffer, state={})),
        (ValueError, "steps is -1", lambda: Loader(source, steps=-1)),
        (ValueError, "prefetch is True", lambda: Loader(source, prefetch=True)),
        (ValueError, 'to is \'numpy\'; expected "torch" or "tensordict"', lambda: Loader(source, to="numpy")),
        (TypeError, "it has no end; expected steps", lambda: len(Loader(source))),
        (ValueError, r"Loader: device is 'gpu'; .*device=\"cuda\"", lambda: Loader(source, device="gpu")),
        (ValueError, r"Loader: Uniform\(\) has no number 'num_workers'", lambda: Loader(source, num_workers=2)),
        (TypeError, "batch_size=None", lambda: next(iter(torch.utils.data.DataLoader(Loader(source))))),
        (AttributeError, "draws from a Replay. Use replay.state", lambda: Loader(source).state),
    ]
    if not torch.cuda.is_available():
        cases.append((ValueError, "finds no GPU. Leave out device", lambda: Loader(source, device="cuda")))
        cases.append((ValueError, "finds no GPU. Leave out device", lambda: Loader(source, pin=True)))
    for error, match, call in cases:
        with pytest.raises(error, match=match):
            call()
    assert Loader(source, device="cpu", steps=1).device.type == "cpu" and "prefetch=2" in repr(Loader(source))
    assert next(iter(Loader(source, device="cpu", steps=1))).data["t"].shape == (8,)


# ------------------------------------------------------------------------------------------------ processes


def run(code: str, seconds: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(fbuf.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MAKE = """
    import warnings; warnings.simplefilter("ignore")
    import fbuf, numpy as np, torch
    from fbuf.torch import Loader

    def make():
        replay = fbuf.Replay(fbuf.Buffer(64, batch_size=8), {"t": np.float32(0)})
        replay.extend({"t": np.arange(40, dtype=np.float32)})
        return Loader(replay, steps=4)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_are_refused_and_nothing_hangs(method: str) -> None:
    code = f"""
        if __name__ == "__main__":
            loader = make()
            data = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="{method}")
            try:
                list(data)
            except (RuntimeError, TypeError) as error:
                print("refused", "num_workers=0" in str(error))
            print(len(list(torch.utils.data.DataLoader(loader, batch_size=None))))
    """
    assert run(textwrap.dedent(MAKE) + textwrap.dedent(code)).split() == ["refused", "True", "4"]


def test_a_forked_iterator_is_refused() -> None:
    code = """
        import os
        batches = iter(make())
        next(batches)
        child = os.fork()
        if child == 0:
            try:
                next(batches)
            except RuntimeError as error:
                os._exit(7 if "worker process" in str(error) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(batches)))
    """
    assert run(textwrap.dedent(MAKE) + textwrap.dedent(code)).split() == ["7", "3"]


def test_the_process_ends_while_a_thread_draws() -> None:
    code = """
        loader = make()
        loader.steps = None
        batches = iter(loader)
        next(batches)
        print("end")
    """
    assert run(textwrap.dedent(MAKE) + textwrap.dedent(code)).split() == ["end"]


# --------------------------------------------------------------------------------------------------- threads


def test_a_thread_that_makes_ahead_waits_when_enough_is_made() -> None:
    made: list[int] = []
    gate = threading.Semaphore(0)

    def make(stop: Stop) -> int:
        made.append(len(made))
        gate.release()
        return made[-1]

    ahead = Prefetch(gate, "test", make, 2)
    gate.acquire(), gate.acquire()
    assert ahead.take() == 0
    gate.acquire()  # room for one more
    assert ahead.take() == 1
    left = ahead.end()
    assert left == list(range(2, 2 + len(left))) and len(left) <= 2
    assert ahead.end() == []
    with pytest.raises(StopIteration):
        ahead.take()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_that_share_an_iterator_get_its_batches_together(prefetch: int) -> None:
    """Though each of them asks for more while another has not got its own yet."""
    source = fbuf.Replay(fbuf.uniform(100), {"t": 0}, limit=fbuf.limits.at_most(1000))
    source.extend({"t": np.arange(8)})
    meet, out = threading.Barrier(4), []
    batches = iter(Loader(source, 4, steps=6, prefetch=prefetch, transform=lambda batch: time.sleep(0.02) or batch))

    def take() -> None:
        meet.wait()
        out.extend(batches)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(out) == 6 and source.pace.drawn == 6 * 4 and no_threads()


def test_closing_it_does_not_wait_for_a_limit() -> None:
    source = fbuf.Replay(fbuf.uniform(100), {"t": 0}, limit=fbuf.limits.samples_per_insert(1, 4, 8))
    source.extend({"t": np.arange(8)})
    batches = iter(Loader(source, 4, prefetch=2))
    next(batches)
    while source.can_sample(4):  # until the thread waits for rows
        time.sleep(0.01)
    batches.close()
    assert next(batches, None) is None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_it_ends_when_the_replay_is_closed(prefetch: int) -> None:
    source = fbuf.Replay(fbuf.uniform(100), {"t": 0}, limit=fbuf.limits.samples_per_insert(1, 4, 8))
    source.extend({"t": np.arange(8)})
    taken = 0
    for _ in Loader(source, 4, prefetch=prefetch):
        taken += 1
        if taken == 2:
            source.close()
    assert taken == source.pace.drawn // 4 and 2 <= taken <= 2 + prefetch  # what was drawn before is handed out


@pytest.mark.gpu
def test_on_a_gpu_batches_are_right_and_there() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    source = replay()
    for place in (None, "cuda"):
        for batch in Loader(source, steps=50, device=place, prefetch=2):
            assert batch.data["t"].is_cuda
            total = (batch.data["t"][:, None] @ torch.ones(1, 4096, device="cuda")).sum(1)
            assert torch.equal(total.cpu(), 4096 * batch.data["t"].cpu())
    host = fbuf.Buffer(64, batch_size=8)
    with jax.default_device(jax.devices("cpu")[0]):
        state = host.extend(host.init(EXAMPLE), {"t": np.arange(40, dtype=np.float32)})
        assert all(b.data["t"].is_pinned() for b in Loader(host, state=state, steps=3, pin=True))
        assert all(b.data["t"].is_cuda for b in Loader(host, state=state, steps=3, device="cuda"))
