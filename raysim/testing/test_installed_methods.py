"""The checks of `raysim.testing` for every method that an installed package offers."""

import pytest

from raysim import testing
from raysim.rules.methods import registry


def installed_methods() -> list[str]:
    """Return the names of the algorithms that other packages offer."""
    return [name for name, _, origin in registry.catalogue("algorithm") if origin != "raysim"]


@pytest.mark.parametrize("name", installed_methods())
def test_an_installed_method_has_one_result(name: str) -> None:
    """Check a method in loop mode, on lanes, and after a resume.

    Args:
        name: name of the method.
    """
    testing.check_method(name)
