"""The commands of a federation, without a network: folders, cards, rosters, policies, ledgers."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from typer.testing import CliRunner

from tacit.cli.app import app
from tacit.config.owner import OwnRecords, read_owner
from tacit.deploy.folders import Door, Invitation
from tacit.deploy.keys import read_key
from tacit.deploy.roster import Roster
from tacit.deploy.statement import OwnStatement
from tacit.errors import UserError

OWNER = """name: clinic
server: localhost:1
data: {name: table, path: records.csv, features: [age, dose], label: outcome}
allow: {unit: example, epsilon: 4, delta: 1.0e-6, methods: [dp-fedadamw], send: [examples]}
"""


def tacit(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    """A federation, and a clinic that wants to join it."""
    tacit("server", "init", "hospital", "--host", "localhost", "--host", "127.0.0.1", "--port", "1")
    tacit("client", "init", "clinic", "--invitation", "hospital/invitation.json", "--name", "clinic")
    rng = np.random.default_rng(0)
    rows = [
        f"{age},{dose:.2f},{age > 50:d}"
        for age, dose in zip(rng.integers(20, 80, 40), rng.random(40), strict=True)
    ]
    (tmp_path / "clinic" / "records.csv").write_text("\n".join(["age,dose,outcome", *rows]) + "\n")
    (tmp_path / "clinic" / "client.yaml").write_text(OWNER)
    return tmp_path / "clinic"


def test_a_client_joins_by_its_card(clinic: Path) -> None:
    """Of 40 records, five are set aside to test on."""
    said = tacit("client", "check", "clinic")
    assert "35 records to train on" in said and "cannot be reached" in said
    card = json.loads((clinic / "card.json").read_text())
    assert card.keys() == {"name", "key", "records"} and card["records"] == 35
    assert "client 0: clinic" in tacit("server", "add", "hospital", "clinic/card.json")
    with pytest.raises(UserError, match="one key is one client"):
        tacit("server", "add", "hospital", "clinic/card.json")
    (row,) = json.loads(tacit("server", "clients", "hospital", "--json"))
    assert (row["number"], row["name"], row["records"], row["state"]) == (0, "clinic", 35, "unknown")
    tacit("server", "remove", "hospital", "clinic")
    assert Roster.read(Path("hospital")).members[0].revoked
    said = tacit("client", "ledger", "clinic")
    assert "ε = 0 at δ = 1e-06" in said and "the server, and whoever runs it" in said


def test_lines_fit_80_columns(tmp_path: Path) -> None:
    said = tacit("server", "init", "hospital", "--host", "federation.example.org")
    said += tacit("client", "init", "clinic", "--invitation", "hospital/invitation.json", "--name", "clinic")
    (tmp_path / "clinic" / "client.yaml").write_text(OWNER)
    said += tacit("client", "ledger", "clinic")
    assert "tacit server start hospital" in said and "whoever watches the network" in said
    assert max(map(len, said.splitlines())) <= 80


def test_records_that_are_not_there_are_named_by_their_whole_path(clinic: Path) -> None:
    (clinic / "records.csv").unlink()
    with pytest.raises(UserError) as refused:
        tacit("client", "check", "clinic")
    assert (
        str(refused.value)
        == f"data.path: there is no {clinic.resolve()}/records.csv; put the file there, or correct it"
    )


def test_one_round_of_one_run_is_told_as_one() -> None:
    one = OwnStatement("example", 0.5, 1e-6, 4.0, 1, 1, 0, 0, 0, ())
    assert "in 1 round of 1 run; allowed is 4." in one.text()
    assert "in 2 rounds of 1 run; allowed" in replace(one, rounds=2).text()


def test_how_many_records_there_are_is_told_only_if_the_owner_says_so(clinic: Path) -> None:
    (clinic / "client.yaml").write_text(OWNER.replace("[examples]", "[]"))
    tacit("client", "check", "clinic")
    assert json.loads((clinic / "card.json").read_text())["records"] == 0


def test_secrets_are_for_their_owner_alone_and_are_never_overwritten(clinic: Path) -> None:
    for secret in (
        "hospital/ca.key",
        "hospital/tls.key",
        "hospital/server",
        "clinic/key",
        "clinic/client.yaml",
    ):
        assert stat.S_IMODE(Path(secret).stat().st_mode) == 0o600
    for folder in ("hospital", "clinic"):
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    invitation = Path("hospital/invitation.json").read_text()
    assert (
        "PRIVATE" not in invitation
        and Invitation.read(Path("hospital/invitation.json")).server == "localhost:1"
    )
    assert Door.read(Path("hospital")).port == 1
    with pytest.raises(UserError, match="not empty"):
        tacit("server", "init", "hospital", "--host", "localhost")
    with pytest.raises(UserError, match="not empty"):
        tacit("client", "init", "clinic", "--invitation", "hospital/invitation.json", "--name", "clinic")
    assert read_key(clinic / "key").curve.name == "secp384r1"


def test_certificates_are_the_federations_own(clinic: Path) -> None:
    authority = x509.load_pem_x509_certificate(Path("hospital/ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate(Path("hospital/tls.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (clinic / "ca.crt").read_bytes() == Path("hospital/ca.crt").read_bytes()


def test_units_for_systemd(clinic: Path) -> None:
    for kind, folder in (("server", "hospital"), ("client", "clinic")):
        unit = tacit(kind, "start", folder, "--unit")
        assert f"-m tacit {kind} start {Path(folder).resolve()}" in unit and "Restart=always" in unit
    file = clinic / "client.yaml"
    file.write_text(file.read_text() + "ledgers: ../ledgers\n")
    shared = Path("ledgers").resolve()
    assert f"ReadWritePaths={clinic.resolve()} {shared}\n" in tacit("client", "start", str(clinic), "--unit")
    assert shared.is_dir(), "or systemd would not start it"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("unit: example", "unit: nobody", "allow.unit"),
        ("epsilon: 4, ", "", "allow.epsilon"),
        ("methods: [dp-fedadamw]", "methods: []", "allow.methods"),
        ("name: clinic\n", "name: ../clinic\n", "name"),
        ("server: localhost:1", "server: localhost", "server"),
        ("send: [examples]", "send: [everything]", "allow.send"),
        ("allow:", "more: 1\nallow:", "more"),
        ("data: {", "part: 0\ndata: {", "belong together"),
        ("allow: {", "allow: [", "badly indented"),
        ("name: clinic\n", "name: clinic\nname: clinic\n", "name is given twice"),
        ("epsilon: 4", "epsilon: much", "must be a number"),
        ("name: clinic\n", "", "name: this key is missing"),
    ],
)
def test_a_wrong_client_file_is_told_in_one_line(clinic: Path, old: str, new: str, match: str) -> None:
    assert old in OWNER
    (clinic / "client.yaml").write_text(OWNER.replace(old, new))
    with pytest.raises(UserError, match=match) as error:
        read_owner(clinic)
    told = str(error.value)
    assert "\n" not in told and "client.yaml" in told
    assert not re.search("should|Input|Field|Value error|pattern", told), "not in a library's words"


def test_what_is_no_invitation_no_card_and_no_federation_is_told(clinic: Path) -> None:
    Path("odd.json").write_text("{}")
    calls: list[tuple[tuple[str, ...], str]] = [
        (("client", "init", "x", "--invitation", "odd.json", "--name", "x"), "no invitation"),
        (("server", "add", "hospital", "odd.json"), "no client's card"),
        (("server", "add", "hospital", "missing.json"), "cannot be read"),
        (("server", "clients", "nowhere"), "holds no federation"),
        (("server", "start", "nowhere"), "holds no federation"),
        (("server", "remove", "hospital", "nobody"), "no client nobody"),
    ]
    for arguments, match in calls:
        with pytest.raises(UserError, match=match):
            tacit(*arguments)


def test_records_are_prepared_as_the_run_says_and_found_where_the_owner_says(clinic: Path) -> None:
    owner = read_owner(clinic)
    theirs: dict[str, Any] = {"name": "owners", "path": "/etc/passwd", "max_length": 64}
    found = owner.section(theirs)
    assert (found["name"], found["path"], found["max_length"]) == ("table", "records.csv", 64)
    assert (
        OwnRecords(
            owner.model_copy(update={"data": {**owner.data, "path": str(clinic / "records.csv")}})
        ).count()
        == 35
    )


def test_an_owner_may_have_a_function_that_gives_its_records(clinic: Path) -> None:
    """They come prepared: what the server says of its own table is not for them."""
    owner = read_owner(clinic).model_copy(update={"data": {"import": "mymodule:records"}})
    split = {"kind": "owners", "clients": 3}
    found = owner.section({"name": "table", "path": "ours.csv", "features": ["age"], "partition": split})
    assert found == {"name": "import:mymodule:records", "partition": split}


def test_every_row_of_the_threat_table_names_tests_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    table = page[page.index("| Who | What they can do") :].split("\n\n")[0].splitlines()[2:]
    files = {file.stem: file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py")}
    assert len(table) >= 14
    for row in table:
        shown = row.strip(" |").split("|")[-1]
        names = re.findall("`([^`]+)`", shown)
        assert names or "statement" in shown, row
        where = ""
        for name in names:
            if name.startswith("tests/"):
                assert (Path(__file__).parents[2] / f"{name}.py").exists(), name
                continue
            if name.startswith("test_"):
                where, _, name = name.partition(": ")
                assert where in files, where
            assert f"def test_{name.rstrip('…')}" in files[where], name


@pytest.mark.parametrize(
    "host", ["", "é.example.org", "a b", "*", "-x", "x" * 300, "1.2.3.4.5.", "a\nb", "[::1]"]
)
def test_a_host_that_no_certificate_can_name_is_refused_before_anything_is_made(host: str) -> None:
    with pytest.raises(UserError, match=r"give a name such as .* or an IP address"):
        tacit("server", "init", "fed", "--host", "localhost", "--host", host)
    assert not Path("fed").exists()


@pytest.mark.parametrize("name", ["", "a b", "a\nallow: {}", "../x", "x" * 61])
def test_a_clients_name_is_no_line_of_its_settings(clinic: Path, name: str) -> None:
    with pytest.raises(UserError, match="letters, digits, dots and dashes"):
        tacit("client", "init", "other", "--invitation", "hospital/invitation.json", "--name", name)
    assert not Path("other").exists()


def test_an_invitation_writes_no_line_of_the_owners_settings(clinic: Path) -> None:
    plain = json.loads(Path("hospital/invitation.json").read_text())
    for server in ("x:1\nstate: /somewhere", "x", "x:1 # y", "x:123456", ""):
        Path("bad.json").write_text(json.dumps({**plain, "server": server}))
        with pytest.raises(UserError, match="no HOST:PORT"):
            tacit("client", "init", "other", "--invitation", "bad.json", "--name", "other")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"{}", b"3", b'{"name": 3}', b"[" * 100_000], ids=range(7)
)
def test_what_is_no_file_of_a_federation_is_told_in_a_line(clinic: Path, content: bytes) -> None:
    tacit("client", "check", "clinic")
    commands = {
        "bad.json": [
            ["client", "init", "other", "--invitation", "bad.json", "--name", "other"],
            ["server", "add", "hospital", "bad.json"],
            ["client", "trust", "clinic", "bad.json"],
        ],
        "hospital/roster.json": [
            ["server", "clients", "hospital"],
            ["server", "add", "hospital", "clinic/card.json"],
        ],
        "hospital/server.json": [["server", "start", "hospital"]],
        "clinic/client.yaml": [["client", "check", "clinic"], ["client", "ledger", "clinic"]],
        "clinic/key": [["client", "check", "clinic"], ["client", "start", "clinic"]],
        "clinic/server.pub": [["client", "start", "clinic"]],
    }
    for name, several in commands.items():
        whole = Path(name).read_bytes() if Path(name).exists() else b""
        Path(name).write_bytes(content)
        for words in several:
            with pytest.raises(UserError) as told:
                tacit(*words)
            assert "\n" not in str(told.value), (name, words)
        Path(name).write_bytes(whole)


def test_a_device_is_no_file_of_a_federation(clinic: Path) -> None:
    Path("bad.json").symlink_to("/dev/zero")
    for words in (
        ["client", "init", "other", "--invitation", "bad.json", "--name", "other"],
        ["server", "add", "hospital", "bad.json"],
    ):
        with pytest.raises(UserError, match="not a regular file"):
            tacit(*words)


@pytest.mark.parametrize("server", ["localhost:99999", "localhost:0", "x..y:1"])
def test_a_door_that_cannot_be_there_is_told(clinic: Path, server: str) -> None:
    (clinic / "client.yaml").write_text(OWNER.replace("localhost:1", server))
    assert f"{server}: cannot be reached" in " ".join(tacit("client", "check", "clinic").split())
