"""What submit writes, what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import dataclasses
import pickle
import stat
from pathlib import Path

import pytest

from slime_hpc.errors import ClusterError, DeadlineExceeded, ProfileError, UserError
from slime_hpc.plan import JobPlan
from slime_hpc.records import read_json
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.parse import PartitionRow
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.submit import submit_dry_run, submit_run
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class SilentSlurm(FakeSlurm):
    """sbatch never answers."""

    def submit(self, script: Path, *, token: str) -> JobId:
        raise DeadlineExceeded("sbatch did not answer within 60 s; is slurmctld up?")


class NoSlurm(FakeSlurm):
    def partitions(self) -> list[PartitionRow]:
        raise ClusterError("scontrol is not on PATH; load your site's Slurm module")


class SmallSlurm(FakeSlurm):
    def partitions(self) -> list[PartitionRow]:
        train, rollout = super().partitions()
        return [
            dataclasses.replace(train, max_time_s=600),
            dataclasses.replace(rollout, total_nodes=0, allow_accounts="a,b"),
        ]


def test_what_it_writes(profile: Profile) -> None:
    slurm = FakeSlurm()
    record = submit_run(profile, slurm, supervise)
    run = RunDir(profile.spec.run_dir)
    attempt = run.attempt(1)
    plan = JobPlan.model_validate_json(attempt.plan.read_text())
    assert read_json(run.submit) == dataclasses.asdict(record)
    assert (record.job_id, record.token) == ("1", plan.token)
    assert slurm.jobs[1].token == plan.token
    assert run.profile.read_text() == profile.path.read_text()
    assert read_json(run.spec)["spec"]["time_limit"] == "00:30:00"
    assert (mode(run.path), mode(attempt.secrets)) == (0o700, 0o700)
    assert attempt.logs.is_dir()
    assert attempt.script.read_text() == slurm.jobs[1].script


def test_submitit_will_call_the_supervisor(profile: Profile) -> None:
    submit_run(profile, FakeSlurm(), supervise)
    attempt = RunDir(profile.spec.run_dir).attempt(1)
    assert "submitit.core._submit" in attempt.script.read_text().splitlines()[-1]
    (pickled,) = attempt.submitit.glob("1_submitted.pkl")
    call = pickle.loads(pickled.read_bytes())
    assert (call.function, call.args) == (supervise, (str(profile.spec.run_dir), 1))


def test_tokens_differ(quickstart: Path, tmp_path: Path) -> None:
    runs = [load_profile(quickstart, sets=[f"run_dir={tmp_path}/{name}"]) for name in "ab"]
    slurm = FakeSlurm()
    assert len({submit_run(profile, slurm, supervise).token for profile in runs}) == 2


def test_a_refusal_names_slurms_words_and_leaves_nothing(quickstart: Path, tmp_path: Path) -> None:
    profile = load_profile(quickstart, sets=[f"run_dir={tmp_path}/new/deep/run", "account=nosuch"])
    before = tree(tmp_path)
    with pytest.raises(ClusterError) as error:
        submit_run(profile, FakeSlurm(), supervise)
    assert error.value.exit_code == 1
    assert "Invalid account or account/partition combination specified" in str(error.value)
    assert "trainer: --partition=train --account=nosuch" in str(error.value)
    assert tree(tmp_path) == before
    assert submit_run(load_profile(quickstart, sets=[f"run_dir={tmp_path}/new/deep/run"]), FakeSlurm(), supervise)


def test_a_refusal_keeps_the_empty_directory_that_was_there(quickstart: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    profile = load_profile(quickstart, sets=[f"run_dir={tmp_path}/run", "account=nosuch"])
    with pytest.raises(ClusterError):
        submit_run(profile, FakeSlurm(), supervise)
    assert tree(tmp_path / "run") == []


def test_without_an_answer_the_directory_stays(profile: Profile) -> None:
    with pytest.raises(ClusterError, match="is kept; `slime-hpc status"):
        submit_run(profile, SilentSlurm(), supervise)
    assert RunDir(profile.spec.run_dir).attempt(1).plan.exists()


def test_no_slurm(profile: Profile) -> None:
    with pytest.raises(ClusterError, match="not on PATH"):
        submit_run(profile, NoSlurm(), supervise)
    assert not profile.spec.run_dir.exists()


def test_run_dir_in_use(profile: Profile) -> None:
    slurm = FakeSlurm()
    submit_run(profile, slurm, supervise)
    before = tree(profile.spec.run_dir)
    with pytest.raises(UserError, match=r"is in use by job 1, submitted .*; nothing in it was touched") as error:
        submit_run(profile, slurm, supervise)
    assert error.value.exit_code == 2
    assert (len(slurm.jobs), tree(profile.spec.run_dir)) == (1, before)


def test_run_dir_of_somebody_else(profile: Profile) -> None:
    profile.spec.run_dir.mkdir()
    (profile.spec.run_dir / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"is not empty \(it holds thesis\.tex\)"):
        submit_run(profile, FakeSlurm(), supervise)
    assert tree(profile.spec.run_dir) == ["thesis.tex"]


def test_run_dir_is_a_file(profile: Profile) -> None:
    profile.spec.run_dir.touch()
    with pytest.raises(UserError, match="is a file"):
        submit_run(profile, FakeSlurm(), supervise)


def test_run_dir_that_cannot_be_made(quickstart: Path) -> None:
    profile = load_profile(quickstart, sets=["run_dir=/proc/nowhere"])
    with pytest.raises(UserError, match="cannot be made"):
        submit_run(profile, FakeSlurm(), supervise)


@pytest.mark.parametrize("submit", [lambda p, s: submit_run(p, s, supervise), submit_dry_run])
def test_unknown_partition(quickstart: Path, tmp_path: Path, submit: object) -> None:
    sets = [f"run_dir={tmp_path}/run", "rollout.partition=rollouts", "rollout.cpus_per_task=1"]
    with pytest.raises(ProfileError) as error:
        submit(load_profile(quickstart, sets=sets), FakeSlurm())  # type: ignore[operator]
    message = (
        "--set rollout.partition=rollouts: rollout.partition: Slurm has no partition 'rollouts' here; did you mean"
    )
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_limits_that_slurm_would_accept_and_never_start(profile: Profile) -> None:
    with pytest.raises(ProfileError) as error:
        submit_run(profile, SmallSlurm(), supervise)
    found = {finding.path: finding.message for finding in error.value.findings}
    assert found == {
        "trainer.time_limit": "00:30:00 is over the 00:10:00 that partition 'train' allows",
        "rollout.nodes": "1 is over the 0 that partition 'rollout' allows",
        "rollout.account": "'dev' may not use partition 'rollout', a,b may",
    }
    assert all(":" in finding.where for finding in error.value.findings)


def test_dry_run_shares_all_but_the_last_line(profile: Profile) -> None:
    slurm = FakeSlurm()
    dry = submit_dry_run(profile, slurm)
    assert not profile.spec.run_dir.exists() and not slurm.jobs
    assert dry.unchecked == ""
    token = submit_run(profile, slurm, supervise).token
    script = dry.script.replace(dry.plan.token, token)
    assert script.splitlines()[:-1] == slurm.jobs[1].script.splitlines()[:-1]


def test_dry_run_without_slurm(profile: Profile) -> None:
    dry = submit_dry_run(profile, NoSlurm())
    assert "not on PATH" in dry.unchecked
    assert dry.script.startswith("#!/bin/bash\n")


def test_dry_run_of_what_slurm_refuses(quickstart: Path, tmp_path: Path) -> None:
    profile = load_profile(quickstart, sets=[f"run_dir={tmp_path}/run", "account=nosuch"])
    with pytest.raises(ClusterError, match="Invalid account"):
        submit_dry_run(profile, FakeSlurm())
    assert not profile.spec.run_dir.exists()
