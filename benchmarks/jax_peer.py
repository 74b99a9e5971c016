"""The networks of nets.py in JAX, channels-last, and their plain and penalised steps under jit.

Runs in a process of its own, with no PyTorch in it: engine.py writes the parameters, inputs and
reference gradients to a folder as NumPy arrays, this script reads them, and writes one JSON object
per method. Parameters keep PyTorch's names; kernels are stored (H, W, in, out), matrices (in, out).

    python benchmarks/jax_peer.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from timing import plan_repeats, summary

Tree = dict[str, Any]


# --- layers ---------------------------------------------------------------------------------------


def convolution(p: Tree, name: str, x, stride: int = 1, padding: int = 0, groups: int = 1):
    y = lax.conv_general_dilated(
        x,
        p[name + ".weight"],
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    bias = p.get(name + ".bias")
    return y if bias is None else y + bias


def linear(p: Tree, name: str, x):
    return x @ p[name + ".weight"] + p[name + ".bias"]


def layer_norm(p: Tree, name: str, x, eps: float = 1e-6):
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (centred * scale).astype(x.dtype) * p[name + ".weight"] + p[name + ".bias"]


def batch_norm(p: Tree, state: Tree, name: str, x, eps: float = 1e-5, momentum: float = 0.1):
    """Training mode; the running statistics that follow are put into `state`."""
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = jnp.maximum(jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean), 0)
    count = x.size // x.shape[-1]
    for key, value in (
        (".running_mean", mean),
        (".running_var", variance * (count / (count - 1))),
    ):
        old = state[name + key]
        state[name + key] = old + momentum * (value - old).astype(old.dtype)
    y = (wide - mean) * lax.rsqrt(variance + eps)
    return y.astype(x.dtype) * p[name + ".weight"] + p[name + ".bias"]


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


# --- networks: (parameters, state, x, sizes) -> logits, state updated in place --------------------


def conv_stack(p: Tree, state: Tree, x, sizes: Tree):
    for i, _ in enumerate(sizes["widths"]):
        stride = 2 if i and i % 2 == 0 else 1
        x = jax.nn.relu(convolution(p, f"convs.{i}", x, stride, 1))
    return linear(p, "head", x.mean((1, 2)))


def depthwise_stack(p: Tree, state: Tree, x, sizes: Tree):
    x = jax.nn.relu(convolution(p, "stem", x, 1, 1))
    for i in range(len(sizes["widths"]) - 1):
        stride = 2 if i % 2 else 1
        x = jax.nn.relu(convolution(p, f"depthwise.{i}", x, stride, 1, groups=x.shape[-1]))
        x = jax.nn.relu(convolution(p, f"pointwise.{i}", x))
    return linear(p, "head", x.mean((1, 2)))


def mlp(p: Tree, state: Tree, x, sizes: Tree):
    for i in range(sizes["hidden"]):
        x = jax.nn.relu(linear(p, f"layers.{i}", x))
    return linear(p, f"layers.{sizes['hidden']}", x)


def resnet(p: Tree, state: Tree, x, sizes: Tree):
    x = jax.nn.relu(batch_norm(p, state, "bn", convolution(p, "stem", x, 2, 3)))
    pad = ((0, 0), (1, 1), (1, 1), (0, 0))
    lowest = np.array(-np.inf, x.dtype)
    x = lax.reduce_window(x, lowest, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pad)
    block = 0
    for stage, depth in enumerate(sizes["depths"]):
        for i in range(depth):
            name, stride = f"blocks.{block}.", 2 if stage and i == 0 else 1
            y = convolution(p, name + "conv1", x, stride, 1)
            y = jax.nn.relu(batch_norm(p, state, name + "bn1", y))
            y = batch_norm(p, state, name + "bn2", convolution(p, name + "conv2", y, 1, 1))
            if name + "shortcut.0.weight" in p:
                x = convolution(p, name + "shortcut.0", x, stride)
                x = batch_norm(p, state, name + "shortcut.1", x)
            x = jax.nn.relu(x + y)
            block += 1
    return linear(p, "head", x.mean((1, 2)))


def convnext(p: Tree, state: Tree, x, sizes: Tree):
    for stage, depth in enumerate(sizes["depths"]):
        name = f"downs.{stage}."
        if stage:
            x = convolution(p, name + "1", layer_norm(p, name + "0", x), 2)
        else:
            x = layer_norm(p, name + "1", convolution(p, name + "0", x, 4))
        for i in range(depth):
            name = f"stages.{stage}.{i}."
            y = convolution(p, name + "depthwise", x, 1, 3, groups=x.shape[-1])
            y = linear(p, name + "up", layer_norm(p, name + "norm", y))
            x = x + p[name + "scale"] * linear(p, name + "down", gelu(y))
    return linear(p, "head", layer_norm(p, "norm", x.mean((1, 2))))


def vit(p: Tree, state: Tree, x, sizes: Tree):
    width, heads = sizes["width"], sizes["heads"]
    x = convolution(p, "patches", x, sizes["patch"])
    x = x.reshape(x.shape[0], -1, width)
    token = jnp.broadcast_to(p["token"], (x.shape[0], 1, width))
    x = jnp.concatenate([token, x], 1) + p["position"]
    for i in range(sizes["depth"]):
        name = f"blocks.{i}."
        qkv = linear(p, name + "qkv", layer_norm(p, name + "norm1", x))
        qkv = qkv.reshape(*x.shape[:2], 3, heads, width // heads)
        y = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + linear(p, name + "out", y.reshape(x.shape))
        y = linear(p, name + "up", layer_norm(p, name + "norm2", x))
        x = x + linear(p, name + "down", gelu(y))
    return linear(p, "head", layer_norm(p, "norm", x[:, 0]))


NETS: dict[str, Callable] = {
    "conv": conv_stack,
    "depthwise": depthwise_stack,
    "mlp": mlp,
    "resnet18": resnet,
    "convnext": convnext,
    "vit": vit,
}


# --- steps ----------------------------------------------------------------------------------------


def losses(apply: Callable, p: Tree, state: Tree, x, y):
    """Cross entropy of every example, and the state that follows."""
    state = dict(state)
    log_p = jax.nn.log_softmax(apply(p, state, x).astype(jnp.float32))
    return -jnp.take_along_axis(log_p, y[:, None], 1)[:, 0], state


def plain_step(apply: Callable, weight: float, p: Tree, state: Tree, x, y):
    def total(p):
        each, new = losses(apply, p, state, x, y)
        return each.mean(), new

    (loss, new), gradients = jax.value_and_grad(total, has_aux=True)(p)
    return gradients, new, loss, jnp.zeros(())


def penalised_step(apply: Callable, weight: float, p: Tree, state: Tree, x, y):
    def total(p):
        def summed(x):
            each, new = losses(apply, p, state, x, y)
            return each.sum(), (each.mean(), new)

        gradient, (loss, new) = jax.grad(summed, has_aux=True)(x)
        squares = jnp.square(gradient.astype(jnp.float32))
        penalty = squares.reshape(x.shape[0], -1).sum(1).mean()
        return loss + weight * penalty, (loss, penalty, new)

    gradients, (loss, penalty, new) = jax.grad(total, has_aux=True)(p)
    return gradients, new, loss, penalty


def jacobian_step(apply: Callable, weight: float, p: Tree, state: Tree, x, y):
    """mean ℓ_i + weight · mean ‖∂out_i/∂x_i‖²_F by jacrev of the outputs summed over the batch."""

    def total(p):
        def summed(x):
            out = apply(p, dict(state), x)
            return out.sum(0), out

        rows, out = jax.jacrev(summed, has_aux=True)(x)
        penalty = jnp.square(rows.astype(jnp.float32)).sum() / x.shape[0]
        log_p = jax.nn.log_softmax(out.astype(jnp.float32))
        loss = -jnp.take_along_axis(log_p, y[:, None], 1).mean()
        return loss + weight * penalty, (loss, penalty)

    gradients, (loss, penalty) = jax.grad(total, has_aux=True)(p)
    return gradients, state, loss, penalty


STEPS = {"JAX jit plain": plain_step, "JAX jit": penalised_step, "JAX jit Jacobian": jacobian_step}


# --- measuring ------------------------------------------------------------------------------------


def to_jax(array: np.ndarray) -> np.ndarray:
    """PyTorch's layout to JAX's: kernels (out, in, H, W) → (H, W, in, out), matrices transposed."""
    axes = {4: (2, 3, 1, 0), 2: (1, 0)}.get(array.ndim)
    return array if axes is None else array.transpose(axes)


def to_torch(array: np.ndarray) -> np.ndarray:
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim)
    return array if axes is None else array.transpose(axes)


def relative_error(gradients: Tree, reference: Tree) -> float:
    """‖g − r‖ / ‖r‖ over all parameters together."""
    apart = size = 0.0
    for name, r in reference.items():
        g = to_torch(np.asarray(gradients[name].astype(jnp.float32)))
        apart += float(np.square(g - r, dtype=np.float64).sum())
        size += float(np.square(r, dtype=np.float64).sum())
    return (apart / size) ** 0.5


def load(folder: Path, prefix: str) -> Tree:
    path = folder / f"{prefix}.npz"
    return dict(np.load(path)) if path.exists() else {}


def measure(step, arguments: tuple, sets: list[tuple], repeats: int, cap_s: float) -> dict:
    """Median milliseconds of a step; every sample is the mean of a run of steps."""

    def run(count: int) -> float:
        start = time.perf_counter()
        for i in range(count):
            result = step(*arguments, *sets[i % len(sets)])
        jax.block_until_ready(result)
        return (time.perf_counter() - start) * 1e3 / count

    run(2)
    estimate = run(2)
    count = plan_repeats(estimate, repeats, cap_s)
    inner = max(1, min(10, count // 5))
    return summary([run(inner) for _ in range(max(3, count // inner))])


def planned_memory(step, sets: list[tuple]) -> float | None:
    """MiB of arguments, results and temporaries by XLA's plan, and of the input sets that wait."""
    plan = step.memory_analysis()
    if plan is None:
        return None
    used = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    waiting = sum(array.nbytes for pair in sets[1:] for array in pair)
    return (used - plan.alias_size_in_bytes + waiting) / 2**20


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    dtype = jnp.bfloat16 if job["dtype"] == "bf16" else jnp.float32
    apply = partial(NETS[job["net"]], sizes=job["sizes"])

    def put(array: np.ndarray, convert=to_jax):
        array = convert(array)
        return jax.device_put(array.astype(dtype) if array.dtype.kind == "f" else array)

    p = {name: put(value) for name, value in load(folder, "parameters").items()}
    state = {name: put(value) for name, value in load(folder, "buffers").items()}

    def channels_last(x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 3, 1) if x.ndim == 4 else x

    data = load(folder, "data")
    sets = [
        (put(data[f"x{i}"], channels_last), jax.device_put(data[f"y{i}"].astype(np.int32)))
        for i in range(job["sets"])
    ]
    for name in job["methods"]:
        row: dict[str, Any] = {"method": name, "error": None}
        try:
            start = time.perf_counter()
            function = partial(STEPS[name], apply, job["weight"])
            step = jax.jit(function).lower(p, state, *sets[0]).compile()
            row["first_call_s"] = time.perf_counter() - start
            if job["device"] != "cpu":
                row["peak_mib"] = planned_memory(step, sets)
            gradients, _, loss, penalty = step(p, state, *sets[-1])
            row["loss"] = float(loss)
            kind = "plain" if name == "JAX jit plain" else "penalised"
            if kind == "penalised":
                row["penalty"] = float(penalty)
            for key, reference in (("relative_error", "stock"), ("relative_error_exact", "exact")):
                expected = load(folder, f"{reference}_{kind}")
                if expected:
                    row[key] = relative_error(gradients, expected)
            del gradients
            row |= measure(step, (p, state), sets, job["repeats"], job["cap_s"])
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
