"""The files that data sets are made from: listed and downloaded by fsspec, read as streams by gzip and numpy."""

from fbuf.datasets._remote.errors import FileCorrupted, SourceError, SpaceError
from fbuf.datasets._remote.files import File, address_of, fetch, is_local, list_files
from fbuf.datasets._remote.npy import read_npy

__all__ = [
    "File",
    "FileCorrupted",
    "SourceError",
    "SpaceError",
    "address_of",
    "fetch",
    "is_local",
    "list_files",
    "read_npy",
]
