"""Simulates other systems: removes from this process what Windows, or macOS, lacks.

Call `windows()` after the libraries are imported (they support Windows themselves), and before tacit is.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

POSIX_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "posix", "syslog")
POSIX_OS = (
    "fork", "forkpty", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "sysconf", "memfd_create",
    "getuid", "geteuid", "getgid", "killpg", "setsid", "getpgid", "mkfifo", "wait4", "waitid", "nice",
    "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "MFD_CLOEXEC",
)  # fmt: skip
"""`statvfs` is not in the list, because the standard library's `disk_usage` needs it here."""
POSIX_SIGNALS = ("SIGKILL", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1", "SIGUSR2", "pthread_sigmask")
LINUX_OS = ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fallocate", "MFD_CLOEXEC")


def windows() -> None:
    """As on Windows: no POSIX module, call or signal; folders cannot be opened; syncing needs a writable
    file.
    """
    import fcntl

    locks = ModuleType("msvcrt")
    locks.LK_NBLCK, locks.LK_LOCK = 2, 1  # type: ignore[attr-defined]

    def locking(fd: int, mode: int, count: int, lockf=fcntl.lockf) -> None:
        assert mode == 2 and os.lseek(fd, 0, os.SEEK_CUR) >= 1 << 30, "a lock that forbids reading"
        lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, count, 0, os.SEEK_CUR)

    locks.locking = locking  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = locks
    open_, fsync, flags = os.open, os.fsync, fcntl.fcntl

    def opened(path, how, *rest, **more):  # type: ignore[no-untyped-def]
        if isinstance(path, str | os.PathLike) and Path(path).is_dir():
            raise PermissionError(errno.EACCES, "a folder", str(path))
        return open_(path, how, *rest, **more)

    def synced(fd: int) -> None:
        if flags(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "a file that is only read")
        fsync(fd)

    os.open, os.fsync = opened, synced
    for name in POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    lose(os, *POSIX_OS)
    lose(signal, *POSIX_SIGNALS)


def macos() -> None:
    """As on macOS: nothing that only Linux has."""
    lose(os, *LINUX_OS)


def lose(module: ModuleType, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
