"""What the site has beside docs/: README, and pages of keys, commands and names from the code.

A hook of mkdocs (mkdocs.yml). A link to a file or folder of the repository leads to a page of it.
"""

import dataclasses
import posixpath
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import compose  # noqa: E402
from compose.cli import COMMANDS  # noqa: E402
from compose.config.models import find_model, model_names  # noqa: E402
from compose.config.tables import TABLES  # noqa: E402
from compose.errors import attribute, docs, toml_value, type_name  # noqa: E402

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def keys() -> str:
    """A page of every key of every table, and of each model's own."""
    lines = [
        "# Every key",
        "",
        "Written from the tables in the code. `compose train --help TABLE` prints them too.",
        "",
    ]
    for name, kind in TABLES.items():
        lines += [f"## [{name}]", "", *_rows(name, kind), ""]
    for name in model_names():
        folder = find_model(name)
        presets = ", ".join(f"`{preset}`" for preset in folder.presets)
        lines += [f"## [model] of {name}", "", f"Presets: {presets or 'none'}.", ""]
        lines += [*_rows("model", folder.Config), ""]
    return "\n".join(lines)


def _rows(table: str, kind: type) -> Iterator[str]:
    types = typing.get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    yield from ("| key | type | default | meaning |", "| --- | --- | --- | --- |")
    for key, text in docs(kind).items():
        cells = [f"`{table}.{key}`", type_name(types[attribute(key)])]
        cells += [f"`{toml_value(defaults[attribute(key)])}`", text]
        plain = [
            re.sub(r"([|*_<])", r"\\\1", c) if c[0] != "`" else c.replace("|", "\\|") for c in cells
        ]
        yield f"| {' | '.join(plain)} |"


def _plain(text: str) -> str:
    """The text, in which no character means anything to Markdown."""
    return re.sub(r"([|*_])", r"\\\1", text).replace("<", "&lt;")


def commands() -> str:
    """A page of what each command's --help says."""
    lines = [
        "# Every command",
        "",
        "`compose COMMAND --help` prints the same; so does `python -m compose`.",
        "",
    ]
    for name, usage in COMMANDS.items():
        flags = ", ".join(f"`{flag} {value}`".replace(" `", "`") for flag, value in usage.flags.items())
        lines += [f"## {name}", "", _plain(usage.summary), ""]
        lines += ["```text", usage.text.rstrip(), "```", ""]
        lines += [f"Flags: {flags}.", ""] if flags else []
    return "\n".join(lines)


def api() -> str:
    """A page of each name of ``compose.__all__``, where it is defined."""
    places = [
        f"::: {compose._MODULES[name]}.{name}" for name in compose.__all__ if name in compose._MODULES
    ]
    return "\n\n".join(["# Every name of `compose`", "`from compose import Plan` and so on.", *places])


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    pages = {"index.md": (ROOT / "README.md").read_text(), "reference/keys.md": keys()}
    pages |= {"reference/commands.md": commands(), "reference/api.md": api()}
    pages |= {name: (ROOT / name).read_text() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LOG.md")}
    for source in sorted(_linked(files, pages)):
        pages[f"source/{source}.md"] = _source(ROOT / source)
    for name, text in pages.items():
        file = File.generated(config, name, content=text)
        if name.startswith("source/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def _linked(files: Files, pages: dict[str, str]) -> set[str]:
    """The files and folders of the repository, outside of the site, that its pages link to."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()} | pages
    results = set()
    for name, text in texts.items():
        results |= {
            path for link in LINK.findall(FENCE.sub("", text)) if (path := _outside(name, link))
        }
    return results


def _outside(page: str, link: str) -> str:
    """The path of a file or folder that a link of a page means, if it is no page; else ''."""
    path = posixpath.normpath(posixpath.join(_place(page), link))
    is_page = path.startswith("docs/") or path in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LOG.md",
    )
    return "" if is_page or not (ROOT / path).exists() else path


def _place(page: str) -> str:
    """The folder of a page in the repository, from which its links lead."""
    return "." if page in ("index.md", "CHANGELOG.md", "CONTRIBUTING.md", "LOG.md") else "docs"


def _source(path: Path) -> str:
    name = path.relative_to(ROOT)
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if not file.name.startswith(("_", ".")))
        return f"# {name}/\n\n" + "\n".join(f"- `{file}`" for file in files)
    kind = {".py": "python", ".toml": "toml", ".md": "markdown"}.get(path.suffix, "text")
    return f"# {name}\n\n````{kind}\n{path.read_text()}\n````\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of the repository lead to pages of the site."""
    name = page.file.src_uri
    if name.startswith(("source/", "reference/")):
        return markdown
    there = posixpath.dirname(name)

    def lead(match: re.Match[str]) -> str:
        if path := _outside(name, match[0]):
            return posixpath.relpath(f"source/{path}.md", there or ".")
        path = posixpath.normpath(posixpath.join(_place(name), match[0]))
        path = "index.md" if path == "README.md" else path.removeprefix("docs/")
        return posixpath.relpath(path, there or ".")

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)
