import os

from hypothesis import settings

# Tests that ask for a number of examples of their own multiply it by THOROUGHNESS.
settings.register_profile("default", deadline=None, max_examples=100, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
