"""`cs336 report writeup` with the options of the write-up."""

from pathlib import Path

import pytest

from cs336_systems.assignment import measure
from cs336_systems.assignment.build import HTML, MARKDOWN, TEMPLATES
from cs336_systems.cli.report import make_report


def test_ejected_templates_can_be_changed_and_used(tmp_path: Path) -> None:
    own, out = tmp_path / "own", tmp_path / "out"
    told = make_report(["writeup", "--eject", str(own)])
    assert told.splitlines() == [str(own / path.name) for path in sorted(TEMPLATES.glob("*.md"))]
    assert (own / "fsdp.md").read_text() == (TEMPLATES / "fsdp.md").read_text()
    (own / "fsdp.md").write_text("In my own words, with {{ 2 * 3 }} figures.")
    with pytest.raises(ValueError, match=r"fsdp\.md was not written by a report, or was changed since"):
        make_report(["writeup", "--eject", str(own)])

    (tmp_path / "rows").mkdir()
    byline = ["--name", "A. Student", "--date", "1 May"]
    make_report(["writeup", "--results", str(tmp_path / "rows"), "--problems", str(own), "--out", str(out), *byline])
    assert "In my own words, with 6 figures." in (out / MARKDOWN).read_text()
    assert "A. Student, 1 May" in (out / HTML).read_text()


@pytest.mark.parametrize("option", ["name", "date", "card", "problems", "eject"])
def test_the_options_belong_to_the_writeup_alone(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} is 'x': it must be left out with rows"):
        make_report(["rows", "rows.jsonl", f"--{option}", "x"])


def test_a_card_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^card is 'H200': it must be one of .*NVIDIA H200"):
        make_report(["writeup", "--card", "H200", "--out", str(tmp_path)])


def test_measuring_makes_the_folder_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(measure, "gpu_count", lambda: 1)
    monkeypatch.setattr(measure, "run_alone", lambda words: ran.append(words[3]) or 0)
    monkeypatch.chdir(tmp_path)
    make_report(["writeup", "--measure", "--results", "rows", "--out", "out"])
    assert Path("out", MARKDOWN).is_file()
    assert "bench" in ran
