"""A plugin for pytest, `-p tests.support.torchrl_trees`: builds torchrl's trees where those of its wheel do not load."""

from benchmarks.peers import _torchrl_tree

_torchrl_tree.ensure()
