"""Test configuration: strict JAX, quick compilation, three tiers of tests, stores closed after each test.

`pytest` runs the quick cases, `--tier more` those that CI runs besides, `--tier exhaustive` the rest, `--tier all` or
FBUF_EXHAUSTIVE=1 every case (`tests.support.tiers` says which case is which). A case named as `FILE::TEST` runs whatever its
tier. `--share 7/40` keeps every fortieth case from the seventh on.

Tests compile as fast as XLA can. Those marked `in_place` compile users' programs, of which LLVM optimises nothing: copies and
memory are the same. Those marked `optimized` (bit-exact and export tests) compile as users do. Programs are kept in an
ignored folder, so that a second run compiles nothing.
"""

import gc
import inspect
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZE = "JAX_DISABLE_MOST_OPTIMIZATIONS"

# JAX and the subprocesses of tests read these when they start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault(OPTIMIZE, "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # programs without tracebacks are lowered faster
# On Linux too, this binds Ray to the loopback interface.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
UNOPTIMIZED = os.environ[OPTIMIZE]  # what applies to tests that are not marked `optimized`

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from jax._src import compiler  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax._src.lib import xla_client  # noqa: E402

MAPS, MOST_MAPS = Path("/proc/self/maps"), 40_000
APART = ("accelerators", "environments")  # folders that run when they are named, and with FBUF_EXHAUSTIVE=1
pytest.register_assert_rewrite("tests.support")
from tests.support import tiers  # noqa: E402

_TESTS = itertools.count()

gc.set_threshold(100_000, 50, 100)  # traces make many objects and little garbage

# What XLA compiles with, as no public setting changes it within a process. A program that is not optimised compiles a fifth
# faster where it is not split for threads, and takes half of that with the older fusion emitters, which 0.11.0 removed.
QUICK = {"xla_cpu_parallel_codegen_split_count": 1}
OLDER = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
LEVELS = {None: {**QUICK, **OLDER}, "in_place": QUICK, "optimized": {}}
OPTIONS: dict[str, Any] = {}  # those of the level that is set

# XLA reads its flags once: here, without those that a test's process passes on to subprocesses (`_set_level`).
FLAGS = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag[2:].split("=")[0] not in QUICK | OLDER]
os.environ["XLA_FLAGS"] = " ".join(FLAGS)
xla_client.CompileOptions()


def _compile_options(*args: Any, given: Callable[..., Any] = compiler.get_compile_options, **settings: Any) -> Any:
    options = given(*args, **settings)
    options.env_option_overrides = [*options.env_option_overrides, *OPTIONS.items()]
    return options


compiler.get_compile_options = _compile_options


class _Client:
    """A client that loads programs with callbacks from the cache; without them the programs crash: other keys."""

    def __init__(self, client: Any, callbacks: Any) -> None:
        self._client, self._callbacks = client, callbacks
        self.platform_version = f"{client.platform_version}, callbacks"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def deserialize_executable(self, *args: Any) -> Any:
        return self._client.deserialize_executable(*args, self._callbacks)


def _compile_or_load(client: Any, *args: Any, given: Callable[..., Any] = compiler.compile_or_get_cached) -> Any:
    kept = bool(args[3]) and type(client) is xla_client.Client  # no client that only compiles
    return given(_Client(client, args[3]) if kept else client, *args)


def _write(*args: Any, given: Callable[..., Any] = compiler._cache_write) -> None:
    given(*args[:-1], [])


if (0, 10) <= jax.__version_info__ < (0, 11):  # later releases keep programs with callbacks
    compiler.compile_or_get_cached, compiler._cache_write = _compile_or_load, _write

_CONTEXTS = threading.local()


def _make_context(given: Callable[..., Any] = mlir.make_ir_context) -> Any:
    """Return a context for the next program; a hundred share one, as making it takes as long as lowering a small program."""
    uses, context = getattr(_CONTEXTS, "last", (0, None))
    context = context if uses % 100 else given()
    _CONTEXTS.last = uses + 1, context
    return context


mlir.make_ir_context = _make_context

# A silent broadcast between ranks has hidden more than one bug in replay code: [B] against [B, 1].
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling inside an example may take seconds and says nothing about the property: no deadline.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("default", deadline=None, max_examples=20, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("exhaustive", deadline=None, max_examples=300, print_blob=True, suppress_health_check=_QUIET)


def _exhaustive() -> bool:
    return os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")


settings.load_profile("exhaustive" if _exhaustive() else "default")


def _share(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(parts) > 0):
        raise pytest.UsageError(f"--share is {text!r}; expected two numbers, such as 7/40.")
    return int(part) % int(parts), int(parts)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=(*tiers.TIERS, "all"), help="run the cases of this tier; default: quick, or those named"
    )
    parser.addoption(
        "--share", type=_share, metavar="K/N", help="run every Nth of the collected cases, from the Kth on"
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    share = config.getoption("--share")
    lines = [f"tier: {_tier(config)}", f"compilation cache: {os.environ['JAX_COMPILATION_CACHE_DIR']}"]
    return lines + ([f"share: cases {share[0]}, {share[0] + share[1]}, ... of those collected"] if share else [])


def _tier(config: pytest.Config) -> str:
    named = bool(config.args) and all("::" in argument for argument in config.args)
    return config.getoption("--tier") or ("all" if _exhaustive() or named else "quick")


def pytest_configure(config: pytest.Config) -> None:
    tiers.highest = tiers.TIERS[-1] if _tier(config) == "all" else _tier(config)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out folders apart, and files of a higher tier, which may need more packages; not those that are named."""
    apart = collection_path.name in APART and collection_path.parent == ROOT / "tests"
    if apart:
        return None if _exhaustive() else True
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not tiers.is_made(tiers.of_file(collection_path)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(name: str, obj: object) -> list[pytest.Item] | None:
    """Make no cases of a test of a higher tier."""
    if not (name.startswith("test_") and inspect.isfunction(obj)):
        return None
    own = tiers.of_marks(mark.name for mark in getattr(obj, "pytestmark", ()))
    return None if tiers.is_made(own) else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = _tier(config)
    if chosen != "all":
        of = [tiers.of_marks(mark.name for mark in item.iter_markers()) for item in items]
        config.hook.pytest_deselected(items=[item for item, tier in zip(items, of, strict=True) if tier != chosen])
        items[:] = [item for item, tier in zip(items, of, strict=True) if tier == chosen]
    share = config.getoption("--share")
    if share:
        part, parts = share
        kept = items[part::parts]
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part])
        items[:] = kept
    # Few changes of level, and the most cases last: a change frees what is compiled, which takes seconds.
    items.sort(key=lambda item: list(LEVELS).index(_level(item)), reverse=True)


def _level(item: pytest.Item) -> str | None:
    return next((name for name in reversed(LEVELS) if name and item.get_closest_marker(name)), None)


def _set_level(level: str | None) -> None:
    """Compile as this level says: here and in subprocesses."""
    disabled = "0" if level == "optimized" else UNOPTIMIZED
    options = LEVELS[level] if disabled not in ("", "0") else {}
    if (os.environ[OPTIMIZE], OPTIONS) != (disabled, options):
        os.environ[OPTIMIZE] = disabled
        jax.config.update("jax_disable_most_optimizations", disabled not in ("", "0"))
        OPTIONS.clear()
        OPTIONS.update(options)
        os.environ["XLA_FLAGS"] = " ".join([*FLAGS, *(f"--{name}={value}" for name, value in options.items())])
        jax.clear_caches()


def pytest_runtest_setup(item: pytest.Item) -> None:
    _set_level(_level(item))
    # Collections skip what earlier tests left: compiled programs soon are so much that collecting would take most of the time.
    gc.collect()
    gc.freeze()
    # Asked here and not at collection: it starts a backend, which collecting must not do.
    if item.get_closest_marker("gpu") and jax.default_backend() == "cpu":
        pytest.skip("needs an accelerator")


def pytest_runtest_teardown() -> None:
    """Free compiled programs before there are too many: XLA aborts when the system's 65,530 memory maps are used up."""
    if next(_TESTS) % 20 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.unfreeze()  # what the caches held may be garbage now


def pytest_sessionfinish() -> None:
    """Remove the folders of storages in tables of cases (`tests.support.disk.somewhere`)."""
    disk = sys.modules.get("tests.support.disk")
    if disk is not None:
        shutil.rmtree(disk.FOLDER, ignore_errors=True)


@pytest.fixture(autouse=True)
def close_stores() -> Iterator[None]:
    """Close the host stores that a test opened and left, so that tests cannot run out of memory.

    Stores opened by fixtures of a wider scope stay open.
    """
    before = {store.id for store in _stores()}
    yield
    for store in _stores():
        if store.id not in before:
            store.close()


def _stores() -> tuple:
    # Looked up, not imported: a test that never touches fbuf should not pay for it.
    stores = getattr(sys.modules.get("fbuf"), "stores", None)
    return tuple(stores()) if stores is not None else ()
