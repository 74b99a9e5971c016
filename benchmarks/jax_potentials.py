"""The potentials of potentials.py in JAX, and their training step on energies and forces under jit,
atoms and pairs padded to the largest batch: the method "JAX, padded" of shapes.py.

Runs in a process of its own, with no PyTorch in it: shapes.py writes parameters, batches and
float64's gradients to a folder as NumPy arrays, and asks by lines of JSON. Parameters keep their
names and layouts.

    python benchmarks/jax_potentials.py FOLDER
"""

from __future__ import annotations

import json
import math
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

CUTOFF = 5.0
Tree = dict[str, Any]


def linear(p: Tree, name: str, x):
    y = x @ p[name + ".weight"].T
    return y + p[name + ".bias"] if name + ".bias" in p else y


def dense(p: Tree, name: str, x, between: Callable = jax.nn.silu):
    return linear(p, name + ".2", between(linear(p, name + ".0", x)))


def shifted(x):
    return jax.nn.softplus(x) - 0.6931471805599453


def directions(pos, edges):
    apart = pos[edges[0]] - pos[edges[1]]
    distance = jnp.sqrt(jnp.square(apart).sum(-1, keepdims=True) + 1e-12)
    return apart / distance, distance


def fade(distance):
    return 0.5 * (jnp.cos(distance * (math.pi / CUTOFF)) + 1.0)


def bessel(distance, count: int):
    n = jnp.arange(1, count + 1, dtype=distance.dtype)
    return jnp.sin(distance * (n * (math.pi / CUTOFF))) / distance


def gathered(message, to, count: int):
    return jnp.zeros((count, *message.shape[1:]), message.dtype).at[to].add(message)


def layers_of(p: Tree) -> range:
    return range(1 + max(int(name.split(".")[1]) for name in p if name.startswith("layers.")))


# ----------------------------------------------------------- (parameters, pos, data) → energies


def schnet(p: Tree, pos, z, edges, batch, molecules: int):
    _, distance = directions(pos, edges)
    waves = jnp.exp(-10.0 * jnp.square(distance - p["centres"]))
    h = p["embed.weight"][z]
    for i in layers_of(p):
        name = f"layers.{i}."
        weight = dense(p, name + "filter", waves, shifted) * fade(distance)
        message = linear(p, name + "before", h)[edges[1]] * weight
        h = h + dense(p, name + "after", gathered(message, edges[0], len(h)), shifted)
    return gathered(dense(p, "head", h, shifted)[:, 0], batch, molecules)


def painn(p: Tree, pos, z, edges, batch, molecules: int):
    to, of = edges
    unit, distance = directions(pos, edges)
    waves = bessel(distance, p["layers.0.filter.weight"].shape[1])
    cut = fade(distance)
    h = p["embed.weight"][z]
    v = jnp.zeros((len(h), 3, h.shape[1]), h.dtype)
    for i in layers_of(p):
        name = f"layers.{i}."
        message = dense(p, name + "message", h)[of] * (linear(p, name + "filter", waves) * cut)
        scalar, carried, along = jnp.split(message, 3, 1)
        vector = carried[:, None] * v[of] + along[:, None] * unit[:, :, None]
        h = h + gathered(scalar, to, len(h))
        v = v + gathered(vector, to, len(h))
        left, right = jnp.split(linear(p, name + "mix", v), 2, 2)
        length = jnp.sqrt(jnp.square(right).sum(1) + 1e-8)
        update = dense(p, name + "update", jnp.concatenate([h, length], 1))
        scale, product, add = jnp.split(update, 3, 1)
        h, v = h + add + product * (left * right).sum(1), v + scale[:, None] * left
    return gathered(dense(p, "head", h)[:, 0], batch, molecules)


def harmonics(unit):
    x, y, z = unit[:, 0], unit[:, 1], unit[:, 2]
    second = [x * y, y * z, (3 * z * z - 1) / 12**0.5, x * z, (x * x - y * y) / 2]
    first = jnp.stack([y, z, x], -1)
    return [jnp.ones_like(x)[:, None], 3**0.5 * first, 15**0.5 * jnp.stack(second, -1)]


def tensor_product(p: Tree, name: str, h: list, y: list, waves, edges) -> list:
    to, of = edges
    paths = [n[len(name) + 1 :] for n in p if n.startswith(name + "c") and n[-3:].isdigit()]
    wanted = sum(n.startswith(name + "after.") for n in p)
    width = p[name + "after.0.weight"].shape[0]
    sent = [linear(p, f"{name}before.{i}", each)[of] for i, each in enumerate(h)]
    weights = dense(p, name + "weights", waves)
    messages: list[list] = [[] for _ in range(wanted)]
    for i, path in enumerate(paths):
        a, b, c = map(int, path)
        turn = jnp.einsum("abc,eb->eca", p[f"{name}c{path}"], y[b])
        weight = weights[:, i * width : (i + 1) * width]
        messages[c].append((turn @ sent[a]) * weight[:, None])
    results = []
    for i in range(wanted):
        scale = 1 / (10 * len(messages[i])) ** 0.5
        total = gathered(sum(messages[i]) * scale, to, len(h[0]))
        new = linear(p, f"{name}after.{i}", total)
        results.append(new + linear(p, f"{name}keep.{i}", h[i]) if i < len(h) else new)
    scalars = results[0]
    if wanted == 1:
        return [jax.nn.silu(scalars)]
    gates = jnp.split(jax.nn.sigmoid(linear(p, name + "gates", scalars)), wanted - 1, 2)
    return [jax.nn.silu(scalars), *(g * r for g, r in zip(gates, results[1:], strict=True))]


def equivariant(p: Tree, pos, z, edges, batch, molecules: int):
    unit, distance = directions(pos, edges)
    count = p["layers.0.weights.0.weight"].shape[1]
    waves, y = bessel(distance, count) * fade(distance), harmonics(unit)
    h = [p["embed.weight"][z][:, None]]
    for i in layers_of(p):
        h = tensor_product(p, f"layers.{i}.", h, y, waves, edges)
    return gathered(dense(p, "head", h[0])[:, 0, 0], batch, molecules)


NETS = {"schnet": schnet, "painn": painn, "equivariant": equivariant}


# ------------------------------------------------------------------------------------- the step


def step(net: Callable, trained: Tree, fixed: Tree, data: Tree):
    """(loss, its gradients): mean squares of energies, ten times the mean distance of forces."""
    molecules = len(data["energy"])

    def loss(trained: Tree):
        def total(pos):
            p = trained | fixed
            # one molecule more, of the atoms that fill up
            energy = net(p, pos, data["z"], data["edges"], data["batch"], molecules + 1)[:-1]
            return energy.sum(), energy

        gradient, energy = jax.grad(total, has_aux=True)(data["pos"])
        apart = jnp.abs(gradient + data["forces"]) * data["real"][:, None]
        forces = apart.sum() / (3 * data["real"].sum())
        return jnp.square(energy - data["energy"]).mean() + 10.0 * forces

    return jax.value_and_grad(loss)(trained)


def padded(batch: Tree, atoms: int, pairs: int) -> Tree:
    """Atoms that fill up form a molecule of their own; pairs that do so join the first two of them,
    which stand one apart."""
    count, molecules = len(batch["pos"]), len(batch["energy"])
    more = atoms - count
    extra = np.zeros((more, 3), batch["pos"].dtype)
    extra[1:, 0] = 1.0
    fill = np.tile(np.array([[count], [count + 1]]), (1, pairs - batch["edges"].shape[1]))
    return {
        "pos": np.concatenate([batch["pos"], extra]),
        "z": np.concatenate([batch["z"], np.ones(more, int)]).astype(np.int32),
        "edges": np.concatenate([batch["edges"], fill], 1).astype(np.int32),
        "batch": np.concatenate([batch["batch"], np.full(more, molecules)]).astype(np.int32),
        "forces": np.concatenate([batch["forces"], 0 * extra]),
        "energy": batch["energy"],
        "real": (np.arange(atoms) < count).astype(batch["pos"].dtype),
    }


def planned_memory(compiled: Any) -> dict[str, float]:
    """MiB of results and temporaries by XLA's plan."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    used = plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes
    return {"peak_mib": round(used / 2**20, 1)}


def main(folder: Path) -> None:
    tell = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jax.config.update("jax_default_matmul_precision", "highest")  # no TF32
    job = json.loads((folder / "job.json").read_text())
    files = sorted(folder.glob("batch*.npz"), key=lambda f: int(f.stem.removeprefix("batch")))
    batches = [dict(np.load(f)) for f in files]
    jax.config.update("jax_enable_x64", batches[0]["pos"].dtype == np.float64)
    atoms = 2 + max(len(b["pos"]) for b in batches)
    pairs = max(b["edges"].shape[1] for b in batches)
    sets = [jax.device_put(padded(b, atoms, pairs)) for b in batches]
    state = jax.device_put(dict(np.load(folder / "state.npz")))
    trained = {n: state.pop(n) for n in job["trained"]}
    run = jax.jit(partial(step, NETS[job["net"]]))
    compiled: Any = None

    def timed(i: int) -> tuple[float, Tree]:
        nonlocal compiled
        start = time.perf_counter()
        if compiled is None:
            compiled = run.lower(trained, state, sets[i]).compile()
        _, gradients = jax.block_until_ready(compiled(trained, state, sets[i]))
        return 1e3 * (time.perf_counter() - start), gradients

    times, gradients = [], {}
    for i in range(job["warm"]):
        spent, gradients = timed(i)
        times.append(round(spent, 2))
    exact = np.load(folder / "exact.npz")
    apart = size = 0.0
    for name in exact.files:
        found = np.asarray(gradients[name], np.float64)
        apart += float(np.square(found - exact[name]).sum())
        size += float(np.square(exact[name]).sum())
    row = {"warm_up_ms": times, "gradient_error": (apart / size) ** 0.5, "jax": jax.__version__}
    print(json.dumps(row), file=tell)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = planned_memory(compiled) if "memory" in asked else [
            timed(i)[0] for i in asked["batches"]
        ]  # fmt: skip
        print(json.dumps(answer), file=tell)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
