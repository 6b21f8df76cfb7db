# ruff: noqa: E501
"""What keys of other trainers mean together: meshes, schedules, adapters, and what no file says."""

from pathlib import Path

import pytest

from compose.cli.migrate import migrated
from tests.support.command_lines import ARGUMENTS, DEEPSPEED, MEGATRON, TITAN

FSDP = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: %s}\n"
HPZ = DEEPSPEED % '"stage": 3, "zero_hpz_partition_size": %s'
SET = [
    ("a.yaml", FSDP % "NO_SHARD", ["zero = 0"]),  # it goes before what distributed_type says
    ("a.yaml", FSDP % "SHARD_GRAD_OP", ["zero = 2"]),
    ("a.yaml", "distributed_type: DEEPSPEED\n", ["zero = 2"]),  # Accelerate's default
    ("a.json", HPZ % 4, ["zero = 3", "zero3_reshard = 4"]),
    ("a.json", HPZ % 1, ["zero = 3"]),
    ("a.json", DEEPSPEED % '"stage": 3}, "tensor_parallel": {"autotp_size": 0', ["zero = 3"]),
    (
        "a.json",
        HPZ.replace("zero_hpz_partition_size", "mics_shard_size") % '"4"',
        ["zero = 3", "dp_shard = 4", "dp_replicate = 2"],
    ),
    ("a.json", HPZ.replace("zero_hpz_partition_size", "mics_shard_size") % -1, ["zero = 3"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), SET)
def test_what_a_mesh_becomes(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    (tmp_path / name).write_text(text)
    whole, entries = migrated([tmp_path / name], 8)
    lines = whole.split("[parallel]\n")[1].split("\n\n")[0].splitlines()
    assert not [entry for entry in entries if entry.kind == "refused"], entries
    assert [line.partition("  #")[0] for line in lines] == expected


GELU = f"{MEGATRON} --global-batch-size 8 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
GELU += " --max-position-embeddings 64 --position-embedding-type"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("rope", 'activation = "gelu_tanh"'),  # which Megatron-LM fuses with the bias
        ("rope --no-bias-gelu-fusion", 'activation = "gelu"'),
        ("rope --disable-bias-linear", 'activation = "gelu"'),
        ("learned_absolute --no-bias-gelu-fusion", 'activation = "gelu"'),
        ("rope --swiglu", 'activation = "silu"'),
    ],
)
def test_which_gelu_megatron_computes(tmp_path: Path, flags: str, line: str) -> None:
    (tmp_path / "a.sh").write_text(f"{GELU} {flags}")
    text, entries = migrated([tmp_path / "a.sh"], 8)
    assert not [entry for entry in entries if entry.kind == "refused"], entries
    assert line in text


DEVIATION = "weights are drawn with a standard deviation of 0.02 here"
REPLIES = "compose tokenize --chat makes samples of which replies alone are learnt"
NUMBERS = [
    ("a.sh", f"{MEGATRON} --init-method-std 0.006", f"--init-method-std = 0.006: {DEVIATION}"),
    ("a.sh", f"{MEGATRON} --init-method-std 0.02", ""),
    ("a.sh", f"{MEGATRON} --fp8-recipe blockwise", "one scale for a whole tensor"),
    ("a.toml", TITAN + '[float8]\nfilter_fqns = ["output", "wq"]\n', "names the layers that are in float8"),
    ("b.json", f'{ARGUMENTS}, "train_on_prompt": true}}', f"train_on_prompt = true: {REPLIES}"),
    ("b.json", f'{ARGUMENTS}, "train_on_inputs": false, "assistant_only_loss": true}}', ""),
    ("b.json", f'{ARGUMENTS}, "mask_history": true}}', "every reply of a chat is learnt here"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), NUMBERS)
def test_what_changes_the_numbers_of_a_run_is_said(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text + " --global-batch-size 8" * (name == "a.sh"))
    lines = [e.line for e in migrated([tmp_path / name], 8)[1] if e.kind == "changed in meaning"]
    assert not said or any(said in line for line in lines)
    assert said or not any(word in line for line in lines for word in (DEVIATION, REPLIES))


def test_chats_that_are_not_packed(tmp_path: Path) -> None:
    """Here they are, so that a batch of as many samples has more of them."""
    for more, count in (
        ("", 1),
        (', "sample_packing": false', 1),
        (', "packing": true', 0),
        (', "stage": "pt"', 0),
        (', "rl": "dpo"', 0),
    ):
        (tmp_path / "a.json").write_text(f"{ARGUMENTS}{more}}}")
        lines = [e.line for e in migrated([tmp_path / "a.json"], 8)[1]]
        assert sum("of chats, train.global_batch has more" in line for line in lines) == count, more


ADAMW = '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, %s}}}'


@pytest.mark.parametrize(
    ("text", "cure", "line"),
    [
        (ADAMW % '"bias_correction": false', "true", "optimizer.params.bias_correction = false: AdamW always corrects the bias of its running means here; nearest: true"),
        (ADAMW % '"amsgrad": true', "false", "optimizer.params.amsgrad = true: AMSGrad is not here; nearest: false"),
        (f'{ARGUMENTS}, "additional_target": "embed_tokens"}}', "null", "additional_target: adapters alone are trained; nearest: remove it, or train the whole model"),
        (f'{ARGUMENTS}, "split_batches": true}}', "false", "split_batches = true: per_device_train_batch_size is of one rank here, not of all; nearest: false, with that number divided by the ranks"),
        (f'{ARGUMENTS}, "lora_bias": "all"}}', '"none"', "lora_bias = all: adapters alone are trained; nearest: none"),
    ],
)  # fmt: skip
def test_what_another_optimizer_or_adapter_would_need(
    tmp_path: Path, text: str, cure: str, line: str
) -> None:
    """What is named as the nearest is taken."""

    def refused(content: str) -> list[str]:
        (tmp_path / "a.json").write_text(content)
        return [e.line for e in migrated([tmp_path / "a.json"], 8)[1] if e.kind == "refused"]

    assert refused(text) == [f"a.json: {line}"]
    head, _, value = text.rpartition(": ")
    assert refused(head + ": " + cure + value[len(value.rstrip("}")) :]) == []


def test_dropout_by_default(tmp_path: Path) -> None:
    """Megatron-LM's is 0.1; a flag of 0 is what models do here."""
    for flags, count in (
        ("", 2),
        (" --hidden-dropout 0.0", 1),
        (" --hidden-dropout 0 --attention-dropout 0.0", 0),
    ):
        (tmp_path / "a.sh").write_text(f"{MEGATRON} --global-batch-size 8{flags}")
        changed = [
            e.line for e in migrated([tmp_path / "a.sh"], 8)[1] if e.kind == "changed in meaning"
        ]
        assert sum("dropout is in no file" in line for line in changed) == count, flags


TRAPS = [
    ("a.json", DEEPSPEED % '"stage": 2, "offload_param": {"device": "cpu"}', "at stage 2 it is left out"),
    ("a.json", DEEPSPEED % '"stage": 2', "it is 1.0 in DeepSpeed since June 2026, and 0 before"),
    ("a.toml", TITAN + "[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = 1\n", "so that this run is in float32"),
    ("b.json", ARGUMENTS + ', "fsdp": "full_shard auto_wrap"}', "fsdp = auto_wrap: needs no key here"),
]  # fmt: skip


WARMUP = '"warmup_type": "linear", "warmup_num_steps": 4, "total_num_steps": 10'
SCHEDULE = (
    '{"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": %s}},'
    ' "scheduler": {"type": "%s", "params": {%s}}, "gradient_clipping": "auto"}'
)
AUTOS = (
    SCHEDULE.partition(', "scheduler"')[0] % '"auto", "betas": "auto"'
    + ', "gradient_clipping": "auto"}'
)
LEFT = ARGUMENTS.replace(', "learning_rate": 1e-4', "") + "}"
ALONE = '{"zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}'
ADAPTERS = ["alpha = 32.0", "dropout = 0.05", 'targets = "all-linear"']
TRAIN = "train.py --per_device_train_batch_size 2 --learning_rate 1e-4 --max_steps 10"
RECOMPUTE = "--recompute-granularity full --recompute-num-layers 4 --recompute-method"
SAMPLES = MEGATRON.replace("--train-iters 100", "--train-samples 1000000 --global-batch-size 512")
WSD = "--lr-decay-style WSD --lr-wsd-decay-style linear"
# Files, lines of the TOML that they give, and words of a note on them.
GIVES: list[tuple[dict[str, str], list[str], str]] = [
    ({"a.json": AUTOS, "b.json": LEFT}, ["lr = 5e-05", 'schedule = "linear"', "beta2 = 0.999"], ""),
    ({"a.json": ALONE, "b.json": f'{ARGUMENTS}, "optim": "adamw_torch"}}'}, ['schedule = "linear"', "max_norm = 1.0"], ""),
    ({"a.json": SCHEDULE % ("5e-5", "WarmupDecayLR", WARMUP)}, ["lr = 0.001", 'schedule = "linear"'], "WarmupDecayLR's is 0.001"),
    ({"a.json": SCHEDULE % ("5e-5", "WarmupDecayLR", f'{WARMUP}, "warmup_max_lr": 1e-4')}, ["lr = 0.0001"], ""),
    ({"a.json": SCHEDULE % ('"auto"', "WarmupDecayLR", f'{WARMUP}, "warmup_max_lr": "auto"'), "b.json": f"{ARGUMENTS}}}"}, ["lr = 0.0001"], ""),
    ({"a.json": SCHEDULE % ("5e-5", "WarmupLR", WARMUP)}, ["lr = 5e-05"], "in new DeepSpeed, and 0.001 in old"),
    ({"a.json": SCHEDULE % ("5e-5", "WarmupCosineLR", WARMUP)}, ["lr = 5e-05", "min_lr = 0.0001"], "begins a step before the warm-up ends"),
    ({"b.json": f'{ARGUMENTS}, "beta": 0.01}}'}, ["[dpo]", "beta = 0.01"], "ORPO, KTO and CPO"),
    ({"b.json": f'{ARGUMENTS}, "loss_type": "sigmoid", "beta": 0.2}}'}, ["beta = 0.2"], "read as DPO's"),
    ({"b.json": f'{ARGUMENTS}, "loss_type": "nll"}}'}, ["seed = 42"], ""),
    ({"b.json": f'{ARGUMENTS}, "deepspeed": "x/z.json"}}'}, ["zero = 3"], ""),
    ({"b.json": f'{ARGUMENTS}, "deepspeed": "zero2"}}'}, ["zero = 2"], ""),
    ({"b.json": f'{ARGUMENTS}, "deepspeed": "zero3_offload"}}'}, ["zero = 3", 'offload = "cpu"'], ""),
    ({"b.json": f'{ARGUMENTS}, "fsdp": "full_shard", "fsdp_config": "x/f.json"}}'}, ['offload = "cpu"'], ""),
    ({"a.sh": "accelerate launch --config_file z.yaml train.py --learning_rate 1 --per_device_train_batch_size 2 --max_steps 2"}, ["zero = 3"], ""),
    ({"b.json": f"{ARGUMENTS}}}"}, ["interval = 500", "keep_last = 1000000"], ""),
    ({"a.sh": f"{SAMPLES} --save-interval 9"}, ["interval = 9", "keep_last = 1000000"], ""),
    ({"a.toml": f"{TITAN}decay_ratio = 0.0\n[checkpoint]\nenable = true"}, ['schedule = "constant"', "warmup = 1"], ""),
    ({"a.toml": f"{TITAN}[checkpoint]\nenable = true"}, ["interval = 500", "keep_last = 10"], ""),
    ({"b.json": LEFT.replace("}", ', "max_prompt_length": 9}')}, ["# lr = ?", 'schedule = "linear"'], "pairs"),
    ({"b.json": LEFT.replace("}", ', "beta": 1, "min_lr": 1e-6}')}, ["# lr = ?"], "min_lr: 1e-06 as a part of"),
    ({"b.json": LEFT.replace("}", ', "train_type": "full"}')}, ["# lr = ?", 'schedule = "cosine"', "beta2 = 0.95", "weight_decay = 0.1"], ""),
    ({"b.json": LEFT.replace("}", ', "sft_type": "lora"}')}, ["# lr = ?", "# warmup = ?", "# weight_decay = ?", "# schedule = ?", "alpha = 32.0"], ""),
    ({"a.yaml": "base_model: x\nmicro_batch_size: 2\nlearning_rate: 2e-4\n"}, ["lr = 0.0002", 'schedule = "cosine"', "epochs = 1.0", "# warmup = ?", "# param = ?", "keep_last = 4"], ""),
    ({"a.yaml": "base_model: x\nmicro_batch_size: 2\nlearning_rate: 2e-4\nbf16: true\nmax_steps: 9\nwarmup_steps: 4\nfsdp_version: 2\n"}, ["warmup = 4", 'param = "bfloat16"', "zero = 3"], ""),
    ({"b.json": LEFT.replace("}", ', "train_type": "lora", "torch_dtype": "bfloat16"}')}, ['param = "bfloat16"', "# global_batch = ?", *ADAPTERS, "rank = 8"], "updates weights of this type"),
    ({"b.json": f'{ARGUMENTS}, "finetuning_type": "lora", "lora_target": "all", "bf16": true}}'}, ['targets = "all-linear"', "rank = 8"], ""),
    ({"b.json": f'{ARGUMENTS}, "use_peft": true, "lora_target_modules": "all-linear"}}'}, ["# param = ?", *ADAPTERS, "rank = 16"], ""),
    ({"b.json": f'{ARGUMENTS}, "rl": "dpo", "adapter": "lora", "lora_dropout": 0.1, "sequence_len": 512}}'}, ["seq_len = 1024", "beta = 0.1"], "goes without dropout"),
    ({"a.sh": f"accelerate launch --mixed_precision bf16 --use_deepspeed --gradient_accumulation_steps 4 {TRAIN}"}, ['param = "bfloat16"', "zero = 2", "global_batch = 64"], ""),
    ({"a.sh": f"torchrun {TRAIN} --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{\"min_lr\": 1e-5}}'"}, ["min_lr = 0.1"], ""),
    ({"a.sh": f"accelerate launch --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP {TRAIN} --num_warmup_steps 2"}, ["zero = 2", "warmup = 2", "max_norm = 0.0"], ""),
    ({"a.sh": f"{MEGATRON} --global-batch-size 8 {RECOMPUTE} uniform"}, ['mode = "full"', "segment = 4"], ""),
    ({"a.sh": f"{SAMPLES} --lr-warmup-samples 300"}, ["warmup = 1", "warmup_from = 0"], "warm-up is 0.585938 steps"),
    ({"a.sh": f"{SAMPLES} --lr-warmup-samples 183105 --lr-decay-samples 900000"}, ["warmup = 358", "decay_end = 1758"], "has 1757.81 steps"),
    ({"a.sh": f"{MEGATRON} --global-batch-size 8 --lr-warmup-fraction 0.07"}, ["warmup = 7"], ""),
    ({"a.sh": f"{SAMPLES} {WSD} --lr-wsd-decay-samples 51200"}, ['schedule = "constant"', "decay = 100"], ""),
    ({"a.sh": f"{SAMPLES} {WSD} --lr-wsd-decay-samples 51000"}, ["decay = 100"], "the decay of 51000 samples has 99.6094 steps"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "expected", "noted"), GIVES)
def test_what_files_give(
    tmp_path: Path, files: dict[str, str], expected: list[str], noted: str
) -> None:
    named = {"z.json": ALONE, "f.json": '{"fsdp_offload_params": true}'}
    named["z.yaml"] = (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: y/z.json}\n"
    )
    for name, text in (named | files).items():
        (tmp_path / name).write_text(text)
    text, entries = migrated([tmp_path / name for name in files], 8)
    assert not [entry for entry in entries if entry.kind == "refused"], entries
    assert set(expected) <= {line.partition("  #")[0] for line in text.splitlines()}, text
    changed = "\n".join(entry.line for entry in entries if entry.kind == "changed in meaning")
    assert noted in changed or noted in text
    assert noted or "_lr is in no file" not in changed
    assert "gradient_clipping is in no file" not in changed


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.sh", f"{MEGATRON} --global-batch-size 8 {RECOMPUTE} block", "segment"),
        ("a.sh", f"{MEGATRON} --global-batch-size 8 --lr-decay-style cosine --lr-wsd-decay-iters 5", "decay"),
        ("b.json", f'{ARGUMENTS}, "stage": "dpo", "finetuning_type": "lora", "lora_dropout": 0.1}}', "dropout"),
    ],
)  # fmt: skip
def test_a_key_that_means_something_else_here(tmp_path: Path, name: str, text: str, key: str) -> None:
    (tmp_path / name).write_text(text)
    assert f"\n{key} = " not in migrated([tmp_path / name], 8)[0]


@pytest.mark.parametrize(("name", "text", "expected"), TRAPS)
def test_a_change_of_meaning_is_said(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    _, entries = migrated([tmp_path / name], 2 if name == "a.toml" else 8)
    said = [e.line for e in entries if e.kind in ("changed in meaning", "not needed")]
    assert [line for line in said if expected in line], said
