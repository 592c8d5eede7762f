"""Slurm's node lists, expanded without asking scontrol (containers often lack it)."""

from __future__ import annotations

import itertools
import re

from slime_hpc.errors import ClusterError

_ENTRY = re.compile(r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+")
_PART = re.compile(r"(?P<text>[A-Za-z0-9._-]+)|\[(?P<ranges>[0-9,-]+)\]")
_RANGE = re.compile(r"(?P<low>\d+)(?:-(?P<high>\d+))?")
_MAX_RANGE = 65536
"""Slurm's own bound on one range (MAX_RANGE in hostlist.c)."""


def expand_nodes(node_list: str) -> list[str]:
    """Node names of ``b04-[09-10],n7`` in Slurm's order: ``b04-09 b04-10 n7``.

    ClusterError on anything else, the empty list included: a guess here would place a role on the wrong node.
    """
    return [name for entry in _split(node_list) for name in _expand_entry(entry, node_list)]


def _split(node_list: str) -> list[str]:
    """At the commas outside of brackets."""
    return re.split(r",(?![^\[\]]*\])", node_list)


def _expand_entry(entry: str, node_list: str) -> list[str]:
    if not _ENTRY.fullmatch(entry):
        raise _unreadable(node_list, f"{entry!r} is not name[ranges]")
    parts = [[m["text"]] if m["text"] else _expand_ranges(m["ranges"], node_list) for m in _PART.finditer(entry)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _expand_ranges(ranges: str, node_list: str) -> list[str]:
    return [number for item in ranges.split(",") for number in _expand_range(item, node_list)]


def _expand_range(item: str, node_list: str) -> list[str]:
    """``09-11`` → ``09 10 11``: the first number's width is kept."""
    match = _RANGE.fullmatch(item)
    if match is None:
        raise _unreadable(node_list, f"{item!r} is not a range of numbers")
    low, high = match["low"], match["high"] or match["low"]
    if not 0 <= int(high) - int(low) < _MAX_RANGE:
        raise _unreadable(node_list, f"{item!r} does not count up, or holds over {_MAX_RANGE} nodes")
    return [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]


def _unreadable(node_list: str, reason: str) -> ClusterError:
    return ClusterError(f"cannot read Slurm's node list {node_list!r}: {reason}; please report it with this line")
