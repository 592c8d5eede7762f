"""A submitit executor whose every submission is one heterogeneous job, with all Slurm calls through our seam."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, logger, utils
from submitit.core.core import R
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob, SlurmJobEnvironment

from slime_hpc.errors import ClusterError, UserError
from slime_hpc.slurm.commands import Slurm, SlurmCli
from slime_hpc.slurm.directives import Options, sbatch_directives
from slime_hpc.slurm.parse import AccountingRow, QueueRow
from slime_hpc.spec.values import parse_time_s
from slime_hpc.types import JobId

Row = QueueRow | AccountingRow


class HetInfoWatcher(SlurmInfoWatcher):
    """States of one executor's jobs: one squeue for all of them, sacct for those squeue has forgotten.

    The leader's state is the job's: when it ends, Slurm ends the other components. A job neither of them knows
    counts as over once ``gone_after_s`` has passed, so that ``result()`` raises instead of waiting for ever.
    """

    def __init__(self, slurm: Slurm, delay_s: int = 60, gone_after_s: float = 60.0) -> None:
        super().__init__(delay_s)
        self.slurm = slurm
        self.gone_after_s = gone_after_s
        self._job_ids: dict[str, JobId] = {}
        self._missing_since: dict[str, float] = {}

    def add(self, job_id: JobId) -> None:
        """Ask for this job with all that its id holds: the cluster, too, where sbatch named one."""
        self._job_ids[str(job_id)] = job_id

    def job(self, job_id: str) -> JobId:
        return self._job_ids.get(job_id) or JobId.parse(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.get_info(job_id, mode=mode)
        return job_id in self._finished

    def update(self) -> None:
        waiting = sorted(self._registered - self._finished)
        if not waiting:
            return
        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            rows = self._rows([self.job(text) for text in waiting])
        except ClusterError as error:
            # The next call asks again: for want of an answer no job is called over.
            logger.get_logger().warning(f"{error}; states may be out of date")
            return
        for text in waiting:
            self._record(text, rows.get(self.job(text).number))

    def _rows(self, jobs: Sequence[JobId]) -> dict[int, Row]:
        """Each job's leader row, by number."""
        queued = _leaders(self.slurm.queue(jobs))
        forgotten = [job for job in jobs if job.number not in queued]
        return queued | (self._accounted(forgotten) if forgotten else {})

    def _accounted(self, jobs: Sequence[JobId]) -> dict[int, Row]:
        """Of jobs that slurmctld has forgotten, which are over: a sacct that still says RUNNING is late."""
        try:
            rows = self.slurm.accounting(jobs) or []
        except ClusterError as error:
            # Not needed to know that they are over, only how they ended: that stays UNKNOWN.
            logger.get_logger().warning(str(error))
            return {}
        return {number: row for number, row in _leaders(rows).items() if row.state.is_over}

    def _record(self, text: str, row: Row | None) -> None:
        if row is None:
            self._info_dict.pop(text, None)
            since = self._missing_since.setdefault(text, time.time())
            over = time.time() - since >= self.gone_after_s
        else:
            self._missing_since.pop(text, None)
            self._info_dict[text] = {"JobID": text, "State": str(row.state), "NodeList": row.node_list}
            over = row.state.is_over
        if over:
            self._finished.add(text)


def _leaders(rows: Sequence[Row]) -> dict[int, Row]:
    # Sorted, so that a component 0 replaces the bare row sacct shows for a moment.
    ordered = sorted(rows, key=lambda row: row.job_id.component is not None)
    return {row.job_id.number: row for row in ordered if row.is_leader}


class _Paths(utils.JobPaths):
    """submitit's paths, except that Slurm's output may lie elsewhere (both streams in one file)."""

    def __init__(self, folder: Path | str, job_id: str, output: Path) -> None:
        super().__init__(folder, job_id, 0)
        self._output = output

    @property
    def stdout(self) -> Path:
        return self._format_id(self._output)

    @property
    def stderr(self) -> Path:
        return self.stdout


class HetJob(SlurmJob[R]):
    """Handle of a heterogeneous job; ``job_id`` is the leader's. ``HetJob(folder, "12")`` finds an old one again."""

    watcher: HetInfoWatcher

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        *,
        watcher: HetInfoWatcher | None = None,
        output: Path | None = None,
    ) -> None:
        self.watcher = watcher or HetInfoWatcher(SlurmCli())
        super().__init__(folder, job_id, tasks)
        if output is not None:
            self._paths = _Paths(folder, job_id, output)

    def cancel(self, check: bool = True) -> None:
        """End every component. Without ``check`` a Slurm that does not answer is only logged."""
        try:
            self._signal(None)
        except ClusterError as error:
            if check:
                raise
            # asked for by submitit from __del__, where nobody could catch it
            logger.get_logger().warning(f"job {self.job_id} was not cancelled: {error}")
        self.watcher.register_job(self.job_id)  # look soon, and often at first

    def _interrupt(self, timeout: bool = False) -> None:
        """submitit's test hook. The function runs in the batch shell's place, so that is where signals go."""
        for signal in [SlurmJobEnvironment.USR_SIG] if timeout else ["TERM", SlurmJobEnvironment.USR_SIG]:
            self._signal(signal)

    def _signal(self, signal: str | None) -> None:
        self.watcher.slurm.cancel(self.watcher.job(self.job_id), signal=signal, batch=signal is not None)


class HetSlurmExecutor(SlurmExecutor):
    """Runs each submitted function on the first node of component 0 of a heterogeneous job of its own.

    ``components``: sbatch options of each, by long name (``{"partition": "gpu", "nodes": 2, "time": 60}``).
    ``script``: makes the whole batch script from the command it has to end with; left out, a plain one is written.
    ``output``: Slurm's output file, ``%j`` in its name being the job id; left out, submitit's two log files.
    ``token``: the job's comment, for a submission that must be found again; the executor then submits only once.
    Jobs are not requeued, and get no signal before their time limit.
    """

    job_class = HetJob

    def __init__(
        self,
        folder: Path | str,
        components: Sequence[Options],
        *,
        slurm: Slurm | None = None,
        script: Callable[[str], str] | None = None,
        output: Path | None = None,
        token: str | None = None,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout, max_pickle_size_gb, python)
        self.slurm = slurm or SlurmCli()
        self.components = [dict(options) for options in components]
        self.output = output
        self._script = script or self._plain_script
        self._tokens: Iterator[str] = (
            iter([token]) if token else (f"submitit-{uuid.uuid4().hex}" for _ in itertools.count())
        )
        self._watcher = HetInfoWatcher(self.slurm)
        self.parameters["time"] = _leader_minutes(self.components)
        _require_plain_path(self.folder)
        if output is not None:
            _require_plain_path(output.parent)

    @classmethod
    def affinity(cls) -> int:
        """Always available: whether Slurm is there is the seam's to say, at submission."""
        return 2

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        unknown = sorted(kwargs.keys() - {"job_name", "setup"})
        if unknown:
            raise UserError(f"update_parameters takes job_name and setup; {unknown[0]} belongs into components=[{{…}}]")
        if self._script != self._plain_script:
            raise UserError("update_parameters changes nothing in a script made by script=…; change it there")
        self.parameters.update(kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """One heterogeneous job each: Slurm has no arrays of them."""
        return core.PicklingExecutor._internal_process_submissions(self, delayed_submissions)

    def _submit_command(self, command: str) -> core.Job[Any]:
        token = next(self._tokens, None)
        if token is None:
            raise UserError("this executor has submitted the job its token stands for; make another with a new token")
        submission = self.folder / f".submission_file_{uuid.uuid4().hex}.sh"
        submission.write_text(self._script(command), encoding="utf-8")
        (self.output or self.folder / "log").parent.mkdir(parents=True, exist_ok=True)
        job_id = self.slurm.submit(submission, token=token)
        self._watcher.add(job_id)
        job: HetJob[Any] = HetJob(self.folder, str(job_id), watcher=self._watcher, output=self.output)
        job.paths.move_temporary_file(submission, "submission_file", keep_as_symlink=True)
        return job

    @property
    def _submitit_command_str(self) -> str:
        """``exec``: the batch shell becomes Python, so that the batch shell's signals reach it."""
        return f"exec env SUBMITIT_EXECUTOR=slurm {super()._submitit_command_str}"

    def _plain_script(self, command: str) -> str:
        logs = utils.JobPaths(self.folder)
        directives = sbatch_directives(
            self.components,
            name=self.parameters.get("job_name", "submitit"),
            output=str(self.output or logs.stdout).replace("%t", "0"),
            error=None if self.output else str(logs.stderr).replace("%t", "0"),
        )
        return "\n".join(["#!/bin/bash", *directives, *self.parameters.get("setup", []), command, ""])


def _leader_minutes(components: Sequence[Options]) -> int:
    """The time limit as submitit counts it; its own default where none is given."""
    if not components:
        raise UserError("components is empty; give at least one, such as {'partition': 'gpu', 'nodes': 1, 'time': 60}")
    limit = components[0].get("time", 5)
    try:
        return limit if isinstance(limit, int) else -(-parse_time_s(limit) // 60)
    except ValueError as error:
        raise UserError(f"component 0: time: {error}") from error


def _require_plain_path(path: Path) -> None:
    for character in "%\\":
        if character in str(path):
            raise UserError(
                f"{path} holds {character!r}, which Slurm replaces or reads in file names; choose another directory"
            )
