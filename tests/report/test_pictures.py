"""Pictures are labelled: names, whole rounds, and numbers that nothing covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from command import tacit
from tacit.privacy.audit import Audit, AuditReport
from tacit.report.audit import draw_audit
from tacit.report.compare import Run, rows
from tacit.report.drift import ClientSpread, Drift
from tacit.report.drift import draw as draw_drift
from tacit.report.layers import draw as draw_layers
from tacit.report.picture import curves


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def labels(figure: Figure, panel: int = 0) -> list[str]:
    return [label.get_text() for label in figure.axes[panel].get_xticklabels()]


def test_layers_without_numbers_stand_by_their_names(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_layers({"body.0": (0.1, 0.02), "head": (0.3, 0.1)}, tmp_path / "l.png")
    assert labels(drawn[0]) == ["body.0", "head"]


def test_numbered_layers_have_whole_numbers(tmp_path: Path, drawn: list[Figure]) -> None:
    names = ["embed", *(f"layers.{n}.mlp.up" for n in range(40)), "head"]
    draw_layers(dict.fromkeys(names, (0.1, 0.02)), tmp_path / "l.png", before_and_after=True)
    before, *numbers, after = labels(drawn[0])
    assert (before, after) == ("before", "after")
    assert [int(number) for number in numbers] == list(range(0, 40, 3))


def test_kinds_of_layers_are_told_from_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"round": 1, "clients": 2, "layers": {"body.0": [0.1, 0.02], "head": [0.3, 0.1]}}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    code, out, err = tacit("layers", tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    kinds, layers = out.split("\nlayer ")
    assert kinds.startswith("kind of layer ") and kinds.count("head") == 1 and layers.count("head") == 1


@pytest.mark.parametrize("lower", [0.0, 0.9, 7.9])
def test_the_legend_of_an_audit_covers_no_number(lower: float, tmp_path: Path, drawn: list[Figure]) -> None:
    alone = Audit("the mechanism", 8.0, lower, 1e-5, 0.95, 512, "guesses", 1.0)
    draw_audit(AuditReport(alone, None), tmp_path / "a.png", "quickstart")
    (axes,) = drawn[0].axes
    legend = axes.get_legend()
    assert legend is not None and len(axes.texts) == 2
    covered = legend.get_window_extent()
    assert not any(covered.overlaps(text.get_window_extent()) for text in axes.texts)
    assert covered.y1 <= drawn[0].bbox.y1 and covered.x1 <= drawn[0].bbox.x1 and covered.x0 >= 0


def test_a_drift_is_of_whole_rounds(tmp_path: Path, drawn: list[Figure]) -> None:
    one = ClientSpread(0.5, 1.0)
    draw_drift({"run": [Drift(round, one, one, one) for round in (1, 2, 3)]}, tmp_path / "d.png")
    for axes in drawn[0].axes:
        assert all(tick == int(tick) for tick in axes.get_xticks())


def test_clients_that_tuned_have_a_curve_of_their_own(tmp_path: Path, drawn: list[Figure]) -> None:
    metrics = [{"round": n, "accuracy": 0.1 * n, "tuned_accuracy": 0.2 * n} for n in (1, 2, 3)]
    table = rows([Run(Path("run"), {"seed": 0}, metrics)])
    assert [row.tuned for row in table] == [False, True]
    curves(table, "accuracy", tmp_path / "c.png")
    before, after = drawn[0].axes[0].get_lines()
    assert list(before.get_ydata()) == pytest.approx([0.1, 0.2, 0.3])
    assert list(after.get_ydata()) == pytest.approx([0.2, 0.4, 0.6])
    assert "own records" in str(after.get_label())
