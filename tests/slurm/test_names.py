"""Hostile names, places and environments on a real Slurm: in files, in every process of a job, at submission."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import wait_for

from slime_hpc.records import read_json, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.commands import SlurmCli
from slime_hpc.slurm.steps import Step
from slime_hpc.spec.load import load_profile
from slime_hpc.submit import submit_run
from slime_hpc.supervisor.launch import SlurmLauncher

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ROOT = Path(__file__).parents[2]
NAME = '-hetjob it\'s "my" run, v1 (a) #$HOME 日本 ünï'
HOSTILE = {
    "SPACES": " two  words ",
    "QUOTES": 'it\'s "quoted"',
    "LINES": "one\ntwo\r\nthree\n",
    "DOLLAR": "$HOME ${X} $(id) `id` \\n %j",
    "UNICODE": "日本 😀 \u2028",
    "EQUALS": "=a=b=",
    "EMPTY": "",
    "LONG": "x" * 10_000,
    "COMMA": "a,b",
    "HF_TOKEN": "s3cr3t",
}
INHERITED = {
    "SBATCH_PARTITION": "nosuch",
    "SBATCH_NO_REQUEUE": "1",
    "SLURM_CPU_BIND": "map_cpu:99",
    "SLURM_JOB_ID": "12",
    "SLURM_NTASKS": "64",
    "PMI_RANK": "3",
    "PMIX_RANK": "3",
    "OMPI_COMM_WORLD_RANK": "3",
}
BEGIN = [f"--set={role}.sbatch={{begin: now+1hour}}" for role in ("trainer", "rollout")]

pytestmark = pytest.mark.usefixtures("devcluster")


def slime_hpc(
    *arguments: object, cwd: Path | None = None, before: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """One command; ``before`` is Python that comes first."""
    code = f"{before}\nfrom slime_hpc.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(argv, check=False, capture_output=True, encoding="utf-8", env=env, timeout=120, cwd=cwd)


def queued() -> list[str]:
    squeue = ["squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%A %T"]
    return subprocess.run(squeue, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("names") / NAME
    directory.mkdir()
    for name in ("profile.yaml", "prompts.jsonl", "reward.py"):
        shutil.copy(QUICKSTART / name, directory)
    (directory / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / "model" / name).touch()
    return directory / "profile.yaml"


def print_environments(run_dir: str, attempt: int) -> None:
    """In place of the supervisor: what the batch host, and a step of each component, find in their environment."""
    run = RunDir(Path(run_dir))
    print("said on the batch host", flush=True)
    write_json(run.path / "batch.json", dict(os.environ))
    launcher = SlurmLauncher()
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    for index, component in enumerate(launcher.allocation.components):
        argv = [sys.executable, "-c", code, str(run.path / f"component-{index}.json")]
        step = Step(f"c{index}", index, component.nodes, 1, argv, run.attempt(attempt).log(f"step-{index}"))
        assert launcher.start_step(step).wait(timeout=60) == 0
    write_json(run.path / "done.json", {})


@dataclass(frozen=True)
class Ran:
    run: RunDir
    job_id: str


@pytest.fixture(scope="module")
def ran(profile: Path, devcluster: object) -> Iterator[Ran]:
    """A job that has run, submitted by a shell with a umask of 0 from inside another job."""
    sets = [f"environment.variables={json.dumps(HOSTILE)}", "run_dir=runs/x", "num_rollout=1"]
    loaded = load_profile(profile, sets=sets)
    umask = os.umask(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(ROOT)]))
        for name, value in INHERITED.items():
            patch.setenv(name, value)
        try:
            from slime_hpc.records import restrict_umask

            restrict_umask()  # as every command does
            record = submit_run(loaded, SlurmCli(), print_environments)
        finally:
            os.umask(umask)
    run = RunDir(loaded.spec.run_dir)
    try:
        wait_for(lambda: (run.path / "done.json").exists() or None, 90, f"the job's last word in {run.path}")
    finally:
        subprocess.run(["scancel", record.job_id], check=False)
    yield Ran(run, record.job_id)


def test_variables_arrive_whole_in_every_process(ran: Ran) -> None:
    for who in ("batch", "component-0", "component-1"):
        found = read_json(ran.run.path / f"{who}.json")
        assert {name: found.get(name) for name in HOSTILE} == HOSTILE, who


def test_nothing_of_the_shell_around_misleads_the_job(ran: Ran) -> None:
    for who in ("batch", "component-0", "component-1"):
        found = read_json(ran.run.path / f"{who}.json")
        assert not {name: found[name] for name, value in INHERITED.items() if found.get(name) == value}, who
        assert "SLURM_CONF" in found


def test_slurms_output_lies_in_the_run_directory(ran: Ran) -> None:
    assert NAME in str(ran.run.path)
    assert "said on the batch host" in ran.run.slurm_output(ran.job_id).read_text()
    done = slime_hpc("logs", ran.run.path, "slurm")
    assert done.returncode == 0 and "said on the batch host\n" in done.stdout
    done = slime_hpc("status", ran.run.path, "--json")
    assert json.loads(done.stdout)["run_dir"] == str(ran.run.path)


def test_nothing_of_a_run_is_for_others_to_write(ran: Ran) -> None:
    found = {p: stat.S_IMODE(p.lstat().st_mode) for p in [ran.run.path, *ran.run.path.rglob("*")] if not p.is_symlink()}
    assert found[ran.run.path] == 0o700
    assert not [str(path) for path, mode in found.items() if mode & 0o002]


def test_slurm_keeps_no_secret(ran: Ran, tmp_path: Path) -> None:
    script = tmp_path / "script"
    subprocess.run(["scontrol", "write", "batch_script", ran.job_id, script], check=True, capture_output=True)
    assert "environment.sh" in script.read_text() and HOSTILE["HF_TOKEN"] not in script.read_text()


def test_a_run_with_an_awkward_name_is_resumed_and_cancelled(ran: Ran) -> None:
    wait_for(lambda: ran.job_id not in " ".join(queued()) or None, 60, "the end of the job")
    done = slime_hpc("resume", ran.run.path, "--json", *BEGIN)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    shown = subprocess.run(["scontrol", "show", "job", record["job_id"]], capture_output=True, text=True, check=True)
    assert f"StdOut={ran.run.slurm_output(record['job_id'])}" in shown.stdout
    assert json.loads(slime_hpc("status", ran.run.path, "--json").stdout)["verdict"] == "waiting"
    assert json.loads(slime_hpc("cancel", ran.run.path, "--json").stdout)["cancelled"] is True


def test_what_is_left_out_is_named_by_submit_and_resume(profile: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = slime_hpc("submit", profile, "--json", "--set", f"run_dir={run}", *BEGIN, **INHERITED)
    try:
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("left out of the job's environment: SBATCH_NO_REQUEUE, SBATCH_PARTITION, ")
        assert done.stderr.endswith("(this shell is inside job 12)\n")
        job_id = json.loads(done.stdout)["job_id"]
        shown = subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True, check=True).stdout
        assert "Partition=train" in shown and "Requeue=1" in shown
    finally:
        slime_hpc("cancel", run)
    done = slime_hpc("resume", run, "--json", **INHERITED)
    assert done.returncode == 0 and done.stderr.startswith("left out of the job's environment: SBATCH_NO_REQUEUE")
    slime_hpc("cancel", run)


@pytest.mark.parametrize(
    ("environ", "before"),
    [
        ({"HOME": "/nowhere", "TMPDIR": "/nowhere"}, ""),
        ({"LC_ALL": "C"}, "import os; os.environ.pop('HOME')"),
        ({"TMPDIR": "{long}"}, ""),
        ({}, "import os; os.rmdir(os.getcwd())"),
    ],
)
def test_hostile_environments(profile: Path, tmp_path: Path, environ: dict[str, str], before: str) -> None:
    (gone := tmp_path / "gone").mkdir()
    (long := tmp_path / ("t" * 90)).mkdir()
    run = tmp_path / "läufe 日本"
    environ = {name: value.format(long=long) for name, value in environ.items()}
    done = slime_hpc("submit", profile, "--json", "--set", f"run_dir={run}", *BEGIN, before=before, cwd=gone, **environ)
    assert (done.returncode, done.stderr) == (0, "")
    gone.mkdir(exist_ok=True)
    done = slime_hpc("status", run, "--json", before=before, cwd=gone, **environ)
    assert json.loads(done.stdout)["verdict"] == "waiting", done.stderr
    gone.mkdir(exist_ok=True)
    done = slime_hpc("cancel", run, "--json", before=before, cwd=gone, **environ)
    assert json.loads(done.stdout)["cancelled"] is True, done.stderr
    assert not any(long.iterdir())


def full_disk(size: str, *command: object, mount: Path) -> subprocess.CompletedProcess[str]:
    """A command for which a tiny disk lies at ``mount``; afterwards what is on it, on standard output."""
    script = 'mount -t tmpfs -o size=$1 tmpfs "$2" && m=$2 && shift 2 && "$@"; code=$?; ls -A "$m"; exit $code'
    argv = ["unshare", "--mount", "bash", "-c", script, "bash", size, str(mount), *map(str, command)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, check=False, capture_output=True, text=True, env=env, timeout=120)


def test_a_full_disk_leaves_nothing(profile: Path, tmp_path: Path) -> None:
    """It fills a page later each time: at the plan, the script, what submitit writes, the record of the queued job."""
    before = queued()
    submit = [sys.executable, "-c", "from slime_hpc.cli import main; main()", "submit", profile, "--json", *BEGIN]
    refusals = 0
    while True:
        done = full_disk(f"{4 * (refusals + 1)}k", *submit, "--set", f"run_dir={tmp_path}/run", mount=tmp_path)
        if done.returncode == 0:
            break
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"run_dir {tmp_path}/run cannot be written: No space left on device" in done.stderr
        assert queued() == before
        refusals += 1
    record, _ = json.JSONDecoder().raw_decode(done.stdout)
    subprocess.run(["scancel", record["job_id"]], check=True)
    assert refusals > 5
