"""The bridge to torch: what is shared, what is copied, what is refused before it can go wrong."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fbuf  # noqa: E402
from fbuf.torch import _from, _to, from_torch, to_torch  # noqa: E402

NARROW = (
    "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
WIDE = ["int64", "uint64", "float64", "complex128"]
SHAPES = [(16,), (3, 5), (), (0,), (4, 0)]


def x64(on: bool) -> contextlib.AbstractContextManager:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(on)
    from jax.experimental import enable_x64  # where older releases have it

    return enable_x64(on)


def pointer(x) -> int:
    if isinstance(x, jax.Array):
        return x.unsafe_buffer_pointer()
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


def payload(x) -> bytes:
    """The bytes of an array or a tensor, without either library's help in converting."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
        return bytes(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""
    return np.ascontiguousarray(x).tobytes()


def values(shape: tuple[int, ...], name: str) -> jax.Array:
    return (jnp.arange(int(np.prod(shape)), dtype=jnp.int32) % 2 + 1).astype(name).reshape(shape)


# --------------------------------------------------------------------------------------- crossing


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NARROW + WIDE)
def test_every_dtype_crosses_both_ways_shared_or_copied(name, shape):
    with x64(name in WIDE):
        x = values(shape, name)
        for copy in (None, False, True):
            t = to_torch({"x": x}, copy=copy)["x"]
            assert t.dtype == getattr(torch, name) and tuple(t.shape) == shape
            assert payload(t) == payload(x)
            assert x.size == 0 or (pointer(t) == pointer(x)) is (copy is not True)
        t = to_torch(x, copy=True)  # torch's own memory, as a learner's tensors are
        for copy in (False, True):
            y = from_torch({"x": t}, copy=copy)["x"]
            assert y.dtype == x.dtype and y.shape == shape
            assert payload(y) == payload(x)
            assert x.size == 0 or (pointer(y) == pointer(t)) is (not copy)


@pytest.mark.parametrize("name", NARROW + WIDE)
def test_numpy_leaves_cross_shared_or_copied(name):
    with x64(name in WIDE):
        x = np.array(values((4, 16), name))
    for copy in (None, False, True):
        t = to_torch(x, copy=copy)
        assert t.dtype == getattr(torch, name) and payload(t) == payload(x)
        assert (pointer(t) == pointer(x)) is (copy is not True)
    assert to_torch(x[0, 0:1].reshape(()), copy=True).shape == ()
    assert to_torch(np.zeros((0, 2), x.dtype)).shape == (0, 2)


def test_copying_takes_numpy_arrays_that_cannot_be_shared():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    fields = np.zeros(3, [("flag", "u1"), ("value", "<f4")])
    read_only = x.copy()
    read_only.flags.writeable = False
    for leaf in (x[::-1], x[:, ::-2], fields["value"], read_only, np.broadcast_to(x, (2, 3, 4))):
        t = to_torch(leaf, copy=True)
        assert np.array_equal(t.numpy(), leaf)
        t.add_(1)
        assert not np.array_equal(t.numpy(), leaf)


def test_the_structure_stays():
    tree = {"a": [jnp.ones(2), (jnp.zeros(3), None)], "b": fbuf.Index(jnp.ones(1), jnp.ones(1))}
    out = to_torch(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(out))
    back = from_torch(out)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(back))
    assert to_torch({}) == {} and from_torch({}, copy=False) == {} and from_torch(()) == ()


# ------------------------------------------------------------------------------- sharing, writing


DEVICE = fbuf.storages.Device()


def buffer_state(
    storage: fbuf.storages.Device | fbuf.storages.Compressed = DEVICE,
) -> tuple[fbuf.BufferState, fbuf.Sample]:
    buffer = fbuf.Buffer(capacity=32, storage=storage)
    state = buffer.init({"obs": jnp.zeros(16, jnp.float32), "reward": jnp.zeros((), jnp.float32)})
    rows = {"obs": jnp.ones((8, 16), jnp.float32), "reward": jnp.arange(8, dtype=jnp.float32)}
    state = buffer.extend(state, rows)
    return buffer.sample(state, jax.random.key(0), 4)


@pytest.mark.parametrize(
    "storage",
    [DEVICE, fbuf.storages.Compressed(keys=("obs",))],
    ids=["device", "compressed"],
)
def test_a_sample_is_shared_and_stays_a_sample(storage):
    _, batch = buffer_state(storage)
    tensors = to_torch(batch)
    assert isinstance(tensors, fbuf.Sample) and isinstance(tensors.index, fbuf.Index)
    assert list(map(pointer, jax.tree.leaves(tensors))) == list(map(pointer, jax.tree.leaves(batch)))
    assert np.array_equal(tensors.data["reward"].numpy(), batch.data["reward"])


def test_a_state_is_copied_by_default_and_shared_on_request():
    state, batch = buffer_state()
    assert isinstance(to_torch(state), fbuf.BufferState)

    def shared(tree, **options):
        pairs = zip(jax.tree.leaves(to_torch(tree, **options)), jax.tree.leaves(tree), strict=True)
        return [pointer(t) == pointer(x) for t, x in pairs if x.size]

    assert not any(shared(state))
    assert not any(shared({"deep": [state]}))
    assert all(shared(state, copy=False))
    # beside a state a sample is still shared, whichever comes first
    owners = [*[False] * len(shared(state)), *[True] * len(shared(batch))]
    assert shared((state, batch)) == owners
    assert shared((batch, state)) == owners[::-1]


def test_writing_to_a_copy_never_changes_the_source():
    state, batch = buffer_state()
    for tree, copied in ((batch, to_torch(batch, copy=True)), (state, to_torch(state))):
        before = [payload(x) for x in jax.tree.leaves(tree)]
        for t in jax.tree.leaves(copied):
            t.copy_(torch.ones_like(t) + t if t.dtype is torch.float32 else torch.full_like(t, 1))
        assert [payload(x) for x in jax.tree.leaves(tree)] == before


def test_writing_to_a_tensor_shows_only_where_memory_is_shared():
    t = torch.zeros(64)
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shared = from_torch(t, copy=False)
    copies = [from_torch(t), from_torch(t, device=jax.devices("cpu")[0])]
    copies.append(from_torch(t, device=place))
    t.fill_(1)
    assert not any(copy.any() for copy in copies)
    assert shared.all()  # the contract of copy=False, not a feature


def test_a_copy_is_complete_on_return():
    # Behind queued work a copy waits its turn: unless from_torch waits too, it reads the ones.
    busy = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda i, b: jnp.tanh(b @ b * 1e-3), a))
    a = jnp.ones((500, 500), jnp.float32)
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    jax.block_until_ready(busy(a))
    for device in (None, place):
        t = torch.zeros(1 << 20)
        working = busy(a)
        copied = from_torch(t, device=device)
        t.fill_(1)
        assert not copied.any()
        jax.block_until_ready(working)


def overwrite(x: jax.Array) -> bool:
    """Whether a donated write to `x` happens in place."""
    before = pointer(x)
    out = jax.jit(lambda v: v.at[0].set(v[1]), donate_argnums=0)(x)
    return pointer(out) == before


def test_donation_stays_in_place_after_copying_and_is_refused_while_shared():
    x = jnp.arange(64, dtype=jnp.float32)
    held = to_torch(x, copy=True)
    assert overwrite(x) and held[0] == 0

    x = jnp.arange(64, dtype=jnp.float32)
    held = to_torch(x, copy=False)
    assert not overwrite(x) and held[0] == 0

    source = torch.arange(64, dtype=torch.float32)
    assert overwrite(from_torch(source)) and source[0] == 0


def test_donating_a_whole_state_after_exporting_it_stays_in_place():
    buffer = fbuf.Buffer(capacity=32)
    state = buffer.init({"obs": jnp.zeros(16, jnp.float32)})
    add = jax.jit(lambda s, row: buffer.add(s, {"obs": row}), donate_argnums=0)
    state = add(state, jnp.ones(16, jnp.float32))
    tensors, before = to_torch(state), pointer(jax.tree.leaves(state.rows)[0])
    after = add(state, jnp.ones(16, jnp.float32))
    assert pointer(jax.tree.leaves(after.rows)[0]) == before
    assert len(jax.tree.leaves(tensors)) == len(jax.tree.leaves(after))


def test_memory_outlives_either_side():
    x = jnp.arange(1024, dtype=jnp.int32)
    t = to_torch(x)
    del x
    assert int(t.sum()) == 1023 * 512
    y = from_torch(t, copy=False)
    del t
    assert int(y.sum()) == 1023 * 512


def test_any_layout_of_a_tensor_is_copied_and_a_transpose_shared():
    t = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    for view in (t[:, ::2], t[::2], t.T, t[:1].expand(4, 8), t.flatten()[1:], t[3, 3]):
        y = from_torch(view)
        assert np.array_equal(y, view.numpy())
    y = from_torch(t.T, copy=False)
    assert pointer(y) == pointer(t)
    assert np.array_equal(jax.jit(lambda v: v * 2)(y), t.numpy().T * 2)
    assert from_torch(torch.as_strided(t, (1, 8), (3, 1)), copy=False).shape == (1, 8)


# ------------------------------------------------------------------------------ refused, to torch


def refused(call, tree, error, match, **options):
    """Both a bare leaf and one in a tree are refused, the latter by its path."""
    with pytest.raises(error, match=match):
        call(tree, **options)
    with pytest.raises(error, match=r"leaf 'next/obs' .*" + match):
        call({"next": {"obs": tree}}, **options)


@pytest.mark.parametrize("copy", [None, False, True])
def test_tracers_are_refused(copy):
    match = r"leaf 'obs' is a tracer; expected a concrete array\. Call it outside jax\.jit"
    with pytest.raises(TypeError, match=match):
        jax.jit(lambda x: to_torch({"obs": x}, copy=copy) and x)(jnp.ones(2))


def test_deleted_arrays_are_refused():
    x = jnp.ones(4)
    x.delete()
    refused(to_torch, x, ValueError, r"is deleted .*Use what that call returned: state = step\(state\)")


def test_typed_keys_are_refused():
    refused(to_torch, jax.random.key(0), TypeError, r"typed PRNG key.*jax\.random\.key_data\(key\)")
    assert to_torch(jax.random.key_data(jax.random.key(0))).dtype == torch.uint32


@pytest.mark.parametrize(
    ("name", "cast"),
    [
        ("int4", "int8"),
        ("uint4", "uint8"),
        ("float4_e2m1fn", "float32"),
        ("float8_e3m4", "float32"),
    ],
)
def test_dtypes_without_an_equivalent_are_refused(name, cast):
    match = rf"is {name}; expected a dtype .*Cast with x\.astype\(jnp\.{cast}\)"
    x = jnp.zeros(4, name)
    refused(to_torch, x, TypeError, match)
    refused(to_torch, np.asarray(x), TypeError, match)
    assert to_torch(x.astype(cast)).shape == (4,)


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (np.zeros(2, "U3"), r"is str96; .*Leave it out"),
        (np.array([None]), r"is object; .*Leave it out"),
        (np.zeros(2, [("a", "u1")]), r"is void8; .*Leave it out"),
        (np.zeros(2, np.clongdouble), r"Cast with x\.astype\(jnp\.complex64\)"),
        (np.zeros(2, ">f4"), r"dtype '>f4'; expected this machine's byte order.*newbyteorder"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"masked array; .*x\.filled\(0\)"),
        (1.5, r"is a float; expected a jax\.Array or numpy\.ndarray\. Wrap it: jnp\.asarray\(x\)"),
        (np.float32(1), r"is a float32; expected a jax\.Array.*Wrap it: jnp\.asarray\(x\)"),
        ("text", r"is a str; .*Leave it out"),
        (torch.ones(2), r"is a Tensor; expected a jax\.Array"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else type(value).__name__,
)
def test_other_leaves_are_refused(leaf, match):
    for copy in (None, False, True):
        refused(to_torch, leaf, TypeError, match, copy=copy)


def test_numpy_arrays_that_cannot_be_shared_are_refused():
    fix = r".*to share\. Use np\.array\(x\), or to_torch\(tree, copy=True\)"
    x = np.arange(16, dtype=np.float32)
    fields = np.zeros(3, [("flag", "u1"), ("value", "<f4")])
    shifted = np.zeros(17, np.uint8)[1:].view(np.float32)
    assert not shifted.flags.aligned
    read_only = x.copy()
    read_only.flags.writeable = False
    for copy in (None, False):
        refused(to_torch, x[::-1], ValueError, r"has strides \(-4,\); expected" + fix, copy=copy)
        assert to_torch(x[:0][::-1], copy=copy).shape == (0,)
        refused(to_torch, fields["value"], ValueError, r"has strides \(5,\)" + fix, copy=copy)
        refused(to_torch, shifted, ValueError, r"is not aligned for float32" + fix, copy=copy)
        refused(to_torch, read_only, ValueError, r"is read-only" + fix, copy=copy)
        # a numpy view of a JAX array is read-only: torch must not write through it
        refused(to_torch, np.asarray(jnp.ones(4)), ValueError, r"is read-only" + fix, copy=copy)


def test_devices_that_torch_cannot_use_are_refused(monkeypatch):
    assert _to._torch_reaches(torch, "cpu") and not _to._torch_reaches(torch, "tpu")
    monkeypatch.setattr(_to, "_torch_reaches", lambda torch, platform: False)
    match = r"expected a device that this torch can use\. Move it with jax\.device_put\(x, "
    refused(to_torch, jnp.ones(2), ValueError, match)


# ---------------------------------------------------------------------------- refused, from torch


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("name", "cast"), list(zip(WIDE, ["int32", "uint32", "float32", "complex64"], strict=True)))
def test_narrowing_is_refused_while_x64_is_off(name, cast, copy):
    t = torch.ones(16, dtype=getattr(torch, name))
    match = rf"is {name}; expected {cast}, .*Cast with x\.to\(torch\.{cast}\)"
    with x64(False):
        refused(from_torch, t, TypeError, match, copy=copy)
        assert from_torch(t.to(getattr(torch, cast)), copy=copy).dtype == cast


@pytest.mark.parametrize("copy", [False, True])
def test_tensors_that_jax_would_misread_are_refused(copy):
    ones = torch.ones(16)
    match = r"requires grad; expected a tensor outside autograd\. Use x\.detach\(\)"
    refused(from_torch, ones.clone().requires_grad_(), ValueError, match, copy=copy)
    refused(from_torch, torch.nn.Parameter(ones), ValueError, match, copy=copy)
    conjugate = torch.ones(16, dtype=torch.complex64).conj()
    refused(from_torch, conjugate, ValueError, r"conj bit set.*x\.resolve_conj\(\)", copy=copy)
    negative = torch._neg_view(ones)  # contiguous and aligned: only the bit tells
    refused(from_torch, negative, ValueError, r"neg bit set.*x\.resolve_neg\(\)", copy=copy)
    refused(from_torch, torch.eye(3).to_sparse(), TypeError, r"sparse_coo.*x\.to_dense\(\)", copy=copy)
    assert from_torch(negative.resolve_neg(), copy=copy)[0] == -1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    refused(from_torch, nested, TypeError, r"nested tensor; .*to_padded_tensor\(x, 0\)")


class Unpackable:
    def to_dict(self):
        return {}


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (1.5, r"is a float; expected a torch\.Tensor\. Wrap it: torch\.as_tensor\(x\)"),
        (np.float32(1), r"is a float32; .*Wrap it: torch\.as_tensor\(x\)"),
        (np.ones(2), r"is a ndarray; expected a torch\.Tensor"),
        (jnp.ones(2), r"is a ArrayImpl; expected a torch\.Tensor"),
        (Unpackable(), r"is a Unpackable; .*Unpack it: x\.to_dict\(\)"),
        (
            torch.ones(2, device="meta"),
            r"is on 'meta'; expected a device .*Make it on a real device",
        ),
    ],
    ids=["float", "scalar", "numpy", "jax", "to_dict", "meta"],
)
def test_other_leaves_are_refused_from_torch(leaf, match):
    for copy in (False, True):
        refused(from_torch, leaf, (TypeError, ValueError), match, copy=copy)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_dtypes_that_jax_lacks_are_refused():
    half = torch.empty(2, dtype=torch.complex32)
    match = r"is complex32; .*Cast with x\.to\(torch\.complex64\)"
    refused(from_torch, half, TypeError, match)
    packed = torch.empty(2, dtype=torch.float4_e2m1fn_x2)
    match = r"is float4_e2m1fn_x2; .*Cast with x\.to\(torch\.float32\)"
    refused(from_torch, packed, TypeError, match)


def test_memory_that_jax_would_copy_is_refused_with_copy_false():
    t = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    fix = r".*to share\. Use x\.contiguous\(\), or from_torch\(tree, copy=True\)"
    for view, text in (
        (t[:, :4], r"shape \[8, 4\] and strides \[8, 1\]"),
        (t[:, ::2], r"shape \[8, 4\] and strides \[8, 2\]"),
        (t[:1].expand(4, 8), r"shape \[4, 8\] and strides \[0, 1\]"),
    ):
        refused(from_torch, view, ValueError, text + fix, copy=False)
    for offset in (1, 4, 8):
        match = rf"starts {4 * offset} bytes past a multiple of 64; .*Use x\.clone\(\), or from_torch"
        refused(from_torch, t.flatten()[offset:], ValueError, match, copy=False)
    assert pointer(from_torch(t.flatten()[16:], copy=False)) == pointer(t) + 64


def test_devices_that_jax_cannot_use_are_refused(monkeypatch):
    assert _from._jax_reaches("cpu") and not _from._jax_reaches("mps")
    monkeypatch.setattr(jax, "devices", lambda kind: (_ for _ in ()).throw(RuntimeError("none")))
    assert not _from._jax_reaches("cuda")
    monkeypatch.setattr(_from, "_jax_reaches", lambda kind: False)
    match = r"is on 'cpu'; expected a device that this JAX can use\. Move it with x\.cpu\(\)"
    refused(from_torch, torch.ones(2), ValueError, match)


@pytest.mark.parametrize("copy", [False, True])
def test_from_torch_inside_jit_is_refused(copy):
    t = torch.ones(16)
    match = r"called inside jax\.jit; .*step\(from_torch\(tree\)\)"
    with pytest.raises(TypeError, match=match):
        jax.jit(lambda x: x + from_torch(t, copy=copy))(jnp.ones(16))
    assert float(jax.grad(lambda x: (x * from_torch(t, copy=copy)).sum())(jnp.ones(16))[0]) == 1


def test_a_device_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"device is 'cpu'; expected a jax\.Device.*jax\.devices\('cpu'\)\[0\]"):
        from_torch(torch.ones(2), device="cpu")


def test_what_no_check_foresees_still_names_the_leaf():
    def inside(x):
        from_torch({"obs": x})
        return x

    with pytest.raises(RuntimeError, match=r"leaf 'obs' was refused on its way through DLPack"):
        torch.vmap(inside)(torch.ones(2, 16))


# ------------------------------------------------------------------------------- the surroundings


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("wide", [False, True])
def test_clean_under_strict_settings(guard, wide):
    x = jnp.array([1.0, jnp.nan, jnp.inf] * 16, jnp.float32)
    t = torch.full((64,), float("nan"))
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.transfer_guard(guard),
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.check_tracer_leaks(True),
        x64(wide),
    ):
        for copy in (False, True):
            assert to_torch(x, copy=copy).isnan().any()
            for device in (None, jax.devices("cpu")[0]):
                y = from_torch(t, copy=copy, device=device)
                assert y.dtype == jnp.float32 and y.shape == (64,)


def test_a_missing_torch_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (to_torch, from_torch):
        with pytest.raises(ImportError, match=r'torch is missing .*pip install "fbuf\[torch\]"'):
            call({})


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        cwd=os.path.dirname(os.path.dirname(fbuf.__file__)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_does_not_import_torch():
    code = """
        import sys, fbuf, fbuf.torch
        print("torch" in sys.modules)
        import jax.numpy as jnp
        fbuf.torch.to_torch(jnp.ones(2))
        print("torch" in sys.modules)
    """
    assert run(code).split() == ["False", "True"]


def test_many_devices():
    code = """
        import jax, jax.numpy as jnp, numpy as np, torch
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from fbuf.torch import from_torch, to_torch

        first, second = jax.devices()
        mesh = Mesh(np.array(jax.devices()), "d")
        for spec in (P("d"), P()):
            x = jax.device_put(jnp.arange(16, dtype=jnp.int32), NamedSharding(mesh, spec))
            for copy in (None, True):
                try:
                    to_torch({"obs": x}, copy=copy)
                except ValueError as error:
                    print(error)
            assert to_torch(jax.device_put(x, jax.devices()[0])).shape == (16,)
            assert to_torch(x.addressable_shards[0].data).dtype == torch.int32
        there = jax.device_put(jnp.arange(16, dtype=jnp.int32), second)
        assert to_torch(there).tolist() == list(range(16))

        t = torch.arange(16, dtype=torch.int32)
        for device in (first, second):
            y = from_torch(t, device=device)
            assert y.devices() == {device}
            assert y.unsafe_buffer_pointer() != t.data_ptr()
        sharded = from_torch(t, device=NamedSharding(mesh, P("d")))
        assert sharded.sharding.spec == P("d") and sharded.tolist() == t.tolist()
        y = from_torch(t, copy=False, device=first)
        assert y.unsafe_buffer_pointer() == t.data_ptr()
        t.fill_(9)
        assert sharded.tolist() == list(range(16))
        for device in (second, NamedSharding(mesh, P("d"))):
            try:
                from_torch({"obs": t}, copy=False, device=device)
            except ValueError as error:
                print(error)
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    lines = run(code, XLA_FLAGS=flags, JAX_PLATFORMS="cpu").splitlines()
    assert len(lines) == 6
    for line in lines[:4]:
        assert "to_torch: leaf 'obs' is spread over 2 devices; expected one. Gather it with" in line
    for line in lines[4:]:
        assert "from_torch: leaf 'obs' is on" in line
        assert "Use from_torch(tree, copy=True, device=device)." in line
