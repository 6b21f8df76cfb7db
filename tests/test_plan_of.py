"""The plan of models of transformers as they are: its text, what it refuses, and the proof of it."""

import inspect
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from compose import Options, Parallel, Plan, Trial, plan_code, plan_of, verify
from compose.plan import resolve
from compose.proof.report import Report
from tests.support.helpers import ROOT, agreed, proved, refusal, tier
from tests.support.pool import Pool, make_mesh

# Odd sizes: no axis divides the vocabulary or the width of the network; 6 heads share 2 keys.
_SIZES: dict[str, Any] = {
    "vocab_size": 51,
    "hidden_size": 24,
    "intermediate_size": 23,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
# The batch has the padding token, whose row of the embedding learns nothing from its look-ups.
_TOKENS: dict[str, Any] = {"pad_token_id": 3, "bos_token_id": None, "eos_token_id": None}
_GPT2: dict[str, Any] = {"vocab_size": 51, "n_embd": 24, "n_layer": 2, "n_head": 6, "n_inner": 23}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
# The config's own keys of each class. A later stage of Gemma 2 begins with a layer of another kind, and
# its ranks share a head.
CLASSES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _SIZES,
    "Qwen2ForCausalLM": _SIZES,
    "Qwen3ForCausalLM": _SIZES | {"head_dim": 6},
    "MistralForCausalLM": _SIZES | {"sliding_window": 5},
    "GPT2LMHeadModel": _GPT2,
    "Gemma2ForCausalLM": _SIZES
    | {
        "head_dim": 6,
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 5,
        "sliding_window": 5,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 1.5,
    },
    "Phi3ForCausalLM": _SIZES,
    "Qwen3MoeForCausalLM": _SIZES
    | {
        "head_dim": 6,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
}


def built(name: str, **keys: Any) -> Any:
    """A small model of a class of transformers, with random weights."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**_TOKENS, **CLASSES[name], **keys}))


def _code_of(name: str) -> str:
    with torch.device("meta"):
        return plan_code(plan_of(built(name)))


def _made(code: str) -> Plan:
    results: dict[str, Any] = {}
    exec(code, results)
    return results["plan"]


def _parts(plan: Plan) -> dict[str, Any]:
    """The fields of a plan, with styles by class and attributes."""
    values = {each.name: getattr(plan, each.name) or None for each in fields(plan)}
    return values | {"tensor": {name: (type(s), vars(s)) for name, s in plan.tensor.items()}}


@pytest.mark.parametrize("name", CLASSES)
def test_the_code_makes_the_plan(name: str) -> None:
    with torch.device("meta"):
        model = built(name)
    plan = plan_of(model)
    assert _parts(_made(plan_code(plan))) == _parts(plan)
    resolve(plan, model)
    assert model.config.use_cache is False


def test_the_code_of_the_page() -> None:
    """docs/new-architecture.md shows the code of Qwen3's plan."""
    page = (ROOT / "docs" / "new-architecture.md").read_text()
    shown = re.search(r"<!-- plan_code of Qwen3 -->\n```python\n(.*?)\n```", page, re.S)
    assert shown
    assert shown[1] == _code_of("Qwen3ForCausalLM")


# What the plans differ in: styles of the layers, modules that stay whole, units, heads and output.
TEXTS = {
    "GPT2LMHeadModel": """
        "transformer.h.*.attn.c_attn": Conv1DColwise(output_layouts=Replicate()),
        "transformer.h.*.attn.c_proj": Conv1DRowwise(input_layouts=Replicate()),
        "transformer.h.*.mlp.c_fc": Conv1DColwise(),
        "transformer.h.*.mlp.c_proj": Conv1DRowwise(),
        first=["transformer.wte", "transformer.wpe", "transformer.drop"],""",
    "Gemma2ForCausalLM": """
        "model.layers.*.self_attn": SharedHeads(n_kv_heads=1),
        "model.layers.*.post_feedforward_layernorm",
    shard=["model.layers.*", ["model.embed_tokens", "model.norm", "lm_head"]],
    heads=(6, 1),""",
    "Phi3ForCausalLM": """
        "model.layers.*.self_attn.qkv_proj": ColwiseParallel(output_layouts=Replicate()),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(use_local_output=False),
    output="lm_head",""",
    "Qwen3MoeForCausalLM": """
    shard=["model.embed_tokens", "model.layers.*", ["model.norm", "lm_head"]],
    checkpoint=["model.layers.*"],
    compile=["model.layers.*"],
    output="lm_head",""",
}
# Attention of GPT-2 and Phi-3 is whole on every rank. Gemma 2 caps its logits after the projection.
WITHOUT = {
    "GPT2LMHeadModel": "heads=",
    "Gemma2ForCausalLM": "    output=",
    "Phi3ForCausalLM": "heads=",
    "Qwen3MoeForCausalLM": "tensor=",
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_plans_differ_in(name: str) -> None:
    code = _code_of(name)
    lines = code.splitlines()
    at = [lines.index(line) for line in TEXTS[name].strip("\n").splitlines()]
    assert at == sorted(at)
    assert WITHOUT[name] not in code


class OldNorm(nn.Module):
    """Not of transformers."""


def test_refusals() -> None:
    with torch.device("meta"):
        llama, moe = built("LlamaForCausalLM"), built("Qwen3MoeForCausalLM")
    assert refusal(plan_of, OldNorm()) == (
        "plan_of: OldNorm is no model of transformers; write its Plan (docs/plan.md)"
    )
    assert refusal(plan_of, llama, Parallel(cp=2, ep=2)).splitlines() == [
        "parallel.cp: LlamaForCausalLM cannot be cut so: attention of transformers takes whole"
        " sequences; use parallel.cp = 1",
        "parallel.ep: LlamaForCausalLM cannot be cut so: experts of transformers have no style; use"
        " parallel.ep = 1",
    ]
    assert refusal(plan_of, moe, Parallel(tp=2)) == (
        "parallel.tp: Qwen3MoeForCausalLM cannot be cut so: model.layers.*.mlp.experts.gate_up_proj"
        " asks for packed_colwise, which has no form here; use parallel.tp = 1"
    )
    assert refusal(plan_of, llama.model, Parallel(tp=2)) == (
        "parallel.tp: LlamaModel cannot be cut so: it has no projection onto the vocabulary; use"
        " parallel.tp = 1"
    )
    assert not plan_of(llama.model).tensor
    llama.config.num_hidden_layers = 7
    assert refusal(plan_of, llama) == (
        "plan_of: LlamaForCausalLM has no ModuleList of num_hidden_layers = 7; write its Plan"
        " (docs/plan.md)"
    )


@pytest.mark.parametrize(
    ("value", "is_output"),
    [
        ("self.lm_head(h[:, -1:])", True),
        ("self.lm_head(h).float().contiguous()", True),
        ("self.lm_head(h) * scale", False),
        ("self.lm_head(h)\nlogits[..., 3] = 0.0", False),
        ("self.lm_head(h).mul(scale)", False),
        ("self.lm_head(h).float(scale)", False),
        ("self.lm_head.other(h)", False),
        ("torch.tanh(self.lm_head(h))", False),
    ],
)
def test_what_forward_does_to_logits(value: str, is_output: bool) -> None:
    """A loss in chunks computes the projection itself, and would leave a factor out."""
    with torch.device("meta"):
        llama = built("LlamaForCausalLM")
    with mock.patch.object(inspect, "getsource", return_value=f"logits = {value}"):
        assert plan_of(llama).output == ("lm_head" if is_output else "")


def test_logits_with_a_factor_are_no_output() -> None:
    import transformers

    sizes: dict[str, Any] = CLASSES["LlamaForCausalLM"] | _TOKENS | {"logits_scaling": 10.0}
    with torch.device("meta"):
        model = transformers.HyperCLOVAXForCausalLM(transformers.HyperCLOVAXConfig(**sizes))
    assert plan_of(model).output == ""


def test_a_class_that_is_in_no_file_has_no_output() -> None:
    with torch.device("meta"):
        llama = built("LlamaForCausalLM")
    assert plan_of(llama).output == "lm_head"
    typed: dict[str, Any] = {"Llama": type(llama), "__name__": "__console__"}
    exec("class Typed(Llama):\n    def forward(self, *args): return super().forward(*args)", typed)
    llama.__class__ = typed["Typed"]
    assert plan_of(llama).output == ""


def _batch(length: int) -> dict[str, Tensor]:
    tokens = torch.randint(51, (4, length + 1), generator=torch.Generator().manual_seed(1))
    tokens[:, 2] = _TOKENS["pad_token_id"]
    return {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}


def proof(
    name: str, degrees: dict[str, int], change: str = "", keys: Mapping[str, Any] = MappingProxyType({})
) -> Report:
    """What verify says of a class on a mesh, with sequences of an odd length and a batch of 1."""
    given: dict[str, Any] = {"dp_shard": 1, **degrees}
    parallel = Parallel(**given)
    model = built(name, **keys)
    plan = plan_of(model, parallel)
    if change:
        plan = _changed(plan, change)
    untied = mock.patch("compose.parallel.tensor_parallel.tie", return_value=None)
    with untied if change == "tied weights are two" else nullcontext():
        mesh, options = make_mesh(parallel), Options(parallel)
        return verify(model, plan, mesh, _batch(11), options, Trial(micro_batch=1))


def _changed(plan: Plan, change: str) -> Plan:
    tensor = dict(plan.tensor)
    if change == "norms of heads are not summed":
        names = [name for name in tensor if name.endswith(("q_norm", "k_norm"))]
        for name in names:
            del tensor[name]
        return replace(plan, tensor=tensor, replicate=[*plan.replicate, *names])
    if change == "columns of another rank":
        tensor["model.layers.*.mlp.up_proj"] = OtherColumns()
        return replace(plan, tensor=tensor)
    return plan


class OtherColumns(ColwiseParallel):
    """It takes the columns of a neighbour."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        part = cast(nn.Linear, module).weight.detach().chunk(size)[(rank + 1) % size]
        module = super()._apply(module, device_mesh)
        with torch.no_grad():
            cast(DTensor, module.weight).to_local().copy_(part)
        return module


MESHES = {
    "tp 2": {"tp": 2},
    "dp 2": {"dp_shard": 2},
    "tp 2 dp 2": {"tp": 2, "dp_shard": 2},
    "pp 2": {"pp": 2},
}
# The slow tier has each class once and each mesh; -m full has all of the others.
SLOW = {
    ("LlamaForCausalLM", "tp 2 dp 2"),
    ("Qwen2ForCausalLM", "pp 2"),
    ("Qwen3ForCausalLM", "tp 2"),
    ("MistralForCausalLM", "pp 2"),
    ("GPT2LMHeadModel", "tp 2"),
    ("GPT2LMHeadModel", "pp 2"),
    ("Gemma2ForCausalLM", "tp 2"),
    ("Gemma2ForCausalLM", "pp 2"),
    ("Phi3ForCausalLM", "tp 2"),
    ("Qwen3MoeForCausalLM", "dp 2"),
}
CASES = [
    pytest.param(name, mesh, marks=tier(slow=True, full=(name, mesh) not in SLOW))
    for name in CLASSES
    for mesh in MESHES
    if not (name == "Qwen3MoeForCausalLM" and "tp" in mesh)
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_equals_one_process(pool: Pool, name: str, mesh: str) -> None:
    degrees = MESHES[mesh]
    ranks = torch.tensor(list(degrees.values())).prod().item()
    report = proved(pool.run(proof, int(ranks), name, degrees))
    assert {row.name for row in report.rows if row.quantity == "gradient"} == {
        parameter for parameter, _ in built(name).named_parameters()
    }


# What is wrong on purpose, the class, and the gradients that verify has to accuse, and no others.
FAULTS = {
    "norms of heads are not summed": ("Qwen3ForCausalLM", r"self_attn\.[qk]_norm\.weight"),
    "columns of another rank": ("LlamaForCausalLM", ""),
    "tied weights are two": ("Gemma2ForCausalLM", r"model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=tier(slow=True, full="norms" not in c)) for c in FAULTS]
)
def test_what_is_wrong_is_seen(pool: Pool, change: str) -> None:
    name, accused = FAULTS[change]
    keys = {"intermediate_size": 24}  # both ranks have as many columns
    report = agreed(pool.run(proof, 2, name, {"tp": 2}, change, keys))
    assert not report.ok
    wrong = {row.name for row in report.rows if row.quantity == "gradient" and not row.ok}
    assert not accused or wrong == {
        n for n, _ in built(name).named_parameters() if re.search(accused, n)
    }
