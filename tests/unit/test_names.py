"""Hostile names, places and environments: each works, or is refused before anything is written."""

from __future__ import annotations

import json
import os
import pwd
import resource
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_hpc.cli.cancel import cancel_run
from slime_hpc.errors import ClusterError, ProfileError, UserError
from slime_hpc.facts import read_records
from slime_hpc.plan import JobPlan, new_plan, plan_warnings, shown_plan
from slime_hpc.records import read_json, restrict_umask, write_text_atomic
from slime_hpc.render import in_environment, render_script, supervisor_command, write_environment
from slime_hpc.resume import resume_run
from slime_hpc.run_dir import RunDir, absolute_path
from slime_hpc.slurm.allocation import Allocation, ComponentAllocation
from slime_hpc.slurm.directives import sbatch_directives
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.spec.load import Profile, load_profile
from slime_hpc.spec.run import Environment
from slime_hpc.spec.yaml_tree import escape_json, parse_value
from slime_hpc.submit import submit_run
from slime_hpc.supervisor.attempts import own_attempt
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId

ROOT = Path(__file__).parents[2]
AWKWARD = [
    "with space",
    "it's",
    'a "double" quote',
    "a,b;c&d|e",
    "$HOME `id` $(id)",
    "-leading",
    "--set=x",
    "#hash",
    "~tilde",
    "ünïcode-日本-😀",
    "[1-3]*?{a,b}",
    "a hetjob or PackJob",
    "x" * 255,
]
"""Names that a run directory's parent may have."""
SECRET = "s3cr3t-v4lue"
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
PATHS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters="%\\/"), min_size=1)


def supervise(run_dir: str, attempt: int) -> None:
    """Stands for the supervisor's."""


def slime_hpc(*arguments: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from slime_hpc.cli import main; main()", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, check=False, capture_output=True, env=env, encoding="utf-8", cwd=cwd)


def modes(directory: Path) -> dict[str, int]:
    paths = [directory, *directory.rglob("*")]
    return {str(p.relative_to(directory)): stat.S_IMODE(p.lstat().st_mode) for p in paths if not p.is_symlink()}


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def with_variables(plan: JobPlan, variables: dict[str, str]) -> JobPlan:
    return plan.model_copy(
        update={"spec": plan.spec.model_copy(update={"environment": Environment(variables=variables)})}
    )


def words_of_sbatch(line: str) -> list[str]:
    """A directive as sbatch reads it, backslashes inside quotes included. Source: _get_argument in sbatch's opt.c."""
    words, word, quote, escaped = [], "", "", False
    for character in line.removeprefix("#SBATCH"):
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = True
        elif character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
        elif not quote and character == "#":
            break
        elif not quote and character.isspace():
            words, word = ([*words, word] if word else words), ""
        else:
            word += character
    return [*words, word] if word else words


@settings(deadline=None)
@given(PATHS)
def test_a_directive_says_one_word_to_sbatch(path: str) -> None:
    line = next(line for line in sbatch_directives([{}], name="x", output=f"/{path}/%j.out") if "--output" in line)
    assert words_of_sbatch(line) == [f"--output=/{path}/%j.out"]


@settings(max_examples=20, deadline=None)
@given(st.lists(PATHS, min_size=1, max_size=20))
def test_a_path_says_one_word_to_bash(profile_of_tests: JobPlan, paths: list[str]) -> None:
    plans = [profile_of_tests.model_copy(update={"run_dir": Path(f"/{path}")}) for path in paths]
    commands = [supervisor_command(plan).replace("exec ", "printf '%s\\0' ", 1) for plan in plans]
    said = subprocess.run(["bash"], input="\n".join(commands).encode(), capture_output=True, check=True).stdout
    assert said.decode().split("\0")[3:-1:4] == [str(plan.run_dir) for plan in plans]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXT, min_size=1, max_size=20))
def test_variables_arrive_whole(profile_of_tests: JobPlan, tmp_path: Path, values: list[str]) -> None:
    expected = {f"V{number}": value for number, value in enumerate(values)}
    plan = with_variables(profile_of_tests, expected).model_copy(update={"run_dir": tmp_path})
    path = RunDir(tmp_path).attempt(1).environment
    path.parent.mkdir(parents=True, exist_ok=True)
    write_environment(plan, path)
    said = subprocess.run(in_environment(plan, ["env", "-0"]), capture_output=True, check=True).stdout
    found = dict(entry.split("=", 1) for entry in said.decode().split("\0") if entry)
    assert {name: found[name] for name in expected} == expected


@settings(deadline=None)
@given(TEXT)
def test_values_survive_the_spec_of_a_run(value: str) -> None:
    """``resume`` reads its JSON as a profile; a profile may be JSON, too."""
    assert parse_value(escape_json(json.dumps({"A": value}, ensure_ascii=False)), "spec") == {"A": value}
    assert parse_value(json.dumps({"A": value}), "profile") == {"A": value}


@pytest.fixture(scope="module")
def profile_of_tests(tmp_path_factory: pytest.TempPathFactory) -> JobPlan:
    """The quickstart's plan, for many examples."""
    model = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).touch()
    return new_plan(
        load_profile(ROOT / "examples" / "quickstart" / "profile.yaml", sets=[f"model.hf_checkpoint={model}"])
    )


@pytest.mark.parametrize("name", AWKWARD)
def test_an_awkward_run_directory_works(quickstart: Path, tmp_path: Path, name: str) -> None:
    """Relative to the profile, whose own directory has the name as well."""
    home = tmp_path / name
    quickstart.parent.rename(home)
    profile = load_profile(home / "profile.yaml", sets=["run_dir=runs/x"])
    slurm = FakeSlurm()
    submit_run(profile, slurm, supervise)
    run = RunDir(home / "runs" / "x")
    assert run.attempt(1).plan.exists()
    output = next(line for line in slurm.jobs[1].script.splitlines() if "--output" in line)
    assert words_of_sbatch(output) == [f"--output={run.path}/slurm-%j.out"]
    assert shlex.split(slurm.jobs[1].script.splitlines()[-1])[-1] == str(run.attempt(1).submitit)
    slurm.set_state(JobId(1), "FAILED")
    assert resume_run(run, slurm, supervise).attempt == 2


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("/x/100%", 'run_dir: "/x/100%" has "%", which Slurm\'s output option cannot take; choose another name'),
        ("/x/a\\b", "cannot take; choose another name"),
        ("/x/a\nb", 'has "\\n", which Slurm'),
        ("/x/a\u202eb", "cannot take"),
        ("/x/a\0b", "holds a NUL character; leave it out"),
        ("/x/\ud800", "half of a surrogate pair"),
        ("/" + "x" * 300, "has 300 bytes, a name in a path at most 255; shorten it"),
        ("/" + "ü" * 128, "has 256 bytes, a name in a path at most 255; shorten it"),
        ("/x" * 2000, "has 4000 bytes, but may have at most 3840"),
        ("/x/$nope", "$nope is not known here; write the path out"),
    ],
)
def test_a_run_directory_that_slurm_or_linux_cannot_have_is_refused(
    refused: Callable[..., str], run_dir: str, message: str
) -> None:
    assert message in refused(f"run_dir={json.dumps(run_dir)}")


def test_bytes_that_are_no_text_are_refused(quickstart: Path, tmp_path: Path) -> None:
    home = tmp_path / os.fsdecode(b"caf\xe9")
    quickstart.parent.rename(home)
    with pytest.raises(ProfileError, match=r"run_dir: .*is not UTF-8; write the path out"):
        load_profile(home / "profile.yaml", sets=["run_dir=run"])
    sets = [f"run_dir={tmp_path}/run", f"model.hf_checkpoint={tmp_path}", f"data.prompt_data={tmp_path}/p.jsonl"]
    with pytest.raises(ProfileError, match=r"lies in .*which is not UTF-8"):
        load_profile(home / "profile.yaml", sets=sets)


@pytest.mark.parametrize("name", ["", "a b", "it's", "-x", ".", "..", "a/b", "a%j", "ü", "x\n", "x" * 64, "x" * 300])
def test_a_name_that_is_none_is_refused(refused: Callable[..., str], name: str) -> None:
    told = refused(f"name={json.dumps(name)}")
    assert "is not a name" in told and "write letters, digits and ._- only" in told


def test_dots_behind_a_symlink_mean_what_they_mean_to_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "near").symlink_to(tmp_path / "far" / "deep")
    assert absolute_path(f"{tmp_path}/near/../runs") == tmp_path / "far" / "runs"
    assert absolute_path(f"{tmp_path}/near/./x/../y") == tmp_path / "near" / "y"


def test_a_dollar_in_a_path_stays_one_when_a_run_goes_on(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", f"{tmp_path}/$HOME")
    profile = load_profile(quickstart, sets=["run_dir=$PLACE/run"])
    slurm = FakeSlurm()
    submit_run(profile, slurm, supervise)
    slurm.set_state(JobId(1), "FAILED")
    run = RunDir(tmp_path / "$HOME" / "run")
    assert resume_run(run, slurm, supervise).run_dir == str(run.path)


def test_a_moved_run_is_not_resumed_but_by_a_link_it_is(profile: Profile, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    submit_run(profile, slurm, supervise)
    slurm.set_state(JobId(1), "FAILED")
    made_as, moved = profile.spec.run_dir, tmp_path / "moved run"
    made_as.rename(moved)
    with pytest.raises(UserError, match=r"was made as .*, and its records name files there; move it back") as error:
        resume_run(RunDir(moved), slurm, supervise)
    subprocess.run(str(error.value).rpartition(": ")[2], shell=True, check=True)
    assert resume_run(RunDir(moved), slurm, supervise).run_dir == str(made_as)


HOSTILE = {
    "SPACES": " two  words ",
    "QUOTES": 'it\'s "quoted"',
    "LINES": "one\ntwo\r\nthree\n",
    "DOLLAR": "$HOME ${X} $(id) `id` \\n !!",
    "UNICODE": "日本 😀 \u2028 \x85",
    "EQUALS": "=a=b=",
    "EMPTY": "",
    "LONG": "x" * 10_000,
    "COMMA": "a,b",
    "LD_PRELOAD": "",
}


def test_variables_of_a_profile_arrive_whole_in_the_script_and_after_a_resume(quickstart: Path, tmp_path: Path) -> None:
    sets = [f"run_dir={tmp_path}/run", f"environment.variables={json.dumps(HOSTILE)}"]
    slurm = FakeSlurm()
    submit_run(load_profile(quickstart, sets=sets), slurm, supervise)
    slurm.set_state(JobId(1), "FAILED")
    resume_run(RunDir(tmp_path / "run"), slurm, supervise)
    for number, job in ((1, 1), (2, 3)):
        script = tmp_path / f"{number}.sh"
        script.write_text(job_script := slurm.jobs[job].script.rpartition("exec ")[0] + "exec env -0\n")
        assert not any(value in job_script for value in HOSTILE.values() if len(value) > 3)
        said = subprocess.run(["bash", script], capture_output=True, check=True).stdout.decode()
        found = dict(entry.split("=", 1) for entry in said.split("\0") if entry)
        assert {name: found.get(name) for name in HOSTILE} == HOSTILE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A-B", "'A-B' is not a name the shell can export"),
        ("1A", "is not a name the shell can export"),
        ("A B", "is not a name the shell can export"),
        ("Ä", "is not a name the shell can export"),
        ("", "is not a name the shell can export"),
        ("SLURM_CPU_BIND", "is Slurm's own"),
        ("SBATCH_PARTITION", "is Slurm's own"),
        ("PMIX_RANK", "is Slurm's own"),
        ("SLIME_HPC_TAG", "is set by slime-hpc"),
        ("RAY_AUTH_TOKEN_PATH", "is set by slime-hpc"),
        ("UID", "is the shell's own"),
        ("_", "is the shell's own"),
    ],
)
def test_a_variable_that_could_not_arrive_is_refused(refused: Callable[..., str], name: str, message: str) -> None:
    told = refused(f"environment.variables={json.dumps({name: SECRET})}")
    assert f"environment.variables.{name}: {message}" in told or message in told
    assert SECRET not in told


def test_a_value_linux_has_no_room_for_is_refused(refused: Callable[..., str]) -> None:
    assert "takes 140003 bytes, but Linux gives" in refused(f"environment.variables.A={'x' * 140_000}")


@pytest.mark.parametrize(
    "text",
    [
        "environment.variables.HF_TOKEN=12345678",
        "environment.variables.api_key=[12345678]",
        "environment.variables={WANDB_API_KEY: 12345678}",
        "environment.variables=HF_TOKEN=12345678",
        "environment={variables: {MY_PASSWORD: 12345678}}",
        "rollout.sglang.api_key=12345678",
    ],
)
def test_no_error_shows_a_secret(refused: Callable[..., str], text: str) -> None:
    told = refused(text)
    assert "12345678" not in told and "***" in told


@pytest.fixture
def with_secret(quickstart: Path, tmp_path: Path) -> Profile:
    text = f"environment: {{variables: {{HF_TOKEN: {SECRET}, HF_HOME: /hf, WANDB_API_KEY: {SECRET}}}}}\n"
    quickstart.write_text(quickstart.read_text() + text)
    return load_profile(quickstart, sets=[f"run_dir={tmp_path}/run"])


@pytest.mark.parametrize("command", [["plan"], ["plan", "--json"], ["render"], ["submit", "--dry-run", "--json"]])
def test_no_command_shows_a_secret(with_secret: Profile, command: list[str]) -> None:
    name, *options = command
    done = slime_hpc(name, with_secret.path, *options, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "HF_TOKEN" in done.stdout or name == "render"
    assert "/hf" in done.stdout or name == "render"


def test_secrets_stand_in_files_of_the_user_alone(with_secret: Profile) -> None:
    slurm = FakeSlurm()
    submit_run(with_secret, slurm, supervise)
    run = RunDir(with_secret.spec.run_dir)
    own_attempt(run, 1, Allocation(JobId(1), (ComponentAllocation(1, ("n1",)),), 0))
    own_attempt(run, 1, Allocation(JobId(1), (ComponentAllocation(1, ("n1",)),), 1))  # started again by Slurm
    holding = {p for p in run.path.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()}
    expected = {run.profile, run.spec, *(f for n in (1, 2) for f in (run.attempt(n).plan, run.attempt(n).environment))}
    assert holding == expected
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
    assert SECRET not in slurm.jobs[1].script


def test_a_secret_written_by_a_setup_line_is_warned_of(quickstart: Path) -> None:
    lines = ["export HF_TOKEN=abc", "export WANDB_API_KEY=$(cat ~/.key)", "export PATH=/x:$PATH"]
    plan = new_plan(load_profile(quickstart, sets=[f"environment.setup={json.dumps(lines)}"]))
    found = [warning for warning in plan_warnings(plan) if "environment.setup" in warning]
    assert len(found) == 1 and "HF_TOKEN" in found[0]


def test_a_shown_plan_is_the_plan_but_for_secrets(with_secret: Profile) -> None:
    plan = new_plan(with_secret)
    shown = shown_plan(plan)
    assert shown["spec"]["environment"]["variables"] == {"HF_TOKEN": "***", "HF_HOME": "/hf", "WANDB_API_KEY": "***"}
    shown["spec"]["environment"]["variables"] = plan.variables
    assert JobPlan.model_validate_json(json.dumps(shown)) == plan


@pytest.mark.parametrize("inherited", [0o000, 0o002, 0o022, 0o077, 0o277, 0o777])
def test_no_umask_opens_a_run_to_others_or_closes_it_to_its_user(
    with_secret: Profile, umask: Callable[[int], int], inherited: int
) -> None:
    umask(inherited)
    restrict_umask()
    submit_run(with_secret, FakeSlurm(), supervise)
    found = modes(with_secret.spec.run_dir)
    assert found["."] == found["attempts/0001/secrets"] == 0o700
    assert not [name for name, mode in found.items() if mode & 0o002 or not mode & 0o400]


def test_commands_restrict_the_umask(with_secret: Profile, tmp_path: Path, umask: Callable[[int], int]) -> None:
    umask(0)
    done = slime_hpc("render", with_secret.path, "-o", tmp_path / "deep" / "out")
    assert done.returncode == 0, done.stderr
    found = modes(tmp_path / "deep")
    assert found == {
        ".": 0o775,
        "out": 0o775,
        "out/run.sbatch": 0o644,
        "out/plan.json": 0o600,
        "out/environment.sh": 0o600,
    }


def test_a_full_disk_names_the_file_and_keeps_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_text_atomic(path, "old")
    with no_room(), pytest.raises(OSError, match=r"File too large: '.*/x\.json'"):
        write_text_atomic(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"] and path.read_text() == "old"


class no_room:
    """Nothing can be written to any file of this process."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


class FillingSlurm(FakeSlurm):
    """The disk is full when sbatch has answered."""

    def submit(self, script: Path, *, token: str) -> JobId:
        job_id = super().submit(script, token=token)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return job_id

    def states(self) -> set[str]:
        return {str(row.state) for row in self.queue([JobId(number) for number in self.jobs])}


class DeafSlurm(FillingSlurm):
    def find(self, token: str) -> list[QueueRow]:
        raise ClusterError("squeue did not answer")


def test_a_disk_that_is_full_once_the_job_is_queued_leaves_no_job_and_no_directory(profile: Profile) -> None:
    slurm = FillingSlurm()
    with no_room_after(), pytest.raises(UserError, match="cannot be written: File too large; choose another"):
        submit_run(profile, slurm, supervise)
    assert slurm.states() == {"CANCELLED"}
    assert not profile.spec.run_dir.exists()


def test_without_slurms_word_the_directory_stays(profile: Profile) -> None:
    with no_room_after(), pytest.raises(ClusterError, match="cannot be told: squeue did not answer"):
        submit_run(profile, DeafSlurm(), supervise)
    assert RunDir(profile.spec.run_dir).attempt(1).plan.exists()


def test_a_resume_on_a_disk_that_fills_changes_nothing(profile: Profile) -> None:
    submit_run(profile, FakeSlurm(), supervise)
    run = RunDir(profile.spec.run_dir)
    slurm = FillingSlurm()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with no_room_after(), pytest.raises(UserError, match="cannot be written: File too large; make room"):
        resume_run(run, slurm, supervise, sets=["time_limit=1:00:00"])
    assert slurm.states() == {"CANCELLED"}
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_run_on_a_full_disk_is_cancelled_all_the_same(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm()
    submit_run(profile, slurm, supervise)
    with no_room():
        assert cancel_run(read_records(RunDir(profile.spec.run_dir)), slurm) == (JobId(1), True)
    assert "not recorded as cancelled by you: " in capsys.readouterr().err
    assert {str(row.state) for row in slurm.queue([JobId(1)])} == {"CANCELLED"}


class no_room_after(no_room):
    """There is room until a FillingSlurm has answered."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/nowhere"},
        {"HOME": "/proc"},
        {"TMPDIR": "/nowhere"},
        {"LC_ALL": "C", "LANG": "C"},
        {"PYTHONIOENCODING": "ascii"},
        {"COLUMNS": "1"},
    ],
)
@pytest.mark.parametrize("command", ["plan", "render", "submit --dry-run"])
def test_hostile_environments(profile: Profile, tmp_path: Path, environ: dict[str, str], command: str) -> None:
    name, *options = command.split()
    run_dir = tmp_path / "läufe 日本"
    done = slime_hpc(name, profile.path, *options, "--set", f"run_dir={run_dir}", **environ, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()
    if "PYTHONIOENCODING" not in environ and "COLUMNS" not in environ:
        assert str(run_dir) in done.stdout


def test_without_a_home_a_tilde_is_the_passwd_files(profile: Profile) -> None:
    command = "import os; os.environ.pop('HOME', None); from slime_hpc.cli import main; main()"
    argv = [sys.executable, "-c", command, "plan", str(profile.path), "--set", "run_dir=~/run", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert json.loads(done.stdout)["run_dir"] == f"{pwd.getpwuid(os.getuid()).pw_dir}/run"


def test_in_a_directory_that_is_gone(profile: Profile, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.rmdir({str(gone)!r}); from slime_hpc.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        gone.mkdir(exist_ok=True)
        argv = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=env, cwd=gone)

    assert run("plan", profile.path).returncode == 0
    for arguments in (("plan", "profile.yaml"), ("status", "run"), ("logs", ".")):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            done.stderr
            == "error: the directory this shell is in has been removed; cd to another, or give whole paths\n"
        )


def test_what_a_job_will_not_have_is_named(profile: Profile) -> None:
    inside = {
        "SLURM_JOB_ID": "12",
        "SLURM_CPU_BIND": "x",
        "PMIX_RANK": "0",
        "SBATCH_PARTITION": "x",
        "OMPI_MCA_btl": "x",
    }
    done = slime_hpc("submit", profile.path, "--dry-run", **inside, PATH="/nowhere")
    line = "left out of the job's environment: SBATCH_PARTITION, PMIX_RANK, SLURM_CPU_BIND, SLURM_JOB_ID"
    assert done.stderr.splitlines()[0] == f"{line} (this shell is inside job 12)"
    done = slime_hpc("submit", profile.path, "--dry-run", SBATCH_NO_REQUEUE="1", PATH="/nowhere")
    assert done.stderr.splitlines()[0] == "left out of the job's environment: SBATCH_NO_REQUEUE"


def test_a_directory_of_a_run_without_a_job_is_resumed_by_its_relative_name(profile: Profile) -> None:
    submit_run(profile, FakeSlurm(), supervise)
    done = slime_hpc("status", "../run/attempts/..", "--json", cwd=profile.directory, PATH="/nowhere")
    assert json.loads(done.stdout)["run_dir"] == str(profile.spec.run_dir)
    assert read_json(RunDir(profile.spec.run_dir).submit)["run_dir"] == str(profile.spec.run_dir)


def test_a_rendered_script_names_no_variable(with_secret: Profile) -> None:
    plan = new_plan(with_secret)
    assert "HF_" not in render_script(plan, supervisor_command(plan))
