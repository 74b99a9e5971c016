"""Whatever a forward pass reads or writes behaves as without the library: numbers in attributes of
any type, globals, class attributes, replaced code, counters, attributes that forward sets."""

from __future__ import annotations

import collections
import enum
import functools
import os
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import doubleback as db
from support.stock import assert_close, assert_same_state, numbers, pair, same_training

np = pytest.importorskip("numpy")

SCHEDULE = (1.0, 1.0, 1.0, 2.5, 2.5, 0.5)  # a change when the flat replay runs, and another one


class Scaled(nn.Module):
    """tanh of a scaled layer; a subclass says where the scale comes from."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        with torch.no_grad():
            for t in self.parameters():
                t.copy_(0.5 * torch.randn(t.shape, generator=generator))
        self.begin()

    def begin(self) -> None:
        pass

    def scale(self):
        raise NotImplementedError

    def change(self, value: float) -> None:
        raise NotImplementedError

    def forward(self, x):
        return self.last(torch.tanh(self.scale() * self.first(x)))


class Number(Scaled):
    def begin(self):
        self.alpha = 1.0

    def scale(self):
        return self.alpha

    def change(self, value):
        self.alpha = value


class Float32(Number):
    def change(self, value):
        self.alpha = np.float32(value)


class Float64(Number):
    def change(self, value):
        self.alpha = np.linspace(value, 10.0, 3)[0]
        assert type(self.alpha) is np.float64


class Kind(enum.Enum):
    ONE = "one"
    MORE = "more"
    LESS = "less"


class Enumerated(Scaled):
    def begin(self):
        self.kind = Kind.ONE

    def scale(self):
        return {Kind.ONE: 1.0, Kind.MORE: 2.5, Kind.LESS: 0.5}[self.kind]

    def change(self, value):
        self.kind = {1.0: Kind.ONE, 2.5: Kind.MORE, 0.5: Kind.LESS}[value]


class Partial(Scaled):
    def begin(self):
        self.scaling = functools.partial(pow, 1.0)

    def scale(self):
        return self.scaling(1)

    def change(self, value):
        self.scaling = functools.partial(pow, value)


class Config:
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha


class PlainObject(Scaled):
    def begin(self):
        self.config = Config(1.0)

    def scale(self):
        return self.config.alpha

    def change(self, value):
        self.config.alpha = value


class Slots:
    __slots__ = ("alpha",)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha


class SlottedObject(PlainObject):
    def begin(self):
        self.config = Slots(1.0)


class EnumeratedInSlots(Enumerated):
    """Where nobody would look for an Enum."""

    def begin(self):
        self.config = Slots(1.0)

    kind = property(
        lambda self: self.config.alpha, lambda self, value: setattr(self.config, "alpha", value)
    )


class EnumeratedInAFunction(Scaled):
    def begin(self):
        self.change(1.0)

    def scale(self):
        return self.look()

    def change(self, value):
        kind = {1.0: Kind.ONE, 2.5: Kind.MORE, 0.5: Kind.LESS}[value]
        self.look = lambda: {Kind.ONE: 1.0, Kind.MORE: 2.5, Kind.LESS: 0.5}[kind]


def same() -> None: ...


def more() -> None: ...


def less() -> None: ...


RAISING, LOWERING = {more, Slots}, {less, Config}


class FunctionInASet(Scaled):
    kinds = (same, more, less)

    def begin(self):
        self.change(1.0)

    def scale(self):
        return 2.5 if self.kind in RAISING else 0.5 if self.kind in LOWERING else 1.0

    def change(self, value):
        self.kind = self.kinds[(1.0, 2.5, 0.5).index(value)]


class ClassInASet(FunctionInASet):
    kinds = (Kind, Slots, Config)


class NestedConfig(Scaled):
    """A class used as a record inside another one, as configurations often are."""

    def begin(self):
        inner = type("model", (), {"alpha": 1.0})
        self.config = type("config", (), {"model": inner})

    def scale(self):
        return self.config.model.alpha

    def change(self, value):
        self.config.model.alpha = value


class Ordered(Scaled):
    def begin(self):
        self.settings = collections.OrderedDict(alpha=1.0)

    def scale(self):
        return self.settings["alpha"]

    def change(self, value):
        self.settings["alpha"] = value


class Defaulting(Ordered):
    def begin(self):
        self.settings = collections.defaultdict(float, alpha=1.0)


class InSet(Scaled):
    def begin(self):
        self.switches: set = set()

    def scale(self):
        return 2.5 if "more" in self.switches else 0.5 if "less" in self.switches else 1.0

    def change(self, value):
        self.switches.clear()
        self.switches |= {"more"} if value == 2.5 else {"less"} if value == 0.5 else set()


ALPHA = 1.0
SETTINGS = {"alpha": 1.0}
args = types.SimpleNamespace(alpha=1.0)


class GlobalNumber(Scaled):
    def scale(self):
        return ALPHA

    def change(self, value):
        globals()["ALPHA"] = value


class GlobalDictionary(Scaled):
    def scale(self):
        return SETTINGS["alpha"]

    def change(self, value):
        SETTINGS["alpha"] = value


class GlobalArguments(Scaled):
    def scale(self):
        return args.alpha

    def change(self, value):
        args.alpha = value


def helper() -> float:
    return ALPHA


class GlobalBehindHelper(GlobalNumber):
    def scale(self):
        return helper()


class ClassAttribute(Scaled):
    alpha = 1.0

    def scale(self):
        return self.alpha

    def change(self, value):
        type(self).alpha = value


class KeysAsAList(Scaled):
    """A dictionary's keys are what counts."""

    def begin(self):
        self.weights = {1.0: "first"}

    def scale(self):
        return list(self.weights)[-1]

    def change(self, value):
        self.weights.clear()
        self.weights[value] = "first"


class KeysInPlace(KeysAsAList):
    def scale(self):
        return [*self.weights][-1]


class KeysOfACopy(KeysAsAList):
    """The same keys, in another order."""

    def scale(self):
        return sum(10**-i * k for i, k in enumerate({**self.weights.copy()}))

    def change(self, value):
        self.weights = {value: 0} | dict.fromkeys((0.5, 1.0, 2.5))


class KeysAsATuple(KeysOfACopy):
    def scale(self):
        return tuple(self.weights)[-1]


class Environment(Scaled):
    def scale(self):
        return float(os.getenv("DOUBLEBACK_TEST_SCALE", "1.0"))

    def change(self, value):
        os.environ["DOUBLEBACK_TEST_SCALE"] = str(value)


class ListInside(Scaled):
    """Never captured wrongly, here as a control of the test itself."""

    def begin(self):
        self.values = [[1.0]]

    def scale(self):
        return self.values[0][0]

    def change(self, value):
        self.values[0][0] = value


STATES = (
    Number, Float32, Float64, Enumerated, EnumeratedInSlots, EnumeratedInAFunction, FunctionInASet,
    ClassInASet, Partial, PlainObject, SlottedObject, NestedConfig, Ordered, Defaulting, InSet,
    GlobalNumber, GlobalDictionary, GlobalArguments, GlobalBehindHelper, ClassAttribute,
    KeysAsAList, KeysInPlace, KeysOfACopy, KeysAsATuple, Environment, ListInside,
)  # fmt: skip


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", STATES)
def test_numbers_that_forward_reads(kind, how, monkeypatch):
    monkeypatch.setenv("DOUBLEBACK_TEST_SCALE", "1.0")  # and set back behind the test
    net = kind()
    net.change(1.0)
    model, twin = pair(net)
    if kind is NestedConfig:  # classes are not copied
        twin.begin()
    same_training(model, twin, change=lambda net, i: net.change(SCHEDULE[i]), how=how)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_schedule_of_numpy_numbers(how):
    """`for net.alpha in np.linspace(…)`: another number in every step."""
    model, twin = pair(Number())
    values = np.linspace(0.5, 1.5, 6)

    def change(net, i):
        net.alpha = values[i]

    same_training(model, twin, change=change, how=how)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_replaced_class_forward(how, monkeypatch):
    class Own(Number):
        pass

    def forward(self, x):
        return self.last(torch.sigmoid(self.first(x)))

    model, twin = pair(Own())

    def change(net, i):
        if i == 3:
            monkeypatch.setattr(Own, "forward", forward)

    same_training(model, twin, change=change, how=how)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_swapped_class(how):
    def layers():
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

    model, twin = pair(layers())

    def change(net, i):
        if i == 3:
            net[1].__class__ = nn.Sigmoid

    same_training(model, twin, change=change, how=how)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_global_forward_hook(how):
    model, twin = pair(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)))
    handles = []

    def double(module, given, out):
        return 2 * out if isinstance(module, nn.Tanh) else None

    def change(net, i):
        if i == 3 and not handles:
            handles.append(nn.modules.module.register_module_forward_hook(double))

    try:
        same_training(model, twin, change=change, how=how)
    finally:
        for handle in handles:
            handle.remove()


class Counting(Scaled):
    """Warms up: the scale grows with the number of calls."""

    def begin(self):
        self.calls = 0

    def scale(self):
        self.calls += 1
        return 1.0 + 0.25 * self.calls


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_a_counter_that_forward_advances(how):
    model, twin = pair(Counting())
    same_training(model, twin, effects=lambda net: net.calls, how=how)


class Logging(Scaled):
    """Appends to a list and fills a dictionary."""

    def begin(self):
        self.log = []
        self.seen = {}

    def scale(self):
        self.log.append(len(self.log))
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        return 1.0

    def change(self, value):
        pass


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_lists_and_dictionaries_that_forward_fills(how):
    model, twin = pair(Logging())
    same_training(model, twin, effects=lambda net: (list(net.log), dict(net.seen)), how=how)


class Remembering(Scaled):
    """Keeps features and an auxiliary loss as attributes, as many networks do."""

    def forward(self, x):
        self.output = torch.tanh(self.first(x))
        self.auxiliary = self.output.square().mean()
        return self.last(self.output)


@pytest.mark.parametrize("name", ["output", "auxiliary"])
@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_attributes_that_forward_sets(how, name):
    model, twin = pair(Remembering())
    same_training(model, twin, effects=lambda net: getattr(net, name).detach(), how=how)


def test_a_loss_of_an_attribute_that_forward_sets():
    """out and penalty are trained together with net.auxiliary, which has a gradient of its own."""
    model, twin = pair(Remembering())
    for i in range(5):
        x = numbers(i, 4, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", db.CaptureWarning)
            out, penalty = model(x)
        model.zero_grad()
        (out.sum() + penalty + 3 * model.net.auxiliary).backward()
        leaf = x.clone().requires_grad_()
        out = twin(leaf)
        (xi,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        twin.zero_grad()
        (out.sum() + xi.square().sum(1).mean() + 3 * twin.auxiliary).backward()
        assert_same_state(model.net, twin, f"step {i}")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last = nn.Linear(5, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("how", ["backward", "accumulate"])
@pytest.mark.parametrize("tied_first", [True, False])
def test_weights_untied_and_tied_after_the_first_call(how, tied_first):
    model, twin = pair(Tied())

    def change(net, i):
        if (i == 3) is tied_first and i in (0, 3):
            net.second.weight = nn.Parameter(numbers(9, 5, 5))
        elif i == 3:
            net.second.weight = net.first.weight

    same_training(model, twin, change=change, how=how)


@pytest.mark.parametrize("how", ["backward", "accumulate"])
def test_modules_exchanged_and_added(how):
    model, twin = pair(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)))

    def change(net, i):
        if i == 3:
            net[1] = nn.Softplus()
        if i == 4:
            torch.manual_seed(5)
            net.append(nn.Linear(1, 1).double())

    same_training(model, twin, change=change, how=how)


class Branching(Scaled):
    """A Python switch that another part of the program throws."""

    def begin(self):
        self.switch = {"on": False}

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.sigmoid(h) if self.switch["on"] else torch.tanh(h))


def test_a_switch_in_a_dictionary():
    model, twin = pair(Branching())
    same_training(model, twin, change=lambda net, i: net.switch.update(on=i == 3))


def test_output_equals_the_network_now():
    """Without gradients too: evaluation after training sees what training changed."""
    model, _ = pair(Float64())
    x = numbers(0, 4, 5)
    for i, value in enumerate(SCHEDULE):
        model.net.change(value)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", db.CaptureWarning)
            out, _ = model(x)
            assert_close(out, model.net(x), f"step {i}")


class Mode:
    """Told apart by what it is, not by what it holds."""


FAST, SLOW, IDLE = Mode(), Mode(), Mode()
MODES, BY_MODE = [FAST, IDLE], {FAST: 2.5}
QUESTIONS = {
    "is": lambda mode: 2.5 if mode is FAST else 1.0,
    "is not": lambda mode: 1.0 if mode is not FAST else 2.5,
    "equals": lambda mode: 2.5 if mode == FAST else 1.0,
    "differs": lambda mode: 1.0 if mode != FAST else 2.5,
    "in a list": lambda mode: 2.5 if mode in MODES else 1.0,
    "in a tuple": lambda mode: 2.5 if mode in (IDLE, FAST) else 1.0,
    "a key": lambda mode: 2.5 if mode in BY_MODE else 1.0,
    "got by a key": lambda mode: BY_MODE.get(mode, 1.0),
    "in a set": lambda mode: 2.5 if mode in SOME else 1.0,
}
SOME = {FAST, IDLE}


class Told(Scaled):
    def __init__(self, question: str) -> None:
        super().__init__()
        self.question, self.mode = QUESTIONS[question], SLOW

    def scale(self):
        return self.question(self.mode)


@pytest.mark.parametrize("how", ["sweeps", "region"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_objects_that_are_told_apart_by_identity(question, how):
    """The graph of one object is not taken for another, whichever was there last."""
    net, x = Told(question), torch.randn(3, 5)
    if how == "sweeps":
        model = db.Penalised(net, db.OutputGradient(0), strict=True)
        run = lambda x: model(x)[0]  # noqa: E731
    else:
        run = torch.compile(net, backend="doubleback", options={"compiler": "eager"})
    for mode in (FAST, SLOW, FAST, IDLE, SLOW, IDLE, FAST):
        net.mode = mode
        torch.testing.assert_close(run(x), net(x))


class Plain:
    """An object with whatever attributes it is given."""

    alpha: Any
    inner: Any

    def __init__(self, **attributes) -> None:
        vars(self).update(attributes)

    def scale(self):
        return 1.0


class Heir(Plain):
    pass


class Passing(Plain):
    """Hands what it has not on to another object, as wrappers do."""

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Written(Plain):
    def __repr__(self) -> str:
        return str(self.alpha)


class Equal(Plain):
    def __eq__(self, other) -> bool:
        return self.alpha == other.alpha

    def __hash__(self) -> int:
        return 7


class Slot:
    __slots__ = ("alpha",)


class Heading:
    pass


MODULE = types.ModuleType("settings")


def helped():
    return 1.0


def attempted(look, missing):
    """As look(net), and 1 where there is nothing."""

    def ask(net):
        try:
            return look(net)
        except missing:
            return 1.0

    return ask


def named(holder, value):
    """Only numbers other than 1 are entered."""
    vars(holder).pop("alpha", None)
    if value != 1.0:
        holder.alpha = value


def renamed(holder, value):  # a class's or function's, or one in a slot
    if hasattr(holder, "alpha"):
        del holder.alpha
    if value != 1.0:
        holder.alpha = value


def keyed(table, value):
    table.pop("alpha", None)
    if value != 1.0:
        table["alpha"] = value


def bound(value):
    return {1.0: lambda self: 1.0, 2.5: lambda self: 2.5, 0.5: lambda self: 0.5}[value]


def methods(kind):
    def change(net, value):
        kind.scale = bound(value)

    return change


def inherited(net, value):
    if "scale" in vars(Heir):
        del Heir.scale
    if value != 1.0:
        Heir.scale = bound(value)


def wrapped(net, value):
    vars(net.held).pop("alpha", None)
    if value != 1.0:
        vars(net.held)["alpha"] = value


def length(net, value):
    vars(net.held).clear()
    vars(net.held).update({str(i): None for i in range(int(2 * value))})


# What a network holds, what its scale is, and how that changes: all of it goes unnoticed by Dynamo
UNNOTICED: dict[str, tuple] = {
    "a missing key": (
        dict, attempted(lambda net: net.held["alpha"], KeyError), lambda n, v: keyed(n.held, v)),
    "a missing key of an ordered dictionary": (
        collections.OrderedDict, attempted(lambda net: net.held["alpha"], KeyError),
        lambda n, v: keyed(n.held, v)),
    "a missing variable": (
        dict, lambda net: 2.5 if "alpha" in os.environ else 1.0,
        lambda n, v: keyed(os.environ, v if v == 1.0 else "set")),
    "a missing attribute": (
        Plain, attempted(lambda net: net.held.alpha, AttributeError),
        lambda n, v: named(n.held, v)),
    "a missing attribute of the network": (
        Plain, attempted(lambda net: net.alpha, AttributeError), named),
    "a missing attribute of a class": (
        Heading, attempted(lambda net: net.held.alpha, AttributeError),
        lambda n, v: renamed(Heading, v)),
    "a missing attribute in a slot": (
        Slot, attempted(lambda net: net.held.alpha, AttributeError),
        lambda n, v: renamed(n.held, v)),
    "a missing attribute of a module": (
        dict, lambda net: getattr(MODULE, "alpha", 1.0), lambda n, v: named(MODULE, v)),
    "a missing attribute of a function": (
        dict, lambda net: getattr(helped, "alpha", 1.0), lambda n, v: named(helped, v)),
    "a missing attribute of a tensor": (
        lambda: torch.ones(1), attempted(lambda net: net.held.alpha, AttributeError),
        lambda n, v: named(n.held, v)),
    "an attribute passed on": (
        lambda: Passing(inner=Plain(alpha=1.0)), lambda net: net.held.alpha, wrapped),
    "names": (Plain, lambda net: float(len(vars(net.held))), length),
    "no name": (
        Plain, lambda net: vars(net.held).get("alpha", 1.0), lambda n, v: named(n.held, v)),
    "a name in the network": (
        Plain, lambda net: 2.5 if "alpha" in net.__dict__ else 1.0, named),
    "a method": (Plain, lambda net: net.held.scale(), methods(Plain)),
    "an inherited method": (Heir, lambda net: net.held.scale(), methods(Plain)),
    "a method that is overridden": (Heir, lambda net: net.held.scale(), inherited),
    "what is written for an object": (
        lambda: Written(alpha=1.0), lambda net: float(str(net.held)),
        lambda n, v: setattr(n.held, "alpha", v)),
    "equal keys": (
        lambda: Equal(alpha=1.0), lambda net: {Equal(alpha=2.5): 2.5}.get(net.held, 1.0),
        lambda n, v: setattr(n.held, "alpha", v)),
    "whose method": (
        lambda: [Plain(), Plain(), Plain()],
        lambda net: 2.5 if net.which == net.held[1].scale else 1.0,
        lambda n, v: setattr(n, "which", n.held[int(v)].scale)),
    "one parameter": (
        lambda: nn.ParameterList([torch.ones(1), torch.ones(1)]),
        lambda net: 2.5 if net.which is net.held[1] else 1.0,
        lambda n, v: setattr(n, "which", n.held[int(v == 2.5)]),
    ),
    "infinity": (
        list, lambda net: 1.0 if net.which == float("inf") else 2.5,
        lambda n, v: setattr(n, "which", float("inf") if v == 1.0 else v)),
    "a list of open numbers": (
        list, lambda net: 2.5 if 5 in net.held else 1.0,
        lambda n, v: n.held.__setitem__(slice(None), [int(2 * v)])),
    "a float of NumPy's": (
        list, lambda net: 1.0 if isinstance(net.which, float) else 2.5,
        lambda n, v: setattr(n, "which", np.float64(v) if v == 1.0 else 3)),
}  # fmt: skip


class Unnoticed(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        make, self.ask, self.change_to = UNNOTICED[case]
        self.held = make()

    def forward(self, x):
        return x * self.ask(self)


@pytest.mark.parametrize("case", UNNOTICED)
def test_what_dynamo_leaves_unguarded(case):
    """Out of a cache of graphs, whichever came first, comes the one of the network as it is now."""
    net, x = Unnoticed(case), torch.randn(3, 1)
    model = db.Penalised(net, db.OutputGradient(0))
    kept = Plain.scale
    try:
        for value in (1.0, 0.5, 2.5, 1.0, 2.5):
            net.change_to(net, value)
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore", db.CaptureWarning)
                torch.testing.assert_close(model(x)[0], net(x))
    finally:
        net.change_to(net, 1.0)
        Plain.scale = kept
