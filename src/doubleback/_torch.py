"""Every private name of PyTorch that this package uses, each with the reason why.

    from .._torch import pytree             # light names: found when they are imported
    _torch.ShapeEnv()                       # slow ones (Dynamo, Inductor, SymPy): at first use

`NAMES` are what other modules take from here; no other module imports a private name of PyTorch.
`ATTRIBUTES` are private attributes of PyTorch's objects and `OPERATORS` ATen's operators with an
underscore, both of which are used where the objects are. tests/test_torch.py looks for each of them
and fails, with the reason, where a new PyTorch has taken one away.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

NAMES: dict[str, tuple[str, str]] = {
    # ------------------------------------------------------------------ nested containers
    "pytree": (
        "torch.utils._pytree",
        "nested arguments and results are flattened by the containers that torch.compile knows",
    ),
    # ------------------------------------------------- what is going on: modes and transforms
    "peek_interpreter_stack": (
        "torch._C._functorch:peek_interpreter_stack",
        "whether a transform of torch.func runs, which brings a level of autograd of its own",
    ),
    "transforms_entered": (
        "torch._C._functorch:get_dynamic_layer_stack_depth",
        "how many transforms run: a trace that fails within some does not leave them",
    ),
    "leave_vmap": (
        "torch._C._functorch:_vmap_decrement_nesting",
        "they are left then, one by one: what leaves all of them leaves each twice in torch 2.11",
    ),
    "leave_grad": ("torch._C._functorch:_grad_decrement_nesting", "likewise"),
    "leave_jvp": ("torch._C._functorch:_jvp_decrement_nesting", "likewise"),
    "leave_functionalize": ("torch._C._functorch:_func_decrement_nesting", "likewise"),
    "jvp_transforms": (
        "torch._functorch.eager_transforms",
        "it counts the `jvp`s among them (JVP_NESTING)",
    ),
    "forward_ad": (
        "torch.autograd.forward_ad",
        "it remembers the level of forward mode that they have entered (_current_level)",
    ),
    "exit_dual_level": (
        "torch._C:_exit_dual_level",
        "which is left, too",
    ),
    "is_functorch_wrapped_tensor": (
        "torch._C._functorch:is_functorch_wrapped_tensor",
        "a tensor of a transform holds no memory that a kernel could read",
    ),
    "is_vmap_fallback_enabled": (
        "torch._C._functorch:_is_vmap_fallback_enabled",
        "to put vmap's own loop back on afterwards",
    ),
    "set_vmap_fallback_enabled": (
        "torch._C._functorch:_set_vmap_fallback_enabled",
        "vmap's own loop over seeds warns and is slow; where it would be needed, ours runs",
    ),
    "get_dispatch_mode": (
        "torch._C:_get_dispatch_mode",
        "whether tensors are fake, functional or traced: no kernel is launched on them",
    ),
    "TorchDispatchModeKey": (
        "torch._C:_TorchDispatchModeKey",
        "which of these modes is asked for",
    ),
    "DeviceContext": (
        "torch.utils._device:DeviceContext",
        "`with torch.device(…)` is a mode that changes nothing of what is there",
    ),
    "get_function_modes": (
        "torch.overrides:_get_current_function_mode_stack",
        "a caller's modes change what functions return: traced and run, they would do so twice",
    ),
    "len_torch_dispatch_stack": (
        "torch._C:_len_torch_dispatch_stack",
        "whether any mode watches: only then does a kernel go through the dispatcher",
    ),
    "get_proxy_mode": (
        "torch.fx.experimental.proxy_tensor:get_proxy_mode",
        "whether the sweeps are being flattened: a kernel is recorded as one node then",
    ),
    "disable_current_modes": (
        "torch.utils._python_dispatch:_disable_current_modes",
        "real numbers are computed, or a choice of PyTorch's is watched, in the midst of a trace",
    ),
    "push_mode": (
        "torch.utils._python_dispatch:_push_mode",
        "a caller's mode that was taken away for a capture watches the sweeps again",
    ),
    "pop_mode": (
        "torch.utils._python_dispatch:_pop_mode",
        "and is taken away again afterwards",
    ),
    "TorchDispatchMode": (
        "torch.utils._python_dispatch:TorchDispatchMode",
        "sees every operator that runs: to price a program, to notice random numbers",
    ),
    "parse_dispatch_key": (
        "torch._C:_parse_dispatch_key",
        "the key of the older vmap, by which backward runs on many cotangents at once",
    ),
    "dispatch_tls_is_dispatch_key_included": (
        "torch._C:_dispatch_tls_is_dispatch_key_included",
        "whether that vmap is running",
    ),
    # ------------------------------------------------------------------------ tracing
    "make_fx": (
        "torch.fx.experimental.proxy_tensor:make_fx",
        "flattens the sweeps, and the captured network, into one graph of operators",
    ),
    "is_fx_tracing": (
        "torch.fx._symbolic_trace:is_fx_tracing",
        "whether a trace is under way in any thread, at which TorchDynamo refuses calls",
    ),
    "compile_lock": (
        "torch._dynamo.convert_frame:compile_lock",
        "one trace at a time: that there is one is a mark of the process, which two threads would "
        "leave behind, and after which torch.compile refuses everything",
    ),
    "FakeTensorMode": (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "shapes without numbers: pricing, flattening, and the choice of attention's kernel",
    ),
    "BypassDispatchCache": (
        "torch._subclasses.fake_tensor:_BypassDispatchCache",
        "what such a tensor's operator returned is not to be remembered",
    ),
    "FakeTensor": (
        "torch._subclasses.fake_tensor:FakeTensor",
        "tells which inputs of a captured loss carry the trace's open sizes",
    ),
    "FunctionalTensorMode": (
        "torch._subclasses.functional_tensor:FunctionalTensorMode",
        "writes in place become results when the captured graph is lifted",
    ),
    "to_fun": (
        "torch._functorch._aot_autograd.functional_utils:to_fun",
        "an input of the graph that is lifted, as a functional tensor",
    ),
    "from_fun": (
        "torch._functorch._aot_autograd.functional_utils:from_fun",
        "a result of the graph that is lifted, as an ordinary tensor",
    ),
    "has_data_mutation": (
        "torch._functorch._aot_autograd.functional_utils:has_data_mutation",
        "which inputs the network wrote to",
    ),
    "override_composite_implicit_decomp": (
        "torch.export.exported_program:_override_composite_implicit_decomp",
        "operators with a rule of their own (linear, conv2d, attention) are not taken apart",
    ),
    "op_implementations_dict": (
        "torch._subclasses.fake_impls:op_implementations_dict",
        "what the former enters there is kept, and put back at the next capture",
    ),
    "collect_all_valid_cia_ops_for_aten_namespace": (
        "torch._export.utils:_collect_all_valid_cia_ops_for_aten_namespace",
        "which of ATen's operators PyTorch would take apart",
    ),
    "special_op_to_preserve_cia": (
        "torch._export.utils:_special_op_to_preserve_cia",
        "what an operator that is kept whole says in answer",
    ),
    "decomposition_table": (
        "torch._decomp:decomposition_table",
        "recurrent layers as the cells they are made of; batch norm, to see what it writes",
    ),
    "get_data_attr": (
        "torch._C._autograd:_get_data_attr",
        "what Dynamo writes for `x.data`, which stops gradients",
    ),
    "HigherOrderOperator": (
        "torch._ops:HigherOrderOperator",
        "control flow and the like, which is refused or looked through by name",
    ),
    "OpOverload": (
        "torch._ops:OpOverload",
        "tells ATen's operators from Python functions in a traced graph",
    ),
    "dispatch_tls_local_include_set": (
        "torch._C:_dispatch_tls_local_include_set",
        "the dispatcher's state, to be as it was once a failed capture is let go of",
    ),
    "dispatch_tls_local_exclude_set": (
        "torch._C:_dispatch_tls_local_exclude_set",
        "the other half of that state",
    ),
    "DispatchKey": (
        "torch._C:DispatchKey",
        "names the kernel of a composite operator that is made of others",
    ),
    "ForceDispatchKeyGuard": (
        "torch._C:_ForceDispatchKeyGuard",
        "holds that state meanwhile",
    ),
    "is_fwd_grad_enabled": (
        "torch._C:_is_fwd_grad_enabled",
        "forward mode's switch, likewise",
    ),
    "set_fwd_grad_enabled": (
        "torch._C:_set_fwd_grad_enabled",
        "puts it back",
    ),
    # ------------------------------------------------------------- Dynamo (slow to import)
    "dynamo_optimize": (
        "torch._dynamo:optimize",
        "captures a network with guards, and says which guard failed; torch.compile does not",
    ),
    "dynamo_reset_code": (
        "torch._dynamo.eval_frame:reset_code",
        "Dynamo holds the graphs of a function that is gone for ever, unless told to let go",
    ),
    "dynamo_config": (
        "torch._dynamo.config",
        "settings for the length of a capture (recurrent layers, hooks, how many graphs)",
    ),
    "dynamo_builder": (
        "torch._dynamo.variables.builder",
        "guards of what one object is known as, which lack some",
    ),
    "dynamo_guards": (
        "torch._dynamo.guards",
        "times the guards of each new graph, which takes a good part of a small network's capture",
    ),
    "GuardBuilder": (
        "torch._dynamo.guards:GuardBuilder",
        "guards that are added: two names, one object; a module without hooks",
    ),
    "dynamo_variables": (
        "torch._dynamo.variables",
        "Dynamo's ideas of Python's objects, of which many leave unguarded what code asks of them",
    ),
    "dynamo_exc": (
        "torch._dynamo.exc",
        "an attribute that Dynamo did not find; and the way to refuse what cannot be guarded",
    ),
    "dynamo_utils": (
        "torch._dynamo.utils",
        "where dictionaries' items are looked for, likewise",
    ),
    "dynamo_lists": (
        "torch._dynamo.variables.lists",
        "whether a list holds something, which is answered wrongly where numbers are open",
    ),
    "dynamo_dicts": (
        "torch._dynamo.variables.dicts",
        "an object's `__dict__`, of which nothing is guarded; there from torch 2.13 on",
    ),
    "RandomVariable": (
        "torch._dynamo.variables.misc:RandomVariable",
        "Dynamo's idea of a generator of Python's, whose draws it would keep",
    ),
    "TensorifyScalarRestartAnalysis": (
        "torch._dynamo.exc:TensorifyScalarRestartAnalysis",
        "the one way for a backend to have Dynamo read a function again",
    ),
    "AttrSource": (
        "torch._dynamo.source:AttrSource",
        "whether a tensor is a leaf, where the code asks: Dynamo does not look at it again",
    ),
    "ConstantVariable": (
        "torch._dynamo.variables:ConstantVariable",
        "the answer",
    ),
    "install_guard": (
        "torch._dynamo.guards:install_guard",
        "what makes Dynamo look",
    ),
    "GlobalStateSource": (
        "torch._dynamo.source:GlobalStateSource",
        "where a guard belongs that is about no single variable",
    ),
    "LazyVariableTracker": (
        "torch._dynamo.variables.lazy:LazyVariableTracker",
        "what a dictionary may be looked up with although Dynamo has not looked at it",
    ),
    "ConstDictVariable": (
        "torch._dynamo.variables.dicts:ConstDictVariable",
        "Dynamo's idea of a dictionary, whose keys it may leave unguarded",
    ),
    "ListVariable": (
        "torch._dynamo.variables.lists:ListVariable",
        "Dynamo's idea of a list, which takes a dictionary's keys without a guard",
    ),
    "SetVariable": (
        "torch._dynamo.variables:SetVariable",
        "Dynamo's idea of a set: of what it does not hold, that must stay so",
    ),
    "UserDefinedObjectVariable": (
        "torch._dynamo.variables:UserDefinedObjectVariable",
        "objects of which two must stay two, where they are compared by identity",
    ),
    "BuiltinVariable": (
        "torch._dynamo.variables:BuiltinVariable",
        "where Dynamo compares them, before torch 2.13",
    ),
    "dynamo_builtin": (
        "torch._dynamo.variables.builtin",
        "where it does from torch 2.13 on",
    ),
    "object_protocol": (
        "torch._dynamo.variables.object_protocol",
        "likewise; there from torch 2.13 on",
    ),
    "InstructionTranslator": (
        "torch._dynamo.symbolic_convert:InstructionTranslator",
        "where Dynamo notes of which dictionaries it guards the order of the keys",
    ),
    "symbolic_convert": (
        "torch._dynamo.symbolic_convert",
        "which modules it takes to be constant",
    ),
    "ConstDictKeySource": (
        "torch._dynamo.source:ConstDictKeySource",
        "a key of a dictionary that is there, which is guarded with it",
    ),
    "TensorVariable": (
        "torch._dynamo.variables.tensor:TensorVariable",
        "requires_grad_() on a tensor that the graph makes, which Dynamo cannot follow before 2.13",
    ),
    "SpeculationLog": (
        "torch._dynamo.symbolic_convert:SpeculationLog",
        "tells whether this Dynamo can",
    ),
    "callback_handler": (
        "torch._dynamo.callback:callback_handler",
        "when a capture begins and ends: PyTorch's warnings about itself are silenced between",
    ),
    "ConstantSource": (
        "torch._dynamo.source:ConstantSource",
        "names the open sizes of a flat graph, which come from no Python variable",
    ),
    "GmWrapper": (
        "torch._dynamo.utils:GmWrapper",
        "a graph that takes a list and empties it, so that nobody holds its inputs",
    ),
    "ShapeEnv": (
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
        "holds the symbols of open sizes and what was asked about them",
    ),
    "statically_known_true": (
        "torch.fx.experimental.symbolic_shapes:statically_known_true",
        "whether a relation of open sizes holds at all of them, without a guard for it",
    ),
    "DimDynamic": (
        "torch.fx.experimental.symbolic_shapes:DimDynamic",
        "says that a size is open",
    ),
    "PythonPrinter": (
        "torch.utils._sympy.printers:PythonPrinter",
        "expressions in open sizes as Python code",
    ),
    # ----------------------------------------------------------- Inductor (slow to import)
    "top_saved_tensors_hooks": (
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "whether a caller's hooks (a checkpoint's) would see what is saved",
    ),
    "TracingContext": (
        "torch._guards:TracingContext",
        "the context in which Dynamo would call Inductor; its caches on disk need it",
    ),
    "tracing": (
        "torch._guards:tracing",
        "enters that context",
    ),
    "compile_fx": (
        "torch._inductor.compile_fx:compile_fx",
        "compiles a flat graph without capturing it once more",
    ),
    "inductor_config": (
        "torch._inductor.config",
        "sweeps stay in their order",
    ),
    "inductor_ir": (
        "torch._inductor.ir",
        "the layout of what is held from one sweep to another",
    ),
    "V": (
        "torch._inductor.virtualized:V",
        "hands Inductor the choices below, and says which node it lowers",
    ),
    "SchedulerNode": (
        "torch._inductor.scheduler:SchedulerNode",
        "what a kernel reads, by the names that tensors have after they were written to",
    ),
    "StarDep": (
        "torch._inductor.dependencies:StarDep",
        "that a kernel waits for another, whatever it reads of it",
    ),
    "WeakDep": (
        "torch._inductor.dependencies:WeakDep",
        "that a kernel which writes waits for the readers of the old values",
    ),
    "inplaceable_ops": (
        "torch._inductor.fx_passes.reinplace:inplaceable_ops",
        "where Inductor writes into a tensor in the place of a copy",
    ),
    "InductorChoices": (
        "torch._inductor.choices:InductorChoices",
        "kernels that stand far apart are not fused",
    ),
    "register_lowering": (
        "torch._inductor.lowering:register_lowering",
        "teaches Inductor the mark at what one sweep hands to another",
    ),
    "lowerings": (
        "torch._inductor.lowering:lowerings",
        "what Inductor makes of the derivative of average pooling, where that is right",
    ),
    "fallback_handler": (
        "torch._inductor.lowering:fallback_handler",
        "PyTorch's own kernel for that derivative where what Inductor makes of it is wrong",
    ),
    "select_decomp_table": (
        "torch._inductor.decomposition:select_decomp_table",
        "a region's derivatives are taken apart as Inductor would before they are cut in stages",
    ),
    "list_mode_options": (
        "torch._inductor:list_mode_options",
        "what torch.compile's mode= stands for",
    ),
    # ------------------------------------------------------- regions of torch.compile (slow)
    "backend_registry": (
        "torch._dynamo.backends.registry",
        "torch.compile's backends by name; ours is one",
    ),
    "min_cut_rematerialization_partition": (
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "chooses what one stage of a region keeps for the next",
    ),
    "functorch_config": (
        "torch._functorch.config",
        "how much of that may be computed again instead of being kept",
    ),
    "fx_graph_cse": (
        "torch._functorch.compile_utils:fx_graph_cse",
        "what two derivatives have in common is computed once",
    ),
    "enable_python_dispatcher": (
        "torch._dispatch.python:enable_python_dispatcher",
        "operators are taken apart as AOTAutograd does, so that random ones are met in one order",
    ),
    # ----------------------------------------------------------------------- autograd
    "get_current_graph_task_keep_graph": (
        "torch._C._autograd:_get_current_graph_task_keep_graph",
        "whether backward was called with retain_graph=True: values are freed otherwise",
    ),
    "next_node": (
        "torch._C._autograd:_get_sequence_nr",
        "the number of autograd's next node: of those that are ready the highest runs first",
    ),
    "set_grad_enabled": (
        "torch._C:_set_grad_enabled",
        "autograd's switch as it stands in Dynamo's graphs",
    ),
    "will_engine_execute_node": (
        "torch._C:_will_engine_execute_node",
        "which gradients this backward pass is after",
    ),
    "current_graph_task_id": (
        "torch._C:_current_graph_task_id",
        "tells one backward pass from another",
    ),
    "AutoDispatchBelowAutograd": (
        "torch._C:_AutoDispatchBelowAutograd",
        "an operator without its derivative, from inside a derivative of ours",
    ),
    "after_autograd_keyset": (
        "torch._C:_after_autograd_keyset",
        "the same where torch.func's levels below keep theirs",
    ),
    "any_requires_grad": (
        "torch._C:_any_requires_grad",
        "whether any argument, nested or not, asks for a gradient",
    ),
    "SingleLevelFunction": (
        "torch.autograd.function:_SingleLevelFunction",
        "a node at one level of autograd; torch.func brings a level for each of its own",
    ),
    "enable_single_level_autograd_function": (
        "torch._functorch.utils:enable_single_level_autograd_function",
        "lets such a node be made inside a transform",
    ),
    "dispatch_dump": (
        "torch._C:_dispatch_dump",
        "who registered an operator's autograd kernel: another library's is left as it is",
    ),
    # ------------------------------------------------------------------ kernels and memory
    "foreach_add_": ("torch:_foreach_add_", "adds all gradients in a few kernels"),
    "foreach_copy_": ("torch:_foreach_copy_", "writes all buffers in a few kernels"),
    "preserve_version_counter": (
        "torch.autograd.grad_mode:_unsafe_preserve_version_counter",
        "batch norm writes its statistics so that no graph of before is stale",
    ),
    "foreach_mul": ("torch:_foreach_mul", "copies many tensors in a few kernels"),
    "cuda_release_pool": (
        "torch._C:_cuda_releasePool",
        "the memory of a CUDA graph whose capture failed is given back by nobody else",
    ),
    "cuda_end_allocate_to_pool": (
        "torch._C:_cuda_endAllocateToPool",
        "a CUDA graph's capture that fails leaves its memory open for what is allocated next",
    ),
    "storage_use_count": (
        "torch._C:_storage_Use_Count",
        "whether anybody else reads a gradient's memory before it becomes somebody's `.grad`",
    ),
    "cuda_get_device": (
        "torch._C:_cuda_getDevice",
        "the current device at every launch; the public function asks more and takes longer",
    ),
    "get_cudnn_enabled": ("torch._C:_get_cudnn_enabled", "to put it back on afterwards"),
    "set_cudnn_enabled": (
        "torch._C:_set_cudnn_enabled",
        "recurrent cells without cuDNN, whose derivative has none; the public switch may be frozen",
    ),
    "VF": (
        "torch._VF",
        "recurrent networks of all layers as one call, by the name of their cell",
    ),
    "BatchNorm": (
        "torch.nn.modules.batchnorm:_BatchNorm",
        "any batch norm, whatever its number of axes",
    ),
}

# What has the attribute, as a module or a class; the attribute; why it is read.
ATTRIBUTES: tuple[tuple[str, str, str], ...] = (
    ("torch:Tensor", "_version", "whether a tensor was changed in place before backward"),
    ("torch.autograd.forward_ad", "_current_level", "it is set back where a trace fails"),
    ("torch:Tensor", "_base", "the memory that results of a region share, as one tensor"),
    ("torch:Tensor", "_is_view", "whether there is such a one"),
    ("torch:Tensor", "_backward_hooks", "a leaf that is watched gets its gradient from autograd"),
    ("torch:Tensor", "_post_accumulate_grad_hooks", "likewise"),
    ("torch:UntypedStorage", "_cdata", "the identity of a tensor's memory, and its users' number"),
    ("torch._ops:OpOverload", "_schema", "an operator's arguments by name, and what it writes"),
    ("torch._ops:OpOverload", "_name", "the operator that `dispatch_dump` is asked about"),
    ("torch._ops:OpOverload", "_overloadpacket", "PyTorch's formulas for FLOPs are kept by it"),
    ("torch._ops:OpOverload", "_op_dk", "what a composite operator is made of that stays whole"),
    ("torch._ops:OpOverload", "_dispatch_cache", "tracing goes on with the kernels it holds"),
    ("torch.fx.experimental.sym_node:SymNode", "_expr", "a size before it was taken for another"),
    (
        "torch._dynamo.variables:BuiltinVariable",
        "_comparison_with_tensor",
        "two tensors of which Dynamo does not guard that they stay two",
    ),
    (
        "torch._dynamo.variables.builder:VariableBuilder",
        "_wrap",
        "which numbers of NumPy's Dynamo takes for arrays",
    ),
    ("torch.library:Library", "_destroy", "takes a patch back"),
    ("torch.nn:Module", "_compiled_call_impl", "whether `module.compile()` was called"),
    ("torch.nn:Module", "_call_impl", "calls it as it was before"),
    ("torch.autograd.function:BackwardCFunction", "_set_sequence_nr", "runs when others have run"),
    (
        "torch.autograd.graph:Node",
        "_register_hook_dict",
        "a tensor's hooks, without the handle that takes as long as a kernel",
    ),
    ("torch.autograd.graph", "_engine_run_backward", "sees create_graph=True; saves time"),
    ("torch.autograd", "_engine_run_backward", "the same function, under its other name"),
    ("torch.autograd:Variable", "_execution_engine", "calls back after a pass, to remove a kernel"),
    ("torch.autograd.forward_ad", "_current_level", "whether forward mode is on"),
    ("torch.autograd.forward_ad", "_set_fwd_grad_enabled", "keeps it on below our own node"),
    (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "_validate_cache_key",
        "which operators are remembered; one that must not be is",
    ),
    (
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "_allow_unsafe_data_ptr_access",
        "an address that a tape's tensors do not have must not become a number in its graph",
    ),
    ("torch.fx:Node", "_erased", "a node that a pass over the graph has removed"),
    ("torch.fx.experimental.sym_node:SymNode", "_expr", "an open size as an expression"),
    ("torch.nn.parallel:DistributedDataParallel", "_active_ddp_module", "whether its forward runs"),
    ("torch.nn.parallel:DistributedDataParallel", "_comm_hooks", "refused: nobody else runs them"),
    ("torch.nn.parallel:DistributedDataParallel", "_join_config", "refused: some may be missing"),
    ("torch.nn.parallel:DistributedDataParallel", "_module_parameters", "what it would average"),
)  # fmt: skip

# Operators of ATen with an underscore, and what for.
OPERATORS: dict[str, str] = {
    "_fused_rms_norm": "RMS norm by PyTorch's fused kernel",
    "_fused_rms_norm_backward": "its derivative",
    "_fused_sdp_choice": "which kernel of attention PyTorch would choose",
    "_linalg_check_errors": "what raises for a singular matrix, after the operator that computes",
    "_local_scalar_dense": "`item()`, which a captured graph must not hold",
    "_new_zeros_with_same_feature_meta": "tangents that are zero, in as much memory as a view's",
    "_log_softmax_backward_data": "the derivative of log softmax from its result",
    "_native_batch_norm_legit": "batch norm with the statistics of the batch",
    "_native_batch_norm_legit_functional": "the same with new running statistics as results",
    "_native_batch_norm_legit_no_training": "batch norm in eval mode, piecewise affine",
    "_safe_softmax": "attention's softmax, with zeros in rows that are masked throughout",
    "_scaled_dot_product_attention_math": "attention by products, where its dropout is given",
    "_scaled_dot_product_cudnn_attention": "attention by cuDNN, with what its derivative reads",
    "_scaled_dot_product_cudnn_attention_backward": "its derivative",
    "_scaled_dot_product_efficient_attention": "attention by tiles, with what is read later",
    "_scaled_dot_product_efficient_attention_backward": "its derivative",
    "_scaled_dot_product_flash_attention": "flash attention, with what is read later",
    "_scaled_dot_product_flash_attention_backward": "its derivative",
    "_scaled_dot_product_flash_attention_for_cpu": "the same on a CPU",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "its derivative",
    "_softmax_backward_data": "the derivative of softmax from its result",
    "_to_copy": "a constant of the host's on its way to a device",
    "_unsafe_view": "a view that a trace writes for a reshape",
}


def before(major: int, minor: int) -> bool:
    """Whether this PyTorch is older."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)


def compiling() -> bool:
    """Whether torch.compile reads this very code."""
    return torch.compiler.is_compiling()


def find(path: str) -> Any:
    """What lies at "module" or "module:attribute"."""
    module, _, attribute = path.partition(":")
    loaded = import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __getattr__(name: str) -> Any:
    """A name of `NAMES`, found when it is first asked for."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, why = NAMES[name]
    try:
        item = find(path)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"this PyTorch has no {path.replace(':', '.')}, which doubleback needs: {why}; install "
            "a supported PyTorch"
        ) from error
    globals()[name] = item
    return item
