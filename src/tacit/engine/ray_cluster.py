"""The connection to a Ray cluster, and the cluster itself if it is started for one run.

A cluster that we start listens on loopback only, requires a token that is in no file, and leaves nothing
behind.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tacit.errors import UserError

LEFTOVER = "tacit-ray-"
"""Prefix of the folders of clusters that are started for one run; the process id follows."""


def import_ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as error:
        raise UserError(f'engine: Ray is not installed ({error}); pip install "tacit[ray]"') from None
    return ray


class Cluster:
    """The connection to a cluster, and the cluster itself if it was started for this run."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._connected = False
        self._folder: Path | None = None
        self._speak: Callable[[], None] = _nothing
        self.started = False

    def open(self, address: str, cpus: int, gpus: float, store: int) -> None:
        """Connect, or start a cluster with this many processors and this many bytes of object store."""
        if self._ray.is_initialized():  # whoever initialized it will also shut it down
            return
        if address != "local":
            _present_token()
            try:
                with _quiet():
                    self._ray.init(address=address, log_to_driver=False, configure_logging=False)
                self._connected, self._speak = True, _hushed()
                return
            except ConnectionError as error:
                if address != "auto" or os.environ.get("RAY_ADDRESS"):
                    where = os.environ.get("RAY_ADDRESS") if address == "auto" else address
                    raise UserError(
                        f"engine.address: no Ray cluster answers at {where} ({one_line(error)})"
                    ) from None
            except self._ray.exceptions.AuthenticationError as error:
                raise UserError(
                    f"engine.address: {address} wants another token than this machine's ({one_line(error)}); "
                    "set RAY_AUTH_TOKEN, or put it into ~/.ray/auth_token"
                ) from None
            except (RuntimeError, ValueError) as error:
                raise UserError(f"engine.address: {one_line(error)}") from None
        self._start(cpus, gpus, store)

    def _start(self, cpus: int, gpus: float, store: int) -> None:
        """Start a cluster on this machine that listens on loopback only and requires a token."""
        remove_leftovers()
        # A socket's path must be short; TMPDIR's often is not.
        parent = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        self._folder = parent / f"{LEFTOVER}{os.getpid()}-{secrets.token_hex(3)}"
        self._folder.mkdir(mode=0o700)
        # By default Ray requires a token, and would write a new one into the user's home. This one lasts as
        # long as the process and is in no file: Ray reads it once.
        if not any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        try:
            with _quiet(), _loopback():
                self._ray.init(
                    address="local",
                    num_cpus=cpus,
                    num_gpus=int(np.ceil(gpus)) or None,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    object_store_memory=store,
                    # This machine belongs to the run as much as to Ray: without this, workers would yield to
                    # every other process.
                    _system_config={"worker_niceness": 0},
                    _temp_dir=str(self._folder),
                )
        except Exception as error:
            self._ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise UserError(f"engine: Ray cannot start on this machine ({one_line(error)})") from None
        self._connected, self.started, self._speak = True, True, _hushed()

    def close(self) -> None:
        if self._connected:
            self._ray.shutdown()  # for a cluster that others started, this closes only the connection
            self._connected = False
            self._speak()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _nothing() -> None:
    pass


def _hushed() -> Callable[[], None]:
    """Keep Ray's remarks on lost workers off standard output, which belongs to the run; returns the undo."""
    from ray._private import worker

    name = "print_to_stdstream"
    before = getattr(worker, name, None)
    if before is None:  # an internal name of Ray, which may move
        return _nothing
    setattr(worker, name, lambda *arguments, **options: None)
    return lambda: setattr(worker, name, before)


def remove_leftovers() -> None:
    """Remove the folders of clusters whose run was killed: their processes end by themselves, but the files
    stay.
    """
    for parent in {Path("/tmp"), Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{LEFTOVER}*-*"):
            pid = folder.name.removeprefix(LEFTOVER).partition("-")[0]
            with suppress(OSError):
                mine = folder.stat().st_uid == os.getuid()
                if mine and pid.isdigit() and not _alive(int(pid)):
                    shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _present_token() -> None:
    """Present this machine's token, if it has one, to any cluster that we connect to."""
    with suppress(ImportError, AttributeError):  # internal names of Ray, which may move
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def _loopback() -> Iterator[None]:
    """Make a new cluster listen on 127.0.0.1 only, which is Ray's default on systems other than Linux."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    from ray._private import ray_constants

    set_before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    ray_constants.ENABLE_RAY_CLUSTER = False  # it is read once, when Ray is imported
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = set_before
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Start Ray without its banner and without its SIGTERM handler: that signal belongs to the round loop."""
    logger = logging.getLogger("ray")
    level, handler = logger.level, signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        with suppress(ValueError):  # not the main thread: Ray does not touch signals here either
            signal.signal(signal.SIGTERM, handler)


def one_line(error: BaseException) -> str:
    """A Ray error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
