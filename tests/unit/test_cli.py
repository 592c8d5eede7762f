"""What a user sees: exit codes, one message and no traceback, JSON, and a quick --help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_hpc import __version__
from slime_hpc.cli import main
from slime_hpc.display import data_tables, plan_report, print_report, run_report, status_report
from slime_hpc.plan import JobPlan, new_plan
from slime_hpc.records import append_jsonl, write_json
from slime_hpc.run_dir import RunDir
from slime_hpc.spec.load import Profile
from slime_hpc.status import load_status
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId

HEAVY = {"pydantic", "jinja2", "submitit", "yaml", "rich", "torch", "ray", "sglang", "megatron"}

Cli = Callable[..., tuple[int, str, str]]


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=os.environ | environ
    )


def test_help_imports_nothing_heavy() -> None:
    done = python(
        "import sys, slime_hpc.cli\n"
        "try: slime_hpc.cli.main(['--help'])\n"
        "finally: print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    assert done.returncode == 0
    names = ("init", "plan", "render", "submit", "run", "status", "list", "logs", "report", "export", "cancel")
    assert all(name in done.stdout for name in names)
    assert not HEAVY & set(json.loads(done.stderr.replace("'", '"')))


def test_version(cli: Cli) -> None:
    assert cli("--version") == (0, f"slime-hpc {__version__}\n", "")


def test_plan(cli: Cli, quickstart: Path) -> None:
    code, out, err = cli("plan", quickstart, "--weight-decay", "0.1", "--set", "num_rollout=7")
    assert (code, err) == (0, "")
    assert "rollout  rollout    dev          1     1     8    00:30:00" in out
    assert "1 trainer rank, 1 engine of 1 GPU" in out
    assert "7 of 4 prompts × 8 samples = 32" in out
    assert "at most 1.00 GPU-hours" in out
    code, out, _ = cli("plan", quickstart, "--json", "--weight-decay", "0.1")
    assert JobPlan.model_validate_json(out).spec.trainer.megatron == {"weight_decay": 0.1}


def test_one_message_for_one_mistake(cli: Cli, quickstart: Path) -> None:
    code, out, err = cli("plan", quickstart, "--set", "lr=1")
    assert (code, out) == (2, "")
    assert err == "error: --set lr=1: lr: unknown key; did you mean algorithm.lr?\n"


def test_one_message_for_several_mistakes(cli: Cli, quickstart: Path) -> None:
    code, _, err = cli("submit", quickstart, "--set", "lr=1", "--set", "trainer.nodes=x")
    assert code == 2
    assert err.startswith("error: 2 things to mend:\n  --set lr=1: ")
    assert err.count("\n") == 3


def test_a_misspelt_option_is_not_ignored(cli: Cli, quickstart: Path) -> None:
    assert cli("submit", quickstart, "--dry-rn")[0] == 2


def test_render(cli: Cli, quickstart: Path, tmp_path: Path) -> None:
    code, script, _ = cli("render", quickstart)
    assert code == 0 and script.startswith("#!/bin/bash\n") and "#SBATCH hetjob\n" in script
    code, out, _ = cli("render", quickstart, "-o", tmp_path / "out")
    plan = JobPlan.model_validate_json((tmp_path / "out" / "plan.json").read_text())
    assert plan.token in (tmp_path / "out" / "run.sbatch").read_text()
    assert f"sbatch {tmp_path}/out/run.sbatch" in out


def test_no_slurm_on_the_path(quickstart: Path, tmp_path: Path) -> None:
    arguments = ["submit", str(quickstart), "--set", f"run_dir={tmp_path}/run"]
    done = python(f"from slime_hpc.cli import main; main({arguments!r})", PATH="/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: scontrol is not on PATH; load your site's Slurm module")
    assert not (tmp_path / "run").exists()


def test_submit_status_cancel(cli: Cli, slurm: FakeSlurm, quickstart: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, _ = cli("submit", quickstart, "--json", "--set", f"run_dir={run}")
    assert code == 0 and json.loads(out)["job_id"] == "1"
    code, _, err = cli("submit", quickstart, "--set", f"run_dir={run}")
    assert code == 2 and "is in use by job 1" in err and len(slurm.jobs) == 1
    report = json.loads(cli("status", run, "--json")[1])
    assert (report["state"], report["verdict"], report["run_dir"]) == ("pending", "waiting", str(run))
    assert report["attempts"][0]["job_id"] == "1"
    assert json.loads(cli("cancel", run, "--json")[1]) == {"run_dir": str(run), "job_id": "1", "cancelled": True}
    code, out, _ = cli("cancel", run)
    assert code == 0 and "nothing to cancel" in out
    assert json.loads(cli("status", run, "--json")[1])["verdict"] == "cancelled"


def test_submit_refused(cli: Cli, slurm: FakeSlurm, quickstart: Path, tmp_path: Path) -> None:
    code, out, err = cli("submit", quickstart, "--set", f"run_dir={tmp_path}/run", "--set", "account=nosuch")
    assert (code, out) == (1, "")
    assert err.startswith("error: Slurm refused the job: sbatch: error: Batch job submission failed: Invalid account")
    assert not (tmp_path / "run").exists()


def test_dry_run(cli: Cli, slurm: FakeSlurm, quickstart: Path, tmp_path: Path) -> None:
    code, out, err = cli("submit", quickstart, "--dry-run", "--set", f"run_dir={tmp_path}/run")
    assert (code, err) == (0, "dry run, nothing submitted; Slurm accepts it\n")
    assert out.startswith("#!/bin/bash\n")
    assert not slurm.jobs and not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_not_a_run(cli: Cli, tmp_path: Path, command: str) -> None:
    code, out, err = cli(command, tmp_path)
    assert (code, out) == (2, "")
    assert f"{tmp_path} is not a run directory" in err


def test_logs(cli: Cli, run: RunDir) -> None:
    attempt = run.attempt(1)
    assert "there are no logs yet" in cli("logs", run.path)[2]
    run.slurm_output("1").write_text("from slurm\n")
    assert cli("logs", run.path)[1] == "from slurm\n"
    attempt.log("driver").write_text("".join(f"line {i}\n" for i in range(100)))
    assert cli("logs", run.path, "-n", "2")[1] == "line 98\nline 99\n"
    code, _, err = cli("logs", run.path, "drivr")
    assert code == 2 and "there is no log of 'drivr'; did you mean 'driver'? (there are driver, slurm)" in err
    write_json(attempt.ended, {"cause": "finished", "detail": "", "started": 0.0, "ended": 1.0})
    assert cli("logs", run.path, "slurm", "-f")[1] == "from slurm\n"


def test_logs_follow_until_the_attempt_ends(run: RunDir) -> None:
    log = run.attempt(1).log("driver")
    log.write_text("one\n")
    arguments = ["logs", str(run.path), "driver", "-f"]
    command = [sys.executable, "-c", f"from slime_hpc.cli import main; main({arguments!r})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "one\n"
        with open(log, "a") as file:
            file.write("two\n")
        assert follower.stdout.readline() == "two\n"
        write_json(run.attempt(1).ended, {})
        assert follower.wait(timeout=20) == 0


def test_a_bug_has_no_traceback_unless_asked(cli: Cli, quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr("slime_hpc.spec.load.load_profile", broken)
    code, _, err = cli("plan", quickstart)
    assert code == 1 and err.startswith("error: a bug in slime-hpc: RuntimeError: oh") and "Traceback" not in err
    monkeypatch.setenv("SLIME_HPC_DEBUG", "1")
    with pytest.raises(RuntimeError, match="oh"):
        main(["plan", str(quickstart)])


def test_run_says_what_one_host_cannot_give(cli: Cli, quickstart: Path, tmp_path: Path) -> None:
    code, out, err = cli("run", quickstart, "--set", f"run_dir={tmp_path}/run", "--set", "rollout.nodes=2")
    assert (code, out) == (2, "")
    assert "rollout.nodes: is 2, but `slime-hpc run` has this host only" in err
    assert not (tmp_path / "run").exists()


def test_run_takes_no_directory_twice(cli: Cli, run: RunDir, quickstart: Path) -> None:
    code, _, err = cli("run", quickstart, "--set", f"run_dir={run.path}")
    assert code == 2 and "is in use by job 1" in err


def test_export_passes_on_what_the_engines_python_says(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(run.path)])
    assert exit_.value.code == 2
    assert capfd.readouterr().err == (
        f"error: {run.path} has no complete checkpoint yet; `slime-hpc status` tells how far the run is\n"
    )


def test_paths_are_never_broken(
    profile: Profile, run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model, curve = (Path("/scratch") / ("directory" * 9) / name for name in ("model", "reward curve.png"))
    paths = {"reward curve": curve, "trained model": model}
    print_report(run_report(load_status(run, slurm), [], data_tables([], []), paths))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"reward curve   {curve}", f"trained model  {model}"]
    print_report(plan_report(new_plan(profile)))
    assert f"run_dir    {profile.spec.run_dir}" in capsys.readouterr().out


def test_reports_fit_80_columns(
    profile: Profile, run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    slurm.set_state(JobId(1), "COMPLETED")
    append_jsonl(run.metrics, {"attempt": 1, "round": 49, "step": 50, "rollout/raw_reward": 0.9375})
    ended = {"cause": "finished", "detail": "all 50 rounds are trained", "started": 0.0, "ended": 1800.0}
    write_json(run.attempt(1).ended, ended)
    print_report(plan_report(new_plan(profile)))
    print_report(status_report(load_status(run, slurm)))
    out = capsys.readouterr().out
    assert "50 of 50 rounds trained, reward 0.938" in out
    assert "finished  quickstart: all 50 rounds are trained" in out
    assert "finished       1.00" in out.splitlines()[-1]
    assert max(len(line) for line in out.splitlines() if not line.startswith("run_dir")) <= 80
