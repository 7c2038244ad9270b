"""A hub on this machine, as the models' tests have it."""

from tests.unit.models.conftest import client, home, hub

__all__ = ["client", "home", "hub"]
