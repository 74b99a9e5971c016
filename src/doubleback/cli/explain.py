"""``doubleback explain``: the plan for one model, without running its penalty."""

from __future__ import annotations

import argparse
import json

from doubleback.cli.target import build


def run(arguments: argparse.Namespace) -> int:
    """Print the plan as text or JSON."""
    model, inputs = build(arguments)
    plan = model.explain(*inputs)
    print(json.dumps(plan.as_dict(), indent=2) if arguments.json else plan)
    return 0
