import contextlib
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from cases import Case
from frontends import FRONTENDS

# Most of the time of a test on JAX is compiling: what one process of a run has compiled, or has computed
# by the slow definitions, is there for the others.
_SHARED = "SPARSETOPK_TESTS"
_made = None if _SHARED in os.environ else tempfile.mkdtemp(prefix="sparsetopk-tests-")
os.environ |= {
    _SHARED: _made or os.environ[_SHARED],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.environ[_SHARED])
# What another version of the package has compiled may call operators that this one does not have.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(os.environ[_SHARED], "inductor"))
# Several processes run tests at once: threads of theirs would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import jax
except ImportError:
    pass
else:
    jax.config.update("jax_enable_x64", True)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="for tests of the Triton kernels, e.g. cuda")


def pytest_configure(config):
    os.environ["SPARSETOPK_DEVICE"] = device = config.getoption("device")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported


# Tests that ask for a number of examples of their own multiply it by THOROUGHNESS.
settings.register_profile("default", deadline=None, max_examples=100, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# These see every case on JAX. To trace and compile one takes a second, so that the others see every
# operator with p = 2, and another p where they differ most.
_WHOLE_TABLE = (
    "test_equals_the_reference",
    "test_derivatives_equal_central_differences",
)


_OTHER_P = ("topk_mask(p=1.33)", "topk_mag(p=1.33,debias=True)")


# What stands around the library: experiments, site, explorer, packages; and processes, and what takes
# long. These are `slow` as a whole, and not imported where none of them is asked for.
_AROUND = (
    "test_baselines",
    "test_batches_paths",
    "test_explorer",
    "test_fallback",
    "test_figures",
    "test_gallery",
    "test_other_device",
    "test_pruning_experiment",
    "test_real_models",
    "test_report",
    "test_reproduce",
    "test_tasks",
    "test_timing",
    "test_trainers",
    "test_triton_long",
    "test_triton_losses",
    "test_triton_pav",
    "test_triton_selection",
    "test_vitexp",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file is passed over; None leaves that to others."""
    if config.getoption("markexpr") == "not slow" and collection_path.stem in _AROUND:
        return True
    return None


# Before pytest looks at -m.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in _AROUND:
            item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if _is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    groups: dict[object, int] = {}
    items.sort(key=lambda item: groups.setdefault(_group(item), len(groups)))


def pytest_collection_finish() -> None:
    """What is there by now stays: to look through it for garbage takes a fifth of the time of a test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _group(item: pytest.Item) -> object:
    """Tests that share a slow reference stand together, so that one process runs them all."""
    if not item.path.stem.startswith("test_batches") or not hasattr(item, "callspec"):
        return item.nodeid
    return "batches", item.callspec.params.get("kind"), item.callspec.params.get("p")


def _is_left_out(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("st") != "jax" or item.originalname in _WHOLE_TABLE:
        return False
    case = parameters.get("case")
    return isinstance(case, Case) and case.p != 2.0 and str(case) not in _OTHER_P


def pytest_unconfigure() -> None:
    if _made:
        shutil.rmtree(_made, ignore_errors=True)


@pytest.fixture(params=FRONTENDS, scope="session")
def st(request):
    """A front-end; tests that do without it are for NumPy."""
    return FRONTENDS[request.param]()


@pytest.fixture(params=["core", "XLA operations"])
def way(request):
    """Both implementations on JAX, on the CPU."""
    from jax_ways import in_xla_operations
    from sparsetopk.jax._solvers import ffi

    if request.param == "core" and not ffi.available():
        pytest.skip("the core was built without its handlers for XLA")
    with contextlib.nullcontext() if request.param == "core" else in_xla_operations():
        yield request.param
