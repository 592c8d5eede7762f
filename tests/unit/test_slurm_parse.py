from __future__ import annotations

import pytest

from slime_hpc.errors import ClusterError
from slime_hpc.slurm.parse import parse_accounting, parse_partitions, parse_queue, parse_submission
from slime_hpc.types import JobId, JobState


@pytest.mark.parametrize(
    ("stdout", "number", "cluster"),
    [
        ("Submitted batch job 12\n", 12, None),
        ("Submitted batch job 3969755 on cluster nautilus\n", 3969755, "nautilus"),
        ("75168975;nautilus\n", 75168975, "nautilus"),
        ("15786755\n", 15786755, None),
        (
            "*** 3 jobs of yours are queued\nsbatch: warning: 12 cores\nSubmitted batch job 12\nHave a nice day\n",
            12,
            None,
        ),
    ],
)
def test_the_job_id_is_found(stdout: str, number: int, cluster: str | None) -> None:
    job_id = parse_submission(stdout)
    assert (job_id.number, job_id.component, job_id.cluster) == (number, None, cluster)


@pytest.mark.parametrize(
    "stdout", ["", "nautilus", "job 12 on hold", "Submitted batch job", "12\n13\n", "Submitted batch job 12 and 13"]
)
def test_no_job_id_is_an_error_that_quotes_sbatch(stdout: str) -> None:
    with pytest.raises(ClusterError, match="names no job id"):
        parse_submission(stdout)


QUEUE = """\
13|12|1|RUNNING|None|n[3-4]|1796090625|1796091225|0|tok|en|
12|12|0|RUNNING|None|n1|1796090625|1796091225|2|tok|en|
20|N/A|N/A|PENDING|PartitionTimeLimit||N/A|N/A|0|(null)|
"""


def test_queue_rows() -> None:
    second, leader, plain = parse_queue(QUEUE)
    assert second.job_id == JobId(12, 1)
    assert (second.raw_id, second.node_list, second.is_leader) == (13, "n[3-4]", False)
    assert leader.job_id == JobId(12, 0)
    assert (leader.start, leader.end, leader.restarts, leader.is_leader) == (1796090625, 1796091225, 2, True)
    assert leader.comment == "tok|en"
    assert plain.job_id == JobId(20)
    assert (plain.state, plain.reason, plain.node_list) == (JobState("PENDING"), "PartitionTimeLimit", "")
    assert (plain.start, plain.end, plain.comment, plain.is_leader) == (None, None, "", True)


def test_an_empty_queue_has_no_rows() -> None:
    assert parse_queue("\n") == []


@pytest.mark.parametrize("line", ["CLUSTER: lab", "12|12|0|RUNNING", "x|N/A|N/A|PENDING|None||N/A|N/A|0|(null)|"])
def test_an_unreadable_queue_line_is_quoted(line: str) -> None:
    with pytest.raises(ClusterError, match="cannot read a line of squeue's answer"):
        parse_queue(line)


ACCOUNTING = """\
JobID|JobIDRaw|State|ExitCode|NodeList|Start|End
12+0|12|CANCELLED by 1000|0:15|n1|1796090625|1796090629
12+0.batch|12.batch|CANCELLED|0:15|n1|1796090625|1796090629
12+0.extern|12.extern|COMPLETED|0:0|n1|1796090625|1796090629
12+1|13|FAILED|3:0|n[2-3]|1796090625|1796090629
12+1.4|13.4|FAILED|3:0|n[2-3]|1796090625|1796090629
14|14|PENDING|0:0|None assigned|Unknown|Unknown
"""


def test_accounting_rows_without_the_steps() -> None:
    leader, second, bare = parse_accounting(ACCOUNTING)
    assert (leader.job_id, leader.raw_id) == (JobId(12, 0), 12)
    assert (leader.state, leader.cancelled_by, leader.exit_code, leader.signal) == (JobState("CANCELLED"), 1000, 0, 15)
    assert (second.job_id, second.raw_id) == (JobId(12, 1), 13)
    assert (second.state, second.cancelled_by, second.exit_code, second.signal) == (JobState("FAILED"), None, 3, 0)
    assert (bare.job_id, bare.node_list, bare.start, bare.end) == (JobId(14), "", None, None)
    assert [row.is_leader for row in (leader, second, bare)] == [True, False, True]


@pytest.mark.parametrize("stdout", ["", "JobID|JobIDRaw|State|ExitCode|NodeList|Start|End\n"])
def test_accounting_may_be_empty(stdout: str) -> None:
    assert parse_accounting(stdout) == []


def test_accounting_with_other_columns_is_an_error() -> None:
    with pytest.raises(ClusterError, match="cannot read a line of sacct's answer"):
        parse_accounting("JobID|State\n12|RUNNING\n")


def test_a_state_of_tomorrow_is_kept_and_not_taken_for_an_end() -> None:
    (row,) = parse_queue("20|N/A|N/A|TELEPORTING|None|n1|N/A|N/A|0|(null)|")
    assert str(row.state) == "TELEPORTING"
    assert not row.state.is_over


PARTITIONS = (
    "PartitionName=train AllowGroups=ALL AllowAccounts=dev,ml AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "MaxNodes=UNLIMITED MaxTime=2-00:00:00 Nodes=n[1-6] PreemptMode=OFF State=UP TotalCPUs=48 TotalNodes=6\n"
    "PartitionName=old DenyAccounts=x MaxNodes=4 MaxTime=UNLIMITED Nodes=(null) State=DOWN TotalNodes=0\n"
)


def test_partition_rows() -> None:
    train, old = parse_partitions(PARTITIONS)
    assert (train.name, train.state, train.max_time_s, train.max_nodes) == ("train", "UP", 172800, None)
    assert (train.total_nodes, train.node_list, train.allow_accounts, train.allow_qos) == (6, "n[1-6]", "dev,ml", "ALL")
    assert (old.state, old.max_time_s, old.max_nodes, old.node_list, old.allow_accounts) == ("DOWN", None, 4, "", "ALL")


def test_a_partition_without_a_limit_named_is_an_error() -> None:
    with pytest.raises(ClusterError, match="cannot read a line of scontrol's answer"):
        parse_partitions("PartitionName=train State=UP\n")
