"""How `Sample` and `Rows` print: the ranges of their leaves, and thumbnails in HTML."""

import base64
import io
import logging
import re
import struct
import zlib
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._core import frames


def shown(batch):
    """The cells of the printed table by leaf."""
    rows = [re.split(r"  +", line.strip()) for line in repr(batch).splitlines() if line.startswith("  ")]
    return {row[0]: row[1:] for row in rows}


def filled(example, rows, **settings):
    buffer = fbuf.Buffer(64, **settings)
    return buffer, buffer.extend(buffer.init(example), rows)


def test_a_batch_prints_ranges():
    rows = {
        "x": np.array([[1.5, np.nan], [-2.0, np.inf], [7.0, 7.0], [0.25, 7.0]], np.float32),
        "n": np.arange(4, dtype=np.int32) + 1000,
        "done": np.array([True, False, True, True]),
        "half": jnp.linspace(-1, 1, 4, dtype=jnp.bfloat16),
        "same": np.full((4, 9), 3, np.uint8),
    }
    buffer, state = filled(jax.tree.map(lambda x: np.zeros_like(x[0]), rows), rows)
    batch = buffer.rows(state)
    assert repr(batch).startswith("Rows: 64 rows, 60 of them masked\n")
    said = shown(batch)
    assert said["x"] == ["float32[64, 2]", "-2 to 7, 1 NaN, 1 infinite"] and said["n"] == [
        "int32[64]",
        "1,000 to 1,003",
    ]
    assert said["done"] == ["bool[64]", "3 of 4 true"] and said["half"] == ["bfloat16[64]", "-1 to 1"]
    assert said["same"] == ["uint8[64, 9]", "all 3"] and said["mask"] == ["bool[64]", "4 of 64 true"]
    assert {"index.slot", "index.generation"} <= said.keys()
    row = fbuf.Replay(fbuf.Buffer(4), {"a": 0.5, "k": np.zeros(3, np.int32)})
    row.add({"a": np.float32(0.25), "k": np.arange(3, dtype=np.int32)})
    assert repr(row[0]).startswith("Rows: one row\n") and shown(row[0])["a"] == ["float32[]", "0.25"]
    assert shown(row[0])["k"] == ["int32[3]", "[0, 1, 2]"] and shown(row.sample(1))["weight"] == ["float32[1]", "[1]"]


def test_bare_rows_nested_rows_and_ragged_rows_print():
    buffer, state = filled(jnp.float32(0), jnp.arange(3.0))
    assert shown(buffer.rows(state, last=2))["(row)"] == ["float32[2]", "[1, 2]"]
    buffer, state = filled({"a": {"b": 0}}, {"a": {"b": jnp.arange(3)}})
    assert "a/b" in shown(buffer.rows(state, last=2))
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Ragged())
    state = buffer.add(buffer.init({"text": "", "n": 0}), {"text": "a", "n": 1})
    assert ".lazy" in repr(buffer.rows(state, last=1))


def test_traced_abstract_donated_and_mapped_batches_print_shapes():
    buffer, state = filled({"x": jnp.zeros(7)}, {"x": jnp.ones((5, 7))})
    batch, seen = buffer.rows(state, last=3), []
    jax.jit(lambda batch: seen.append((repr(batch), batch._repr_html_())))(batch)
    abstract = jax.eval_shape(lambda batch: batch, batch)
    for text in (*seen[0], repr(abstract), abstract._repr_html_()):
        assert "float32[3, 7]" in text and " to " not in text and "all 1" not in text
    assert "traced" in seen[0][0]
    odd = jax.tree.map(lambda leaf: None, batch)
    assert isinstance(repr(odd), str) and isinstance(odd._repr_html_(), str)
    batch.data["x"].delete()
    assert shown(batch)["x"] == ["float32[3, 7]", "donated"]


def test_a_large_state_prints_without_computing(caplog):
    rows = fbuf.Replay(fbuf.Buffer(1_000_003), {"x": np.zeros(5, np.float32)}).rows()
    jax.block_until_ready(rows)
    with jax.log_compiles(), caplog.at_level(logging.WARNING), jax.transfer_guard_host_to_device("disallow"):
        text, page = repr(rows), rows._repr_html_()
    assert not caplog.records and "1,000,003 rows" in text and len(page) < 5_000


def test_html_is_well_formed_and_escaped_with_thumbnails_in_20_kilobytes():
    noise = np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84, 3)).astype(np.uint8)
    rows = {"obs": noise, "<img>": noise[:, 0], "vector": np.zeros((8, 9), np.float32)}
    buffer, state = filled(jax.tree.map(lambda x: np.zeros_like(x[0]), rows), rows)
    page = buffer.rows(state, last=8)._repr_html_()
    root = ElementTree.fromstring(page)
    images = list(root.iter("img"))
    assert len(images) == 2 and len(page) < 23_000 and sum(len(i.get("src")) for i in images) <= 20_000
    assert images[0].get("alt").startswith("<img>")
    assert "img" not in fbuf.Buffer(4).rows(fbuf.Buffer(4).init({"x": 0}), last=1)._repr_html_()


def test_a_thumbnail_shows_the_rows_that_exist():
    frame = np.zeros((8, 8), np.uint8)
    frame[2, 5] = 255
    buffer, state = filled({"obs": frame}, {"obs": np.stack([frame, 255 - frame])})
    (image,) = ElementTree.fromstring(buffer.rows(state)._repr_html_()).iter("img")
    pixels = decoded(base64.b64decode(image.get("src").partition(",")[2]))
    assert pixels.shape == (10, 20)
    assert np.array_equal(pixels[1:9, 1:9], frame) and np.array_equal(pixels[1:9, 11:19], 255 - frame)


def decoded(file):
    """Grey or colour pixels of a PNG without filters, by the standard (ISO 15948)."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    stream, parts = io.BytesIO(file[8:]), {}
    while head := stream.read(8):
        size, kind = struct.unpack(">I4s", head)
        data = stream.read(size)
        assert zlib.crc32(kind + data) == struct.unpack(">I", stream.read(4))[0]
        parts[kind] = data
    wide, high, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert depth == 8
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(high, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape((high, wide) if colour == 0 else (high, wide, 3))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (84, 84), (210, 160, 3), (400, 3), (3, 400)])
def test_png_holds_the_pixels(shape):
    pixels = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    image = np.broadcast_to((pixels if len(shape) == 3 else pixels[..., None]) / 255.0, (*shape[:2], 3))
    assert np.array_equal(decoded(frames.png(image)), pixels)
    small = frames.shrunk(image, 32)
    assert max(small.shape[:2]) <= 32 and abs(small.mean() - image[..., :].mean()) < 0.1
