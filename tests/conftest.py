import os

import pytest
from hypothesis import settings

from frontends import FRONTENDS

try:
    import jax
except ImportError:
    pass
else:
    jax.config.update("jax_enable_x64", True)
    # most of the time of a test on JAX is compiling
    jax.config.update("jax_disable_most_optimizations", True)

# Tests that ask for a number of examples of their own multiply it by THOROUGHNESS.
settings.register_profile("default", deadline=None, max_examples=100, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(params=FRONTENDS, scope="session")
def st(request):
    """A front-end; tests that do without it are for NumPy."""
    return FRONTENDS[request.param]()
