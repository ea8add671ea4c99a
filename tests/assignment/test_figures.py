"""Queries over rows, formats, claims and the planner's arithmetic, as templates call them."""

from pathlib import Path
from typing import Any

import pytest

from cs336_systems.assignment import figures as f
from cs336_systems.assignment.figures import Figures, NoRows
from cs336_systems.bench.row import Row, append_row

H200, H100, CPU = ({"gpu": name} for name in ("NVIDIA H200", "NVIDIA H100", None))
SETTING = dict(size="xl", context_length=512, batch_size=4, precision="bf16", compile=False, devices=2)


def add(path: Path, variant: str = "naive", ms: float = 1.0, case: str = "ddp", status: Any = "ok",
        gpu: dict[str, Any] = H200, date: str = "2026-01-01", commit: str = "a", **config: Any) -> None:  # fmt: skip
    env = {**gpu, "date": date, "commit": commit}
    config = {**SETTING, "variant": variant, **config}
    append_row(path, Row(case=case, variant=variant, config=config, status=status, metrics={"step_ms": ms}, env=env))


@pytest.fixture
def ddp(tmp_path: Path) -> Path:
    return tmp_path / "ddp.jsonl"


def steps(rows: list[f.Fields]) -> list[float]:
    return [row["step_ms"] for row in rows]


def test_the_newest_row_of_each_setting_is_found(ddp: Path) -> None:
    add(ddp, ms=2, date="2026-01-02")
    add(ddp, ms=1, date="2026-01-01")
    add(ddp, ms=3, size="small")
    assert steps(Figures(ddp.parent).rows("ddp", size=["xl", "small"])) == [2, 3]


def test_of_one_day_the_file_of_the_upper_folder_is_newer(ddp: Path) -> None:
    add(ddp, ms=1)
    add(ddp.parent / "earlier/ddp.jsonl", ms=2)
    assert Figures(ddp.parent).row("ddp")["step_ms"] == 1


def test_rows_are_in_the_order_of_the_values_asked_for(ddp: Path) -> None:
    for length in (512, 1024):
        for size in ("small", "xl"):
            add(ddp, size=size, context_length=length)
    found = Figures(ddp.parent).rows("ddp", context_length=[1024, 512], size=["xl", "small"])
    assert [(row["context_length"], row["size"]) for row in found] == [
        (1024, "xl"), (1024, "small"), (512, "xl"), (512, "small"),
    ]  # fmt: skip


def test_every_value_must_have_a_row_if_asked_for(ddp: Path) -> None:
    for size, length in (("small", 512), ("xl", 512), ("xl", 1024)):
        add(ddp, size=size, context_length=length)
    found = Figures(ddp.parent)
    assert len(found.every("ddp", size=["small", "xl"], context_length=512)) == 2
    found.begin("p")
    with pytest.raises(NoRows, match="--size small xl --context_length 512 1024"):
        found.every("ddp", size=["small", "xl"], context_length=[512, 1024])
    assert found.used == []


def test_a_folder_has_the_card_with_most_rows_and_other_machines_answer_if_it_cannot(ddp: Path) -> None:
    for size in ("small", "xl"):
        add(ddp, ms=1, gpu=H200, size=size)
    for length in range(3):
        add(ddp, ms=4, gpu=CPU, context_length=length)
    add(ddp, ms=2, gpu=H100, date="2026-01-03")
    add(ddp, ms=3, gpu=H100, date="2026-01-03", size="large")
    add(ddp, ms=5, gpu=H200, size="medium")
    figures = Figures(ddp.parent)
    assert figures.card == "NVIDIA H200"
    assert figures.row("ddp", size="xl", context_length=512)["step_ms"] == 1
    assert figures.row("ddp", size="large")["machine"] == "NVIDIA H100"
    assert steps(figures.rows("ddp", size=["xl", "large"], context_length=512)) == [1]  # cards are not mixed
    assert Figures(ddp.parent, "NVIDIA H100").row("ddp", size="xl", context_length=512)["step_ms"] == 2
    assert Figures(ddp.parent, "an unknown card").row("ddp", size="medium")["step_ms"] == 5


def test_failed_runs_are_found_only_if_asked_for(ddp: Path) -> None:
    add(ddp, status="oom", size="2.7B")
    figures = Figures(ddp.parent)
    with pytest.raises(NoRows):
        figures.row("ddp", size="2.7B")
    assert figures.row("ddp", size="2.7B", status="any")["status"] == "oom"
    assert figures.row("ddp", size="2.7B", status="oom")["status"] == "oom"


def test_a_value_is_found_by_the_type_and_name_that_the_row_has(ddp: Path) -> None:
    add(ddp, compile=True, context_length=512)
    figures = Figures(ddp.parent)
    assert figures.row("ddp", compile=True, context_length=512, variant="naive", machine="NVIDIA H200")
    for where in ({"compile": False}, {"context_length": "512"}, {"no_field": 1}, {"machine": "CPU"}):
        with pytest.raises(NoRows):
            figures.rows("ddp", **where)


def test_a_query_without_rows_names_the_command_that_measures_them(tmp_path: Path) -> None:
    figures = Figures(tmp_path)
    with pytest.raises(NoRows, match=r"^cs336 bench ddp --size xl small --compile false --devices 2$"):
        figures.rows("ddp", size=["xl", "small"], compile=False, devices=2, status="any", machine="CPU")
    with pytest.raises(NoRows, match=r"^cs336 profile memory --size 'a b'$"):
        figures.row("profile-memory", size="a b")
    with pytest.raises(NoRows, match=r"^cs336 bench ddp --size xl --variant naive flat$"):
        figures.launch("ddp", ["naive", "flat"], size="xl")
    for query in (figures.rows, figures.row):
        with pytest.raises(NoRows, match=r"^my command$"):
            query("ddp", command="my command", size="xl")


def test_a_single_row_must_be_the_only_one(ddp: Path) -> None:
    add(ddp)
    add(ddp, context_length=1024, precision="fp32")
    with pytest.raises(ValueError, match=r"2 rows match cs336 bench ddp --size xl: .*context_length, precision$"):
        Figures(ddp.parent).row("ddp", size="xl")


def test_a_launch_is_of_one_file_commit_and_machine(ddp: Path) -> None:
    def found() -> list[float]:
        return steps([*Figures(ddp.parent).launch("ddp", ["flat", "naive"], size="xl").values()])

    add(ddp, "naive", 1)
    add(ddp, "flat", 2)
    assert found() == [2, 1]
    add(ddp, "naive", 3, date="2026-01-02", commit="b")
    add(ddp.parent / "again/ddp.jsonl", "flat", 4, date="2026-01-03")
    add(ddp, "flat", 5, date="2026-01-03", gpu=H100, commit="b")
    assert found() == [2, 1]  # the newer rows are parts of three other launches
    add(ddp, "flat", 6, date="2026-01-02", commit="b")
    assert found() == [6, 3]
    with pytest.raises(NoRows, match=r"--variant naive overlap$"):
        Figures(ddp.parent).launch("ddp", ["naive", "overlap"])


def test_a_launch_does_not_mix_settings(ddp: Path) -> None:
    for length, variants in ((512, ("naive", "flat")), (1024, ("naive",))):  # flat was out of memory at 1,024
        for variant in variants:
            add(ddp, variant, length, context_length=length)
    assert steps([*Figures(ddp.parent).launch("ddp", ["naive", "flat"]).values()]) == [512, 512]


def test_a_launch_on_the_own_card_comes_before_newer_ones_on_others(ddp: Path) -> None:
    for variant in ("naive", "flat"):
        add(ddp, variant, 1)
        add(ddp, variant, 2, gpu=H100, date="2026-02-02")
    add(ddp, "overlap")
    assert Figures(ddp.parent).launch("ddp", ["flat"])["flat"]["step_ms"] == 1


def test_rows_that_queries_return_are_counted_for_the_problem(ddp: Path) -> None:
    add(ddp)
    add(ddp, "flat")
    figures = Figures(ddp.parent)
    figures.begin("one")
    figures.row("ddp", variant="naive")
    figures.launch("ddp", ["naive", "flat"])
    assert [source.row.variant for source in figures.used] == ["naive", "naive", "flat"]
    figures.begin("two")
    assert figures.used == []


def test_results_must_be_a_folder_of_readable_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^results is .*none': "):
        Figures(tmp_path / "none")
    (tmp_path / "notes.jsonl").write_text("no rows\n")  # not a name of a row file
    assert Figures(tmp_path).card == "CPU"
    (tmp_path / "ddp.jsonl").write_text("no rows\n")
    with pytest.raises(ValueError, match=r"ddp\.jsonl, line 1"):
        Figures(tmp_path)


def test_predictions_are_those_of_the_planner_of_today() -> None:
    results = Path(__file__).parents[2] / "results/h200"
    figures = Figures(results)
    row = figures.rows("checkpointing", size="2.7B", context_length=2048, precision="fp32")[0]
    stored = next(source.row for source in figures.sources if source.row.config.items() <= row.items())
    (today,) = f.predicted_today([stored])
    assert row["predicted_bytes"] == today.metrics["predicted_bytes"] != stored.metrics["predicted_bytes"]


def test_a_claim_that_does_not_hold_names_problem_claim_and_figures(tmp_path: Path) -> None:
    figures = Figures(tmp_path)
    figures.begin("naive_ddp")
    assert figures.claim(True, "it is faster", ours=1) == "it is faster"
    assert figures.contradictions == []
    figures.claim(False, "it is faster", ours=1, theirs=2)
    assert figures.contradictions == ["naive_ddp: 'it is faster': ours 1, theirs 2"]


@pytest.mark.parametrize(
    "form, value, text",
    [
        (f.three_digits, 25, "25.0"), (f.three_digits, 0.5, "0.500"),
        (f.number, 0.01234, "0.0123"), (f.number, 17.94, "17.9"), (f.number, 999.4, "999"), (f.number, 1264.4, "1,264"),
        (f.ms, 0.0123, "12.3 µs"), (f.ms, 17.94, "17.9 ms"), (f.ms, 5351, "5.35 s"),
        (f.gib, 3 * 2**29, "1.50 GiB"), (f.mib, 5 * 2**20, "5.00 MiB"),
        (f.percent, 0.4567, "46%"), (f.percent, 0.0123, "1.2%"), (f.percent, 1, "100%"),
        (f.times, 1.849, "1.8x"), (f.times, 12.34, "12.3x"),
        (f.span, [2.1, 1.8, 2], "1.8 to 2.1"), (f.span, [1.0001, 1.0002], "1"),
        (f.mean_std, dict(mean=1234.567, std=0.126), "1,234.57 ± 0.13"),
        (f.mean_std, dict(mean=17.92, std=2.34), "17.9 ± 2.3"), (f.mean_std, dict(mean=79.4, std=86.1), "79 ± 86"),
    ],
)  # fmt: skip
def test_a_format_shows_as_many_digits_as_are_meant(form: Any, value: Any, text: Any) -> None:
    assert form(value) == text


def test_a_span_uses_the_format_that_is_given() -> None:
    assert f.span([0.5, 2], f.times) == "0.50x to 2.0x"


@pytest.mark.parametrize(
    "ours, theirs, text",
    [(2, 3, "1.50x faster"), (3, 2, "1.50x slower"), (1.005, 1, "as fast"), (1, 1.02, "1.02x faster")],
)
def test_two_times_are_compared_either_way(ours: float, theirs: float, text: str) -> None:
    assert f.faster(ours, theirs) == text
    assert f.faster(ours, theirs, "DDP") == f"{text} {'as' if text == 'as fast' else 'than'} DDP"


def test_a_difference_within_the_spread_is_said_to_be_so() -> None:
    theirs = dict(p20=9, p50=10, p80=11)
    assert f.compared(dict(p20=5, p50=8, p80=9.5), theirs) == "1.25x faster (within the spread of the steps)"
    assert f.compared(dict(p20=10.5, p50=12, p80=13), theirs) == "1.20x slower (within the spread of the steps)"
    assert f.compared(dict(p20=5, p50=8, p80=8.5), theirs) == "1.25x faster"
    assert f.compared(dict(p20=5, p50=8, p80=9.5), theirs, "DDP").endswith("than DDP (within the spread of the steps)")
    assert f.compared(theirs, theirs) == "as fast"


def test_rows_of_one_setting_and_machine_stand_beside_each_other() -> None:
    rows = [
        dict(kernel=kernel, length=length, machine=machine, ms=ms)
        for kernel, length, machine, ms in
        [("a", 1, "X", 1), ("b", 1, "X", 2), ("a", 2, "X", 3), ("b", 2, "Y", 4)]
    ]  # fmt: skip
    first, second, other = f.beside(rows, "kernel", ["length"])
    assert (first["length"], first["a"]["ms"], first["b"]["ms"]) == (1, 1, 2)
    assert (second["a"]["ms"], "b" in second, other["b"]["ms"], "a" in other) == (3, False, 4, False)
    flags = [dict(compile=flag, machine="X", ms=ms) for flag, ms in ((True, 1), (False, 2))]
    assert [(both["on"]["ms"], both["off"]["ms"]) for both in f.beside(flags, "compile", [])] == [(1, 2)]


def test_a_plan_is_of_the_options_and_its_working_is_a_table() -> None:
    short, long = (f.plan("memory", size="xl", context_length=n, attention="naive")[0] for n in (512, 1024))
    assert long.value("activations") > 2 * short.value("activations")
    assert short.value("weights") == long.value("weights")
    sections = f.plan("attention", batch_size=8, length=1024, head_size=16)
    assert f.plan("attention", batch_size=16, length=1024, head_size=16) != sections
    assert sections[0].terms[0].working in f.working(sections)
    one = f.working(sections[:1])
    assert len(one.splitlines()) == 2 + len(sections[0].terms)
    with pytest.raises(ValueError, match=r"^plan is 'no plan'"):
        f.plan("no plan")
