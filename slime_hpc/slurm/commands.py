"""The only module that runs a Slurm binary: the ``Slurm`` protocol and its one real implementation."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slime_hpc.errors import ClusterError, DeadlineExceeded, SlurmCommandError
from slime_hpc.run_dir import is_nowhere
from slime_hpc.slurm.parse import (
    ACCOUNTING_FORMAT,
    QUEUE_FORMAT,
    TIME_FORMAT,
    AccountingRow,
    PartitionRow,
    QueueRow,
    parse_accounting,
    parse_partitions,
    parse_queue,
    parse_submission,
)
from slime_hpc.slurm.steps import Step
from slime_hpc.types import JobId


class Slurm(Protocol):
    """What we ask of Slurm. ``slime_hpc.testing.FakeSlurm`` answers the same without a cluster.

    Every method raises SlurmCommandError with Slurm's words when refused, ClusterError when Slurm cannot be asked.
    """

    def submit(self, script: Path, *, token: str) -> JobId:
        """Queue a batch script; the job carries ``token``, unique to this submission, as its comment.

        Whatever sbatch's connection does, at most one job comes of it.
        """

    def check(self, script: Path) -> None:
        """Raise what ``submit`` would be refused with, and queue nothing."""

    def queue(self, job_ids: Sequence[JobId]) -> list[QueueRow]:
        """Every component of these jobs, the recently ended ones too; no row for one slurmctld has forgotten."""

    def find(self, *tokens: str) -> list[QueueRow]:
        """This user's jobs that were submitted with one of the tokens, one row a component.

        A heterogeneous submission that was refused for a later component leaves the earlier ones there, cancelled.
        """

    def accounting(self, job_ids: Sequence[JobId]) -> list[AccountingRow] | None:
        """The last life of these jobs' components, or None where the site keeps no accounting."""

    def cancel(self, job_id: JobId, *, signal: str | None = None, batch: bool = False) -> None:
        """End a job (or signal its steps; with ``batch`` only the batch shell). One that is over stays as it is."""

    def partitions(self) -> list[PartitionRow]: ...


@dataclass(frozen=True)
class SlurmCli:
    """Slurm through its commands, each under a time-out and in a scrubbed environment."""

    environ: Mapping[str, str] | None = None
    """Instead of this process's own, which is read anew at each call."""
    timeout_s: float = 60.0
    retry_delays_s: Sequence[float] = (2.0, 5.0, 15.0)
    """Before each look-up of a submission that may have got lost; their number bounds the attempts."""

    def submit(self, script: Path, *, token: str) -> JobId:
        failure: ClusterError | None = None
        for delay_s in self.retry_delays_s:
            try:
                return self._sbatch(script, token)
            except ClusterError as error:
                failure = error
                if _is_transient(error):
                    time.sleep(delay_s)  # slurmctld may still be at work on the request that timed out
                queued = self._queued_after(error, token)
                if queued is not None:
                    return queued
                if not _is_transient(error):
                    raise
        assert failure is not None, "retry_delays_s is empty"
        raise failure

    def check(self, script: Path) -> None:
        self._run("sbatch", "--test-only", str(script), env=self._submit_env())

    def queue(self, job_ids: Sequence[JobId]) -> list[QueueRow]:
        return [row for cluster, numbers in _by_cluster(job_ids) for row in self._queue(cluster, numbers)]

    def find(self, *tokens: str) -> list[QueueRow]:
        stdout = self._squeue("--me")
        ends = tuple(f"|{token}|" for token in tokens)
        # Only our own lines are parsed: a stranger's comment may hold anything, even a line break.
        return parse_queue("\n".join(line for line in stdout.splitlines() if line.endswith(ends)))

    def accounting(self, job_ids: Sequence[JobId]) -> list[AccountingRow] | None:
        rows: list[AccountingRow] = []
        for cluster, numbers in _by_cluster(job_ids):
            options = ("--parsable2", f"--format={ACCOUNTING_FORMAT}", f"--jobs={numbers}")
            try:
                rows += parse_accounting(self._run("sacct", *cluster, *options, env=self._query_env()))
            except SlurmCommandError as error:
                if "accounting storage is disabled" in error.stderr:
                    return None  # a way to run a site, not a failure: callers ask squeue and the run directory
                raise
        return rows

    def cancel(self, job_id: JobId, *, signal: str | None = None, batch: bool = False) -> None:
        options = [f"--signal={signal}"] if signal else []
        options += ["--batch"] if batch else []
        try:
            self._run("scancel", *_cluster_option(job_id.cluster), *options, str(job_id), env=self._query_env())
        except SlurmCommandError as error:
            if not _ALREADY_OVER.search(error.stderr):
                raise
            # nothing is left to cancel, which is what was asked for

    def partitions(self) -> list[PartitionRow]:
        return parse_partitions(self._run("scontrol", "--oneliner", "show", "partition", env=self._query_env()))

    def start_step(self, step: Step) -> subprocess.Popen[bytes]:
        """Start a job step inside the allocation this process is in; srun runs as long as the step does."""
        with open(step.output, "ab") as output:
            return subprocess.Popen(step.argv(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def _sbatch(self, script: Path, token: str) -> JobId:
        # On the command line the comment overrides the script's, for every component.
        return parse_submission(self._run("sbatch", f"--comment={token}", str(script), env=self._submit_env()))

    def _queued_after(self, error: ClusterError, token: str) -> JobId | None:
        """The job a failed sbatch left behind after all, if it did."""
        try:
            # A refusal may leave rows, too, CANCELLED or FAILED: over, without ever having had a node.
            rows = [row for row in self.find(token) if row.node_list or not row.state.is_over]
        except ClusterError as lookup:
            if not _is_transient(error):
                return None  # the first error says what is wrong, and is raised
            raise ClusterError(
                f"{error}\nWhether the job was queued all the same cannot be told ({lookup}). Before submitting "
                f"again, look for the comment {token!r} in `squeue --me -O JobID,Comment:80`."
            ) from error
        return rows[0].job_id.leader if rows else None

    def _queue(self, cluster: Sequence[str], numbers: str) -> list[QueueRow]:
        try:
            return parse_queue(self._squeue(*cluster, f"--jobs={numbers}"))
        except SlurmCommandError as error:
            if "Invalid job id specified" in error.stderr:
                return []  # said only when slurmctld knows none of them any more
            raise

    def _squeue(self, *options: str) -> str:
        return self._run("squeue", "--noheader", "--states=all", "-O", QUEUE_FORMAT, *options, env=self._query_env())

    def _submit_env(self) -> dict[str, str]:
        """sbatch hands its environment to the job, so only what would mislead it is taken out."""
        environ = os.environ if self.environ is None else self.environ
        dropped = dropped_variables(environ)
        return {name: value for name, value in environ.items() if name not in dropped}

    def _query_env(self) -> dict[str, str]:
        kept = {name: value for name, value in self._submit_env().items() if not _MISLEADS_QUERIES.match(name)}
        return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": TIME_FORMAT}

    def _run(self, *command: str, env: Mapping[str, str]) -> str:
        """Standard output of one command."""
        try:
            done = subprocess.run(
                command, check=False, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=self.timeout_s, cwd=_directory(),
            )  # fmt: skip
        except FileNotFoundError as error:
            raise ClusterError(
                f"{command[0]} is not on PATH; load your site's Slurm module, or start a local one with "
                '`slime-hpc devcluster up` and `eval "$(slime-hpc devcluster env)"`'
            ) from error
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(
                f"{command[0]} did not answer within {self.timeout_s:g} s; is slurmctld up?"
            ) from error
        if done.returncode != 0 and _UNCONFIGURED.search(done.stderr):
            raise ClusterError(
                f"{command[0]} finds no cluster: {done.stderr.strip().splitlines()[-1]}\nSLURM_CONF is "
                f"{env.get('SLURM_CONF', 'not set')}; load your site's Slurm module, or, for the local one, "
                '`eval "$(slime-hpc devcluster env)"`'
            )
        if done.returncode != 0:
            raise SlurmCommandError(command, done.returncode, done.stderr)
        return done.stdout


def _directory() -> str | None:
    """Where to run Slurm's commands: sbatch fails in a directory that somebody has removed."""
    return "/" if is_nowhere() else None


def dropped_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables of an enclosing job or MPI step, and users' defaults, that no job of ours gets to see.

    They would override the script (``SBATCH_PARTITION``), steer its steps (``SLURM_CPU_BIND``), or tell a library in
    them that it is a rank of something else (``PMI_RANK``, ``OMPI_COMM_WORLD_RANK``).
    """
    return sorted(name for name in environ if _MISLEADS_JOBS.match(name) and name not in _KEPT)


_MISLEADS_JOBS = re.compile(
    r"SLURM|SUBMITIT|(SBATCH|SRUN|SALLOC)_|PMI_|PMI2_|PMIX_(?!MCA_)|PRTE_(?!MCA_)|OMPI_(?!MCA_)|OMPI_MCA_(orte|ess|pmix)"
    r"|MV2_COMM_WORLD_|MPI_LOCAL(RANKID|NRANKS)|HYDI_"
)
"""MCA parameters are settings, of a site's module or a user's, but those by which mpirun speaks to its children."""
_MISLEADS_QUERIES = re.compile(r"(SQUEUE|SACCT|SCANCEL|SINFO)_")
"""How a user likes tables to look."""
_KEPT = {"SLURM_CONF", "SLURM_JWT"}
"""How the cluster is reached."""

_UNCONFIGURED = re.compile(r"resolve_ctls_from_dns_srv|Could not establish a configuration source")
"""Slurm's binaries are here, its configuration is not."""

_ALREADY_OVER = re.compile(r"Invalid job id specified|already completing or completed")

_TRANSIENT = re.compile(
    r"Socket timed out|Unable to contact slurm controller \((?!connect)|temporarily unable|Connection (reset|timed out)"
    r"|Zero Bytes were transmitted|[Cc]ommunication connection failure|standby mode|Transport endpoint"
)
"""Not a failure to connect: then nothing was delivered, and sbatch has tried for long enough itself."""


def _is_transient(error: ClusterError) -> bool:
    """Whether the request may have been lost on the way, or its answer: not what a user has to mend."""
    return isinstance(error, DeadlineExceeded) or (
        isinstance(error, SlurmCommandError) and _TRANSIENT.search(error.stderr) is not None
    )


def _by_cluster(job_ids: Sequence[JobId]) -> list[tuple[list[str], str]]:
    """(``--clusters`` option, ``12,15``) for each cluster there are jobs of."""
    clusters = sorted({job.cluster or "" for job in job_ids})
    return [
        (_cluster_option(cluster), ",".join(str(job.number) for job in job_ids if (job.cluster or "") == cluster))
        for cluster in clusters
    ]


def _cluster_option(cluster: str | None) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []
