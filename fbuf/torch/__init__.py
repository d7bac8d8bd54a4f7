"""torch on top of fbuf: batches as tensors by DLPack, tensors as rows, a loader, tensordicts, nested tensors.

`fbuf/TORCH.md` lists what is shared, copied and refused.
torch (`pip install "fbuf[torch]"`) is imported by the first call, not with this module; tensordict by the two functions
that need it.
"""

from fbuf.torch._from_torch import from_torch
from fbuf.torch._loader import Loader
from fbuf.torch._nested import nested
from fbuf.torch._rollouts import from_tensordict
from fbuf.torch._tensordict import index_of, to_tensordict
from fbuf.torch._to_torch import to_torch

__all__ = ["Loader", "from_tensordict", "from_torch", "index_of", "nested", "to_tensordict", "to_torch"]
