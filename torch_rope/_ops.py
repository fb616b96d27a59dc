"""The operators and their namespace. All other modules take both from here, because a build for the Hugging Face Hub has
another namespace, and a file of its own in place of this one.
"""

import sys
from pathlib import Path

import torch


def _require_matching_torch() -> None:
    """Raises ImportError if the extension was built for another release of torch: loading it would crash."""
    record = Path(__file__).with_name("built_for_torch.txt")
    if not record.exists():
        raise ImportError(
            f"torch_rope in {record.parent} is not built. Build it with "
            "`pip install --no-build-isolation -e .` in its source folder. If torch_rope is also installed elsewhere, "
            "start Python in another folder to use that one."
        )
    built_for = record.read_text().strip()
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torch_rope was built for torch {built_for} and this is torch {torch.__version__}. Install the wheel for "
            "this torch, or build again with `pip install --no-build-isolation --no-deps --force-reinstall .` in the "
            "source folder."
        )


_require_matching_torch()

try:
    from ._C import devices  # noqa: F401  the import registers the operators
except ImportError as error:
    this = f"{sys.implementation.cache_tag} and torch {torch.__version__}"
    raise ImportError(f"torch_rope has no library that {this} can load; build it again ({error})") from error

ops = torch.ops.rope


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the full name of an operator, such as rope::rotate."""
    return f"rope::{op_name}"
