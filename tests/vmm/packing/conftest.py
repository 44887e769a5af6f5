from __future__ import annotations

from collections.abc import Iterator

import pytest

from sleepbackends.vmm import address_space
from tests.native.build import HOST_LIBRARY, compile_host
from tests.simulators.cuda import find_compiler


@pytest.fixture(scope="package", autouse=True)
def _library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the source as it is, whatever was installed."""
    if find_compiler() is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("host")
    compile_host(folder / HOST_LIBRARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(address_space, "_FOLDER", folder)
        yield
