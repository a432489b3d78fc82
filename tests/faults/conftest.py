"""Engines that are watched, one for all tests of a file."""

from __future__ import annotations

import pytest

from tests.faults.watched import Watched


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(tmp_path_factory.mktemp("scratch"), "disk")
