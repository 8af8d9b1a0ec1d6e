"""Build the documentation as a site. README.md is its first page, and benchmarks/README.md belongs to it, too.

python -m docs.site [FOLDER]    builds the site, by default in build/site; every warning is an error

Pages are written to be read in the repository. The site is built from copies in which links are adapted. A link to a
page, picture or data file leads to its copy. A link to any other file or to a folder leads to a page that shows the
text of that file or of all files of the folder. Diagrams become a part of their page, so that they take its colours.
requirements-docs.txt lists the tools that this needs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROOT = HERE.parent
SETTINGS = HERE / "site.yml"
AS_THEY_ARE = (".svg", ".png", ".webp", ".csv", ".css", ".js")
MOVED = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md", "docs/results/README.md": "results/index.md"}
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_NAMED = re.compile(r"\[[\w/-]+\.md\]\(((?!\w+:)[^)\s#]+\.md)\)")
_DIAGRAM = re.compile(r"^!\[([^\]]*)\]\(([^)\s]*diagrams/[\w-]+\.svg)\)$", re.M)
_COMMANDS = re.compile(r"\A( *)```\n(?=\1(\$ )?(?:tba|python3?|pip|make|prefect|export|for|kubectl|docker|helm|git) )")


def main(arguments: list[str]) -> None:
    out = Path(arguments[0] if arguments else ROOT / "build/site").resolve()
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    with TemporaryDirectory() as copies:
        stage(Path(copies))
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", f"{copies}/mkdocs.yml"]
        done = subprocess.run([*command, "--site-dir", out], env=quiet, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    print(out / "index.html")


def stage(folder: Path) -> None:
    """Write what the site is built from: copies of pages, pictures and data files, and the settings without navigation
    entries for pages that do not exist."""
    copies = folder / "docs"
    for source in pages():
        write(copies / place(source), copied(source, copies))
    for path in [*HERE.rglob("*"), *(ROOT / "benchmarks/results").iterdir()]:
        if path.suffix in AS_THEY_ARE:
            copy = copies / place(name_of(path))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    lines = SETTINGS.read_text().splitlines(keepends=True)
    write(folder / "mkdocs.yml", "".join(it for it in lines if is_there(it, copies)))


def pages() -> list[str]:
    """Return the names of all pages in the repository."""
    return ["README.md", "benchmarks/README.md", *(name_of(page) for page in sorted(HERE.rglob("*.md")))]


def place(name: str) -> str:
    """Return where the site has a file of the repository."""
    return MOVED.get(name, name.removeprefix("docs/"))


def is_there(line: str, copies: Path) -> bool:
    """Return False if a line of the settings names a page that does not exist."""
    named = re.search(r"^ +- (?:.*: )?([\w/-]+\.md)$", line.rstrip())
    return named is None or (copies / named[1]).exists()


def copied(source: str, copies: Path) -> str:
    """Return the text of a page for the site."""
    page = (ROOT / source).read_text()
    page = _DIAGRAM.sub(lambda found: drawn(source, found[2]), page)
    parts, last = [], 0
    for block in _FENCED.finditer(page):
        parts += [linked(page[last : block.start()], source, copies), coloured(block[0])]
        last = block.end()
    return "".join([*parts, linked(page[last:], source, copies)])


def linked(text: str, source: str, copies: Path) -> str:
    """Return a text with its links adapted to the site. A link whose text is the file name of a page gets the title of
    the page as its text."""
    text = _NAMED.sub(lambda found: f"[{title(source, found[1])}]({found[1]})", text)
    return _LINK.sub(lambda found: f"]({target(found[1], source, copies)}{found[2] or ''})", text)


def title(source: str, link: str) -> str:
    return (ROOT / source / ".." / link).resolve().read_text().partition("\n")[0].removeprefix("# ")


def target(link: str, source: str, copies: Path) -> str:
    """Return the target of a link of the page `source`, relative to where the site has this page. If the link leads to
    another file of the repository, write a page that shows the file."""
    name = name_of(ROOT / source / ".." / link)
    if name not in pages() and PurePosixPath(name).suffix not in AS_THEY_ARE:
        path = ROOT / name
        name = f"docs/files/{name}.md"
        write(copies / place(name), f"# {path.name}\n\n{code_blocks(path)}")
    return os.path.relpath(place(name), PurePosixPath(place(source)).parent)


def code_blocks(path: Path) -> str:
    """Return the text of a file, or of all files of a folder, as code blocks."""
    if path.is_dir():
        files = [it for it in sorted(path.rglob("*")) if it.is_file() and it.suffix != ".pyc"]
        return "".join(f"## {it.relative_to(path)}\n\n{code_blocks(it)}" for it in files)
    return f"````{path.suffix[1:]}\n{path.read_text()}````\n\n"


def drawn(source: str, link: str) -> str:
    """Return a diagram as HTML that is a part of the page."""
    return f'<figure class="diagram">\n{(ROOT / source / ".." / link).resolve().read_text().strip()}\n</figure>'


def coloured(block: str) -> str:
    """Mark a code block as shell code if it names no language and begins with a command."""
    return _COMMANDS.sub(lambda found: f"{found[1]}```{'console' if found[2] else 'sh'}\n", block)


def name_of(path: Path) -> str:
    return Path(os.path.normpath(path)).relative_to(ROOT).as_posix()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
