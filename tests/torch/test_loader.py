"""The loader: the batches of its source in order, none lost, and no thread left behind."""

import textwrap
import threading

import jax
import numpy as np
import pytest

import fbuf
from fbuf.torch import Loader
from tests.support import refusals
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.threads import PATIENCE, Thread, soon

torch = pytest.importorskip("torch")

EXAMPLE = {"t": np.float32(0)}


def replay(count=40, **settings):
    made = fbuf.Replay(fbuf.Buffer(64, batch_size=8), EXAMPLE, seed=5, **settings)
    if count:
        made.extend({"t": np.arange(count, dtype=np.float32)})
    return made


def drawn(loader):
    return [batch.data["t"].tolist() for batch in loader]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fbuf.torch.Loader"]


def no_threads():
    soon(lambda: not threads())
    return True


EPOCHS = fbuf.Buffer(40, sampler=fbuf.samplers.Epoch(), batch_size=8)


def filled_epochs():
    return EPOCHS.extend(EPOCHS.init(EXAMPLE), {"t": np.arange(40, dtype=np.float32)})


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_equal_those_of_the_replay(prefetch):
    one, other = replay(), replay()
    expected = [other.sample(to="torch").data["t"].tolist() for _ in range(5)]
    assert drawn(Loader(one, steps=5, prefetch=prefetch)) == expected
    assert no_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_it_draws_from_a_buffer_and_its_state(prefetch):
    buffer, state = EPOCHS, filled_epochs()
    before = [np.array(x) for x in jax.tree.leaves(state)]
    loader = Loader(buffer, state=state, steps=5, prefetch=prefetch, seed=1)
    first, second = drawn(loader), drawn(loader)
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == list(range(40))  # each row once
    assert first != second
    assert drawn(Loader(buffer, state=state, steps=5, prefetch=0, seed=1)) == first
    assert all(np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(state), strict=True))
    assert int(buffer.size(loader.state)) == 40


@pytest.mark.parametrize("prefetch", [0, 2])
def test_epochs_end_and_have_a_length(prefetch):
    source = replay()
    loader = Loader(source, 12, epochs=1, prefetch=prefetch)
    data = torch.utils.data.DataLoader(loader, batch_size=None)
    assert isinstance(loader, torch.utils.data.IterableDataset) and isinstance(next(iter(data)), fbuf.Sample)
    assert len(data) == len(loader) == 4
    first, second = drawn(data), drawn(data)
    assert [len(batch) for batch in first] == [12, 12, 12, 4]  # the last one is short, as PyTorch's are
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(40)) and first != second
    twice = Loader(source, 12, epochs=2, prefetch=prefetch, shuffle=False, drop_last=True)
    assert len(twice) == 6 and drawn(twice) == 2 * [list(range(i, i + 12)) for i in (0, 12, 24)]
    source.extend({"t": np.arange(40, 48, dtype=np.float32)})
    assert len(loader) == 4 and sorted(sum(drawn(loader), [])) == list(range(48))
    for _ in loader:  # one that is cut short leaves nothing to the next
        break
    assert sorted(sum(drawn(loader), [])) == list(range(48))
    assert drawn(Loader(replay(0), 4, epochs=3, prefetch=prefetch)) == []
    assert no_threads()


def test_prefetched_batches_are_returned_by_the_next_iteration():
    buffer, state = EPOCHS, filled_epochs()
    expected = drawn(Loader(buffer, state=state, steps=5, prefetch=0))
    loader = Loader(buffer, state=state, prefetch=3)
    out = []
    for _ in range(2):  # broken off twice
        batches = iter(loader)
        out += [next(batches).data["t"].tolist() for _ in range(2)]
        soon(lambda batches=batches: len(batches._prefetch) == 3)
        batches.close()
        raises(StopIteration, None, next, batches)
    loader.steps, loader.prefetch = 1, 0
    assert out + drawn(loader) == expected


def test_no_more_is_drawn_than_asked_for():
    source = replay(8, limit=fbuf.limits.at_most(1000))
    assert len(list(Loader(source, steps=3, prefetch=5))) == 3 and source.stats()["limit_drawn"] == 3 * 8
    batches = iter(Loader(source, prefetch=2))
    next(batches)
    (thread,) = threads()
    soon(lambda: source.stats()["limit_drawn"] == (3 + 1 + 2) * 8)
    assert thread.is_alive()
    batches.close()
    assert source.stats()["limit_drawn"] == (3 + 1 + 2) * 8
    assert list(Loader(source, steps=0)) == [] and no_threads()


def test_errors_of_the_thread_are_raised_once_and_in_order():
    def fails(batch):
        fails.calls += 1
        if fails.calls == 3:
            raise KeyError("third")
        return batch

    for prefetch in (0, 2):
        fails.calls = 0
        batches = iter(Loader(replay(), prefetch=prefetch, transform=fails))
        next(batches), next(batches)
        raises(KeyError, "third", next, batches)
        raises(StopIteration, None, next, batches)
    empty = EPOCHS.init(EXAMPLE)
    for prefetch in (0, 1):
        raises(ValueError, "no row can be sampled", next, iter(Loader(replay(0), prefetch=prefetch)))
        raises(ValueError, "no row can be sampled", next, iter(Loader(EPOCHS, state=empty, prefetch=prefetch)))
    assert no_threads()


def test_an_error_that_was_not_raised_is_raised_by_close():
    failed = threading.Event()

    def fails(batch):
        failed.set()
        raise KeyError("first")

    batches = iter(Loader(replay(), transform=fails))
    assert failed.wait(60)
    raises(KeyError, "first", batches.close)
    batches.close()


@pytest.mark.more
def test_another_thread_adds_rows_while_it_draws():
    source = fbuf.Replay(fbuf.Buffer(64, batch_size=8), {"t": np.int32(0), "twice": np.int32(0)})
    rows = np.arange(64, dtype=np.int32)
    source.extend({"t": rows, "twice": 2 * rows})

    def add():
        for i in range(1, 20):
            source.extend({"t": torch.from_numpy(rows + i), "twice": torch.from_numpy(2 * (rows + i))})

    adder = Thread(add)
    for batch in Loader(source, steps=30):
        assert torch.equal(2 * batch.data["t"], batch.data["twice"]) and bool(batch.mask.all())
    adder.ends()
    assert no_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_share_the_batches_of_an_iterator(prefetch):
    source, out = replay(8, limit=fbuf.limits.at_most(1000)), []
    meet, pair = threading.Barrier(4), threading.Barrier(1 if prefetch else 2)  # batches are drawn two at a time

    def met(batch):
        pair.wait(PATIENCE)
        return batch

    batches = iter(Loader(source, steps=6, prefetch=prefetch, transform=met))
    for thread in [Thread(lambda: (meet.wait(PATIENCE), out.extend(batches))) for _ in range(4)]:
        thread.ends()
    assert len(out) == 6 and source.stats()["limit_drawn"] == 6 * 8 and no_threads()


def test_closing_does_not_wait_for_a_limit():
    source = replay(8, limit=fbuf.limits.samples_per_insert(1, 4, 16))
    batches = iter(Loader(source, prefetch=2))
    next(batches)
    soon(lambda: not source.can_sample(8))  # the thread waits for rows
    batches.close()
    assert next(batches, None) is None


@pytest.mark.parametrize("prefetch", [0, 2])
def test_it_ends_when_the_replay_is_closed(prefetch):
    source = replay(8, limit=fbuf.limits.samples_per_insert(10, 4, 1000))
    taken = 0
    for _ in Loader(source, prefetch=prefetch):
        taken += 1
        if taken == 2:
            source.close()
    # Batches that were drawn before are handed out.
    assert taken == source.stats()["limit_drawn"] // 8 and 2 <= taken <= 2 + prefetch


INVALID = """
Loader(3) => TypeError source is int
Loader(EPOCHS) => TypeError a Buffer without state
Loader(fbuf.Mixture({"a": fbuf.Buffer(4)}), 2) => TypeError source is Mixture; | to_torch
Loader(source, state=state) => TypeError which has its own state
Loader(EPOCHS, state={}) => TypeError state is dict; expected a BufferState
Loader(source, steps=-1) => ValueError steps is -1
Loader(source, prefetch=True) => ValueError prefetch is True
Loader(source, to="numpy") => ValueError to is 'numpy'; expected "torch" or "tensordict"
len(Loader(source)) => TypeError steps is None, so it has no length
Loader(source, device="gpu") => ValueError Loader: device is 'gpu'; | device="cuda"
Loader(source, num_workers=2) => ValueError Loader: Uniform() has no option 'num_workers'
next(iter(torch.utils.data.DataLoader(Loader(source)))) => TypeError batch_size=None
Loader(source).state => AttributeError draws from a Replay. Use replay.state
Loader(source, 4, steps=3, epochs=1) => ValueError steps is 3 and epochs is 1
Loader(EPOCHS, 4, state=state, epochs=1) => TypeError epochs needs a Replay | fbuf.Replay(buffer, row); replay.state = state
Loader(source, 4, epochs=1, beta=0.5) => ValueError an epoch has no option 'beta'
Loader(source, 4, epoch=1) => ValueError no option 'epoch' | Did you mean 'epochs'
Loader(source, 4, shuffle=True) => ValueError no option 'shuffle' | Write epochs=1
Loader(source, 4, epochs=-1) => ValueError epochs is -1; expected an int >= 0, or None
len(Loader(source, 4, epochs=1, shuffle=1)) => TypeError shuffle is 1; expected a bool
"""
NO_GPU = """
Loader(source, device="cuda") => ValueError finds no GPU. Leave both out
Loader(source, pin=True) => ValueError finds no GPU. Leave both out
"""


def test_invalid_arguments_are_refused():
    source = replay()
    table = INVALID if torch.cuda.is_available() else INVALID + NO_GPU.lstrip()
    refusals.check_all(table, globals() | {"source": source, "state": EPOCHS.init(EXAMPLE)})
    assert Loader(source, device="cpu", steps=1).device.type == "cpu" and "prefetch=2" in repr(Loader(source))
    assert next(iter(Loader(source, device="cpu", steps=1))).data["t"].shape == (8,)
    assert "epochs=2," in repr(Loader(source, 4, epochs=2))


MAKE = """
import warnings; warnings.simplefilter("ignore")
import fbuf, numpy as np, torch
from fbuf.torch import Loader

def make():
    replay = fbuf.Replay(fbuf.Buffer(64, batch_size=8), {"t": np.float32(0)})
    replay.extend({"t": np.arange(40, dtype=np.float32)})
    return Loader(replay, steps=4)
"""


@pytest.mark.more
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_are_refused_and_nothing_hangs(method):
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
    assert run_python(MAKE + textwrap.dedent(code)).stdout.splitlines() == ["refused True", "4"]


@pytest.mark.more
def test_a_forked_iterator_is_refused():
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
    assert run_python(MAKE + textwrap.dedent(code)).stdout.splitlines() == ["7 3"]


@pytest.mark.more
def test_the_process_ends_while_a_thread_draws():
    code = """
        loader = make()
        loader.steps = None
        batches = iter(loader)
        next(batches)
        print("end")
    """
    assert run_python(MAKE + textwrap.dedent(code)).stdout.splitlines() == ["end"]


@pytest.mark.more
def test_batches_are_tensordicts_on_request():
    row = {"obs": np.zeros(2, np.float32), "reward": 0.0, "terminated": False, "truncated": False}
    view = fbuf.views.Transition(action=None, autoreset="same_step")
    source = fbuf.Replay(fbuf.Buffer(16, view=view, batch_size=4), row)
    for _ in range(6):
        source.add(row)
    loader = Loader(source, to="tensordict", steps=2, transform=lambda td: td.set("made", td["observation"] + 1))
    for batch in torch.utils.data.DataLoader(loader, batch_size=None, collate_fn=lambda batch: batch):
        assert batch["next", "reward"].shape == (4, 1) and bool((batch["made"] == 1).all())


@pytest.mark.more
@pytest.mark.gpu
def test_batches_on_a_gpu_are_right_and_complete():
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    rows = {"t": np.arange(40, dtype=np.float32)}
    source = fbuf.Replay(fbuf.Buffer(64, batch_size=8), {"t": np.float32(0)})
    source.extend(rows)
    for place in (None, "cuda"):
        for batch in Loader(source, steps=50, device=place, prefetch=2):
            assert batch.data["t"].is_cuda
            total = (batch.data["t"][:, None] @ torch.ones(1, 4096, device="cuda")).sum(1)
            assert torch.equal(total.cpu(), 4096 * batch.data["t"].cpu())
    host = fbuf.Buffer(64, batch_size=8)
    with jax.default_device(jax.devices("cpu")[0]):
        state = host.extend(host.init({"t": np.float32(0)}), rows)
        assert all(b.data["t"].is_pinned() for b in Loader(host, state=state, steps=3, pin=True))
        assert all(b.data["t"].is_cuda for b in Loader(host, state=state, steps=3, device="cuda"))
