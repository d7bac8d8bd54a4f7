"""`assert_inplace`: a test that a jitted step updates a donated buffer in place.

It reads the temporary bytes of the compiled program. Equal pointers prove nothing, as XLA may copy out and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import jax

from fbuf._core.pytree import tree_bytes

__all__ = ["assert_inplace", "measure"]

__dir__ = __all__.copy  # without the imports


class Memory(NamedTuple):
    """Hold the bytes of one compiled call, other than the donated buffer."""

    temporary: int  # scratch memory of the program
    given: int  # arguments that are not donated
    made: int  # results that do not reuse a donated argument
    read: int  # rows and nodes of trees that it reads, whether or not it returns them
    reused: int  # bytes of donated arguments that results reuse
    bound: int  # default limit of `temporary`


def measure(fn: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = 0) -> Memory:
    """Compile `fn`, or `jax.jit(fn, donate_argnums=donate)` if it is not jitted; return its memory analysis.

    Raises:
      AssertionError: `fn` is jitted without donating these arguments (arrays or shapes).
    """
    donated = (donate,) if isinstance(donate, int) else donate
    if isinstance(fn, MethodType):
        fn = partial(fn.__func__, fn.__self__)
    step: Any = fn if isinstance(fn, partial) else partial(fn)
    if hasattr(step.func, "lower"):
        jitted, arguments = step.func, (*step.args, *args)
    else:
        jitted, arguments, step = jax.jit(step, donate_argnums=donated), args, partial(step.func)
    # Wrappers of other libraries may have `lower` only.
    traced = jitted.trace(*arguments, **step.keywords) if hasattr(jitted, "trace") else None
    lowered = jitted.lower(*arguments, **step.keywords) if traced is None else traced.lower()
    infos = jax.tree.leaves(lowered.args_info)
    wanted = sum(tree_bytes(args[i]) for i in donated)
    if tree_bytes([info for info in infos if info.donated]) < wanted:
        numbers = tuple(len(step.args) + i for i in donated)
        raise AssertionError(
            f"assert_inplace: the function is jitted without donation, so each call copies the {wanted} bytes. Write "
            f"jax.jit(step, donate_argnums={numbers if numbers[1:] else numbers[0]})."
        )
    analysis: Any = lowered.compile().memory_analysis()
    copied = tree_bytes([info for info in infos if not info.donated])
    made = int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    reused, read = int(analysis.alias_size_in_bytes), 0 if traced is None else _bytes_read(traced.jaxpr.jaxpr)
    bound = 3 * (copied + max(made, read)) + 64 * 1024
    return Memory(int(analysis.temp_size_in_bytes), copied, made, read, reused, bound)


def _bytes_read(jaxpr: Any) -> int:
    """Return the bytes that gathers and callbacks return, those in a loop counted once, and of branches the most."""
    size = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "gather" or name.endswith("callback"):
            size += tree_bytes([variable.aval for variable in equation.outvars])
        inside = map(_bytes_read, _subprograms(tuple(equation.params.values())))
        size += max(inside) if name == "cond" else sum(inside)  # branches: of platforms, too
    return size


def _subprograms(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _subprograms(item)


def assert_inplace(
    fn: Callable[..., Any], *args: Any, donate: int | tuple[int, ...] = 0, bound: int | None = None
) -> Memory:
    """Raise if `fn` copies a donated argument.

    Args:
      fn: A step `(state, ...) -> ...` that returns the new state among its results. If it is jitted, it is tested as it is;
        otherwise it is jitted here with `donate_argnums=donate`.
      *args: Its arguments, or their `jax.ShapeDtypeStruct`s; nothing runs.
      donate: Positions of the donated arguments.
      bound: Limit of temporary bytes; None: three times the other arguments and the results (or what it reads, if that is
        more: it may use a batch and not return it), plus 64 KiB. A step that trains a network needs more: pass its temporary
        bytes without the buffer.
    Returns:
      The bytes.
    Raises:
      AssertionError: too many temporary bytes, a donated array was not reused, or `fn` is jitted without donation.

    Example:
      >>> import fbuf, fbuf.testing, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100_000)
      >>> state = buffer.init(jnp.zeros(8))
      >>> fbuf.testing.assert_inplace(buffer.extend, state, jnp.ones((32, 8))).temporary < 10_000
      True
    """
    memory = measure(fn, *args, donate=donate)
    donated = (donate,) if isinstance(donate, int) else donate
    buffer_bytes = sum(tree_bytes(args[i]) for i in donated)
    if buffer_bytes - memory.reused > 64 * 1024:
        rest = buffer_bytes - memory.reused
        raise AssertionError(f"assert_inplace: {rest} of {buffer_bytes} bytes are not reused. Return the new state.")
    most = memory.bound if bound is None else bound
    if memory.temporary > most:
        raise AssertionError(
            f"assert_inplace: the step needs {memory.temporary} temporary bytes; expected at most {most}. Unless the loss "
            f"needs them (then pass bound=), part of the {buffer_bytes} donated bytes is copied. Carry the state that each "
            f"method returns (also `sample`) to the next and return the last; avoid `peek`, `get` or `rows` before a write, "
            f"and jnp.where instead of lax.cond or mask=."
        )
    return memory
