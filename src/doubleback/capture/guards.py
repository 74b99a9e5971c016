"""What Dynamo is to guard.

A graph of Dynamo's is used again where its guards say that what was read is as it was. `teach` adds
guards that Dynamo lacks, and has it refuse what it would answer wrongly: for the graphs of this
library alone, what others compile is read as before. Each `_guard_…` below mends one such gap, by a
change to Dynamo's own classes, and says which.

`Surroundings` is what a forward pass reads and no guard covers, as a key that is compared at each
call. Dynamo takes classes to be finished: a method that is replaced on a class later, or a hook for
all modules, goes unnoticed. Each of these is rare, few in number and quick to compare. Older
versions of PyTorch also miss a module whose class is swapped, and numbers of a class that serves as
a record.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from .. import _torch

# ----------------------------------------------------------------------------------------- taught


class _Capturing(threading.local):
    """now: whether one of the library's calls, in this thread, has come to a capture."""

    now = False


capturing = _Capturing()
_taught: list[bool] = []


def teach() -> bool:
    """Teach Dynamo, once, what it gets wrong; whether it had not been taught. What others compile
    it reads as before."""
    if _taught:
        return False
    _taught.append(True)
    _guard_one_object()
    _guard_keys()
    _guard_order()
    _guard_two_objects()
    _guard_what_is_missing()
    _guard_names()
    _guard_methods()
    _guard_numbers()
    _refuse_own_answers()
    _guard_leaves()
    _torch.BuiltinVariable.call_function_handler_cache.clear()  # which knows what was there before
    # Dynamo guards nothing that the standard library reads, such as the environment in os.getenv
    of_the_library = _torch.symbolic_convert.is_stdlib
    _torch.symbolic_convert.is_stdlib = lambda module: (
        of_the_library(module) and not (module is os and _is_ours())
    )
    # of a `random.Random` it keeps the numbers that it draws while it reads
    known = _torch.RandomVariable.is_supported_random_obj
    _torch.RandomVariable.is_supported_random_obj = staticmethod(
        lambda item: known(item) and not _is_ours()
    )
    _forget_tangents_of_views()
    _time_no_guards()
    return True


def _is_ours() -> bool:
    """Whether Dynamo reads code for one of this library's graphs."""
    try:
        receiver: Any = _torch.InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # it reads nothing
        return False
    for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
        receiver = getattr(receiver, name, receiver)
    return str(getattr(receiver, "__module__", "")).startswith("doubleback.")


def _install(guard: Any) -> None:
    if _is_ours():
        _torch.install_guard(guard)


def _guard_one_object() -> None:
    """Where one object has two names, Dynamo guards that both stay names of one object, but not if
    one name is local and the other global: a module's Enum that a dictionary is looked up with."""
    original = _torch.dynamo_builder.make_dupe_guard

    def make_dupe_guard(source: Any, other: Any) -> Any:
        guard = original(source, other)
        if guard is None and other is not None and other != source and _is_ours():
            guard = functools.partial(_torch.GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return guard

    _torch.dynamo_builder.make_dupe_guard = make_dupe_guard


def _guard_keys() -> None:
    """Dynamo guards no function or class that is looked for in a set or dictionary and not
    called."""
    lazy = _torch.LazyVariableTracker
    name = "is_hashable" if _torch.before(2, 13) else "is_hashable_lazy"
    unguarded = getattr(lazy, name)

    def is_a_key(self: Any) -> bool:
        """Only what is a key already, and guarded with its dictionary, is left at that. Functions
        in C, as a default device looks for them, have no other way to be a key: they are guarded
        here."""
        source = self.original_source()
        if not _is_ours():
            return unguarded(self)
        if isinstance(self.original_value(), BuiltinFunctionType) and source is not None:
            _torch.install_guard(source.make_guard(_torch.GuardBuilder.ID_MATCH))
            return unguarded(self)
        return isinstance(source, _torch.ConstDictKeySource) and unguarded(self)

    setattr(lazy, name, is_a_key)


def _guard_order() -> None:
    """Where a dictionary becomes a list or is copied, Dynamo guards its length, but not which keys
    come in which order."""
    guard_keys = _torch.ConstDictVariable.install_dict_keys_match_guard

    def guard_keys_in_order(self: Any) -> None:
        guard_keys(self)
        if self.source and _is_ours():
            tracer = _torch.InstructionTranslator.current_tx()
            tracer.output.guard_on_key_order.add(self.source)

    _torch.ConstDictVariable.install_dict_keys_match_guard = guard_keys_in_order
    call_list = _torch.ListVariable.call_method

    def call_guarded(self: Any, tracer: Any, name: str, args: list, kwargs: dict) -> Any:
        keys = name == "extend" and args and isinstance(args[0], _torch.ConstDictVariable)
        if keys and _is_ours():
            args[0].install_dict_keys_match_guard()
        return call_list(self, tracer, name, args, kwargs)

    _torch.ListVariable.call_method = call_guarded


def _guard_two_objects() -> None:
    """Where two objects are compared by identity, Dynamo does not guard that they stay two."""
    if _torch.before(2, 13):
        kind, handlers = _torch.BuiltinVariable, _torch.symbolic_convert.compare_op_handlers

        def noted(call: Callable) -> Callable:
            def compare(*given: Any) -> Any:
                result = call(*given)
                args = given[-2]
                if len(args) == 2:
                    _stay_two(*args)
                return result

            return compare

        for sign in ("is", "is not", "==", "!="):
            handlers[sign] = noted(handlers[sign])
        call_builtin = kind.call_function

        def call_function(self: Any, *given: Any) -> Any:
            compares = self.fn in (operator.is_, operator.is_not, operator.eq, operator.ne)
            return (noted(call_builtin) if compares else call_builtin)(self, *given)

        kind.call_function = call_function
    else:
        original = _torch.object_protocol.vt_identity_compare

        def compared(left: Any, right: Any) -> Any:
            result = original(left, right)
            _stay_two(left, right)
            return result

        for module in (_torch.object_protocol, _torch.dynamo_builtin):
            module.vt_identity_compare = compared
    compare_tensors = _torch.BuiltinVariable._comparison_with_tensor

    def compare_tensors_noted(self: Any, tracer: Any, left: Any, right: Any) -> Any:
        if self.fn in (operator.is_, operator.is_not):
            _stay_two(left, right)
        return compare_tensors(self, tracer, left, right)

    _torch.BuiltinVariable._comparison_with_tensor = compare_tensors_noted
    for kind in (_torch.ConstDictVariable, _torch.SetVariable):
        if "__contains__" in vars(kind):
            kind.__contains__ = _looked_for(kind.__contains__)


def _looked_for(contains: Callable) -> Callable:
    """Nor where an object is looked for among keys and is none of them."""

    def noted(self: Any, key: Any) -> bool:
        is_there = contains(self, key)
        key = _torch.LazyVariableTracker.realize_all(key)
        if not is_there and isinstance(key, _torch.UserDefinedObjectVariable):
            for other in list(self.items):
                _stay_two(getattr(other, "vt", None), key)
        return is_there

    return noted


def _stay_two(left: Any, right: Any) -> None:
    """What was decided for two objects holds no more once both names lead to one of them."""
    left, right = map(_torch.LazyVariableTracker.realize_all, (left, right))
    if left is not right and _is_method(left) and _is_method(right):
        _refuse("two bound methods are compared, of which Dynamo does not ask whose they are")
    for kind, held in (
        (_torch.UserDefinedObjectVariable, "value"),
        (_torch.TensorVariable, "proxy"),
    ):
        if not (isinstance(left, kind) and isinstance(right, kind)):
            continue
        apart = getattr(left, held) is not getattr(right, held)
        if apart and left.source is not None and right.source is not None:
            differ = functools.partial(_differ, other=right.source)
            _install(left.source.make_guard(differ))


def _is_method(variable: Any) -> bool:
    if isinstance(variable, _torch.UserDefinedObjectVariable):
        return isinstance(variable.value, MethodType)
    return isinstance(variable, _torch.dynamo_variables.UserMethodVariable)


def _differ(builder: Any, guard: Any, other: Any) -> None:
    code = f"{builder.arg_ref(guard)} is not {builder.arg_ref(other.name)}"
    builder.add_python_lambda_leaf_guard_to_root([code], [code])


def _refuse(why: str) -> None:
    """End the graph here, as Dynamo does where it knows no further."""
    if _is_ours():
        _torch.dynamo_exc.unimplemented(gb_type=why, context="", explanation=why, hints=[])


def _guard_what_is_missing() -> None:
    """Of an attribute or a key that is looked for and missing it does not guard that it stays
    missing, nor for modules and functions whether they have one."""
    newer = not _torch.before(2, 13)
    holder: Any = _torch.dynamo_builtin.GetAttrBuiltinVariable if newer else _torch.BuiltinVariable
    name = "_call_getattr" if newer else "call_getattr"
    get = getattr(holder, name)

    def get_noted(self: Any, tracer: Any, *given: Any) -> Any:
        try:
            return get(self, tracer, *given)
        except _torch.dynamo_exc.ObservedAttributeError:
            of, attribute = (given[0] if newer else given)[:2]
            _guard_attribute(of, attribute.as_python_constant())
            raise

    setattr(holder, name, get_noted)
    variables = _torch.dynamo_variables
    for kind in (variables.PythonModuleVariable, *variables.UserFunctionVariable.__mro__):
        if "call_obj_hasattr" in vars(kind) and kind is not variables.VariableTracker:
            kind.call_obj_hasattr = _noted_question(kind.call_obj_hasattr)

    getitem = _torch.ConstDictVariable.getitem_const_raise_exception_if_absent

    def getitem_noted(self: Any, tracer: Any, key: Any) -> Any:
        if _is_ours() and key not in self:
            self.install_dict_contains_guard(tracer, [key])
        return getitem(self, tracer, key)

    _torch.ConstDictVariable.getitem_const_raise_exception_if_absent = getitem_noted


def _noted_question(ask: Callable) -> Callable:
    def noted(self: Any, tracer: Any, name: str) -> Any:
        _guard_attribute(self, name)
        return ask(self, tracer, name)

    return noted


def _guard_attribute(of: Any, name: str) -> None:
    """Whether there is one under this name."""
    of = _torch.LazyVariableTracker.realize_all(of)
    if of.source is None:
        return
    guard = _torch.GuardBuilder.HASATTR
    if _torch.before(2, 13):
        _install(_torch.AttrSource(of.source, name).make_guard(guard))
    else:
        _install(of.source.make_guard(functools.partial(guard, attr=name)))


def _guard_names() -> None:
    """Of an object's `__dict__` it guards neither which names are there nor which are not."""
    kind: Any
    if _torch.before(2, 13):
        kind = _torch.dynamo_variables.GetAttrVariable
        call = kind.call_method

        def call_method(self: Any, tracer: Any, name: str, args: list, kwargs: dict) -> Any:
            asked = name in ("__getitem__", "get", "__contains__") and args
            if asked and self.name == "__dict__" and self.obj.source is not None:
                _guard_name(self.obj.source, self.obj.value, args[0])
            return call(self, tracer, name, args, kwargs)

        kind.call_method = call_method
        return
    kind = _torch.dynamo_dicts.DunderDictVariable

    def guard_all(self: Any) -> None:
        if self.source is not None:
            _install(self.source.base.make_guard(_names_stay))

    def guard_one(self: Any, tracer: Any, args: list) -> None:
        if self.source is not None:
            held = self.items.item.get_real_python_backed_value()
            _guard_name(self.source.base, held, args[0])

    copy = kind.call_method

    def call_method(self: Any, tracer: Any, name: str, args: list, kwargs: dict) -> Any:
        if name == "copy":
            guard_all(self)
        return copy(self, tracer, name, args, kwargs)

    kind.install_dict_keys_match_guard = guard_all
    kind.install_dict_contains_guard = guard_one
    kind.call_method = call_method


_ALWAYS = ("_parameters", "_buffers", "_modules")  # of a module, whose own code asks for them


def _guard_name(source: Any, held: Any, name: Any) -> None:
    if not name.is_python_constant():
        _install(source.make_guard(_names_stay))
    elif (name := name.as_python_constant()) not in _ALWAYS:
        there = name in getattr(held, "__dict__", {})
        _install(source.make_guard(functools.partial(_name_stays, name=name, there=there)))


def _names_stay(builder: Any, guard: Any) -> None:
    code = f"[*{builder.arg_ref(guard)}.__dict__] == {[*builder.get(guard).__dict__]!r}"
    builder.add_python_lambda_leaf_guard_to_root([code], [code])


def _name_stays(builder: Any, guard: Any, name: Any, there: bool) -> None:
    code = f"({name!r} in {builder.arg_ref(guard)}.__dict__) is {there}"
    builder.add_python_lambda_leaf_guard_to_root([code], [code])


def _guard_methods() -> None:
    """Of objects that are no modules (`Surroundings` looks at those) it does not guard which
    functions their methods are; and where an attribute comes from `__getattr__`, not that the
    object has none of its own."""
    kind = _torch.UserDefinedObjectVariable
    name = "var_getattr" if _torch.before(2, 13) else "generic_getattr"
    look = getattr(kind, name)

    def looked(self: Any, tracer: Any, name: str) -> Any:
        pending = tracer.output.side_effects.has_pending_mutation_of_attr(self, name)
        if self.source is not None and not pending and _from_getattr(self.value, name):
            absent = functools.partial(_torch.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
            _install(self.source.make_guard(absent))
        found = look(self, tracer, name)
        if type(found) is _torch.dynamo_variables.UserMethodVariable and self.source is not None:
            _guard_method(self, name, found)
        return found

    setattr(kind, name, looked)


def _from_getattr(value: Any, name: str) -> bool:
    kinds = type(value).__mro__
    if not hasattr(type(value), "__getattr__") or name in getattr(value, "__dict__", (name,)):
        return False
    held = [vars(value).get(table, ()) for table in _ALWAYS if isinstance(value, nn.Module)]
    return not any(name in table for table in (*held, *map(vars, kinds)))


def _guard_method(of: Any, name: str, found: Any) -> None:
    kinds = type(of.value).__mro__
    owner = next((kind for kind in kinds if vars(kind).get(name) is found.fn), None)
    if owner and (issubclass(owner, nn.Module) or owner.__module__.startswith("torch.")):
        return
    if found.source_fn is not None:
        _install(found.source_fn.make_guard(_torch.GuardBuilder.CLOSURE_MATCH))
    if owner not in (None, kinds[0]):
        _install(of.source.make_guard(functools.partial(_inherited, name=name)))


def _inherited(builder: Any, guard: Any, name: str) -> None:
    code = f"{name!r} not in {builder.arg_ref(guard)}.__class__.__dict__"
    builder.add_python_lambda_leaf_guard_to_root([code], [code])


def _guard_numbers() -> None:
    """An open number is compared with infinity as if it never were so; and a list is said not to
    hold what its open numbers may be."""
    builder: Any = _torch.dynamo_builder.VariableBuilder
    wrap = builder.wrap_symfloat

    def wrap_finite(self: Any, value: float) -> Any:
        found = wrap(self, value)
        if not isinstance(found, _torch.ConstantVariable):
            _install(self.source.make_guard(_finite))
        return found

    builder.wrap_symfloat = wrap_finite
    contains = _torch.dynamo_lists.iter_contains
    symbol = _torch.dynamo_variables.SymNodeVariable

    def contains_numbers(items: Any, *given: Any, **options: Any) -> Any:
        if _is_ours():
            items = [
                _torch.ConstantVariable.create(x.evaluate_expr()) if isinstance(x, symbol) else x
                for x in map(_torch.LazyVariableTracker.realize_all, items)
            ]
        return contains(items, *given, **options)

    _torch.dynamo_lists.iter_contains = _torch.dynamo_utils.iter_contains = contains_numbers


def _finite(builder: Any, guard: Any) -> None:
    ref = builder.arg_ref(guard)
    code = f"{ref} - {ref} == 0"
    builder.add_python_lambda_leaf_guard_to_root([code], [code])


def _refuse_own_answers() -> None:
    """What a class answers in Python of its own, or NumPy's, and Dynamo answers in its place: which
    keys are equal, what is written for an object, whether a number is one of Python's."""
    kind = _torch.UserDefinedObjectVariable
    equal = kind.is_python_equal

    def equal_or_refused(self: Any, other: Any) -> bool:
        found = equal(self, other)
        if not found and isinstance(getattr(type(self.value), "__eq__", None), FunctionType):
            _refuse(f"keys are compared by the __eq__ of {type(self.value).__name__}")
        return found

    kind.is_python_equal = equal_or_refused
    builtin = _torch.BuiltinVariable
    write = builtin.call_str

    def write_or_refuse(self: Any, tracer: Any, arg: Any) -> Any:
        of = type(arg.value) if isinstance(arg, kind) else object
        if of.__str__ is object.__str__ and isinstance(of.__repr__, FunctionType):
            _refuse(f"str() of an object calls the __repr__ of {of.__name__}")
        return write(self, tracer, arg)

    builtin.call_str = write_or_refuse
    arrays = _torch.dynamo_variables.NumpyNdarrayVariable
    builder: Any = _torch.dynamo_builder.VariableBuilder
    wrap = builder._wrap
    scalars: WeakSet[Any] = WeakSet()  # which are arrays to Dynamo

    def wrap_noted(self: Any, value: Any) -> Any:
        found = wrap(self, value)
        if isinstance(found, arrays) and type(value).__name__ != "ndarray":
            scalars.add(found.source)
        return found

    def no_scalar(ask: Callable) -> Callable:
        def asked(self: Any, tracer: Any, arg: Any, *given: Any) -> Any:
            if getattr(arg, "source", None) in scalars:
                _refuse(
                    "an np.float64 is a float, and an array to Dynamo, of which the type is asked"
                )
            return ask(self, tracer, arg, *given)

        return asked

    builder._wrap = wrap_noted
    builtin.call_isinstance = no_scalar(builtin.call_isinstance)
    builtin.call_type = no_scalar(builtin.call_type)


def _guard_leaves() -> None:
    """Where a network asks whether a tensor that it is given is a leaf, Dynamo keeps the first
    answer."""
    variable: Any = _torch.TensorVariable
    original = variable.method_attr_grad_fn

    def guard(tensor: Any) -> None:
        if tensor.source is not None:
            source = _torch.AttrSource(tensor.source, "is_leaf")
            _install(source.make_guard(_torch.GuardBuilder.EQUALS_MATCH))

    def method_attr_is_leaf(self: Any, tx: Any) -> Any:
        guard(self)
        return _torch.ConstantVariable.create(self.as_proxy().node.meta["example_value"].is_leaf)

    def method_attr_grad_fn(self: Any, tx: Any) -> Any:
        guard(self)
        return original(self, tx)

    variable.method_attr_is_leaf = method_attr_is_leaf
    variable.method_attr_grad_fn = method_attr_grad_fn


def _forget_tangents_of_views() -> None:
    """In its cache of what operators return, Dynamo holds the tangents of views for smaller than
    they are."""
    mode: Any = _torch.FakeTensorMode
    validate = mode._validate_cache_key

    def validate_key(self: Any, op: Any, *call: Any) -> None:
        if op is torch.ops.aten._new_zeros_with_same_feature_meta.default:
            raise _torch.BypassDispatchCache("its memory is larger than its sizes say")
        validate(self, op, *call)

    mode._validate_cache_key = validate_key
    mode.cache_clear()


def _time_no_guards() -> None:
    """Of each new graph it notes how long its guards take, and empties the processor's caches to
    measure it, which is a good part of a small network's capture."""
    guards: Any = _torch.dynamo_guards
    original = guards.profile_guard_manager

    def profile_guard_manager(*given: Any) -> float:
        return 0.0 if capturing.now else original(*given)

    guards.profile_guard_manager = profile_guard_manager


# ----------------------------------------------------------------------------------- surroundings


DEEPEST = 4  # how far into a module's attributes such classes are looked for

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks", "_global_forward_hooks_always_called",
)  # fmt: skip


def global_hooks() -> list[dict]:
    """The tables of hooks that every module calls."""
    return [getattr(torch.nn.modules.module, name, {}) for name in _GLOBAL_HOOKS]


_TABLES = global_hooks()  # filled and emptied, never replaced


def hooked() -> bool:
    """Whether there is any such hook."""
    return any(_TABLES)


class Surroundings:
    """`key()` changes when something changed that Dynamo does not see."""

    def __init__(self, net: nn.Module) -> None:
        modules = list(net.modules())
        kinds = {kind for module in modules for kind in type(module).__mro__}
        self._classes = [
            kind for kind in sorted(kinds, key=lambda k: k.__qualname__)
            if issubclass(kind, nn.Module) and kind is not nn.Module
        ]  # fmt: skip
        self._modules = [ref(module) for module in modules]  # the key is not to keep them alive
        self._places = list(_watched(modules)) if _torch.before(2, 13) else []
        self._hooks = global_hooks()
        self._frozen = _torch.before(2, 13)  # of parameters Dynamo does not guard it before

    def key(self) -> Hashable:
        hooks = tuple([tuple(hook) for hook in self._hooks])
        methods = tuple([tuple(map(id, vars(kind).values())) for kind in self._classes])
        types = tuple([type(module()) for module in self._modules])
        places = tuple([_mark(holder, name) for holder, name in self._places])
        return hooks, methods, types, places, self._asked() if self._frozen else None

    def _asked(self) -> tuple[bool, ...]:
        """Whether a gradient is asked for, parameter by parameter."""
        living = [m for module in self._modules if (m := module()) is not None]
        return tuple([p.requires_grad for m in living for p in m.parameters(recurse=False)])


def _watched(modules: list[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """The entries of classes that serve as records: (what holds one, under which name)."""
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(vars(module), 0) for module in modules]
    while stack:
        holder, depth = stack.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        record = isinstance(holder, type)
        entries: Any = vars(holder) if record else holder
        items = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
        for name, item in list(items):
            if record and not str(name).startswith("__"):
                yield entries, name
            if depth >= DEEPEST or isinstance(item, (nn.Module, torch.Tensor)):
                continue
            if isinstance(item, (dict, list, tuple)) or _is_record(item):
                stack.append((item, depth + 1))
            elif hasattr(item, "__dict__") and not isinstance(item, (type, ModuleType)):
                stack.append((vars(item), depth + 1))


def _is_record(item: Any) -> bool:
    """A class that somebody wrote to hold numbers, as far as one can tell: no module's, none of
    PyTorch's or Python's own."""
    if not isinstance(item, type) or issubclass(item, nn.Module):
        return False
    return item.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "numpy")


def _mark(holder: Any, name: Any) -> Any:
    """What tells a value apart from another: plain ones themselves, others by identity."""
    try:
        value = holder[name]
    except (KeyError, IndexError):
        return None
    return value if type(value) in (bool, int, float, str, type(None)) else id(value)
