"""Tables in the documentation say what the files of the benchmarks say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import tables

pytest.importorskip("torch")  # some of the benchmarks are of learned placers
pytest.importorskip("ray")


def name(page: Path) -> str:
    return page.relative_to(tables.ROOT).as_posix()


@pytest.mark.parametrize("page", tables.pages(), ids=name)
def test_tables_equal_their_files(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == tables.updated(page), (
        f"{name(page)}: a table differs from its file; python -m benchmarks.tables writes it anew"
    )


def test_the_readme_is_short_and_its_table_comes_from_a_file() -> None:
    text = (tables.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    assert text.count("<!-- table: ") == text.count("<!-- end table -->") == 1
    left = re.findall(r"^\|.*", tables.without_tables(text), re.MULTILINE)
    assert not left, f"a table without a mark: {left[0]}"


def test_a_changed_number_is_written_over(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    right = f"before\n\n{tables.block('placers', page)}\n\nafter\n"
    number = re.search(r"\d\.\d{3}", right)
    assert number is not None
    page.write_text(right.replace(number[0], "9.999", 1), encoding="utf-8")
    assert tables.updated(page) == right


def test_a_table_whose_file_is_missing_says_so(tmp_path: Path) -> None:
    text = tables.block("placers", tmp_path / "page.md", tmp_path)
    assert "Not there yet" in text


def test_an_unknown_table_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: plaicers -->\n\n<!-- end table -->\n", encoding="utf-8")
    with pytest.raises(KeyError, match="plaicers"):
        tables.updated(page)


def test_a_figure_is_shown_where_it_exists(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    folder = results / "fidelity"
    folder.mkdir(parents=True)
    folder.joinpath("fidelity.csv").write_text(
        "model,kind,predicted_seconds,first_seconds,second_seconds,raw_seconds\n"
        "rnnlm,groups,1.0,1.1,,1.1\nrnnlm,heft,2.0,1.9,,1.9\nrnnlm,groups,3.0,3.0,,3.0\n"
    )
    page = tmp_path / "docs" / "page.md"
    assert ".svg" not in tables.block("fidelity", page, results)
    folder.joinpath("fidelity.svg").write_text("<svg/>")
    text = tables.block("fidelity", page, results)
    assert "](../benchmarks/results/fidelity/fidelity.svg)" in text
    assert "| rnnlm | all | 3 | 4.8% |" in text
