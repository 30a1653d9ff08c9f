import json
from datetime import UTC, datetime

from rich.console import Console

from flows.cli import tables
from rlhf_core.manifests import STAGES, RunSummary
from rlhf_core.views import IterationView, RolloutSample, RunRow, RunView


def text_of(renderable) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def iteration(number: int, **metrics: float) -> IterationView:
    return IterationView(
        iteration=number,
        stage_states=dict.fromkeys(STAGES, "committed"),
        stage_seconds=dict.fromkeys(STAGES, 1.25),
        metrics={"reward/mean": 0.5, **metrics},
    )


def view(stages=()) -> RunView:
    return RunView(
        run="r1",
        state="running",
        policy_version=2,
        iterations=20,
        iterations_done=2,
        reward_before=0.1875,
        tokens_per_second=1234.5,
        next_step="rlhf resume r1",
        stages=tuple(stages),
    )


def test_json_of_a_run_has_the_promised_keys(capsys):
    tables.print_json(tables.run_as_json(view([iteration(0), iteration(1)])))
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"] == "r1"
    assert (shown["reward_before"], shown["reward_after"]) == (0.1875, None)
    assert shown["iterations_planned"] == 20
    assert [row["iteration"] for row in shown["iterations"]] == [0, 1]
    assert shown["iterations"][0]["stage_states"]["generate"] == "committed"
    assert "stages" not in shown


def test_json_has_no_nan(capsys):
    tables.print_json(tables.run_as_json(view([iteration(0, **{"policy/entropy": float("nan")})])))
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert json.loads(out)["iterations"][0]["metrics"]["policy/entropy"] is None


def test_header_shows_rewards_and_next_step():
    shown = text_of(tables.run_header(view()))
    for words in ("r1", "2 of 20", "0.188 before, - after", "1234", "rlhf resume r1"):
        assert words in shown


def test_iterations_show_stages_in_order_and_only_known_metrics():
    partial = IterationView(
        iteration=1, stage_states={"generate": "committed", "score": "missing"}, stage_seconds={"generate": 3.0}
    )
    shown = text_of(tables.iterations_table([iteration(0), partial])).splitlines()
    assert shown[0].split() == ["iteration", *STAGES, "reward"]
    assert shown[1].split() == ["0", *["1.2", "s"] * len(STAGES), "0.5"]
    assert shown[2].split() == ["1", "3.0", "s", *["-"] * len(STAGES)]


def test_ten_thousand_iterations_stay_readable():
    many = [iteration(number) for number in range(10_000)]
    shown = text_of(tables.iterations_table(many))
    assert len(shown.splitlines()) == 22
    assert "the last 20 of 10000 iterations" in shown
    assert "9999" in shown
    assert " 9979 " not in shown
    assert len(text_of(tables.iterations_table(many[:100], None)).splitlines()) == 101


def test_runs_table():
    row = RunRow(
        run="[bold]r",
        created=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        iterations_done=3,
        iterations=20,
        state="running",
        reward_last=0.25,
    )
    shown = text_of(tables.runs_table([row]))
    assert "[bold]r" in shown
    assert "3/20" in shown
    assert "0.25" in shown


def test_rollouts_cannot_control_the_terminal():
    sample = RolloutSample(
        sample_id="p1/0",
        prompt="What is 1 + 1?\nAnswer:",
        response="\x1b[2J[red]2[/red]\r\nBye\t.",
        status="invalid_data",
        error="no \x1b[31manswer",
        reward=None,
        components={"other": None, "last_number": 1.0},
        answer="2",
        finish_reason="stop",
        tokens=3,
        advantage=-0.5,
    )
    shown = text_of(next(iter(tables.rollouts_text([sample]))))
    assert "\x1b[2J" not in shown
    assert "\\x1b[2J[red]2[/red]\\r" in shown
    assert "reward none (invalid_data: no \\x1b[31manswer) | other - | last_number 1" in shown
    assert "last_number 1" in shown
    assert "advantage -0.5" in shown


def test_summary_of_a_run_that_knows_little():
    shown = text_of(tables.summary_table(RunSummary(run="r", iterations=1, policy_version=1)))
    assert "- before, - after" in shown
