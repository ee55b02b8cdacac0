"""No printed ε is smaller than its exact value."""

from __future__ import annotations

import json
import re

import pytest

from command import tacit
from tacit.privacy.accountants import Epsilon
from tacit.privacy.audit import Audit
from tacit.privacy.conventions import Scale
from tacit.privacy.rounding import rounded_down, rounded_up
from tacit.privacy.tuning import Tuned


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_rounded_up_is_above_and_near(digits: int) -> None:
    for value in (0.0123449, 0.5, 1.0, 1.2341, 9.99999, 12.0, 123.456, 98_765.0):
        shown = float(rounded_up(value, digits))
        assert value <= shown * (1 + 1e-12) and shown <= value * (1 + 10.0 ** (1 - digits))


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_rounded_down_is_below_and_near(digits: int) -> None:
    for value in (0.0123449, 0.5, 1.0, 1.2349, 9.99999, 12.0, 123.456, 98_765.0):
        shown = float(rounded_down(value, digits))
        assert shown <= value * (1 + 1e-12) and value * (1 - 10.0 ** (1 - digits)) <= shown


def test_texts_round_up() -> None:
    assert "ε = 2.35, where one run alone has 1.24 " in Tuned(2.341, 1.2341, 10.0, "geometric").text()
    there = Epsilon(delta=1e-6, pld=1.2341, rdp=2.341, order=2.0)
    assert "ε = 1.24 (RDP 2.35)" in Scale(1000, 10).text(there, 1.0, 5)
    audit = Audit("a sum", 1.2341, 0.5678, 1e-5, 0.95, 100, "a threshold", 0.0)
    assert "claimed ε = 1.24, audited ε ≥ 0.567 " in audit.text()


def test_plans_round_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*more: str) -> str:
        asked = ("--rate", "0.05", "--rounds", "20", "--delta", "1e-3", *more)
        return tacit("plan", *asked, monkeypatch=monkeypatch, capsys=capsys)[1]

    for noise in ("0.9", "1.1", "1.3", "1.7"):
        found = json.loads(plan("--noise", noise, "--json"))
        shown = plan("--noise", noise)
        for by in ("pld", "rdp"):
            printed = re.search(rf"([\d.]+)  by {by.upper()}", shown)
            assert printed and found[f"epsilon_{by}"] <= float(printed[1]) <= 1.001 * found[f"epsilon_{by}"]
    cells = json.loads(plan("--noise", "0.9,1.1,1.3,1.7", "--json"))["cells"]
    rows = [line.split("│") for line in plan("--noise", "0.9,1.1,1.3,1.7").splitlines() if "│" in line]
    printed_ones = [float(row[-2]) for row in rows]
    assert all(cell["epsilon"] <= one for cell, one in zip(cells, printed_ones, strict=True))
