"""The passes that bring a captured joint graph into normal form, in order.

Each pass changes the graph in place, keeps what it computes (up to rounding), and sets phase, module and source of the
nodes it makes; afterwards `propagate` fills in exact fake values and `assign_keys` the keys.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.capture.passes.attention import replace_attention
from autopar.capture.passes.batch_norm import replace_group_norm_backward, split_batch_norm
from autopar.capture.passes.clean import clean, fold_views
from autopar.capture.passes.embedding import replace_embeddings
from autopar.capture.passes.experts import see_experts
from autopar.capture.passes.extremes import replace_extremes
from autopar.capture.passes.fused import separate_fused_projections
from autopar.capture.passes.likelihood import split_likelihood
from autopar.capture.passes.linears import unflatten_products, unflatten_sums
from autopar.capture.passes.lookups import replace_bags, replace_masked_rows
from autopar.capture.passes.loss import split_cross_entropy
from autopar.capture.passes.positions import replace_positions
from autopar.capture.passes.rejoin import rejoin
from autopar.capture.passes.rms_norm import split_rms_norms
from autopar.capture.passes.strided import copy_before_strided

PASSES: tuple[tuple[str, Callable[[fx.Graph], None]], ...] = (
    ("clean", clean),
    ("parts", rejoin),
    ("embeddings", replace_embeddings),
    ("bags", replace_bags),
    ("masked rows", replace_masked_rows),
    ("positions", replace_positions),
    ("attention", replace_attention),
    ("batch norms", split_batch_norm),
    ("group norms", replace_group_norm_backward),
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
)
