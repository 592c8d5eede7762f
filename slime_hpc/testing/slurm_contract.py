"""What every implementation of ``slime_hpc.slurm.commands.Slurm`` does, as a pytest suite to subclass."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slime_hpc.errors import SlurmCommandError
from slime_hpc.slurm.commands import Slurm
from slime_hpc.slurm.directives import Options, sbatch_directives
from slime_hpc.types import JobId


class SlurmContract:
    """Subclass with a fixture ``slurm``, and ``start`` where jobs do not start by themselves."""

    partitions: Sequence[str] = ("train", "rollout")
    account = "dev"
    deadline_s = 60.0

    def start(self, slurm: Slurm, job_id: JobId) -> None:
        """Let a job run."""

    def script(
        self, folder: Path, *, partitions: Sequence[str] | None = None, account: str | None = None, comment: str = ""
    ) -> Path:
        """A batch script that sleeps, one component a partition."""
        components: list[Options] = [
            {"partition": partition, "account": account or self.account, "nodes": 1, "time": 5}
            for partition in partitions or self.partitions
        ]
        path = folder / "contract.sbatch"
        lines = sbatch_directives(components, name="contract", output=str(folder / "%j.out"), comment=comment)
        path.write_text("\n".join(["#!/bin/bash", *lines, "sleep 300", ""]))
        return path

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + self.deadline_s
        while not holds():
            assert time.monotonic() < end, f"after {self.deadline_s:g} s still waiting until {what}"
            time.sleep(0.2)

    def submit(self, slurm: Slurm, script: Path) -> tuple[JobId, str]:
        token = f"contract-{uuid.uuid4().hex}"
        return slurm.submit(script, token=token), token

    def is_running(self, slurm: Slurm, job_id: JobId) -> bool:
        return all(row.state.name == "RUNNING" for row in slurm.queue([job_id]))

    def test_a_het_job_has_one_row_a_component(self, slurm: Slurm, tmp_path: Path) -> None:
        job_id, token = self.submit(slurm, self.script(tmp_path))
        rows = sorted(slurm.queue([job_id]), key=lambda row: row.job_id)
        slurm.cancel(job_id)
        assert job_id.component is None
        assert [row.job_id for row in rows] == [JobId(job_id.number, 0), JobId(job_id.number, 1)]
        assert [row.raw_id - job_id.number for row in rows] == [0, 1]
        assert [row.is_leader for row in rows] == [True, False]
        assert {row.comment for row in rows} == {token}

    def test_a_plain_job_has_one_row(self, slurm: Slurm, tmp_path: Path) -> None:
        job_id, _ = self.submit(slurm, self.script(tmp_path, partitions=self.partitions[:1]))
        rows = slurm.queue([job_id])
        slurm.cancel(job_id)
        assert [row.job_id for row in rows] == [job_id]
        assert rows[0].is_leader

    def test_a_running_job_has_nodes_and_a_start(self, slurm: Slurm, tmp_path: Path) -> None:
        before = int(time.time())
        job_id, _ = self.submit(slurm, self.script(tmp_path))
        self.start(slurm, job_id)
        self.wait("the job runs", lambda: self.is_running(slurm, job_id))
        rows = slurm.queue([job_id])
        slurm.cancel(job_id)
        assert all(row.node_list and row.restarts == 0 for row in rows)
        assert all(row.start is not None and before - 1 <= row.start <= time.time() + 1 for row in rows)

    def test_a_cancelled_job_is_over_in_queue_and_accounting(self, slurm: Slurm, tmp_path: Path) -> None:
        job_id, _ = self.submit(slurm, self.script(tmp_path))
        self.start(slurm, job_id)
        self.wait("the job runs", lambda: self.is_running(slurm, job_id))
        slurm.cancel(job_id)
        self.wait("squeue shows it over", lambda: all(row.state.is_over for row in slurm.queue([job_id])))
        self.wait("sacct has both components", lambda: len(slurm.accounting([job_id]) or []) == 2)
        self.wait("sacct shows it over", lambda: all(row.state.is_over for row in slurm.accounting([job_id]) or []))
        rows = slurm.accounting([job_id]) or []
        assert {str(row.state) for row in rows} == {"CANCELLED"}
        assert {row.job_id for row in rows} == {JobId(job_id.number, 0), JobId(job_id.number, 1)}
        assert all(row.cancelled_by is not None and row.end is not None for row in rows)
        slurm.cancel(job_id)  # once more does no harm

    def test_a_signal_leaves_the_job_in_the_queue(self, slurm: Slurm, tmp_path: Path) -> None:
        job_id, _ = self.submit(slurm, self.script(tmp_path))
        self.start(slurm, job_id)
        self.wait("the job runs", lambda: self.is_running(slurm, job_id))
        slurm.cancel(job_id, signal="CONT", batch=True)
        states = [row.state for row in slurm.queue([job_id])]  # SIGNALING for a moment, perhaps
        slurm.cancel(job_id)
        assert len(states) == 2 and all(state.is_running for state in states)

    def test_a_job_is_found_by_its_token_alone(self, slurm: Slurm, tmp_path: Path) -> None:
        script = self.script(tmp_path)
        first, token = self.submit(slurm, script)
        second, other = self.submit(slurm, script)
        found, both = slurm.find(token), slurm.find(token, "no-such-token", other)
        slurm.cancel(first)
        slurm.cancel(second)
        assert {row.job_id.leader for row in found} == {first}
        assert len(found) == 2
        assert {row.job_id.leader for row in both} == {first, second}
        assert slurm.find("no-such-token") == []

    def test_an_unknown_job_has_no_rows(self, slurm: Slurm) -> None:
        assert slurm.queue([JobId(987654)]) == []
        assert slurm.queue([]) == []
        assert slurm.accounting([JobId(987654)]) == []
        slurm.cancel(JobId(987654))

    def test_an_unknown_partition_is_refused_in_slurms_words(self, slurm: Slurm, tmp_path: Path) -> None:
        script = self.script(tmp_path, partitions=(self.partitions[0], "nosuch"))
        with pytest.raises(SlurmCommandError, match="Invalid partition name specified"):
            slurm.check(script)
        with pytest.raises(SlurmCommandError, match="invalid partition specified: nosuch"):
            slurm.submit(script, token="refused")
        assert all(row.state.is_over for row in slurm.find("refused"))

    def test_an_unknown_account_is_refused_in_slurms_words(self, slurm: Slurm, tmp_path: Path) -> None:
        with pytest.raises(SlurmCommandError, match="Invalid account"):
            slurm.submit(self.script(tmp_path, account="nosuch"), token="refused")

    def test_check_accepts_and_queues_nothing(self, slurm: Slurm, tmp_path: Path) -> None:
        slurm.check(self.script(tmp_path, comment="only-checked"))
        assert slurm.find("only-checked") == []

    def test_partitions_are_listed(self, slurm: Slurm) -> None:
        rows = {row.name: row for row in slurm.partitions()}
        assert set(self.partitions) <= rows.keys()
        assert all(rows[name].state == "UP" and rows[name].total_nodes >= 1 for name in self.partitions)
