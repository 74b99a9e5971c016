"""README.md as the description of the package, by hatchling when it builds one.

A package index shows the text alone, without the files beside it. Links into the repository become
absolute where `[project.urls]` has a Repository; as long as it has none, their words stay and the
links go, as does a picture for its description.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def description(text: str, repository: str | None = None) -> str:
    """The text with links that lead somewhere on any page; code stays as it is.

    >>> description("[the guide](docs/index.md), ![prices](prices.svg), [paper](https://a.org)")
    'the guide, *prices*, [paper](https://a.org)'
    >>> description("[the guide](docs/index.md)", "https://b.org/c/")
    '[the guide](https://b.org/c/blob/HEAD/docs/index.md)'
    """

    def lead(match: re.Match) -> str:
        picture, words, path = match.groups()
        if repository is None:
            return f"*{words}*" if picture else words
        folder = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{folder}/HEAD/{path})"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(lead, text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, LINK.sub(lead, text[end:])])


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        found = description(text, metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": found}
