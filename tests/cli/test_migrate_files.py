# ruff: noqa: E501
"""What is wrong with the files of other trainers, in one line each; scripts; traps of meaning."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from compose.cli.migrate import migrated, read_leaves
from compose.cli.migrate_files import command_line
from compose.config.toml import load
from compose.optim.lr_schedule import learning_rate
from tests.support.command_lines import ARGUMENTS, DEEPSPEED, MEGATRON, TITAN, answered
from tests.support.helpers import refusal

SHAPE = " --num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm"
SHAPE += " --position-embedding-type rope --seq-length 64 --global-batch-size 8"
NOTHING = "is empty; give a file with keys"
# A file's name, its text, and the lines of the refusal, each without the file's name.
BAD: list[tuple[str, str, str]] = [
    *((name, " \n", NOTHING) for name in ("a.json", "a.yaml", "a.toml", "a.sh")),
    ("a.json", "{}", "has no keys; give a file with keys"),
    ("a.json", '{"train_batch_size": 8,', "line 1: JSON syntax: the file ends too early"),
    ("a.json", '{"lr": 1 "x": 2}', "line 1: JSON syntax: Expecting ',' delimiter"),
    ("a.json", '{"optimizer": {"type": "Adam"}, "optimizer": {"type": "Lamb"}}', "optimizer: stands twice; remove one of them"),
    ("a.json", "[1, 2]", "holds no keys, but one value; give a file with keys"),
    ("a.yaml", "distributed_type: FSDP\nfsdp_config: {a: 1", "line 2: YAML syntax: expected ',' or '}', but got '<stream end>'"),
    ("a.yaml", "mixed_precision: bf16\nmixed_precision: no\n", "mixed_precision: stands twice; remove one of them"),
    ("a.toml", "[training\nsteps = 1", "Expected ']' at the end of a table declaration (at line 1, column 10)"),
    ("a.toml", "[optimizer]\nlr = 1.0\n[optimizer]\nlr = 2.0\n", "Cannot declare ('optimizer',) twice (at line 3, column 11)"),
    ("a.sh", "torchrun pretrain_gpt.py --lr 1 --save 'x", "cannot be read as a shell script: No closing quotation; a config ends in .json, .yaml or .toml"),
    ("a.sh", f"{MEGATRON} --optimizer adam --optimizer sgd", "--optimizer: stands twice, with adam and sgd; remove one of them"),
    ("a.sh", "echo hello", "has no keys; give a file with keys"),
    ("a.sh", f"if [ -f x ]; then {MEGATRON}; fi", "if [ -f x ]: cannot be followed, and no command stands outside of it; write the command alone"),
    ("a.json", '{"zebra": 3}', "zebra: is no key of DeepSpeed, TrainingArguments, Accelerate, torchtitan, Megatron-LM"),
    ("a.sh", "f() { x.py --lr 1; }\ng() { y.py --lr 2; }", "f, g: nothing that can be followed calls these functions; write the command alone"),
    ("a.sh", f"for LR in 1 2; do {MEGATRON.replace('1e-4', '$LR')}; done", "--lr: $LR has no value in this script; write a value in its place"),
    ("a.json", DEEPSPEED.replace("8", "9") % '"stage": 1', "train_batch_size: 9 is not micro-batch 1 x 8 ranks of data parallel; nearest: 8"),
    ("a.json", DEEPSPEED % '"stage": "two"', 'zero_optimization.stage: expected 0 | 1 | 2 | 3, got "two"'),
    ("a.json", DEEPSPEED % '"stag": 2', "zero_optimization.stag = 2: DeepSpeed has no such key; the nearest known key is zero_optimization.stage, or remove it"),
    ("a.json", '{"train_batch_size": "many", "train_micro_batch_size_per_gpu": 1}', 'train_batch_size: expected a whole number, got "many"'),
    ("a.json", '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}', "train_batch_size: 8 is not micro-batch 2 x accumulation 3 x 8 ranks of data parallel; nearest: 48"),
    ("a.json", '{"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}', "optimizer.type = OneBitAdam: no such optimizer here; nearest: AdamW"),
    ("a.json", '{"train_batch_size": 8, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}', 'scheduler.type: warm-up is along a logarithm, by default; nearest: scheduler.params.warmup_type = "linear"'),
    ("a.json", f'{ARGUMENTS}, "fp16": true, "bf16": true}}', 'bf16: says "bfloat16" for precision.param, and a.json: fp16 says "float16"; remove one of them'),
    ("a.json", f'{ARGUMENTS}, "optim": "adafactor"}}', "optim = adafactor: no such optimizer here; nearest: adamw_torch"),
    ("a.json", f'{ARGUMENTS}, "warmup_steps": -1}}', "warmup_steps: -1 should be greater than or equal to 0"),
    ("a.json", f'{ARGUMENTS}, "learning_rat": 1}}', "learning_rat = 1: TrainingArguments has no such key; the nearest known key is learning_rate, or remove it"),
    ("a.json", '{"per_device_train_batch_size": 2, "warmup_ratio": 0.1, "learning_rate": 1e-4}', "warmup_ratio: 0.1 of the steps, and the steps follow from the data; give --steps N"),
    ("a.json", f'{ARGUMENTS}, "use_vllm": true, "num_generations": 9}}', "use_vllm, num_generations: is of a loss that is not here; nearest: stage = sft, or dpo"),
    ("a.yaml", "distributed_type: FSDP\nnum_machine: 2\n", "num_machine = 2: Accelerate has no such key; the nearest known key is num_machines, or remove it"),
    ("a.yaml", "distributed_type: MEGATRON_LM\n", "distributed_type = MEGATRON_LM: is migrated from Megatron-LM's own flags; nearest: FSDP"),
    ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF}\n", "fsdp_config.fsdp_sharding_strategy: HALF is not known here; nearest: one of full_shard, 1, shard_grad_op, 2, no_shard, 3, hybrid_shard, 4, hybrid_shard_zero2, _hybrid_shard_zero2, 5"),
    ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: z.json}\n", "deepspeed_config_file: z.json is not here; give that file too"),
    *(
        ("a.json", f'{ARGUMENTS}, "{key}": "x/z.json"}}', f"{key}: x/z.json is not here; give that file too")
        for key in ("deepspeed", "fsdp_config", "config_file")
    ),
    ("a.sh", "accelerate launch --config_file z.yaml train.py --learning_rate 1 --max_steps 2", "config_file: z.yaml is not here; give that file too"),
    ("a.json", f'{ARGUMENTS}, "beta": 0.1, "loss_type": "ipo"}}', "loss_type = ipo: no such loss here; nearest: sigmoid, which is DPO's"),
    ("a.json", f'{ARGUMENTS}, "deepspeed": {{"zero_optimization": {{"stage": 3}}}}}}', "deepspeed.zero_optimization.stage: is read in a file of its own; nearest: put it there, and give that file too"),
    ("a.json", f'{ARGUMENTS}, "stage": "dpo", "pref_ftx": 0.5, "use_dft_loss": false}}', "pref_ftx = 0.5: is of a loss that is not here; nearest: remove it"),
    ("a.json", f'{ARGUMENTS}, "beta": 0.1, "label_smoothing": 0.2}}', "label_smoothing = 0.2: the loss has no smoothing of labels here; nearest: 0"),
    *(
        ("a.yaml", f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {value}}}\n", f"deepspeed_config_file: {said} is not here; give that file too")
        for value, said in (("5", "5"), ("yes", "true"), ("[a]", '["a"]'), ("a" * 300, "a" * 57 + "..."))
    ),
    ("a.toml", TITAN.replace("10", "0x" + "f" * 4000), "training.steps: holds a number out of range"),
    ("a.toml", TITAN + f"[comm]\nnone = [[1], [0x{'f' * 4000}]]\n", "comm.none: holds a number out of range"),
    ("a.toml", TITAN + '[optimizer]\nname = "SGD"\n', "optimizer.name = SGD: no such optimizer here; nearest: AdamW"),
    ("a.toml", TITAN + '[model]\nname = "llama4"\nflavor = "debugmodel"\n', "model.name: llama4 debugmodel is no model here (known: llama3, llama2, qwen3, deepseek_v3, gpt_oss); docs/new-architecture.md says how to add one"),
    ("a.toml", TITAN.replace("local_batch", "local_bach"), "training.local_bach_size = 2: torchtitan has no such key; the nearest known key is training.local_batch_size, or remove it"),
    ("a.sh", f"{MEGATRON} --optimizer sgd", "--optimizer = sgd: no such optimizer here; nearest: adam"),
    ("a.sh", f"{MEGATRON} --tensor-model-parallel-siz 2", "--tensor-model-parallel-siz = 2: Megatron-LM has no such key; the nearest known key is --tensor-model-parallel-size, or remove it"),
    ("a.sh", f"{MEGATRON} --lr-decay-style WSD --lr-wsd-decay-iters 9", "--lr-decay-style: the decay at the end is exponential by default, and linear here; nearest: --lr-wsd-decay-style linear"),
    *(
        ("a.sh", f"{MEGATRON} --global-batch-size 8 --lr-decay-samples {value}", f"--lr-decay-samples: expected a whole number, got {said}")
        for value, said in (("1 2", "[1, 2]"), ("abc", '"abc"'))
    ),
    ("a.sh", f"{MEGATRON} --global-batch-size $GBS", "--global-batch-size: $GBS has no value in this script; write a value in its place"),
    ("a.sh", f"{MEGATRON}{SHAPE.replace('64', '4,096', 1)}", '--hidden-size: expected a whole number, got "4,096"'),
    ("a.json", DEEPSPEED % '"stage": 3, "mics_shard_size": "many"', 'zero_optimization.mics_shard_size: expected a whole number, got "many"'),
    ("a.sh", f"{MEGATRON} --tensor-model-parallel-size 3", "--world-size: 8 is not a multiple of tp 3 x cp 1 x pp 1 = 3; nearest: 9"),
    ("a.sh", f"{MEGATRON} --tensor-model-parallel-size 0", "--tensor-model-parallel-size: 0 should be greater than or equal to 1"),
    ("a.toml", TITAN + "[parallelism]\ncontext_parallel_degree = 0\n", "parallelism.context_parallel_degree: 0 should be greater than or equal to 1"),
]  # fmt: skip


def lines(path: Path, world: int = 8) -> list[str]:
    """The lines that refuse a file."""
    entries: list[str] = []

    def run() -> None:
        entries.extend(e.line for e in migrated([path], world)[1] if e.kind == "refused")

    return [*refusal(run).splitlines(), *entries]


@pytest.mark.parametrize(("name", "text", "expected"), BAD)
def test_bad_input(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = [line.removeprefix(f"{path}: ").removeprefix(f"{name}: ") for line in lines(path)]
    assert result == [expected.removeprefix(f"{name}: ")]


def test_files_that_are_no_text(tmp_path: Path) -> None:
    for name in ("a.json", "a.yaml", "a.toml", "a.sh"):
        (tmp_path / name).write_bytes('{"train_batch_size": 8}'.encode("utf-16"))
        assert lines(tmp_path / name) == [f"{tmp_path}/{name}: is not UTF-8 (byte 0); save it as UTF-8"]
    assert lines(tmp_path) == [f"{tmp_path}: cannot read it: is no file"]


def test_yaml_with_a_character_that_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("use_cpu: \x01\n")
    (line,) = lines(tmp_path / "a.yaml")
    assert line.startswith(f"{tmp_path}/a.yaml: YAML syntax: unacceptable character #x0001")


def test_a_number_that_yaml_takes_for_a_text(tmp_path: Path) -> None:
    """One with an exponent and no point."""
    text = "per_device_train_batch_size: 2\nlearning_rate: 1e-4\nmax_steps: 10\nlogging_steps: 1e2\n"
    (tmp_path / "a.yaml").write_text(text)
    text, entries = migrated([tmp_path / "a.yaml"], 8)
    assert "console_every = 100  # a.yaml: logging_steps\n" in text
    assert not [entry for entry in entries if entry.kind == "refused"]


def test_no_pyyaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("use_cpu: true\n")
    with mock.patch.dict(sys.modules, {"yaml": None}):
        text = refusal(read_leaves, tmp_path / "a.yaml")
    cure = "is YAML, which needs PyYAML; pip install 'dtensor-compose[migrate]'"
    assert text == f"{tmp_path / 'a.yaml'}: {cure}"


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TITAN)
    done = answered("-m", "compose", "migrate", str(tmp_path / "a.toml"), "--world-size=4")
    assert done.returncode == 0, done.stderr
    assert "local_batch_size = 2 -> train.micro_batch" in done.stderr
    (tmp_path / "b.toml").write_text(done.stdout)
    assert load(str(tmp_path / "b.toml")).train.global_batch == 8
    (tmp_path / "a.toml").write_text(TITAN + "[optimizer]\nlrr = 1\n")
    done = answered("-m", "compose", "migrate", str(tmp_path / "a.toml"), "--world-size=4")
    assert (done.returncode, done.stdout) == (2, "")
    assert answered("-m", "compose", "migrate").stderr == (
        "command line: migrate: needs FILE...; see --help\n"
    )


SCRIPT = """\
#!/bin/bash
# A comment --with-flags 3
GPUS=${GPUS:-8}; NODES=${2:-"4"}
WORLD=$(($GPUS * NODES))   # of all
DTYPE="fp8"
ARGS=(
    --lr 1e-4  # the rate
    # --min-lr 1
    --batch $((WORLD / 4))
    "--name 'a b'"
)
if [[ "$DTYPE" == "fp8" ]]; then
    ARGS+=(--fp8 hybrid)
else
    ARGS+=(--bf16)
fi
[ -d x ] && mkdir -p "$(dirname "$X")"
if [ -n "${KEY}" ]; then ARGS+=(--key $KEY); fi
MORE="
    --iters 10 \\
    --on
"
torchrun --nproc_per_node $GPUS \\
    train.py ${ARGS[@]} "${NONE[@]}" $MORE --save ${OUT}/x --neg -1 2>&1 | tee log.txt
"""


def test_a_script() -> None:
    assert command_line(SCRIPT)[:-1] == [
        ("launcher.--nproc_per_node", 8),
        ("--lr", 1e-4),
        ("--batch", 8),
        ("--name", ["a", "b"]),
        ("--fp8", "hybrid"),
        ("--iters", 10),
        ("--on", True),
        ("--save", "\0OUT/x"),
        ("--neg", -1),
    ]
    assert command_line(SCRIPT)[-1] == ("if", "[ -d x ]")


@pytest.mark.parametrize(
    "around",
    [
        *('echo "run #1"\n{}', 'echo "run #1"\n{}\necho "end #1"', "echo 'a # b'\n{} # don't"),
        *("echo it\\'s # isn't it\n{}", '{} --save "a\\\n#b"', 'A="\n -x \\\n"\n{} # "'),
    ],
)
def test_a_number_sign_in_quotes_begins_no_comment(around: str) -> None:
    expected = command_line(MEGATRON)
    assert command_line(around.format(MEGATRON))[: len(expected)] == expected


IF = """\
if [ "$M" = "7b" ]; then LR=1
elif [ "$M" = "13b" ]; then LR=2
else LR=3
fi
"""
CASE = """\
case "$M" in
  7b) LR=1 ;;
  13b|14b)
    LR=2
    ;;
  *) LR=3 ;;
esac
"""


@pytest.mark.parametrize(
    ("script", "rate"),
    [
        *((f"M={size}\n{text}", rate) for text in (IF, CASE) for size, rate in (("7b", 1), ("70b", 3))),
        (f"M=14b\n{CASE}", 2),
        (f"N=b\nM=70b\ncase $N in a) LR=4 ;; b) LR=5; {CASE} ;; *) LR=6 ;; esac", 3),
        ("N=1\nLR=1\nif [ $N -gt 1 ]; then LR=2; fi", 1),
        ("N=4\nLR=1\nif [ $N -ge 4 ]; then LR=2; fi", 2),
        ('LR=1\nif [ ! -z "$X" ]; then LR=2; fi', 1),
        ('T=true\nLR=1\nif $T && [ "$T" ]; then LR=2; fi', 2),
        ('T=\nLR=1\nif [ "$T" = "" ]; then LR=2; fi', 2),
        ('LR=1\nif [ -n "$X" ]; then [ -f x ] && LR=2; fi', 1),
        ("M=llama7b\nLR=1\nif [[ $M == *7b* ]]; then LR=2; fi", 2),
        ("A=1\nB=1\nLR=1\nif [ $A = 1 ] && [ $B = 2 ]; then LR=2; fi", 1),
        ('LR=1\n[[ -z "$LR" ]] && LR=2', 1),
        ('LR=1\n[ -n "$LR" ] || LR=2', 1),
        ("mkdir x || exit 1; cd x && LR=1", 1),
        ('LR=1\nwhile [ $# -gt 0 ]; do case "$1" in --lr) LR=$2; shift 2 ;; *) exit ;; esac; done', 1),
        ("A=9\nLR=${A:+2}${B:+1}", 2),
        ('case "$1" in a) LR=2 ;; *) LR=1 ;; esac', 1),
        ("LR=1\nwhile [ $# -gt 0 ]; do LR=2; done; for A in $@; do LR=3; done", 1),
        ("LR=1\nfor LR in 2; do :; done", 2),
        ("small() { LR=1; }\nbig() { LR=2; }\nfunction huge { LR=3; }\nsmall || LR=4", 1),
        ("f() {\n  local A=${1:-9}\n  shift\n  if [ $# -gt 0 ]; then LR=$1; fi\n}\nf 3 4", 4),
        ("f() { case $1 in a) LR=1 ;; *) LR=2 ;; esac; }\nf a", 1),
    ],
)
def test_a_branch_that_a_script_does_not_take(script: str, rate: int) -> None:
    words = 'torchrun train.py --lr $LR "$@" ${@:2}'
    assert command_line(f"{script}\n{words}") == [("--lr", rate)]


LOOP = "for LR in 1 2; do torchrun train.py --lr $LR; done"
LOOP_SAID = "is a loop of the script, of which one round is read"


@pytest.mark.parametrize(
    ("script", "leaves"),
    [
        ('f() { local A=$1; torchrun train.py --lr $A "${@:2}"; }\nf 2 --x 3', [("--lr", 2), ("--x", 3)]),
        ("f() {\n  torchrun train.py --lr 1\n}\nsrun bash -c f", [("--lr", 1)]),
        ("f() { echo --help; }\ng() { rm --force x; }\naccelerate launch -m x --lr 1", [("--lr", 1)]),
        (LOOP, [("--lr", "\0(LR)"), ("loop", "for LR in 1 2")]),
        ("for ((i=0; i<3; i++)); do x.py --seed $i; done", [("--seed", "\0(i)"), ("loop", "for")]),
        ("until x.py --seed 1; do sleep 5; done", [("--seed", 1), ("loop", "until x.py --seed 1")]),
        ("while true; do x.py --seed 1; done", [("--seed", 1)]),
        ("source env.sh\nx.py --lr ${LR:-1}", [("--lr", 1), ("source", "env.sh")]),
    ],
)  # fmt: skip
def test_functions_loops_and_other_scripts(script: str, leaves: list[tuple[str, Any]]) -> None:
    assert command_line(script) == leaves


def test_a_loop_is_said(tmp_path: Path) -> None:
    script = "N=1\nwhile [ $N -lt 8 ]; do N=$((N*2)); done\n"
    (tmp_path / "a.sh").write_text(f"{script}{MEGATRON} --global-batch-size 8 --log-interval $N")
    said = [e.line for e in migrated([tmp_path / "a.sh"], 8)[1] if e.kind == "changed in meaning"]
    assert f"a.sh: loop = while [ $N -lt 8 ]: {LOOP_SAID}" in said


@pytest.mark.parametrize("condition", ["[ -f x ]", "[[ $A =~ b ]]", "command -v python"])
def test_a_condition_that_is_not_followed(tmp_path: Path, condition: str) -> None:
    script = f"LR=1e-4\nif {condition}; then LR=2; fi\n{MEGATRON.replace('1e-4', '$LR')}"
    (tmp_path / "a.sh").write_text(f"{script} --global-batch-size 8")
    text, entries = migrated([tmp_path / "a.sh"], 8)
    assert "lr = 0.0001" in text
    why = "is a condition of the script that is not followed: what needs it to hold is left out"
    said = [entry.line for entry in entries if entry.kind == "changed in meaning"]
    assert f"a.sh: if = {condition}: {why}" in said


def rates(tmp_path: Path, name: str, text: str, world: int = 8, steps: int = 0) -> list[float]:
    """The learning rates of the first steps of a migrated file."""
    (tmp_path / name).write_text(text)
    toml, entries = migrated([tmp_path / name], world, steps)
    assert not [entry for entry in entries if entry.kind == "refused"], entries
    (tmp_path / "out.toml").write_text(toml)
    config = load(str(tmp_path / "out.toml"))
    return [learning_rate(step, config.train.steps, config.optimizer) for step in range(8)]


def test_warmup_begins_where_each_trainer_begins_it(tmp_path: Path) -> None:
    """transformers and Megatron-LM from 0, torchtitan above 0, DeepSpeed a step later."""
    hf = f'{ARGUMENTS}, "warmup_steps": 4}}'
    assert rates(tmp_path, "a.json", hf)[:5] == pytest.approx([0, 2.5e-5, 5e-5, 7.5e-5, 1e-4])
    half = hf.replace("4}", "0.4}")  # below 1 it is a ratio
    assert rates(tmp_path, "a.json", half) == rates(tmp_path, "a.json", hf)
    titan = rates(tmp_path, "a.toml", TITAN + "[optimizer]\nlr = 1.0\n")
    assert titan[:4] == pytest.approx([0.5, 1.0, 1.0, 7 / 8])
    megatron = f"{MEGATRON} --lr-warmup-iters 4 --min-lr 1e-5 --lr-decay-iters 6"
    expected = [0, 2.5e-5, 5e-5, 7.5e-5, 1e-4, 5.5e-5, 1e-5, 1e-5]
    assert rates(tmp_path, "a.sh", megatron) == pytest.approx(expected)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    optimizer = {"type": "Adam", "params": {"lr": 1.0}}
    both = {"train_batch_size": 8, "optimizer": optimizer, "scheduler": schedule}
    result = rates(tmp_path, "b.json", json.dumps(both))
    assert result == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1, 1])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--save /a --load /a", ""),
        ("--save $A --load $A --no-load-optim", ""),
        ("--save /a --load", ""),
        ("--save /a --load /a --finetune", "--load: /a: "),
        ("--save /a --load /b", "--load: /b: "),
        ("--save /a --pretrained-checkpoint $B", "--pretrained-checkpoint = $B: "),
    ],
)
def test_weights_that_megatron_begins_with(tmp_path: Path, flags: str, named: str) -> None:
    """The report lists them as to set, where --load does more than go on with a run."""
    (tmp_path / "a.sh").write_text(f"{MEGATRON} --global-batch-size 8 {flags}")
    _, entries = migrated([tmp_path / "a.sh"], 8)
    lines = [entry.line for entry in entries if entry.kind == "to set" and "load_hf" in entry.line]
    text = "weights are drawn until checkpoint.load_hf names these as a Hugging Face folder"
    assert lines == ([f"a.sh: {named}{text}"] if named else [])


def test_what_a_script_leaves_open(tmp_path: Path) -> None:
    """A folder's name and the number of ranks are to be set; a list of paths is said once."""
    script = """\
        FOLDER=<a folder>
        RANKS=$(python -c 'import torch; print(torch.cuda.device_count())')
        torchrun --nproc_per_node $RANKS pretrain_gpt.py --micro-batch-size 1 --train-iters 9 --save $FOLDER \
        --global-batch-size 8 --lr 1e-4 --data-path 0.5 a 0.5 b --window-size 64"""
    (tmp_path / "a.sh").write_text(script)
    text, entries = migrated([tmp_path / "a.sh"], 8)
    assert [entry.line for entry in entries if entry.kind == "to set"][:2] == [
        "a.sh: launcher.--nproc_per_node: $command has no value in this script, and the number of ranks is left out",
        "a.sh: --save: a name has no value in this script, and run.dir is left out",
    ]
    assert [entry.kind for entry in entries if "--data-path" in entry.line] == ["changed in meaning"]
    assert not [entry for entry in entries if entry.kind in ("refused", "unknown")], entries
    assert "global_batch = 8" in text


def test_a_flag_that_changes_the_layers(tmp_path: Path) -> None:
    """The model is then to be set, and not taken for one of ours."""
    for more, known in (("", True), (" --window-size 32", False), (" --softmax-type vanilla", True)):
        (tmp_path / "a.sh").write_text(MEGATRON + SHAPE + more)
        assert ('name = "llama"' in migrated([tmp_path / "a.sh"], 8)[0]) == known, more
    # Megatron-LM ties unless a flag unties. Without biases a model with learned positions is no GPT-2.
    for more, tied in (("", "true"), (" --untie-embeddings-and-output-weights", "false")):
        (tmp_path / "a.sh").write_text(MEGATRON + SHAPE + more)
        assert f"tie_embeddings = {tied}" in migrated([tmp_path / "a.sh"], 8)[0]
    learned = SHAPE.replace(" --swiglu --normalization RMSNorm", "").replace(
        " rope ", " learned_absolute "
    )
    flags = (("", True), (" --disable-bias-linear", False), (" --kv-channels 32", False))
    for more, known in (*flags, (" --kv-channels 16", True)):
        (tmp_path / "a.sh").write_text(f"{MEGATRON}{learned} --max-position-embeddings 64{more}")
        assert ('name = "gpt2"' in migrated([tmp_path / "a.sh"], 8)[0]) == known, more


@pytest.mark.parametrize(
    ("flags", "heads"),
    [
        ("--group-query-attention --num-query-groups 2", 2),
        ("--group-query-attention", 1),  # Megatron-LM's default of the other flag
        ("--num-query-groups 2", 4),  # which is not read alone
        ("--num-key-value-heads 2", 2),  # Megatron-DeepSpeed's
    ],
)
def test_query_groups(tmp_path: Path, flags: str, heads: int) -> None:
    (tmp_path / "a.sh").write_text(f"{MEGATRON}{SHAPE} {flags}")
    text, entries = migrated([tmp_path / "a.sh"], 8)
    assert f"n_kv_heads = {heads}  #" in text
    said = "--num-query-groups: is read with --group-query-attention alone"
    assert any(said in entry.line for entry in entries) == (heads == 4)
