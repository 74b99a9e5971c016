"""One thread per worker, Triton's interpreter where there is no GPU, and property tests that draw
the same examples in every run.

`HYPOTHESIS_PROFILE=explore pytest tests/…` draws new ones; `make fuzz` draws new networks.
"""

import gc
import logging
import os

# Inductor compiles in this process: a pool of its own takes seconds to start, and both cores have
# a worker of pytest's already.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():  # read when Triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch._dynamo import guards

from doubleback import captured
from doubleback.run import flattening

pytest.register_assert_rewrite("support")  # so that its assertions show their values too
torch.set_num_threads(1)

# What only costs time, a fifth of the suite's: Dynamo flushes the CPU's caches to time each new
# guard, for its log alone; pytest listens to every logger that does not propagate, so that PyTorch
# would write its trace, with a stack to each tensor.
guards.profile_guard_manager = lambda *_: 0.0
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="module")
def nothing_old_is_collected() -> None:
    """What is there before a module's tests, imports and PyTorch's caches, is no garbage: the
    collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


_common = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
    "print_blob": True,
}
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, **_common)
hypothesis.settings.register_profile("explore", **_common)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(autouse=True)
def sweeps(monkeypatch, request) -> None:
    """Tests are about sweeps, on networks so small that autograd would be quicker; those that are
    marked `choice` leave that to the library."""
    if request.node.get_closest_marker("choice") is None:
        monkeypatch.setattr(captured, "CHOOSE", False)


@pytest.fixture
def flattened(monkeypatch) -> list:
    """Every graph that is flattened while a test runs; sweeps that cannot be leave none."""
    made, original = [], flattening.flatten

    def recorded(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(flattening, "flatten", recorded)
    return made
