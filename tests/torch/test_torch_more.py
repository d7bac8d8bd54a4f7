import jax
import jax.numpy as jnp
import pytest

import fbuf
from fbuf.torch import to_torch
from tests.support.processes import devices, run_python
from tests.support.refusals import raises

pytestmark = pytest.mark.more

torch = pytest.importorskip("torch")


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


def test_no_array_and_no_tensor_ends_the_process():
    lines = run_python(CRASHES, options=("-W", "ignore")).stdout.splitlines()
    assert lines.pop() == "end" and len(lines) > 90
    assert not [line for line in lines if line.startswith("FOREIGN")]
    refused, worked = ({line.split(" ", 1)[1] for line in lines if line.startswith(kind)} for kind in ("ref", "work"))
    hostile = "negative key deleted int4 grad neg conj pretended functional mapped meta sparse jagged wide resized"
    assert set(hostile.split()) <= refused
    assert {"negative", "expanded", "strided", "flipped", "offset"} <= worked  # negative: with copy=True


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
