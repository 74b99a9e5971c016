"""``doubleback train``: a network and data of your own, any penalty, checkpoints that survive.

A run is a folder:

    settings.json            what was asked for
    metrics.jsonl            a line per logged step: step, loss, penalty, and what validation found
    checkpoints/step-00000040/
        model.safetensors    parameters and buffers
        optimiser.safetensors
        random.safetensors   the generators' states, one set per process
        state.json           the step, numbers, and a checksum of each file above
    model.safetensors        the network at the end

A checkpoint is written under another name and renamed when all of it is on the disk, so that there
is a whole one at any moment; only then are older ones removed. A step depends on the checkpoint,
the settings and the data alone: the order of the examples is drawn from seed and epoch, and the
sweeps are taken, and flattened, from the first step on.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

import doubleback as db
from doubleback.cli import LOSSES, UsageError, nearest, require, shared
from doubleback.penalties import Loss, make_loss

OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on the first process
MAY_CHANGE = ("epochs", "checkpoint_every", "log_every", "keep", "out", "tensorboard", "device")


@dataclass(frozen=True)
class Settings:
    """What a run is made of: flags, or the keys of a TOML file; flags come first."""

    model: str
    data: str
    out: str
    penalty: str = "loss-gradient"
    loss: str = "cross_entropy"
    weight: float = 0.1
    norm: str | None = None
    index: int | str | None = None
    of: str | None = None
    projections: int | None = None
    chunk: int | None = None
    iterations: int | None = None
    output: str | None = None
    optimiser: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: str = "constant"
    epochs: int = 10
    batch: int = 64
    seed: int = 0
    device: str = "cpu"
    wrap: str = "ddp"
    checkpoint_every: int = 100
    log_every: int = 10
    keep: int = 2
    tensorboard: bool = False

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Settings:
        known = {field.name: field for field in fields(cls)}
        given: dict[str, Any] = {}
        if arguments.config is not None:
            for key, value in _toml(arguments.config).items():
                name = key.replace("-", "_")
                nearest(f"{arguments.config}: key", name, known)
                given[name] = _fitting(value, known[name].type, f"{arguments.config}: {key}")
        flags = {name: getattr(arguments, name) for name in known}
        given |= {name: value for name, value in flags.items() if value is not None}
        for name, field in known.items():
            if field.default is MISSING and name not in given:
                raise UsageError(f"give --{name}, or {name} = … in a TOML file")
        settings = cls(**given)
        nearest("--optimiser", settings.optimiser, OPTIMISERS)
        nearest("--schedule", settings.schedule, ("constant", "cosine"))
        nearest("--wrap", settings.wrap, ("ddp", "fsdp2"))
        nearest("--penalty", settings.penalty, [n for n in shared.TAKEN if n != "bilinear-form"])
        for name in ("epochs", "batch", "checkpoint_every", "log_every", "keep"):
            if getattr(settings, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(settings, name)}")
        return settings


def _toml(name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} is no TOML: {error}") from error


def _fitting(value: Any, annotation: Any, where: str) -> Any:
    """A TOML value of the type that a setting has; whole numbers do for others."""
    kinds = {
        "int": (int, "a whole number"),
        "float": ((int, float), "a number"),
        "str": (str, "a string"),
        "bool": (bool, "true or false"),
    }
    names = [part for part in str(annotation).split(" | ") if part != "None"]
    fits = any(isinstance(value, kinds[name][0]) for name in names)
    if isinstance(value, bool) != (names == ["bool"]) or not fits:
        told = " or ".join(kinds[name][1] for name in names)
        raise UsageError(f"{where} must be {told}, not {value!r}")
    return float(value) if names == ["float"] else value


# ------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Processes:
    """This process and those beside it (torchrun); one alone without."""

    rank: int
    count: int

    @classmethod
    def join(cls, device: torch.device) -> Processes:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls(0, 1)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()

    def mean(self, values: Tensor) -> Tensor:
        if self.count > 1:
            dist.all_reduce(values)
        return values / self.count

    def any(self, here: bool, device: torch.device) -> bool:
        """Whether it is so in one of them: all go on alike."""
        if self.count == 1:
            return here
        seen = torch.tensor(float(here), device=device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return bool(seen)

    def gathered(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of all processes, on the first one, under rank/name."""
        parts: list[Any] = [None] * self.count
        if self.count > 1:
            dist.gather_object(values, parts if self.first else None)
        else:
            parts = [values]
        return {f"{r}/{n}": t for r, part in enumerate(parts) for n, t in (part or {}).items()}


# ----------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """The checkpoints of one run: `step-N` folders, each whole."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[tuple[int, Path]]:
        """By step, oldest first."""
        numbered = []
        for path in self.folder.glob("step-*"):
            number = re.fullmatch(r"step-(\d+)", path.name)
            if number and path.is_dir():
                numbered.append((int(number[1]), path))
        return sorted(numbered)

    def write(self, step: int, parts: Mapping[str, dict[str, Tensor]], state: dict) -> None:
        """Whole, or not at all: what was there before stays until this one is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            return
        draft = self.folder / f".step-{step:08d}.writing"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            sums = {}
            for name, tensors in parts.items():
                raw = _packed(tensors)
                shared.write(draft / f"{name}.safetensors", raw)
                sums[f"{name}.safetensors"] = hashlib.sha256(raw).hexdigest()
            text = json.dumps({"format": 1, **state, "step": step, "sha256": sums}, indent=1)
            shared.write(draft / "state.json", text.encode())
            _sync(draft)
            os.rename(draft, final)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            older = self.all()
            kept = f"that of step {older[-1][0]} is kept" if older else "there is none before it"
            raise UsageError(
                f"the checkpoint of step {step} could not be written to {self.folder} "
                f"({error.strerror}); {kept}"
            ) from error
        for _, path in self.all()[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)

    def read(self, path: Path) -> tuple[dict[str, dict[str, Tensor]], dict]:
        advice = f"delete {path} to go on from the one before, or choose another --out"
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            sums = state["sha256"]
            raws = {name: (path / name).read_bytes() for name in sums}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is no checkpoint of doubleback's ({error!r}); {advice}"
            ) from error
        for name, raw in raws.items():
            if hashlib.sha256(raw).hexdigest() != sums[name]:
                raise UsageError(f"{path / name} is damaged: its checksum is another; {advice}")
        load = importlib.import_module("safetensors.torch").load
        # sorted: it has no order of its own, and processes that shard go through it together
        parts = {name: dict(sorted(load(raw).items())) for name, raw in raws.items()}
        return {name.removesuffix(".safetensors"): part for name, part in parts.items()}, state


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as a safetensors file; each has memory of its own, so that tied weights are
    written out."""
    save = importlib.import_module("safetensors.torch").save
    return save({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()})


def _sync(folder: Path) -> None:
    """The folder's own entries, on the disk."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ------------------------------------------------------------------------------------------ a run


class Training:
    """A model, its data and its optimiser, somewhere on their way."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = shared.device(settings.device)
        self.processes = Processes.join(self.device)
        if self.device.type == "cuda" and self.processes.count > 1:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self.folder = shared.folder(settings.out)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", settings.keep)
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)
        self.model = self._model()
        self.loss: Loss = self._loss()
        self.train, self.test = self._data()
        self.wrapped = self._wrapped()
        self.optimiser = self._optimiser()
        torch.manual_seed(settings.seed + 1 + self.processes.rank)  # dropout, augmentation
        random.seed(settings.seed + 1 + self.processes.rank)
        self.steps_per_epoch = len(self.train) // settings.batch
        self.last = settings.epochs * self.steps_per_epoch
        self.step = 0
        self.stopped = False

    # ---------------------------------------------------------------------------------- parts

    def _model(self) -> db.Penalised:
        s = self.settings
        net = shared.module(s.model)
        if not isinstance(net, db.Penalised):
            chosen = argparse.Namespace(**asdict(s))
            chosen.loss = s.loss if s.penalty == "loss-gradient" else None
            net = db.Penalised(
                net, shared.penalty(chosen, steady=True), output=shared.key(s.output)
            )
        penalty = net.penalty
        if penalty.carries:
            raise UsageError(
                f"{type(penalty).__name__} carries a vector from step to step that no checkpoint "
                "holds: give it warm_start=False"
            )
        # a step after --resume runs as it would have without: in one way from the first on
        net.flatten_after = 0
        net.sweeps = True if net.sweeps is None else net.sweeps
        return net.to(self.device).train()

    def _loss(self) -> Loss:
        own = self.model.penalty.own_loss
        if own is not None:
            return own
        nearest("--loss", self.settings.loss, LOSSES)
        return make_loss(self.settings.loss)  # type: ignore[arg-type]

    def _data(self) -> tuple[Any, Any]:
        """(training set, test set or None): what the factory returns."""
        s = self.settings
        made: Any = shared.factory(s.data)()
        train, test = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        for each in (train, test):
            if each is not None and not (hasattr(each, "__len__") and hasattr(each, "__getitem__")):
                raise UsageError(
                    f"--data {s.data} must return a data set with a length and items, or a pair of "
                    f"them for training and test, not {type(each).__name__}"
                )
        if len(train) < s.batch:
            raise UsageError(f"--batch {s.batch} is more than the {len(train)} training examples")
        if s.batch % self.processes.count:
            raise UsageError(
                f"--batch {s.batch} cannot be shared by {self.processes.count} processes"
            )
        return train, test

    def _wrapped(self) -> nn.Module:
        if self.processes.count == 1:
            return self.model
        if self.settings.wrap == "ddp":
            return nn.parallel.DistributedDataParallel(self.model)
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.processes.count,))
        fully_shard(self.model, mesh=mesh)
        return self.model

    def _optimiser(self) -> torch.optim.Optimizer:
        s = self.settings
        options: dict[str, Any] = {"lr": s.lr, "weight_decay": s.weight_decay}
        if s.optimiser == "sgd":
            options["momentum"] = s.momentum
        return OPTIMISERS[s.optimiser](self.wrapped.parameters(), **options)

    # ---------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """By all processes together; the first one writes."""
        model: dict[str, Any] = get_model_state_dict(self.wrapped, options=WHOLE)
        optimiser: dict[str, Any] = get_optimizer_state_dict(
            self.wrapped, self.optimiser, options=WHOLE
        )
        generators = self.processes.gathered(_random())
        others = self.processes.gathered(_python_random())
        problem = ""
        if self.processes.first:
            state_of = optimiser.get("state", {})  # by the parameter's name
            flat = {f"{name}/{key}": v for name, own in state_of.items() for key, v in own.items()}
            numbers = {name: v for name, v in flat.items() if not isinstance(v, Tensor)}
            parts = {
                "model": model,
                "optimiser": {name: v for name, v in flat.items() if isinstance(v, Tensor)},
                "random": generators,
            }
            state = {
                "settings": asdict(self.settings),
                "processes": self.processes.count,
                "optimiser": {"numbers": numbers, "groups": optimiser["param_groups"]},
                "python": others,
                "versions": {"doubleback": db.__version__, "torch": torch.__version__},
            }
            try:
                self.checkpoints.write(self.step, parts, state)
            except UsageError as error:
                problem = str(error)
        if self.processes.any(bool(problem), self.device):
            raise UsageError(problem or "the first process could not write its checkpoint")

    def resume(self) -> bool:
        """Go on from the latest checkpoint; False where there is none yet."""
        saved = self.checkpoints.all()
        if not saved:
            return False
        parts, state = self.checkpoints.read(saved[-1][1])
        self._same(state, saved[-1][1])
        try:
            weights: dict[str, Any] = dict(parts["model"])
            set_model_state_dict(self.wrapped, weights, options=WHOLE)
            both = {**parts["optimiser"], **state["optimiser"]["numbers"]}
            own: dict[str, dict[str, Any]] = {}
            for path, value in both.items():
                name, _, key = path.rpartition("/")
                own.setdefault(name, {})[key] = value
            told: dict[str, Any] = {"state": own, "param_groups": state["optimiser"]["groups"]}
            set_optimizer_state_dict(self.wrapped, self.optimiser, told, options=WHOLE)
        except (RuntimeError, KeyError, ValueError) as error:
            raise UsageError(
                f"{saved[-1][1]} does not fit --model {self.settings.model}: {error}"
            ) from error
        rank = f"{self.processes.rank}/"
        generators = {**parts["random"], **state["python"]}
        _set_random({n.removeprefix(rank): v for n, v in generators.items() if n.startswith(rank)})
        self.step = state["step"]
        return True

    def _same(self, state: dict, path: Path) -> None:
        """Raise where this run is another than the one that was interrupted."""
        before, now = state["settings"], asdict(self.settings)
        for name in now:
            if name not in MAY_CHANGE and before.get(name) != now[name]:
                raise UsageError(
                    f"--resume: {path.parent.parent} was run with {name} = {before.get(name)!r}, "
                    f"not {now[name]!r}; use that, or another --out"
                )
        if state["processes"] != self.processes.count:
            raise UsageError(
                f"--resume: {path.parent.parent} was run by {state['processes']} processes, not "
                f"{self.processes.count}: each has random numbers of its own"
            )

    # ------------------------------------------------------------------------------- training

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """This process's share of each batch from the present step on."""
        s, count = self.settings, self.processes.count
        share = s.batch // count
        while self.step < self.last:
            epoch, place = divmod(self.step, self.steps_per_epoch)
            generator = torch.Generator().manual_seed(1_000_003 * s.seed + epoch)
            order = torch.randperm(len(self.train), generator=generator).tolist()
            for at in range(place * s.batch, self.steps_per_epoch * s.batch, s.batch):
                rows = order[at + self.processes.rank * share :][:share]
                batch = default_collate([self.train[i] for i in rows])
                if not isinstance(batch, (list, tuple)) or len(batch) < 2:
                    raise UsageError(f"--data {s.data}: an item must be a tuple (x, y) or longer")
                yield tuple(part.to(self.device) for part in batch)

    def once(self, batch: tuple[Tensor, ...]) -> Tensor:
        """One step; (loss, penalty), detached."""
        x, y, *rest = batch
        penalty = self.model.penalty
        extras = (y,) if penalty.own_loss is not None else tuple(rest)
        if len(extras) != penalty.extras:
            raise UsageError(
                f"{type(penalty).__name__} needs {penalty.extras} more tensors of each item of "
                f"--data, after (x, y); there are {len(extras)}"
            )
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate()
        self.optimiser.zero_grad()
        result, value = self.wrapped(x, *extras)
        out = shared.chosen(result, self.model.output)
        loss = self.loss.values(out, y).mean()
        (loss + self.settings.weight * value).backward()
        self.optimiser.step()
        self.step += 1
        return torch.stack([loss.detach().float(), value.detach().float()])

    def rate(self) -> float:
        """The learning rate of this step, by the step alone."""
        if self.settings.schedule == "constant":
            return self.settings.lr
        return 0.5 * self.settings.lr * (1 + math.cos(math.pi * self.step / self.last))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean loss, and accuracy where the labels are classes, on the test set."""
        sharded = self.settings.wrap == "fsdp2" and self.processes.count > 1
        whole: Any = self.wrapped
        if sharded:
            whole.unshard()  # the net alone is called, whose parameters are in pieces otherwise
        self.model.eval()
        total, hits, count, classes = 0.0, 0, 0, False
        size = self.settings.batch
        for at in range(0, len(self.test), size):
            rows = [self.test[i] for i in range(at, min(at + size, len(self.test)))]
            x, y, *_ = (part.to(self.device) for part in default_collate(rows))
            out = shared.chosen(self.model.net(x), self.model.output)
            total += float(self.loss.values(out, y).sum())
            classes = not y.is_floating_point() and out.dim() == 2
            hits += int((out.argmax(1) == y).sum()) if classes else 0
            count += len(y)
        self.model.train()
        if sharded:
            whole.reshard()
        measured = {"test loss": total / count}
        return measured | ({"test accuracy": hits / count} if classes else {})


def _random() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, inner, more = states["python"]
    random.setstate((version, tuple(inner), more))
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(states["numpy"]))


def _python_random() -> dict[str, Any]:
    """Python's generator and, where it is in use, NumPy's."""
    states: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    return states


# -------------------------------------------------------------------------------------- the rest


class Metrics:
    """metrics.jsonl, and TensorBoard's file beside it."""

    def __init__(self, run: Training) -> None:
        self.path = run.folder / "metrics.jsonl"
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # a line that was being written when the process was killed
                    continue
                if row["step"] <= run.step:
                    kept.append(line)
        shared.replace(self.path, "".join(f"{line}\n" for line in kept).encode())
        self.board: Any = None
        if run.settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def add(self, row: dict[str, Any]) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UsageError(f"{self.path} could not be written ({error.strerror})") from error
        if self.board is not None:
            for name, value in row.items():
                if name not in ("step", "epoch"):
                    self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def run(arguments: argparse.Namespace) -> int:
    """Train to the end, or to the next Ctrl-C."""
    settings = Settings.read(arguments)
    require("safetensors", *(["tensorboard"] if settings.tensorboard else []), extra="train")
    existing = Checkpoints(Path(settings.out) / "checkpoints", settings.keep).all()
    if existing and not arguments.resume:
        raise UsageError(
            f"--out: {settings.out} holds a run of {existing[-1][0]} steps: --resume to go on with "
            "it, or another --out"
        )
    shared.keep_memory()
    try:
        return _whole(Training(settings), arguments)
    finally:
        if dist.is_available() and dist.is_initialized():
            gc.collect()  # a wrapped model that is still there would keep the group's threads alive
            # Gloo's threads hold what backward handed them until they next run, and one that drops
            # it while Python is ending aborts the process (stock PyTorch's too).
            time.sleep(0.2)
            dist.destroy_process_group()


def _whole(training: Training, arguments: argparse.Namespace) -> int:
    settings = training.settings
    resumed = training.resume() if arguments.resume else False
    first = training.processes.first
    if first:
        told = json.dumps(asdict(settings), indent=1)
        shared.replace(training.folder / "settings.json", told.encode())
    metrics = Metrics(training) if first else None
    quiet = arguments.json or not first
    if not quiet:
        begin = f"from step {training.step}" if resumed else "from the beginning"
        print(f"{training.last} steps, {begin}; {settings.penalty}, weight {settings.weight:g}")
    handlers = {s: signal.signal(s, _stopper(training)) for s in (signal.SIGINT, signal.SIGTERM)}
    last: dict[str, Any] = {}
    try:
        last = _steps(training, metrics, quiet)
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        if metrics is not None:
            metrics.close()
    if training.stopped:
        if first:
            again = _again(settings, arguments)
            print(f"stopped after step {training.step}, which is saved. To go on:", file=sys.stderr)
            print(f"  {again}", file=sys.stderr)
        training.processes.wait()
        return 130
    weights: dict[str, Any] = get_model_state_dict(training.wrapped, options=WHOLE)
    if first:
        net = {name.removeprefix("net."): t for name, t in weights.items()}
        shared.replace(training.folder / "model.safetensors", _packed(net))
        if arguments.json:
            print(json.dumps({"steps": training.step, **last, "out": settings.out}, indent=1))
        else:
            print(f"done: {training.folder / 'model.safetensors'}")
    training.processes.wait()  # a process that leaves early takes the others' connections with it
    return 0


def _stopper(training: Training) -> Any:
    def stop(number: int, frame: Any) -> None:
        # Asked for twice: but torchrun passes on what the terminal has sent to every process.
        if training.stopped and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        training.stopped = True

    return stop


def _steps(training: Training, metrics: Metrics | None, quiet: bool) -> dict[str, Any]:
    settings, row = training.settings, {}
    if training.step == 0:
        training.save()
    for batch in training.batches():
        values = training.once(batch)
        step, end = training.step, training.step == training.last
        training.stopped = training.processes.any(training.stopped, training.device)
        whole = step % training.steps_per_epoch == 0  # epochs
        if step % settings.log_every == 0 or whole or end:
            loss, penalty = training.processes.mean(values).tolist()
            row = {"step": step, "epoch": (step - 1) // training.steps_per_epoch + 1,
                   "loss": loss, "penalty": penalty}  # fmt: skip
            if training.test is not None and (whole or end):
                row |= training.validate()
            if not all(math.isfinite(v) for v in (loss, penalty)):
                raise UsageError(
                    f"the loss is {loss}, the penalty {penalty} at step {step}: lower --lr"
                )
            if metrics is not None:
                metrics.add(row)
            if not quiet:
                print("   ".join(f"{n} {v:.4g}" for n, v in row.items()), flush=True)
        if step % settings.checkpoint_every == 0 or end or training.stopped:
            training.save()
        if training.stopped:
            break
    return row


def _again(settings: Settings, arguments: argparse.Namespace) -> str:
    """The command that goes on with this run."""
    words = ["doubleback", "train", *([arguments.config] if arguments.config else [])]
    if (count := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        nodes = ["--nnodes", str(count // here)] if count > here else []
        words = ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", *words]
    for field in fields(settings):
        value = getattr(arguments, field.name)
        if value is not None and value is not False:
            words.append(f"--{field.name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return " ".join([*words, "--resume"])
