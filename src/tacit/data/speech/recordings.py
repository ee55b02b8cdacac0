"""Real speech from two games' packages, with transcripts: small, free, and available without a data hub.

*Stamps*: the names of Tux Paint's stamps, read in eight languages, mostly by one narrator per language. A
client is a language's clips of one theme (animals, food, …). Themes are not people, so these clients suit
studies of many languages, but a client-level ε means nothing for them.

*Fillets*: the dialogue of Fish Fillets, acted by the Czech and Dutch casts. A client is a character, and so a
voice; two fish in each language say most of it. Test and validation have characters of their own.

Both are GPL. They are downloaded on request, and only features are kept.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tacit.data.speech.corpora import Utterance
from tacit.errors import UserError
from tacit.fetching.packages import Package, fetch, unpack

_STAMP_LANGUAGES = ("be", "bg", "ca", "el", "es", "fr", "ro", "ru")
_TEST = ("statue", "cyan", "linuxer2", "viking4")
_VALIDATION = ("lightgrey", "viking3", "robodog")
_LINE = re.compile(
    r'dialogId\("(?P<id>[^"]+)",\s*"font_(?P<who>\w+)",\s*"(?:[^"\\]|\\.)*"\)'
    r'\s*dialogStr\("(?P<text>(?:[^"\\]|\\.)*)"\)'
)


@dataclass(frozen=True)
class Recordings:
    """A corpus of recordings: its packages, and the reader of its files."""

    packages: tuple[Package, ...]
    languages: str
    """The languages whose alphabets together form its tokens."""
    read: Callable[[Path], Iterator[Utterance]]
    licence: str
    origin: str
    summary: str

    @contextmanager
    def fetched(self) -> Iterator[list[Utterance]]:
        """Its utterances; their files exist only inside the block."""
        for package in self.packages:
            if not package.available:
                raise UserError(
                    f"{package.name} comes as a Debian package, and {package.client} is not installed here"
                )
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "files"
            folder.mkdir()
            for package in self.packages:
                box = Path(scratch) / package.name
                box.mkdir()
                archive = fetch(package, box)
                unpack(archive, folder)
                archive.unlink()
            yield list(self.read(folder))


def stamps(folder: Path) -> Iterator[Utterance]:
    """`X_desc_fr.ogg` speaks the text of `fr.utf8=` in `X.txt`."""
    root = next(folder.rglob("stamps"), folder)
    for language in _STAMP_LANGUAGES:
        for sound in sorted(root.rglob(f"*_desc_{language}.ogg")):
            spelling = sound.with_name(sound.name.removesuffix(f"_desc_{language}.ogg") + ".txt")
            lines = spelling.read_text(encoding="utf-8").splitlines() if spelling.is_file() else []
            found = [line.partition("=")[2] for line in lines if line.startswith(f"{language}.utf8=")]
            name = sound.relative_to(root)
            yield Utterance(str(name), sound, found[0] if found else "", f"{language}/{name.parts[0]}", "")


def fillets(folder: Path) -> Iterator[Utterance]:
    """`sound/LEVEL/cs/ID.ogg` speaks the text that the level's script gives for `ID` and a character."""
    root = next(folder.rglob("fillets-ng/script"), folder / "script").parent
    for language in ("cs", "nl"):
        sounds = {
            (path.relative_to(root / "sound").parts[0], path.stem): path
            for path in sorted((root / "sound").rglob("*.ogg"))
            if path.parent.name == language
        }
        for script in sorted((root / "script").glob(f"*/*dialogs_{language}.lua")):
            for line in _LINE.finditer(script.read_text(encoding="utf-8")):
                sound = sounds.pop((script.parent.name, line["id"]), None)  # a repeated line counts once
                if sound is not None:
                    who = line["who"]
                    split = "test" if who in _TEST else "validation" if who in _VALIDATION else "train"
                    name = str(sound.relative_to(root / "sound"))
                    yield Utterance(name, sound, line["text"].replace('\\"', '"'), f"{language}/{who}", split)


KNOWN = {
    "speech-stamps": Recordings(
        packages=(
            Package(
                client="apt-get",
                name="tuxpaint-stamps-default",
                version="2022.06.04-1",
                sha256="6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
                size=160_880_444,
            ),
        ),
        languages="+".join(_STAMP_LANGUAGES),
        read=stamps,
        licence="GPL-2.0-or-later",
        origin="Tux Paint stamps (Debian package tuxpaint-stamps-default)",
        summary="recorded names of things in eight languages; a client is a language's theme; "
        "GPL-2.0-or-later; Tux Paint stamps, Debian package tuxpaint-stamps-default",
    ),
    "speech-fillets": Recordings(
        packages=(
            Package(
                client="apt-get",
                name="fillets-ng-data",
                version="1.0.1-1.1",
                sha256="25de89afd8b1adf7bcace8290248a6a22c89cd42300317e69000e162c032cf84",
                size=70_633_484,
            ),
            Package(
                client="apt-get",
                name="fillets-ng-data-cs",
                version="1.0.1-1.1",
                sha256="3ecef99b9456f1c80c9625c6f2418642b52d58e7167a46bad7a412db17991b14",
                size=39_042_172,
            ),
            Package(
                client="apt-get",
                name="fillets-ng-data-nl",
                version="1.0.1-1.1",
                sha256="afb4443fda9ab507dee578b75be857d121718a1cd6017a474f30e0eb13dc9d10",
                size=32_593_580,
            ),
        ),
        languages="cs+nl",
        read=fillets,
        licence="GPL-2.0-or-later",
        origin="Fish Fillets NG (Debian packages fillets-ng-data, -cs and -nl)",
        summary="acted dialogue in Czech and Dutch; a client is a character; GPL-2.0-or-later; "
        "Fish Fillets NG, Debian packages fillets-ng-data, -cs and -nl",
    ),
}
"""The corpora by name."""
