"""Run examples in their default size and write the gallery: `python -m examples [NAME …]`.

The README beside this file is made from the pictures and records under gallery/, those of this run
and those of earlier ones.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
GALLERY = HERE / "gallery"
NAMES = (
    "contractive_autoencoder",
    "few_examples",
    "hamiltonian",
    "robustness",
    "signed_distance",
    "sobolev",
    "flow",
    "force_field",
    "physics",
    "gan",
    "inverse_problem",
    "right_reasons",
)

INTRODUCTION = """# Examples

What training with derivatives in the loss is for: one folder each, one short script each. They \
run from the repository with `pip install -e '.[examples]'`, take under two minutes on two cores, \
and have `--full` (larger, more seeds), `--seed`, `--device` and `--out`. `robustness`, \
`contractive_autoencoder`, `few_examples` and `right_reasons` take `--data mnist-idx:FOLDER`, \
which takes longer. What the literature claims is tested, and where it is not seen the page says so.

`make examples` runs all of them and writes this page from the records under `gallery/`.
"""


def sentence(name: str) -> str:
    """The script's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse((HERE / name / "__main__.py").read_text())) or ""
    return " ".join(docstring.split())


def section(name: str) -> str:
    """The default run, and below it others of which there is a record."""
    found = [f"## {name}\n\n{sentence(name)}\n\n{_told(name, name)}"]
    others = {"full": ", the full size", "mnist": " on MNIST", "race": ": the race",
              "race-mnist": ": the race on MNIST"}  # fmt: skip
    for more, words in others.items():
        path = GALLERY / f"{name}-{more}.json"
        if path.is_file():
            settings = json.loads(path.read_text())["settings"]
            images = " --data mnist-idx:FOLDER" if more.endswith("mnist") else ""
            command = f"{name}{images}{_options(settings)}"
            found.append(f"### {name}{words}\n\n{_told(path.stem, command)}")
    return "\n".join(found)


def _options(settings: dict) -> str:
    """What was given beside the default, as it would be typed."""
    given = {k: v for k, v in settings.items() if k not in ("data", "full")}
    given = {k: v for k, v in given.items() if v not in (None, 0, "cpu")}
    full = " --full" if settings["full"] else ""
    usual = [settings["seed"] + i for i in range(5 if full else 1)]
    if given.get("seeds") == usual:  # as without the option
        del given["seeds"]
    words = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in given.items()}
    return full + "".join(f" --{key} {value}" for key, value in words.items())


def _told(name: str, command: str) -> str:
    record = json.loads((GALLERY / f"{name}.json").read_text())
    lines = [f"![{record['title']}](gallery/{name}.png)", "", f"{record['title']}.", ""]
    for table in (record, *record.get("further", ())):
        lines += [
            _row(table["columns"]),
            "| --- |" + " ---: |" * (len(table["columns"]) - 1),
            *map(_row, table["rows"]),
            "",
        ]
    for claim in record["claims"]:
        lines.append(f"- {'Seen' if claim['seen'] else '**Not seen**'}: {claim['text']}.")
    lines += [f"- {note}." for note in record["notes"]]
    if took := record.get("seconds"):
        lines.append(f"- the run took {took['processor']} s of the processor's time.")
    return "\n".join([*lines, "", "```bash", f"python -m examples.{command}", "```", ""])


def _row(cells: list[str]) -> str:
    """Bars within a cell, as of |x|, end none."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--page-only", action="store_true", help="write the page, run nothing")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        parser.error(f"no such example: {', '.join(unknown)} (there are {', '.join(NAMES)})")
    for name in () if arguments.page_only else arguments.names or NAMES:
        command = [sys.executable, "-m", f"examples.{name}", "--out", str(GALLERY)]
        status = subprocess.run(command, cwd=HERE.parent, check=False).returncode
        if status:
            return status
    made = [name for name in NAMES if (GALLERY / f"{name}.json").is_file()]
    (HERE / "README.md").write_text("\n".join([INTRODUCTION, *map(section, made)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
