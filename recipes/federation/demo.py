"""A federation on one machine: a server, three clients with data of their own, TLS, keys, a trained model.

    python recipes/federation/demo.py FOLDER

It runs the commands of docs/deploy.md one by one, shows them, and ends every process that it started. Each
owner has a part of Fashion-MNIST in which some kinds of clothes are common and others rare.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OWNER = """name: {name}
server: localhost:{port}
data:                          # a rehearsal: one part of a data set that everybody has
  name: fashion-mnist-slice
  partition: {{kind: dirichlet, clients: 3, alpha: 0.3}}
part: {part}
allow: {{unit: example, epsilon: 5, delta: 1.0e-5, methods: [dp-fedadamw], send: [examples]}}
"""
NAMES = ("clinic", "bank", "school")
RUN = Path(__file__).resolve().parent / "run.yaml"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def tacit(*arguments: str) -> None:
    """Run a command, shown as a person would type it."""
    print(f"\n$ tacit {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "tacit", *arguments], check=True, env=ENVIRONMENT)


def started(*arguments: str, log: str) -> subprocess.Popen[bytes]:
    """Start a command that goes on in the background."""
    print(f"\n$ tacit {' '.join(arguments)} > {log} &", flush=True)
    with Path(log).open("wb") as stream:
        command = [sys.executable, "-m", "tacit", *arguments]
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=ENVIRONMENT)


def says(log: str, text: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Wait until a log says something."""
    ends = time.monotonic() + seconds
    while text not in Path(log).read_text(encoding="utf-8"):
        if process.poll() is not None or time.monotonic() > ends:
            sys.exit(f"{log}: it does not say {text!r}\n{Path(log).read_text(encoding='utf-8')}")
        time.sleep(0.2)


def main(folder: Path, port: int = 28443) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    try:
        tacit(
            "server",
            "init",
            "federation",
            "--host",
            "localhost",
            "--port",
            str(port),
            "--listen",
            "127.0.0.1",
        )
        for part, name in enumerate(NAMES):
            tacit("client", "init", name, "--invitation", "federation/invitation.json", "--name", name)
            Path(name, "client.yaml").write_text(
                OWNER.format(name=name, port=port, part=part), encoding="utf-8"
            )
        processes.append(started("server", "start", "federation", log="server.log"))
        says("server.log", "open at", processes[0])
        for name in NAMES:
            tacit("client", "check", name)
        tacit("server", "add", "federation", *(f"{name}/card.json" for name in NAMES))
        processes += [started("client", "start", name, log=f"{name}.log") for name in NAMES]
        tacit("run", str(RUN), "--out", "run")
        tacit("server", "clients", "federation")
        tacit("client", "ledger", NAMES[0])
        tacit("statement", "run")
        print(f"\nThe run's page: {folder / 'run' / 'report.html'}")
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/deploy-demo").resolve())
