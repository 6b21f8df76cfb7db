"""The Plan of a decoder of transformers as it is, from what the model says of itself.

``base_model_tp_plan`` of its config says how tensor parallel cuts its layers. The list of layers, the
tied weights and the heads say the rest. This is the only file that knows transformers' names for them.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from compose.errors import ConfigError
from compose.ops.tensors import tied_names
from compose.parallel.mesh import Parallel
from compose.parallel.name_patterns import around, inside, matching, parent
from compose.parallel.tensor_parallel import Conv1DColwise, Conv1DRowwise, HeadParallel, SharedHeads
from compose.parallel.vocabulary_parallel import LocalEmbedding
from compose.plan import Pipeline, Plan

# Names of transformers' styles, of versions 4.48 to 5.23. With "_rep" (later "_gather_output",
# "_split_input") activations between two layers are whole on every rank, as fused weights need.
_STYLES: dict[str, tuple[type[ParallelStyle], dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "colwise_rep": (ColwiseParallel, {"output_layouts": Replicate()}),
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "rowwise": (RowwiseParallel, {}),
    "rowwise_rep": (RowwiseParallel, {"input_layouts": Replicate()}),
    "rowwise_split_input": (RowwiseParallel, {"input_layouts": Replicate()}),
    "embedding_rowwise": (LocalEmbedding, {"stream": Replicate()}),
    # A norm of each head, (B, L, heads, width): a rank has some heads, so the gradient is summed.
    "replicated_with_grad_allreduce": (SequenceParallel, {"sequence_dim": 2, "use_local_output": True}),
}
_HEAD_NORM = "replicated_with_grad_allreduce"
# Layers of models whose config has no base_model_tp_plan, by config.model_type.
_PLANS = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise_rep",
        "h.*.attn.c_proj": "rowwise_rep",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
}
_TRANSPOSED: dict[type, type[ParallelStyle]] = {
    ColwiseParallel: Conv1DColwise,
    RowwiseParallel: Conv1DRowwise,
}


class _NoTensorParallel(Exception):
    """Tensor parallel of a model has no form here; the reason."""


def plan_of(model: nn.Module, parallel: Parallel | None = None) -> Plan:
    """Return the plan of a decoder of transformers, such as ``LlamaForCausalLM(config)``.

    ``print(plan_code(plan))`` prints it as code to keep and to change.

    Args:
        model: The model, on any device. Its ``config.use_cache`` is set to False: training needs no
            cache of keys, and layers that run again would add to it twice.
        parallel: The degrees, if they are known: what the model cannot do is then refused by name.

    Returns:
        The plan. If tensor parallel of the model has no form here, ``Plan.tensor`` is empty.

    Raises:
        ConfigError: The model is no such decoder, or cannot be cut as ``parallel`` asks.
    """
    parallel = parallel or Parallel()
    decoder = _Decoder(model)
    decoder.config.use_cache = False
    tensor: dict[str, ParallelStyle] = {}
    replicate: list[str] = []
    heads, reason = None, ""
    try:
        tensor, replicate, heads = decoder.tensor(parallel.loss)
    except _NoTensorParallel as error:
        reason = str(error)
    wants = (
        ("tp", reason),
        ("cp", "attention of transformers takes whole sequences"),
        ("ep", "experts of transformers have no style"),
    )
    problems = [
        f"parallel.{axis}: {type(model).__name__} cannot be cut so: {why}; use parallel.{axis} = 1"
        for axis, why in wants
        if getattr(parallel, axis) > 1 and why
    ]
    if problems:
        raise ConfigError(*problems)
    layers, first, last = decoder.layers, decoder.first, decoder.last
    each = f"{layers}.*"
    units = [[each], first + last] if decoder.tied else [first, [each], last]
    return Plan(
        tensor=tensor,
        replicate=replicate,
        shard=[unit[0] if len(unit) == 1 else unit for unit in units if unit],
        checkpoint=[each],
        compile=[each],
        pipeline=Pipeline(first, layers, last, whole_forward=True),
        heads=heads,
        output=decoder.output,
    )


def plan_code(plan: Plan) -> str:
    """Return Python code, with its imports, that makes a plan of :func:`plan_of`."""
    imports: dict[str, set[str]] = {}
    call = _code(plan, imports, "")
    lines = [
        f"from {name} import {', '.join(sorted(names))}" for name, names in sorted(imports.items())
    ]
    return "\n".join([*lines, "", f"plan = {call}"])


def _code(value: Any, imports: dict[str, set[str]], indent: str) -> str:
    """Return an expression that makes a part of a plan; ``imports`` gets what it names."""
    deeper = indent + "    "
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        items = [f'"{key}": {_code(each, imports, deeper)}' for key, each in value.items()]
        return _lines("{", items, "}", indent, 0)
    if isinstance(value, list):
        return _lines("[", [_code(each, imports, deeper) for each in value], "]", indent)
    if not isinstance(value, (Plan, Pipeline, ParallelStyle, Placement)):
        return repr(value)
    kind = type(value)
    path = "compose" if kind in (Plan, Pipeline) else kind.__module__
    if path.startswith("torch."):
        path = "torch.distributed.tensor" + (".parallel" if isinstance(value, ParallelStyle) else "")
    imports.setdefault(path, set()).add(kind.__name__)
    if isinstance(value, Placement):
        return repr(value)
    parameters = inspect.signature(kind).parameters
    optional = all(parameter.default is not parameter.empty for parameter in parameters.values())
    plain = cast(Any, kind)() if optional else None
    defaults = {
        name: parameter.default if plain is None else _argument(plain, name)
        for name, parameter in parameters.items()
    }
    items = [
        f"{name}={_code(held, imports, deeper)}"
        for name in parameters
        if (held := _argument(value, name)) != defaults[name] and held not in ([], {})
    ]
    return _lines(f"{kind.__name__}(", items, ")", indent, 0 if kind is Plan else 80)


def _lines(begin: str, items: list[str], end: str, indent: str, width: int = 80) -> str:
    one = f"{begin}{', '.join(items)}{end}"
    if len(indent) + len(one) < width:
        return one
    return f"{begin}{''.join(f'{chr(10)}{indent}    {item},' for item in items)}\n{indent}{end}"


def _argument(made: Any, name: str) -> Any:
    """Return what ``made`` was made with; PyTorch's styles make a tuple of one layout."""
    held = made.sequence_sharding[0].dim if name == "sequence_dim" else getattr(made, name)
    return held[0] if isinstance(held, tuple) and len(held) == 1 else held


def _is_output_of(name: str, value: ast.expr) -> bool:
    """Return whether an expression is a call of ``name``, at most in float32 or contiguous."""
    while isinstance(value, ast.Call) and ast.unparse(value.func) != name:
        func = value.func
        if not isinstance(func, ast.Attribute) or func.attr not in ("float", "contiguous"):
            return False
        if value.args or value.keywords:
            return False
        value = func.value
    return isinstance(value, ast.Call)


class _Decoder:
    """The parts of a decoder of transformers, by their names in the model."""

    def __init__(self, model: Any) -> None:
        if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
            raise ConfigError(
                f"plan_of: {type(model).__name__} is no model of transformers; write its Plan"
                " (docs/plan.md)"
            )
        self.model, self.config = model, model.config.get_text_config()
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.names = list(self.modules)
        base = model.base_model_prefix
        self.prefix = f"{base}." if base in self.modules else ""
        self.layers = self._layers()
        self.first, self.last = self._ends()

    def _layers(self) -> str:
        count = getattr(self.config, "num_hidden_layers", None)
        lists = [
            name
            for name, module in self.modules.items()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if not lists:
            raise ConfigError(
                f"plan_of: {type(self.model).__name__} has no ModuleList of num_hidden_layers ="
                f" {count}; write its Plan (docs/plan.md)"
            )
        return min(lists, key=lambda name: name.count("."))

    def _ends(self) -> tuple[list[str], list[str]]:
        """Return the modules that run before the layers and hold weights or drop, and those after."""
        outside = {"", *around(self.layers)}
        ends: tuple[list[str], list[str]] = ([], [])
        passed = False
        for name, module in self.modules.items():
            passed = passed or name == self.layers
            if name in {*outside, self.layers} or parent(name) not in outside:
                continue
            if any(True for _ in module.parameters()) or isinstance(module, nn.Dropout):
                ends[passed and not isinstance(module, nn.Embedding)].append(name)
        return ends

    def _name_of(self, module: nn.Module) -> str:
        return next((name for name, other in self.modules.items() if other is module), "")

    @property
    def tied(self) -> bool:
        """Whether a weight of the first modules is one of the last, too."""
        ends = set(self.first), set(self.last)
        return any(
            all(any(inside(name, end) for name in names) for end in ends)
            for names in tied_names(self.model)
        )

    @property
    def output(self) -> str:
        """The projection onto the vocabulary, if forward returns its output unchanged."""
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear or head.bias is not None:
            return ""
        try:
            source = inspect.getsource(inspect.unwrap(type(self.model).forward))
        except OSError:  # it was typed, and is in no file
            return ""
        values = [
            node.value
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if re.match(r"logits(\[|$)", ast.unparse(target))
        ]
        name = self._name_of(head)
        return name if len(values) == 1 and _is_output_of(f"self.{name}", values[0]) else ""

    def tensor(
        self, sharded: bool
    ) -> tuple[dict[str, ParallelStyle], list[str], tuple[int, int] | None]:
        """Return the styles, the modules that stay whole, and the heads if ranks have some of them.

        ``sharded``: the logits stay sharded over the vocabulary. Raises _NoTensorParallel.
        """
        asked = getattr(self.config, "base_model_tp_plan", None) or _PLANS.get(self.config.model_type)
        if not asked:
            raise _NoTensorParallel("its config has no base_model_tp_plan")
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        parameters = [name for name, _ in self.model.named_parameters()]
        styles: dict[str, ParallelStyle] = {}
        placed = dict[str, str]()
        for pattern, kind in asked.items():
            path = self.prefix + pattern
            names = matching(path, self.names)[0]
            if not names and not matching(path, parameters)[0]:
                continue  # of layers that this config has not
            if not names or kind not in _STYLES:
                raise _NoTensorParallel(f"{path} asks for {kind}, which has no form here")
            style, given = _STYLES[kind]
            if hasattr(self.modules[names[0]], "nf"):
                style = _TRANSPOSED[style]
            shared = kind == "colwise" and path.endswith(("k_proj", "v_proj")) and kv_heads < heads
            styles[path] = HeadParallel(kv_heads) if shared else style(**given)
            placed |= dict.fromkeys(names, kind)
        head = self.model.get_output_embeddings()
        if head is None:
            raise _NoTensorParallel("it has no projection onto the vocabulary")
        layout = Shard(-1) if sharded else Replicate()
        ends: dict[str, ParallelStyle] = {
            self._name_of(self.model.get_input_embeddings()): LocalEmbedding(Replicate()),
            self._name_of(head): ColwiseParallel(output_layouts=layout, use_local_output=not sharded),
        }
        styles, placed = styles | ends, placed | dict.fromkeys(ends, "")
        # Modules whose columns are cut, and whose inner activations are a rank's part.
        cut = {parent(name) for name, kind in placed.items() if kind == "colwise"}
        attention = {name for name in cut if "att" in name.rpartition(".")[2]}
        if kv_heads < heads and any(
            hasattr(self.modules[n], "num_key_value_groups") for n in attention
        ):
            styles |= {_pattern(name): SharedHeads(kv_heads) for name in attention}
        replicate = dict[str, None]()
        for name, module in self.modules.items():
            own = list(module.parameters(recurse=False))
            if name in placed or not own:
                continue
            if not name or any(True for _ in module.children()):
                raise _NoTensorParallel(
                    f"{name or 'the model'} has weights of its own beside those of modules"
                )
            width = getattr(self.modules[parent(name)], "head_dim", None)
            # transformers before version 5 leaves norms of heads out of its plans.
            if parent(name) in attention and all(p.shape == (width,) for p in own):
                style, given = _STYLES[_HEAD_NORM]
                styles[_pattern(name)] = style(**given)
            elif inside(name, cut):  # its input may be a rank's part, or whole
                raise _NoTensorParallel(
                    f"its base_model_tp_plan leaves out {_pattern(name)}, between cut layers"
                )
            else:
                replicate[_pattern(name)] = None
        return styles, list(replicate), (heads, kv_heads) if attention else None


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
