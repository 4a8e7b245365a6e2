"""The environment has the versions that SGLang's release requires."""

from importlib.metadata import version

import pytest

PINS = {"sglang": "0.5.23", "torch": "2.14.1", "transformers": "5.19.0", "openai": "2.8.0"}


@pytest.mark.parametrize(("package", "pin"), PINS.items())
def test_the_packages_are_those_that_were_tested(package, pin):
    assert version(package).partition("+")[0] == pin
