"""Expert plans, forced by layout constraints: Megatron's tensor + sequence + data layout, and FSDP
× tensor.

Mesh axes are (data, tensor). Activations between blocks are ``S(0) S(1)``: batch over data,
sequence over tensor. Linears before an attention or MLP are column-parallel, those after it
row-parallel; embedding and head are vocabulary-parallel. FSDP additionally rests every matrix
sharded over data, by the dim that tensor does not shard.
"""

from __future__ import annotations

from autopar.constraints import LayoutConstraint, layout

RESIDUAL, GATHERED = "S(0) S(1)", "S(0) R"


def llama(*, fsdp: bool = False) -> tuple[LayoutConstraint, ...]:
    """Constraints for transformers' Llama."""
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
    """Constraints for transformers' GPT-2, whose linears hold their weight as [in, out] and
    whose q, k and v are fused."""
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
