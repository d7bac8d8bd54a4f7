"""torchrl's C++ trees where its wheel's do not load: built from the sources that the same wheel carries.

The extension of a wheel works with the torch it was compiled against (0.14.1's does not with 2.13.0: undefined symbol). Nothing
is fetched: the wheel brings `csrc`, and torch compiles it, if a C++ compiler is there; about a minute, once. Where torch sees a
GPU and finds CUDA's compiler, the trees for it are built along (a wheel from the registry has none of them).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

NAME = "torchrl._torchrl"
CUDA = "CudaSumSegmentTreeFp32"  # there only if it was built for a GPU
CUDA_SOURCE = "cuda_segment_tree.cu"


def ensure(build: bool = True) -> str:
    """Makes `torchrl._torchrl` importable; to be called before torchrl is imported.

    Args:
      build: Compile it if the wheel's does not load and no earlier build is there.
    Returns:
      Where it came from, in words.
    Raises:
      ImportError: neither loads, and why.
    """
    if NAME in sys.modules:
        return getattr(sys.modules[NAME], "_fbuf_origin", "the wheel's extension")
    found = importlib.util.find_spec("torchrl")
    if found is None:
        raise ModuleNotFoundError("No module named 'torchrl'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: F401  the extension's symbols are looked up in its libraries

    root = Path(found.submodule_search_locations[0])
    why = "the wheel has no extension"
    cuda, module = _builds_cuda(root), None
    for path in sorted(root.glob("_torchrl*.so")):
        try:
            module = _load(path)
            if not cuda or hasattr(module, CUDA):
                return "the wheel's extension"
            why = "the wheel's extension has no trees for a GPU"
        except ImportError as error:
            why = "the wheel's extension does not load: " + str(error).split(": ", 1)[-1][:60]
    try:
        return _built(root, build, why, cuda)
    except Exception as error:  # no compiler, no ninja, sources of another kind
        if module is not None:
            return f"{why}; building them failed: {type(error).__name__}: {error}"[:300]
        if isinstance(error, ImportError):
            raise
        raise ImportError(f"{why}; building it failed: {type(error).__name__}: {error}"[:300]) from error


def start_build() -> subprocess.Popen[bytes]:
    """Start `ensure` in a process of its own, which goes on where this one ends."""
    return subprocess.Popen([sys.executable, "-m", __spec__.name], start_new_session=True)


def _builds_cuda(root: Path) -> bool:
    """Whether its trees for a GPU can be built and used here."""
    import torch
    from torch.utils import cpp_extension

    compiler = Path(cpp_extension.CUDA_HOME or "") / "bin" / "nvcc"
    return torch.cuda.is_available() and (root / "csrc" / CUDA_SOURCE).exists() and compiler.exists()


def _built(root: Path, build: bool, why: str, cuda: bool) -> str:
    """Loads what was built before, or builds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from torch.utils import cpp_extension

    sources = [root / "csrc" / name for name in ("pybind.cpp", "utils.cpp", *([CUDA_SOURCE] if cuda else []))]
    if not all(source.exists() for source in sources):
        raise ImportError(f"{why}; its wheel brings no sources")
    folder = _folder(torch.__version__ + ("-cuda" if cuda else ""))
    library = folder / "_torchrl.so"
    if not library.exists():
        if not build:
            raise ImportError(f"{why}; not built yet (python -m benchmarks.peers builds it)")
        os.environ.setdefault("MAX_JOBS", "1")
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ninja's
        folder.mkdir(parents=True, exist_ok=True)
        # Torch locks the folder it builds in, and a lock outlives a process that is killed: each build has its own folder.
        with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as build_folder:
            cpp_extension.load(
                name="_torchrl",
                sources=[str(source) for source in sources],
                extra_include_paths=[str(root / "csrc")],
                # As torchrl's own build has it; the default is no optimisation at all.
                extra_cflags=["-O3", *(["-DWITH_CUDA"] if cuda else [])],
                extra_cuda_cflags=["-O3", "-DWITH_CUDA"] if cuda else None,
                with_cuda=cuda,
                build_directory=build_folder,
                is_python_module=False,
            )
            os.replace(Path(build_folder) / library.name, library)
    origin = f"its C++ sources, built here ({why})"
    _load(library)._fbuf_origin = origin
    return origin


def _folder(torch_version: str) -> Path:
    """One for each pair of versions, for an extension fits no other."""
    version = importlib.metadata.version("torchrl")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torchrl-{version}-torch-{torch_version}-O3"
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fbuf-benchmarks" / tag


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)  # raises ImportError where symbols are missing
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


if __name__ == "__main__":
    ensure()
