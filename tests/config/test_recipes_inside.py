"""Recipes in the package: those in a wheel, the list of them, and copies that run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.main import get_command

from command import tacit
from tacit.cli.app import app
from tacit.config import load
from tacit.config.loading import read_values
from tacit.config.recipes import about, find, names, write
from tacit.config.sweep import read_sweep
from tacit.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel .` makes of a clean checkout, by the build backend itself."""
    # Not imported here: it would take the place of a distutils that something else has imported.
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is too old")
    place = tmp_path_factory.mktemp("wheel")
    tree = place / "checkout"
    kept = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if kept.returncode:
        pytest.skip("not a checkout")
    for name in kept.stdout.decode().splitlines():
        source, target = ROOT / name, tree / name
        if name.split("/")[0] in ("src", "recipes") or "/" not in name:
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                target.symlink_to(source.readlink())
            elif source.is_file():
                target.hardlink_to(source) if source.stat().st_dev == place.stat().st_dev else (
                    target.write_bytes(source.read_bytes())
                )
    code = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    (tree / "dist").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_has_every_recipe_once_and_no_program_of_them(wheel: Path) -> None:
    inside = [name for name in zipfile.ZipFile(wheel).namelist() if "recipes/" in name]
    assert sorted(inside) == sorted(f"tacit/recipes/{name}.yaml" for name in names())
    assert len(names()) == len(list((ROOT / "recipes").rglob("*.yaml"))) > 100


@pytest.mark.slow
def test_a_wheel_is_enough(wheel: Path, tmp_path: Path) -> None:
    """In an empty folder, with the wheel alone: version, help, a recipe, and a run of it."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    zipfile.ZipFile(wheel).extractall(site)

    def command(*arguments: str) -> str:
        code = "import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); import tacit; "
        code += (
            "assert tacit.__file__.startswith(sys.path[0]); runpy.run_module('tacit', run_name='__main__')"
        )
        told = subprocess.run(
            [sys.executable, "-I", "-c", code, str(site), *arguments],
            cwd=here,
            capture_output=True,
            text=True,
        )
        assert told.returncode == 0, told.stderr
        return told.stdout

    assert command("--version") == "0.1.0\n"
    assert command("init", "quickstart").splitlines() == [
        "Wrote quickstart.yaml",
        "Next: tacit run quickstart.yaml",
    ]
    less = ["--set", "rounds=1", "--set", "privacy.epsilon=null", "--set", "privacy.noise=1"]
    done = json.loads(
        command("run", "quickstart.yaml", *less, "--set", "engine.workers=0", "--set", "cohort=5", "--json")
    )
    assert done["finished"] and done["last"]["round"] == 1
    assert sorted(path.name for path in here.iterdir()) == ["quickstart.yaml", "runs"]


@pytest.mark.parametrize("name", ["quickstart", "002/closed-form", "small/000/ablation", "small/003/table-1"])
def test_copies_are_the_recipes(name: str, tmp_path: Path) -> None:
    """Whatever it is laid over: the copy has the same settings; and the list counts what would be run."""
    file, *below = write(name, tmp_path)
    assert file == tmp_path / f"{name.rpartition('/')[2]}.yaml"
    assert read_values(file)[0] == read_values(find(name))[0]
    assert write(name, tmp_path) == [file, *below], "the same again changes nothing"
    sweep = read_sweep(file, {})
    config = load(file) if sweep is None else sweep.config(sweep.points[0])
    runs = "" if sweep is None else f"{len(sweep.points)} runs × "
    assert about(name).size == f"{runs}{config.rounds} rounds × {config.cohort.size} clients"
    assert (config.model.hub is not None) == ("weights" in about(name).needs)


@pytest.mark.slow
def test_every_copy_finds_its_base(tmp_path: Path) -> None:
    for name in names():
        file, *below = write(name, tmp_path / name)
        assert all(path.is_relative_to(tmp_path / name) for path in below)
        for path in (file, *below):
            base = re.search(r"(?m)^base: (\S+)", path.read_text())
            assert base is None or (path.parent / base[1]).is_file()
        ours, theirs = (re.sub(r"(?m)^base:.*", "", p.read_text()) for p in (file, find(name)))
        assert ours == theirs


def test_nothing_that_is_there_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "table-11.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"table-11.yaml exists already"):
        write("000/table-11", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["table-11.yaml"]
    (tmp_path / "table-11.yaml").unlink()
    (tmp_path / "recipes").write_text("a file in the way")
    with pytest.raises(UserError, match=r"recipes.*cannot be written"):
        write("000/table-11", tmp_path)


def test_the_commands_speak_of_recipes_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        return tacit(*arguments, monkeypatch=monkeypatch, capsys=capsys)

    assert "tacit init quickstart" in run("-h")[1]
    code, out, _ = run("recipes")
    assert code == 0 and all(f"{name}  " in out for name in names())
    assert max(map(cell_len, out.splitlines())) <= 80
    assert run("recipes", "nothing-like-it")[0] == 2
    assert "did you mean quickstart?" in run("init", "quickstrat")[2]
    said = "quickstart.yaml: no such file; `tacit init quickstart` writes the recipe of that name"
    assert run("run", "quickstart.yaml") == (2, "", f"tacit: {said}\n")
    code, out, _ = run("init", "recipes/small/003/table-1.yaml")
    assert code == 0 and "It needs the seed model runs/small-003-seed, tacit[speech]." in out
    assert (tmp_path / "recipes/003/table-1.yaml").exists()


def test_help_names_no_file_that_a_wheel_lacks() -> None:
    """Every YAML file in a help text is one that the same text, or `tacit init`, has written first."""
    command = get_command(app)
    texts = {name: sub.help or "" for name, sub in command.commands.items()}  # type: ignore[attr-defined]
    texts["tacit"] = command.help or ""
    for name, text in texts.items():
        assert not re.search(r"\b(docs|recipes|tests)/\w", text), f"{name}: a wheel has no such folder"
        for file in re.findall(r"[\w/-]+\.yaml", text):
            assert file == "quickstart.yaml" or re.search(
                rf"tacit init [\w/-]*{file.removesuffix('.yaml')}\b", text
            ), f"{name}: where does {file} come from?"
