"""A batch is the learner's: writing into it changes no buffer, holding it costs no copy. Tensors come in or say why not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fbuf  # noqa: E402
from fbuf.torch import to_torch  # noqa: E402

ROOT = Path(fbuf.__file__).parent.parent
EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "reward": np.float32(0)}
STORAGES = {
    "Device": fbuf.storages.Device(),
    "Host": fbuf.storages.Host(keys=("obs",)),
    "Compressed": fbuf.storages.Compressed(keys=("obs",)),
    "Memmap": fbuf.storages.Memmap(keys=("obs",)),
    "Deduplicated": fbuf.storages.Deduplicated(keys=("obs",), blocks=256),
    "Ragged": fbuf.storages.Ragged(maximum={"obs": (8, 8)}),
}
LONGER = ("Host", "Memmap", "Deduplicated")
each_storage = pytest.mark.parametrize(
    "storage",
    [pytest.param(s, marks=pytest.mark.slow if name in LONGER else ()) for name, s in STORAGES.items()],
    ids=STORAGES,
)


def rows(count: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    obs = rng.integers(0, 255, (count, 8, 8)).astype(np.uint8)
    return {"obs": obs, "reward": np.arange(count, dtype=np.float32)}


def replay(storage: Any, prefetch: int = 0, **settings: Any) -> fbuf.Replay:
    sampler = fbuf.samplers.Prioritized()
    buffer = fbuf.Buffer(32, storage=storage, sampler=sampler, prefetch=prefetch, batch_size=8)
    return fbuf.Replay(buffer, EXAMPLE, **settings)


def held(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def scribble(tree: Any) -> None:
    """Overwrites every byte of every tensor."""
    for t in jax.tree.leaves(tree):
        if isinstance(t, torch.Tensor) and t.numel():
            t.reshape(-1).view(torch.uint8).fill_(0xA5)


@each_storage
@pytest.mark.parametrize("prefetch", [0, 1])
def test_writing_into_a_batch_changes_no_buffer_no_state_and_no_other_batch(storage: Any, prefetch: int) -> None:
    made = replay(storage, prefetch)
    buffer, state = made.buffer, made.buffer.init(EXAMPLE)
    state = buffer.extend(state, rows(32))
    for turn in range(3):
        old, before_old = state, held(state)
        state, batch = buffer.sample(state, jax.random.key(turn), 8)
        handed_out = [batch, buffer.peek(state, jax.random.key(9), 8), buffer.rows(state)]
        handed_out += [buffer.last(state, 4), buffer.get(state, batch.index)]
        kept, before = buffer.rows(state).data, held(state)
        expected, twin = held(kept), held(buffer.peek(state, jax.random.key(5), 8))
        for out in handed_out:
            scribble(to_torch(out))
        for tree, values in ((state, before), (old, before_old), (kept, expected)):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(held(tree), values, strict=True))
        again = [held(buffer.rows(state).data), held(buffer.peek(state, jax.random.key(5), 8))]
        for one, other in zip(again, (expected, twin), strict=True):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


@each_storage
@pytest.mark.parametrize("prefetch", [0, 1])
def test_held_batches_never_keep_a_write_from_being_in_place(storage: Any, prefetch: int) -> None:
    made, alive = replay(storage, prefetch, strict=False), []
    made.extend(rows(32))

    def places() -> list[int]:
        leaves = jax.tree.leaves((made.state.sampler, made.state.rows))
        return [x.unsafe_buffer_pointer() for x in leaves if isinstance(x, jax.Array) and x.nbytes >= 32]

    for turn in range(3):
        alive.append(made.sample(to="torch"))
        alive.append(to_torch(made.rows()))
        before = places()
        made.extend(rows(4, turn))
        made.update_priority(alive[-2].index, torch.rand(8))
        assert sorted(places()) == sorted(before)


def as_tensors(way: str, x: np.ndarray) -> Any:
    """The values of `x` in memory of their own."""
    if way == "strided":
        return torch.from_numpy(np.repeat(x, 2, axis=0))[::2]
    if way == "transposed":
        return torch.from_numpy(np.ascontiguousarray(x.T)).permute(*range(x.ndim - 1, -1, -1))
    return torch.from_numpy(x.copy())


@each_storage
def test_rows_and_examples_of_tensors_are_stored_as_numpy_ones_are(storage: Any) -> None:
    plain, ours = replay(storage), replay(storage)
    for turn, way in enumerate(("as it is", "strided", "transposed", "beside numpy")):
        new = rows(6, turn)
        tensors = {n: as_tensors(way, x) for n, x in new.items()}
        if way == "beside numpy":
            tensors["reward"] = new["reward"]
        one = {n: x[0].clone() if isinstance(x, torch.Tensor) else x[0] for n, x in tensors.items()}
        plain.extend(new)
        ours.extend(tensors)
        plain.add({n: x[0] for n, x in new.items()})
        ours.add(one)
        for x in (*tensors.values(), *one.values()):  # after the call they are the caller's again
            if isinstance(x, torch.Tensor):
                x.fill_(7)
    jax.tree.map(np.testing.assert_array_equal, ours.rows().data, plain.rows().data)
    a, b = plain.sample(to="torch"), ours.sample(to="torch")
    assert all(torch.equal(x, y) for x, y in zip(jax.tree.leaves(a.data), jax.tree.leaves(b.data), strict=True))
    if not isinstance(storage, fbuf.storages.Ragged):
        example = {"obs": torch.zeros(8, 8, dtype=torch.uint8), "reward": torch.tensor(0.0)}
        fbuf.Replay(ours.buffer, example).extend(new)


@each_storage
def test_verbs_take_tensors(storage: Any) -> None:
    made = replay(storage)
    made.extend({n: torch.from_numpy(x) for n, x in rows(8).items()}, priority=torch.ones(8))
    made.extend({n: torch.from_numpy(x) for n, x in rows(4).items()}, mask=torch.tensor([True, False, True, False]))
    assert len(made) == 10
    batch = made.sample(to="torch")
    for error in (torch.rand(8), torch.rand(8).half(), torch.rand(16)[::2], torch.rand(8, requires_grad=True).detach()):
        made.update_priority(batch.index, error)
    made.update_rows(batch.index, {"reward": torch.full((8,), 7.0)})
    assert (np.asarray(made.get(batch.index).data["reward"]) == 7).all()
    assert made.get(batch.index.slot).mask.all()


def test_what_cannot_come_in_names_the_leaf_and_the_fix() -> None:
    made = fbuf.Replay(fbuf.prioritized(16), {"obs": np.zeros(4, np.float32), "action": 0})
    fine = {"obs": torch.zeros(2, 4), "action": torch.zeros(2, dtype=torch.int32)}
    made.extend(fine)
    batch = made.sample(2, to="torch")
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"leaf 'obs' requires grad; .*x\.detach\(\)", {"obs": torch.zeros(2, 4, requires_grad=True)}),
        (ValueError, r"leaf 'obs' has its neg bit set; .*resolve_neg", {"obs": torch._neg_view(torch.zeros(2, 4))}),
        (
            TypeError,
            r"leaf 'action' is int64; expected int32.*x\.to\(torch\.int32\)",
            {"action": torch.zeros(2).long()},
        ),
        (TypeError, r"leaf 'obs' is float64; expected float32", {"obs": torch.zeros(2, 4).double()}),
        (TypeError, r"leaf 'obs' is a sparse_coo tensor", {"obs": torch.zeros(2, 4).to_sparse()}),
        (ValueError, r"leaf 'obs' is on 'meta'", {"obs": torch.zeros(2, 4, device="meta")}),
        (ValueError, r"leaf 'obs' has shape \[2, 5\]", {"obs": torch.zeros(2, 5)}),
    ]
    for error, match, wrong in cases:
        with pytest.raises(error, match=match):
            made.extend(fine | wrong)
    mixed = {"obs": np.zeros((2, 4), np.float32), "action": torch.zeros(2).long()}
    with pytest.raises(TypeError, match=r"leaf 'action' is int64"):
        made.extend(mixed)
    for no_index in (batch, batch.index.slot, [0, 1]):
        with pytest.raises(TypeError, match=r"^Replay.update_priority: index is \w+; .*Pass batch.index"):
            made.update_priority(no_index, torch.ones(2))
        with pytest.raises(TypeError, match=r"^Replay.update_rows: index is \w+; .*Pass batch.index"):
            made.update_rows(no_index, {"action": torch.zeros(2, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"leaf 'td_error' requires grad; .*x\.detach\(\)"):
        made.update_priority(batch.index, torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"is float64; .*x\.to\(torch\.float32\)"):
        made.update_priority(batch.index, torch.ones(2).double())
    with pytest.raises(TypeError, match=r"is int64; expected int32"):
        fbuf.Replay(fbuf.uniform(4), {"action": torch.tensor(0)})
    with pytest.raises(TypeError, match=r"leaf 'action' is a torch tensor; .*from_torch"):
        fbuf.uniform(4).init({"action": torch.tensor(0)})
    assert len(made) == 2  # nothing was half-written


def test_complex_rows_with_a_conj_bit_are_refused() -> None:
    made = fbuf.Replay(fbuf.uniform(4), {"z": np.complex64(0)})
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"conj bit set; .*x\.resolve_conj\(\)"):
        made.extend({"z": z.conj()})
    made.extend({"z": z.conj().resolve_conj()})
    assert np.asarray(made.rows().data["z"])[:2].tolist() == [1 - 2j, 3 + 1j]


CRASHES = """
    import warnings; warnings.simplefilter("ignore")
    import jax, jax.numpy as jnp, numpy as np, torch
    import fbuf
    from fbuf.torch import from_torch, nested, to_torch

    def attempt(name, call):
        try:
            call()
            print("worked", name, flush=True)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            print("refused" if "_torch" in str(error) or "Replay" in str(error) else f"FOREIGN {error}", name, flush=True)

    x = np.arange(16, dtype=np.float32)
    t = torch.arange(16, dtype=torch.float32)
    deleted = jnp.ones(4); deleted.delete()
    donated = jnp.ones(4); jax.jit(lambda v: v + 1, donate_argnums=0)(donated)
    leaves = dict(
        negative=x[::-1], negative_2d=x.reshape(4, 4)[:, ::-1], broadcast=np.broadcast_to(x, (3, 16)),
        read_only=np.asarray(jnp.ones(4)), zero_stride=np.lib.stride_tricks.as_strided(x, (4, 4), (0, 4)),
        overlapping=np.lib.stride_tricks.as_strided(x, (4, 4), (4, 4)), empty_negative=x[:0][::-1],
        record=np.zeros(3, [("a", "u1"), ("b", "<f4")])["b"], foreign=x.astype(">f4"), text=np.array(["a"]),
        key=jax.random.key(0), keys=jax.random.split(jax.random.key(0), 3), deleted=deleted, donated=donated,
        int4=jnp.zeros(3, jnp.int4), float4=jnp.zeros(4, "float4_e2m1fn"), huge_dims=np.zeros((1,) * 20),
    )
    for name, leaf in leaves.items():
        for copy in (None, True, False):
            attempt(name, lambda: to_torch({"x": leaf}, copy=copy))
    tensors = dict(
        grad=t.clone().requires_grad_(), neg=torch._neg_view(t), conj=torch.ones(4, dtype=torch.complex64).conj(),
        expanded=t[:1].expand(9), strided=t[::3], offset=t[1:], flipped=t.flip(0), meta=t.to("meta"), sparse=t.to_sparse(),
        csr=torch.eye(3).to_sparse_csr(), jagged=torch.nested.nested_tensor([t, t[:3]], layout=torch.jagged),
        strided_nested=torch.nested.nested_tensor([t, t[:3]]), quantized=torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        fake=torch.empty_strided((2, 3), (0, 0)), half=torch.zeros(4, dtype=torch.complex32), wide=t.double(),
        overlapping=t.as_strided((4, 4), (1, 1)), freed=torch.empty(0).set_(torch.UntypedStorage(0)),
    )
    resized = torch.ones(64); resized.untyped_storage().resize_(0)
    tensors["resized"] = resized
    from torch._subclasses.fake_tensor import FakeTensorMode
    tensors["pretended"] = FakeTensorMode().from_tensor(torch.ones(64))
    torch.func.functionalize(lambda x: attempt("functional", lambda: from_torch({"x": x})))(t)
    torch.func.vmap(lambda x: (attempt("mapped", lambda: from_torch({"x": x})), x)[1])(t)
    for name, leaf in tensors.items():
        for copy in (True, False):
            attempt(name, lambda: from_torch({"x": leaf}, copy=copy))
        example = {"x": np.zeros(leaf.shape[1:] if not leaf.is_nested else (), np.float32)}
        attempt(f"row {name}", lambda: fbuf.Replay(fbuf.uniform(64), example).extend({"x": leaf}))
    print("end")
"""


def run(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_nothing_ends_the_process() -> None:
    """Run apart: what crashes here ends with a signal, not with an exception."""
    lines = run(CRASHES)
    assert lines[-1] == "end" and len(lines) > 90
    assert not [line for line in lines if line.startswith("FOREIGN")]
    refused = {line.split(" ", 1)[1] for line in lines if line.startswith("refused")}
    worked = {line.split(" ", 1)[1] for line in lines if line.startswith("worked")}
    assert {
        "negative",
        "key",
        "deleted",
        "int4",
        "grad",
        "neg",
        "conj",
        "pretended",
        "functional",
        "mapped",
        "meta",
        "sparse",
        "jagged",
        "wide",
        "resized",
    } <= refused
    assert {"negative", "expanded", "strided", "flipped", "offset"} <= worked  # negative: with copy=True


def test_the_tables_of_the_page_are_what_happens() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.torch_table"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util
    import re
    import warnings

    page = (ROOT / "fbuf" / "TORCH.md").read_text()
    found = re.findall(r"^```python([^\n]*)\n(.*?)^```$", page, flags=re.S | re.M)
    assert len(found) >= 5
    scope: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        for number, (words, block) in enumerate(found):
            if "tensordict" in words and importlib.util.find_spec("tensordict") is None:
                continue
            exec(compile(block, f"TORCH.md block {number}", "exec"), scope)
    assert "torch.Size([4, j" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_rows_about_gpus() -> None:
    gpu = jax.device_put(jnp.arange(16.0), jax.devices("gpu")[0])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="expected a device that this torch can use"):
            to_torch(gpu)
        return
    shared = to_torch(gpu)
    assert shared.is_cuda and shared.data_ptr() == gpu.unsafe_buffer_pointer()
    back = fbuf.torch.from_torch(shared, copy=False)
    assert back.unsafe_buffer_pointer() == shared.data_ptr()
    copied = fbuf.torch.from_torch(shared)
    assert copied.devices() == gpu.devices() and copied.unsafe_buffer_pointer() != shared.data_ptr()
    assert not to_torch(jax.device_put(gpu, jax.devices("cpu")[0])).is_cuda
