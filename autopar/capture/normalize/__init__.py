"""The passes that convert a captured joint graph to normal form, in order.

Each pass changes the graph in place, preserves its results (up to rounding), and sets phase, module
and source of new nodes. Afterwards `propagate` sets exact fake values, and `assign_keys` sets the
keys.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.capture.normalize.clean import (
    clean,
    copy_before_strided,
    fold_views,
    rejoin,
    take_any_format,
)
from autopar.capture.normalize.composites import replace_attention, replace_extremes, see_experts
from autopar.capture.normalize.linears import (
    separate_fused_projections,
    unflatten_products,
    unflatten_sums,
)
from autopar.capture.normalize.lookups import (
    replace_bags,
    replace_embeddings,
    replace_masked_rows,
    replace_positions,
)
from autopar.capture.normalize.loss import split_cross_entropy, split_likelihood
from autopar.capture.normalize.norm_pieces import split_batch_norm, split_rms_norms

PASSES: tuple[tuple[str, Callable[[fx.Graph], None]], ...] = (
    ("clean", clean),
    ("parts", rejoin),
    ("embeddings", replace_embeddings),
    ("bags", replace_bags),
    ("masked rows", replace_masked_rows),
    ("positions", replace_positions),
    ("attention", replace_attention),
    ("batch norms", split_batch_norm),
    ("extremes", replace_extremes),
    ("root-mean-square norms", split_rms_norms),
    ("loss", split_cross_entropy),
    ("likelihood", split_likelihood),
    ("products", unflatten_products),
    ("sums", unflatten_sums),
    ("views of views", fold_views),
    ("clean again", clean),
    ("fused projections", separate_fused_projections),
    ("experts", see_experts),
    ("reads by strides", copy_before_strided),
    ("memory formats", take_any_format),
)
