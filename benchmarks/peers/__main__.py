"""Says which peers are here, in which version, and what keeps the others away; builds what must be built."""

from __future__ import annotations

from benchmarks._harness import Absent
from benchmarks.peers import FBUF, PEERS, load
from benchmarks.peers._versions import versions


def main() -> None:
    for library in (FBUF, *PEERS):
        driven = load(library)
        known = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions(library).items())
        print(f"{library.name:<12}{known}")
        print(f"{'':<12}" + (f"absent: {driven.reason}" if isinstance(driven, Absent) else library.includes))
        if isinstance(getattr(driven, "TREE", None), (str, ImportError)):
            print(f"{'':<12}trees: {driven.TREE}")


if __name__ == "__main__":
    main()
