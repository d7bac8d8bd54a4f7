"""Arrays and tensors across DLPack: what is shared, what is copied, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.torch import _from_torch, _to_torch, from_torch, to_torch
from tests.support.processes import devices, run_python
from tests.support.refusals import raises
from tests.support.trees import x64

torch = pytest.importorskip("torch")

NARROW = "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64".split()
NARROW += "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""Dtypes that JAX has with `jax_enable_x64` only, and what it narrows them to."""


def pointer(x):
    if isinstance(x, jax.Array):
        return x.unsafe_buffer_pointer()
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


def payload(x):
    """The bytes of an array or a tensor, without either library's help in converting."""
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
        return bytes(x.reshape(-1).view(torch.uint8).numpy()) if x.numel() else b""
    return np.ascontiguousarray(x).tobytes()


def check_crossing(x, name):
    for leaf in (x, np.array(x)):
        for copy in (None, False, True):
            t = to_torch({"x": leaf}, copy=copy)["x"]
            assert t.dtype == getattr(torch, name) and tuple(t.shape) == x.shape, name
            assert payload(t) == payload(x), name
            assert x.size == 0 or (pointer(t) == pointer(leaf)) is (copy is not True), name
    t = to_torch(x, copy=True)  # torch's own memory, as a learner's tensors are
    for copy in (False, True):
        y = from_torch({"x": t}, copy=copy)["x"]
        assert y.dtype == x.dtype and y.shape == x.shape, name
        assert payload(y) == payload(x), name
        assert x.size == 0 or (pointer(y) == pointer(t)) is (not copy), name


def test_every_dtype_crosses_both_ways_shared_or_copied():
    for name in (*NARROW, *WIDE):
        with x64(name in WIDE):
            check_crossing(jax.device_put((np.arange(15) % 2 + 1).astype(name).reshape(3, 5)), name)
    for shape in ((), (0,), (4, 0), (1, 1)):
        check_crossing(jax.device_put(np.ones(shape, np.float32)), "float32")


def test_copying_takes_numpy_arrays_that_cannot_be_shared():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    fields = np.zeros(3, [("flag", "u1"), ("value", "<f4")])
    for leaf in (x[::-1], x[:, ::-2], fields["value"], np.asarray(jnp.asarray(x)), np.broadcast_to(x, (2, 3, 4))):
        t = to_torch(leaf, copy=True)
        assert np.array_equal(t.numpy(), leaf)
        t.add_(1)
        assert not np.array_equal(t.numpy(), leaf)


def test_the_structure_does_not_change():
    ones = jax.device_put(np.ones(2, np.float32))
    tree = {"a": [ones, (ones, None)], "b": fbuf.Index(ones, ones)}
    out = to_torch(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(out))
    back = from_torch(out)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(back))
    assert to_torch({}) == {} and from_torch({}, copy=False) == {} and from_torch(()) == ()


@pytest.fixture(scope="module")
def sampled():
    buffer = fbuf.Buffer(capacity=32)
    rows = {"obs": np.ones((8, 16), np.float32), "reward": np.arange(8, dtype=np.float32)}
    state = jax.jit(buffer.extend)(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    return jax.jit(buffer.sample, static_argnums=2)(state, np.array([0, 7], np.uint32), 4)


def test_a_sample_is_shared_and_a_state_copied_by_default(sampled):
    state, batch = sampled
    tensors = to_torch(batch)
    assert isinstance(tensors, fbuf.Sample) and isinstance(tensors.index, fbuf.Index)
    assert isinstance(to_torch(state), fbuf.BufferState)

    def shared(tree, **options):
        pairs = zip(jax.tree.leaves(to_torch(tree, **options)), jax.tree.leaves(tree), strict=True)
        return [pointer(t) == pointer(x) for t, x in pairs if x.size]

    assert all(shared(batch)) and not any(shared(batch, copy=True))
    assert not any(shared(state)) and not any(shared({"deep": [state]}))
    assert all(shared(state, copy=False))
    # Beside a state a sample is still shared, whichever comes first.
    owners = [*[False] * len(shared(state)), *[True] * len(shared(batch))]
    assert shared((state, batch)) == owners
    assert shared((batch, state)) == owners[::-1]


@pytest.mark.more
def test_a_copy_is_complete_on_return():
    # A copy queues behind other work: unless from_torch waits for it, it reads the ones.
    busy = jax.jit(lambda a: jax.lax.fori_loop(0, 40, lambda i, b: jnp.tanh(b @ b * 1e-3), a))
    a, cpu = jax.device_put(np.ones((500, 500), np.float32)), jax.devices("cpu")[0]
    jax.block_until_ready(busy(a))
    for device in (None, jax.sharding.SingleDeviceSharding(cpu)):
        t = torch.zeros(1 << 20)
        working = busy(a)
        copied = from_torch(t, device=device)
        t.fill_(1)
        assert not np.asarray(copied).any()
        jax.block_until_ready(working)


def test_donation_is_in_place_after_copying_and_copies_while_shared():
    step = jax.jit(lambda v: v.at[0].set(v[1]), donate_argnums=0)

    def overwrites(x):
        before = pointer(x)
        return pointer(step(x)) == before

    for copy in (True, False):
        x = jax.device_put(np.arange(64, dtype=np.float32)) + 0  # memory of XLA's own
        held = to_torch(x, copy=copy)
        assert overwrites(x) is copy and held[0] == 0
    source = torch.arange(64, dtype=torch.float32)
    assert overwrites(from_torch(source)) and source[0] == 0


def test_memory_outlives_either_side():
    x = jax.device_put(np.arange(1024, dtype=np.int32)) + 0
    t = to_torch(x)
    del x
    assert int(t.sum()) == 1023 * 512
    y = from_torch(t, copy=False)
    del t
    assert int(np.asarray(y).sum()) == 1023 * 512


def test_any_layout_of_a_tensor_is_copied_and_a_transpose_shared():
    t = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    for view in (t[:, ::2], t[::2], t.T, t[:1].expand(4, 8), t.flatten()[1:], t[3, 3]):
        assert np.array_equal(from_torch(view), view.numpy())
    y = from_torch(t.T, copy=False)
    assert pointer(y) == pointer(t)
    assert np.array_equal(jax.jit(lambda v: v * 2)(y), t.numpy().T * 2)
    assert from_torch(torch.as_strided(t, (1, 8), (3, 1)), copy=False).shape == (1, 8)


def refused(call, leaf, error, match, **options):
    """A bare leaf and one in a tree are refused, the latter by its path."""
    raises(error, match, call, leaf, **options)
    raises(error, r"leaf 'next/obs' .*" + match, call, {"next": {"obs": leaf}}, **options)


def test_arrays_without_values_are_refused():
    match = r"leaf 'obs' is a tracer; expected a concrete array\. Convert what the jitted function returns"
    for copy in (None, False, True):
        with pytest.raises(TypeError, match=match):
            jax.jit(lambda x, copy=copy: to_torch({"obs": x}, copy=copy) and x)(np.ones(2))
    x = jax.device_put(np.ones(4))
    x.delete()
    refused(to_torch, x, ValueError, r"is deleted .*Use what the jitted call returned")
    key = jax.random.key(0)
    refused(to_torch, key, TypeError, r"typed PRNG key.*jax\.random\.key_data\(key\)")
    assert to_torch(jax.random.key_data(key)).dtype == torch.uint32


def test_dtypes_that_torch_lacks_are_refused():
    casts = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "float32", "float8_e3m4": "float32"}
    for name, cast in casts.items():
        match = rf"is {name}; expected a dtype .*Cast with x\.astype\(jnp\.{cast}\)"
        x = np.zeros(4, name)
        refused(to_torch, jax.device_put(x), TypeError, match)
        refused(to_torch, x, TypeError, match)
        assert to_torch(x.astype(cast)).shape == (4,)


def test_leaves_that_are_no_arrays_of_numbers_are_refused():
    cases = [
        (np.zeros(2, "U3"), r"is str96; .*Leave it out"),
        (np.array([None]), r"is object; .*Leave it out"),
        (np.zeros(2, [("a", "u1")]), r"is void8; .*Leave it out"),
        (np.zeros(2, np.clongdouble), r"Cast with x\.astype\(jnp\.complex64\)"),
        (np.zeros(2, ">f4"), r"dtype '>f4'; expected native byte order"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"masked array; .*x\.filled\(0\)"),
        (1.5, r"is a float; expected a jax\.Array or numpy\.ndarray\. Wrap it: jnp\.asarray\(x\)"),
        (np.float32(1), r"is a float32; expected a jax\.Array.*Wrap it: jnp\.asarray\(x\)"),
        ("text", r"is a str; .*Leave it out"),
        (torch.ones(2), r"is a Tensor; expected a jax\.Array"),
    ]
    for leaf, match in cases:
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
        # A numpy view of a JAX array is read-only: torch must not write through it.
        refused(to_torch, np.asarray(jax.device_put(x)), ValueError, r"is read-only" + fix, copy=copy)


def test_devices_that_the_other_library_cannot_use_are_refused(monkeypatch):
    assert _to_torch._torch_reaches(torch, "cpu") and not _to_torch._torch_reaches(torch, "tpu")
    assert _from_torch._jax_reaches("cpu") and not _from_torch._jax_reaches("mps")
    raises(TypeError, r"device is 'cpu'; expected a Device or", lambda: from_torch(torch.ones(2), device="cpu"))
    x = jax.device_put(np.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda kind: (_ for _ in ()).throw(RuntimeError("none")))
        assert not _from_torch._jax_reaches("cuda")
    monkeypatch.setattr(_to_torch, "_torch_reaches", lambda torch, platform: False)
    match = r"expected a device of this torch. Move it with jax.device_put"
    refused(to_torch, x, ValueError, match)
    monkeypatch.setattr(_from_torch, "_jax_reaches", lambda kind: False)
    match = r"is on 'cpu'; expected a device that this JAX can use\. Move it with x\.cpu\(\)"
    refused(from_torch, torch.ones(2), ValueError, match)


class Unpackable:
    def to_dict(self):
        return {}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_tensors_that_jax_would_misread_are_refused():
    ones = torch.ones(16)
    negative, short = torch._neg_view(ones), torch.ones(16)  # contiguous and aligned: only the bit tells
    short.untyped_storage().resize_(60)
    cases = [
        (ones.clone().requires_grad_(), ValueError, r"requires grad; .*outside autograd\. Use x\.detach\(\)"),
        (torch.nn.Parameter(ones), ValueError, r"requires grad; .*Use x\.detach\(\)"),
        (torch.ones(16, dtype=torch.complex64).conj(), ValueError, r"conj bit set.*x\.resolve_conj\(\)"),
        (negative, ValueError, r"neg bit set.*x\.resolve_neg\(\)"),
        (short, ValueError, r"has no memory for its shape"),
        (torch.eye(3).to_sparse(), TypeError, r"sparse_coo.*x\.to_dense\(\)"),
        (torch.nested.nested_tensor([ones, ones[:3]]), TypeError, r"nested tensor; .*to_padded_tensor\(x, 0\)"),
        (torch.empty(2, dtype=torch.complex32), TypeError, r"is complex32; .*Cast with x\.to\(torch\.complex64\)"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), TypeError, r"is float4_e2m1fn_x2; .*x\.to\(torch\.float32\)"),
        (torch.ones(2, device="meta"), ValueError, r"is on 'meta'; expected a device .*Make it on a real device"),
        (1.5, TypeError, r"is a float; expected a torch\.Tensor\. Wrap it: torch\.as_tensor\(x\)"),
        (np.float32(1), TypeError, r"is a float32; .*Wrap it: torch\.as_tensor\(x\)"),
        (np.ones(2), TypeError, r"is a ndarray; expected a torch\.Tensor"),
        (jax.device_put(np.ones(2)), TypeError, r"is a ArrayImpl; expected a torch\.Tensor"),
        (Unpackable(), TypeError, r"is a Unpackable; .*Unpack it: x\.to_dict\(\)"),
    ]
    for copy in (False, True):
        for leaf, error, match in cases:
            refused(from_torch, leaf, error, match, copy=copy)
        assert np.asarray(from_torch(negative.resolve_neg(), copy=copy))[0] == -1


def test_64_bit_tensors_are_refused_while_x64_is_off():
    with x64(False):
        for name, cast in WIDE.items():
            t = torch.ones(16, dtype=getattr(torch, name))
            match = rf"is {name}, and jax_enable_x64 is off\. Cast with x\.to\(torch\.{cast}\)"
            for copy in (False, True):
                refused(from_torch, t, TypeError, match, copy=copy)
            assert from_torch(t.to(getattr(torch, cast))).dtype == cast


def test_memory_that_jax_would_copy_is_not_shared():
    t = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    fix = r".*to share\. Use x\.contiguous\(\), or from_torch\(tree, copy=True\)"
    for view, text in (
        (t[:, :4], r"shape \[8, 4\] and strides \[8, 1\]"),
        (t[:, ::2], r"shape \[8, 4\] and strides \[8, 2\]"),
        (t[:1].expand(4, 8), r"shape \[4, 8\] and strides \[0, 1\]"),
    ):
        refused(from_torch, view, ValueError, text + fix, copy=False)
    for offset in (1, 4, 8):
        match = r"is not aligned to 64 bytes. Use x\.clone\(\), or from_torch"
        refused(from_torch, t.flatten()[offset:], ValueError, match, copy=False)
    assert pointer(from_torch(t.flatten()[16:], copy=False)) == pointer(t) + 64


def test_from_torch_inside_jit_is_refused():
    t = torch.ones(16)
    for copy in (False, True):
        with pytest.raises(TypeError, match=r"called inside jax\.jit\. .*step\(from_torch\(tree\)\)"):
            jax.jit(lambda x, copy=copy: x + from_torch(t, copy=copy))(np.ones(16, np.float32))
    grad = jax.grad(lambda x: (x * from_torch(t)).sum())(np.ones(16, np.float32))  # eager, though traced by grad
    assert np.asarray(grad)[0] == 1


def test_an_error_of_either_library_names_the_leaf():
    def inside(x):
        from_torch({"obs": x})
        return x

    raises(RuntimeError, r"leaf 'obs' was refused on its way through", lambda: torch.vmap(inside)(torch.ones(2, 16)))


@pytest.mark.parametrize("wide", [False, True])
def test_strict_settings_of_jax_change_nothing(wide):
    x, t = jax.device_put(np.array([1.0, np.nan, np.inf] * 16, np.float32)), torch.full((64,), float("nan"))
    strict = jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow_explicit"), jax.debug_nans(True)
    with strict[0], strict[1], strict[2], jax.debug_infs(True), jax.check_tracer_leaks(True), x64(wide):
        for copy in (False, True):
            assert to_torch(x, copy=copy).isnan().any()
            for device in (None, jax.devices("cpu")[0]):
                assert from_torch(t, copy=copy, device=device).dtype == jnp.float32


@pytest.mark.more
def test_one_of_several_devices_is_named():
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

        t = torch.arange(16, dtype=torch.int32)
        sharded = from_torch(t, device=NamedSharding(mesh, P("d")))
        assert sharded.sharding.spec == P("d") and sharded.tolist() == t.tolist()
        for device in (second, NamedSharding(mesh, P("d"))):
            try:
                from_torch({"obs": t}, copy=False, device=device)
            except ValueError as error:
                print(error)
    """
    lines = run_python(code, **devices(2)).stdout.splitlines()
    assert len(lines) == 6
    for line in lines[:4]:
        assert "to_torch: leaf 'obs' is on 2 devices; expected one. Gather it with" in line
    for line in lines[4:]:
        assert "from_torch: leaf 'obs' is on" in line
        assert "Use copy=True." in line


CRASHES = """
    import jax, jax.numpy as jnp, numpy as np, torch, fbuf
    from fbuf.torch import from_torch, to_torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def attempt(name, call):
        try:
            call()
            print("worked", name)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            print("refused" if "_torch" in str(error) or "Replay" in str(error) else f"FOREIGN {error}", name)

    x = np.arange(16, dtype=np.float32)
    t = torch.arange(16, dtype=torch.float32)
    deleted, donated, resized = jnp.ones(4), jnp.ones(4), torch.ones(64)
    deleted.delete(), jax.jit(lambda v: v + 1, donate_argnums=0)(donated), resized.untyped_storage().resize_(0)
    leaves = dict(
        negative=x[::-1], broadcast=np.broadcast_to(x, (3, 16)),
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
        resized=resized, pretended=FakeTensorMode().from_tensor(torch.ones(64)),
    )
    torch.func.functionalize(lambda x: attempt("functional", lambda: from_torch({"x": x})))(t)
    torch.func.vmap(lambda x: (attempt("mapped", lambda: from_torch({"x": x})), x)[1])(t)
    for name, leaf in tensors.items():
        for copy in (True, False):
            attempt(name, lambda: from_torch({"x": leaf}, copy=copy))
        example = {"x": np.zeros(leaf.shape[1:] if not leaf.is_nested else (), np.float32)}
        attempt(f"row {name}", lambda: fbuf.Replay(fbuf.Buffer(64), example).extend({"x": leaf}))
    print("end")
"""


@pytest.mark.more
def test_no_array_and_no_tensor_ends_the_process():
    lines = run_python(CRASHES, options=("-W", "ignore")).stdout.splitlines()
    assert lines.pop() == "end" and len(lines) > 90
    assert not [line for line in lines if line.startswith("FOREIGN")]
    refused, worked = ({line.split(" ", 1)[1] for line in lines if line.startswith(kind)} for kind in ("ref", "work"))
    hostile = "negative key deleted int4 grad neg conj pretended functional mapped meta sparse jagged wide resized"
    assert set(hostile.split()) <= refused
    assert {"negative", "expanded", "strided", "flipped", "offset"} <= worked  # negative: with copy=True


@pytest.mark.more
@pytest.mark.gpu
def test_arrays_on_a_gpu_are_shared():
    gpu = jax.device_put(jnp.arange(16.0), jax.devices("gpu")[0])
    if not torch.cuda.is_available():
        raises(ValueError, "expected a device of this torch", to_torch, gpu)
        return
    shared = to_torch(gpu)
    assert shared.is_cuda and shared.data_ptr() == gpu.unsafe_buffer_pointer()
    back = fbuf.torch.from_torch(shared, copy=False)
    assert back.unsafe_buffer_pointer() == shared.data_ptr()
    copied = fbuf.torch.from_torch(shared)
    assert copied.devices() == gpu.devices() and copied.unsafe_buffer_pointer() != shared.data_ptr()
    assert not to_torch(jax.device_put(gpu, jax.devices("cpu")[0])).is_cuda
