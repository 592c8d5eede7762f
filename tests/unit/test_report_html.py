"""The page that `slime-hpc report` writes, from records as they are found in run directories."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from slime_hpc.records import append_jsonl, write_json
from slime_hpc.report import Evaluation, column, running_means
from slime_hpc.report_figures import _bars, _canvas, _mark_evaluations, draw_pictures
from slime_hpc.run_dir import RunDir
from slime_hpc.slurm.parse import QueueRow
from slime_hpc.spec.load import load_profile
from slime_hpc.submit import submit_run
from slime_hpc.testing import FakeSlurm
from slime_hpc.types import JobId

Cli = Callable[..., tuple[int, str, str]]
MAX_BYTES = 2_000_000
TITLES = [
    "Reward",
    "Weight lag",
    "Trainer and rollout log-probs: absolute difference",
    "Responses",
    "Time of a round, by phase",
]


class Page(HTMLParser):
    """What a browser makes of it: the texts of each element, the images, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.images: list[bytes] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            source = str(dict(attrs)["src"])
            self.images.append(base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True))
        elif tag != "meta":
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def rounds(count: int, **changes: Any) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl as the driver writes them."""
    return [
        {
            "attempt": 1, "round": i, "step": i + 1, "time": 1000.0 + i, "rollout/raw_reward": i / count,
            "rollout/response_lengths": 20.0, "rollout/truncated_ratio": 0.25, "rollout/weight_lag": 0.0,
            "train/train_rollout_logprob_abs_diff": 1e-5, "perf/rollout_time": 4.0, "perf/reward_time": 0.5,
            "perf/train_time": 3.0, "perf/update_weights_time": 1.0, "perf/step_time": 9.0, **changes,
        }
        for i in range(count)
    ]  # fmt: skip


def end(run: RunDir, number: int, cause: str, detail: str, **fields: Any) -> None:
    ended = {"attempt": number, "cause": cause, "detail": detail, "role": None, "node": None, "round": None}
    write_json(run.attempt(number).ended, ended | {"started": 1000.0, "ended": 4600.0, "exit_code": 1} | fields)


def evaluated(rounds_: int, passed: int | None) -> dict[str, Any]:
    row = {"time": 1.0, "attempt": 1, "who": "driver", "event": "evaluated", "set": "held_out", "rounds": rounds_}
    return row | {"prompts": 262, "samples": 262, "reward": (passed or 131) / 262, "passed": passed}


def page(cli: Cli, run: RunDir) -> Page:
    code, out, err = cli("report", run.path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["page"] == str(run.report_page)
    assert run.report_page.stat().st_size < MAX_BYTES
    text = run.report_page.read_text(encoding="utf-8")
    assert not re.search(r"<script|https?:|//[a-z]|url\(|@import", re.sub(r"base64,[^\"]*", "", text))
    parsed = Page(text)
    assert parsed.open == []
    for image in parsed.images:
        height, width, _ = matplotlib.image.imread(io.BytesIO(image)).shape
        assert 1000 < width < 2000 and 300 < height < 600
    return parsed


def test_a_finished_run(cli: Cli, run: RunDir, slurm: FakeSlurm) -> None:
    append_jsonl(run.metrics, *rounds(50))
    loaded = {"event": "prompts_loaded", "set": "held_out", "source": "/data/a.jsonl", "prompts": 262}
    append_jsonl(run.events, loaded | {"too_long": 3, "also_in_training": 138}, evaluated(0, 34), evaluated(50, None))
    end(run, 1, "finished", "50 rounds; model in /m")
    slurm.set_state(JobId(1), "COMPLETED")
    shown = page(cli, run)
    assert shown.texts["title"] == ["quickstart: finished"]
    assert shown.texts["strong"] == ["finished"] and ": 50 rounds; model in /m" in shown.texts["p"]
    assert "code" not in shown.texts  # nothing is left to do
    facts = dict(zip(shown.texts["dt"], shown.texts["dd"], strict=True))
    assert facts["rounds trained"] == "50 of 50" and facts["run directory"] == str(run.path)
    assert facts["mean reward"] == "0.090 in the first 10 rounds, 0.890 in the last 10"
    assert facts["GPU-hours"] == "2.00"  # a GPU of each component, one hour
    assert shown.texts["h2"] == [*TITLES, "Attempts", "Evaluations", "Prompts"]
    assert len(shown.images) == len(TITLES)
    cells = shown.texts["td"]
    assert cells[:2] + cells[4:8] == ["1", "1", "0 to 49", "2.00", "finished", "50 rounds; model in /m"]
    assert cells[8:18] == ["held_out", "0", "262", "0.130", "0.094 to 0.176", "held_out", "50", "262", "0.500", "-"]
    assert cells[18:] == ["held_out", "/data/a.jsonl", "262", "3", "138"]
    assert run.reward_curve.exists()


def test_a_failed_run_without_rounds_says_why(cli: Cli, run: RunDir, slurm: FakeSlurm) -> None:
    end(run, 1, "misconfigured", "model.hf_checkpoint: no config.json\nlook there")
    slurm.set_state(JobId(1), "FAILED")
    shown = page(cli, run)
    assert shown.texts["strong"] == ["failed"]
    assert ": model.hf_checkpoint: no config.json\nlook there" in shown.texts["p"]
    status = json.loads(cli("status", run.path, "--json")[1])
    assert shown.texts["code"] == [status["next_step"]]
    assert shown.images == [] and "there is nothing to draw" in "".join(shown.texts["p"])
    assert not run.reward_curve.exists()
    code, out, _ = cli("report", run.path)
    assert code == 0 and f"page           {run.report_page}\nreward curve   no round yet\n" in out
    assert json.loads(cli("report", run.path, "--json")[1])["reward_curve"] is None


def test_a_pending_run(cli: Cli, run: RunDir) -> None:
    shown = page(cli, run)
    assert shown.texts["strong"] == ["waiting"]
    assert shown.texts["td"] == ["1", "1", "-", "-", "none", "-", "-", ""]


def test_one_round(cli: Cli, run: RunDir) -> None:
    append_jsonl(run.metrics, *rounds(1))
    append_jsonl(run.events, evaluated(0, 0), evaluated(1, 262))
    assert len(page(cli, run).images) == len(TITLES)


def test_ten_thousand_rounds(cli: Cli, run: RunDir) -> None:
    many = rounds(10_000)
    for i, row in enumerate(many):
        noise = (i * 7919 % 1000) / 1000
        row |= {name: row[name] * (0.5 + noise) for name in row if name[:4] in ("roll", "trai", "perf")}
        row["attempt"] = 1 + i // 900
        row["perf/save_time"] = 60.0 if i % 20 == 0 else math.nan
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in many))
    shown = page(cli, run)
    assert len(shown.images) == len(TITLES)
    captions = " ".join(shown.texts["figcaption"])
    assert "Each bar is the mean of 67 rounds." in captions and "Black: means of 17 rounds" in captions


def test_numbers_that_are_missing(cli: Cli, run: RunDir) -> None:
    rows = rounds(6)
    rows[1]["rollout/raw_reward"] = math.nan
    rows[2]["rollout/raw_reward"] = None
    del rows[3]["rollout/raw_reward"]
    rows[4]["rollout/raw_reward"] = math.inf
    for row in rows:
        del row["rollout/weight_lag"], row["rollout/response_lengths"]
        row["rollout/truncated_ratio"] = math.nan
    append_jsonl(run.metrics, *rows)
    shown = page(cli, run)
    assert shown.texts["h2"] == [TITLES[0], TITLES[2], TITLES[4], "Attempts"]
    assert "4 of 6 rounds have no finite value" in shown.texts["figcaption"][0]
    assert shown.texts["dd"][1] == f"{(0 + 5 / 6) / 2:.3f}"


def test_rounds_with_no_metric_at_all(cli: Cli, run: RunDir) -> None:
    append_jsonl(run.metrics, {"attempt": 1, "round": 0, "step": 1}, {"attempt": 1, "round": 1, "step": 2})
    shown = page(cli, run)
    assert shown.images == [] and shown.texts["dd"][:2] == ["2 of 50", "-"]


def test_several_attempts(cli: Cli, run: RunDir) -> None:
    append_jsonl(run.metrics, *rounds(5), *rounds(4, attempt=3)[3:], *rounds(6, attempt=4)[4:])
    plan = run.attempt(1).plan.read_text()
    for number in (2, 3, 4):
        run.attempt(number).path.mkdir()
        run.attempt(number).plan.write_text(plan.replace('"attempt": 1', f'"attempt": {number}'))
    for number in (1, 2, 3):
        end(run, number, "crashed", f"because of {number}")
    shown = page(cli, run)
    cells = shown.texts["td"]
    assert [(cells[i], cells[i + 4], cells[i + 6]) for i in range(0, 32, 8)] == [
        ("1", "0 to 2", "crashed"),
        ("2", "none", "crashed"),
        ("3", "3 to 3", "crashed"),
        ("4", "4 to 5", "-"),
    ]
    assert "Dashed upright lines" in " ".join(shown.texts["p"])


def test_boundaries_stand_before_the_first_round_of_an_attempt() -> None:
    _, (axes,) = _canvas([*rounds(3), *rounds(50, attempt=2)[3:]], 2.0)
    (line,) = axes.lines
    assert line.get_xdata() == [2.5, 2.5]
    assert [text.get_text() for text in axes.texts] == ["2"]


def test_numbers_of_attempts_do_not_cover_each_other() -> None:
    rows = rounds(100)
    for row in rows[50:]:
        row["attempt"] = row["round"] - 48
    _, (axes,) = _canvas(rows, 2.0)
    assert len(axes.lines) == 50
    assert [text.get_text() for text in axes.texts] == [str(number) for number in range(2, 52, 4)]


def test_text_is_escaped(cli: Cli, run: RunDir, tmp_path: Path) -> None:
    run = RunDir(run.path.rename(tmp_path / "<img src=x> & $x$"))
    append_jsonl(run.metrics, *rounds(2))
    counts = {"prompts": 1, "too_long": 0, "also_in_training": 0}
    append_jsonl(run.events, {"event": "prompts_loaded", "set": "training data", "source": "/<i>.jsonl", **counts})
    end(run, 1, "crashed", "<script>alert(1)</script> \x1b[31mred\x00 & more")
    shown = page(cli, run)
    assert "script" not in shown.texts and "i" not in shown.texts and len(shown.images) == len(TITLES)
    assert (
        ": <script>alert(1)</script> \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} & more"
        in (shown.texts["p"])
    )
    assert str(run.path) in shown.texts["dd"] and "/<i>.jsonl" in shown.texts["td"]


def test_no_secret_is_in_it(cli: Cli, quickstart: Path, slurm: FakeSlurm, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    variables = f"{{HF_TOKEN: hf_0123456789, OFFLINE: '1', SCRATCH: '{tmp_path}'}}"
    profile = load_profile(quickstart, sets=[f"run_dir={run.path}", f"environment.variables={variables}"])
    token = submit_run(profile, slurm, lambda run_dir, attempt: None).token
    slurm.set_state(JobId(1), "FAILED")
    run.slurm_output("1").write_text(f"export HF_TOKEN=hf_0123456789\n{token}: step 1 failed\n")
    (words,) = [text for text in page(cli, run).texts["p"] if "the end of" in text]
    assert words.endswith(f"the end of {run.slurm_output('1')}:\n  export HF_TOKEN=(hidden)\n  (hidden): step 1 failed")
    text = run.report_page.read_text()
    assert "hf_0123456789" not in text and token not in text


def test_slurm_that_does_not_answer(cli: Cli, run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(job_ids: object) -> list[QueueRow]:
        from slime_hpc.errors import ClusterError

        raise ClusterError("squeue did not answer")

    monkeypatch.setattr(slurm, "queue", deaf)
    append_jsonl(run.metrics, *rounds(3))
    shown = page(cli, run)
    assert shown.texts["strong"] == ["unknown"] and len(shown.images) == len(TITLES)


def test_another_file(cli: Cli, run: RunDir, tmp_path: Path) -> None:
    code, out, _ = cli("report", run.path, "-o", tmp_path / "page.html")
    assert code == 0 and f"page           {tmp_path}/page.html\n" in out
    assert (tmp_path / "page.html").read_text().endswith("</html>\n") and not run.report_page.exists()
    code, _, err = cli("report", run.path, "-o", tmp_path)
    assert code == 2 and f"{tmp_path} is a directory; name a file in it" in err
    code, _, err = cli("report", run.path, "-o", tmp_path / "none" / "page.html")
    assert code == 2 and f"{tmp_path}/none is not a directory" in err
    code, _, err = cli("report", tmp_path / "none")
    assert code == 2 and "is not a run directory" in err


def test_a_column_and_its_means() -> None:
    rows: list[dict[str, Any]] = [{"x": 1}, {"x": math.nan}, {}, {"x": None}, {"x": -math.inf}, {"x": 4.0}]
    values = column(rows, "x")
    assert [None if math.isnan(v) else v for v in values] == [1, None, None, None, None, 4.0]
    assert running_means(values) == [1, 1, 1, 1, 1, 2.5]
    assert running_means(list(range(12)))[-2:] == [5.5, 6.5]
    assert math.isnan(running_means([math.nan])[0])


def test_bars_hold_the_mean_of_their_rounds() -> None:
    rows = [{"round": number} for number in (0, 1, 2, 4)]  # the row of round 3 was lost
    assert _bars(rows, [1.0, 3.0, math.nan, 5.0], [-0.5, 1.5, 3.5, 4.5]) == [2.0, 0.0, 5.0]


def test_intervals_of_evaluations_are_drawn() -> None:
    _, (axes,) = _canvas(rounds(10), 2.0)
    interval = (0.2, 0.6)
    _mark_evaluations(axes, [Evaluation("s", 0, 0.5, 10, interval), Evaluation("s", 10, 0.7, 10, None)], 0)
    ((_, _, (bars,)),) = axes.containers
    assert bars.get_segments()[0].tolist() == [[0.0, 0.2], [0.0, 0.6]]


def test_evaluations_of_rounds_that_were_lost_are_not_drawn() -> None:
    (reward, *_), (alone, *_) = (
        draw_pictures(rounds(10), [Evaluation("s", 10, 0.5, 10, None), *later])
        for later in ([Evaluation("s", 20, 0.5, 10, None)], [])
    )
    assert reward.png == alone.png


def test_no_rounds_no_pictures() -> None:
    assert draw_pictures([], [Evaluation("s", 0, 0.5, 10, None)]) == []
