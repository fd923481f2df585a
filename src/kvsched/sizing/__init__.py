"""Pool sizing before and at boot: how many tokens a deployment holds, from a model's config.json and measured items, and why.

Nothing here is fitted. Bytes are exact integers; a figure that is not known is asked for, never assumed.
"""

from kvsched.sizing.account import Account, CountMismatch, Gain, Item, Misbooked, Overbooked, Provenance, gain, misbooked_weights
from kvsched.sizing.amounts import gib, parse_bytes
from kvsched.sizing.capacity import (
    Concurrency,
    Resource,
    SharedBlocks,
    attended_requests,
    concurrency,
    fits,
    longest_output,
    max_servable_tokens,
    running_on,
    state_slots_for,
)
from kvsched.sizing.costs import LayerCosts, Widths
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.dtypes import Dtype, dtype
from kvsched.sizing.geometry import Attention, Layer, Model, Recurrent, cell_bytes, heads_per_rank
from kvsched.sizing.predict import band_tokens, compare, micro_batch_cap
from kvsched.sizing.reading import read_model
from kvsched.sizing.report import Report
from kvsched.sizing.sized import size
from kvsched.sizing.stages import Pool, Stage, best_cut, caps, even_cut, pool
from kvsched.sizing.token_split import TokenSplit, token_split, world_cost
from kvsched.sizing.windows import least_window_pages, window_chunk, window_peak, window_pool

__all__ = [
    "Account", "Attention", "Concurrency", "CountMismatch", "Deployment", "Dtype", "Gain", "Item", "Layer", "LayerCosts", "Misbooked",
    "Model", "Overbooked", "Pool", "Provenance", "Recurrent", "Report", "Resource", "SharedBlocks", "Stage", "TokenSplit", "Widths",
    "attended_requests", "band_tokens", "best_cut", "caps", "cell_bytes", "compare", "concurrency", "dtype", "even_cut", "fits", "gain",
    "gib", "heads_per_rank", "least_window_pages", "longest_output", "max_servable_tokens", "micro_batch_cap", "misbooked_weights",
    "parse_bytes", "pool", "read_model", "running_on", "size", "state_slots_for", "token_split", "window_chunk", "window_peak",
    "window_pool", "world_cost",
]
