"""How small, and how fast, are real Atari frames in `Deduplicated`?

Size: ten games, one lane of frames each, in a buffer that holds them all. Block and places are the library's own choice
(`fit`) from the first rows, and the table grows (`grow`) where it passes 90 % of load, as a user would do it. Ours is all
that the buffer has on the device: ids, every place of the table whether used or not, ring and counters. The peer is what
the same transitions are as arrays, obs and next_obs stacks of 4 frames. Every frame is read back and compared, and a row
refused or evicted ends the benchmark. Expected: 100x as a geometric mean, 25x in every game, 120x over the six of `GAMES`.

Load: a table with as many places as the game has distinct blocks refuses nothing below 85 %; ours takes them all.

Reads: 256 transitions of 4-frame stacks (1,280 frames, of which 768 are in both stacks and so read twice) inside a scan,
both sides given the slots and carrying their batch (see `bench_sample`), against the bare gather of the same frames. Ours
finds the ends of episodes, ids, and frames. The gather's frames are far more bytes than a cache holds; that ours are few is
the point, but all games together have a table that no cache holds either. Expected: at most 1.5x as a geometric mean over
the games (on a GPU 1.2x); pictures that are new everywhere all the time lie above it. What `sample` takes, drawing included,
is in the notes, and that of `Device` on the same rows. The same for each block that `fit` may choose, as uint8 (expected: at
most 1.6x) and with what a network's first layer needs, `Scale` on both sides (float32: 1.15x).

Writes: 256 frames a jitted call in a full ring, against `Compressed` on the same rows: at least as fast as a geometric mean
over the games, and flat in rows held and in places. For the latter the frames go round, so that rings and tables of all
sizes are given the same blocks and hold each of them already. What else a write costs is memory: temporary bytes below four
times those of its frames.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from benchmarks import _atari, bench_compression, bench_sample
from benchmarks._harness import exponent, geometric_mean, interleave, measure_memory, ratio, row, spread
from fbuf._algorithms.block_stats import candidates
from fbuf._buffer import state as state_ops
from fbuf.testing import measure as measure_program

RATIO = "Bytes of raw obs and next_obs stacks over all of ours on the device, {} frames"
MEMORY = "Process memory over what nbytes says, {} frames"
FILLED = "Load of the table when the first row is refused"
READ = "256 transitions of 4-frame stacks inside a scan: time over that of a bare gather of the same frames"
READ_AS = "256 transitions of 4-frame stacks as {}: time over that of a bare gather of the same frames, {}"
READ_TARGETS = {"uint8": "<= 1.6", "float32": "<= 1.15"}
WRITE = "Write of 256 frames, ring full: time of Compressed's over ours, a frame"
GROWTH = "Write of 256 frames, ring full: growth exponent (its size) from {} to {} {}"
TEMPORARY = "Temporary bytes of extend over those of its frames"

GAMES = (*_atari.GAMES, *_atari.MORE_GAMES)
SHAPE = (84, 84)
FRAME = SHAPE[0] * SHAPE[1]
STACK, BATCH = 4, 256
LOT = 250  # rows a write while a buffer is filled
PROBED = 2_000  # rows that `fit` sees
CROWDED = 0.9  # load from which the table is grown
STEPS = 8  # reads in one scan
KEYS = ("obs",)
EXAMPLE = {"obs": np.zeros(SHAPE, np.uint8)}
Tree = Any

# ------------------------------------------------------------------------------------------ filling


@functools.lru_cache(maxsize=4)
def writer(buffer: fbuf.Buffer) -> Callable[..., Any]:
    """`extend`, jitted and donated; compiled once a buffer and shape."""
    return jax.jit(buffer.extend, donate_argnums=0)


def write_all(
    buffer: fbuf.Buffer, state: Any, rows: Iterable[Tree], crowded: float = CROWDED
) -> tuple[fbuf.Buffer, Any, int]:
    """Writes lots of rows, growing the table whenever it is fuller than `crowded`.

    Returns:
      The buffer and state then, and how often the table grew.
    Raises:
      AssertionError: a row was refused, or evicted for lack of room.
    """
    grown = 0
    for lot in rows:
        state = writer(buffer)(state, lot)
        while float(buffer.stats(state).get("blocks_load", 0)) > crowded:  # without a table there is none
            buffer, state = buffer.grow(state)
            grown += 1
    check_none_lost(buffer, state)
    return buffer, state, grown


def check_none_lost(buffer: fbuf.Buffer, state: Any) -> None:
    """No row was refused or evicted, or sizes and times are those of fewer rows than said."""
    stats = buffer.stats(state)
    refused, retired = int(stats["refused_rows"]), int(stats["retired_rows"])
    if refused or retired:
        raise AssertionError(f"bench_deduplicated: {refused} rows refused and {retired} retired; expected none")


def block_of(state: Any) -> tuple[int, int]:
    """Rows and pixels of a block."""
    (cut,) = state.rows.cuts
    return cut.grid.rows, 4 * cut.grid.words


def lots(rows: Tree, size: int = LOT) -> Iterator[Tree]:
    """Rows a lot at a time; the last may be smaller."""
    number = len(jax.tree.leaves(rows)[0])
    for first in range(0, number, size):
        yield jax.tree.map(lambda x, at=slice(first, first + size): x[at], rows)


def check_frames(buffer: fbuf.Buffer, state: Any, frames: np.ndarray) -> None:
    """The buffer gives back what went in, row by row."""
    get = jax.jit(buffer.get)
    for first in range(0, len(frames), LOT):
        at = np.arange(first, min(first + LOT, len(frames)), dtype=np.int32)
        rows = get(state, at)
        if not bool(rows.mask.all()) or not np.array_equal(rows.data["obs"], frames[at]):
            raise AssertionError(f"bench_deduplicated: rows {at[0]} to {at[-1]} are not those that went in")


# -------------------------------------------------------------------------------------------- size


@dataclasses.dataclass(frozen=True)
class Size:
    """One game in a buffer that holds all its frames."""

    storage: Any  # as it ended, grown
    nbytes: int  # on the device
    raw: int
    blocks: int  # distinct
    load: float
    grown: int

    @property
    def ratio(self) -> float:
        return self.raw / self.nbytes

    def __str__(self) -> str:
        h, w = self.storage.block
        times = {0: "never grown", 1: "grown once"}.get(self.grown, f"grown {self.grown} times")
        each = f"{self.nbytes * 2 * STACK * FRAME / self.raw:.0f} bytes a frame"
        return (
            f"bytes; {each}; block {h}x{w}; {self.blocks:,} distinct in {self.storage.blocks:,} places, load "
            f"{self.load:.2f}; {times}; 0 rows refused, 0 retired"
        )


def size_of(frames: np.ndarray, probed: int = PROBED) -> Size:
    """Writes all frames into a buffer for as many, with block and places from the first `probed`."""
    count = len(frames)
    storage = fbuf.storages.Deduplicated(keys=KEYS).fit({"obs": frames[:probed]}, capacity=count)
    buffer = fbuf.Buffer(count, storage=storage)
    buffer, state, grown = write_all(buffer, buffer.init(EXAMPLE), lots({"obs": frames}))
    check_frames(buffer, state, frames)
    stats = buffer.stats(state)
    return Size(
        storage=buffer.storage,
        nbytes=buffer.nbytes(state)["device"],
        raw=2 * STACK * FRAME * count,
        blocks=int(stats["blocks"]),
        load=float(stats["blocks_load"]),
        grown=grown,
    )


def report_sizes(sizes: dict[str, Size], judged: bool) -> list[dict[str, Any]]:
    """Rows of all games, their mean and the worst."""
    count = next(iter(sizes.values())).raw // (2 * STACK * FRAME)
    question = RATIO.format(f"{count:,}")
    small = "" if judged else "the targets are for 20,000 frames of ten games"
    report = [
        row(question, game, ours=size.nbytes, peer=size.raw, ratio=size.ratio, note=str(size))
        for game, size in sizes.items()
    ]

    def summary(case: str, figure: float, target: str, note: str = "") -> None:
        report.append(
            row(
                question,
                case,
                ratio=figure,
                target=target if judged else None,
                note="; ".join(filter(None, (note, small))),
            )
        )

    ratios = {game: size.ratio for game, size in sizes.items()}
    summary(f"geometric mean of {len(ratios)}", geometric_mean(list(ratios.values())), ">= 100")
    worst = min(ratios, key=ratios.__getitem__)
    summary("least", ratios[worst], ">= 25", worst)
    six = [figure for game, figure in ratios.items() if game in _atari.GAMES]
    summary(f"geometric mean of {len(six)} of issue A's", geometric_mean(six), ">= 120")
    return report


def fill(game: str, count: int) -> Iterator[Any]:
    """For `measure_memory`: a game's frames in a buffer that holds them, the table growing as it must."""

    def fed() -> tuple[fbuf.Buffer, Any]:
        pieces = _atari.blocks(game, count)
        first = next(pieces)[0]
        storage = fbuf.storages.Deduplicated(keys=KEYS).fit({"obs": first[:PROBED]}, capacity=count)
        buffer = fbuf.Buffer(count, storage=storage)
        rest = itertools.chain([first], (frames for frames, _ in pieces))
        rows = (lot for frames in rest for lot in lots({"obs": frames}))
        buffer, state, _ = write_all(buffer, buffer.init(EXAMPLE), rows)
        return buffer, jax.block_until_ready(state)

    fed()  # everything compiled and imported, at every size the table comes to
    yield
    buffer, state = fed()
    yield buffer.nbytes(state)["device"]


def memory(game: str, count: int) -> dict[str, Any]:
    """The row of one game's process memory: no target, as a table of some megabytes is no more than what JAX keeps."""
    list(_atari.blocks(game, count))  # plays what is missing here, not in the process that is measured
    grown = measure_memory(fill, game, count, environment={"MALLOC_ARENA_MAX": "1"})
    said = grown["result"]
    return row(
        MEMORY.format(f"{count:,}"),
        game,
        ours=said,
        peer=grown["rss"],
        ratio=grown["rss"] / said,
        note="bytes; what the process grew by when the same was written before and let go",
    )


# -------------------------------------------------------------------------------------------- load


def load_when_refused(frames: np.ndarray, size: Size, lot: int = 32) -> tuple[float, int | None]:
    """The load before the first lot of which a row was refused, and which lot; None: none was.

    The table has as many places as all frames have distinct blocks, so that it ends full or refuses.
    """
    places = -(-(size.blocks + 1) // 32) * 32
    storage = dataclasses.replace(size.storage, blocks=max(places, 64), on_full="refuse")
    buffer = fbuf.Buffer(len(frames), storage=storage)
    state, load = buffer.init(EXAMPLE), 0.0
    for i, rows in enumerate(lots({"obs": frames[: len(frames) // lot * lot]}, lot)):
        state = writer(buffer)(state, rows)
        stats = buffer.stats(state)
        if int(stats["refused_rows"]):
            return load, i * lot
        load = float(stats["blocks_load"])
    return load, None


def report_load(game: str, frames: np.ndarray, size: Size) -> dict[str, Any]:
    """The row of one game."""
    load, first = load_when_refused(frames, size)
    h, w = size.storage.block
    said = "none refused" if first is None else f"refused among rows {first:,} and after"
    return row(FILLED, game, ours=load, ratio=load, target=">= 0.85", note=f"{size.blocks:,} blocks of {h}x{w}; {said}")


# -------------------------------------------------------------------------------------------- reads


def steps_of(frames: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of an episode that never ends, so that every window is whole."""
    n = len(frames)
    return {
        "obs": frames,
        "action": np.zeros(n, np.int32),
        "reward": np.zeros(n, np.float32),
        "terminated": np.zeros(n, np.bool_),
        "truncated": np.zeros(n, np.bool_),
    }


def read_target() -> str:
    """What is asked of this machine."""
    return "<= 1.2" if jax.default_backend() == "gpu" else "<= 1.5"


def measure_read(
    case: str,
    pieces: Sequence[np.ndarray],
    storage: Any,
    rounds: int,
    batch_size: int = BATCH,
    target: str | None = None,
) -> Any:
    """The row of one case.

    Args:
      case: Its name.
      pieces: Frames, one after another, as many as both buffers hold.
      storage: A `Deduplicated`.
      rounds: Measurements.
      batch_size: Transitions a read.
      target: Of the ratio.
    """
    capacity = sum(map(len, pieces))
    view = fbuf.views.Transition(stack=STACK, autoreset="same_step")
    example = {name: x[0] for name, x in steps_of(pieces[0][:1]).items()}
    # A few rows more than fit: what came before the oldest row is then unknown, and no drawn stack is padded.
    again = steps_of(pieces[0][:16])

    def rows() -> Iterator[Tree]:
        for piece in pieces:
            yield from lots(steps_of(piece))
        yield again

    plain = fbuf.Buffer(capacity, view=view)
    state = plain.init(example)
    for lot in rows():
        state = writer(plain)(state, lot)
    buffer = fbuf.Buffer(capacity, view=view, storage=storage)
    buffer, packed, _ = write_all(buffer, buffer.init(example), rows())
    nbytes = buffer.nbytes(packed)["device"]

    calls, warmup = rounds + 2, 2
    keys = [jax.random.split(jax.random.key(i), STEPS) for i in range(calls)]

    def empty(buffer: fbuf.Buffer, state: Any) -> Any:
        shapes = jax.eval_shape(lambda s: buffer.peek(s, keys[0][0], batch_size), state)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    sides = {"ours": (buffer, [packed, empty(buffer, packed)]), "device": (plain, [state, empty(plain, state)])}
    held = {name: carried for name, (_, carried) in sides.items()}
    runs = {name: bench_sample.ours(which, batch_size) for name, (which, _) in sides.items()}
    del packed, state, sides
    slots = []
    for key in keys:
        *held["ours"], drawn = runs["ours"](*held["ours"], key)
        slots.append([(drawn[..., None] + np.asarray([[o]], np.int32)) % np.int32(capacity) for o in OFFSETS])

    def stacks() -> list[jax.Array]:
        return [jnp.zeros((*s.shape[1:], *SHAPE), jnp.uint8) for s in slots[0]]

    # Of the device's buffer; donated and given back with every call, so it is looked up anew.
    def frames() -> jax.Array:
        return held["device"][0].rows["obs"]

    data, mask = held["ours"][1].data, held["ours"][1].mask
    pairs = zip((data["obs"], data["next_obs"]), bench_sample.bare(frames(), stacks(), slots[-1]), strict=True)
    if not bool(mask.all()) or not all(np.array_equal(a, b) for a, b in pairs):
        raise AssertionError("bench_deduplicated: the bare gather reads other frames than `sample` does")

    turn = {"read": 0, "ours": calls // 4, "device": calls // 2, "bare": 3 * calls // 4}
    box, mine, read = [stacks()], [tuple(stacks())], reader(buffer)
    anchors = [s[0][..., -1] for s in slots]
    mine[0] = read(held["ours"][0], mine[0], anchors[-1])
    if not all(np.array_equal(a, b) for a, b in zip((data["obs"], data["next_obs"]), mine[0], strict=True)):
        raise AssertionError("bench_deduplicated: the read is of other frames than `sample` is")

    def read_only() -> Any:
        mine[0] = read(held["ours"][0], mine[0], anchors[turn["read"] % calls])
        turn["read"] += 1
        return mine[0]

    def sample(name: str) -> Any:
        *held[name], _ = runs[name](*held[name], keys[turn[name] % calls])
        turn[name] += 1
        return held[name]

    def gather() -> Any:
        box[0] = bench_sample.bare(frames(), box[0], slots[turn["bare"] % calls])
        turn["bare"] += 1
        return box[0]

    thunks = {name: functools.partial(sample, name) for name in held}
    timings = {
        name: [t / STEPS for t in seconds]
        for name, seconds in interleave(
            {"read": read_only, **thunks, "bare": gather}, rounds=rounds, warmup=warmup
        ).items()
    }
    h, w = block_of(held["ours"][0])
    whole, device = (ratio(timings[name], timings["bare"]).median for name in ("ours", "device"))
    return row(
        READ,
        case,
        ours=spread(timings["read"]),
        peer=spread(timings["bare"]),
        ratio=ratio(timings["read"], timings["bare"]),
        target=target,
        note=f"block {h}x{w}; {nbytes / 1e6:.3g} MB for {capacity * FRAME / 1e6:.4g} MB of frames; `sample` {whole:.3g}x "
        f"the gather, that of Device {device:.3g}x",
    )


def as_is(stacks: Any) -> Any:
    """Stacks of bytes."""
    return stacks


def as_float(stacks: Any) -> Any:
    """Stacks as a network reads them."""
    return fbuf.transforms.apply(fbuf.transforms.Scale(("obs", "next_obs")), stacks)


def reader(buffer: fbuf.Buffer, convert: Callable[[Any], Any] = as_is) -> Callable[..., Any]:
    """`(state, stacks, anchors) -> stacks`: obs and next_obs of slots int32[steps, B], one step after another."""

    @functools.partial(jax.jit, donate_argnums=1)
    def run(state: Any, stacks: Any, anchors: jax.Array) -> Any:
        spec, structure = buffer.storage.spec(state.rows)
        known = state_ops.anchor_set(buffer, state)

        def step(_: Any, slot: jax.Array) -> Any:
            window = buffer.view.window(spec, known, slot, jnp.ones(slot.shape, bool), jax.random.key(0))
            arrays, _ = buffer.storage.read(state.rows, window.reads)
            data = buffer.view.assemble(spec, structure, arrays, window)
            data = convert({name: data[name] for name in ("obs", "next_obs")})
            return (data["obs"], data["next_obs"]), None

        return lax.scan(step, stacks, anchors)[0]

    return run


@functools.partial(jax.jit, donate_argnums=2, static_argnums=1)
def bare_as(frames: jax.Array, convert: Callable[[Any], Any], stacks: Any, anchors: jax.Array) -> Any:
    """What `reader` does, of an array of frames."""

    def step(_: Any, slot: jax.Array) -> Any:
        around = [slot[:, None] + jnp.asarray(offset, jnp.int32) for offset in OFFSETS]
        obs, following = (frames.at[at].get(mode="promise_in_bounds") for at in around)
        data = convert({"obs": obs, "next_obs": following})
        return (data["obs"], data["next_obs"]), None

    return lax.scan(step, stacks, anchors)[0]


def measure_blocks(
    runs: dict[str, np.ndarray], rounds: int, judged: bool, batch_size: int = BATCH
) -> list[dict[str, Any]]:
    """Rows for each block that `fit` may choose and each dtype: all games, and their mean."""
    tried = candidates(*SHAPE, 1)[: None if judged else 1]
    ratios: dict[tuple[str, tuple[int, int]], dict[str, Any]] = {(d, b): {} for d in READ_TARGETS for b in tried}
    for game, frames in runs.items():
        states = {block: written(frames, block) for block in tried}
        plain = jax.device_put(frames)
        draw = np.random.default_rng(0)
        anchors = jax.device_put(draw.integers(STACK, len(frames) - 1, (rounds + 3, STEPS, batch_size), np.int32))
        for dtype, convert in (("uint8", as_is), ("float32", as_float)):
            sides = {"bare": functools.partial(bare_as, plain, convert)}
            for block, (buffer, state) in states.items():
                sides[str(block)] = functools.partial(reader(buffer, convert), state)
            thunks, first = {}, []
            for name, run in sides.items():
                stacks = tuple(jnp.zeros((batch_size, STACK, *SHAPE), dtype) for _ in OFFSETS)
                first.append(run(stacks, anchors[-1]))
                if not all(np.array_equal(a, b) for a, b in zip(first[0], first[-1], strict=True)):
                    raise AssertionError("bench_deduplicated: the bare gather reads other frames than the buffer does")
                thunks[name] = _thunk(run, [tuple(map(jnp.zeros_like, first[-1]))], iter(anchors))
                del first[1:]
            timings = interleave(thunks, rounds=rounds, warmup=2)
            for block in tried:
                ours, bare = timings[str(block)], timings["bare"]
                ratios[dtype, block][game] = ratio(ours, bare), min(ours) / min(bare)
    report = []
    for (dtype, block), found in ratios.items():
        question = READ_AS.format(dtype, f"blocks of {block[0]}x{block[1]}")
        for game, (figure, least) in found.items():
            report.append(row(question, game, ratio=figure, note=f"of the least times {least:.3g}x"))
        mean = geometric_mean([figure.median for figure, _ in found.values()])
        least = geometric_mean([least for _, least in found.values()])
        target = READ_TARGETS[dtype] if judged else None
        note = f"of the least times {least:.3g}x"
        report.append(row(question, f"geometric mean of {len(found)}", ratio=mean, target=target, note=note))
    return report


def written(frames: np.ndarray, block: tuple[int, int]) -> tuple[fbuf.Buffer, Any]:
    """A buffer of all frames in such blocks, and its state."""
    storage = fbuf.storages.Deduplicated(keys=KEYS, block=block).fit({"obs": frames[:PROBED]}, capacity=len(frames))
    buffer = fbuf.Buffer(len(frames), view=fbuf.views.Transition(stack=STACK, autoreset="same_step"), storage=storage)
    rows = steps_of(frames)
    buffer, state, _ = write_all(buffer, buffer.init({name: x[0] for name, x in rows.items()}), lots(rows), crowded=0.8)
    return buffer, state


OFFSETS = ((-3, -2, -1, 0), (-2, -1, 0, 1))  # frames of obs and next_obs, relative to the drawn one

# ------------------------------------------------------------------------------------------- writes


def measure_write(game: str, frames: np.ndarray, starts: np.ndarray, number: int = BATCH) -> dict[str, Any]:
    """The row of one game: the first half fills both rings, the second is written over it, `number` rows a call."""
    run, half = bench_compression.run_of(frames, starts), len(frames) // 2
    peer = bench_compression.buffer_of(half)
    storage = fbuf.storages.Deduplicated(keys=KEYS).fit({"obs": frames[: min(PROBED, half)]}, capacity=half)
    ours = dataclasses.replace(peer, storage=storage)
    state = ours.init(bench_compression.EXAMPLE)
    first = functools.partial(run.rows, np.arange(half))
    # Room for what the second half brings, lest the table must grow while it is timed.
    ours, state, _ = write_all(ours, state, lots(first()), crowded=0.5)
    theirs = peer.init(bench_compression.EXAMPLE)
    for lot in lots(first()):
        theirs = writer(peer)(theirs, lot)
    held = {"ours": (ours, [state]), "Compressed": (peer, [theirs])}
    del state, theirs
    given = [
        jax.device_put(run.rows(np.arange(at, at + number))) for at in range(half, len(frames) - number + 1, number)
    ]

    def write(name: str, rows: Iterator[Tree]) -> Any:
        buffer, carried = held[name]
        carried[0] = writer(buffer)(carried[0], next(rows))
        return carried[0]

    thunks = {name: functools.partial(write, name, iter(given)) for name in held}
    warmup = 2
    timings = interleave(thunks, rounds=len(given) - warmup, warmup=warmup)
    check_none_lost(ours, held["ours"][1][0])
    if int(ours.size(held["ours"][1][0])) != half:
        raise AssertionError("bench_deduplicated: the ring was not full while it was written")
    mine, other = ([t / number for t in timings[name]] for name in ("ours", "Compressed"))
    h, w = block_of(held["ours"][1][0])
    load = float(ours.stats(held["ours"][1][0])["blocks_load"])
    note = f"{sum(other) / sum(mine):.3g}x in total; block {h}x{w}, load {load:.2f}"
    return row(WRITE, game, ours=spread(mine), peer=spread(other), ratio=ratio(other, mine), note=note)


@functools.lru_cache(maxsize=4)
def _scanned(buffer: fbuf.Buffer) -> Callable[..., Any]:
    def run(state: Any, rows: Tree) -> Any:
        return lax.scan(lambda state, rows: (buffer.extend(state, rows), None), state, rows)[0]

    return jax.jit(run, donate_argnums=0)


def measure_growth(
    frames: np.ndarray, capacities: Sequence[int], places: Sequence[int], rounds: int, number: int = BATCH
) -> list[dict[str, Any]]:
    """Rows for both ways to grow, of writes in a scan and of one call each.

    Args:
      frames: They go round; fewer than the least capacity, so that every ring holds each of them.
      capacities: Sizes of the ring, with the second of `places`.
      places: Sizes of the table, with the first of `capacities`; all hold the distinct blocks of `frames`.
      rounds: Measurements of each.
      number: Frames a write.
    """
    frames = frames[: len(frames) // number * number]
    if len(frames) > capacities[0]:
        raise ValueError(f"measure_growth: {len(frames)} frames, a ring of {capacities[0]}; expected no more frames.")
    whole = jax.device_put({"obs": frames.reshape(-1, number, *SHAPE)})
    parts = [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(len(whole["obs"]))]
    report = []
    for what, sizes, parts_of in (
        ("rows", capacities, lambda size: (size, places[1])),
        ("places", places, lambda size: (capacities[0], size)),
    ):
        held: dict[int, tuple[fbuf.Buffer, list[Any]]] = {}
        for size in sizes:
            capacity, room = parts_of(size)
            storage = fbuf.storages.Deduplicated(keys=KEYS, blocks=room)
            buffer = fbuf.Buffer(capacity, storage=storage)
            state, run = buffer.init(EXAMPLE), _scanned(buffer)
            for _ in range(-(-capacity // len(frames))):
                state = run(state, whole)
            held[size] = buffer, [jax.block_until_ready(state)]
        for way in ("in a scan", "one jitted call each"):
            thunks = {}
            for size, (buffer, carried) in held.items():
                run = _scanned(buffer) if way == "in a scan" else writer(buffer)
                rows = itertools.repeat(whole) if way == "in a scan" else itertools.cycle(parts)
                thunks[str(size)] = _thunk(run, carried, rows)
            calls = 1 if way == "in a scan" else 8
            each = len(frames) if way == "in a scan" else number
            timings = interleave(thunks, rounds=rounds, calls=calls)
            for buffer, (state,) in held.values():
                check_none_lost(buffer, state)
                if int(buffer.size(state)) != buffer.capacity:
                    raise AssertionError("bench_deduplicated: the ring was not full while it was written")
            seconds: dict[float, list[float]] = {n: [t / each for t in timings[str(n)]] for n in sizes}
            slope = exponent(seconds)
            report.append(
                row(
                    GROWTH.format(f"{sizes[0]:,}", f"{sizes[-1]:,}", what),
                    way,
                    ours=spread(seconds[sizes[-1]]),
                    ratio=abs(slope.median),
                    target="<= 0.05",
                    note=f"exponent {slope}; a frame at {sizes[-1]:,} {what}, at {sizes[0]:,}: {spread(seconds[sizes[0]])}",
                )
            )
    return report


def _thunk(run: Callable[..., Any], carried: list[Any], rows: Iterator[Tree]) -> Callable[[], Any]:
    def thunk() -> Any:
        carried[0] = run(carried[0], next(rows))
        return carried[0]

    return thunk


def report_temporary(storage: Any, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows for `extend` of so many frames; compiled, not run."""
    buffer = fbuf.Buffer(100_000, storage=storage)
    state = jax.eval_shape(buffer.init, EXAMPLE)
    h, w = block_of(state)
    report = []
    for number in numbers:
        rows = {"obs": jax.ShapeDtypeStruct((number, *SHAPE), jnp.uint8)}
        used = measure_program(buffer.extend, state, rows).temporary
        note = f"bytes; 100,000 rows, {storage.blocks:,} places"
        case = f"{number:,} frames, block {h}x{w}"
        size = number * FRAME
        report.append(row(TEMPORARY, case, ours=used, peer=size, ratio=used / size, target="< 4", note=note))
    return report


# ---------------------------------------------------------------------------------------- reporting


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for ten games at 20,000 frames; `quick`: one at 2,000, without targets for sizes, reads and writes."""
    games = ("Breakout",) if quick else GAMES
    count, rounds = (2_000, 2) if quick else (20_000, 15)
    runs = {game: _atari.frames(game, count) for game in games}
    sizes = {game: size_of(frames, min(PROBED, count // 4)) for game, (frames, _) in runs.items()}
    report = report_sizes(sizes, judged=not quick)
    report.append(memory(games[-1] if quick else "Enduro", count))
    report += [report_load(game, frames, sizes[game]) for game, (frames, _) in runs.items()]
    mixed = [frames for frames, _ in runs.values()]
    some = np.concatenate([frames[: PROBED // len(mixed)] for frames in mixed])
    capacity = sum(map(len, mixed))
    storage = fbuf.storages.Deduplicated(keys=KEYS).fit({"obs": some}, capacity=capacity)
    if not quick:
        report.append(measure_read(f"{len(mixed)} games together", mixed, storage, rounds))
    read = [measure_read(game, [frames], sizes[game].storage, rounds) for game, (frames, _) in runs.items()]
    mean = geometric_mean([r["ratio"]["median"] for r in read])
    report += [*read, row(READ, f"geometric mean of {len(read)}", ratio=mean, target=None if quick else read_target())]
    some_runs = {game: frames[:6_000] for game, (frames, _) in runs.items() if quick or game in _atari.GAMES}
    report += measure_blocks(some_runs, rounds, judged=not quick)
    writes = [measure_write(game, *run) for game, run in runs.items() if quick or game in _atari.GAMES]
    mean = geometric_mean([r["ratio"]["median"] for r in writes])
    report += [
        *writes,
        row(WRITE, f"geometric mean of {len(writes)}", ratio=mean, target=None if quick else ">= 1.0"),
    ]
    frames = _atari.frames("Breakout", 2_000 if quick else 8_192)[0]
    capacities = (2_000, 8_000) if quick else (10_000, 100_000, 1_000_000)
    places = [2**n for n in (range(12, 14) if quick else range(13, 19))]
    report += measure_growth(frames, capacities, places, rounds)
    blocks = {size.storage.block for size in sizes.values()}
    for block in sorted(blocks if quick else {(12, 12), *blocks}):
        storage = fbuf.storages.Deduplicated(keys=KEYS, block=block, blocks=2**17)
        report += report_temporary(storage, (BATCH,) if quick else (BATCH, 4 * BATCH))
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
