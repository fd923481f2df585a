"""One thread for each test: the sizes are tiny, and several tests run side by side."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
