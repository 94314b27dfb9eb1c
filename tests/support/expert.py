"""Expert plans, given by layout constraints: Megatron's layout of tensor, sequence and data
parallelism, and FSDP × tensor parallelism.

Mesh axes are (data, tensor). Activations between blocks are ``S(0) S(1)``: the batch is sharded
over data and the sequence over tensor. Linear layers at the start of an attention or MLP block are
column-parallel, those at the end are row-parallel. Embedding and head are vocabulary-parallel. FSDP
also shards each stored matrix over data, along the dim that tensor does not shard.
"""

from __future__ import annotations

from autopar.constraints import LayoutConstraint, layout

RESIDUAL, GATHERED = "S(0) S(1)", "S(0) R"


def llama(*, fsdp: bool = False) -> tuple[LayoutConstraint, ...]:
    """Return constraints for the Llama models of transformers."""
    block, column, row = (
        "model.layers.*.",
        "S(1) S(0)" if fsdp else "R S(0)",
        "S(0) S(1)" if fsdp else "R S(1)",
    )
    norms = [f"{block}input_layernorm", f"{block}post_attention_layernorm", "model.norm"]
    columns = [
        *(f"{block}self_attn.{n}_proj" for n in "qkv"),
        *(f"{block}mlp.{n}_proj" for n in ("gate", "up")),
        "lm_head",
    ]
    rows = [f"{block}self_attn.o_proj", f"{block}mlp.down_proj"]
    return (
        layout("model.embed_tokens", weight="R S(0)", storage=column, input=GATHERED),
        *(layout(n, storage="R R", input=RESIDUAL, output=RESIDUAL) for n in norms),
        *(layout(n, weight="R S(0)", storage=column, input=GATHERED) for n in columns),
        *(layout(n, weight="R S(1)", storage=row, input="S(0) S(2)") for n in rows),
    )


def gpt2(*, fsdp: bool = False) -> tuple[LayoutConstraint, ...]:
    """Return constraints for the GPT-2 models of transformers, whose linear layers store their
    weight as [in, out] and whose q, k and v are fused."""
    block, column, row = (
        "transformer.h.*.",
        "S(0) S(1)" if fsdp else "R S(1)",
        "S(1) S(0)" if fsdp else "R S(0)",
    )
    norms = [f"{block}ln_1", f"{block}ln_2", "transformer.ln_f"]
    return (
        layout(
            "transformer.wte",
            weight="R S(0)",
            storage="S(1) S(0)" if fsdp else "R S(0)",
            input=GATHERED,
        ),
        layout("transformer.wpe", storage="R R"),
        *(layout(n, storage="R R", input=RESIDUAL, output=RESIDUAL) for n in norms),
        *(
            layout(f"{block}{n}", weight="R S(1)", storage=column, input=GATHERED)
            for n in ("attn.c_attn", "mlp.c_fc")
        ),
        *(
            layout(f"{block}{n}", weight="R S(0)", storage=row)
            for n in ("attn.c_proj", "mlp.c_proj")
        ),
        layout("lm_head", input=GATHERED),
    )
