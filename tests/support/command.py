"""Runs the command as a user would type it, in this process."""

from __future__ import annotations

import pytest

from tacit import cli

GOOD = """\
rounds: 2
data:
  name: fashion-mnist-slice
  partition: {kind: dirichlet, clients: 40, alpha: 0.5}
model: {name: mlp, hidden: [8]}
cohort: 4
local:
  steps: 2
  batch: 10
  lr: 0.1
engine: {workers: 0}
"""


def tacit(*arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command; returns its exit code, output and error output."""
    monkeypatch.setattr("sys.argv", ["tacit", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
