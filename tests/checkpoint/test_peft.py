"""LoRA against peft: the same training on one process, and the same files."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compose.__main__ import main
from compose.build import fill_weights
from compose.checkpoint import store
from compose.checkpoint.dcp_storage import PartsReader
from compose.checkpoint.hf_folder import checkpoints, name_of
from compose.checkpoint.hf_stored import stored
from compose.checkpoint.peft import (
    ADAPTER_CONFIG,
    KEYS,
    adapter_problems,
    merged_weights,
    named_adapters,
    taken_for_experts,
    target_modules,
    write_adapters,
)
from compose.cli.command_line import _of_first_rank
from compose.cli.commands import convert
from compose.cli.generate import job_of, open_model
from compose.memory.lora import is_adapter
from compose.ops.dropout import DropoutKey, Masks, dropouts
from compose.plan import Plan
from compose.proof.one_process import Widened
from tests.support.checkpoints import assert_bitwise, resume
from tests.support.command_lines import execute
from tests.support.helpers import Keys, make_job, refused, tiered
from tests.support.hugging_face import save_model
from tests.support.pool import Pool, make_mesh
from tests.support.small_models import ALL, ATTENTION, DEEPSEEK, lora
from tests.support.training import keys_for, logged_steps, train

MODULES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
SHAPE: Keys = {"model__dim": 48, "model__n_heads": 6, "model__n_kv_heads": 2, "model__hidden_dim": 90}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face's folder of a Llama, every value another, of the size that weights have."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    save_model(folder, SHAPE)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        scaled = {n: 1 + t / 9 if t.ndim == 1 else t / 9 for n, t in tensors.items()}
        save_file(scaled, path, {"format": "pt"})
    return folder


def in_peft(base: Path, rank: int, alpha: int, **more: Any) -> Any:
    """peft's model of ``base``, with adapters at all linear layers but the output."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    options = {"r": rank, "lora_alpha": alpha, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**(options | more)))


class SameMask(torch.nn.Module):
    """The dropout of an adapter in peft, with the masks of ours."""

    def __init__(self, masks: Masks, module: Any) -> None:
        super().__init__()
        self.drop = lambda x: masks.drop(x, module.p, module)
        self.begin = lambda: setattr(module, "dropout_calls", 0)

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        return self.drop(x)


def same_masks(model: Any, reference: Any) -> Masks:
    """Let peft's adapters drop what those of ``model`` drop."""
    names = dropouts(model)
    masks = Masks(model, [model], names)
    hf_name = name_of("llama", make_job(1, **SHAPE).config.model.config)
    for name in names:
        place = stored(hf_name(name.replace(".lora.dropout", ".weight"))).name.removesuffix(".weight")
        theirs = reference.get_submodule(f"base_model.model.{place}.lora_dropout")
        theirs["default"] = SameMask(masks, model.get_submodule(name))
    assert sum(type(m) is SameMask for m in reference.modules()) == 14
    return masks


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "dora, rslora and dropout": (
        {"dora": True, "rslora": True, "dropout": 0.25},
        {"use_dora": True, "use_rslora": True, "lora_dropout": 0.25},
    ),
    "dropout": ({"dropout": 0.25}, {"lora_dropout": 0.25}),
}


@pytest.mark.parametrize("kind", tiered(KINDS, KINDS.keys() - {"plain", "dora, rslora and dropout"}))
def test_training_equals_peft(base: Path, kind: str) -> None:
    """Gradients of adapters other than 0, and 20 steps of AdamW from fresh ones, are the same to 1e-6.

    Both are in float64, and so are transformers' norms, which would compute in float32.
    """
    torch.manual_seed(0)
    ours_has, theirs_has = KINDS[kind]
    keys = SHAPE | lora(3, "all-linear", alpha=5, **ours_has) | {"checkpoint__load_hf": base}
    job = make_job(1, **keys, optimizer__lr=1e-2)
    model: Any = job.model
    fill_weights(model, job, torch.device("cpu"))
    model, reference = model.double(), in_peft(base, 3, 5, **theirs_has).double()
    masks = same_masks(model, reference) if "dropout" in ours_has else None
    reference.train()
    theirs = dict(reference.named_parameters())
    ours = dict(named_adapters(model, name_of("llama", job.config.model.config)))
    # peft saves the vector without ".weight".
    trained = {
        name.replace(".default", "").replace("_vector.weight", "_vector"): p
        for name, p in theirs.items()
        if p.requires_grad
    }
    assert set(ours) == set(trained)
    with torch.no_grad():
        for name, parameter in ours.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            if name.endswith("_vector"):  # both begin with the norms of the weights
                assert torch.allclose(trained[name], parameter, rtol=1e-6)
            trained[name].copy_(parameter)
    # With a smaller eps an element whose gradient is only rounding would take a full step.
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    steps = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], **options)
        for each in (model, reference)
    ]
    generator = torch.Generator().manual_seed(1)
    # The first step is not taken: its gradients are of a B that is not zero.
    for step in range(21):
        tokens = torch.randint(257, (2, 33), generator=generator)
        more = masks.begin(DropoutKey(step), torch.arange(2), None) if masks else {}
        losses, gradients = [], []
        for optimizer, logits_of, held in (
            (steps[0], lambda t: model(t, **more), ours),  # noqa: B023
            (steps[1], lambda t: reference(t).logits, trained),
        ):
            with Widened():
                logits = logits_of(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            gradients.append({name: p.grad for name, p in held.items()})
            if step:
                optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for name, one in gradients[0].items() if step == 0 else ():
            assert float((one - gradients[1][name]).norm() / one.norm()) < 1e-6, name
            if "lora_B" in name:
                ours[name].detach().zero_()
                trained[name].detach().zero_()
    for name, parameter in ours.items():
        other = trained[name].detach()
        assert float((parameter.detach() - other).norm() / other.norm()) < 1e-6, name


def run_of(base: Path, folder: Path, kind: Keys | None = None, **more: object) -> dict[str, object]:
    """The keys of a run of three steps with adapters over ``base``."""
    return keys_for(
        folder,
        **SHAPE,
        **(kind or lora()),
        checkpoint__load_hf=base,
        checkpoint__interval=2,
        train__seq_len=16,
        train__stop_after=3,
        optimizer__lr=1e-2,
        optimizer__warmup=0,
        **more,
    )


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_export_to_peft_and_merged(pool: Pool, base: Path, tmp_path: Path, dora: bool) -> None:
    """peft and transformers compute our model's logits from the files of a run on two ranks."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind = lora(targets="all-linear", dora=True, rslora=True, dropout=0.1) if dora else lora()
    keys = run_of(base, tmp_path / "run", kind, parallel__tp=2, parallel__dp_shard=1)
    pool.run(train, 2, keys)
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["lora"]["load_hf"] == str(base.resolve())
    held = PartsReader(checkpoint).read_metadata().state_dict_metadata
    assert all(".lora." in name for name in held)
    # Layers, targets, A and B and DoRA's vector; themselves and AdamW's three.
    assert len(held) == 2 * 7 * (2 + dora) * 4

    adapters, merged = tmp_path / "adapters", tmp_path / "merged"
    assert main(["convert", str(tmp_path / "run"), str(adapters)]) == 0
    assert main(["convert", str(tmp_path / "run"), str(merged), "--merged"]) == 0
    settings = json.loads((adapters / ADAPTER_CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 6)
    assert settings["target_modules"] == MODULES
    assert (settings["use_dora"], settings["use_rslora"]) == (dora, dora)
    assert settings["lora_dropout"] == (0.1 if dora else 0)
    if dora:  # as peft writes it where it was asked so
        settings["target_modules"] = "all-linear"
        (adapters / ADAPTER_CONFIG).write_text(json.dumps(settings))

    assert refused(convert, [str(tmp_path / "run"), str(tmp_path / "more"), "--dtype=bfloat16"]) == [
        "command line: --dtype: is for whole weights; give --merged too"
    ]

    tokens = torch.randint(257, (2, 21), generator=torch.Generator().manual_seed(2))
    plain = logits_of(AutoModelForCausalLM.from_pretrained(base), tokens)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapters))
    by_peft = logits_of(opened, tokens)
    by_transformers = logits_of(AutoModelForCausalLM.from_pretrained(merged), tokens)
    assert float((by_peft - plain).norm() / plain.norm()) > 1e-3
    assert float((by_transformers - by_peft).norm() / by_peft.norm()) < 1e-5

    # Our own model begins with peft's folder.
    again = make_job(1, **SHAPE, **kind, model__lora__load=adapters, checkpoint__load_hf=base)
    fill_weights(again.model, again, torch.device("cpu"))
    with torch.no_grad():
        ours = again.model.eval()(tokens)
    assert float((ours - by_peft).norm() / by_peft.norm()) < 1e-5


@pytest.mark.slow
def test_merged_weights_of_a_base_in_8_bits(pool: Pool, base: Path, tmp_path: Path) -> None:
    """They are the dequantized ones, with which the adapters were trained."""
    from transformers import AutoModelForCausalLM

    kind = lora(targets="all-linear", dora=True, base="int8")
    pool.run(train, 2, run_of(base, tmp_path / "run", kind, parallel__dp_shard=2))
    adapters, merged = tmp_path / "adapters", tmp_path / "merged"
    assert main(["convert", str(tmp_path / "run"), str(adapters)]) == 0
    assert main(["convert", str(tmp_path / "run"), str(merged), "--merged"]) == 0
    tokens = torch.randint(257, (2, 21), generator=torch.Generator().manual_seed(2))
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(merged), tokens)
    results = []
    for how in ("int8", "full"):
        more = {"model__lora__load": adapters, "model__lora__base": how}
        job = make_job(1, **(SHAPE | kind | more), checkpoint__load_hf=base)
        fill_weights(job.model, job, torch.device("cpu"))
        with torch.no_grad():
            ours = job.model(tokens)
        results.append(float((ours - theirs).norm() / theirs.norm()))
    assert results[0] < 1e-5
    assert results[1] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["full", "int8"])
def test_generate_with_adapters(pool: Pool, base: Path, tmp_path: Path, kept: str) -> None:
    """The text of a run with adapters is that of the merged weights."""
    pool.run(train, 1, run_of(base, tmp_path / "run", lora(base=kept)))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == 0
    words = [
        "--prompt=def ",
        "--temperature=0",
        "--max-tokens=9",
        "--tokenizer=bytes",
        "--run.device=cpu",
    ]
    texts = []
    for source in ("run", "merged"):
        made = execute("-m", "compose", "generate", str(tmp_path / source), *words)
        assert made.returncode == 0, made.stderr
        texts.append(made.stdout)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("def ")


def _opened(run: Path) -> dict[str, Tensor]:
    """On a rank of a pool: the adapters with which generate continues a text."""
    folders = checkpoints(run)
    job = job_of(run, folders, ())
    composition = open_model(job, folders, make_mesh(job.degrees), torch.device("cpu"))
    return {n: p.detach() for n, p in composition.named_parameters() if is_adapter(n)}


def test_a_run_goes_on_without_the_folder_of_its_first_adapters(pool: Pool, tmp_path: Path) -> None:
    """Its checkpoints hold the adapters. With dpo.beta the first ones are the reference's too."""
    more: Keys = {"checkpoint__interval": 1, "train__seq_len": 16, "model__n_layers": 1}
    given, adapters, run = SHAPE | lora() | more, tmp_path / "adapters", tmp_path / "second"
    pool.run(train, 1, keys_for(tmp_path / "first", **given, train__stop_after=1))
    assert main(["convert", str(tmp_path / "first"), str(adapters)]) == 0
    keys = keys_for(run, **given, model__lora__load=adapters, train__stop_after=1)
    pool.run(train, 1, keys)
    (before,) = pool.run(_opened, 1, run)
    shutil.rmtree(adapters)
    (after,) = pool.run(_opened, 1, run)
    assert_bitwise(after, before)
    job = make_job(1, **keys)
    assert _of_first_rank(job.config, job) == []
    pool.run(train, 1, keys | {"train__stop_after": 2})
    assert logged_steps(run) == [1, 2]
    gone = [f"model.lora.load: {adapters}: no such folder"]
    compared = dataclasses.replace(job.config, dpo=dataclasses.replace(job.config.dpo, beta=0.1))
    assert _of_first_rank(compared, job) == gone
    new = make_job(1, **keys | {"run__dir": tmp_path / "new"})
    assert _of_first_rank(new.config, new) == gone


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"r": 4}, "{config}: r is 4, not model.lora.rank = 3"),
        ({"lora_alpha": 5}, "{config}: lora_alpha is 5, not model.lora.alpha = 6"),
        ({"use_dora": True}, "{config}: use_dora is true, not model.lora.dora = false"),
        ({"use_rslora": True}, "{config}: use_rslora is true, not model.lora.rslora = false"),
        ({"lora_bias": True}, "{config}: lora_bias: true is not supported here"),
        (
            {"alora_invocation_tokens": [3]},
            "{config}: alora_invocation_tokens: [3] is not supported here",
        ),
        ({"a new\nkey": 0.5}, '{config}: "a new\\nkey": 0.5 is not supported here'),
        (
            {"init_lora_weights": "pissa_niter_4"},
            '{config}: init_lora_weights: "pissa_niter_4" is not supported here, as it may change the'
            " base weights too; save the adapters with peft's path_initial_model_for_weight_conversion,"
            " or merge them",
        ),
        (
            {},
            "{folder}: base_model.model.model.layers.*.mlp.gate_proj.lora_A.weight is missing, and"
            " model.lora.targets names its layer (2 of them)",
        ),
    ],
)
def test_other_adapters_are_not_loaded(tmp_path: Path, changed: Any, message: str) -> None:
    """Their rank, scale, kind or layers differ."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    job = make_job(1, **lora(targets=ATTENTION))
    hf_name, lacks = name_of("llama", job.config.model.config), not changed
    tensors = {name: torch.zeros(p.shape) for name, p in named_adapters(job.model, hf_name)}
    write_adapters(folder, job.config.model.lora, "", target_modules(job.model, hf_name), tensors)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | changed))
    wanted = make_job(1, **lora(targets=ALL if lacks else ATTENTION, load=folder))
    expected = message.format(config=folder / ADAPTER_CONFIG, folder=folder)
    assert adapter_problems(wanted)[0] == expected
    said = refused(fill_weights, wanted.model, wanted, torch.device("cpu"))
    assert said[0] == f"model.lora.load: {expected}"


def test_a_layer_that_peft_may_lose_is_named() -> None:
    """With transformers 5, peft takes a last word of DeepSeek's experts for the experts."""
    for targets, name in {"all-linear": "model.layers.0.mlp.down_proj", ATTENTION: ""}.items():
        job = make_job(1, **DEEPSEEK | lora(targets=targets) | {"model__bias_rate": 0.0})
        hf_name = name_of("deepseek_v3", job.config.model.config)
        words = target_modules(job.model, hf_name)
        assert taken_for_experts(words, job.model, hf_name) == name


def test_every_field_of_peft_is_looked_at() -> None:
    """A new version's new field fails here until somebody has said what it is."""
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields == KEYS.read | set(KEYS.only) | KEYS.besides
    assert len(fields) == len(KEYS.read) + len(KEYS.only) + len(KEYS.besides)
    assert KEYS.problems(LoraConfig(peft_type="LORA").to_dict()) == []  # type: ignore[arg-type]
    for key, values in KEYS.only.items():
        assert KEYS.problems(dict.fromkeys([key], values[0])) == []
        (line,) = KEYS.problems({key: "else"})
        assert line.startswith(f'{key}: "else" is not supported here')
    for key in KEYS.besides:
        assert KEYS.problems({key: "else"}) == []


@pytest.mark.parametrize("weights", [True, False, "gaussian", "orthogonal", "pissa", "olora"])
def test_how_adapters_began_changes_nothing_or_is_refused(
    base: Path, tmp_path: Path, weights: Any
) -> None:
    """peft's logits from the same tensors, by ``init_lora_weights``."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(12)[None]
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    ).save_pretrained(str(tmp_path))

    def logits() -> Tensor:
        return logits_of(
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path), tokens
        )

    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    plain = logits()
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config | {"init_lora_weights": weights}))
    assert torch.equal(logits(), plain) == (not KEYS.problems({"init_lora_weights": weights}))


def test_where_the_weights_of_adapters_have_been_is_said(tmp_path: Path) -> None:
    lora = store.Adapters(1, 2.0, "all-linear", "sha256 1", load_hf=str(tmp_path / "gone"))
    known = store.State(0, 0, 0, model=store.ModelFields(name="llama"), lora=lora)
    given = known, nn.Linear(1, 1), Plan(), str, lambda name, like: like
    assert refused(merged_weights, tmp_path / "step", *given) == [
        f"{tmp_path}/step: holds adapters of the weights in {tmp_path}/gone, which is no folder now;"
        " put them there again, or a link to them"
    ]


@pytest.mark.slow
def test_weights_of_another_base_are_refused(pool: Pool, base: Path, tmp_path: Path) -> None:
    """The same name of a folder, with other weights in it."""
    there = tmp_path / "base"
    shutil.copytree(base, there)
    pool.run(train, 1, run_of(there, tmp_path / "run"))
    path = next(p for p in there.glob("*.safetensors") if "lm_head.weight" in load_file(p))
    tensors = load_file(path)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    saved = tmp_path / "run/checkpoints/step-00000003"
    assert pool.run(refused, 1, resume, run_of(there, tmp_path / "run"))[0] == [
        f"{saved}: holds adapters of other weights than {there.resolve()} now has"
    ]
    assert refused(convert, [str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]) == [
        f"{saved}: holds adapters of other weights than {there.resolve()} now has"
    ]
