"""Exchange batches and rows with torch: tensors by DLPack, a loader, tensordicts, nested tensors.

`fbuf/TORCH.md` lists what is shared, copied and refused. torch (`pip install "fbuf[torch]"`) is imported by the first call,
tensordict by the functions that need it.
"""

from fbuf.torch._from_torch import from_torch
from fbuf.torch._loader import Loader
from fbuf.torch._tensordict import from_tensordict, index_of, to_tensordict
from fbuf.torch._to_torch import nested, to_torch

__all__ = ["Loader", "from_tensordict", "from_torch", "index_of", "nested", "to_tensordict", "to_torch"]
