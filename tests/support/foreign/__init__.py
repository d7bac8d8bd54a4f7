"""Files that other libraries wrote (`make.py`), and what they hold (`world.py`)."""

import pathlib

FILES = pathlib.Path(__file__).parent / "files"
