"""Run notebooks in a Jupyter kernel and store their outputs: `python -m benchmarks.notebooks [NAME ...]`."""

import argparse
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def execute(path):
    """Run a notebook in its own folder, in a new kernel of this Python.

    Args:
      path: Of the notebook, which is not changed.
    Returns:
      The notebook with its outputs, without times of execution.
    Raises:
      nbclient.exceptions.CellExecutionError: A cell raises.
    """
    import nbclient
    import nbformat

    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        timeout=600,
        startup_timeout=300,
        record_timing=False,
        resources={"metadata": {"path": path.parent}},
    )
    return client.execute()


def main(arguments=None):
    import nbformat

    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs.")
    parser.add_argument("name", nargs="*", help="such as quickstart (default: all)")
    names = parser.parse_args(arguments).name or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(execute(path), path)
        print(path.name)


if __name__ == "__main__":
    main()
