"""Every test here needs a CUDA device, and is skipped if there is none."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    compiler = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # its modules use deprecated names
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(absent)
            item.add_marker(compiler)


def _deterministic_algorithms():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)


deterministic = pytest.fixture(_deterministic_algorithms, name="deterministic")
deterministic_module = pytest.fixture(_deterministic_algorithms, scope="module", name="deterministic_module")
