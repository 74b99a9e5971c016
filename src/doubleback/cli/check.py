"""``doubleback check``: the gradients of one model against autograd's, in float64."""

from __future__ import annotations

import argparse
import json

import doubleback as db
from doubleback.cli.target import build


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 0 when every gradient agrees, 1 when one does not."""
    model, inputs = build(arguments)
    try:
        report = db.check(model, *inputs)
    except db.CheckError as error:
        if arguments.json and isinstance(error.report, db.CheckReport):
            print(json.dumps(error.report.as_dict(), indent=2))
        else:
            print(error)
        return 1
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0
