import textwrap

import jax
import numpy as np
import pytest

import fbuf
from fbuf.torch import Loader
from tests.support.processes import run_python

pytestmark = pytest.mark.more

torch = pytest.importorskip("torch")

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


def test_the_process_ends_while_a_thread_draws():
    code = """
        loader = make()
        loader.steps = None
        batches = iter(loader)
        next(batches)
        print("end")
    """
    assert run_python(MAKE + textwrap.dedent(code)).stdout.splitlines() == ["end"]


def test_batches_are_tensordicts_on_request():
    row = {"obs": np.zeros(2, np.float32), "reward": 0.0, "terminated": False, "truncated": False}
    view = fbuf.views.Transition(action=None, autoreset="same_step")
    source = fbuf.Replay(fbuf.Buffer(16, view=view, batch_size=4), row)
    for _ in range(6):
        source.add(row)
    loader = Loader(source, to="tensordict", steps=2, transform=lambda td: td.set("made", td["observation"] + 1))
    for batch in torch.utils.data.DataLoader(loader, batch_size=None, collate_fn=lambda batch: batch):
        assert batch["next", "reward"].shape == (4, 1) and bool((batch["made"] == 1).all())


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
