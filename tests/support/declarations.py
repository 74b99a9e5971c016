"""What every rule declares at every sample of its operator, and for operators without a sample.

    python tests/support/declarations.py     # writes declarations.txt anew

The planner trusts these: a short cut that is no longer declared is lost without a wrong number, so
that no comparison with autograd notices. A line of the file is

    operator: structure, what it is | reads | curves | examples apart | forms

what it is: layer, light, diagonal, same entries, seeded (how many seeds at once are run); reads:
per input, whether its value is read when all are differentiated, and "y" for the output; curves:
whether s_i depends on q_j, row by row; examples apart: if the first input alone moves, and if all
do; forms: how many other forms the rule has for the call.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    ROOT = Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from doubleback.check.operators import _Sample
from doubleback.rules import Rule, find_rule, registered
from doubleback.rules.table import overload
from support.samples import SAMPLES, WRT

FILE = Path(__file__).with_name("declarations.txt")
MOST = 3  # samples of one operator


def lines() -> list[str]:
    found = []
    for op in sorted(registered(), key=str):
        name = str(op).removeprefix("aten.")
        name = name if "." in name else f"{name}.default"
        rule = find_rule(op)
        samples = SAMPLES.get(name, ())[:MOST] if overload(name) is op else ()
        for make in samples:
            args, kwargs = make()
            found.append(f"{op}: {_at(rule, sample_of(op, args, kwargs, rule, WRT.get(name)))}")
        if not samples:
            found.append(f"{op}: {_kind(rule)}")
    return found


def sample_of(op, args: tuple, kwargs: dict, rule: Rule, wrt=None) -> _Sample:
    """One call of the operator, with what its rule's forward saved."""
    return _Sample(op, args, kwargs, rule, wrt, 0)


def _kind(rule: Rule) -> str:
    words = ("layer", "light", "diagonal", "same_entries", "own")
    said = [word.replace("_", " ") for word in words if getattr(rule, word)]
    if rule.layer:
        said[0] = f"layer {rule.layer}"
    if rule.seeded is not None:
        said.append(f"seeded by {rule.seeded.name}")
    return ", ".join([rule.structure.value, *said])


def _at(rule: Rule, sample: _Sample) -> str:
    call, count = sample.call, len(sample.inputs)
    every = [meta.differentiable for meta in call.metas]
    first = [i == every.index(True) if True in every else False for i in range(count)]
    reads = rule.reads_inputs(every) if rule.reads_inputs else ["inputs" in rule.reads] * count
    curves = " ".join(_bits(rule.curves(i, j) for j in range(count)) for i in range(count))
    apart = [rule.separates(call, moving) for moving in (first, every)]
    read = _bits(reads) + ("y" if "output" in rule.reads else "")
    return (
        f"{_kind(rule)} | {read} | {curves} | {_bits(apart)} | {len(list(rule.forms(call.node)))}"
    )


def _bits(flags) -> str:
    return "".join("1" if flag else "0" for flag in flags)


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
