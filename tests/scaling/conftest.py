"""Graphs with kept fields, and plans of them, for one rank."""

from __future__ import annotations

import pytest

from tests.plans.networks import Planned


@pytest.fixture(scope="session")
def ladder() -> Planned:
    return Planned()
