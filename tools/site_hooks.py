"""What `make docs` does beside MkDocs: pages that lie outside of docs/, and links that leave it.

CONTRIBUTING.md, CHANGELOG.md and examples/README.md become pages; links between them and those
under docs/ stay links. A link to a file that is no page (a result, a module) becomes its path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parent.parent
PAGES = {  # page of the site: file of the repository
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "examples" / "gallery").glob("*.png")):
        files.append(File.generated(config, f"gallery/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they hold in the repository, rewritten to hold on the site."""
    name = page.file.src_uri
    source = PAGES.get(name, f"docs/{name}")
    return LINK.sub(lambda found: _link(found, source), markdown)


def _link(found: re.Match[str], source: str) -> str:
    mark, text, goal = found.groups()
    path, hash_mark, anchor = goal.partition("#")
    if not path or "://" in path:
        return found.group()
    full = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    pages = {file: page for page, file in PAGES.items()}
    if full in pages:
        return f"{mark}[{text}]({pages[full]}{hash_mark}{anchor})"
    if full.startswith("docs/"):
        return f"{mark}[{text}]({full[5:]}{hash_mark}{anchor})"
    if full.startswith("examples/gallery/"):
        return f"{mark}[{text}]({full[9:]})"
    if full == "README.md":
        return f"[{text}](index.md)"
    if not (ROOT / full).exists():
        raise ValueError(f"{source} links to {goal}, which does not exist")
    return f"`{full}`" if full.endswith(text.strip("`")) else f"{text} (`{full}`)"
