"""Measures what crosses between JAX and torch, and how: the tables of fbuf/TORCH.md.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m tests.support.torch_table --write

A cell is what happened: "shared" (the same memory), "copied" (other memory, same values), "crosses" (no bytes), or
"refused" with the error's type.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fbuf
from fbuf.torch import from_torch, to_torch
from tests.support.tensors import NARROW, WIDE, payload, pointer

PAGE = Path(fbuf.__file__).parent / "TORCH.md"
SMALL = "int4 uint4 float4_e2m1fn float8_e3m4".split()
FLOATS = np.arange(16, dtype=np.float32)


def outcome(call: Callable[[], Any], leaf: Any) -> str:
    try:
        out = call()
    except (TypeError, ValueError) as error:
        return f"refused ({type(error).__name__})"
    (out,) = jax.tree.leaves(out)[:1]
    (leaf,) = jax.tree.leaves(leaf)[:1]
    assert payload(out) == payload(leaf), leaf
    if not payload(leaf):
        return "crosses"  # nothing to share
    return "shared" if pointer(out) == pointer(leaf) else "copied"


def merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Neighbouring rows of equal cells as one."""
    out: list[tuple[str, ...]] = []
    for name, *cells in rows:
        if out and list(out[-1][1:]) == cells:
            out[-1] = (f"{out[-1][0]}, {name}", *cells)
        else:
            out.append((name, *cells))
    return out


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_row(name: str, leaf: Any) -> tuple[str, ...]:
    return (name, *(outcome(lambda c=copy: to_torch(leaf, copy=c), leaf) for copy in (None, True, False)))


def from_row(name: str, leaf: Any, **options: Any) -> tuple[str, ...]:
    return (name, *(outcome(lambda c=copy: from_torch(leaf, copy=c, **options), leaf) for copy in (True, False)))


def array(name: str) -> jax.Array:
    return (jnp.arange(16, dtype=jnp.int32) % 2 + 1).astype(name)


def dtypes() -> str:
    rows, narrow, wide = [], [], []
    for name in (*NARROW, *SMALL):
        x = array(name)
        there = to_torch(x, copy=True) if name in NARROW else None
        cells = [outcome(lambda x=x: to_torch(x), x)]
        cells += ["no such tensor"] * 2 if there is None else list(from_row("", there)[1:])
        rows.append((f"`{name}`", *cells))
    for name in WIDE:
        t = torch.ones(16, dtype=getattr(torch, name))
        jax.config.update("jax_enable_x64", True)
        x = array(name)
        on = (outcome(lambda x=x: to_torch(x), x), *from_row("", t)[1:])
        jax.config.update("jax_enable_x64", False)
        wide.append((f"`{name}`", *on))
        narrow.append((f"`{name}`", "no such array", *from_row("", t)[1:]))
    for several, where in ((wide, "with `jax_enable_x64`"), (narrow, "without it")):
        rows += [(f"{names} {where}", *cells) for names, *cells in merged(several)]
    head = ("dtype", "`to_torch(x)`", "`from_torch(t)`", "`from_torch(t, copy=False)`")
    small = len(NARROW) + len(SMALL)
    return markdown(head, [*merged(rows[:small]), *rows[small:]])


def arrays() -> str:
    fields = np.zeros(3, [("flag", "u1"), ("value", "<f4")])
    read_only, square = FLOATS.copy(), np.arange(16.0, dtype=np.float32).reshape(4, 4)
    read_only.flags.writeable = False
    buffer = fbuf.Buffer(8)
    state = buffer.extend(buffer.init({"obs": jnp.zeros(16)}), {"obs": jnp.ones((4, 16))})
    _, batch = buffer.sample(state, jax.random.key(0), 4)
    mesh = Mesh(np.array(jax.devices()), "d")
    spread = jax.device_put(FLOATS, NamedSharding(mesh, PartitionSpec("d")))
    everywhere = jax.device_put(FLOATS, NamedSharding(mesh, PartitionSpec()))
    second = jax.device_put(FLOATS, jax.devices()[1])
    deleted = jnp.zeros(4)
    deleted.delete()

    def traced() -> tuple[str, ...]:
        cells: list[tuple[str, ...]] = []
        jax.jit(lambda x: [cells.append(to_row("a tracer, inside `jit`", x)), x][1])(FLOATS)
        return cells[0]

    rows = [
        to_row("a `jax.Array` on one CPU device: a `Sample`'s leaves", batch.data["obs"]),
        to_row("the same, on the second device", second),
        to_row("0-d", jnp.float32(1)),
        to_row("empty", jnp.zeros((0, 3))),
        to_row("in a `BufferState`", state),
        to_row("sharded over devices", spread),
        to_row("replicated over devices", everywhere),
        traced(),
        to_row("a typed PRNG key", jax.random.key(0)),
        to_row("deleted (donated)", deleted),
        to_row("numpy, contiguous", FLOATS),
        to_row("numpy, transposed", square.T),
        to_row("numpy, strided: `x[::2]`", FLOATS[::2]),
        to_row("numpy, negative strides: `x[::-1]`", FLOATS[::-1]),
        to_row("numpy, a field of a structure (odd strides)", fields["value"]),
        to_row("numpy, misaligned", np.zeros(17, np.uint8)[1:].view(np.float32)),
        to_row("numpy, read-only", read_only),
        to_row("numpy, foreign byte order", FLOATS.astype(">f4")),
        to_row("numpy, masked", np.ma.masked_array(FLOATS, FLOATS > 3)),
        to_row("a Python number, text, an object", 1.5),
    ]
    return markdown(("leaf", "`to_torch(x)`", "`copy=True`", "`copy=False`"), rows)


def tensors() -> str:
    ones, square = torch.arange(32, dtype=torch.float32), torch.arange(64, dtype=torch.float32).reshape(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    def traced() -> tuple[str, ...]:
        cells: list[tuple[str, ...]] = []
        jax.jit(lambda x: [cells.append(from_row("called inside `jit`", ones)), x][1])(FLOATS)
        return cells[0]

    rows = [
        from_row("contiguous", ones),
        from_row("transposed: `t.T`", square.T),
        from_row("0-d", torch.tensor(1.0)),
        from_row("empty", torch.zeros(0, 3)),
        from_row("strided: `t[::2]`, `t[:, :4]`", square[:, ::2]),
        from_row("expanded", square[:1].expand(4, 8)),
        from_row("beginning within 64 bytes: `t[1:]`", ones[1:]),
        from_row("requires grad (a `Parameter`)", ones.clone().requires_grad_()),
        from_row("conj bit set", torch.ones(16, dtype=torch.complex64).conj()),
        from_row("neg bit set", torch._neg_view(ones)),
        from_row("sparse", torch.eye(3).to_sparse()),
        from_row("nested, strided", strided),
        from_row("nested, jagged", jagged),
        from_row("meta", torch.ones(2, device="meta")),
        from_row("quantized", torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)),
        traced(),
        from_row("with `device=` another one", ones, device=jax.devices()[1]),
        from_row("numpy, a number, text", FLOATS),
    ]
    return markdown(("leaf", "`from_torch(t)`", "`copy=False`"), rows)


TABLES = {"dtypes": dtypes, "arrays": arrays, "tensors": tensors}


def filled(page: str) -> str:
    """The page with its tables measured anew."""
    for name, measure in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        assert between.search(page), name
        table = measure()
        page = between.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
    return page


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor|.*quantiz.*")
    page = PAGE.read_text()
    new = filled(page)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(new)
    elif new != page:
        sys.exit(f"fbuf/TORCH.md is out of date. Expected:\n{new}")
