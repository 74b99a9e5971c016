"""The plan of a model's call, for tests that look at what is kept, renewed or laid out how."""

from doubleback.penalised import program_of


def plan_of(model, *args):
    return program_of(model, *args)[0].plan


def leaves_of(model, *args):
    """What the sweeps of such a call start from, by value number."""
    return program_of(model, *args)[1]
