from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_hpc.errors import ClusterError
from slime_hpc.slurm.hosts import expand_nodes


@pytest.mark.parametrize(
    ("node_list", "nodes"),
    [
        ("n1", "n1"),
        ("b04-[09-10]", "b04-09 b04-10"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[9-11]", "n9 n10 n11"),
        ("a[01-03,7],b-[1-2]c", "a01 a02 a03 a7 b-1c b-2c"),
        ("a1,a01", "a1 a01"),
        ("r[1-2]n[08-09]", "r1n08 r1n09 r2n08 r2n09"),
        ("gpu.cluster_x-[3].y", "gpu.cluster_x-3.y"),
    ],
)
def test_expands_in_slurms_order(node_list: str, nodes: str) -> None:
    assert expand_nodes(node_list) == nodes.split()


@pytest.mark.parametrize(
    "node_list",
    ["", " ", "None assigned", "(null)", "n[1-", "n1]", "n[]", "n[a-c]", "n[1-2-3]", "n[3-1]", "n1,,n2", "n1,", "n[1,]",
     "n[0-99999]", "bgl[000x733]", "a" * 60 + "!"],
)  # fmt: skip
def test_anything_else_is_an_error(node_list: str) -> None:
    with pytest.raises(ClusterError, match="cannot read Slurm's node list"):
        expand_nodes(node_list)


@given(st.integers(0, 500), st.integers(0, 30), st.integers(1, 4))
def test_a_range_holds_each_number_once_at_its_width(low: int, span: int, width: int) -> None:
    nodes = expand_nodes(f"x[{low:0{width}d}-{low + span:0{width}d}]y")
    assert [int(node[1:-1]) for node in nodes] == list(range(low, low + span + 1))
    assert all(len(node) >= width + 2 for node in nodes)
