from __future__ import annotations

from typing import Any

import pytest

from slime_hpc.errors import UserError
from slime_hpc.slurm.directives import sbatch_directives


def lines_of(*components: dict[str, Any], **job: Any) -> list[str]:
    return [
        line.removeprefix("#SBATCH ")
        for line in sbatch_directives(components, **{"name": "run", "output": "/o/%j.out", **job})
    ]


def test_every_component_carries_its_own_options_in_a_fixed_order() -> None:
    options = {"time": "01:00:00", "mem": "64G", "gpus_per_node": 4, "account": "a", "nodes": 2, "constraint": "x&y"}
    assert lines_of(
        {**options, "partition": "gpuA", "exclusive": True, "contiguous": False},
        {**options, "partition": "gpuB", "nodes": 1, "gpus-per-node": 2, "gpus_per_node": False, "time": 30},
        comment="tok",
        error="/o/%j.err",
        common={"signal": "B:USR1@90"},
    ) == [
        "--job-name=run", "--partition=gpuA", "--account=a", "--constraint='x&y'", "--nodes=2", "--gpus-per-node=4",
        "--mem=64G", "--time=01:00:00", "--exclusive",
        "--comment=tok", "--error=/o/%j.err", "--no-requeue", "--open-mode=append", "--output=/o/%j.out",
        "--signal=B:USR1@90",
        "hetjob",
        "--job-name=run-rollout", "--partition=gpuB", "--account=a", "--constraint='x&y'", "--nodes=1",
        "--gpus-per-node=2", "--mem=64G", "--time=30",
    ]  # fmt: skip


def test_job_names_differ() -> None:
    names = [line for line in lines_of({}, {}, {}) if line.startswith("--job-name")]
    assert names == ["--job-name=run", "--job-name=run-rollout", "--job-name=run-rollout-2"]


def test_a_plain_job_has_no_separator() -> None:
    assert "hetjob" not in lines_of({"partition": "p"})


@pytest.mark.parametrize("option", ["mem", "qos", "account", "time", "priority", "an-option-of-tomorrow"])
def test_an_option_that_would_leak_must_stand_in_every_component(option: str) -> None:
    with pytest.raises(UserError, match=f"component 1 leaves --{option} unset.*'x'.*every component or for none"):
        lines_of({option: "x"}, {})
    assert f"--{option}=y" in lines_of({option: "x"}, {option: "y"})
    assert f"--{option}=y" in lines_of({}, {option: "y"})


def test_a_leak_is_seen_across_components() -> None:
    with pytest.raises(UserError, match="component 2 leaves --qos unset"):
        lines_of({}, {"qos": "high"}, {})


def test_a_leak_that_slurm_can_undo_is_undone() -> None:
    assert lines_of({"exclude": "n5", "nice": 3, "reservation": "r"}, {})[-4:] == [
        "--job-name=run-rollout", "--reservation=", "--exclude=", "--nice=0",
    ]  # fmt: skip


def test_options_sbatch_forgets_or_that_are_the_jobs_are_left_alone() -> None:
    leader = {"constraint": "x", "gres": "gpu:1", "exclusive": True, "dependency": "singleton", "hold": True}
    assert lines_of(leader, {})[-2:] == ["hetjob", "--job-name=run-rollout"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("/my proj,v1 (a)/x", "'/my proj,v1 (a)/x'"),
        ("it's", """'it'"'"'s'"""),
        (r"a\b", r"'a\\b'"),
        ("$HOME #1", "'$HOME #1'"),
    ],
)
def test_values_are_quoted_for_sbatch(value: str, written: str) -> None:
    assert f"--chdir={written}" in lines_of({"chdir": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "x"}, "--output is set by slime-hpc"),
        ({"requeue": True}, "--requeue is set by slime-hpc"),
        ({"test_only": True}, "--test-only is set by slime-hpc"),
        ({"N": 2}, "'N' is not the long name"),
        ({"--nodes": 2}, "is not the long name"),
        ({"gpus_per_node": 1, "gpus-per-node": 2}, "--gpus-per-node is given twice"),
        ({"chdir": "a\nb"}, "control character"),
    ],
)
def test_what_a_component_may_not_say(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lines_of(options)
