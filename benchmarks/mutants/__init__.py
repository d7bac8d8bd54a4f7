"""Mutation testing: small defects planted in `fbuf`, and the tests that notice them.

`catalogue/*.txt` lists the defects, each by the qualified name of a definition and a snippet of it, so that files may move.
`python -m benchmarks.mutants` plants one at a time in a copy of the package and runs the tests that should notice it, then
the whole quick tier for those that survive. `--check` says whether every snippet is still found exactly once.
"""
