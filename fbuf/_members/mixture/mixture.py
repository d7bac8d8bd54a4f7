"""`Mixture`: a frozen value that draws one batch from several buffers, whose states the caller keeps in a dict by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer import checks as _buffer_checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_kind, narrowed
from fbuf._core.component import component
from fbuf._core.dispatch import Operation
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Sample
from fbuf._members import quota
from fbuf._members.mixture import checks, draw, shards
from fbuf._members.mixture.draw import MixtureConfig
from fbuf.sharded import Sharded, ShardedState

Sizes = int | Mapping[str, int]
Shares = Mapping[str, Any] | None
States = Mapping[str, Any]
"""The state of each buffer, by name: a `BufferState`, or a `ShardedState`."""


@component
class Mixture(MixtureConfig):
    r"""Draw one batch from several buffers of any capacity, storage, sampler and view.

    A mixture has no state of its own: its methods take the states of its buffers, a dict by name, and return one. Add rows to a
    buffer with its own methods.

    Attributes:
      buffers: By name: `{"online": buffer, "offline": other}`, in the order of `source`. Their batches must have equal
        leaves, shapes and dtypes; their rows need not. All may be `fbuf.sharded.Sharded`, over the same mesh axis.
      fractions: Share of the batch of each buffer, by name, with sum 1. None: equal.
      quota: How fractions f become B rows. "exact": f B rows of each, rounded by largest remainder, in order of the
        buffers. "random": a buffer is drawn for each row with probability f. "all": the rows of `sample(states, key,
        {"online": 64, "offline": 192})`.
      target: What `weight` corrects. "union": unequal probabilities over the rows of all buffers. "source": unequal
        probabilities within each buffer; the fractions are intended.
      beta: Exponent of the weights; `sample(..., beta=schedule(step))` overrides it for one call.
      normalize: Divide weights by the largest in the "batch", or not at all (None).
      if_empty: Rows of a buffer without available anchors: "share", they are drawn from the others by their fractions (never
        with fraction 0), which `batch.index.source` shows; "mask", they are masked. With "all": masked.

    With share :math:`g_s` of a batch from buffer s (its rows over B; with "random" the probability of the source),
    :math:`n_s` anchors and :math:`P_s(i)` the probability of anchor i in a draw of its sampler, `probability` is
    :math:`q(i) = g_s P_s(i)`. `weight` is :math:`(N q(i))^{-\beta}` with :math:`N = \sum_s n_s` over the sampled buffers
    (target "union"), or :math:`(n_s P_s(i))^{-\beta}` (target "source"). The weights and `beta` of the samplers are not used.

    Fractions may be traced: `sample(states, key, 256, fractions={"offline": schedule(step)})` changes the quotas without
    recompilation; other buffers share the rest by their fractions. Each buffer then draws up to B anchors and reads only
    the returned rows; samplers with memory (`Epoch`, `Consume`) lose none. Host storages do no extra work; device reads
    take memory for B rows of each buffer.

    Of `Sharded` buffers (draw="local"; `Uniform`, `Prioritized`, `Staleness`) every device draws B / D rows from its shards, by
    the fractions. Weights have the factor D M_s / M for the shard of a buffer. A buffer is empty if all its shards are; rows of
    a single empty shard are masked.

    Cost: with constant exact quotas that of `sample` of each buffer for its quota; else the draws of S batches of B anchors.
    Of sharded buffers one collective of 16 D bytes a buffer.

    Example (offline to online, with an annealed fraction):
      >>> import fbuf, jax, jax.numpy as jnp
      >>> online, offline = fbuf.prioritized(1000), fbuf.Buffer(5000)
      >>> mixture = fbuf.Mixture({"online": online, "offline": offline}, fractions={"online": 0.25, "offline": 0.75})
      >>> row = {"obs": jnp.zeros(3), "reward": 0.0}
      >>> recorded = {"obs": jnp.ones((50, 3)), "reward": jnp.ones(50)}
      >>> states = {"online": online.init(row), "offline": offline.extend(offline.init(row), recorded)}

      >>> def step(states, step, key):
      ...     states = states | {"online": online.add(states["online"], row)}
      ...     share = {"offline": jnp.maximum(0.0, 1 - step / 4)}
      ...     states, batch = mixture.sample(states, key, 8, fractions=share)
      ...     td_error = batch.data["reward"] + 0.1  # of your network
      ...     states = mixture.update_priority(states, batch.index, td_error)
      ...     return states, batch.index.source
      >>> step = jax.jit(step, donate_argnums=0)
      >>> for i in range(5):
      ...     states, source = step(states, i, jax.random.key(i))
      ...     print(source)
      [1 1 1 1 1 1 1 1]
      [0 0 1 1 1 1 1 1]
      [0 0 0 0 1 1 1 1]
      [0 0 0 0 0 0 1 1]
      [0 0 0 0 0 0 0 0]
    """

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the buffer method to use."""
        fix = ""
        if name in _OF_BUFFERS and "buffers" in self.__dict__:
            one = repr(self.names[0])
            args = _ARGUMENTS.get(name, "states[{0}], ...") if callable(getattr(Buffer, name, None)) else None
            fix = f"; its buffers have. Write mixture[{one}].{name}{'' if args is None else f'({args.format(one)})'}."
        raise AttributeError(f"'Mixture' object has no attribute {name!r}{fix}", name=name, obj=self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", checks.checked_buffers(self.buffers))
        if self.fractions is not None:
            object.__setattr__(self, "fractions", checks.checked_fractions(self.fractions, self.names))
        if self.quota == "all" and self.fractions is not None:
            raise ValueError('Mixture: quota is "all"; expected fractions=None.')
        _buffer_checks.check_number("Mixture", "beta", self.beta)
        object.__setattr__(self, "beta", float(self.beta))

    def __getitem__(self, name: str) -> Any:
        return dict(self.members)[self._known("Mixture", name)]

    def sample(
        self, states: States, key: jax.Array, batch_size: Sizes, *, fractions: Shares = None, beta: Any = None
    ) -> tuple[dict[str, Any], Sample]:
        """Draw a batch from all buffers. Carry the returned states: they order this read before later writes.

        Args:
          states: Those of the buffers, by name, from their methods or an earlier call.
          key: PRNG key, typed or raw; consumed.
          batch_size: B, a Python int; with quota="all" rows of each buffer, by name. Of sharded buffers multiples of D.
          fractions: For this call, by name, traced or not; other buffers share the rest. Negative fractions and NaN count as 0.
          beta: For this call.
        Returns:
          The states, and a `Sample` with leaves `[B, ...]`; `index.source` is the buffer of each row. Missing rows have `mask`
          False and zeros.
        Raises:
          ValueError, TypeError: a number is out of range, or batches of the buffers differ (at trace time).
        Cost: see `Mixture`. A batch is counted as `empty_samples` of the first buffer if all are empty.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> online, offline = fbuf.prioritized(10), fbuf.Buffer(10)
          >>> mixture = fbuf.Mixture({"online": online, "offline": offline})
          >>> states = {
          ...     "online": online.extend(online.init({"t": 0}), {"t": jnp.arange(5)}),
          ...     "offline": offline.extend(offline.init({"t": 0}), {"t": jnp.arange(10, 20)}),
          ... }
          >>> states, batch = mixture.sample(states, jax.random.key(0), 8, fractions={"online": 0.25})
          >>> batch.data["t"].shape, batch.index.source.tolist().count(0)
          ((8,), 2)
        """
        args = self._checked_draw("Mixture.sample", states, key, batch_size, fractions, beta)
        return self._draw(states, key, *args)

    def peek(
        self, states: States, key: jax.Array, batch_size: Sizes, *, fractions: Shares = None, beta: Any = None
    ) -> Sample:
        """Return the batch of `sample` without the states, for evaluation and for `vmap` over keys.

        Example:
          >>> import fbuf, jax
          >>> buffer = fbuf.Buffer(10)
          >>> mixture = fbuf.Mixture({"one": buffer, "other": buffer})
          >>> states = {name: buffer.add(buffer.init({"t": 0}), {"t": 7}) for name in mixture.names}
          >>> mixture.peek(states, jax.random.key(0), 8).weight.shape
          (8,)
        """
        args = self._checked_draw("Mixture.peek", states, key, batch_size, fractions, beta)
        return self._draw(states, key, *args)[1]

    def update_priority(
        self, states: States, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> dict[str, Any]:
        """Set priorities of drawn rows, each in its buffer; see `Buffer.update_priority`.

        Rows of buffers without priorities are skipped. The first buffer with priorities counts rows of no buffer.

        Args:
          index: `batch.index`, `[B]`.
          td_error, mask, eta: As for `Buffer.update_priority`.
        Raises:
          TypeError: no buffer has priorities, or `index` is not one of a mixture.
          ValueError: shapes differ.
        Cost: that of each buffer with priorities.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> online, offline = fbuf.prioritized(10), fbuf.Buffer(10)
          >>> mixture = fbuf.Mixture({"online": online, "offline": offline})
          >>> states = {name: mixture[name].add(mixture[name].init({"t": 0}), {"t": 7}) for name in mixture.names}
          >>> states, batch = mixture.sample(states, jax.random.key(0), 4)
          >>> states = mixture.update_priority(states, batch.index, jnp.full(4, 2.0))
          >>> float(online.stats(states["online"])["max_priority"])
          2.0
        """
        call = "Mixture.update_priority"
        index = self._checked_index(call, states, index, (1, 2))
        if not any(draw.buffer_of(buffer).sampler.prioritized for _, buffer in self.members):
            raise TypeError(f"{call}: no buffer has priorities. Use sampler=fbuf.samplers.Prioritized().")
        _buffer_checks.check_eta(call, eta)
        td_error, eta = check_kind(call, "td_error", td_error, "fi"), jnp.asarray(eta, jnp.float32)
        mask = None if mask is None else check_kind(call, "mask", mask, "b")
        return self._run(draw.update_priority, states, index, td_error, mask, eta)[0]

    def update_rows(self, states: States, index: Index, fields: PyTree, *, mask: Any = None) -> dict[str, Any]:
        """Replace some leaves of drawn rows, each in its buffer; see `Buffer.update_rows`.

        All buffers whose rows can change must have these leaves; the first of them counts rows of no buffer. Rows of data sets
        stay as they are.

        Raises:
          TypeError, ValueError: as `Buffer.update_rows`.

        Example:
          >>> import fbuf, jax
          >>> buffer = fbuf.Buffer(10)
          >>> mixture = fbuf.Mixture({"one": buffer, "other": buffer})
          >>> states = {name: buffer.add(buffer.init({"t": 0}), {"t": 7}) for name in mixture.names}
          >>> states, batch = mixture.sample(states, jax.random.key(0), 4)
          >>> states = mixture.update_rows(states, batch.index, {"t": batch.data["t"] + 100})
          >>> buffer.rows(states["one"], last=1).data["t"].tolist()
          [107]
        """
        call = "Mixture.update_rows"
        index = self._checked_index(call, states, index, (1, 2))
        mask = None if mask is None else check_kind(call, "mask", mask, "b")
        for name, buffer in ((name, draw.buffer_of(buffer)) for name, buffer in self.members):
            if not buffer.writer.read_only:
                state = states[name] if self._sharded is None else states[name].shards
                fields = narrowed(call, fields, buffer.storage.spec(state.rows)[0])
                break
        return self._run(draw.update_rows, states, index, fields, mask)[0]

    def window_index(self, states: States, index: Index) -> Index:
        """Return the rows `[B, T]` of sampled windows; see `Buffer.window_index`. All views have windows of equal length.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(10, view=fbuf.views.Sequence(3, episode_end=()))
          >>> mixture = fbuf.Mixture({"one": buffer, "other": buffer})
          >>> states = {name: buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)}) for name in mixture.names}
          >>> states, batch = mixture.sample(states, jax.random.key(0), 4)
          >>> rows = mixture.window_index(states, batch.index)
          >>> states = mixture.update_rows(states, rows, {"t": batch.data["t"] + 100})
        """
        call = "Mixture.window_index"
        index = self._checked_index(call, states, index, (1,))
        for _, buffer in self.members:
            _buffer_checks.check_windows(call, draw.buffer_of(buffer).view)
        return self._run(draw.window_index, states, index)[1]

    def route(self, index: Index, name: str) -> Index:
        """Return the rows of one buffer as its index, other rows masked, for methods of that buffer.

        Example:
          >>> import fbuf, jax
          >>> buffer = fbuf.Buffer(10)
          >>> mixture = fbuf.Mixture({"one": buffer, "other": buffer})
          >>> states = {name: buffer.add(buffer.init({"t": 0}), {"t": 7}) for name in mixture.names}
          >>> states, batch = mixture.sample(states, jax.random.key(0), 4)
          >>> rows = buffer.get(states["other"], mixture.route(batch.index, "other"))
          >>> rows.mask.tolist() == (batch.index.source == 1).tolist()
          True
        """
        name = self._known("Mixture.route", name)
        index = _buffer_checks.check_index("Mixture.route", index, (1, 2), *self._leaves)
        return draw.route(index, self.names.index(name), self[name])

    def can_sample(self, states: States) -> jax.Array:
        """Return whether a batch can be drawn, bool[]. With quota "all" or if_empty "mask" every sampled buffer must have
        anchors.

        Example:
          >>> import fbuf
          >>> buffer = fbuf.Buffer(10)
          >>> mixture = fbuf.Mixture({"one": buffer, "other": buffer})
          >>> bool(mixture.can_sample({name: buffer.init({"t": 0}) for name in mixture.names}))
          False
        """
        self._check("Mixture.can_sample", "can_sample(states)", states)
        return self._run(draw.can_sample, states)[1]

    def _check_state(self, states: States) -> None:
        """Raise ValueError if other buffers made the states; every operation does when it is traced."""
        for name, buffer in self.members:
            _buffer_checks.check_made_by(draw.buffer_of(buffer), states[name], "Mixture")

    @property
    def _sharded(self) -> Sharded | None:
        """The first buffer, if all are sharded."""
        one = self.members[0][1]
        return one if isinstance(one, Sharded) else None

    @property
    def _leaves(self) -> tuple[str, ...]:
        return ("source",) if self._sharded is None else ("source", "shard")

    def _run(self, operation: Operation[..., Any], states: States, *args: Any) -> tuple[dict[str, Any], Any]:
        """Run one dispatch; of sharded buffers one for each, which is to be jitted."""
        run = operation if self._sharded is None else operation.inline
        after, result = run(self, {name: states[name] for name in self.names}, *args)
        return after, result

    def _draw(
        self, states: States, key: jax.Array, fractions: Any, beta: Any, sizes: Any, batch_size: int
    ) -> tuple[dict[str, Any], Sample]:
        states = {name: states[name] for name in self.names}
        if self._sharded is not None:
            return shards.sample(self, self._sharded, states, (key, fractions, beta), (sizes, batch_size))
        return draw.sample(self, states, key, fractions, beta, static=(sizes, batch_size))

    def _checked_draw(
        self, call: str, states: States, key: Any, batch_size: Any, fractions: Any, beta: Any
    ) -> tuple[jax.Array | None, jax.Array | None, tuple[int, ...] | None, int]:
        """Return fractions and beta as arrays, quotas if they are known, and B; of sharded buffers for each device."""
        form = f"{call.rsplit('.', 1)[1]}(states, key, batch_size)"
        self._check(call, form, states)
        plain_states = {name: states[name].shards if self._sharded is not None else states[name] for name in self.names}
        checks.refuse_64_bits(call, [(name, draw.buffer_of(buffer)) for name, buffer in self.members], plain_states)
        checked = checks.checked_beta(call, beta)
        if self.quota == "all":
            if fractions is not None:
                raise ValueError(f'{call}: fractions is given; expected None with quota="all".')
            sizes: tuple[int, ...] | None = checks.checked_sizes(call, batch_size, self.names)
            total = sum(sizes or ())
        else:
            sizes, total = None, batch_size
            if isinstance(batch_size, Mapping):
                raise TypeError(f'{call}: batch_size is a dict; expected an int, or quota="all".')
        total, _ = _buffer_checks.check_draw(call, form, draw.buffer_of(self.members[0][1]), key, total, {})
        if self._sharded is not None:
            total, sizes = shards.checked_sizes(call, self._sharded, self.names, total, sizes)
        if sizes is not None:
            return None, checked, sizes, total
        if fractions is not None:
            return checks.traced_fractions(call, fractions, self.names, self.shares), checked, None, total
        if self.quota == "random":
            return jnp.asarray(self.shares, jnp.float32), checked, None, total
        return None, checked, quota.quotas(self.shares, total), total

    def _checked_index(self, call: str, states: States, index: Any, axes: tuple[int, ...]) -> Index:
        self._check(call, f"{call.rsplit('.', 1)[1]}(states, index, ...)", states)
        return _buffer_checks.check_index(call, index, axes, *self._leaves)

    def _known(self, call: str, name: Any) -> str:
        if not isinstance(name, str):
            raise TypeError(f"{call}: name is {type(name).__name__}; expected one of {', '.join(self.names)}.")
        if name not in self.names:
            raise ValueError(f"{call}: name is {name!r}; expected one of {', '.join(self.names)}.")
        return name

    def _check(self, call: str, form: str, states: Any) -> None:
        names = ", ".join(self.names)
        if not isinstance(states, Mapping):
            raise TypeError(
                f"{call}: states is {type(states).__name__}; expected a dict of the states of {names}. The order is {form}."
            )
        if set(states) != set(self.names):
            raise ValueError(f"{call}: states of {', '.join(map(str, states))}; expected {names}.")
        kind: type = BufferState if self._sharded is None else ShardedState
        for name, buffer in self.members:
            state = states[name]
            if not isinstance(state, kind):
                raise TypeError(
                    f"{call}: the state of '{name}' is {type(state).__name__}; expected {kind.__name__}. Write "
                    f"mixture[{name!r}].init(row)."
                )
            if isinstance(state, BufferState):
                _buffer_checks.refuse_donated(call, state)
                _buffer_checks.refuse_stacked(call, type(self), state)
            else:
                shards.check_state(call, buffer, state)


_OF_BUFFERS = {field.name for field in dataclasses.fields(Buffer)} | {name for name in dir(Buffer) if name[0] != "_"}
_ARGUMENTS = {
    "get": "states[{0}], mixture.route(batch.index, {0})",
    "priorities": "states[{0}], mixture.route(batch.index, {0})",
    "convert": "other, states[{0}]",
    "init": "row",
    "plan": "row",
    "resume": "row",
}
"""Arguments of methods that only buffers have, as text for `format` with the name of a buffer."""
