"""A large vector between real clients: 256 MB there and back over TLS on loopback, and its cost.

    python bench/deploy.py                        two clients, two rounds of FedAvg without privacy
    python bench/deploy.py --privacy client       uploads as whole numbers, in 4 bytes each
    python bench/deploy.py --megabytes 16

For each process, prints its peak resident memory beyond that of the same run with a vector of 32 kB, in
vectors; and the processor time of the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from gradients import machine

CLIENTS = 2
OWNER = """name: owner-{part}
server: localhost:{port}
data: {{name: fashion-mnist-slice, partition: {{kind: iid, clients: 2}}}}
part: {part}
allow: {{unit: none, epsilon: 1.0e+6, delta: 1.0e-5, methods: [fedavg], send: [examples]}}
"""
PRIVACY = {"unit": "client", "noise": 1.0, "clip": 1.0, "delta": 1e-5}


def config(folder: Path, megabytes: float, privacy: str) -> dict[str, Any]:
    """An MLP with one wide layer: 784 inputs, 10 classes, 795 parameters for each unit and 10 more."""
    wide = max(1, round(megabytes * 2**20 / 4 / 795))
    section = {} if privacy == "none" else {"privacy": PRIVACY}
    if privacy == "secure":
        section["privacy"] = PRIVACY | {"aggregation": "secure"}
    return {
        "rounds": 2,
        "data": {"name": "fashion-mnist-slice", "partition": {"kind": "owners", "clients": CLIENTS}},
        "model": {"name": "mlp", "hidden": [wide]},
        "method": "fedavg",
        "cohort": {"size": CLIENTS, "sampling": "fixed"},
        "local": {"steps": 1, "batch": 4, "lr": 0.1},
        "evaluate": {"every": 2},
        "engine": {"kind": "flower", "federation": str(folder), "deadline": 900, "wait": CLIENTS},
    } | section


def peak(process: subprocess.Popen[bytes]) -> int:
    """The most memory that a process has held so far, in bytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    found = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0].split()[1]) * 1024 if found else 0


def measure(megabytes: float, privacy: str) -> dict[str, float]:
    """Peak resident bytes of the SuperLink, a client and the server's loop, and seconds of all processors."""
    with tempfile.TemporaryDirectory() as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, root = free.getsockname()[1], Path(place)
        free.close()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

        def tacit(*arguments: str) -> list[str]:
            return [sys.executable, "-m", "tacit", *arguments]

        def once(*arguments: str) -> None:
            subprocess.run(tacit(*arguments), cwd=root, env=environment, check=True, capture_output=True)

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            log = (root / f"{arguments[0]}-{arguments[-1]}.log").open("wb")
            return subprocess.Popen(
                tacit(*arguments), cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

        before = os.times()
        once("server", "init", "link", "--host", "localhost", "--port", str(port), "--listen", "127.0.0.1")
        for part in range(CLIENTS):
            name = f"owner-{part}"
            once("client", "init", name, "--invitation", "link/invitation.json", "--name", name)
            (root / name / "client.yaml").write_text(OWNER.format(part=part, port=port))
            once("client", "check", name)
        once("server", "add", "link", *(f"owner-{part}/card.json" for part in range(CLIENTS)))
        for part in range(CLIENTS):
            once("client", "trust", f"owner-{part}", f"owner-{1 - part}/card.json")
        (root / "run.yaml").write_text(yaml.safe_dump(config(root / "link", megabytes, privacy)))
        running = {"superlink": start("server", "start", "link")}
        while not (root / "link" / "superlink.sock").exists():
            time.sleep(0.2)
        for part in range(CLIENTS):
            running[f"client {part}"] = start("client", "start", f"owner-{part}")
        running["loop"] = start("run", "run.yaml", "--out", "run")
        peaks = dict.fromkeys(running, 0)
        try:
            while running["loop"].poll() is None:
                peaks = {name: max(peaks[name], peak(process)) for name, process in running.items()}
                time.sleep(0.05)
        finally:
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            for process in running.values():
                process.wait(120)
        if running["loop"].returncode:
            sys.exit("\n".join(file.read_text() for file in sorted(root.glob("*.log"))))
        after = os.times()
        seconds = sum(after[2:4]) - sum(before[2:4])
        clients = max(found for name, found in peaks.items() if name.startswith("client"))
        return {"superlink": peaks["superlink"], "client": clients, "loop": peaks["loop"], "cpu": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=256.0)
    parser.add_argument("--privacy", choices=("none", "client", "secure"), default="none")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    base, found = measure(1 / 32, given.privacy), measure(given.megabytes, given.privacy)
    vector = given.megabytes * 2**20
    plain = {
        name: {"bytes": found[name], "base": base[name], "vectors": (found[name] - base[name]) / vector}
        for name in ("superlink", "client", "loop")
    }
    if given.json:
        print(json.dumps(plain | {"cpu seconds": found["cpu"], "machine": machine()}))
        return
    print(f"{given.megabytes:g} MB, two clients, two rounds, privacy: {given.privacy}")
    for name, row in plain.items():
        print(f"  {name:10} peak {row['bytes'] / 2**20:6,.0f} MB, {row['vectors']:.1f} vectors beyond "
              f"{row['base'] / 2**20:,.0f} MB")  # fmt: skip
    print(f"  {found['cpu']:.0f} s of processor time in all")


if __name__ == "__main__":
    main()
