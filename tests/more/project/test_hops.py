"""Check the counts of `benchmarks.hops`: how many files of the package one call goes through."""

import jax
import jax.numpy as jnp

import fbuf
from benchmarks import hops
from fbuf._bridge import callbacks
from fbuf._core import pytree


def test_counts_files_and_moves() -> None:
    spec = {"a": {"b": jax.ShapeDtypeStruct((), jnp.float32)}}
    one = hops.Counter().count(lambda: pytree.named_leaves(spec))
    assert one == hops.Hops(("_core/pytree.py",), 1)
    assert hops.Counter().count(lambda: None) == hops.Hops((), 0)


def test_compressed_sample_goes_through_few_files() -> None:
    real = callbacks.call
    traced, warm = hops.compressed_sample(hops.Counter())
    assert callbacks.call is real
    for counted in (traced, warm):
        assert "_host/codecs/encoder.py" in counted.files, "what callbacks run is not counted"
    assert len(warm.files) <= 25
    assert warm.moves <= 60


def test_device_extend_goes_through_few_files() -> None:
    traced, warm = hops.device_extend(hops.Counter())
    assert "storages/_device.py" in traced.files
    assert len(warm.files) <= 16
    assert fbuf.stores() == []
